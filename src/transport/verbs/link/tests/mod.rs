//! What a link says and believes, message by message, without devices.
//!
//! Every order that a fabric may bring about is played in the tests of `peer`.

mod protocol_violations;

use super::*;
use crate::transport::fixtures::{call, piece};
use crate::transport::verbs::objects::{Context, ProtectionDomain, Shim};
use crate::transport::verbs::registry::MemoryRegistry;
use crate::transport::verbs::wire::ControlLayout;
use std::ptr::NonNull;

const KEYS: [u32; MAX_RAILS] = [7; MAX_RAILS];
/// Too long for the board.
const LONG: usize = MAX_EAGER_BYTES + 1;

/// TwoEnds ends of a link, whose writes the tests carry.
struct TwoEnds {
    links: [Link; 2],
    controls: [ControlBuffer; 2],
    remote: [Piece; 2],
    registry: MemoryRegistry,
    memory: Vec<Vec<u8>>,
}

impl TwoEnds {
    fn new(qps: usize) -> Self {
        let layout = ControlLayout { qps };
        let mut memory = vec![vec![0; layout.bytes()]; 4];
        let all: Vec<Piece> = memory.iter_mut().map(|bytes| piece(bytes)).collect();
        let controls =
            [ControlBuffer::new(all[0], all[2], layout), ControlBuffer::new(all[1], all[3], layout)];
        let rails = vec![(0, 0); qps];
        let pd = ProtectionDomain::new(&Context::inert("inert", Shim::none())).expect("inert");
        let registration = crate::config::Registration::Subchunk;
        Self {
            links: [Link::new(1, controls[0], &rails), Link::new(0, controls[1], &rails)],
            controls,
            remote: [all[0], all[1]],
            registry: MemoryRegistry::new(vec![pd], false, registration, 4096).expect("inert"),
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
        let region = (!eager).then(|| self.registry.for_sending(source).expect("inert"));
        self.links[me].send(source, region).expect("alive");
    }

    /// Where in memory the landing is.
    fn post_recv(&mut self, me: usize, len: usize) -> usize {
        self.memory.push(vec![0; len]);
        let place = piece(self.memory.last_mut().expect("just pushed"));
        let eager = self.links[me].receives_eagerly(len);
        let region = (!eager).then(|| self.registry.for_receiving(place));
        self.links[me].post_recv(place, region, KEYS).expect("alive");
        self.memory.len() - 1
    }

    /// What a rank would post now.
    fn requests(&mut self, me: usize) -> Vec<LinkRequest> {
        let link = &mut self.links[me];
        link.recover();
        std::iter::from_fn(|| link.next_request().expect("alive")).collect()
    }

    /// Carries a write to the other end.
    fn deliver(&mut self, from: usize, request: &LinkRequest) {
        let (source, target) = match &request.payload {
            Payload::Nothing => (Piece::EMPTY, Piece::EMPTY),
            Payload::ControlBuffer { offset, len } => {
                (self.controls[from].local_entry(*offset, *len), self.remote[1 - from].narrow(*offset, *len))
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
        if let Some(imm) = request.imm {
            let received = self.links[1 - from].received(request.qp, imm, source.len() as u32);
            received.expect("what a rank writes makes sense");
        }
    }

    /// Fills a rank's inbox.
    fn fill_remote(&mut self, me: usize, mut imm: impl FnMut() -> u64) {
        for at in (0..self.remote[me].len()).step_by(8) {
            let place = self.remote[me].narrow(at, 8);
            // SAFETY: the place is as long as the word, and the tests' own memory.
            unsafe { place.as_ptr().cast::<u64>().write_unaligned(imm()) };
        }
    }

    /// Carries all that a rank would post now, and its acknowledgement.
    fn transfer(&mut self, from: usize) {
        for request in self.requests(from) {
            self.deliver(from, &request);
            self.links[from].write_completed(request.qp, request.serial);
        }
    }

    fn events(&mut self, me: usize) -> Vec<Event> {
        let mut events = Events::new();
        self.links[me].report(&mut events).expect("alive");
        events.into_iter().collect()
    }

    fn recvs_completed(&mut self, me: usize) -> usize {
        self.events(me).iter().filter(|event| matches!(event, Event::RecvComplete { .. })).count()
    }

    /// Breaks one end of a queue pair, with all that is under way there.
    fn break_end(&mut self, me: usize, qp: usize) {
        let link = &mut self.links[me];
        if !link.break_qp(qp, &Error::peer_lost("a cable was pulled")) {
            return;
        }
        let end = link.drain_marker(qp).expect("any pair");
        (0..=end.serial).for_each(|serial| link.write_failed(qp, serial));
        for _ in 0..RECV_DEPTH {
            link.recv_completed(qp);
        }
    }

    /// Breaks the other ends of queue pairs whose one end is known to be broken.
    fn break_other_ends(&mut self, me: usize) {
        while let Some(qp) = self.links[me].next_qp_to_break() {
            self.break_end(me, qp);
        }
    }
}

fn kinds(requests: &[LinkRequest]) -> Vec<ImmKind> {
    requests.iter().filter_map(|request| request.imm).map(|imm| ImmKind::unpack(imm).0).collect()
}

#[test]
fn a_short_call_is_one_write() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.send(0, 5, 100);
    let destination = ends.post_recv(1, 100);
    let requests = ends.requests(0);
    assert_eq!(kinds(&requests), [ImmKind::EagerCall]);
    ends.deliver(0, &requests[0]);
    let events = ends.events(1);
    assert!(
        matches!(events[..], [Event::PeerEntered { peer: 0, .. }, Event::RecvComplete { peer: 0 }]),
        "{events:?}"
    );
    assert_eq!(ends.memory[destination], [5; 100]);
}

#[test]
fn long_messages_wait_until_they_are_told_where_to() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    ends.send(0, 5, LONG);
    ends.send(0, 6, 10);
    let calls = ends.requests(0);
    assert_eq!(kinds(&calls), [ImmKind::Call], "and the second waits for the first");
    let recvs_posted = [ends.post_recv(1, LONG), ends.post_recv(1, 10)];
    let cts_bits = ends.requests(1);
    assert_eq!(kinds(&cts_bits), [ImmKind::Call, ImmKind::Cts(2)]);
    cts_bits.iter().for_each(|request| ends.deliver(1, request));
    let messages = ends.requests(0);
    assert_eq!(kinds(&messages), [ImmKind::Data(0), ImmKind::Eager(1)]);
    calls.iter().chain(&messages).for_each(|request| ends.deliver(0, request));
    assert_eq!(ends.recvs_completed(1), 2);
    assert_eq!(recvs_posted.map(|at| ends.memory[at][0]), [5, 6]);
}

#[test]
fn a_peer_that_is_ahead_is_not_heard_early() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    assert!(matches!(ends.events(0)[..], [Event::PeerEntered { .. }]));
    ends.begin_at(0, 2);
    ends.send(0, 5, 100);
    ends.post_recv(0, LONG);
    ends.transfer(0);
    assert!(matches!(ends.events(1)[..], [Event::PeerEntered { call: Call { sequence: 1, .. }, .. }]));
    assert!(ends.events(1).is_empty(), "the rest is of the next call");
    ends.links[1].begin(2);
    ends.links[1].announce(&call(2)).expect("alive");
    ends.post_recv(1, 100);
    ends.send(1, 6, LONG);
    assert!(matches!(
        ends.events(1)[..],
        [Event::PeerEntered { call: Call { sequence: 2, .. }, .. }, Event::RecvComplete { .. }]
    ));
    assert_eq!(kinds(&ends.requests(1)), [ImmKind::Call, ImmKind::Data(0)]);
}

