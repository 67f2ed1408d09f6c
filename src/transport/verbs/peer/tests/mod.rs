//! A peer's link and its queue pairs, over a simulated fabric.

mod fabric;
mod scenario;
mod simulation;

use super::{Peer, wr_id};
use crate::error::{Error, ErrorKind};
use crate::transport::Events;
use crate::transport::fixtures::call;
use crate::transport::verbs::connect_info::RailMessage;
use crate::transport::verbs::link::RECV_DEPTH;
use crate::transport::verbs::objects::{Completion, Destruction, RecordedCalls, Shim, Verb, WcStatus};
use crate::transport::verbs::wire::{ImmData, ImmKind, RECOVERY_BYTES, RecoveryState, WINDOW};
use fastrand::Rng;
use flexring_testkit::effort::cases;
use rustix::io::Errno;
use scenario::{Scenario, ScenarioCall};
use simulation::Simulation;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// What many simulations have in common.
struct Summary {
    /// In how many a rank's call failed.
    failed: u64,
    /// The most writes that ever waited on one queue pair to be polled.
    max_queued: usize,
    /// How often ends of queue pairs were connected again, and bytes of messages that these carried.
    reconnected: u64,
    carried_again: u64,
    /// Messages that were written apart from their immediate data.
    split: u64,
}

/// Runs the scenarios of this many seeds. A seed that panics is printed.
fn run_all(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Summary {
    let mut summary = Summary { failed: 0, max_queued: 0, reconnected: 0, carried_again: 0, split: 0 };
    for seed in 0..seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| Simulation::new(scenario(seed)).run()));
        let outcome = outcome.unwrap_or_else(|panic| {
            println!("seed {seed}");
            resume_unwind(panic)
        });
        summary.failed += u64::from(outcome.failed.iter().any(Option::is_some));
        let rails = outcome.rails.iter().flatten();
        summary.reconnected += rails.map(|rail| rail.reconnections).sum::<u64>();
        summary.carried_again += outcome.carried_again;
        summary.split += outcome.split;
        summary.max_queued = summary.max_queued.max(outcome.max_queued);
    }
    summary
}

#[test]
fn all_messages_arrive_once_and_in_order_over_one_to_four_queue_pairs() {
    let seeds = cases(2_000);
    let Summary { failed, split, .. } = run_all(seeds, |seed| Scenario::new(seed, 0));
    assert_eq!(failed, 0);
    assert!(split > seeds, "{split} messages were written apart from their immediate data");
}

/// A full window of messages in each direction, each of two writes.
#[test]
fn send_queues_have_room_for_messages_that_are_written_apart_from_their_immediate_data() {
    let summary = run_all(cases(200), |seed| {
        let lens = || [(); 2].map(|()| vec![5_000; 3 * WINDOW]);
        let calls = (0..2).map(|_| ScenarioCall { uses_link: true, lens: lens() }).collect();
        let qps = 1 + seed as usize % 2;
        let rails = (0..qps).map(|rail| (rail, rail)).collect();
        Scenario {
            rails,
            calls,
            longest_eager: 4096,
            split_above: [Some(0), Some(0)],
            ..Scenario::new(seed, 0)
        }
    });
    assert_eq!((summary.failed, summary.split), (0, cases(200) * 2 * 2 * 3 * WINDOW as u64));
}

#[test]
fn messages_that_are_written_apart_from_their_immediate_data_survive_every_fault() {
    let seeds = cases(1_000);
    let summary = run_all(seeds, |seed| {
        let scenario = Scenario::new(seed, 8);
        let random = &mut Rng::with_seed(seed ^ 1 << 33);
        let shims = [(), ()].map(|()| match random.usize(..3) {
            0 => failing(Verb::PostSend, scenario.rails.len() + random.usize(..40)),
            1 => failing(Verb::ModifyQpToErr, random.usize(..3)),
            _ => Shim::none(),
        });
        Scenario { split_above: [Some(0), Some(4_000)], shims, unbroken: None, reconnects: true, ..scenario }
    });
    assert!(summary.split > 10 * seeds && summary.reconnected > seeds / 2, "{} split", summary.split);
}

