//! A connected socket of a link, plain or encrypted.
//!
//! Owns which bytes travel encrypted: all behind the initiator's hello, if at all; and which connections are
//! within a machine.

use crate::error::Result;
use crate::tls::{SessionBinding, TlsRole, TlsSession};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Encrypted bytes that one system call reads at most.
const CHUNK: usize = 128 << 10;
/// Encrypted bytes that the other end can send until it is authenticated.
const ALLOWANCE: usize = 16 << 10;

/// What all TCP links of a rank have in common. Peers must have the same sockets and encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Number of sockets of each link, at least 1.
    pub sockets_per_link: usize,
    /// Whether the links are encrypted by TLS.
    pub is_encrypted: bool,
    /// The time that joining may take.
    pub connect_timeout: Duration,
}

/// The result of one send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SendProgress {
    /// Bytes that the kernel has taken, and whose memory may change now.
    pub sent: usize,
    /// Whether the socket may take more.
    pub writable: bool,
}

/// Whether a connection between these addresses stays within this machine, as far as they tell: network
/// namespaces of one machine have different ones.
pub(super) fn is_within_machine(own: IpAddr, peer: IpAddr) -> bool {
    own == peer || own.is_loopback()
}

/// A connected socket that does not block.
#[derive(Debug)]
pub(super) struct LinkSocket {
    socket: TcpStream,
    encryption: Option<Box<LinkEncryption>>,
}

/// The encryption of a socket.
#[derive(Debug)]
struct LinkEncryption {
    session: TlsSession,
    /// Once the handshake is complete.
    binding: Option<SessionBinding>,
    /// How many of the bytes given to sends are encrypted, and not reported as sent.
    encrypted: usize,
}

impl LinkSocket {
    /// A socket whose bytes are not encrypted.
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, encryption: None }
    }

    /// The socket.
    pub fn get(&self) -> &TcpStream {
        &self.socket
    }

    /// Encrypts all further bytes. The handshake follows by [`advance`](Self::advance).
    ///
    /// # Errors
    /// `System` if there are no random numbers.
    pub fn encrypt(&mut self, role: TlsRole) -> Result<()> {
        let session = TlsSession::new(role, CHUNK, ALLOWANCE)?;
        self.encryption = Some(Box::new(LinkEncryption { session, binding: None, encrypted: 0 }));
        Ok(())
    }

    /// Accepts any number of bytes from now on: the other end is authenticated.
    pub fn trust(&mut self) {
        if let Some(encryption) = &mut self.encryption {
            encryption.session.lift_allowance();
        }
    }

    /// Advances the handshake of the encryption as far as the socket allows. Whether it is complete, as it
    /// always is without encryption.
    pub fn advance(&mut self) -> io::Result<bool> {
        let Some(encryption) = &mut self.encryption else { return Ok(true) };
        if encryption.binding.is_none() && encryption.session.advance_handshake(&self.socket)? {
            encryption.binding = encryption.session.binding();
        }
        Ok(encryption.binding.is_some())
    }

    /// What the codes of both ends must cover besides their messages: the binding of the encryption, if there
    /// is one. Only once [`advance`](Self::advance) is complete.
    pub fn binding(&self) -> &[u8] {
        let binding = self.encryption.as_ref().and_then(|encryption| encryption.binding.as_ref());
        binding.map_or(&[], SessionBinding::as_slice)
    }

    /// Reads bytes of a handshake.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.encryption {
            Some(encryption) => encryption.session.read(&self.socket, &mut [IoSliceMut::new(into)]),
            None => (&self.socket).read(into),
        }
    }

    /// Sends a message of a handshake, which always fits into the send buffer of a new connection.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let partial = || io::Error::other("the handshake could not be sent in one piece");
        let sent = match &mut self.encryption {
            Some(encryption) => {
                encryption.session.encrypt(&mut [IoSlice::new(message)])?;
                encryption.session.send(&self.socket)?
            }
            None => (&self.socket).write(message)?,
        };
        if sent == message.len() { Ok(()) } else { Err(partial()) }
    }

    /// Whether reading may return bytes although the kernel has none.
    pub fn has_buffered(&self) -> bool {
        self.encryption.as_ref().is_some_and(|encryption| encryption.session.has_buffered())
    }

    /// Whether encrypted bytes wait to be sent.
    pub fn has_unsent(&self) -> bool {
        self.encryption.as_ref().is_some_and(|encryption| encryption.session.wants_send())
    }

    /// Sends bytes from the beginning of `parts`, `length` in all. Encrypted bytes count as sent once the
    /// kernel has their record: until then, each call must begin with the same bytes.
    ///
    /// # Errors
    /// Any error of the socket but that it is not ready.
    pub fn send_parts(&mut self, parts: &mut [IoSlice<'_>], length: usize) -> io::Result<SendProgress> {
        let Some(encryption) = &mut self.encryption else {
            // A program that links flexring may not ignore SIGPIPE.
            let mut no_descriptors = SendAncillaryBuffer::default();
            let outcome = rustix::net::sendmsg(&self.socket, parts, &mut no_descriptors, SendFlags::NOSIGNAL);
            return match outcome {
                // The kernel takes fewer bytes only if its buffer is full, and then reports when there is
                // room again.
                Ok(sent) => Ok(SendProgress { sent, writable: sent == length }),
                Err(Errno::AGAIN) => Ok(SendProgress { sent: 0, writable: false }),
                Err(Errno::INTR) => Ok(SendProgress { sent: 0, writable: true }),
                Err(cause) => Err(cause.into()),
            };
        };
        if encryption.encrypted == 0 && length > 0 {
            encryption.encrypted = encryption.session.encrypt(parts)?;
        }
        let sent = encryption.session.send(&self.socket)?;
        encryption.encrypted -= sent;
        Ok(SendProgress { sent, writable: !encryption.session.wants_send() })
    }

    /// Reads to `parts`, `length` bytes at most. The number of bytes, 0 if the other end has closed the
    /// connection, and whether there may be more now.
    ///
    /// # Errors
    /// Any error of the socket, also `WouldBlock`; `InvalidData` if encrypted bytes are not what the other
    /// end has sent.
    pub fn receive_parts(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        length: usize,
    ) -> io::Result<(usize, bool)> {
        let Some(encryption) = &mut self.encryption else {
            let count = loop {
                match rustix::io::readv(&self.socket, parts) {
                    Err(Errno::INTR) => {}
                    outcome => break outcome?,
                }
            };
            return Ok((count, count == length));
        };
        let count = encryption.session.read(&self.socket, parts)?;
        Ok((count, !encryption.session.is_drained()))
    }

    /// Shuts the socket down in both directions.
    pub fn shut(&self) {
        // Fails if the peer has closed the connection already, which is fine.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
