//! The protocol of a link, message by message, without devices.
//!
//! The tests of `peer` cover every order in which a fabric may deliver.

mod fuzz;
mod protocol_violations;

use super::qp_state::{PROOF, QpState};
use super::*;
use crate::transport::fixtures::{call, piece};
use crate::transport::verbs::objects::{Context, ProtectionDomain, Shim};
use crate::transport::verbs::registry::MemoryRegistry;
use crate::transport::verbs::wire::{ControlLayout, EAGER_MESSAGES};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

const KEYS: [u32; MAX_RAILS] = [7; MAX_RAILS];
/// Bytes of a message that is too long to be eager.
const LONG: usize = 4097;

/// Both ends of a link. The tests deliver their writes.
struct TwoEnds {
    links: [Link; 2],
    controls: [ControlBuffer; 2],
    /// The remote side of each control buffer.
    remote: [Piece; 2],
    registry: MemoryRegistry,
    /// Keeps everything that pieces point into.
    memory: Vec<Vec<u8>>,
}

impl TwoEnds {
    fn new(qps: usize) -> Self {
        let layout = ControlLayout::example(qps);
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

    /// Both ranks begin a call that uses this link.
    fn begin(&mut self, sequence: u64) {
        (0..2).for_each(|me| self.begin_at(me, sequence));
    }

    fn begin_at(&mut self, me: usize, sequence: u64) {
        self.links[me].begin(sequence);
        self.links[me].announce(&call(sequence)).expect("alive");
    }

    fn send(&mut self, me: usize, byte: u8, len: usize) {
        self.try_send(me, byte, len).expect("alive");
    }

    fn try_send(&mut self, me: usize, byte: u8, len: usize) -> Result<()> {
        self.memory.push(vec![byte; len]);
        let source = piece(self.memory.last_mut().expect("just pushed"));
        let eager = self.links[me].sends_eagerly(len);
        let region = (!eager).then(|| self.registry.for_sending(source));
        self.links[me].send(source, region)
    }

    /// Posts a receive. Returns the index of its destination in `memory`.
    fn post_recv(&mut self, me: usize, len: usize) -> usize {
        self.try_post_recv(me, len).expect("alive")
    }

    fn try_post_recv(&mut self, me: usize, len: usize) -> Result<usize> {
        self.memory.push(vec![0; len]);
        let destination = piece(self.memory.last_mut().expect("just pushed"));
        let eager = self.links[me].receives_eagerly(len);
        let region = (!eager).then(|| self.registry.for_receiving(destination));
        self.links[me].post_recv(destination, region, KEYS)?;
        Ok(self.memory.len() - 1)
    }

    /// The requests that a rank would post now.
    fn requests(&mut self, me: usize) -> Vec<LinkRequest> {
        let link = &mut self.links[me];
        link.recover();
        std::iter::from_fn(|| link.next_request().expect("alive")).collect()
    }

    /// Delivers a write to the other end.
    fn deliver(&mut self, from: usize, request: &LinkRequest) {
        let (source, target) = match &request.payload {
            Payload::Empty => (Piece::EMPTY, Piece::EMPTY),
            Payload::Control(range) => {
                (self.controls[from].local_range(*range), self.remote[1 - from].narrow(range.0, range.1))
            }
            Payload::Message { piece, address, key, .. } => {
                assert_eq!(*key, 7);
                let address = NonNull::new(*address as *mut u8).expect("a CTS with an address");
                // SAFETY: a CTS gave the address for this length, and the test keeps the memory.
                (*piece, unsafe { Piece::new(address, piece.len()) })
            }
        };
        // SAFETY: both have the same length and belong to the test.
        unsafe { target.as_ptr().copy_from_nonoverlapping(source.as_ptr(), source.len()) };
        if let Some(imm) = request.imm {
            let received = self.links[1 - from].received(request.qp, imm, source.len() as u32);
            received.expect("a rank keeps to the protocol");
        }
    }

    /// Fills the remote side of a rank's control buffer with these numbers.
    fn fill_remote(&mut self, me: usize, mut number: impl FnMut() -> u64) {
        for at in (0..self.remote[me].len()).step_by(8) {
            let to = self.remote[me].narrow(at, 8);
            // SAFETY: `to` has the size of a `u64` and belongs to the test.
            unsafe { to.as_ptr().cast::<u64>().write_unaligned(number()) };
        }
    }

    /// Delivers all that a rank would post now, and the acknowledgements.
    fn transfer(&mut self, from: usize) {
        for request in self.requests(from) {
            self.deliver(from, &request);
            self.links[from].write_completed(request.qp, request.serial);
        }
    }

    /// The events that a rank's link reports now.
    fn events(&mut self, me: usize) -> Vec<Event> {
        let mut events = Events::new();
        self.links[me].report(&mut events).expect("alive");
        events.into_iter().collect()
    }

    /// How many receives a rank's link reports as completed now.
    fn recvs_completed(&mut self, me: usize) -> usize {
        self.events(me).iter().filter(|event| matches!(event, Event::RecvComplete { .. })).count()
    }

    /// Breaks one end of a queue pair, and flushes all that is in flight there.
    fn break_end(&mut self, me: usize, qp: usize) {
        let link = &mut self.links[me];
        if !link.break_qp(qp, &Error::peer_lost("the cable is disconnected")) {
            return;
        }
        let marker = link.drain_marker(qp).expect("a queue pair");
        (0..=marker.serial).for_each(|serial| {
            link.write_failed(qp, serial);
        });
        for _ in 0..RECV_DEPTH {
            link.recv_completed(qp);
        }
    }

    /// Breaks a rank's ends of the queue pairs that the peer reported as broken.
    fn break_other_ends(&mut self, me: usize) {
        while let Some(qp) = self.links[me].next_qp_to_break() {
            self.break_end(me, qp);
        }
    }
}

/// What the requests are about.
fn kinds(requests: &[LinkRequest]) -> Vec<ImmKind> {
    requests.iter().filter_map(|request| request.imm).map(|imm| ImmData::unpack(imm).kind).collect()
}

#[test]
fn a_short_call_is_one_write() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.send(0, 5, 100);
    let destination = ends.post_recv(1, 100);
    let requests = ends.requests(0);
    assert_eq!(kinds(&requests), [ImmKind::EagerCall(100)]);
    ends.deliver(0, &requests[0]);
    let events = ends.events(1);
    assert!(
        matches!(events[..], [Event::PeerEntered { peer: 0, .. }, Event::RecvComplete { peer: 0 }]),
        "{events:?}"
    );
    assert_eq!(ends.memory[destination], [5; 100]);
}

