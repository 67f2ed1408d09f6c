//! Accepted connections whose handshake is not complete, and the messages of handshakes as they arrive.
//!
//! Owns how far such a connection is. Must not know which peers are expected, nor what the messages mean.

use super::handshake::{CHALLENGE, HELLO, PROOF};
use std::io::{self, ErrorKind as Io, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

/// A message of a handshake that is being received.
#[derive(Debug)]
pub(super) struct HandshakeBuffer<const BYTES: usize> {
    bytes: [u8; BYTES],
    len: usize,
}

impl<const BYTES: usize> HandshakeBuffer<BYTES> {
    pub(super) const EMPTY: Self = Self { bytes: [0; BYTES], len: 0 };

    /// Reads on. `Some` when the message is complete; reads no byte beyond it.
    pub(super) fn read(&mut self, mut from: &TcpStream) -> io::Result<Option<[u8; BYTES]>> {
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
    pub(super) socket: TcpStream,
    pub(super) address: SocketAddr,
    pub(super) stage: Stage,
    pub(super) deadline: Instant,
}

/// How far the handshake of an accepted connection is.
#[derive(Debug)]
pub(super) enum Stage {
    /// The hello is being received.
    AwaitHello(HandshakeBuffer<HELLO>),
    /// The challenge is sent, and the proof is being received.
    AwaitProof { hello: [u8; HELLO], challenge: [u8; CHALLENGE], proof: HandshakeBuffer<PROOF> },
}

/// Sends a message of a handshake, which always fits into the send buffer of a new connection.
pub(super) fn send(mut socket: &TcpStream, message: &[u8]) -> io::Result<()> {
    match socket.write(message)? {
        count if count == message.len() => Ok(()),
        _ => Err(io::Error::other("the handshake could not be sent in one piece")),
    }
}
