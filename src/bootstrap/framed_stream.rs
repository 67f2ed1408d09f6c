//! Framed I/O over one control connection, never blocking.
//!
//! Owns the socket, its encryption, the frames that wait to be sent, and the bytes of an incomplete frame.
//!
//! A stream that is to be encrypted begins with plain frames. The end that connected decides when encryption
//! begins, and sends a mark. The other one accepts the mark between any two frames. What it receives before
//! is not encrypted: the codes of later frames cover the [`binding`](FramedStream::binding), so they must
//! come in encrypted ones.

use super::frame_decoder::{FrameDecoder, Unreadable};
use super::protocol::{Bytes, ENCRYPTED, FRAME_LIMIT, PART_ALLOWANCE};
use crate::error::{Error, Result};
use crate::process::{ClosedInChild, SocketRelay};
use crate::tls::{SessionBinding, TlsRole, TlsSession};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes that one call of the socket reads at most.
const CHUNK: usize = 16 << 10;
/// Memory of frames that wait to be sent, at most, besides what exchanges of many ranks need. An end that
/// reads never gets near it.
const UNSENT_LIMIT: usize = 2 * FRAME_LIMIT;
/// Memory that a queued frame takes besides its bytes.
const FRAME_OVERHEAD: usize = 64;
/// Bytes that TLS adds, at most, to what the other end of an encrypted stream sends before it is
/// authenticated.
const TLS_OVERHEAD: usize = 16 << 10;

/// How the bytes of a stream are protected.
#[derive(Debug)]
enum Encryption {
    /// Not at all.
    None,
    /// They will be encrypted. The other end can then send so many bytes until it is authenticated.
    Required { allowance: usize },
    /// They are encrypted, but for the first frames. The binding is known after the handshake.
    Begun { session: Box<TlsSession>, binding: Option<SessionBinding> },
}

/// The addresses of both ends of a control connection, which are known to reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlRoute {
    /// The one of this process.
    pub own: IpAddr,
    /// The one of the coordinator, which is in rank 0's process mostly.
    pub coordinator: IpAddr,
}

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct FramedStream {
    _closed_in_child: ClosedInChild,
    stream: TcpStream,
    cutter: FrameDecoder,
    /// Frames that were received before and are returned again.
    put_back: Vec<Vec<u8>>,
    outgoing: VecDeque<Bytes>,
    /// Memory of the queued frames, and how much it may be.
    unsent: usize,
    unsent_limit: usize,
    /// Bytes of the first queued frame that are already sent.
    sent: usize,
    encryption: Encryption,
    /// How many of the queued frames are sent without encryption, if it has begun.
    plain: usize,
    /// Whether the other end is authenticated.
    trusted: bool,
    /// Holds the socket, if `stream` is the relay's. Dropped after `stream`, whose end it waits for.
    relay: Option<SocketRelay>,
}

/// The result of one read.
#[derive(Debug, Default)]
pub(super) struct ReceivedFrames {
    /// Whether any bytes arrived.
    pub(super) any: bool,
    /// Complete frames, in order.
    pub(super) frames: Vec<Vec<u8>>,
    /// Why no more frames will arrive: a verb phrase whose subject is the connection, such as `closed`.
    pub(super) end: Option<String>,
    /// Why the bytes that arrived cannot be split into frames, if that is the end.
    pub(super) unreadable: Option<Unreadable>,
}