#[test]
fn a_peer_that_calls_where_this_rank_does_not_is_reported_unless_it_is_ahead() {
    let mut ends = TwoEnds::new(1);
    ends.begin_at(0, 2);
    ends.transfer(0);
    ends.links[1].begin(1);
    assert!(ends.events(1).is_empty());
    ends.links[1].begin(2);
    assert!(matches!(ends.events(1)[..], [Event::PeerEntered { peer: 0, .. }]));
}

#[test]
fn grants_that_overtake_lost_ones_do_not_stand_in_for_them() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.send(0, 1, LONG);
    ends.send(0, 2, LONG);
    ends.transfer(0);
    let first = ends.post_recv(1, LONG);
    let requests = ends.requests(1);
    assert_eq!(kinds(&requests), [ImmKind::Call, ImmKind::Cts(1)]);
    ends.break_end(1, 0);
    // This one goes over the queue pair that lives, at once.
    let second = ends.post_recv(1, LONG);
    ends.transfer(1);
    assert!(ends.requests(0).is_empty(), "nobody has said where the first message goes");
    ends.break_other_ends(0);
    for me in [0, 1, 0] {
        ends.transfer(me);
    }
    assert_eq!(ends.recvs_completed(1), 2);
    assert_eq!([first, second].map(|at| ends.memory[at][0]), [1, 2]);
}

#[test]
fn what_each_end_told_over_what_the_other_had_broken_is_told_again() {
    let mut ends = TwoEnds::new(3);
    ends.begin(1);
    ends.send(0, 1, 10);
    let destination = ends.post_recv(1, 10);
    // Each end has broken one of the first two pairs, and tells so over the other, with its call.
    ends.break_end(0, 0);
    ends.break_end(1, 1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0), ImmKind::EagerCall]);
    assert_eq!(kinds(&ends.requests(1)), [ImmKind::Recovery(1), ImmKind::Call]);
    ends.break_end(0, 1);
    ends.break_end(1, 0);
    for me in [0, 1, 0] {
        ends.transfer(me);
    }
    assert_eq!(ends.recvs_completed(1), 1);
    assert_eq!(ends.memory[destination], [1; 10]);
}

