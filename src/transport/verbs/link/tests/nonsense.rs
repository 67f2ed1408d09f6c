//! What a link makes of a peer that does not keep to the rules: an error, whatever it is.

use super::*;
use crate::transport::fixtures::Random;
use crate::transport::verbs::wire::{GRANT_BYTES, KNOWN_WORDS};

#[test]
fn nonsense_is_a_disagreement() {
    let head = 64;
    let known = size_of::<[u64; KNOWN_WORDS]>() as u32;
    for (word, turn, len) in [
        (Word::Call, 1, 39),
        (Word::Call, 3, 40),
        (Word::Call, 0, 40),
        (Word::EagerCall, 1, head - 1),
        (Word::EagerCall, 1, head + LONG as u32),
        (Word::Eager(0), 1, LONG as u32),
        (Word::Eager(1), 1, 11),
        (Word::Eager(EAGER), 1, 10),
        (Word::Grants(1), 1, 0),
        (Word::Grants(1), 1, GRANT_BYTES as u32 - 1),
        (Word::Grants(1), 1, 2 * GRANT_BYTES as u32),
        (Word::Grants(33), 1, GRANT_BYTES as u32),
        (Word::Grants(40), 2, 33 * GRANT_BYTES as u32),
        (Word::Data(0), 1, LONG as u32 - 1),
        (Word::Data(0), 2, LONG as u32),
        (Word::Data(1), 1, 10),
        (Word::Data(2), 1, 10),
        (Word::Known(2), 0, known),
        (Word::Known(0), 0, known - 8),
    ] {
        let mut two = Two::new(2);
        two.begin_at(0, 1);
        two.land(0, LONG);
        two.land(0, 10);
        let error = two.links[0].received(0, word.pack(turn), len).expect_err("nonsense");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{word:?}");
        assert_eq!(error.suspect(), Some(1));
        two.links[0].check_needed().expect_err("the link is of no use any more");
    }
    for word in [Word::Call, Word::Eager(1), Word::Grants(1), Word::Data(0)] {
        let mut two = Two::new(2);
        two.begin_at(0, 1);
        two.land(0, LONG);
        two.land(0, 10);
        let len = match word {
            Word::Call => 40,
            Word::Grants(_) => GRANT_BYTES,
            Word::Data(_) => LONG,
            _ => 10,
        };
        two.links[0].received(0, word.pack(1), len as u32).expect("once");
        let error = two.links[0].received(0, word.pack(1), len as u32).expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{word:?}");
    }
}

#[test]
fn a_message_as_long_as_nobody_expects_it_is_a_disagreement() {
    let mut two = Two::new(1);
    two.begin(1);
    two.send(0, 1, LONG);
    two.land(1, LONG + 1);
    two.carry(1);
    assert!(two.links[0].next_request().expect("the call").is_some());
    let error = two.links[0].next_request().expect_err("the lengths differ");
    assert_eq!(error.kind(), ErrorKind::Disagreement);
    assert!(error.message().contains("expects 4098 bytes where this rank sends 4097"), "{error}");
}

#[test]
fn whatever_a_peer_writes_nothing_panics() {
    let mut numbers = Random(0x5eed);
    let mut random = || numbers.next();
    for _ in 0..10_000 {
        let mut two = Two::new(2);
        two.scribble(0, || random() >> (random() % 64));
        two.begin_at(0, 1);
        for _ in 0..4 {
            two.send(0, 1, 1 + random() as usize % (2 * LONG));
            two.land(0, 1 + random() as usize % (2 * LONG));
        }
        for _ in 0..1 + random() % 12 {
            let words = [
                random() as u32,
                (random() as u32 & 0xf800_0000) | (random() as u32 % 6),
                1 << 27 | (random() as u32 & 0xe000_0000) | (random() as u32 % 6),
            ];
            let lens = [random() as u32, random() as u32 % 8192, 104, 48, 40, 64, LONG as u32];
            let (word, len) = (words[random() as usize % 3], lens[random() as usize % 7]);
            let heard = two.links[0].received(random() as usize % 2, word, len);
            if random().is_multiple_of(8) {
                two.follow(0);
                two.links[0].settle();
            }
            let mut events = Events::new();
            let went_on = heard
                .and_then(|()| two.links[0].report(&mut events))
                .and_then(|()| two.links[0].next_request().map(drop))
                .and_then(|()| two.links[0].check());
            if let Err(error) = went_on {
                assert!(matches!(error.kind(), ErrorKind::Disagreement | ErrorKind::PeerLost), "{error}");
                break;
            }
        }
    }
}
