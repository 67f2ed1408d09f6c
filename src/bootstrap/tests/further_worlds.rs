//! Further worlds over the control connections of one.

use super::super::call_state::example_call;
use super::super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, WorldId, decode, encode};
use super::super::running_job::RunningJob;
use super::super::{CallState, world_status};
use super::failures::{member_of_fake_coordinator, send};
use super::*;
use crate::call::Call;

/// Opens a world on its members, given by their ranks in the world of `carriers`.
fn open(carriers: &[TestRank], id: WorldId, members: &[Rank]) -> Vec<TestRank> {
    let outcomes = try_open(carriers, id, members, &config());
    outcomes.into_iter().map(|outcome| outcome.expect("opened")).collect()
}

fn open_on(carrier: &ControlConnection, id: WorldId, members: &[Rank], config: &Config) -> Result<TestRank> {
    let fault = fault();
    let control = carrier.open_world(id, members, config, fault.clone())?;
    Ok(TestRank { control, fault })
}

/// The outcome on each member.
fn try_open(carriers: &[TestRank], id: WorldId, members: &[Rank], config: &Config) -> Vec<Result<TestRank>> {
    thread::scope(|scope| {
        let begin = |rank: &Rank| {
            let carrier = carriers.iter().find(|carrier| carrier.control.rank() == *rank).expect("a carrier");
            scope.spawn(move || open_on(&carrier.control, id, members, config))
        };
        let threads: Vec<_> = members.iter().map(begin).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Gathers on all ranks, and checks that each gets the data of all.
fn exchange(members: &[TestRank]) {
    thread::scope(|scope| {
        for member in members {
            scope.spawn(move || {
                let mine = [member.control.rank() as u8];
                let parts = member.control.all_gather("ranks", &mine).expect("an exchange");
                let expected: Vec<Vec<u8>> = (0..members.len() as u8).map(|rank| vec![rank]).collect();
                assert_eq!(parts, expected);
            });
        }
    });
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("a folder").count()
}

fn assert_well(members: &[TestRank]) {
    for member in members {
        assert_eq!(member.fault.get(), None, "rank {}", member.control.rank());
    }
}

#[test]
fn many_worlds_need_no_thread_and_no_descriptor() {
    watched(|| {
        const WORLDS: usize = 100;
        let first = world(3);
        // A fault has a descriptor of its own.
        let faults: Vec<Vec<Arc<Fault>>> = (0..3).map(|_| (0..WORLDS).map(|_| fault()).collect()).collect();
        let before = (entries("/proc/self/fd"), entries("/proc/self/task"));
        let config = config();
        let worlds: Vec<Vec<TestRank>> = thread::scope(|scope| {
            let ranks: Vec<_> = first
                .iter()
                .zip(&faults)
                .map(|(carrier, faults)| {
                    let config = &config;
                    scope.spawn(move || {
                        let open = |(id, fault): (usize, &Arc<Fault>)| {
                            let control = carrier.control.open_world(
                                id as WorldId,
                                &[0, 1, 2],
                                config,
                                Arc::clone(fault),
                            );
                            TestRank { control: control.expect("opened"), fault: Arc::clone(fault) }
                        };
                        faults.iter().enumerate().map(open).collect::<Vec<_>>()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        });
        let after = (entries("/proc/self/fd"), entries("/proc/self/task"));
        // Other tests of this process may use a few.
        assert!(after.0 < before.0 + WORLDS / 4 && after.1 < before.1 + WORLDS / 4, "{before:?} {after:?}");
        thread::scope(|scope| {
            for index in 0..WORLDS {
                for rank in &worlds {
                    let member = &rank[index];
                    scope.spawn(move || {
                        let mine = (index as u32).to_le_bytes();
                        let parts = member.control.all_gather("numbers", &mine).expect("an exchange");
                        assert_eq!(parts, vec![mine.to_vec(); 3]);
                    });
                }
            }
        });
        for rank in &worlds {
            assert_well(rank);
        }
        let begun = Instant::now();
        thread::scope(|scope| {
            for rank in worlds {
                scope.spawn(move || drop(rank));
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(5), "leaving took {:?}", begun.elapsed());
        exchange(&first);
        assert_well(&first);
    });
}

#[test]
fn members_have_ranks_and_a_secret_of_their_own() {
    watched(|| {
        let first = world(4);
        let pair = open(&first, 1, &[0, 3]);
        let all = open(&first, 2, &[0, 2, 3, 1]);
        assert_eq!(all[1].control.rank(), 1);
        assert_eq!((pair[1].control.rank(), pair[1].control.world()), (1, 2));
        let code = |member: &TestRank| member.control.secret().derive("test", &[]).mac("test", &[]);
        assert_eq!(code(&pair[0]), code(&pair[1]));
        assert!(code(&pair[0]) != code(&all[0]) && code(&pair[0]) != code(&first[0]));
        exchange(&pair);
        exchange(&all);
        // Over a further world, by its ranks.
        let deeper = open(&all, 3, &[0, 2]);
        assert!(code(&deeper[0]) != code(&pair[0]));
        exchange(&deeper);
        deeper[1].control.abort("the user gave up");
        assert_eq!(common_fault(&deeper).message(), "rank 1: the user gave up");
        for world in [&first, &pair, &all] {
            assert_well(world);
        }
    });
}

#[test]
fn different_orders_of_opening_do_not_block() {
    watched(|| {
        let first = world(3);
        let lists: [&[Rank]; 4] = [&[0, 1], &[0, 2], &[0, 1, 2], &[0, 2, 1]];
        thread::scope(|scope| {
            for carrier in &first {
                for (id, members) in lists.iter().enumerate() {
                    if members.contains(&carrier.control.rank()) {
                        let begin = Duration::from_millis(7 * ((id + carrier.control.rank()) % 4) as u64);
                        scope.spawn(move || {
                            thread::sleep(begin);
                            let world = open_on(&carrier.control, id as WorldId, members, &config());
                            let world = world.expect("opened");
                            world.control.all_gather("nothing", &[]).expect("an exchange");
                        });
                    }
                }
            }
        });
        assert_well(&first);
    });
}

#[test]
fn worlds_outlive_the_one_that_they_were_opened_over_in_any_order() {
    watched(|| {
        let first = world(3);
        let a = open(&first, 1, &[0, 1, 2]);
        let b = open(&first, 2, &[0, 2]);
        // The first one is left one rank after the other, by rank 0 first.
        for member in first {
            member.control.leave();
            exchange(&a);
        }
        // Longer than the silence after which a rank counts as dead.
        thread::sleep(25 * config().heartbeat);
        let c = open(&a, 3, &[0, 1]);
        assert_well(&a);
        drop(a);
        exchange(&b);
        exchange(&c);
        let begun = Instant::now();
        drop(b);
        exchange(&c);
        assert_well(&c);
        drop(c);
        assert!(begun.elapsed() < Duration::from_secs(2), "leaving took {:?}", begun.elapsed());
    });
}

#[test]
fn abort_and_failure_in_one_world_leave_the_others() {
    watched(|| {
        let first = world(3);
        let a = open(&first, 1, &[0, 1, 2]);
        let b = open(&first, 2, &[0, 2]);
        a[1].control.abort("the user gave up");
        assert_eq!(common_fault(&a).message(), "rank 1: the user gave up");
        let root_cause = b[1].control.report(Error::system("out of memory"), None);
        assert_eq!(root_cause.message(), "rank 1: out of memory");
        assert_eq!(common_fault(&b), root_cause);
        exchange(&first);
        // The first one fails, and others go on.
        let c = open(&first, 3, &[0, 1]);
        first[2].control.abort("enough");
        assert_eq!(common_fault(&first).message(), "rank 2: enough");
        exchange(&c);
        let d = open(&first, 4, &[0, 1, 2]);
        exchange(&d);
        drop(first);
        assert_well(&c);
        assert_well(&d);
    });
}

#[test]
fn calls_that_differ_and_a_timeout_are_explained_in_their_world() {
    watched(|| {
        let first = world(3);
        let a = open(&first, 1, &[0, 2]);
        let b = open(&first, 2, &[0, 1, 2]);
        a[0].control.enter_call(&example_call(1)).expect("no rank has left");
        a[1].control.enter_call(&Call { count: 9, ..example_call(1) }).expect("no rank has left");
        let error = common_fault(&a);
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("rank 1 called all_reduce #1 (9 x float, sum)"), "{error}");
        for member in &b[..2] {
            member.control.enter_call(&example_call(17)).expect("no rank has left");
        }
        let error = b[0].control.report(Error::timeout("all_reduce #17 took too long"), None);
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().contains("rank 2 has not called all_reduce #17"), "{error}");
        assert_eq!(error.message().lines().count(), 2 + 3, "{error}");
        assert_eq!(common_fault(&b), error);
        assert_well(&first);
    });
}

#[test]
fn a_leaver_ends_calls_of_its_world_alone() {
    watched(|| {
        let config = Config { heartbeat: Duration::from_secs(60), ..config() };
        let first = join_ranks(0..3, 3, &address_of(free_port()), &config);
        let mut a = open(&first, 1, &[0, 1, 2]);
        let b = open(&first, 2, &[0, 1, 2]);
        for member in a.iter().chain(&b) {
            member.control.enter_call(&example_call(16)).expect("no rank has left");
            member.control.call_state().leave();
        }
        for member in b.iter().chain(&a[..2]) {
            member.control.enter_call(&example_call(17)).expect("no rank has left");
        }
        let begun = Instant::now();
        a.pop().expect("rank 2").control.leave();
        let error = common_fault(&a);
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(
            error.message().contains("rank 2 ") && error.message().contains("left after call #16"),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(2), "it took {:?}", begun.elapsed());
        assert_well(&b);
        assert_well(&first);
    });
}

/// Lets a bare connection, which is the last rank of the first world, open a world.
fn open_by_fake_peer(fake_peer: &mut FramedStream, world: WorldId, members: &[Rank]) {
    let timeout = Duration::from_secs(10);
    send(fake_peer, &ToCoordinator::Open { world, members: members.to_vec(), timeout });
}

/// The next message of this kind in a further world.
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
            thread::sleep(Duration::from_millis(50));
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
            error.message().starts_with("rank 1 of 3 did not open the communicator within 0.4 s"),
            "{error}"
        );
        // A member that comes later gets the same error, and the id of a failed attempt can be used again after a while.
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
        let abort = ToCoordinator::Abort { reason: "mine".to_owned() };
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
            let host = "rank 0 (pid 1 on host a)".to_owned();
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
            let welcome = ToRank::Welcome { host: "rank 0".to_owned(), ranks: vec![0] };
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

#[test]
fn the_status_shows_further_worlds() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let first = join_ranks(0..3, 3, &rendezvous, &config());
        let a = open(&first, 1, &[0, 2]);
        a[1].control.enter_call(&example_call(1)).expect("no rank has left");
        let job = RunningJob { address: rendezvous.clone(), id: None, token: JOB, one_node: false };
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let status = world_status(&job, &config()).expect("the status");
            assert_eq!((status.ranks.len(), status.further.len()), (3, 1));
            if status.further[0].ranks[1].waits_for == [0] {
                let text = status.to_string();
                assert!(
                    text.contains("\ncommunicator 1 of 1 that ranks of this one have created:\nrank "),
                    "{text}"
                );
                break;
            }
            assert!(Instant::now() < until, "{status}");
            thread::sleep(Duration::from_millis(10));
        }
        // The first world may be over.
        drop(first);
        exchange(&a);
        assert_well(&a);
    });
}
