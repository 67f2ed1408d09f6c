//! The contract of transports, as the tests of its siblings check it.

use super::*;
use crate::error::ErrorKind;
use crate::transport::verbs::wire::WINDOW;

const LIMIT: Duration = Duration::from_secs(40);

/// Lengths around all limits of eager messages and sub-chunks, more than a window of them.
fn lens() -> Vec<usize> {
    let around =
        [0, 1, 2, 63, LONGEST_EAGER - 1, LONGEST_EAGER, LONGEST_EAGER + 1, SUBCHUNK / 2 + 3, SUBCHUNK];
    around.into_iter().cycle().take(2 * WINDOW + 3).collect()
}

/// The lengths of several calls' messages: first a few of each sort, then many.
fn calls() -> [Vec<usize>; 6] {
    [vec![0], vec![SUBCHUNK], vec![LONGEST_EAGER + 1, 10, 100], vec![10; 6], lens(), vec![0, 7]]
}

pub(super) fn exchange_all(setup: &LinkSetup) {
    let act = |rank: &mut ConnectedRank| {
        let mut heap = HeapMemory::default();
        (1..).zip(calls()).try_for_each(|(sequence, lens)| rank.exchange(sequence, &lens, &mut heap))
    };
    for outcome in setup.run(act).expect("all devices work") {
        outcome.expect("no failure");
    }
}

/// Two ranks after the handshake.
fn two_ranks(rails: &[Rail]) -> (ConnectedRank, ConnectedRank) {
    let mut ranks = LinkSetup::over(rails, rails.len()).link().expect("all devices work").into_iter();
    let (mut one, mut other) = (ranks.next().expect("rank 0"), ranks.next().expect("rank 1"));
    let deadline = Instant::now() + LIMIT;
    thread::scope(|scope| {
        let handshake = scope.spawn(|| one.verbs.handshake(deadline));
        other.verbs.handshake(deadline).0.expect("the peer is alive");
        handshake.join().expect("no rank panics").0.expect("the peer is alive");
    });
    (one, other)
}

#[test]
fn two_ranks_exchange_messages_of_all_sizes_over_one_device() {
    on_rails(LIMIT, |rails| exchange_all(&LinkSetup::over(rails, 1)));
}

#[test]
fn two_ranks_exchange_messages_of_all_sizes_over_all_devices_and_several_queue_pairs() {
    on_rails(LIMIT, |rails| {
        exchange_all(&LinkSetup { qps_per_rail: 2, ..LinkSetup::over(rails, rails.len()) })
    });
}

#[test]
fn three_ranks_exchange_messages_of_all_sizes() {
    on_rails(LIMIT, |rails| exchange_all(&LinkSetup { ranks: 3, ..LinkSetup::over(rails, rails.len()) }));
}

#[test]
fn messages_of_all_sizes_are_written_apart_from_their_immediate_data() {
    on_rails(LIMIT, |rails| {
        let adaptive_routing = AdaptiveRouting::On;
        exchange_all(&LinkSetup { qps_per_rail: 2, adaptive_routing, ..LinkSetup::over(rails, rails.len()) });
    });
}

/// The simulated driver treats host memory as memory of a GPU that needs flushes.
#[test]
fn messages_are_sent_from_and_received_into_gpu_memory_and_flushed() {
    on_rails(LIMIT, |rails| {
        // Long messages are written apart from their immediate data, whose completion is held back.
        let adaptive_routing = AdaptiveRouting::On;
        let setup = LinkSetup { on_gpu: true, adaptive_routing, ..LinkSetup::over(rails, rails.len()) };
        let act = |rank: &mut ConnectedRank| {
            rank.verbs.set_gpus(GpuRegistrar::with_fake_driver());
            let mut pool = MessagePool::on_gpu(2 * WINDOW);
            assert!(!rank.verbs.can_send_from(pool.whole) && !rank.verbs.can_recv_into(pool.whole));
            rank.registrar.register(pool.whole)?;
            (1..).zip(calls()).try_for_each(|(sequence, lens)| rank.exchange(sequence, &lens, &mut pool))?;
            assert!(rank.verbs.flushes(), "this GPU needs flushes");
            rank.registrar.deregister(pool.whole)
        };
        for outcome in setup.run(act).expect("all devices work") {
            outcome.expect("no failure");
        }
    });
}

