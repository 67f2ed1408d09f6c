//! What a lost rank, a lost coordinator and a hostile rank do to the worlds of one connection, and worlds
//! that do not come about.

use super::super::CallState;
use super::super::call_state::example_call;
use super::super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, WorldId, decode, encode};
use super::failures::{member_of_fake_coordinator, send};
use super::subworlds::{assert_well, exchange, open, open_on};
use super::unique_ids::eventually;
use super::*;

/// Lets a bare connection, which is the last rank of the first world, open a world.
fn open_by_fake_peer(fake_peer: &mut FramedStream, world: WorldId, members: &[Rank]) {
    let timeout = Duration::from_secs(10);
    send(fake_peer, &ToCoordinator::Open { world, members: members.to_vec(), timeout });
}

/// The next message of this kind in a subworld.
fn message_in_world(connection: &mut FramedStream, of: WorldId) -> ToRank {
    loop {
        for frame in connection.receive(FRAME_LIMIT).frames {
            match decode(&frame) {
                Some(ToRank::InWorld { world, message }) if world == of => {
                    return decode(&message).expect("a message");
                }
                _ => {}
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_dies_fails_exactly_its_worlds() {
    watched(|| {
        let (first, mut fake_peer) = world_with_fake_peer(4);
        open_by_fake_peer(&mut fake_peer, 1, &[0, 3, 1]);
        let with = thread::scope(|scope| {
            let threads: Vec<_> = [0, 1]
                .map(|rank: Rank| {
                    let carrier = &first[rank].control;
                    scope.spawn(move || open_on(carrier, 1, &[0, 3, 1], &config()).expect("opened"))
                })
                .into();
            threads.into_iter().map(|thread| thread.join().expect("opened")).collect::<Vec<_>>()
        });
        let without = open(&first, 2, &[0, 1, 2]);
        // Ranks that wait for the dead one to open a world learn it at once.
        thread::scope(|scope| {
            let waiting = scope.spawn(|| open_on(&first[0].control, 3, &[0, 3], &config()).map(drop));
            let state = CallState::InCall(example_call(17));
            let in_call = ToCoordinator::Heartbeat(state).in_world(1).expect("short");
            send(&mut fake_peer, &in_call);
            // The coordinator handles rank 0's messages in order: after the exchange it knows that rank 0
            // waits.
            eventually(|| first[0].control.shared.connection.has_further(3));
            exchange(&without);
            drop(fake_peer);
            let error = waiting.join().expect("no panic").expect_err("rank 1 has died");
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(error.message().starts_with("rank 1 (pid 4242 on host elsewhere) died"), "{error}");
        });
        let error = common_fault(&with);
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().starts_with("rank 1 (pid 4242 on host elsewhere) died"), "{error}");
        assert!(error.message().contains("while it was in all_reduce #17"), "{error}");
        assert!(common_fault(&first).message().starts_with("rank 3 (pid 4242 on host elsewhere) died"));
        thread::sleep(Duration::from_millis(100));
        exchange(&without);
        assert_well(&without);
    });
}

#[test]
fn a_silent_rank_fails_exactly_its_worlds() {
    watched(|| {
        let (first, mut fake_peer) = world_with_fake_peer(3);
        open_by_fake_peer(&mut fake_peer, 1, &[0, 2]);
        let with = open_on(&first[0].control, 1, &[0, 2], &config()).expect("opened");
        let without = open(&first, 2, &[0, 1]);
        let (error, there) = (with.wait_for_fault(), common_fault(&first));
        assert!(
            error.message().starts_with("rank 1 (pid 4242 on host elsewhere) has been silent"),
            "{error}"
        );
        assert!(
            there.message().starts_with("rank 2 (pid 4242 on host elsewhere) has been silent"),
            "{there}"
        );
        exchange(&without);
        assert_well(&without);
    });
}

#[test]
fn a_missing_member_is_named_at_the_deadline() {
    watched(|| {
        let first = world(3);
        let errors: Vec<Error> = thread::scope(|scope| {
            let threads = [0, 2].map(|rank: Rank| {
                let carrier = &first[rank].control;
                scope.spawn(move || open_on(carrier, 1, &[0, 1, 2], &short_timeout()).map(drop))
            });
            threads.into_iter().map(|thread| thread.join().expect("no panic").expect_err("missing")).collect()
        });
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        assert!(
            error.message().starts_with("rank 1 of 3 did not open the communicator within 1.5 s"),
            "{error}"
        );
        // A member that comes later gets the same error, and the id of a failed attempt can be used again
        // after a while.
        let late = open_on(&first[1].control, 1, &[0, 1, 2], &config()).map(drop).expect_err("failed");
        assert_eq!(late, *error);
        exchange(&first);
        assert_eq!(open(&first, 2, &[0, 1, 2]).len(), 3);
        assert_well(&first);
    });
}

#[test]
fn members_that_disagree_get_one_error() {
    watched(|| {
        let first = world(3);
        let lists: [&[Rank]; 3] = [&[0, 1, 2], &[0, 2, 1], &[0, 2]];
        let errors: Vec<Error> = thread::scope(|scope| {
            let threads = [0, 1, 2].map(|rank: Rank| {
                let (carrier, list) = (&first[rank].control, lists[rank]);
                scope.spawn(move || open_on(carrier, 1, list, &config()).map(drop))
            });
            threads.into_iter().map(|thread| thread.join().expect("no panic").expect_err("differ")).collect()
        });
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("opens the communicator with other members"), "{error}");
        exchange(&first);
        assert_well(&first);
    });
}

#[test]
fn members_that_cannot_open_a_world_are_refused_at_once() {
    watched(|| {
        let (members, _fake_peer) = world_with_fake_peer(3);
        let control = &members[0].control;
        assert!(control.can_open(&[0, 1]) && control.can_open(&[1, 0]), "both are in this process");
        assert!(!control.can_open(&[2, 0]) && !control.can_open(&[]));
        for (list, kind, text) in [
            (&[][..], ErrorKind::InvalidArgument, "rank 0, which opens it, is not among them"),
            (&[1, 2], ErrorKind::InvalidArgument, "rank 0, which opens it, is not among them"),
            (&[0, 3], ErrorKind::InvalidArgument, "rank 3 is not one of 3"),
            (&[0, 1, 0], ErrorKind::InvalidArgument, "rank 0 is named twice"),
            (&[2, 0], ErrorKind::Unsupported, "rank 2 of 3, is not in the process that runs the coordinator"),
        ] {
            let error = open_on(control, 1, list, &config()).map(drop).expect_err("refused");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().contains(text), "{error}");
        }
        let alone = open_on(control, 1, &[0], &config()).expect("a world of one rank");
        let again = open_on(control, 1, &[0], &config()).map(drop).expect_err("the same id");
        assert_eq!(again.kind(), ErrorKind::InvalidArgument, "{again}");
        exchange(std::slice::from_ref(&alone));
    });
}

#[test]
fn an_interrupted_member_ends_the_attempt_of_all() {
    watched(|| {
        let first = world(2);
        let begun = Instant::now();
        thread::scope(|scope| {
            let other = scope.spawn(|| open_on(&first[1].control, 1, &[0, 1], &config()).map(drop));
            let own = fault();
            let raised = Arc::clone(&own);
            let third = scope.spawn(move || {
                thread::sleep(Duration::from_millis(100));
                raised.raise(Error::aborted("the user gave up"));
            });
            // This rank opens another world, whose other member does not come.
            let outcome = first[0].control.open_world(2, &[0, 1], &config(), own).map(drop);
            assert_eq!(outcome.expect_err("aborted").message(), "the user gave up");
            third.join().expect("no panic");
            let late = open_on(&first[1].control, 2, &[0, 1], &config()).map(drop).expect_err("gave up");
            assert!(late.message().contains("rank 0 (pid "), "{late}");
            assert!(late.message().contains("gave up before all ranks had opened"), "{late}");
            drop(open_on(&first[0].control, 1, &[0, 1], &config()).expect("opened"));
            other.join().expect("no panic").expect("opened");
        });
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_well(&first);
    });
}

#[test]
fn hostile_frames_concern_no_world() {
    watched(|| {
        let (first, mut fake_peer) = world_with_fake_peer(4);
        let theirs = open(&first, 1, &[0, 1]);
        let abort = ToCoordinator::Abort { reason: "mine".into() };
        // A world of others, and an unknown one.
        for world in [1, 99] {
            for message in [&abort, &ToCoordinator::Goodbye(CallState::Idle { finished: 0 })] {
                send(&mut fake_peer, &message.in_world(world).expect("short"));
            }
        }
        for members in [vec![], vec![0], vec![0, 4], vec![0, 3, 3], vec![0, usize::MAX, 3], vec![3, 0]] {
            open_by_fake_peer(&mut fake_peer, 7, &members);
            let answer = message_in_world(&mut fake_peer, 7);
            assert!(matches!(answer, ToRank::RootCause(_)), "{members:?}: {answer:?}");
        }
        // A world that is open, with the rank in the list or not.
        for members in [vec![0, 1], vec![0, 1, 3]] {
            open_by_fake_peer(&mut fake_peer, 1, &members);
            assert!(matches!(message_in_world(&mut fake_peer, 1), ToRank::RootCause(_)));
        }
        exchange(&theirs);
        assert_well(&theirs);
        assert_well(&first);
        // Messages inside each other, or that concern no world, end the connection.
        let nested = abort.in_world(1).expect("short").in_world(1).expect("short");
        send(&mut fake_peer, &nested);
        assert!(common_fault(&first).message().contains("invalid frame"));
        exchange(&theirs);
        assert_well(&theirs);
    });
}

#[test]
fn every_invalid_message_of_a_world_ends_the_connection() {
    watched(|| {
        for message in [
            ToCoordinator::Alive,
            ToCoordinator::Moved,
            ToCoordinator::GaveUp { silent: Duration::ZERO },
            ToCoordinator::Open { world: 2, members: vec![0, 1], timeout: Duration::MAX },
        ] {
            let (first, mut fake_peer) = world_with_fake_peer(2);
            send(&mut fake_peer, &message.in_world(1).expect("short"));
            assert!(common_fault(&first).message().contains("invalid frame"), "{message:?}");
        }
    });
}

#[test]
fn a_lost_coordinator_fails_all_worlds_of_the_connection() {
    watched(|| {
        let (first, mut coordinator) = member_of_fake_coordinator();
        let further = thread::scope(|scope| {
            let opening = scope.spawn(|| open_on(&first.control, 1, &[0, 1], &config()));
            let host = "rank 0 (pid 1 on host a)".into();
            let welcome = ToRank::Welcome { host, ranks: vec![0] }.in_world(1).expect("short");
            thread::sleep(Duration::from_millis(50));
            coordinator.enqueue(encode(&welcome).expect("short"));
            // Messages of worlds that the rank does not have.
            for message in [ToRank::Closing, ToRank::RootCause(Error::aborted("another world"))] {
                let foreign = message.in_world(2).expect("short");
                coordinator.enqueue(encode(&foreign).expect("short"));
            }
            coordinator.flush().expect("sent");
            opening.join().expect("no panic").expect("opened")
        });
        assert!(first.fault.check().is_ok() && further.fault.check().is_ok());
        further.control.enter_call(&example_call(3)).expect("no rank has left");
        drop(coordinator);
        let error = further.wait_for_fault();
        assert!(
            error.message().starts_with("rank 0 (pid 1 on host a) is gone: the control connection to it "),
            "{error}"
        );
        assert!(error.message().contains("while this rank was in all_reduce #3"), "{error}");
        assert!(first.wait_for_fault().message().contains("while this rank was in no call"));
        let late = open_on(&first.control, 2, &[0, 1], &config()).map(drop).expect_err("too late");
        assert_eq!(late.kind(), ErrorKind::PeerLost);
    });
}

#[test]
fn a_coordinator_that_closes_one_world_and_is_lost_fails_the_others() {
    watched(|| {
        let (first, mut coordinator) = member_of_fake_coordinator();
        thread::scope(|scope| {
            let opening = scope.spawn(|| open_on(&first.control, 1, &[0, 1], &config()));
            let welcome = ToRank::Welcome { host: "rank 0".into(), ranks: vec![0] };
            for message in [welcome, ToRank::Closing] {
                thread::sleep(Duration::from_millis(50));
                coordinator.enqueue(encode(&message.in_world(1).expect("short")).expect("short"));
                coordinator.flush().expect("sent");
            }
            let further = opening.join().expect("no panic").expect("opened");
            thread::sleep(Duration::from_millis(50));
            drop(coordinator);
            first.wait_for_fault();
            thread::sleep(Duration::from_millis(100));
            assert!(further.fault.check().is_ok(), "the end was announced in this world");
        });
    });
}
