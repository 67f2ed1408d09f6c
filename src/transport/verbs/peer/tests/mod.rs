//! A peer's link and its queue pairs, over a simulated fabric.

mod fabric;
mod scenario;
mod simulation;

use super::{Peer, wr_id};
use crate::error::{Error, ErrorKind};
use crate::transport::Events;
use crate::transport::fixtures::{Random, call};
use crate::transport::verbs::link::RECV_DEPTH;
use crate::transport::verbs::objects::{Completion, RecordedCalls, Shim, Verb, WcStatus};
use crate::transport::verbs::wire::{ImmData, ImmKind, WINDOW};
use rustix::io::Errno;
use scenario::{Scenario, ScenarioCall};
use simulation::Simulation;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Plays the worlds of many seeds: in how many a rank's call failed, and how many writes waited somewhere at most. A
/// seed that goes wrong is named.
fn run_all(seeds: std::ops::Range<u64>, scenario: impl Fn(u64) -> Scenario) -> (usize, usize) {
    let (mut failed, mut max_queued) = (0, 0);
    for seed in seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| Simulation::new(scenario(seed)).run()));
        let outcome = outcome.unwrap_or_else(|panic| {
            println!("seed {seed}");
            resume_unwind(panic)
        });
        failed += usize::from(outcome.failed.iter().any(Option::is_some));
        max_queued = max_queued.max(outcome.max_queued);
    }
    (failed, max_queued)
}

#[test]
fn all_messages_arrive_once_and_in_order_over_one_to_four_queue_pairs() {
    assert_eq!(run_all(0..4_000, |seed| Scenario::of(seed, 0)).0, 0);
}

#[test]
fn all_messages_arrive_while_one_queue_pair_lives_and_else_the_peer_is_lost() {
    let (failed, _) = run_all(0..16_000, |seed| Scenario::of(seed, 6));
    assert!((100..8_000).contains(&failed), "{failed} worlds fell apart");
}

#[test]
fn there_is_a_receive_for_all_that_can_come_while_nobody_looks() {
    let lens = |long: bool| vec![if long { 5_000 } else { 10 }; 70];
    let (failed, max_queued) = run_all(0..400, |seed| {
        let calls = (0..3).map(|call| {
            let lens = [lens(call != 1), lens(call != 1)];
            ScenarioCall { goes_here: true, lens }
        });
        let scenario = Scenario::of(seed, 0);
        Scenario { rails: vec![(0, 0)], calls: calls.collect(), stepwise: true, ..scenario }
    });
    assert_eq!(failed, 0);
    // A window of messages and as many grants, and there is room for as many again.
    assert!((2 * WINDOW..RECV_DEPTH / 2).contains(&max_queued), "{max_queued} writes waited at most");
}

#[test]
fn a_verb_that_fails_breaks_a_queue_pair_or_the_link_and_nothing_else() {
    run_all(0..4_000, |seed| {
        let scenario = Scenario::of(seed, 3);
        let random = &mut Random(seed ^ 1 << 32);
        let connecting = RECV_DEPTH * scenario.rails.len();
        let shims = [(), ()].map(|()| {
            let (verb, k) = match random.below(4) {
                0 => (Verb::PostSend, scenario.rails.len() + random.below(40)),
                1 => (Verb::PostRecv, connecting + random.below(40)),
                2 => (Verb::ModifyQpToErr, random.below(3)),
                _ => return Shim::none(),
            };
            Shim::failing(verb, k as u64, Errno::IO.raw_os_error())
        });
        Scenario { shims, ..scenario }
    });
}

/// Two ranks with two queue pairs, over which each has said hello and nothing else has happened.
fn after_hellos(shim: Shim) -> Simulation {
    let rails = vec![(0, 0), (1, 1)];
    let shims = [shim, Shim::none()];
    Simulation::new(Scenario {
        seed: 0,
        rails,
        calls: vec![],
        breaks: 0,
        unbroken: None,
        shims,
        stepwise: false,
    })
}

fn failing(verb: Verb, k: usize) -> Shim {
    Shim::failing(verb, k as u64, Errno::IO.raw_os_error())
}

