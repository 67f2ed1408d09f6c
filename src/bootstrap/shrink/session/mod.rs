//! One authenticated connection between two ranks that shrink.
//!
//! Owns its frames. The end that connected first sends an opening with a random number, and the other end
//! answers with another; each later frame carries an authentication code over both numbers, the direction and
//! its position, so that no frame can be forged, repeated or sent back. A notice has no position: it is sent
//! to a rank that sends nothing, and it stays true.
//!
//! The answer that the other rank is gone carries no such code, because the process has no key any more. It
//! repeats the random number of the opening, so it comes from a process that this end has reached, or that
//! reads the network in between. Either could also refuse the connection, which means the same.
//!
//! If the job is encrypted, encryption begins when the end that connected has the other one's answer.
//! Messages wait for it, and their codes cover its binding. A notice does not wait: a rank that sends nothing
//! gets it in plain text. While encryption begins, it needs another connection.

use super::frame::{
    SHRINK_MAGIC, SHRINK_VERSION, ServiceNumber, SessionNonce, ShrinkFrame, frame_limit, payload_of,
};
use super::message::{ShrinkMessage, ShrinkNotice};
use super::unidentified::OpenedConnection;
use crate::bootstrap::framed_stream::FramedStream;
use crate::bootstrap::protocol::{decode, encode};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::{SecretKey, random_bytes};
use crate::tls::TlsRole;
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// What all connections of one rank have in common.
#[derive(Clone, Debug)]
pub(super) struct SessionParams {
    /// Authenticates the ranks of the communicator.
    pub(super) key: SecretKey,
    pub(super) me: Rank,
    /// Number of ranks.
    pub(super) world: usize,
    pub(super) is_encrypted: bool,
}

/// What arrived on a connection.
#[derive(Debug, Default)]
pub(super) struct ReceivedMessages {
    pub(super) messages: Vec<ShrinkMessage>,
    pub(super) notices: Vec<ShrinkNotice>,
    /// Whether the other end has answered that the rank is gone.
    pub(super) is_gone: bool,
    /// Why no more will arrive.
    pub(super) end: Option<String>,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Session {
    stream: FramedStream,
    params: SessionParams,
    is_initiator: bool,
    nonce: SessionNonce,
    /// The rank of the other end. An accepted connection proves it by its first message.
    peer: Rank,
    peer_nonce: Option<SessionNonce>,
    authenticated: bool,
    sent: u64,
    received: u64,
    /// Messages that wait for the other end's answer, and for encryption.
    waiting: VecDeque<ShrinkMessage>,
    /// Longest frame that is accepted.
    limit: usize,
}

impl Session {
    /// Takes over a connection that this end has made to the rank `peer`.
    ///
    /// # Errors
    /// `System` if the socket cannot be used, or without random numbers.
    pub(super) fn connect(stream: TcpStream, params: &SessionParams, peer: Rank) -> Result<Self> {
        let stream = FramedStream::new(stream, false)
            .map_err(|cause| Error::io("cannot use a connection between ranks that shrink", cause))?;
        let mut session = Self::new(stream, params, peer, TlsRole::Initiator)?;
        let opening = ShrinkFrame::Opening {
            magic: SHRINK_MAGIC,
            version: SHRINK_VERSION,
            to: ServiceNumber::new(&params.key, peer),
            from: params.me,
            nonce: session.nonce,
        };
        session.stream.enqueue(encode(&opening)?);
        Ok(session)
    }

    /// Takes over a connection that was opened to this rank.
    ///
    /// # Errors
    /// `Rendezvous` if it claims to come from a rank that does not exist, or from this one; `System` without
    /// random numbers.
    pub(super) fn accept(connection: OpenedConnection, params: &SessionParams) -> Result<Self> {
        let OpenedConnection { stream, opening } = connection;
        if opening.from >= params.world || opening.from == params.me {
            return Err(Error::rendezvous("a connection between ranks that shrink names an impossible rank"));
        }
        let mut session = Self::new(stream, params, opening.from, TlsRole::Acceptor)?;
        session.peer_nonce = Some(opening.nonce);
        session.stream.enqueue(encode(&ShrinkFrame::Accepted { nonce: session.nonce })?);
        Ok(session)
    }

    fn new(mut stream: FramedStream, params: &SessionParams, peer: Rank, role: TlsRole) -> Result<Self> {
        let limit = frame_limit(params.world);
        if params.is_encrypted {
            stream.require_encryption(role, limit);
        }
        Ok(Self {
            stream,
            params: params.clone(),
            is_initiator: role == TlsRole::Initiator,
            nonce: random_bytes()?,
            peer,
            peer_nonce: None,
            authenticated: false,
            sent: 0,
            received: 0,
            waiting: VecDeque::new(),
            limit,
        })
    }

    /// The rank of the other end, once it is authenticated or if this end connected to it.
    pub(super) fn peer(&self) -> Option<Rank> {
        (self.is_initiator || self.authenticated).then_some(self.peer)
    }

    pub(super) fn is_initiator(&self) -> bool {
        self.is_initiator
    }

    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Whether queued frames are not completely sent. Messages that wait for the other end do not count: if
    /// it never answers, it needs none of them, because they say no more than the end of the connection.
    pub(super) fn has_unsent(&self) -> bool {
        self.stream.has_unsent()
    }

    /// Queues a message. It is sent once the other end has answered, and encryption has begun if it must.
    pub(super) fn send(&mut self, message: ShrinkMessage) -> Result<()> {
        self.waiting.push_back(message);
        self.seal_waiting()
    }

