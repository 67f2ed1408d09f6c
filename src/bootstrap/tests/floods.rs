//! Ranks that send much and read nothing: each is named and dropped before it fills the memory of others.

use super::super::coordinator_worlds::{Worlds, WorldsAction};
use super::super::protocol::{
    Bytes, MAX_SUBWORLDS, PEER_MESSAGE_LIMIT, ToCoordinator, ToRank, encode, encode_value,
};
use super::super::rendezvous::JoinedPeer;
use super::failures::member_of_fake_coordinator;
use super::*;
use flexring_testkit::fuzzing::AllocationLimit;

/// Sends a frame over and over, without reading, until the other end closes the connection. Returns the bytes
/// that it has taken, which are no more than `most`.
fn flood(stream: &mut FramedStream, frame: &Bytes, most: usize) -> usize {
    // Few system calls: the other end counts frames.
    let frame: Bytes = frame.repeat((16 << 10) / frame.len() + 1).into();
    let mut sent = 0;
    while sent < most {
        if stream.has_unsent() {
            thread::sleep(Duration::from_millis(1));
        } else {
            stream.enqueue(Bytes::clone(&frame));
            sent += frame.len();
        }
        if stream.flush().is_err() {
            break;
        }
    }
    sent
}

/// Counter-example: what a rank sent to itself was queued without limit, 1 GB in 7.5 s; and 37 MB of `Open`
/// became 604 MB.
#[test]
fn a_rank_that_does_not_read_what_it_causes_is_named_and_dropped() {
    let messages = vec![(2, vec![0; PEER_MESSAGE_LIMIT]); 16];
    let open = ToCoordinator::Open { world: 1, members: Vec::new(), timeout: Duration::from_secs(1) };
    for (message, most) in [(ToCoordinator::ToPeers(messages), 128 << 20), (open, 32 << 20)] {
        watched(move || {
            // A busy coordinator may be late for the heartbeats of the other tests.
            let (members, mut peer) = world_with_heartbeat(3, Duration::from_secs(1));
            let sent = flood(&mut peer, &encode(&message).expect("short"), most);
            assert!(sent < most, "the coordinator took {sent} bytes");
            let error = common_fault(&members);
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            for part in ["rank 2 (pid 4242 on host elsewhere)", "its other end does not read them"] {
                assert!(error.message().contains(part), "{part}: {error}");
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_read_what_others_send_it_is_named() {
    watched(|| {
        let rendezvous = address_of(free_port());
        thread::scope(|scope| {
            let bare = |rank| {
                let (header, params) = hello_of(rank, 3);
                join_as(&header, &params, &rendezvous).expect("welcome").stream
            };
            let (sender, silent) = (scope.spawn(move || bare(1)), scope.spawn(move || bare(2)));
            let zero = join_ranks(0..1, 3, &rendezvous, &config());
            let (mut sender, mut silent) = (sender.join().expect("joined"), silent.join().expect("joined"));
            // It lives, and reads nothing.
            scope.spawn(move || {
                while silent.flush().is_ok() {
                    silent.enqueue(encode(&ToCoordinator::Alive).expect("short"));
                    thread::sleep(Duration::from_millis(20));
                }
            });
            let messages = encode(&ToCoordinator::ToPeers(vec![(2, vec![0; PEER_MESSAGE_LIMIT]); 16]));
            flood(&mut sender, &messages.expect("short"), 64 << 20);
            let error = zero[0].wait_for_fault();
            for part in ["rank 2 (pid 4242 on host elsewhere)", "its other end does not read them"] {
                assert!(error.message().contains(part), "{part}: {error}");
            }
        });
    });
}

#[test]
fn a_coordinator_that_does_not_read_what_it_asks_for_is_named() {
    watched(|| {
        let (member, mut coordinator) = member_of_fake_coordinator();
        let most = 64 << 20;
        let sent = flood(&mut coordinator, &encode(&ToRank::RequestState).expect("short"), most);
        assert!(sent < most, "the rank took {sent} bytes");
        let error = member.wait_for_fault();
        for part in ["rank 0 (pid 1 on host a)", "its other end does not read them"] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
    });
}

/// The worlds of `size` ranks, before any of them has sent anything.
fn worlds(size: usize) -> Worlds {
    let peer = |rank| JoinedPeer { process: Process::example(rank), params: hello_of(rank, size).1 };
    let mut worlds = Worlds::new((0..size).map(peer).collect(), Process::example(0), Instant::now());
    let _ = worlds.actions();
    worlds
}

#[test]
fn short_elements_of_long_lists_take_no_memory() {
    let mut worlds = worlds(3);
    for message in [
        ToCoordinator::ToPeers(vec![(1, Vec::new()); 4 << 20]),
        ToCoordinator::Open { world: 1, members: vec![1; 4 << 20], timeout: Duration::from_secs(1) },
    ] {
        let frame = encode_value(&message).expect("bytes");
        drop(message);
        let limit = AllocationLimit::start();
        assert!(!worlds.on_frame(1, &frame, Instant::now()), "no release sends so many");
        assert!(limit.peak() < 4 << 20, "{} bytes", limit.peak());
    }
}

#[test]
fn worlds_that_one_rank_opens_alone_take_limited_memory() {
    let mut worlds = worlds(1000);
    let now = Instant::now();
    let limit = AllocationLimit::start();
    let mut refused = 0;
    for world in 0..1500 {
        let open =
            ToCoordinator::Open { world, members: (0..1000).collect(), timeout: Duration::from_secs(60) };
        assert!(worlds.on_frame(7, &encode_value(&open).expect("short"), now));
        for action in worlds.actions() {
            let WorldsAction::Send(to, ToRank::InWorld { .. }) = action else { panic!("{action:?}") };
            assert_eq!(to, [7]);
            refused += 1;
        }
    }
    assert!(limit.peak() < 64 << 20, "{} bytes", limit.peak());
    assert_eq!(refused, 1500 - (1 << 20) / 1000);
    // Another rank is not concerned.
    let open = ToCoordinator::Open { world: 7777, members: vec![0, 8], timeout: Duration::from_secs(60) };
    assert!(worlds.on_frame(8, &encode_value(&open).expect("short"), now));
    assert_eq!(worlds.actions(), []);
    const { assert!(MAX_SUBWORLDS * 16 <= 1 << 20) };
}
