//! One end of a TLS session over a socket that does not block.
//!
//! Owns the buffers: bytes received and not yet decrypted, bytes decrypted and not yet taken, bytes encrypted
//!  and not yet sent. The socket stays with the caller, which may have used it without TLS before.
//!
//! A read takes what is buffered, and calls the socket once if that is nothing. Encrypted bytes are sent
//! together, so that a call of the socket carries several records. The bytes of a record count as sent when
//! the kernel has all of it, whether or not it has later records: else a message could wait for one behind
//! it.

use super::keys;
use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;

/// A value that both ends of a session know and that no other session has, not even one with the same keys.
pub type SessionBinding = [u8; 32];

/// The label by which the binding is derived.
const BINDING_LABEL: &[u8] = b"EXPORTER-flexring";

/// Encrypted bytes that may wait to be sent, and at most one record more.
const UNSENT_LIMIT: usize = 256 << 10;
/// The longest content of a record.
const RECORD: usize = 16 << 10;
/// Sessions that read so much at a time keep their buffers while they are idle.
const KEEPS_BUFFERS: usize = 64 << 10;

/// Which end of a session this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsRole {
    /// Sends the first message.
    Initiator,
    /// Waits for it.
    Acceptor,
}

/// One end of a session.
pub struct TlsSession {
    connection: Connection,
    /// Bytes that one call of the socket reads at most.
    chunk: usize,
    /// Room for received bytes. Those up to `filled` are received, and those up to `taken` decrypted.
    input: Vec<u8>,
    filled: usize,
    taken: usize,
    /// Number of decrypted bytes that are not read yet.
    decrypted: usize,
    /// Encrypted bytes. Those up to `sent` are sent.
    output: Vec<u8>,
    sent: usize,
    /// The records in `output` that are not sent completely: where each ends, and how many bytes it contains.
    records: VecDeque<(usize, usize)>,
    /// Whether the last read called the socket, which returned fewer bytes than it could.
    is_drained: bool,
    /// How many more bytes may be received. `None` once the other end is authenticated.
    allowance: Option<usize>,
}

impl TlsSession {
    /// Begins a session. Each call of the socket reads at most `chunk` bytes. The other end can send at most
    /// `allowance` bytes until [`lift_allowance`](Self::lift_allowance), and so occupy little more memory.
    ///
    /// # Errors
    /// `System` if there are no random numbers.
    pub fn new(role: TlsRole, chunk: usize, allowance: usize) -> Result<Self> {
        let keys = keys::of_this_process()?;
        let connection = match role {
            // The name is not sent, and no key depends on it.
            TlsRole::Initiator => {
                let name = ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
                ClientConnection::new(Arc::clone(&keys.client), name).map(Connection::from)
            }
            TlsRole::Acceptor => ServerConnection::new(Arc::clone(&keys.server)).map(Connection::from),
        };
        let mut connection =
            connection.map_err(|cause| Error::system(format!("cannot begin encryption: {cause}")))?;
        connection.set_buffer_limit(Some(RECORD));
        Ok(Self {
            connection,
            chunk,
            input: Vec::new(),
            filled: 0,
            taken: 0,
            decrypted: 0,
            output: Vec::new(),
            sent: 0,
            records: VecDeque::new(),
            is_drained: false,
            allowance: Some(allowance),
        })
    }

    /// Accepts any number of bytes from now on: the other end is authenticated.
    pub fn lift_allowance(&mut self) {
        self.allowance = None;
    }

    /// Adds bytes that the caller has read from the socket.
    ///
    /// # Errors
    /// `InvalidData` if the other end has sent more than it may.
    pub fn feed(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.count(bytes.len())?;
        self.input.truncate(self.filled);
        self.input.extend_from_slice(bytes);
        self.filled = self.input.len();
        Ok(())
    }

    /// The binding, once the handshake is complete.
    #[must_use]
    pub fn binding(&self) -> Option<SessionBinding> {
        if self.connection.is_handshaking() {
            return None;
        }
        self.connection.export_keying_material([0; 32], BINDING_LABEL, None).ok()
    }

    /// Whether [`read`](Self::read) may return bytes without calling the socket.
    #[must_use]
    pub fn has_buffered(&self) -> bool {
        self.decrypted > 0 || self.taken < self.filled
    }

