//! Subworlds over the control connections of one.

use super::super::Abort;
use super::super::call_state::example_call;
use super::super::job_address::JobAddress;
use super::super::protocol::WorldId;
use super::super::world_status;
use super::*;
use crate::call::Call;

/// Opens a world on its members, given by their ranks in the world of `carriers`.
pub(super) fn open(carriers: &[TestRank], id: WorldId, members: &[Rank]) -> Vec<TestRank> {
    let outcomes = try_open(carriers, id, members, &config());
    outcomes.into_iter().map(|outcome| outcome.expect("opened")).collect()
}

pub(super) fn open_on(
    carrier: &ControlConnection,
    id: WorldId,
    members: &[Rank],
    config: &Config,
) -> Result<TestRank> {
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
pub(super) fn exchange(members: &[TestRank]) {
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

pub(super) fn assert_well(members: &[TestRank]) {
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
        // Over a subworld, by its ranks.
        let deeper = open(&all, 3, &[0, 2]);
        assert!(code(&deeper[0]) != code(&pair[0]));
        exchange(&deeper);
        deeper[1].control.abort(Abort::AtOnce("the user gave up"));
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
        assert!(begun.elapsed() < Duration::from_secs(5), "leaving took {:?}", begun.elapsed());
    });
}

#[test]
fn abort_and_failure_in_one_world_leave_the_others() {
    watched(|| {
        let first = world(3);
        let a = open(&first, 1, &[0, 1, 2]);
        let b = open(&first, 2, &[0, 2]);
        a[1].control.abort(Abort::AtOnce("the user gave up"));
        assert_eq!(common_fault(&a).message(), "rank 1: the user gave up");
        let root_cause = b[1].control.report(Error::system("out of memory"));
        assert_eq!(root_cause.message(), "rank 1: out of memory");
        assert_eq!(common_fault(&b), root_cause);
        exchange(&first);
        // The first one fails, and others go on.
        let c = open(&first, 3, &[0, 1]);
        first[2].control.abort(Abort::AtOnce("enough"));
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
        let error = b[0].control.report(Error::timeout("all_reduce #17 took too long"));
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
        assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
        assert_well(&b);
        assert_well(&first);
    });
}

#[test]
fn the_status_shows_further_worlds() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let first = join_ranks(0..3, 3, &rendezvous, &config());
        let a = open(&first, 1, &[0, 2]);
        a[1].control.enter_call(&example_call(1)).expect("no rank has left");
        let job = JobAddress { address: rendezvous.clone(), id: None, token: JOB, one_node: false };
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