#[test]
fn a_long_message_waits_for_its_cts() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    ends.send(0, 5, LONG);
    ends.send(0, 6, 10);
    let calls = ends.requests(0);
    assert_eq!(kinds(&calls), [ImmKind::Call], "the second message waits for the first");
    let destinations = [ends.post_recv(1, LONG), ends.post_recv(1, 10)];
    let cts = ends.requests(1);
    assert_eq!(kinds(&cts), [ImmKind::Call, ImmKind::Cts(2, 2)]);
    cts.iter().for_each(|request| ends.deliver(1, request));
    let messages = ends.requests(0);
    assert_eq!(kinds(&messages), [ImmKind::Data(0), ImmKind::Eager(1, 10)]);
    calls.iter().chain(&messages).for_each(|request| ends.deliver(0, request));
    assert_eq!(ends.recvs_completed(1), 2);
    assert_eq!(destinations.map(|at| ends.memory[at][0]), [5, 6]);
}

/// Counter-example: a rank whose trial was under way when the peer left lost what had arrived.
#[test]
fn what_a_peer_wrote_before_it_left_is_enough_for_a_call() {
    let mut ends = TwoEnds::new(1);
    ends.links[1].suspect(1);
    ends.begin_at(0, 1);
    ends.send(0, 5, 100);
    ends.links[0].goodbye();
    ends.transfer(0);
    ends.links[1].peer_ended("it has closed its communicator");
    assert!(ends.links[1].check().is_err(), "nothing can be written any more");
    ends.begin_at(1, 1);
    let destination = ends.post_recv(1, 100);
    assert!(ends.requests(1).is_empty() && ends.links[1].is_announced());
    assert_eq!(ends.recvs_completed(1), 1);
    assert_eq!(ends.memory[destination], [5; 100]);
    ends.links[1].check_if_needed().expect("nothing is missing");
    ends.post_recv(1, 100);
    assert!(ends.links[1].check_if_needed().is_err(), "the peer sends no more");
}

#[test]
fn a_link_fails_once_all_its_trials_have() {
    let mut ends = TwoEnds::new(2);
    ends.links[0].suspect(0b11);
    ends.break_end(0, 0);
    ends.links[0].check().expect("the other trial may succeed");
    ends.break_end(0, 1);
    assert!(ends.links[0].check().is_err());
}