#[test]
fn all_messages_arrive_while_one_queue_pair_is_alive_and_the_peer_is_lost_otherwise() {
    let seeds = cases(2_500);
    let Summary { failed, .. } = run_all(seeds, |seed| Scenario::new(seed, 6));
    assert!((seeds / 160..=seeds / 2).contains(&failed), "{failed} of {seeds} simulations lost the peer");
}

#[test]
fn counters_of_rails_contain_every_byte_that_is_sent_and_received() {
    for seed in 0..cases(400) {
        let scenario = Scenario::new(seed, 0);
        let payload = |from: usize| {
            let used = scenario.calls.iter().filter(|call| call.uses_link);
            used.flat_map(|call| &call.lens[from]).sum::<usize>() as u64
        };
        let payload = [payload(0), payload(1)];
        let rails = Simulation::new(scenario).run().rails;
        for from in 0..2 {
            let sent: u64 = rails[from].iter().map(|rail| rail.bytes_sent).sum();
            let received: u64 = rails[1 - from].iter().map(|rail| rail.bytes_received).sum();
            assert!(
                payload[from] <= received && received <= sent,
                "seed {seed}: {} bytes in messages, {received} received of {sent} sent",
                payload[from]
            );
            let sent: u64 = rails[from].iter().map(|rail| rail.messages_sent).sum();
            let received: u64 = rails[1 - from].iter().map(|rail| rail.messages_received).sum();
            assert!(received <= sent, "seed {seed}: {received} messages received of {sent}");
        }
    }
}

#[test]
fn enough_receives_are_posted_for_a_peer_that_does_not_poll() {
    let lens = |long: bool| vec![if long { 5_000 } else { 10 }; 70];
    let Summary { failed, max_queued, .. } = run_all(cases(400), |seed| {
        let calls = (0..3).map(|call| {
            let lens = [lens(call != 1), lens(call != 1)];
            ScenarioCall { uses_link: true, lens }
        });
        let scenario = Scenario::new(seed, 0);
        // Only the second of two writes is polled.
        let split_above = [None, None];
        let rails = vec![(0, 0)];
        Scenario {
            rails,
            calls: calls.collect(),
            longest_eager: 4096,
            split_above,
            stepwise: true,
            ..scenario
        }
    });
    assert_eq!(failed, 0);
    // A window of messages and as many CTS writes, and there is room for as many again.
    assert!((2 * WINDOW..RECV_DEPTH / 2).contains(&max_queued), "at most {max_queued} writes waited");
}

#[test]
fn a_verb_that_fails_breaks_a_queue_pair_or_the_link_and_nothing_else() {
    let seeds = cases(2_000);
    let Summary { failed, .. } = run_all(seeds, |seed| {
        let scenario = Scenario::new(seed, 3);
        let random = &mut Rng::with_seed(seed ^ 1 << 32);
        // The receives of a new queue pair are one chain.
        let connecting = scenario.rails.len();
        let shims = [(), ()].map(|()| {
            let (verb, k) = match random.usize(..4) {
                0 => (Verb::PostSend, scenario.rails.len() + random.usize(..40)),
                1 => (Verb::PostRecv, connecting + random.usize(..40)),
                2 => (Verb::ModifyQpToErr, random.usize(..3)),
                _ => return Shim::none(),
            };
            Shim::failing(verb, k as u64, Errno::IO.raw_os_error())
        });
        Scenario { shims, ..scenario }
    });
    assert!((seeds / 20..=seeds * 9 / 10).contains(&failed), "{failed} of {seeds} simulations failed");
}

#[test]
fn a_queue_pair_that_is_never_flushed_is_destroyed_and_costs_its_rail_only() {
    let seeds = cases(400);
    let Summary { failed, .. } = run_all(seeds, |seed| {
        let scenario = Scenario::new(seed, 3);
        // One rail stays.
        let rails = if scenario.rails.len() > 1 { scenario.rails.clone() } else { vec![(0, 0), (1, 1)] };
        let unbroken = Some(seed as usize % rails.len());
        Scenario { rails, unbroken, stuck: Some(seed as usize / 4 % 2), ..scenario }
    });
    // Those in which the completion of a message was lost, which its sender had seen acknowledged.
    assert!(failed < seeds / 4, "{failed} of {seeds} simulations failed");
}

