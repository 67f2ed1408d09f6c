//! What a link says and believes, message by message, without devices.
//!
//! Every order that a fabric may bring about is played in the tests of `peer`.

mod nonsense;

use super::*;
use crate::transport::fixtures::{call, piece};
use crate::transport::verbs::objects::{Context, ProtectionDomain, Shim};
use crate::transport::verbs::regions::Regions;
use crate::transport::verbs::wire::Layout;
use std::ptr::NonNull;

const KEYS: [u32; RAILS] = [7; RAILS];
/// Too long for the board.
const LONG: usize = EAGER_BYTES + 1;

/// Two ends of a link, whose writes the tests carry.
struct Two {
    links: [Link; 2],
    boards: [Board; 2],
    inboxes: [Piece; 2],
    regions: Regions,
    memory: Vec<Vec<u8>>,
}

impl Two {
    fn new(pairs: usize) -> Self {
        let layout = Layout { pairs };
        let mut memory = vec![vec![0; layout.bytes()]; 4];
        let all: Vec<Piece> = memory.iter_mut().map(|bytes| piece(bytes)).collect();
        let boards = [Board::new(all[0], all[2], layout), Board::new(all[1], all[3], layout)];
        let rails = vec![(0, 0); pairs];
        let pd = ProtectionDomain::new(&Context::inert("inert", Shim::none())).expect("inert");
        let registration = crate::config::Registration::Subchunk;
        Self {
            links: [Link::new(1, boards[0], &rails), Link::new(0, boards[1], &rails)],
            boards,
            inboxes: [all[0], all[1]],
            regions: Regions::new(vec![pd], false, registration, 4096).expect("inert"),
            memory,
        }
    }

    /// Both ranks begin a call that goes over this link.
    fn begin(&mut self, sequence: u64) {
        (0..2).for_each(|me| self.begin_at(me, sequence));
    }

    fn begin_at(&mut self, me: usize, sequence: u64) {
        self.links[me].begin(sequence);
        self.links[me].announce(&call(sequence)).expect("alive");
    }

    fn send(&mut self, me: usize, byte: u8, len: usize) {
        self.memory.push(vec![byte; len]);
        let source = piece(self.memory.last_mut().expect("just pushed"));
        let eager = self.links[me].sends_eagerly(len);
        let region = (!eager).then(|| self.regions.for_sending(source).expect("inert"));
        self.links[me].send(source, region).expect("alive");
    }

    /// Where in memory the landing is.
    fn land(&mut self, me: usize, len: usize) -> usize {
        self.memory.push(vec![0; len]);
        let place = piece(self.memory.last_mut().expect("just pushed"));
        let eager = self.links[me].lands_eagerly(len);
        let region = (!eager).then(|| self.regions.for_landing(place));
        self.links[me].land(place, region, KEYS).expect("alive");
        self.memory.len() - 1
    }

    /// What a rank would post now.
    fn requests(&mut self, me: usize) -> Vec<Request> {
        let link = &mut self.links[me];
        link.settle();
        std::iter::from_fn(|| link.next_request().expect("alive")).collect()
    }

    /// Carries a write to the other end.
    fn deliver(&mut self, from: usize, request: &Request) {
        let (source, target) = match &request.payload {
            Payload::Nothing => (Piece::EMPTY, Piece::EMPTY),
            Payload::Board { offset, len } => {
                (self.boards[from].outgoing(*offset, *len), self.inboxes[1 - from].narrow(*offset, *len))
            }
            Payload::Message { piece, address, key, .. } => {
                assert_eq!(*key, 7);
                let address = NonNull::new(*address as *mut u8).expect("a granted address");
                // SAFETY: the address was granted, for this length, by a test that keeps the memory.
                (*piece, unsafe { Piece::new(address, piece.len()) })
            }
        };
        // SAFETY: both are as long, and the tests' own memory.
        unsafe { target.as_ptr().copy_from_nonoverlapping(source.as_ptr(), source.len()) };
        if let Some(word) = request.word {
            let received = self.links[1 - from].received(request.pair, word, source.len() as u32);
            received.expect("what a rank writes makes sense");
        }
    }