/// By queue pair of these rates: how many of twelve messages it carries.
fn shared_out(rates: &[u64]) -> Vec<usize> {
    let mut ends = TwoEnds::new(rates.len());
    ends.links[0] = Link::new(1, ends.controls[0], &vec![(0, 0); rates.len()]).with_rates(rates);
    ends.begin(1);
    for _ in 0..12 {
        ends.send(0, 5, LONG);
        ends.post_recv(1, LONG);
    }
    ends.transfer(1);
    let requests = ends.requests(0);
    let messages = requests.iter().filter(|request| matches!(request.payload, Payload::Message { .. }));
    let carried: Vec<usize> = messages.map(|request| request.qp).collect();
    (0..rates.len()).map(|qp| carried.iter().filter(|at| **at == qp).count()).collect()
}

#[test]
fn messages_are_shared_out_by_the_rates_of_the_rails() {
    assert_eq!(shared_out(&[100_000, 100_000]), [6, 6]);
    assert_eq!(shared_out(&[100_000, 200_000]), [4, 8]);
    assert_eq!(shared_out(&[400_000, 200_000, 200_000]), [6, 3, 3]);
    assert_eq!(shared_out(&[100_000, 0]), [6, 6], "one is unknown");
}

#[test]
fn a_message_that_was_written_before_its_immediate_data_arrives_in_full() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    ends.send(0, 5, LONG);
    let destination = ends.post_recv(1, LONG);
    ends.transfer(1);
    let requests = ends.requests(0);
    assert_eq!(kinds(&requests), [ImmKind::Call, ImmKind::Data(0)]);
    ends.deliver(0, &requests[0]);
    let imm = requests[1].imm.expect("a message has immediate data");
    ends.deliver(0, &LinkRequest { imm: None, ..requests[1].clone() });
    assert_eq!(ends.recvs_completed(1), 0, "nothing says that it has arrived");
    assert_eq!(ends.links[1].received(0, imm, 0).expect("a rank keeps to the protocol"), LONG as u64);
    assert_eq!(ends.recvs_completed(1), 1);
    assert_eq!(ends.memory[destination], [5; LONG]);
    ends.links[1].received(0, imm, 0).expect_err("it has arrived before");
}

#[test]
fn writes_of_the_next_call_are_not_reported_early() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    assert!(matches!(ends.events(0)[..], [Event::PeerEntered { .. }]));
    ends.begin_at(0, 2);
    ends.send(0, 5, 100);
    ends.post_recv(0, LONG);
    ends.transfer(0);
    assert!(matches!(ends.events(1)[..], [Event::PeerEntered { call: Call { sequence: 1, .. }, .. }]));
    assert!(ends.events(1).is_empty(), "the rest belongs to the next call");
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
fn a_call_on_a_link_that_this_rank_does_not_use_is_reported_unless_the_peer_is_ahead() {
    let mut ends = TwoEnds::new(1);
    ends.begin_at(0, 2);
    ends.transfer(0);
    ends.links[1].begin(1);
    assert!(ends.events(1).is_empty());
    ends.links[1].begin(2);
    assert!(matches!(ends.events(1)[..], [Event::PeerEntered { peer: 0, .. }]));
}

#[test]
fn a_later_cts_does_not_replace_a_lost_one() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.send(0, 1, LONG);
    ends.send(0, 2, LONG);
    ends.transfer(0);
    let first = ends.post_recv(1, LONG);
    let requests = ends.requests(1);
    assert_eq!(kinds(&requests), [ImmKind::Call, ImmKind::Cts(1, 1)]);
    ends.break_end(1, 0);
    // The CTS of this one goes over the queue pair that is alive, at once.
    let second = ends.post_recv(1, LONG);
    ends.transfer(1);
    assert!(ends.requests(0).is_empty(), "the CTS of the first message is missing");
    ends.break_other_ends(0);
    for me in [0, 1, 0] {
        ends.transfer(me);
    }
    assert_eq!(ends.recvs_completed(1), 2);
    assert_eq!([first, second].map(|at| ends.memory[at][0]), [1, 2]);
}