    /// Whether nothing is buffered and the last [`read`](Self::read) found that the socket has no more bytes.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.is_drained && !self.has_buffered()
    }

    /// Whether there are bytes for [`send`](Self::send).
    #[must_use]
    pub fn wants_send(&self) -> bool {
        self.sent < self.output.len() || self.connection.wants_write()
    }

    /// Advances the handshake as far as the socket allows. Whether it is complete and sent.
    ///
    /// # Errors
    /// Any error of the socket but that it is not ready; `UnexpectedEof` if the other end has closed it;
    /// `InvalidData` if it sends anything else.
    pub fn advance_handshake(&mut self, socket: &TcpStream) -> io::Result<bool> {
        match self.try_handshake(socket) {
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => Ok(false),
            outcome => outcome,
        }
    }

    fn try_handshake(&mut self, socket: &TcpStream) -> io::Result<bool> {
        loop {
            self.send(socket)?;
            if self.wants_send() || !self.connection.is_handshaking() {
                return Ok(!self.wants_send());
            }
            if !self.has_buffered() && self.receive(socket)? == 0 {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "the connection was closed during the handshake",
                ));
            }
            self.decrypt()?;
        }
    }

    /// Reads decrypted bytes: 0 if the other end has closed the connection. During the handshake it reads no
    /// bytes but advances.
    ///
    /// # Errors
    /// Any error of the socket, also `WouldBlock`; `InvalidData` if the bytes are not what the other end has
    /// sent.
    pub fn read(&mut self, socket: &TcpStream, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // Bytes may have arrived since an earlier read.
        self.is_drained = false;
        loop {
            let count = self.take(into)?;
            if count > 0 || self.receive(socket)? == 0 {
                return Ok(count);
            }
        }
    }

    /// Encrypts bytes for [`send`](Self::send). The number of bytes encrypted, which is smaller if too many
    /// wait to be sent. Only after the handshake.
    ///
    /// # Errors
    /// `InvalidData` if the session is broken.
    pub fn encrypt(&mut self, mut parts: &mut [IoSlice<'_>]) -> io::Result<usize> {
        self.collect()?;
        let mut total = 0;
        while self.output.len() - self.sent < UNSENT_LIMIT {
            let count = self.connection.writer().write_vectored(parts)?;
            if count == 0 {
                break;
            }
            self.collect()?;
            self.records.push_back((self.output.len(), count));
            total += count;
            IoSlice::advance_slices(&mut parts, count);
        }
        Ok(total)
    }

    /// Moves what is encrypted to the output.
    fn collect(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.output)?;
        }
        Ok(())
    }

    /// Sends encrypted bytes as far as the socket takes them: all, unless [`wants_send`](Self::wants_send)
    /// afterwards. Returns how many more of the bytes that were given to [`encrypt`](Self::encrypt) are sent
    /// now.
    ///
    /// # Errors
    /// Any error of the socket but that it is not ready.
    pub fn send(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.collect()?;
        while self.sent < self.output.len() {
            // A program that links flexring may not ignore SIGPIPE.
            match rustix::net::send(socket, &self.output[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(cause) => return Err(cause.into()),
            }
        }
        let mut total = 0;
        while let Some((end, count)) = self.records.front()
            && *end <= self.sent
        {
            total += count;
            self.records.pop_front();
        }
        if self.sent == self.output.len() {
            self.sent = 0;
            self.output.clear();
            if self.chunk < KEEPS_BUFFERS {
                self.output = Vec::new();
            }
        }
        Ok(total)
    }

    /// Takes buffered bytes, decrypting what was received. The number of bytes.
    fn take(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for part in into {
            let mut rest = &mut part[..];
            while !rest.is_empty() {
                if self.decrypted == 0 {
                    self.decrypt()?;
                }
                if self.decrypted == 0 {
                    return Ok(total);
                }
                let count = self.connection.reader().read(rest)?;
                self.decrypted = self.decrypted.saturating_sub(count);
                total += count;
                rest = &mut rest[count..];
            }
        }
        Ok(total)
    }

    /// Decrypts received bytes until there are some to take, or all are decrypted.
    fn decrypt(&mut self) -> io::Result<()> {
        while self.decrypted == 0 && self.taken < self.filled {
            let mut rest = &self.input[self.taken..self.filled];
            let count = self.connection.read_tls(&mut rest)?;
            if count == 0 {
                return Err(io::Error::new(ErrorKind::InvalidData, "the other end has ended the encryption"));
            }
            self.taken += count;
            let state = self.connection.process_new_packets().map_err(|cause| {
                io::Error::new(ErrorKind::InvalidData, format!("it carried bytes that are not TLS: {cause}"))
            })?;
            self.decrypted = state.plaintext_bytes_to_read();
        }
        if self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
            if self.chunk < KEEPS_BUFFERS || self.allowance.is_some() {
                self.input = Vec::new();
            }
        }
        Ok(())
    }

    /// Reads from the socket once. The number of bytes. Only if all received bytes are decrypted.
    fn receive(&mut self, mut socket: &TcpStream) -> io::Result<usize> {
        self.input.resize(self.chunk, 0);
        let outcome = loop {
            match socket.read(&mut self.input) {
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                outcome => break outcome,
            }
        };
        (self.taken, self.filled) = (0, *outcome.as_ref().unwrap_or(&0));
        self.is_drained = self.filled < self.chunk;
        self.count(self.filled)?;
        outcome
    }

    fn count(&mut self, bytes: usize) -> io::Result<()> {
        let Some(allowance) = &mut self.allowance else { return Ok(()) };
        *allowance = allowance.checked_sub(bytes).ok_or_else(|| {
            io::Error::new(ErrorKind::InvalidData, "it carried too many bytes before it was authenticated")
        })?;
        Ok(())
    }
}

impl fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSession")
            .field("is_handshaking", &self.connection.is_handshaking())
            .finish_non_exhaustive()
    }
}