    /// Fills a rank's inbox.
    fn scribble(&mut self, me: usize, mut word: impl FnMut() -> u64) {
        for at in (0..self.inboxes[me].len()).step_by(8) {
            let place = self.inboxes[me].narrow(at, 8);
            // SAFETY: the place is as long as the word, and the tests' own memory.
            unsafe { place.as_ptr().cast::<u64>().write_unaligned(word()) };
        }
    }

    /// Carries all that a rank would post now, and its acknowledgement.
    fn carry(&mut self, from: usize) {
        for request in self.requests(from) {
            self.deliver(from, &request);
            self.links[from].sent(request.pair, request.serial);
        }
    }

    fn events(&mut self, me: usize) -> Vec<Event> {
        let mut events = Events::new();
        self.links[me].report(&mut events).expect("alive");
        events.into_iter().collect()
    }

    fn landed(&mut self, me: usize) -> usize {
        self.events(me).iter().filter(|event| matches!(event, Event::RecvComplete { .. })).count()
    }

    /// Breaks one end of a queue pair, with all that is under way there.
    fn break_end(&mut self, me: usize, pair: usize) {
        let link = &mut self.links[me];
        if !link.break_pair(pair, &Error::new(ErrorKind::PeerLost, "a cable was pulled")) {
            return;
        }
        let end = link.mark_end(pair).expect("any pair");
        (0..=end.serial).for_each(|serial| link.failed(pair, serial));
        for _ in 0..RECEIVES {
            link.received_one(pair);
        }
    }

    /// Breaks the other ends of queue pairs whose one end is known to be broken.
    fn follow(&mut self, me: usize) {
        while let Some(pair) = self.links[me].to_break_off() {
            self.break_end(me, pair);
        }
    }
}

fn words(requests: &[Request]) -> Vec<Word> {
    requests.iter().filter_map(|request| request.word).map(|word| Word::unpack(word).0).collect()
}

#[test]
fn a_short_call_is_one_write() {
    let mut two = Two::new(2);
    two.begin(1);
    two.send(0, 5, 100);
    let landing = two.land(1, 100);
    let requests = two.requests(0);
    assert_eq!(words(&requests), [Word::EagerCall]);
    two.deliver(0, &requests[0]);
    let events = two.events(1);
    assert!(
        matches!(events[..], [Event::PeerEntered { peer: 0, .. }, Event::RecvComplete { peer: 0 }]),
        "{events:?}"
    );
    assert_eq!(two.memory[landing], [5; 100]);
}

#[test]
fn long_messages_wait_until_they_are_told_where_to() {
    let mut two = Two::new(1);
    two.begin(1);
    two.send(0, 5, LONG);
    two.send(0, 6, 10);
    let calls = two.requests(0);
    assert_eq!(words(&calls), [Word::Call], "and the second waits for the first");
    let landings = [two.land(1, LONG), two.land(1, 10)];
    let grants = two.requests(1);
    assert_eq!(words(&grants), [Word::Call, Word::Grants(2)]);
    grants.iter().for_each(|request| two.deliver(1, request));
    let messages = two.requests(0);
    assert_eq!(words(&messages), [Word::Data(0), Word::Eager(1)]);
    calls.iter().chain(&messages).for_each(|request| two.deliver(0, request));
    assert_eq!(two.landed(1), 2);
    assert_eq!(landings.map(|at| two.memory[at][0]), [5, 6]);
}

#[test]
fn a_peer_that_is_ahead_is_not_heard_early() {
    let mut two = Two::new(1);
    two.begin(1);
    (0..2).for_each(|me| two.carry(me));
    assert!(matches!(two.events(0)[..], [Event::PeerEntered { .. }]));
    two.begin_at(0, 2);
    two.send(0, 5, 100);
    two.land(0, LONG);
    two.carry(0);
    assert!(matches!(two.events(1)[..], [Event::PeerEntered { call: Call { sequence: 1, .. }, .. }]));
    assert!(two.events(1).is_empty(), "the rest is of the next call");
    two.links[1].begin(2);
    two.links[1].announce(&call(2)).expect("alive");
    two.land(1, 100);
    two.send(1, 6, LONG);
    assert!(matches!(
        two.events(1)[..],
        [Event::PeerEntered { call: Call { sequence: 2, .. }, .. }, Event::RecvComplete { .. }]
    ));
    assert_eq!(words(&two.requests(1)), [Word::Call, Word::Data(0)]);
}