/// All queue pairs may be broken at the same time, as often as not.
#[test]
fn broken_queue_pairs_are_connected_again_and_carry_messages() {
    let seeds = cases(1_000);
    let summary = run_all(seeds, |seed| {
        let scenario = Scenario::new(seed, 12);
        Scenario { unbroken: None, reconnects: true, ..scenario }
    });
    assert_eq!(summary.failed, 0, "rails always come back");
    let Summary { reconnected, carried_again, .. } = summary;
    assert!(
        reconnected > seeds && carried_again > 1000 * seeds,
        "{reconnected} times, {carried_again} bytes"
    );
}

#[test]
fn a_device_that_refuses_to_connect_a_queue_pair_again_costs_an_attempt() {
    let seeds = cases(400);
    let summary = run_all(seeds, |seed| {
        let scenario = Scenario::new(seed, 6);
        let at_first = scenario.rails.len() as u64;
        let verb = [Verb::CreateQp, Verb::ModifyQpToRtr, Verb::ModifyQpToRts][seed as usize % 3];
        let shims = [(), ()].map(|()| Shim::failing(verb, at_first + seed % 4, Errno::IO.raw_os_error()));
        Scenario { unbroken: None, reconnects: true, shims, ..scenario }
    });
    assert_eq!(summary.failed, 0, "later attempts succeed");
}

/// Two ranks with two queue pairs, right after the hellos are posted.
fn after_hellos(shim: Shim) -> Simulation {
    after_hellos_over(2, false, shim)
}

/// Two ranks with this many queue pairs, which may be connected again, right after the hellos are posted.
fn after_hellos_over(qps: usize, reconnects: bool, shim: Shim) -> Simulation {
    let rails = (0..qps).map(|rail| (rail, rail)).collect();
    let shims = [shim, Shim::none()];
    Simulation::new(Scenario {
        seed: 0,
        rails,
        calls: vec![],
        breaks: 0,
        unbroken: None,
        longest_eager: 4096,
        split_above: [None, None],
        shims,
        stuck: None,
        reconnects,
        stepwise: false,
    })
}

/// A shim that makes the `k`-th call of this verb fail, from 0.
fn failing(verb: Verb, k: usize) -> Shim {
    Shim::failing(verb, k as u64, Errno::IO.raw_os_error())
}

/// Completes a receive over queue pair 0 with this outcome.
fn received(peer: &mut Peer, outcome: std::result::Result<Option<(u32, u32)>, WcStatus>) {
    received_over(peer, 0, outcome);
}

/// Completes a receive over a queue pair with this outcome.
fn received_over(peer: &mut Peer, qp: usize, outcome: std::result::Result<Option<(u32, u32)>, WcStatus>) {
    peer.handle_completion(&Completion { id: wr_id(0, qp, true, 0), outcome }).expect("a valid write");
}

/// Flushes this many receives of queue pair 0, and the recorded requests.
fn flush(peer: &mut Peer, receives: usize, recorded: &RecordedCalls) {
    flush_over(peer, 0, receives, recorded);
}

/// Flushes this many receives of a queue pair, and the recorded requests.
fn flush_over(peer: &mut Peer, qp: usize, receives: usize, recorded: &RecordedCalls) {
    (0..receives).for_each(|_| received_over(peer, qp, Err(WcStatus::FLUSHED)));
    for request in &recorded.posted {
        let completion = Completion { id: request.id, outcome: Err(WcStatus::FLUSHED) };
        peer.handle_completion(&completion).expect("flushes are no protocol violation");
    }
}

/// Looks at broken queue pairs. Nothing is sent to the peer.
fn look(peer: &mut Peer, now: Instant) {
    peer.look(now, &|_| true, &mut Vec::new());
}

/// What is posted to the peer over queue pair 1 now.
fn posted_kinds(peer: &mut Peer) -> Vec<ImmKind> {
    peer.progress(&mut Events::new()).expect("a queue pair is alive");
    kinds(&peer.qps[1].recorded_calls())
}

/// What these requests write.
fn kinds(recorded: &RecordedCalls) -> Vec<ImmKind> {
    let posted = recorded.posted.iter();
    posted.filter_map(|request| request.immediate).map(|imm| ImmData::unpack(imm).kind).collect()
}

