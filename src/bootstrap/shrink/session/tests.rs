//! Two ends of a connection, and attackers between them.

use super::super::message::Stance;
use super::super::unidentified::{Routing, UnidentifiedConnections};
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

/// One of four ranks.
fn params(key: &str, me: Rank, is_encrypted: bool) -> SessionParams {
    SessionParams { key: SecretKey::from_parts("test", &[key.as_bytes()]), me, world: 4, is_encrypted }
}

/// The connection that was opened at `far`.
fn opened(far: TcpStream) -> OpenedConnection {
    let mut unidentified = UnidentifiedConnections::default();
    unidentified.add(far, Instant::now()).expect("a connection");
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        unidentified.receive(&[true], frame_limit(4));
        if let Some((_, connection)) = unidentified.route(Instant::now(), |_| Routing::To(0)).pop() {
            return connection;
        }
        assert!(Instant::now() < until, "no opening arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Takes over the connection that was opened to this rank at `far`.
fn accept(far: TcpStream, params: &SessionParams) -> Session {
    Session::accept(opened(far), params).expect("a session")
}

/// Rank 3, which connects, and rank 1, whose answer is not sent.
fn pair(is_encrypted: [bool; 2]) -> (Session, Session) {
    let (near, far) = connection();
    let mut one = Session::connect(near, &params("job", 3, is_encrypted[0]), 1).expect("a session");
    one.flush().expect("a connection");
    (one, accept(far, &params("job", 1, is_encrypted[1])))
}

/// Sends what is queued at `from`, and receives at `to` until something arrives.
fn transfer(from: &mut Session, to: &mut Session) -> ReceivedMessages {
    from.flush().expect("a connection");
    receive(to)
}

fn receive(to: &mut Session) -> ReceivedMessages {
    let until = Instant::now() + Duration::from_secs(10);
    let had_answer = to.peer_nonce.is_some();
    loop {
        let received = to.receive();
        let any = !received.messages.is_empty() || !received.notices.is_empty() || received.end.is_some();
        if any || (!had_answer && to.peer_nonce.is_some()) {
            return received;
        }
        assert!(Instant::now() < until, "nothing arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
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
fn messages_wait_for_the_answer_and_name_their_sender() {
    let (mut one, mut other) = pair([false; 2]);
    one.send(state(1)).expect("queued");
    assert!(!one.has_unsent(), "the message waits");
    assert_eq!((one.peer(), other.peer()), (Some(1), None), "anyone can send an opening");
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
fn a_notice_needs_no_answer_and_is_for_one_rank_only() {
    for (receiver, is_encrypted) in [(1, false), (1, true), (2, false)] {
        let (near, far) = connection();
        let mut one = Session::connect(near, &params("job", 0, is_encrypted), 1).expect("a session");
        let notice = ShrinkNotice { generation: 0, members: vec![0, 3] };
        one.send(state(1)).expect("queued");
        one.send_notice(&notice).expect("queued");
        one.flush().expect("a connection");
        assert!(!one.has_unsent(), "the message waits");
        drop(one);
        let received = receive(&mut accept(far, &params("job", receiver, is_encrypted)));
        if receiver == 1 {
            assert_eq!(received.notices, [notice]);
        } else {
            assert_eq!(received.end.as_deref(), Some("carried a forged notice"));
        }
    }
}

/// Lets both ends of an encrypted connection complete their handshake.
fn encrypted_pair() -> (Session, Session) {
    let (mut one, mut other) = pair([true; 2]);
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
fn a_plain_message_ends_the_session_of_an_encrypted_job() {
    let (mut plain, mut other) = pair([false, true]);
    plain.send(state(1)).expect("queued");
    transfer(&mut other, &mut plain);
    let end = transfer(&mut plain, &mut other).end;
    assert_eq!(end.as_deref(), Some("carried a message before it was encrypted"));
}

/// Two ranks that talk through an attacker.
struct Intercepted {
    one: Session,
    other: Session,
    /// The attacker's ends of the connections with each of them.
    wires: [TcpStream; 2],
    /// Opening and first message of `one`. The message has not reached the other one.
    frames: [Vec<u8>; 2],
}

impl Intercepted {
    fn new(other_key: &str) -> Self {
        let ((near, mut wire_near), (far, mut wire_far)) = (connection(), connection());
        let mut one = Session::connect(near, &params("job", 3, false), 1).expect("a session");
        one.send(state(1)).expect("queued");
        one.flush().expect("a connection");
        let opening = frame_on(&mut wire_near);
        wire_far.write_all(&opening).expect("a connection");
        let mut other = accept(far, &params(other_key, 1, false));
        other.flush().expect("a connection");
        wire_near.write_all(&frame_on(&mut wire_far)).expect("a connection");
        receive(&mut one);
        one.flush().expect("a connection");
        let message = frame_on(&mut wire_near);
        Self { one, other, wires: [wire_near, wire_far], frames: [opening, message] }
    }

    /// Why `other` ends the connection after these bytes.
    fn end_after(mut self, bytes: &[u8]) -> String {
        self.wires[1].write_all(bytes).expect("a connection");
        loop {
            if let Some(end) = receive(&mut self.other).end {
                return end;
            }
        }
    }
}

#[test]
fn forged_repeated_and_reflected_frames_end_a_session() {
    let intercepted = Intercepted::new("job");
    let twice = intercepted.frames[1].repeat(2);
    assert_eq!(intercepted.end_after(&twice), "carried a forged message");
    let intercepted = Intercepted::new("another job");
    let message = intercepted.frames[1].clone();
    assert_eq!(intercepted.end_after(&message), "carried a forged message");
    let intercepted = Intercepted::new("job");
    let mut changed = intercepted.frames[1].clone();
    *changed.last_mut().expect("a byte") ^= 1;
    assert_eq!(intercepted.end_after(&changed), "carried a forged message");
    let mut intercepted = Intercepted::new("job");
    let reflected = intercepted.frames[1].clone();
    intercepted.wires[0].write_all(&reflected).expect("a connection");
    assert_eq!(receive(&mut intercepted.one).end.as_deref(), Some("carried a forged message"));
    let intercepted = Intercepted::new("job");
    let opening = intercepted.frames[0].clone();
    assert_eq!(intercepted.end_after(&opening), "carried a second opening");
    let garbage = Intercepted::new("job").end_after(&[3, 0, 0, 0, 9, 9, 9]);
    assert_eq!(garbage, "carried an invalid frame");
}

#[test]
fn a_rank_counts_as_gone_only_by_the_answer_to_its_opening() {
    // As it is, with another random number, and after the rank has answered.
    for (wrong, answers) in [(false, false), (true, false), (false, true)] {
        let (near, mut wire) = connection();
        let mut one = Session::connect(near, &params("job", 3, false), 1).expect("a session");
        one.flush().expect("a connection");
        let opening = decode::<ShrinkFrame>(&frame_on(&mut wire)[4..]);
        let Some(ShrinkFrame::Opening { mut nonce, .. }) = opening else {
            panic!("the first frame is {opening:?}");
        };
        if answers {
            let answer = encode(&ShrinkFrame::Accepted { nonce: [7; 16] }).expect("short");
            wire.write_all(&answer).expect("a connection");
            receive(&mut one);
        }
        nonce[3] ^= u8::from(wrong);
        let answer = encode(&ShrinkFrame::Gone { nonce }).expect("short");
        wire.write_all(&answer).expect("a connection");
        let received = receive(&mut one);
        assert_eq!(received.is_gone, !wrong && !answers);
        assert!(received.end.is_some(), "the connection is of no use");
    }
}

#[test]
fn an_opening_that_names_an_impossible_rank_is_refused() {
    for from in [1, 4, usize::MAX] {
        let (near, far) = connection();
        let mut forger = Session::connect(near, &params("job", from, false), 1).expect("a session");
        forger.flush().expect("a connection");
        assert!(Session::accept(opened(far), &params("job", 1, false)).is_err(), "rank {from}");
    }
}
