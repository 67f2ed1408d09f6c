//! One authenticated connection between two ranks that shrink.
//!
//! Owns its frames. Each end first sends an opening with a random number; each later frame carries an authentication code
//! over both numbers, the direction and its position, so that no frame can be forged, repeated or sent back. A notice has
//! no position: it is sent to a rank that sends nothing, and it stays true. Must not know what the messages mean.

use super::message::{ShrinkMessage, ShrinkNotice};
use crate::bootstrap::framed_stream::FramedStream;
use crate::bootstrap::protocol::{decode, encode};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::{AuthenticationCode, SecretKey, random_bytes};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// The first bytes of an opening.
const SHRINK_MAGIC: [u8; 8] = *b"flexshrk";
/// Version of these frames.
const SHRINK_VERSION: u32 = 1;
/// What travels on the connection.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
enum ShrinkFrame {
    Opening { magic: [u8; 8], version: u32, from: Rank, nonce: [u8; 16] },
    Message { code: AuthenticationCode, payload: Vec<u8> },
    Notice { code: AuthenticationCode, payload: Vec<u8> },
}

/// What arrived on a connection.
#[derive(Debug, Default)]
pub(super) struct ReceivedMessages {
    pub(super) messages: Vec<ShrinkMessage>,
    pub(super) notices: Vec<ShrinkNotice>,
    /// Why no more will arrive.
    pub(super) end: Option<String>,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Session {
    stream: FramedStream,
    key: SecretKey,
    me: Rank,
    is_initiator: bool,
    nonce: [u8; 16],
    /// The other end: its rank, known from the start if this end connected to it, and its random number.
    peer: Option<Rank>,
    peer_nonce: Option<[u8; 16]>,
    authenticated: bool,
    sent: u64,
    received: u64,
    /// Messages that wait for the other end's opening.
    waiting: VecDeque<ShrinkMessage>,
    /// Longest frame that is accepted.
    limit: usize,
}

impl Session {
    /// Takes over a connection. `peer` is the rank that this end connected to; `None` for an accepted connection.
    pub(super) fn new(
        stream: TcpStream,
        key: SecretKey,
        me: Rank,
        peer: Option<Rank>,
        world: usize,
    ) -> Result<Self> {
        let stream = FramedStream::new(stream, false)
            .map_err(|cause| Error::io("cannot use a connection between ranks that shrink", cause))?;
        let mut session = Self {
            stream,
            key,
            me,
            is_initiator: peer.is_some(),
            nonce: random_bytes()?,
            peer,
            peer_nonce: None,
            authenticated: false,
            sent: 0,
            received: 0,
            waiting: VecDeque::new(),
            // Three lists of ranks with at most five bytes each, and an error message.
            limit: 16 * world + (64 << 10),
        };
        let (magic, version) = (SHRINK_MAGIC, SHRINK_VERSION);
        let opening = ShrinkFrame::Opening { magic, version, from: me, nonce: session.nonce };
        session.stream.enqueue(encode(&opening)?);
        Ok(session)
    }

    /// The rank of the other end, once it is authenticated or if this end connected to it.
    pub(super) fn peer(&self) -> Option<Rank> {
        self.peer.filter(|_| self.is_initiator || self.authenticated)
    }

    pub(super) fn is_initiator(&self) -> bool {
        self.is_initiator
    }

    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.stream.has_unsent()
    }

    /// Queues a message. It is sent once the other end has opened.
    pub(super) fn send(&mut self, message: ShrinkMessage) -> Result<()> {
        self.waiting.push_back(message);
        self.seal_waiting()
    }

    /// Queues a notice, which does not wait for anything from the other end.
    pub(super) fn send_notice(&mut self, notice: &ShrinkNotice) -> Result<()> {
        let payload = postcard_bytes(notice)?;
        let code = self.key.mac("notice", &[&payload]);
        self.stream.enqueue(encode(&ShrinkFrame::Notice { code, payload })?);
        Ok(())
    }

    fn seal_waiting(&mut self) -> Result<()> {
        let Some(peer_nonce) = self.peer_nonce else { return Ok(()) };
        while let Some(message) = self.waiting.pop_front() {
            let payload = postcard_bytes(&message)?;
            let code = self
                .key
                .mac("message", &self.authenticated_parts(&peer_nonce, true, self.sent, &payload).parts());
            self.sent += 1;
            self.stream.enqueue(encode(&ShrinkFrame::Message { code, payload })?);
        }
        Ok(())
    }

    /// What the code of a message covers. `outgoing` if this end sends it.
    fn authenticated_parts<'a>(
        &'a self,
        peer_nonce: &'a [u8; 16],
        outgoing: bool,
        position: u64,
        payload: &'a [u8],
    ) -> MessageParts<'a> {
        let peer = self.peer.unwrap_or(Rank::MAX);
        let (first, second) =
            if self.is_initiator { (&self.nonce, peer_nonce) } else { (peer_nonce, &self.nonce) };
        let (from, to) = if outgoing { (self.me, peer) } else { (peer, self.me) };
        MessageParts {
            nonces: [first, second],
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
        received
    }

    fn on_frame(
        &mut self,
        bytes: &[u8],
        received: &mut ReceivedMessages,
    ) -> std::result::Result<(), &'static str> {
        match decode::<ShrinkFrame>(bytes).ok_or("carried an invalid frame")? {
            ShrinkFrame::Opening { magic, version, from, nonce } => {
                if magic != SHRINK_MAGIC || version != SHRINK_VERSION || self.peer_nonce.is_some() {
                    return Err("carried an invalid opening");
                }
                if *self.peer.get_or_insert(from) != from || from == self.me {
                    return Err("is with another rank");
                }
                self.peer_nonce = Some(nonce);
                self.seal_waiting().map_err(|_| "cannot be used")
            }
            ShrinkFrame::Message { code, payload } => {
                let nonce = self.peer_nonce.ok_or("carried no opening")?;
                let parts = self.authenticated_parts(&nonce, false, self.received, &payload);
                if !self.key.verify("message", &parts.parts(), &code) {
                    return Err("carried a forged message");
                }
                self.received += 1;
                self.authenticated = true;
                received.messages.push(decode(&payload).ok_or("carried an invalid message")?);
                Ok(())
            }
            ShrinkFrame::Notice { code, payload } => {
                if !self.key.verify("notice", &[&payload], &code) {
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
    by_initiator: [u8; 1],
    /// Sender, receiver, position.
    numbers: [[u8; 8]; 3],
    payload: &'a [u8],
}

impl MessageParts<'_> {
    fn parts(&self) -> [&[u8]; 7] {
        let [from, to, position] = &self.numbers;
        [self.nonces[0], self.nonces[1], &self.by_initiator, from, to, position, self.payload]
    }
}

fn postcard_bytes(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|cause| Error::internal(format!("cannot encode a message of a shrink: {cause}")))
}