#[test]
fn a_peer_that_calls_where_this_rank_does_not_is_reported_unless_it_is_ahead() {
    let mut two = Two::new(1);
    two.begin_at(0, 2);
    two.carry(0);
    two.links[1].begin(1);
    assert!(two.events(1).is_empty());
    two.links[1].begin(2);
    assert!(matches!(two.events(1)[..], [Event::PeerEntered { peer: 0, .. }]));
}

#[test]
fn grants_that_overtake_lost_ones_do_not_stand_in_for_them() {
    let mut two = Two::new(2);
    two.begin(1);
    two.send(0, 1, LONG);
    two.send(0, 2, LONG);
    two.carry(0);
    let first = two.land(1, LONG);
    let requests = two.requests(1);
    assert_eq!(words(&requests), [Word::Call, Word::Grants(1)]);
    two.break_end(1, 0);
    // This one goes over the queue pair that lives, at once.
    let second = two.land(1, LONG);
    two.carry(1);
    assert!(two.requests(0).is_empty(), "nobody has said where the first message goes");
    two.follow(0);
    for me in [0, 1, 0] {
        two.carry(me);
    }
    assert_eq!(two.landed(1), 2);
    assert_eq!([first, second].map(|at| two.memory[at][0]), [1, 2]);
}

#[test]
fn what_each_end_told_over_what_the_other_had_broken_is_told_again() {
    let mut two = Two::new(3);
    two.begin(1);
    two.send(0, 1, 10);
    let landing = two.land(1, 10);
    // Each end has broken one of the first two pairs, and tells so over the other, with its call.
    two.break_end(0, 0);
    two.break_end(1, 1);
    assert_eq!(words(&two.requests(0)), [Word::Known(0), Word::EagerCall]);
    assert_eq!(words(&two.requests(1)), [Word::Known(1), Word::Call]);
    two.break_end(0, 1);
    two.break_end(1, 0);
    for me in [0, 1, 0] {
        two.carry(me);
    }
    assert_eq!(two.landed(1), 1);
    assert_eq!(two.memory[landing], [1; 10]);
}

#[test]
fn what_came_is_not_written_again_though_nobody_acknowledged_it() {
    let mut two = Two::new(2);
    two.begin(1);
    two.send(0, 1, LONG);
    two.land(1, LONG);
    two.carry(1);
    let requests = two.requests(0);
    requests.iter().for_each(|request| two.deliver(0, request));
    two.break_end(0, 0);
    assert!(
        !two.events(0).iter().any(|event| matches!(event, Event::SendComplete { .. })),
        "it may not have come"
    );
    two.carry(0);
    two.follow(1);
    assert_eq!(words(&two.requests(1)), [Word::Known(0)]);
}

#[test]
fn a_rank_says_goodbye_when_the_peer_has_or_gets_all() {
    let mut two = Two::new(2);
    two.begin(1);
    (0..2).for_each(|me| two.carry(me));
    two.send(0, 1, 10);
    assert_eq!(words(&two.requests(0)), [Word::Eager(0)]);
    two.break_end(0, 0);
    two.links[0].bye();
    assert_eq!(words(&two.requests(0)), [Word::Known(0)]);
    assert!(!two.links[0].is_flushed());
    two.break_end(1, 0);
    two.carry(1);
    assert_eq!(words(&two.requests(0)), [Word::Eager(0), Word::Bye]);
}

#[test]
fn a_goodbye_that_was_lost_is_said_after_all_else_that_was() {
    let mut two = Two::new(2);
    two.begin(1);
    (0..2).for_each(|me| two.carry(me));
    two.send(0, 1, 10);
    assert_eq!(words(&two.requests(0)), [Word::Eager(0)]);
    two.links[0].bye();
    let goodbye = two.requests(0);
    assert_eq!(words(&goodbye), [Word::Bye]);
    // The device refuses it, so it is the first to be lost.
    two.links[0].withdraw(0, goodbye[0].serial);
    for me in 0..2 {
        two.break_end(me, 0);
    }
    two.carry(1);
    assert_eq!(words(&two.requests(0)), [Word::Known(0), Word::Eager(0), Word::Bye]);
}

