//! A peer that violates the protocol is an error, whatever it writes.

use super::*;
use crate::transport::verbs::wire::{CALL_BYTES, CTS_BYTES, RECOVERY_BYTES};
use fastrand::Rng;
use flexring_testkit::effort::cases;

const CALL: u32 = CALL_BYTES as u32;
const CTS: u32 = CTS_BYTES as u32;
const RECOVERY: u32 = RECOVERY_BYTES as u32;
/// Bytes before the message in an eager call.
const HEAD: u32 = 64;

/// Rank 0 in epoch 1, with receives posted for a long message and an eager one.
fn receiver() -> TwoEnds {
    let mut ends = TwoEnds::new(2);
    ends.begin_at(0, 1);
    ends.post_recv(0, LONG);
    ends.post_recv(0, 10);
    ends
}

#[test]
fn invalid_writes_are_a_disagreement() {
    for (kind, epoch, len) in [
        (ImmKind::Call, 1, CALL - 1),
        (ImmKind::Call, 3, CALL),
        (ImmKind::Call, 0, CALL),
        (ImmKind::EagerCall(10), 1, HEAD + 9),
        (ImmKind::EagerCall(LONG as u32), 1, HEAD + LONG as u32),
        (ImmKind::Eager(0, LONG as u32), 1, LONG as u32),
        (ImmKind::Eager(0, 10), 1, 11),
        (ImmKind::Eager(EAGER_MESSAGES, 10), 1, 10),
        (ImmKind::Cts(0, 1), 1, 0),
        (ImmKind::Cts(1, 1), 1, CTS - 1),
        (ImmKind::Cts(1, 2), 1, 2 * CTS),
        (ImmKind::Cts(33, 1), 1, CTS),
        (ImmKind::Cts(40, 32), 2, 32 * CTS),
        (ImmKind::Data(0), 2, LONG as u32),
        (ImmKind::Data(1), 1, 10),
        (ImmKind::Data(2), 1, 10),
        (ImmKind::Recovery(2, 0), 0, RECOVERY),
        (ImmKind::Recovery(0, 0), 0, RECOVERY - 8),
    ] {
        let mut ends = receiver();
        let imm = ImmData { kind, epoch }.pack();
        let error = ends.links[0].received(0, imm, len).expect_err("a violation");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{kind:?}");
        assert_eq!(error.suspect(), Some(1));
        ends.links[0].check_if_needed().expect_err("the link is unusable");
    }
}

#[test]
fn the_hello_of_a_rank_with_another_key_is_a_disagreement() {
    let key = |text: &[u8]| SecretKey::from_parts("test", &[text]);
    for (theirs, is_known) in [(b"key", true), (b"Key", false)] {
        let TwoEnds { links: [mine, other], memory: _memory, .. } = TwoEnds::new(1);
        let (mut mine, mut other) = (mine.with_key(0, &key(b"key")), other.with_key(1, &key(theirs)));
        let hello = other.hello(0).expect("alive").imm.expect("a hello has immediate data");
        assert_eq!(mine.received(0, hello, 0).is_ok(), is_known);
        assert_eq!(mine.hello_received(0), is_known);
        // An echo is not the peer's.
        let echo = mine.hello(0).map(|hello| hello.imm.expect("a hello has immediate data"));
        if let Ok(echo) = echo {
            mine.received(0, echo, 0).expect_err("an echo");
        }
    }
}

#[test]
fn a_write_that_arrives_twice_is_a_disagreement() {
    for (kind, len) in [
        (ImmKind::Call, CALL),
        (ImmKind::Eager(1, 10), 10),
        (ImmKind::Cts(1, 1), CTS),
        (ImmKind::Data(0), LONG as u32),
    ] {
        let mut ends = receiver();
        let imm = ImmData { kind, epoch: 1 }.pack();
        ends.links[0].received(0, imm, len).expect("once");
        let error = ends.links[0].received(0, imm, len).expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{kind:?}");
    }
}