#[test]
fn a_recovery_state_is_sent_once_all_receives_and_requests_are_flushed() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error, "the first flushed receive breaks the queue pair");
    flush(peer, RECV_DEPTH - 2, &recorded);
    assert_eq!(posted_kinds(peer), []);
    flush(peer, 1, &RecordedCalls::default());
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)]);
}

#[test]
fn unsignalled_requests_do_not_delay_the_recovery_of_a_broken_queue_pair() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    peer.link.begin(1);
    peer.link.announce(&call(1)).expect("alive");
    peer.progress(&mut Events::new()).expect("alive");
    assert!(peer.qps[0].recorded_calls().posted.iter().all(|request| !request.signalled));
    peer.break_qp(0, &Error::system("a fault of the device"));
    let recorded = peer.qps[0].recorded_calls();
    assert_eq!(recorded.posted.len(), 1, "the drain marker");
    flush(peer, RECV_DEPTH, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)]);
}

#[test]
fn a_receive_that_could_not_be_posted_does_not_delay_the_recovery() {
    let mut simulation = after_hellos(failing(Verb::PostRecv, 2));
    let peer = simulation.peer(0);
    received(peer, Ok(Some((ImmData { kind: ImmKind::Hello(0), epoch: 0 }.pack(), 0))));
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error);
    flush(peer, RECV_DEPTH - 1, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)]);
}

/// Counter-example: a request that a device refuses was posted again over one queue pair after the other,
/// without end.
#[test]
fn a_wrong_request_fails_the_link_and_one_that_is_not_acknowledged_does_not() {
    for (code, fails) in [(9, true), (10, true), (12, false)] {
        let mut simulation = after_hellos(Shim::none());
        let peer = simulation.peer(0);
        peer.link.begin(1);
        peer.link.announce(&call(1)).expect("alive");
        peer.progress(&mut Events::new()).expect("alive");
        let recorded = peer.qps[0].recorded_calls();
        let id = recorded.posted.last().expect("a request").id;
        let outcome = Err(WcStatus { code, vendor_err: 0 });
        peer.handle_completion(&Completion { id, outcome }).expect("no protocol violation");
        assert_eq!(peer.link.check().is_err(), fails, "status {code}");
        assert_eq!(peer.qps[1].recorded_calls().in_error, fails, "status {code}");
    }
}

#[test]
fn a_failed_receive_that_is_not_flushed_fails_the_link() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus { code: 4, vendor_err: 0x51 }));
    let error = peer.link.check().expect_err("what arrived is unknown");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(
        error
            .message()
            .contains("a receive ended with: local protection error (status 4, vendor error 0x51)"),
        "{error}"
    );
    assert!(error.message().contains("; on inert0 port 1 for rank 1, queue pair "), "{error}");
    assert!((0..2).all(|qp| peer.qps[qp].recorded_calls().in_error), "so the peer notices");
}

#[test]
fn a_queue_pair_that_cannot_be_moved_to_the_error_state_is_destroyed() {
    let mut simulation = after_hellos(failing(Verb::ModifyQpToErr, 0));
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    assert!(peer.qps[0].connected.is_none(), "the peer may not write over it any more");
    look(peer, Instant::now());
    assert_eq!(posted_kinds(peer), [], "its last completions are polled first");
    look(peer, Instant::now());
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)]);
    received(peer, Ok(Some((ImmData { kind: ImmKind::Call, epoch: 1 }.pack(), 40))));
    assert_eq!(posted_kinds(peer), [], "what completes later does not count");
    peer.link.check().expect("the other rail is alive");
}

#[test]
fn a_queue_pair_has_a_second_to_be_flushed() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    let began = Instant::now();
    received(peer, Err(WcStatus::FLUSHED));
    for (seconds, is_destroyed) in [(0, false), (1, false), (2, true)] {
        look(peer, began + Duration::from_secs(seconds));
        assert_eq!(peer.qps[0].connected.is_none(), is_destroyed, "after {seconds} s");
    }
}

#[test]
fn requests_of_a_refused_chain_are_recovered_over_another_queue_pair() {
    let mut simulation = after_hellos(failing(Verb::PostSend, 2));
    let peer = simulation.peer(0);
    peer.link.begin(1);
    peer.link.announce(&call(1)).expect("alive");
    peer.progress(&mut Events::new()).expect("a queue pair is alive");
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error);
    flush(peer, RECV_DEPTH, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)], "the call waits for the peer's recovery state");
}