#[test]
fn what_came_is_not_written_again_though_nobody_acknowledged_it() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.send(0, 1, LONG);
    ends.post_recv(1, LONG);
    ends.transfer(1);
    let requests = ends.requests(0);
    requests.iter().for_each(|request| ends.deliver(0, request));
    ends.break_end(0, 0);
    assert!(
        !ends.events(0).iter().any(|event| matches!(event, Event::SendComplete { .. })),
        "it may not have come"
    );
    ends.transfer(0);
    ends.break_other_ends(1);
    assert_eq!(kinds(&ends.requests(1)), [ImmKind::Recovery(0)]);
}

#[test]
fn a_rank_says_goodbye_when_the_peer_has_or_gets_all() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    ends.send(0, 1, 10);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0)]);
    ends.break_end(0, 0);
    ends.links[0].bye();
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0)]);
    assert!(!ends.links[0].is_drained());
    ends.break_end(1, 0);
    ends.transfer(1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0), ImmKind::Bye]);
}

#[test]
fn a_goodbye_that_was_lost_is_said_after_all_else_that_was() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    ends.send(0, 1, 10);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0)]);
    ends.links[0].bye();
    let due_bye = ends.requests(0);
    assert_eq!(kinds(&due_bye), [ImmKind::Bye]);
    // The device refuses it, so it is the first to be lost.
    ends.links[0].unpost(0, due_bye[0].serial);
    for me in 0..2 {
        ends.break_end(me, 0);
    }
    ends.transfer(1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0), ImmKind::Eager(0), ImmKind::Bye]);
}

#[test]
fn a_peer_that_left_is_missed_after_all_queues_were_looked_at_again() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.transfer(0);
    ends.post_recv(1, 10);
    assert_eq!(ends.events(1).len(), 1);
    ends.links[0].bye();
    ends.transfer(0);
    assert!(ends.links[1].has_left());
    let mut events = Events::new();
    for _ in 0..2 {
        ends.links[1].report(&mut events).expect("it may lie in another queue");
    }
    let error = ends.links[1].report(&mut events).expect_err("it will never come");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(error.message(), "rank 0 closed its communicator");
    assert_eq!(error.suspect(), Some(0));
}

#[test]
fn a_peer_that_left_before_it_acknowledged_everything_is_not_missed() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.post_recv(0, LONG);
    ends.transfer(0);
    ends.send(1, 1, LONG);
    let requests = ends.requests(1);
    requests.iter().for_each(|request| ends.deliver(1, request));
    assert_eq!(ends.recvs_completed(0), 1);
    ends.links[0].bye();
    ends.transfer(0);
    (0..9).for_each(|_| drop(ends.events(1)));
    let last = requests.last().expect("the message");
    ends.links[1].write_completed(last.qp, last.serial);
    assert!(matches!(ends.events(1)[..], [Event::SendComplete { peer: 0 }]));
}

#[test]
fn a_link_that_breaks_is_an_error_when_it_is_needed() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    assert_eq!(ends.events(0).len(), 1);
    ends.break_end(0, 0);
    ends.links[0].check_if_needed().expect("all that was needed has come");
    for error in [ends.links[0].check(), ends.links[0].announce(&call(2))] {
        let error = error.expect_err("it is needed now");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert_eq!(error.message(), "rank 1 cannot be reached any more: a cable was pulled");
        assert_eq!(error.suspect(), Some(1));
    }
    ends.break_end(1, 0);
    ends.links[1].check_if_needed().expect_err("it has not heard the call");
}

#[test]
fn what_landed_is_not_given_back_before_the_device_of_a_broken_queue_pair_has_let_go() {
    for qps in [1, 2] {
        let mut ends = TwoEnds::new(qps);
        ends.begin(1);
        ends.transfer(0);
        ends.send(1, 1, LONG);
        ends.post_recv(0, LONG);
        (0..2).for_each(|me| ends.transfer(me));
        let link = &mut ends.links[0];
        link.break_qp(0, &Error::peer_lost("a cable was pulled"));
        let end = link.drain_marker(0).expect("any pair");
        assert_eq!(ends.recvs_completed(0), 0);
        ends.links[0].check_if_needed().expect("all that was needed has come");
        ends.links[0].write_failed(0, end.serial);
        for _ in 0..RECV_DEPTH {
            ends.links[0].recv_completed(0);
        }
        ends.links[0].recover();
        assert_eq!(ends.recvs_completed(0), 1);
    }
}

#[test]
fn a_queue_pair_is_tried_when_nobody_waits_for_what_is_under_way() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    let requests = ends.requests(0);
    assert!(requests.iter().all(|request| !request.needs_completion));
    let probe = ends.links[0].probe(0).expect("alive").expect("nothing else would tell");
    assert!(probe.needs_completion && probe.imm.is_none());
    assert!(ends.links[0].probe(0).expect("alive").is_none(), "one is enough");
    ends.links[0].write_completed(0, probe.serial);
    ends.links[1].bye();
    ends.transfer(1);
    assert!(ends.links[0].probe(0).expect("alive").is_some(), "its call was not heard");
    ends.links[0].write_completed(0, u32::MAX / 4);
    assert_eq!(ends.events(0).len(), 1);
    assert!(ends.links[0].probe(0).expect("alive").is_none(), "who has left need not answer");
}