#[test]
fn another_length_is_reported_after_the_peers_call() {
    // What the receiver expects, what the sender sends, by which the error is found, and whether the sender's
    // call arrives with it.
    let cases = [
        (100, 99, "sent 99 bytes where 100 were expected", true),
        (LONG, 10, "sent 10 bytes where 4097 were expected", true),
        (LONG, LONG + 1, "expects 4097 bytes where this rank sends 4098", false),
        (10, LONG, "", true),
    ];
    for (expected, sent, problem, at_receiver) in cases {
        let mut ends = TwoEnds::new(1);
        ends.begin(1);
        ends.send(0, 1, sent);
        ends.post_recv(1, expected);
        // Each link hears of the other's call and of the length at the same time.
        (0..2).for_each(|me| ends.transfer(me));
        (0..2).for_each(|me| drop(ends.requests(me)));
        for me in 0..2 {
            let events = ends.events(me);
            assert!(
                matches!(events[..], [Event::PeerEntered { .. }, ..]),
                "the call comes first: {events:?}"
            );
        }
        let found = usize::from(at_receiver);
        assert_eq!(ends.links[found].must_disagree(), !problem.is_empty());
        let report = ends.links[found].report(&mut Events::new());
        if problem.is_empty() {
            report.expect("a message without a CTS is not sent");
            continue;
        }
        let error = report.expect_err("the lengths differ");
        assert_eq!((error.kind(), error.suspect()), (ErrorKind::Disagreement, Some(1 - found)));
        assert!(error.message().contains(problem), "{error}");
        ends.links[found].check_if_needed().expect_err("the link is unusable");
    }
}

#[test]
fn data_of_another_length_is_reported() {
    let mut ends = receiver();
    ends.begin_at(1, 1);
    // Over another queue pair, and therefore before the call.
    let imm = ImmData { kind: ImmKind::Data(0), epoch: 1 }.pack();
    ends.links[0].received(1, imm, LONG as u32 - 1).expect("reported later");
    assert!(ends.events(0).is_empty() && !ends.links[0].must_disagree());
    (0..2).for_each(|me| ends.transfer(me));
    assert!(matches!(ends.events(0)[..], [Event::PeerEntered { .. }]));
    let error = ends.links[0].report(&mut Events::new()).expect_err("the length is wrong");
    assert!(error.message().contains("sent 4096 bytes where 4097 were expected"), "{error}");
}

#[test]
fn random_writes_never_panic() {
    let mut numbers = Rng::with_seed(0x5eed);
    let mut random = || numbers.u64(..);
    let runs = cases(10_000);
    let (mut accepted, mut rejected) = (0, 0);
    for _ in 0..runs {
        let mut ends = TwoEnds::new(2);
        ends.fill_remote(0, || random() >> (random() % 64));
        ends.begin_at(0, 1);
        for _ in 0..4 {
            ends.send(0, 1, 1 + random() as usize % (2 * LONG));
            ends.post_recv(0, 1 + random() as usize % (2 * LONG));
        }
        for _ in 0..1 + random() % 12 {
            // Any bits; any kind and epoch with a small number; any kind of epoch 1 with a small number.
            let imms = [
                random() as u32,
                (random() as u32 & 0xf800_0000) | (random() as u32 % 6),
                1 << 27 | (random() as u32 & 0xe000_0000) | (random() as u32 % 6),
            ];
            let imm = imms[random() as usize % 3];
            // As a driver reports it, or leaves it out, or any.
            let written = ImmData::unpack(imm).kind.bytes().unwrap_or(LONG as u32);
            let lens = [random() as u32, random() as u32 % 8192, written, written, 0];
            let len = lens[random() as usize % 5];
            let received = ends.links[0].received(random() as usize % 2, imm, len);
            if random().is_multiple_of(8) {
                ends.break_other_ends(0);
                ends.links[0].recover();
            }
            let mut events = Events::new();
            let outcome = received
                .and_then(|_| ends.links[0].report(&mut events))
                .and_then(|()| ends.links[0].next_request().map(drop))
                .and_then(|()| ends.links[0].check());
            if let Err(error) = outcome {
                assert!(matches!(error.kind(), ErrorKind::Disagreement | ErrorKind::PeerLost), "{error}");
                rejected += 1;
                break;
            }
            accepted += 1;
        }
    }
    // Both outcomes are common: the writes are neither all valid nor all invalid.
    assert!(accepted >= runs / 10 && rejected >= runs / 2, "{accepted} writes accepted, {rejected} rejected");
}