/// Tells how a receive over queue pair 0 ended.
fn received(peer: &mut Peer, outcome: std::result::Result<Option<(u32, u32)>, WcStatus>) {
    peer.handle_completion(&Completion { id: wr_id(0, 0, true, 0), outcome }).expect("what came makes sense");
}

/// Has what a queue pair holds flushed: this many receives, and these requests.
fn flush(peer: &mut Peer, receives: usize, recorded: &RecordedCalls) {
    (0..receives).for_each(|_| received(peer, Err(WcStatus::FLUSHED)));
    for request in &recorded.posted {
        let completion = Completion { id: request.id, outcome: Err(WcStatus::FLUSHED) };
        peer.handle_completion(&completion).expect("no word was heard");
    }
}

/// What is told the peer over queue pair 1 now.
fn posted_kinds(peer: &mut Peer) -> Vec<ImmKind> {
    peer.progress(&mut Events::new()).expect("a queue pair lives");
    let words = peer.qps[1].recorded_calls().posted.into_iter().filter_map(|request| request.immediate);
    words.map(|word| ImmData::unpack(word).kind).collect()
}

#[test]
fn a_queue_pair_is_told_of_when_all_it_held_was_flushed_receives_first() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error, "and the rest comes after");
    flush(peer, RECV_DEPTH - 2, &recorded);
    assert_eq!(posted_kinds(peer), []);
    flush(peer, 1, &RecordedCalls::default());
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0)]);
}

#[test]
fn what_was_carried_out_without_a_completion_does_not_keep_a_broken_queue_pair() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    peer.link.begin(1);
    peer.link.announce(&call(1)).expect("alive");
    peer.progress(&mut Events::new()).expect("alive");
    assert!(peer.qps[0].recorded_calls().posted.iter().all(|request| !request.signalled));
    peer.break_qp(0, &Error::system("the device is tired"));
    let recorded = peer.qps[0].recorded_calls();
    assert_eq!(recorded.posted.len(), 1, "one request marks the end");
    flush(peer, RECV_DEPTH, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0)]);
}

#[test]
fn a_receive_that_could_not_be_posted_is_not_waited_for() {
    let mut simulation = after_hellos(failing(Verb::PostRecv, 2 * RECV_DEPTH));
    let peer = simulation.peer(0);
    received(peer, Ok(Some((ImmData { kind: ImmKind::Hello, epoch: 0 }.pack(), 0))));
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error);
    flush(peer, RECV_DEPTH - 1, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0)]);
}

#[test]
fn a_write_that_came_and_cannot_be_known_loses_the_link() {
    let mut simulation = after_hellos(Shim::none());
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus(4)));
    let error = peer.link.check().expect_err("nobody knows what came");
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().contains("a receive ended with: local protection error (status 4)"), "{error}");
    assert!((0..2).all(|qp| peer.qps[qp].recorded_calls().in_error), "so the peer notices");
}

#[test]
fn a_queue_pair_that_cannot_be_broken_off_loses_the_link() {
    let mut simulation = after_hellos(failing(Verb::ModifyQpToErr, 0));
    let peer = simulation.peer(0);
    received(peer, Err(WcStatus::FLUSHED));
    let error = peer.link.check().expect_err("the peer may still write over it");
    assert!(error.message().contains("ibv_modify_qp to ERR failed on inert0"), "{error}");
    assert!(peer.qps[1].recorded_calls().in_error, "so the peer notices");
}

#[test]
fn a_chain_that_is_refused_goes_over_another_queue_pair() {
    let mut simulation = after_hellos(failing(Verb::PostSend, 2));
    let peer = simulation.peer(0);
    peer.link.begin(1);
    peer.link.announce(&call(1)).expect("alive");
    peer.progress(&mut Events::new()).expect("one lives");
    let recorded = peer.qps[0].recorded_calls();
    assert!(recorded.in_error);
    flush(peer, RECV_DEPTH, &recorded);
    assert_eq!(posted_kinds(peer), [ImmKind::Recovery(0)], "and the peer shall say whether it came");
}
