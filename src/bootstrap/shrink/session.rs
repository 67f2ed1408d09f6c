//! One authenticated connection between two ranks that shrink.
//!
//! Owns its frames. Each end first sends an opening with a random number; each later frame carries an authentication code
//! over both numbers, the direction and its position, so that no frame can be forged, repeated or sent back. A notice has
//! no position: it is sent to a rank that sends nothing, and it stays true. Must not know what the messages mean.
//!
//! If the job is encrypted, encryption begins when the end that connected has the other one's opening. Messages wait for it, and
//! their codes cover its binding. A notice does not wait: a rank that sends nothing gets it in plain text. While encryption begins, it
//! needs another connection.

use super::message::{ShrinkMessage, ShrinkNotice};
use crate::bootstrap::framed_stream::FramedStream;
use crate::bootstrap::protocol::{decode, encode};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::{AuthenticationCode, SecretKey, random_bytes};
use crate::tls::TlsRole;
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// The first bytes of an opening.
const SHRINK_MAGIC: [u8; 8] = *b"flexshrk";
/// Version of these frames.
const SHRINK_VERSION: u32 = 3;
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
    /// Messages that wait for the other end's opening, and for encryption.
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
        is_encrypted: bool,
    ) -> Result<Self> {
        let mut stream = FramedStream::new(stream, false)
            .map_err(|cause| Error::io("cannot use a connection between ranks that shrink", cause))?;
        // Three lists of ranks with at most five bytes each, and an error message.
        let limit = 16 * world + (64 << 10);
        if is_encrypted {
            let role = if peer.is_some() { TlsRole::Initiator } else { TlsRole::Acceptor };
            stream.require_encryption(role, limit);
        }
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
            limit,
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

    /// Whether queued frames are not completely sent. Messages that wait for the other end do not count: if it never opens, it needs
    /// none of them, because they say no more than the end of the connection.
    pub(super) fn has_unsent(&self) -> bool {
        self.stream.has_unsent()
    }

    /// Queues a message. It is sent once the other end has opened, and encryption has begun if it must.
    pub(super) fn send(&mut self, message: ShrinkMessage) -> Result<()> {
        self.waiting.push_back(message);
        self.seal_waiting()
    }

    /// Whether a notice can be sent now, as the other end expects it: not while encryption begins, which needs the other end.
    pub(super) fn can_notify(&self) -> bool {
        let is_plain = self.is_initiator && self.peer_nonce.is_none();
        is_plain || self.stream.binding().is_some()
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
        while let Some(binding) = self.stream.binding()
            && let Some(message) = self.waiting.front()
        {
            let payload = postcard_bytes(message)?;
            let parts = self.authenticated_parts(&peer_nonce, binding, true, self.sent, &payload);
            let code = self.key.mac("message", &parts.parts());
            self.stream.enqueue(encode(&ShrinkFrame::Message { code, payload })?);
            self.sent += 1;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// What the code of a message covers. `binding` is that of the connection; `outgoing` if this end sends the message.
    fn authenticated_parts<'a>(
        &'a self,
        peer_nonce: &'a [u8; 16],
        binding: &'a [u8],
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
            ShrinkFrame::Opening { magic, version, from, nonce } => {
                if magic != SHRINK_MAGIC || version != SHRINK_VERSION || self.peer_nonce.is_some() {
                    return Err("carried an invalid opening");
                }
                if *self.peer.get_or_insert(from) != from || from == self.me {
                    return Err("is with another rank");
                }
                self.peer_nonce = Some(nonce);
                if self.is_initiator && self.stream.binding().is_none() {
                    self.stream.encrypt().map_err(|_| "cannot be encrypted")?;
                }
                Ok(())
            }
            ShrinkFrame::Message { code, payload } => {
                let nonce = self.peer_nonce.ok_or("carried no opening")?;
                let binding = self.stream.binding().ok_or("carried a message before it was encrypted")?;
                let parts = self.authenticated_parts(&nonce, binding, false, self.received, &payload);
                if !self.key.verify("message", &parts.parts(), &code) {
                    return Err("carried a forged message");
                }
                self.received += 1;
                self.authenticated = true;
                self.stream.trust();
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

fn postcard_bytes(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|cause| Error::internal(format!("cannot encode a message of a shrink: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::super::message::Stance;
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        (near, listener.accept().expect("a connection").0)
    }

    fn state(generation: u64) -> ShrinkMessage {
        ShrinkMessage::State { generation, stance: Stance::NotCalled }
    }

    fn key(text: &str) -> SecretKey {
        SecretKey::from_parts("test", &[text.as_bytes()])
    }

    /// Sends what is queued at `from`, and receives at `to` until something arrives.
    fn transfer(from: &mut Session, to: &mut Session) -> ReceivedMessages {
        from.flush().expect("a connection");
        receive(to)
    }

    fn receive(to: &mut Session) -> ReceivedMessages {
        let until = Instant::now() + Duration::from_secs(10);
        let had_opening = to.peer_nonce.is_some();
        loop {
            let received = to.receive();
            let any = !received.messages.is_empty() || !received.notices.is_empty() || received.end.is_some();
            if any || (!had_opening && to.peer_nonce.is_some()) {
                return received;
            }
            assert!(Instant::now() < until, "nothing arrives");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Receives notices, which may arrive apart from the opening.
    fn receive_notices(to: &mut Session) -> Vec<ShrinkNotice> {
        let notices = receive(to).notices;
        if notices.is_empty() { receive(to).notices } else { notices }
    }

    /// Reads a frame as an attacker on the wire does, with its length.
    fn frame_on(wire: &mut TcpStream) -> Vec<u8> {
        let mut frame = vec![0; 4];
        wire.read_exact(&mut frame).expect("a length");
        let length = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
        frame.resize(4 + length, 0);
        wire.read_exact(&mut frame[4..]).expect("a frame");
        frame
    }

    #[test]
    fn messages_wait_for_the_opening_and_name_their_sender() {
        let (near, far) = connection();
        let mut one = Session::new(near, key("job"), 3, Some(1), 4, false).expect("a session");
        let mut other = Session::new(far, key("job"), 1, None, 4, false).expect("a session");
        one.send(state(1)).expect("queued");
        assert_eq!((one.peer(), other.peer()), (Some(1), None));
        assert!(transfer(&mut one, &mut other).messages.is_empty(), "only the opening was sent");
        assert_eq!(other.peer(), None, "anyone can send an opening");
        transfer(&mut other, &mut one);
        one.send(state(2)).expect("queued");
        let mut messages = transfer(&mut one, &mut other).messages;
        if messages.len() == 1 {
            messages.extend(receive(&mut other).messages);
        }
        assert_eq!(messages, [state(1), state(2)]);
        assert_eq!(other.peer(), Some(3));
    }

    #[test]
    fn a_notice_needs_no_answer() {
        let (near, far) = connection();
        let mut one = Session::new(near, key("job"), 0, Some(2), 3, false).expect("a session");
        let notice = ShrinkNotice { generation: 0, members: vec![0, 1] };
        one.send_notice(&notice).expect("queued");
        one.flush().expect("a connection");
        drop(one);
        let mut stopped = Session::new(far, key("job"), 2, None, 3, false).expect("a session");
        assert_eq!(receive_notices(&mut stopped), [notice]);
    }

    /// Lets both ends of an encrypted connection complete their handshake.
    fn encrypted_pair() -> (Session, Session) {
        let (near, far) = connection();
        let mut one = Session::new(near, key("job"), 3, Some(1), 4, true).expect("a session");
        let mut other = Session::new(far, key("job"), 1, None, 4, true).expect("a session");
        let until = Instant::now() + Duration::from_secs(10);
        while one.stream.binding().is_none() || other.stream.binding().is_none() {
            for end in [&mut one, &mut other] {
                end.flush().expect("a connection");
                assert_eq!(end.receive().end, None);
            }
            assert!(Instant::now() < until, "the handshake takes too long");
        }
        (one, other)
    }

    #[test]
    fn messages_of_an_encrypted_job_wait_for_encryption() {
        let (mut one, mut other) = encrypted_pair();
        assert_eq!(one.stream.binding(), other.stream.binding());
        for (message, notice) in [(state(1), 0), (state(2), 1)] {
            one.send(message.clone()).expect("queued");
            assert_eq!(transfer(&mut one, &mut other).messages, std::slice::from_ref(&message));
            other.send(message.clone()).expect("queued");
            assert_eq!(transfer(&mut other, &mut one).messages, [message]);
            let notice = ShrinkNotice { generation: notice, members: vec![1] };
            one.send_notice(&notice).expect("queued");
            assert_eq!(transfer(&mut one, &mut other).notices, [notice]);
        }
        assert!(one.is_authenticated() && other.is_authenticated());
    }

    #[test]
    fn a_notice_of_an_encrypted_job_needs_no_answer() {
        let (near, far) = connection();
        let mut one = Session::new(near, key("job"), 0, Some(2), 3, true).expect("a session");
        let notice = ShrinkNotice { generation: 0, members: vec![0, 1] };
        one.send(state(1)).expect("queued");
        one.send_notice(&notice).expect("queued");
        one.flush().expect("a connection");
        assert!(!one.has_unsent(), "the message waits");
        drop(one);
        let mut stopped = Session::new(far, key("job"), 2, None, 3, true).expect("a session");
        assert_eq!(receive_notices(&mut stopped), [notice]);
    }

    #[test]
    fn a_plain_message_ends_the_session_of_an_encrypted_job() {
        let (near, far) = connection();
        let mut plain = Session::new(near, key("job"), 3, Some(1), 4, false).expect("a session");
        let mut other = Session::new(far, key("job"), 1, None, 4, true).expect("a session");
        plain.send(state(1)).expect("queued");
        other.flush().expect("a connection");
        receive(&mut plain);
        let end = transfer(&mut plain, &mut other).end.or_else(|| receive(&mut other).end);
        assert_eq!(end.as_deref(), Some("carried a message before it was encrypted"));
    }

    /// Connects two ranks through an attacker, lets `attack` send what it likes to the second one, and returns why that
    /// one ends the connection. `attack` gets the wire to it, and the frames of the first one: opening and a message.
    fn end_after(other_key: &str, attack: impl FnOnce(&mut TcpStream, &[Vec<u8>])) -> String {
        let ((near, mut wire_near), (far, mut wire_far)) = (connection(), connection());
        let mut one = Session::new(near, key("job"), 3, Some(1), 4, false).expect("a session");
        let mut other = Session::new(far, key(other_key), 1, None, 4, false).expect("a session");
        one.send(state(1)).expect("queued");
        other.flush().expect("a connection");
        let opening = frame_on(&mut wire_far);
        wire_near.write_all(&opening).expect("a connection");
        receive(&mut one);
        one.flush().expect("a connection");
        let frames = [frame_on(&mut wire_near), frame_on(&mut wire_near)];
        attack(&mut wire_far, &frames);
        loop {
            if let Some(end) = receive(&mut other).end {
                return end;
            }
        }
    }

    #[test]
    fn forged_repeated_and_reflected_frames_end_a_session() {
        let send = |wire: &mut TcpStream, frames: &[&Vec<u8>]| {
            frames.iter().for_each(|frame| wire.write_all(frame).expect("a connection"));
        };
        let repeated = end_after("job", |wire, frames| send(wire, &[&frames[0], &frames[1], &frames[1]]));
        assert_eq!(repeated, "carried a forged message");
        let foreign = end_after("another job", |wire, frames| send(wire, &[&frames[0], &frames[1]]));
        assert_eq!(foreign, "carried a forged message");
        let changed = end_after("job", |wire, frames| {
            let mut message = frames[1].clone();
            *message.last_mut().expect("a byte") ^= 1;
            send(wire, &[&frames[0], &message]);
        });
        assert_eq!(changed, "carried a forged message");
        let unopened = end_after("job", |wire, frames| send(wire, &[&frames[1]]));
        assert_eq!(unopened, "carried no opening");
        let twice = end_after("job", |wire, frames| send(wire, &[&frames[0], &frames[0]]));
        assert_eq!(twice, "carried an invalid opening");
        let garbage =
            end_after("job", |wire, _| wire.write_all(&[3, 0, 0, 0, 9, 9, 9]).expect("a connection"));
        assert_eq!(garbage, "carried an invalid frame");
    }
}
