//! What a link makes of a peer that does not keep to the rules: an error, whatever it is.

use super::*;
use crate::transport::fixtures::Random;
use crate::transport::verbs::wire::{CTS_BYTES, RECOVERY_WORDS};

#[test]
fn nonsense_is_a_disagreement() {
    let head = 64;
    let known = size_of::<[u64; RECOVERY_WORDS]>() as u32;
    for (imm, epoch, len) in [
        (ImmKind::Call, 1, 39),
        (ImmKind::Call, 3, 40),
        (ImmKind::Call, 0, 40),
        (ImmKind::EagerCall, 1, head - 1),
        (ImmKind::EagerCall, 1, head + LONG as u32),
        (ImmKind::Eager(0), 1, LONG as u32),
        (ImmKind::Eager(1), 1, 11),
        (ImmKind::Eager(EAGER_MESSAGES), 1, 10),
        (ImmKind::Cts(1), 1, 0),
        (ImmKind::Cts(1), 1, CTS_BYTES as u32 - 1),
        (ImmKind::Cts(1), 1, 2 * CTS_BYTES as u32),
        (ImmKind::Cts(33), 1, CTS_BYTES as u32),
        (ImmKind::Cts(40), 2, 33 * CTS_BYTES as u32),
        (ImmKind::Data(0), 1, LONG as u32 - 1),
        (ImmKind::Data(0), 2, LONG as u32),
        (ImmKind::Data(1), 1, 10),
        (ImmKind::Data(2), 1, 10),
        (ImmKind::Recovery(2), 0, known),
        (ImmKind::Recovery(0), 0, known - 8),
    ] {
        let mut ends = TwoEnds::new(2);
        ends.begin_at(0, 1);
        ends.post_recv(0, LONG);
        ends.post_recv(0, 10);
        let error = ends.links[0].received(0, imm.pack(epoch), len).expect_err("nonsense");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{imm:?}");
        assert_eq!(error.suspect(), Some(1));
        ends.links[0].check_if_needed().expect_err("the link is of no use any more");
    }
    for imm in [ImmKind::Call, ImmKind::Eager(1), ImmKind::Cts(1), ImmKind::Data(0)] {
        let mut ends = TwoEnds::new(2);
        ends.begin_at(0, 1);
        ends.post_recv(0, LONG);
        ends.post_recv(0, 10);
        let len = match imm {
            ImmKind::Call => 40,
            ImmKind::Cts(_) => CTS_BYTES,
            ImmKind::Data(_) => LONG,
            _ => 10,
        };
        ends.links[0].received(0, imm.pack(1), len as u32).expect("once");
        let error = ends.links[0].received(0, imm.pack(1), len as u32).expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{imm:?}");
    }
}

#[test]
fn a_message_as_long_as_nobody_expects_it_is_a_disagreement() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    ends.send(0, 1, LONG);
    ends.post_recv(1, LONG + 1);
    ends.transfer(1);
    assert!(ends.links[0].next_request().expect("the call").is_some());
    let error = ends.links[0].next_request().expect_err("the lengths differ");
    assert_eq!(error.kind(), ErrorKind::Disagreement);
    assert!(error.message().contains("expects 4098 bytes where this rank sends 4097"), "{error}");
}

#[test]
fn whatever_a_peer_writes_nothing_panics() {
    let mut numbers = Random(0x5eed);
    let mut random = || numbers.next();
    for _ in 0..10_000 {
        let mut ends = TwoEnds::new(2);
        ends.fill_remote(0, || random() >> (random() % 64));
        ends.begin_at(0, 1);
        for _ in 0..4 {
            ends.send(0, 1, 1 + random() as usize % (2 * LONG));
            ends.post_recv(0, 1 + random() as usize % (2 * LONG));
        }
        for _ in 0..1 + random() % 12 {
            let kinds = [
                random() as u32,
                (random() as u32 & 0xf800_0000) | (random() as u32 % 6),
                1 << 27 | (random() as u32 & 0xe000_0000) | (random() as u32 % 6),
            ];
            let lens = [random() as u32, random() as u32 % 8192, 104, 48, 40, 64, LONG as u32];
            let (imm, len) = (kinds[random() as usize % 3], lens[random() as usize % 7]);
            let peer_state = ends.links[0].received(random() as usize % 2, imm, len);
            if random().is_multiple_of(8) {
                ends.break_other_ends(0);
                ends.links[0].recover();
            }
            let mut events = Events::new();
            let outcome = peer_state
                .and_then(|()| ends.links[0].report(&mut events))
                .and_then(|()| ends.links[0].next_request().map(drop))
                .and_then(|()| ends.links[0].check());
            if let Err(error) = outcome {
                assert!(matches!(error.kind(), ErrorKind::Disagreement | ErrorKind::PeerLost), "{error}");
                break;
            }
        }
    }
}