#[test]
fn an_aborted_link_waits_for_a_queue_pair_that_is_being_destroyed() {
    let mut simulation = after_hellos(failing(Verb::ModifyQpToErr, 0));
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    let (destruction, unfinished) = Destruction::unfinished();
    peer.qps[0].destruction = Some(destruction);
    peer.abort(&Error::peer_lost("the call failed"));
    let recorded = peer.qps[1].recorded_calls();
    assert!(recorded.in_error);
    flush_over(peer, 1, RECV_DEPTH, &recorded);
    let (at_once, much_later) = (Duration::ZERO, Duration::from_secs(3600));
    assert!(!peer.is_aborted(much_later), "the device may still execute a write of the peer");
    drop(unfinished);
    assert!(peer.is_aborted(at_once), "nothing else is waited for");
}

#[test]
fn an_aborted_link_does_not_wait_long_for_a_device_that_does_not_flush() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    peer.abort(&Error::peer_lost("the call failed"));
    assert!(!peer.is_aborted(Duration::from_millis(400)));
    assert!(peer.is_aborted(Duration::from_millis(600)), "in the error state, the device executes no write");
}

#[test]
fn a_link_that_fails_destroys_queue_pairs_that_cannot_be_moved_to_the_error_state() {
    let mut simulation = after_hellos(failing(Verb::ModifyQpToErr, 1));
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus { code: 4, vendor_err: 0x51 }));
    peer.link.check().expect_err("what arrived is unknown");
    assert!(peer.qps[0].recorded_calls().in_error);
    assert!(peer.qps[1].connected.is_none(), "the peer may not write over it any more");
}

/// The peer's device acknowledged the state, and then was destroyed before the peer had polled it.
#[test]
fn a_recovery_state_that_may_be_lost_with_a_destroyed_queue_pair_is_sent_again() {
    let mut simulation = after_hellos_over(3, false, Shim::none());
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    let recorded = peer.qps[0].recorded_calls();
    flush(peer, RECV_DEPTH - 1, &recorded);
    peer.progress(&mut Events::new()).expect("a queue pair is alive");
    let recorded = peer.qps[1].recorded_calls();
    assert_eq!(kinds(&recorded), [ImmKind::Recovery(0, 0)]);
    for request in recorded.posted {
        peer.handle_completion(&Completion { id: request.id, outcome: Ok(None) }).expect("acknowledged");
    }
    let broken = ImmData { kind: ImmKind::Recovery(1, 0), epoch: 0 }.pack();
    received_over(peer, 2, Ok(Some((broken, RECOVERY_BYTES as u32))));
    peer.progress(&mut Events::new()).expect("a queue pair is alive");
    let recorded = peer.qps[1].recorded_calls();
    assert!(recorded.in_error, "it is broken at the peer's end");
    flush_over(peer, 1, RECV_DEPTH, &recorded);
    peer.progress(&mut Events::new()).expect("a queue pair is alive");
    let posted = kinds(&peer.qps[2].recorded_calls());
    assert_eq!(posted, [ImmKind::Recovery(1, 0), ImmKind::Recovery(0, 0)]);
}

/// Counter-example: the end that dropped it looked at it for ever, and the other offered a new one again and
/// again.
#[test]
fn a_queue_pair_that_one_end_drops_is_forgotten_by_both() {
    let mut simulation = after_hellos_over(2, true, Shim::none());
    let now = Instant::now();
    for me in [0, 1] {
        let peer = simulation.peer(me);
        peer.break_qp(0, &Error::peer_lost("a write was lost"));
        let recorded = peer.qps[0].recorded_calls();
        flush(peer, RECV_DEPTH, &recorded);
        peer.link.received_state(0, 0, RecoveryState::default()).expect("valid");
        assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0, 0)]);
        peer.link.write_completed(1, u32::MAX / 4);
    }
    let looks = |peer: &mut Peer, minutes: std::ops::Range<u64>| {
        let mut messages = Vec::new();
        for minute in minutes {
            peer.look(now + Duration::from_secs(60 * minute), &|_| true, &mut messages);
        }
        messages
    };
    simulation.peer(0).link.drop_qp_here(0);
    let dropped = looks(simulation.peer(0), 0..9);
    assert!(matches!(dropped[..], [RailMessage::Dropped { qp: 0 }]), "{dropped:?}");
    let other = simulation.peer(1);
    assert!(matches!(looks(other, 0..9)[..], [RailMessage::Offer { .. }]), "it has not heard of it");
    for message in dropped {
        other.on_rail_message(message, now, &|_| true, &mut Vec::new()).expect("a valid message");
    }
    for me in [0, 1] {
        let peer = simulation.peer(me);
        let messages = looks(peer, 9..19);
        assert!(messages.is_empty() && !peer.needs_look(), "rank {me}: {messages:?}");
        assert!(peer.qps[0].reconnection.fresh.is_none());
        peer.link.check().expect("the other queue pair works");
    }
}