#[test]
fn a_recovery_state_lost_on_a_broken_queue_pair_is_sent_again() {
    let mut ends = TwoEnds::new(3);
    ends.begin(1);
    ends.send(0, 1, 10);
    let destination = ends.post_recv(1, 10);
    // Each end has broken one of the first two queue pairs, and reports it over the other, with its call.
    ends.break_end(0, 0);
    ends.break_end(1, 1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0, 0), ImmKind::EagerCall(10)]);
    assert_eq!(kinds(&ends.requests(1)), [ImmKind::Recovery(1, 0), ImmKind::Call]);
    ends.break_end(0, 1);
    ends.break_end(1, 0);
    for me in [0, 1, 0] {
        ends.transfer(me);
    }
    assert_eq!(ends.recvs_completed(1), 1);
    assert_eq!(ends.memory[destination], [1; 10]);
}

#[test]
fn an_unacknowledged_write_that_arrived_is_not_repeated() {
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
        "it may not have arrived"
    );
    ends.transfer(0);
    ends.break_other_ends(1);
    assert_eq!(kinds(&ends.requests(1)), [ImmKind::Recovery(0, 0)]);
}

#[test]
fn the_goodbye_is_sent_after_lost_writes_are_repeated() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    ends.send(0, 1, 10);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0, 10)]);
    ends.break_end(0, 0);
    ends.links[0].goodbye();
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0, 0)]);
    assert!(!ends.links[0].is_drained());
    ends.break_end(1, 0);
    ends.transfer(1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0, 10), ImmKind::Goodbye]);
}

#[test]
fn a_lost_goodbye_is_repeated_after_all_other_lost_writes() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    ends.send(0, 1, 10);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Eager(0, 10)]);
    ends.links[0].goodbye();
    let due_goodbye = ends.requests(0);
    assert_eq!(kinds(&due_goodbye), [ImmKind::Goodbye]);
    // The device refuses it, so it is the first request to be lost.
    ends.links[0].unpost(0, due_goodbye[0].serial);
    for me in 0..2 {
        ends.break_end(me, 0);
    }
    ends.transfer(1);
    assert_eq!(kinds(&ends.requests(0)), [ImmKind::Recovery(0, 0), ImmKind::Eager(0, 10), ImmKind::Goodbye]);
}

#[test]
fn a_missing_message_of_a_peer_that_left_fails_after_all_queues_were_polled_again() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.transfer(0);
    ends.post_recv(1, 10);
    assert_eq!(ends.events(1).len(), 1);
    ends.links[0].goodbye();
    ends.transfer(0);
    assert!(ends.links[1].has_left());
    let mut events = Events::new();
    for _ in 0..2 {
        ends.links[1].report(&mut events).expect("it may be in another queue");
    }
    let error = ends.links[1].report(&mut events).expect_err("it cannot arrive any more");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(error.message(), "rank 0 closed its communicator");
    assert_eq!(error.suspect(), Some(0));
}

#[test]
fn a_peer_that_left_before_it_acknowledged_everything_is_no_failure() {
    let mut ends = TwoEnds::new(2);
    ends.begin(1);
    ends.post_recv(0, LONG);
    ends.transfer(0);
    ends.send(1, 1, LONG);
    let requests = ends.requests(1);
    requests.iter().for_each(|request| ends.deliver(1, request));
    assert_eq!(ends.recvs_completed(0), 1);
    ends.links[0].goodbye();
    ends.transfer(0);
    (0..9).for_each(|_| drop(ends.events(1)));
    let last = requests.last().expect("the message");
    ends.links[1].write_completed(last.qp, last.serial);
    assert!(matches!(ends.events(1)[..], [Event::SendComplete { peer: 0 }]));
}

#[test]
fn a_broken_link_fails_only_when_it_is_needed() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    (0..2).for_each(|me| ends.transfer(me));
    assert_eq!(ends.events(0).len(), 1);
    ends.break_end(0, 0);
    ends.links[0].check_if_needed().expect("everything needed has arrived");
    for error in [ends.links[0].check(), ends.links[0].announce(&call(2))] {
        let error = error.expect_err("it is needed now");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert_eq!(error.message(), "rank 1 cannot be reached any more: the cable is disconnected");
        assert_eq!(error.suspect(), Some(1));
    }
    ends.break_end(1, 0);
    ends.links[1].check_if_needed().expect_err("the call has not arrived");
}