#[test]
fn registered_memory_is_used_in_place_and_other_memory_is_staged() {
    on_rails(LIMIT, |rails| {
        let setup = LinkSetup { registration: Registration::Stage, ..LinkSetup::over(rails, rails.len()) };
        let act = |rank: &mut ConnectedRank| {
            assert!(rank.verbs.stages_host_memory());
            let mut pool = MessagePool::new(2 * WINDOW);
            assert!(!rank.verbs.can_send_from(pool.whole) && !rank.verbs.can_recv_into(pool.whole));
            rank.registrar.register(pool.whole)?;
            (1..).zip(calls()).try_for_each(|(sequence, lens)| rank.exchange(sequence, &lens, &mut pool))?;
            rank.registrar.deregister(pool.whole)?;
            assert!(!rank.verbs.can_send_from(pool.whole));
            Ok(())
        };
        for outcome in setup.run(act).expect("all devices work") {
            outcome.expect("no failure");
        }
    });
}

#[test]
fn messages_of_the_next_call_are_not_reported_early() {
    on_rails(LIMIT, |rails| {
        let (mut behind, mut ahead) = two_ranks(rails);
        let mut sent = [[1; 100], [2; 100], [3; 100]];
        behind.begin(1).expect("alive");
        behind.verbs.poll(&mut Events::new()).expect("alive");
        for sequence in 1..=2 {
            ahead.begin(sequence).expect("alive");
            if sequence == 1 {
                ahead.expect_entered(1);
            }
            for message in &mut sent {
                ahead.verbs.send(0, piece(message)).expect("alive");
            }
            let mut events = Events::new();
            while events.len() < 3 {
                ahead.verbs.poll(&mut events).expect("alive");
            }
        }
        for sequence in 1..=2 {
            if sequence == 2 {
                behind.begin(2).expect("alive");
            }
            behind.expect_entered(sequence);
            let mut destinations = [[0; 100]; 3];
            for destination in &mut destinations {
                behind.verbs.post_recv(1, piece(destination)).expect("alive");
            }
            let mut events = Events::new();
            while events.len() < 3 {
                behind.verbs.poll(&mut events).expect("alive");
            }
            assert!(
                events.iter().all(|event| matches!(event, Event::RecvComplete { peer: 1 })),
                "{events:?}"
            );
            assert_eq!(destinations, sent);
            behind.expect_silence();
        }
        let (one, other) = (thread::spawn(|| drop(ahead)), thread::spawn(|| drop(behind)));
        assert!(one.join().is_ok() && other.join().is_ok());
    });
}

#[test]
fn messages_beyond_the_window_or_for_unknown_ranks_are_refused() {
    on_rails(LIMIT, |rails| {
        let (mut here, mut there) = two_ranks(rails);
        let mut message = vec![0; SUBCHUNK];
        let mut destinations = vec![0; (WINDOW + 1) * SUBCHUNK];
        let destinations = piece(&mut destinations);
        here.begin(1).expect("alive");
        assert_eq!(here.verbs.window(), WINDOW);
        for at in 0..WINDOW {
            here.verbs.send(1, piece(&mut message)).expect("within the window");
            here.verbs.post_recv(1, destinations.narrow(at * SUBCHUNK, SUBCHUNK)).expect("within the window");
        }
        let beyond = destinations.narrow(WINDOW * SUBCHUNK, SUBCHUNK);
        for error in [here.verbs.send(1, piece(&mut message)), here.verbs.post_recv(1, beyond)] {
            assert_eq!(error.expect_err("beyond the window").kind(), ErrorKind::Internal);
        }
        let unknown = here.verbs.send(7, piece(&mut message));
        assert_eq!(unknown.expect_err("there is no link to rank 7").kind(), ErrorKind::Internal);
        here.verbs.abort();
        there.verbs.abort();
    });
}

#[test]
fn aborted_links_are_an_error_at_both_ends() {
    on_rails(LIMIT, |rails| {
        let (mut here, mut there) = two_ranks(rails);
        let mut destination = vec![0; SUBCHUNK];
        here.begin(1).expect("alive");
        there.begin(1).expect("alive");
        here.verbs.post_recv(1, piece(&mut destination)).expect("alive");
        here.verbs.poll(&mut Events::new()).expect("alive");
        there.expect_entered(1);
        here.verbs.abort();
        drop(destination);
        let error = here.verbs.poll(&mut Events::new()).expect_err("aborted");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(here.verbs.announce(1, &call(2)).expect_err("aborted").message().contains("aborted"));
        let mut message = vec![0; SUBCHUNK];
        there.verbs.send(0, piece(&mut message)).expect("the abort is not detected yet");
        let error = there.next().expect_err("rank 0 has aborted");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(
            error.message().starts_with("rank 0 cannot be reached any more: a write ended with"),
            "{error}"
        );
        there.verbs.abort();
    });
}

#[test]
fn a_peer_that_leaves_is_an_error_only_when_it_is_needed() {
    on_rails(LIMIT, |rails| {
        let (mut here, there) = two_ranks(rails);
        here.verbs.begin(1);
        drop(there);
        here.expect_silence();
        here.verbs.announce(1, &call(1)).and_then(|()| here.next().map(drop)).expect_err("it has left");
        here.verbs.abort();
    });
}