    /// Whether a notice can be sent now, as the other end expects it: not while encryption begins, which
    /// needs the other end.
    pub(super) fn can_notify(&self) -> bool {
        let is_plain = self.is_initiator && self.peer_nonce.is_none();
        is_plain || self.stream.binding().is_some()
    }

    /// Queues a notice, which does not wait for anything from the other end.
    pub(super) fn send_notice(&mut self, notice: &ShrinkNotice) -> Result<()> {
        let payload = payload_of(notice)?;
        let code = self.params.key.mac("notice", &[&(self.peer as u64).to_le_bytes(), &payload]);
        self.stream.enqueue(encode(&ShrinkFrame::Notice { code, payload })?);
        Ok(())
    }

    fn seal_waiting(&mut self) -> Result<()> {
        let Some(peer_nonce) = self.peer_nonce else { return Ok(()) };
        while let Some(binding) = self.stream.binding()
            && let Some(message) = self.waiting.front()
        {
            let payload = payload_of(message)?;
            let parts = self.authenticated_parts(&peer_nonce, binding, true, self.sent, &payload);
            let code = self.params.key.mac("message", &parts.parts());
            self.stream.enqueue(encode(&ShrinkFrame::Message { code, payload })?);
            self.sent += 1;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// What the code of a message covers. `binding` is that of the connection; `outgoing` if this end sends
    /// the message.
    fn authenticated_parts<'a>(
        &'a self,
        peer_nonce: &'a [u8; 16],
        binding: &'a [u8],
        outgoing: bool,
        position: u64,
        payload: &'a [u8],
    ) -> MessageParts<'a> {
        let (me, peer) = (self.params.me, self.peer);
        let (first, second) =
            if self.is_initiator { (&self.nonce, peer_nonce) } else { (peer_nonce, &self.nonce) };
        let (from, to) = if outgoing { (me, peer) } else { (peer, me) };
        MessageParts {
            nonces: [first, second],
            binding,
            by_initiator: [u8::from(self.is_initiator == outgoing)],
            numbers: [(from as u64).to_le_bytes(), (to as u64).to_le_bytes(), position.to_le_bytes()],
            payload,
        }
    }

    /// Reads once.
    pub(super) fn receive(&mut self) -> ReceivedMessages {
        let mut received = ReceivedMessages::default();
        let input = self.stream.receive(self.limit);
        received.end = input.end;
        for bytes in &input.frames {
            if let Err(why) = self.on_frame(bytes, &mut received) {
                received.end = Some(why.to_owned());
                break;
            }
        }
        // The handshake of the encryption may be complete now.
        if self.seal_waiting().is_err() {
            received.end.get_or_insert_with(|| "cannot be used".to_owned());
        }
        received
    }

    fn on_frame(
        &mut self,
        bytes: &[u8],
        received: &mut ReceivedMessages,
    ) -> std::result::Result<(), &'static str> {
        match decode::<ShrinkFrame>(bytes).ok_or("carried an invalid frame")? {
            ShrinkFrame::Opening { .. } => Err("carried a second opening"),
            ShrinkFrame::Accepted { nonce } => {
                if !self.is_initiator || self.peer_nonce.is_some() {
                    return Err("carried an unexpected answer");
                }
                self.peer_nonce = Some(nonce);
                if self.stream.binding().is_none() {
                    self.stream.encrypt().map_err(|_| "cannot be encrypted")?;
                }
                Ok(())
            }
            ShrinkFrame::Gone { nonce } => {
                if !self.is_initiator || self.peer_nonce.is_some() || nonce != self.nonce {
                    return Err("carried an unexpected answer");
                }
                received.is_gone = true;
                Err("is with a process that has freed the communicator")
            }
            ShrinkFrame::Message { code, payload } => {
                let nonce = self.peer_nonce.ok_or("carried a message before an answer")?;
                let binding = self.stream.binding().ok_or("carried a message before it was encrypted")?;
                let parts = self.authenticated_parts(&nonce, binding, false, self.received, &payload);
                if !self.params.key.verify("message", &parts.parts(), &code) {
                    return Err("carried a forged message");
                }
                self.received += 1;
                self.authenticated = true;
                self.stream.trust();
                received.messages.push(decode(&payload).ok_or("carried an invalid message")?);
                Ok(())
            }
            ShrinkFrame::Notice { code, payload } => {
                if !self.params.key.verify(
                    "notice",
                    &[&(self.params.me as u64).to_le_bytes(), &payload],
                    &code,
                ) {
                    return Err("carried a forged notice");
                }
                received.notices.push(decode(&payload).ok_or("carried an invalid notice")?);
                Ok(())
            }
        }
    }

    /// Sends as much as the socket accepts.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }

    /// The events to poll for.
    pub(super) fn poll_flags(&self) -> PollFlags {
        self.stream.poll_flags()
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The parts of a message that its code covers.
struct MessageParts<'a> {
    /// Of the end that connected, and of the other one.
    nonces: [&'a [u8; 16]; 2],
    /// Of the encryption.
    binding: &'a [u8],
    by_initiator: [u8; 1],
    /// Sender, receiver, position.
    numbers: [[u8; 8]; 3],
    payload: &'a [u8],
}

impl MessageParts<'_> {
    fn parts(&self) -> [&[u8]; 8] {
        let [from, to, position] = &self.numbers;
        [self.nonces[0], self.nonces[1], self.binding, &self.by_initiator, from, to, position, self.payload]
    }
}

#[cfg(test)]
mod tests;