#[test]
fn a_peer_that_left_is_missed_after_all_queues_were_looked_at_again() {
    let mut two = Two::new(2);
    two.begin(1);
    two.carry(0);
    two.land(1, 10);
    assert_eq!(two.events(1).len(), 1);
    two.links[0].bye();
    two.carry(0);
    assert!(two.links[1].has_left());
    let mut events = Events::new();
    for _ in 0..2 {
        two.links[1].report(&mut events).expect("it may lie in another queue");
    }
    let error = two.links[1].report(&mut events).expect_err("it will never come");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(error.message(), "rank 0 closed its communicator");
    assert_eq!(error.suspect(), Some(0));
}

#[test]
fn a_peer_that_left_before_it_acknowledged_everything_is_not_missed() {
    let mut two = Two::new(2);
    two.begin(1);
    two.land(0, LONG);
    two.carry(0);
    two.send(1, 1, LONG);
    let requests = two.requests(1);
    requests.iter().for_each(|request| two.deliver(1, request));
    assert_eq!(two.landed(0), 1);
    two.links[0].bye();
    two.carry(0);
    (0..9).for_each(|_| drop(two.events(1)));
    let last = requests.last().expect("the message");
    two.links[1].sent(last.pair, last.serial);
    assert!(matches!(two.events(1)[..], [Event::SendComplete { peer: 0 }]));
}

#[test]
fn a_link_that_breaks_is_an_error_when_it_is_needed() {
    let mut two = Two::new(1);
    two.begin(1);
    (0..2).for_each(|me| two.carry(me));
    assert_eq!(two.events(0).len(), 1);
    two.break_end(0, 0);
    two.links[0].check_needed().expect("all that was needed has come");
    for error in [two.links[0].check(), two.links[0].announce(&call(2))] {
        let error = error.expect_err("it is needed now");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert_eq!(error.message(), "rank 1 cannot be reached any more: a cable was pulled");
        assert_eq!(error.suspect(), Some(1));
    }
    two.break_end(1, 0);
    two.links[1].check_needed().expect_err("it has not heard the call");
}

#[test]
fn what_landed_is_not_given_back_before_the_device_of_a_broken_queue_pair_has_let_go() {
    for pairs in [1, 2] {
        let mut two = Two::new(pairs);
        two.begin(1);
        two.carry(0);
        two.send(1, 1, LONG);
        two.land(0, LONG);
        (0..2).for_each(|me| two.carry(me));
        let link = &mut two.links[0];
        link.break_pair(0, &Error::new(ErrorKind::PeerLost, "a cable was pulled"));
        let end = link.mark_end(0).expect("any pair");
        assert_eq!(two.landed(0), 0);
        two.links[0].check_needed().expect("all that was needed has come");
        two.links[0].failed(0, end.serial);
        for _ in 0..RECEIVES {
            two.links[0].received_one(0);
        }
        two.links[0].settle();
        assert_eq!(two.landed(0), 1);
    }
}

#[test]
fn a_queue_pair_is_tried_when_nobody_waits_for_what_is_under_way() {
    let mut two = Two::new(1);
    two.begin(1);
    let requests = two.requests(0);
    assert!(requests.iter().all(|request| !request.awaited));
    let probe = two.links[0].probe(0).expect("alive").expect("nothing else would tell");
    assert!(probe.awaited && probe.word.is_none());
    assert!(two.links[0].probe(0).expect("alive").is_none(), "one is enough");
    two.links[0].sent(0, probe.serial);
    two.links[1].bye();
    two.carry(1);
    assert!(two.links[0].probe(0).expect("alive").is_some(), "its call was not heard");
    two.links[0].sent(0, u32::MAX / 4);
    assert_eq!(two.events(0).len(), 1);
    assert!(two.links[0].probe(0).expect("alive").is_none(), "who has left need not answer");
}