/// Counter-example: an end that had lost no trial would send longer packets than the other expects.
#[test]
fn both_ends_of_a_queue_pair_use_the_shorter_packets() {
    let mut simulation = after_hellos_over(2, true, Shim::none());
    let peer = simulation.peer(0);
    peer.qps[0].reconnection.path.mtu = 4;
    let end = crate::transport::verbs::objects::Endpoint { qpn: 1, psn: 1 };
    for (mtu, expected) in [(5, 4), (3, 3), (4, 3), (0, 1)] {
        let offer = RailMessage::Offer { qp: 0, generation: 1, end, mtu };
        peer.on_rail_message(offer, Instant::now(), &|_| true, &mut Vec::new()).expect("a valid message");
        assert_eq!(peer.qps[0].reconnection.path.mtu, expected);
    }
}

/// As when a message is found to be lost for good after the call that sent it.
#[test]
fn a_link_that_fails_at_one_end_is_reported_to_the_other() {
    let mut simulation = after_hellos_over(2, true, Shim::none());
    let peer = simulation.peer(0);
    peer.link.mark_unreachable(&Error::peer_lost("a message was lost"));
    peer.progress(&mut Events::new()).expect("no call needs the link");
    assert!((0..2).all(|qp| peer.qps[qp].recorded_calls().in_error), "so the peer notices");
    assert!(peer.needs_look());
    let mut messages = Vec::new();
    let now = Instant::now();
    peer.look(now, &|_| true, &mut messages);
    peer.look(now, &|_| true, &mut messages);
    let [RailMessage::Aborted { cause }] = &messages[..] else { panic!("once: {messages:?}") };
    assert!(cause.contains("a message was lost"), "{cause}");
    let other = simulation.peer(1);
    for qp in 0..2 {
        other.break_qp(qp, &Error::peer_lost("no acknowledgement"));
    }
    other.link.check().expect("a rail may come back");
    for message in messages {
        other.on_rail_message(message, now, &|_| true, &mut Vec::new()).expect("a valid message");
    }
    other.link.check().expect_err("no rail comes back");
    let mut simulation = after_hellos_over(2, true, Shim::none());
    let other = simulation.peer(1);
    for qp in 0..2 {
        let dropped = RailMessage::Dropped { qp };
        other.on_rail_message(dropped, now, &|_| true, &mut Vec::new()).expect("a valid message");
        assert_eq!(other.link.check().is_err(), qp == 1, "the last one");
    }
}

#[test]
fn a_link_whose_devices_have_all_failed_does_not_wait_for_a_rail() {
    let mut simulation = after_hellos_over(2, true, Shim::none());
    let peer = simulation.peer(0);
    let cause = |rail| Some(Error::system(format!("inert{rail}: the device failed")));
    peer.fail_rail(0, &[cause(0), None]);
    peer.link.check().expect("the other rail is alive");
    peer.break_qp(1, &Error::peer_lost("no acknowledgement"));
    peer.link.check().expect("its rail may come back");
    peer.fail_rail(1, &[cause(0), cause(1)]);
    let error = peer.link.check().expect_err("no rail comes back");
    assert_eq!((error.kind(), error.suspect()), (ErrorKind::System, None), "no peer is to blame: {error}");
    let expected = "no rail to rank 1 is left: inert0: the device failed; inert1: the device failed";
    assert_eq!(error.message(), expected);
}