#[test]
fn a_receive_over_a_broken_queue_pair_completes_only_after_the_flush() {
    for qps in [1, 2] {
        let mut ends = TwoEnds::new(qps);
        ends.begin(1);
        ends.transfer(0);
        ends.send(1, 1, LONG);
        ends.post_recv(0, LONG);
        (0..2).for_each(|me| ends.transfer(me));
        let link = &mut ends.links[0];
        link.break_qp(0, &Error::peer_lost("the cable is disconnected"));
        let marker = link.drain_marker(0).expect("a queue pair");
        assert_eq!(ends.recvs_completed(0), 0);
        ends.links[0].check_if_needed().expect("everything needed has arrived");
        ends.links[0].write_failed(0, marker.serial);
        for _ in 0..RECV_DEPTH {
            ends.links[0].recv_completed(0);
        }
        ends.links[0].recover();
        assert_eq!(ends.recvs_completed(0), 1);
    }
}

#[test]
fn a_queue_pair_without_pending_completion_is_probed() {
    let mut ends = TwoEnds::new(1);
    ends.begin(1);
    let requests = ends.requests(0);
    assert!(requests.iter().all(|request| !request.needs_completion));
    let probe = ends.links[0].probe(0).expect("alive").expect("nothing else would reveal a lost peer");
    assert!(probe.needs_completion && probe.imm.is_none());
    assert!(ends.links[0].probe(0).expect("alive").is_none(), "one is enough");
    ends.links[0].write_completed(0, probe.serial);
    ends.links[1].goodbye();
    ends.transfer(1);
    assert!(ends.links[0].probe(0).expect("alive").is_some(), "the peer's call has not arrived");
    ends.links[0].write_completed(0, u32::MAX / 4);
    assert_eq!(ends.events(0).len(), 1);
    assert!(ends.links[0].probe(0).expect("alive").is_none(), "a peer that left is not probed");
}

#[test]
fn a_failed_write_says_whether_it_was_gpu_memory() {
    for on_gpu in [false, true] {
        let mut ends = TwoEnds::new(1);
        ends.begin(1);
        (0..2).for_each(|me| ends.transfer(me));
        ends.post_recv(1, LONG);
        ends.transfer(1);
        ends.memory.push(vec![1; LONG]);
        let source = piece(ends.memory.last_mut().expect("just pushed"));
        let region = ends.registry.for_sending(source);
        let start = NonNull::new(source.as_ptr()).expect("an address");
        // SAFETY: the test keeps the memory, which nothing reads through this piece.
        let source = if on_gpu { unsafe { Piece::on_gpu(start, LONG, 0) } } else { source };
        ends.links[0].send(source, Some(region)).expect("alive");
        let requests = ends.requests(0);
        assert_eq!(requests.len(), 1);
        assert_eq!(ends.links[0].write_failed(0, requests[0].serial), on_gpu);
    }
}

#[test]
fn a_queue_pair_that_breaks_before_it_has_carried_enough_is_dropped_after_three_times() {
    let broken = Error::peer_lost("a write was lost");
    for (carried, is_dropped) in [(PROOF as usize, false), (PROOF as usize - 1, true)] {
        let mut ends = TwoEnds::new(2);
        let link = &mut ends.links[0];
        for _ in 0..MOST_FAILURES {
            let serial = link.qps[0].record(RequestKind::Probe, carried as u64);
            link.write_completed(0, serial);
            link.break_qp(0, &broken);
            assert!(link.check().is_ok(), "the other queue pair works");
            link.restart_qp(0);
            assert!(link.needs_hello(0, link.qps[0].generation));
            for request in [link.hello(0), link.trial(0)] {
                assert!(!link.qps[0].is_proven(), "a hello says nothing of long packets");
                link.write_completed(0, request.expect("alive").serial);
            }
            assert!(link.qps[0].is_proven());
        }
        assert_eq!(link.is_dropped(0), is_dropped, "{carried} bytes");
    }
}

/// A rank that only receives over a link proves no write of its own, and a port may be down three times in a
/// job of weeks.
#[test]
fn only_breaks_in_succession_count_and_what_arrives_does_where_nothing_is_sent() {
    let mut qp = QpState::new(0, 0);
    let (begin, minute) = (Instant::now(), Duration::from_secs(60));
    for hour in 1..=5 {
        qp.count_failure(begin + hour * 60 * minute);
        assert_eq!(qp.failures, 1);
    }
    let later = begin + 400 * minute;
    for failures in 1..=2 {
        qp.count_failure(later + failures * minute / 2);
        assert_eq!(qp.failures, failures);
    }
    qp.count_arrived(PROOF);
    let serial = qp.record(RequestKind::Probe, 1);
    qp.count_failure(later + minute);
    assert_eq!(qp.failures, 3, "what this end sends gets lost");
    qp.lose_from(serial);
    qp.count_failure(later + minute);
    assert_eq!(qp.failures, 0);
}