impl FramedStream {
    /// Takes over a connected socket. With `preamble` the peer's first bytes must be a preamble.
    pub(super) fn new(stream: TcpStream, preamble: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            _closed_in_child: ClosedInChild::new(stream.as_fd()),
            stream,
            cutter: FrameDecoder::new(preamble),
            put_back: Vec::new(),
            outgoing: VecDeque::new(),
            unsent: 0,
            unsent_limit: UNSENT_LIMIT,
            sent: 0,
            encryption: Encryption::None,
            plain: 0,
            trusted: false,
            relay: None,
        })
    }

    /// The addresses of both ends, before the relay starts.
    pub(super) fn route(&self) -> Option<ControlRoute> {
        let (own, coordinator) = (self.stream.local_addr().ok()?, self.stream.peer_addr().ok()?);
        Some(ControlRoute { own: own.ip(), coordinator: coordinator.ip() })
    }

    /// Lets another thread hold the socket, so that the other end soon learns that this process was killed.
    ///
    /// # Errors
    /// Those of the kernel. The stream is as it was then.
    pub(super) fn start_relay(&mut self) -> io::Result<()> {
        let (relay, local) = SocketRelay::start(self.stream.as_fd())?;
        self._closed_in_child = ClosedInChild::new(local.as_fd());
        // A local socket has the same operations as that of TCP, which is closed here.
        self.stream = TcpStream::from(local);
        self.relay = Some(relay);
        Ok(())
    }

    /// Requires that this stream is encrypted before it has a binding. The initiator then calls
    /// [`encrypt`](Self::encrypt); the acceptor waits for that. The other end can send about `limit` bytes
    /// until it is authenticated.
    pub(super) fn require_encryption(&mut self, role: TlsRole, limit: usize) {
        self.encryption = Encryption::Required { allowance: limit + TLS_OVERHEAD };
        if role == TlsRole::Acceptor {
            self.cutter.accept_encryption();
        }
    }

    /// Encrypts all frames that are queued from now on. For the end that connected.
    ///
    /// # Errors
    /// `System` if there are no random numbers; `Internal` if encryption is not required, or has begun.
    pub(super) fn encrypt(&mut self) -> Result<()> {
        self.enqueue(ENCRYPTED.as_slice().into());
        let rest = self.cutter.take_rest();
        self.begin_encryption(TlsRole::Initiator, &rest)
    }

    fn begin_encryption(&mut self, role: TlsRole, received: &[u8]) -> Result<()> {
        let Encryption::Required { allowance } = self.encryption else {
            return Err(Error::internal("a control connection cannot begin to encrypt twice"));
        };
        let mut session = TlsSession::new(role, CHUNK, allowance)?;
        // What is too long ends the connection with the next read.
        let _ = session.feed(received);
        if self.trusted {
            session.lift_allowance();
        }
        self.plain = self.outgoing.len();
        self.encryption = Encryption::Begun { session: Box::new(session), binding: None };
        Ok(())
    }

    /// Makes room for what the exchanges of a world of this size send at once.
    pub(super) fn make_room(&mut self, world: usize) {
        self.unsent_limit = UNSENT_LIMIT + world * PART_ALLOWANCE;
    }

    /// Accepts any number of bytes from now on: the other end is authenticated.
    pub(super) fn trust(&mut self) {
        self.trusted = true;
        if let Encryption::Begun { session, .. } = &mut self.encryption {
            session.lift_allowance();
        }
    }

    /// What the codes of this stream's ends must cover besides their messages: nothing if it is not to be
    /// encrypted, else the binding of its encryption. `None` until that is known.
    pub(super) fn binding(&self) -> Option<&[u8]> {
        match &self.encryption {
            Encryption::None => Some(&[]),
            Encryption::Required { .. } => None,
            Encryption::Begun { binding, .. } => binding.as_ref().map(SessionBinding::as_slice),
        }
    }

    /// Has the next [`receive`](Self::receive) return these frames first.
    pub(super) fn put_back(&mut self, frames: impl IntoIterator<Item = Vec<u8>>) {
        self.put_back.extend(frames);
    }

    /// Reads once, at most 16 KiB, so that no peer can keep the thread from the others. Frames longer than
    /// `limit` bytes end the connection.
    pub(super) fn receive(&mut self, limit: usize) -> ReceivedFrames {
        let mut received = ReceivedFrames::default();
        received.frames.append(&mut self.put_back);
        received.any = !received.frames.is_empty();
        let mut chunk = [0; CHUNK];
        if !matches!(self.encryption, Encryption::Begun { .. }) {
            match self.stream.read(&mut chunk) {
                Ok(0) => received.end = Some(self.how_it_ended()),
                Ok(count) => self.cut(&chunk[..count], limit, &mut received),
                Err(cause) if is_transient(&cause) => {}
                Err(cause) => received.end = Some(format!("broke ({cause})")),
            }
            let Some(rest) = self.cutter.take_encrypted() else {
                return received;
            };
            if let Err(error) = self.begin_encryption(TlsRole::Acceptor, &rest) {
                received.end = Some(format!("cannot be encrypted ({error})"));
                return received;
            }
        }
        self.receive_encrypted(&mut chunk, limit, &mut received);
        received
    }

    /// How the connection ended at which there is nothing more to read: a verb phrase.
    fn how_it_ended(&self) -> String {
        match self.relay.as_ref().and_then(SocketRelay::error) {
            Some(cause) => format!("broke ({cause})"),
            None => "closed".to_owned(),
        }
    }

    /// Reads once, and takes all that is decrypted.
    fn receive_encrypted(&mut self, chunk: &mut [u8], limit: usize, received: &mut ReceivedFrames) {
        let mut has_more = true;
        while has_more && received.end.is_none() {
            let Encryption::Begun { session, binding } = &mut self.encryption else {
                return;
            };
            let outcome = session.read(&self.stream, &mut [IoSliceMut::new(chunk)]);
            *binding = binding.or_else(|| session.binding());
            has_more = session.has_buffered();
            match outcome {
                Ok(0) => received.end = Some(self.how_it_ended()),
                Ok(count) => self.cut(&chunk[..count], limit, received),
                Err(cause) if is_transient(&cause) => return,
                Err(cause) => received.end = Some(format!("broke ({cause})")),
            }
        }
    }

    /// Splits received bytes into frames.
    fn cut(&mut self, bytes: &[u8], limit: usize, received: &mut ReceivedFrames) {
        received.any = true;
        self.cutter.append(bytes);
        loop {
            match self.cutter.next(limit) {
                Ok(Some(frame)) => received.frames.push(frame),
                Ok(None) => break,
                Err(cause) => {
                    received.unreadable = Some(cause);
                    received.end = Some("carried bytes that are not flexring frames".to_owned());
                    break;
                }
            }
        }
    }

    /// Queues a frame for [`flush`](Self::flush).
    pub(super) fn enqueue(&mut self, frame: Bytes) {
        self.unsent += frame.len() + FRAME_OVERHEAD;
        self.outgoing.push_back(frame);
    }

    /// Whether queued frames are not completely sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty() || self.session_wants_send()
    }

    fn session_wants_send(&self) -> bool {
        matches!(&self.encryption, Encryption::Begun { session, .. } if session.wants_send())
    }

    /// Sends as much as the socket accepts.
    ///
    /// # Errors
    /// That of the socket; also if more waits to be sent than may, because the other end does not read.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match self.try_flush() {
            Err(cause) if !is_transient(&cause) => Err(cause),
            _ if self.unsent > self.unsent_limit => Err(io::Error::other(format!(
                "{} MiB wait to be sent, because its other end does not read them",
                self.unsent >> 20
            ))),
            _ => Ok(()),
        }
    }

    fn try_flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.outgoing.front() {
            let rest = &frame[self.sent..];
            let count = match &mut self.encryption {
                Encryption::Begun { session, binding } if self.plain == 0 => {
                    session.send(&self.stream)?;
                    if binding.is_none() || session.wants_send() {
                        return Ok(());
                    }
                    session.encrypt(&mut [IoSlice::new(rest)])?
                }
                _ => self.stream.write(rest)?,
            };
            self.sent += count;
            if self.sent == frame.len() {
                self.unsent -= frame.len() + FRAME_OVERHEAD;
                self.outgoing.pop_front();
                self.plain = self.plain.saturating_sub(1);
                self.sent = 0;
            }
        }
        match &mut self.encryption {
            Encryption::Begun { session, .. } => session.send(&self.stream).map(drop),
            _ => Ok(()),
        }
    }

    /// Closes the sending direction. What the peer still sends can be received.
    pub(super) fn shut_down_write(&self) {
        // Fails only if the connection is gone, which the next `receive` reports.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// The events to poll for.
    pub(super) fn poll_flags(&self) -> PollFlags {
        let can_send = match &self.encryption {
            // Until the handshake is complete, frames wait for the other end.
            Encryption::Begun { binding: None, .. } if self.plain == 0 => self.session_wants_send(),
            _ => self.has_unsent(),
        };
        if can_send { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

impl Drop for FramedStream {
    fn drop(&mut self) {
        if self.relay.is_some() {
            // The relay must end, even if a process that this one has started holds a copy of the local
            // socket.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl AsFd for FramedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_transient(cause: &io::Error) -> bool {
    matches!(cause.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
