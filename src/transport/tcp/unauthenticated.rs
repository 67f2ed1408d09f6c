//! Accepted connections whose handshake is not complete, and the messages of handshakes as they arrive.
//!
//! Owns how far such a connection is.

use super::handshake::{CHALLENGE, HELLO, PROOF};
use super::socket::LinkSocket;
use std::io::{self, ErrorKind as Io};
use std::net::SocketAddr;
use std::time::Instant;

/// A message of a handshake that is being received.
#[derive(Debug)]
pub(super) struct HandshakeBuffer<const BYTES: usize> {
    bytes: [u8; BYTES],
    len: usize,
}

impl<const BYTES: usize> HandshakeBuffer<BYTES> {
    pub(super) const EMPTY: Self = Self { bytes: [0; BYTES], len: 0 };

    /// Reads on. `Some` when the message is complete; takes no byte beyond it.
    pub(super) fn read(&mut self, from: &mut LinkSocket) -> io::Result<Option<[u8; BYTES]>> {
        while self.len < BYTES {
            match from.read(&mut self.bytes[self.len..]) {
                Ok(0) => {
                    return Err(io::Error::new(
                        Io::UnexpectedEof,
                        "the connection was closed during the handshake",
                    ));
                }
                Ok(read) => self.len += read,
                Err(cause) if cause.kind() == Io::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == Io::Interrupted => {}
                Err(cause) => return Err(cause),
            }
        }
        Ok(Some(self.bytes))
    }
}

/// An accepted connection whose handshake is not complete.
#[derive(Debug)]
pub(super) struct Unauthenticated {
    pub(super) socket: LinkSocket,
    pub(super) address: SocketAddr,
    pub(super) stage: Stage,
    pub(super) deadline: Instant,
}

/// How far the handshake of an accepted connection is.
#[derive(Debug)]
pub(super) enum Stage {
    /// The hello is being received.
    Hello(HandshakeBuffer<HELLO>),
    /// The hello has arrived, and the handshake of the encryption follows.
    Encryption([u8; HELLO]),
    /// The challenge is sent, and the proof is being received.
    Proof { hello: [u8; HELLO], challenge: [u8; CHALLENGE], proof: HandshakeBuffer<PROOF> },
}
