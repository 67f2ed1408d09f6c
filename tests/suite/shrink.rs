//! Shrink: the ranks that are left after a failure get a communicator with the right sums, and no rank goes
//! on alone.

use crate::harness::{
    Rank, Setup, World, call_until_failure, let_others_finish, signal_self, spawn, spawn_processes_with,
    test_name, with_watchdog,
};
use flexring::internal::bootstrap::Coordinator;
use flexring::{Communicator, Error, ErrorKind, Identity, ReduceOp};
use flexring_core::config::Algorithm;
use rustix::process::{Pid, Signal, kill_process};
use std::process::Output;
use std::time::{Duration, Instant};

/// The case of a test whose ranks are processes.
const CASE: &str = "TEST_CASE";

/// The default interval of heartbeats, in milliseconds.
const USUAL: &str = "500";

/// Each rank contributes a power of two, by its number in the first world, so a sum tells who is in it.
fn contribution(number: usize) -> u64 {
    1 << number
}

/// Reduces short and long vectors, and checks that exactly these ranks take part.
fn sums_of(comm: &Communicator, number: usize, members: &[usize]) -> Result<(), Error> {
    let expected: u64 = members.iter().copied().map(contribution).sum();
    for count in [1, 100_000] {
        let mut vector = vec![contribution(number); count];
        comm.all_reduce(&mut vector, ReduceOp::Sum)?;
        assert!(vector.iter().all(|sum| *sum == expected), "{} instead of {expected}", vector[0]);
    }
    Ok(())
}

/// Runs `body` as every rank of a world of processes, once for each case. `heartbeat` is in milliseconds.
#[allow(clippy::too_many_arguments, reason = "the parts of a test")]
fn for_cases(
    test: &str,
    world: World,
    ranks: usize,
    heartbeat: &str,
    cases: &[String],
    body: impl Fn(Rank, &str),
    check: impl Fn(&str, &[Output]),
) {
    if !world.is_enabled() {
        return;
    }
    let name = test_name(module_path!(), test);
    let given = std::env::var(CASE).unwrap_or_default();
    for case in cases {
        let variables = [(CASE, case.as_str()), ("FLEXRING_HEARTBEAT_MS", heartbeat)];
        let outputs =
            spawn_processes_with(&name, &Setup::new(world, ranks), &variables, |comm| body(comm, &given));
        for (rank, output) in outputs.iter().enumerate() {
            let text = String::from_utf8_lossy(&output.stderr);
            for line in text.lines().filter(|line| line.contains("shrunk")) {
                eprintln!("{world:?}, case {case}, rank {rank}: {line}");
            }
        }
        check(case, &outputs);
    }
}

/// Fails with the output of all ranks unless this one has succeeded.
fn assert_succeeded(case: &str, rank: usize, outputs: &[Output]) {
    let text = |output: &Output| {
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
    };
    let all = || outputs.iter().map(text).collect::<Vec<_>>().join("\n--- next rank ---\n");
    assert!(outputs[rank].status.success(), "case {case}: rank {rank}: {}", all());
}

/// Shrinks and prints the time that it took.
fn timed_shrink(comm: &Communicator) -> Communicator {
    let begun = Instant::now();
    let shrunk = comm.shrink(&[]).expect("the survivors agree");
    eprintln!("shrunk from {} to {} ranks in {:?}", comm.world_size(), shrunk.world_size(), begun.elapsed());
    shrunk
}

/// Five processes lose one rank after the other, the one at position `case` or the last one, until one is
/// left.
fn ranks_die_one_after_the_other(test: &str, world: World, positions: &[usize]) {
    let cases: Vec<String> = positions.iter().map(ToString::to_string).collect();
    let body = |first: Rank, case: &str| {
        let position: usize = case.parse().expect("a position");
        let number = first.rank();
        let mut members: Vec<usize> = (0..5).collect();
        let mut comm: Option<Communicator> = None;
        while members.len() > 1 {
            let current: &Communicator = comm.as_ref().unwrap_or(&first);
            sums_of(current, number, &members).expect("all members are alive");
            let last = let_others_finish(current);
            let victim = members.remove(position.min(members.len() - 1));
            if number == victim {
                signal_self(Signal::KILL);
            }
            let error = last.err().unwrap_or_else(|| call_until_failure(current));
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            let shrunk = timed_shrink(current);
            assert_eq!(members[shrunk.rank()], number, "the order of ranks stays");
            comm = Some(shrunk);
        }
        sums_of(comm.as_ref().expect("shrunk"), number, &members).expect("a rank alone");
    };
    for_cases(test, world, 5, USUAL, &cases, body, |case, outputs| {
        let succeeded = outputs.iter().filter(|output| output.status.success()).count();
        if succeeded != 1 {
            (0..outputs.len()).for_each(|rank| assert_succeeded(case, rank, outputs));
        }
    });
}

#[test]
fn processes_that_share_memory_go_on_without_any_rank() {
    ranks_die_one_after_the_other(
        "processes_that_share_memory_go_on_without_any_rank",
        World::Shm,
        &[0, 1, 2, 3, 4],
    );
}

#[test]
fn processes_that_use_tcp_go_on_without_any_rank() {
    ranks_die_one_after_the_other(
        "processes_that_use_tcp_go_on_without_any_rank",
        World::Tcp,
        &[0, 1, 2, 3, 4],
    );
}

#[test]
fn a_rank_may_die_while_the_others_shrink() {
    // The rank that dies second, the leader or another one, and when.
    let mut cases = Vec::new();
    for second in [0, 2] {
        cases.extend([0, 5, 40].map(|delay: u64| format!("{second} {delay}")));
    }
    let body = |first: Rank, case: &str| {
        let numbers: Vec<u64> = case.split(' ').map(|text| text.parse().expect("a number")).collect();
        let (second, delay) = (numbers[0] as usize, numbers[1]);
        let number = first.rank();
        sums_of(&first, number, &[0, 1, 2, 3]).expect("all ranks are alive");
        let _ = let_others_finish(&first);
        if number == 1 {
            signal_self(Signal::KILL);
        }
        call_until_failure(&first);
        if number == second {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(delay));
                signal_self(Signal::KILL);
            });
        }
        let mut comm = timed_shrink(&first);
        while comm.world_size() > 2 {
            call_until_failure(&comm);
            comm = timed_shrink(&comm);
        }
        let members: Vec<usize> = [0, 2, 3].into_iter().filter(|rank| *rank != second).collect();
        sums_of(&comm, number, &members).expect("two ranks are left");
    };
    let name = "a_rank_may_die_while_the_others_shrink";
    for_cases(name, World::Shm, 4, USUAL, &cases, body, |case, outputs| {
        let second = case.as_bytes()[0] - b'0';
        for (rank, output) in outputs.iter().enumerate() {
            if rank == 1 || rank == usize::from(second) {
                assert!(!output.status.success());
            } else {
                assert_succeeded(case, rank, outputs);
            }
        }
    });
}

#[test]
fn a_stopped_rank_that_continues_is_told_that_the_others_went_on() {
    let cases = ["0".to_owned(), "2".to_owned()];
    let body = |first: Rank, case: &str| {
        let stopped: usize = case.parse().expect("a rank");
        let number = first.rank();
        let mut ids = [0u64; 3];
        let mine = u64::from(std::process::id());
        first.all_gather(&[mine], &mut ids).expect("all ranks are alive");
        let _ = let_others_finish(&first);
        if number == stopped {
            signal_self(Signal::STOP);
            // It continues here.
            call_until_failure(&first);
            let error = first.shrink(&[]).expect_err("the others went on");
            assert_eq!(error.kind(), ErrorKind::Rendezvous, "{error}");
            assert!(error.message().contains(&format!("went on without rank {stopped}")), "{error}");
            let again = first.shrink(&[]).expect_err("the others went on");
            assert_eq!(again, error);
            return;
        }
        let error = call_until_failure(&first);
        assert!(error.message().contains(&format!("rank {stopped}")), "{error}");
        let comm = timed_shrink(&first);
        drop(first);
        let members: Vec<usize> = (0..3).filter(|rank| *rank != stopped).collect();
        sums_of(&comm, number, &members).expect("two ranks are left");
        if comm.rank() == 0 {
            let pid = Pid::from_raw(ids[stopped] as i32).expect("a process id");
            kill_process(pid, Signal::CONT).expect("the process exists");
        }
        // The ranks stay while the stopped one continues.
        std::thread::sleep(Duration::from_millis(500));
        sums_of(&comm, number, &members).expect("two ranks are left");
    };
    let name = "a_stopped_rank_that_continues_is_told_that_the_others_went_on";
    for_cases(name, World::Shm, 3, "50", &cases, body, |case, outputs| {
        (0..outputs.len()).for_each(|rank| assert_succeeded(case, rank, outputs));
    });
}

#[test]
fn ranks_are_excluded_from_a_healthy_communicator() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 4), |comm| {
            let number = comm.rank();
            if number != 1 {
                let shrunk = comm.shrink(&[1, 1]).expect("three ranks agree");
                assert_eq!((shrunk.rank(), shrunk.world_size()), ([0, 0, 1, 2][number], 3));
                sums_of(&shrunk, number, &[0, 2, 3]).expect("a sum");
                if number != 0 {
                    let again = shrunk.shrink(&[0]).expect("two ranks agree");
                    sums_of(&again, number, &[2, 3]).expect("a sum");
                }
            }
            // The first communicator still works, and can be shrunk again with a rank that was excluded.
            sums_of(&comm, number, &[0, 1, 2, 3]).expect("a sum");
            if number < 2 {
                let shrunk = comm.shrink(&[2, 3]).expect("two ranks agree");
                sums_of(&shrunk, number, &[0, 1]).expect("a sum");
            }
        });
    }
}

#[test]
fn a_rank_that_is_excluded_and_shrinks_is_refused_by_name() {
    std::thread::scope(|scope| {
        for (world, excluded) in [(0, 2), (1, 0), (1, 1)] {
            // It calls before the others, and after they have gone on.
            for is_late in [false, true] {
                scope.spawn(move || an_excluded_rank_is_refused(World::any(world), excluded, is_late));
            }
        }
    });
}

fn an_excluded_rank_is_refused(world: World, excluded: usize, is_late: bool) {
    let members: Vec<usize> = (0..3).filter(|rank| *rank != excluded).collect();
    let barrier = std::sync::Barrier::new(3);
    spawn(&Setup::new(world, 3), |comm| {
        let number = comm.rank();
        let shrunk = (number != excluded).then(|| {
            std::thread::sleep(Duration::from_millis(if is_late { 0 } else { 100 }));
            comm.shrink(&[excluded]).expect("two ranks agree")
        });
        if is_late {
            barrier.wait();
        }
        if number == excluded {
            let begun = Instant::now();
            let error = comm.shrink(&[]).expect_err("the others left it out");
            assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
            assert_eq!(error.kind(), ErrorKind::Rendezvous, "{error}");
            let begin = format!("rank {excluded} was left out by rank");
            assert!(error.message().starts_with(&begin), "{world:?}: {error}");
        }
        barrier.wait();
        if let Some(shrunk) = shrunk {
            sums_of(&shrunk, number, &members).expect("a sum");
        }
    });
}

#[test]
fn an_aborted_communicator_is_shrunk_to_all_of_its_ranks() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            if comm.rank() == 2 {
                comm.abort();
            }
            assert_eq!(call_until_failure(&comm).kind(), ErrorKind::Aborted);
            let shrunk = comm.shrink(&[]).expect("all ranks agree");
            let number = comm.rank();
            drop(comm);
            sums_of(&shrunk, number, &[0, 1, 2]).expect("a sum");
        });
    }
}

#[test]
fn ranks_that_have_left_are_not_waited_for() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let number = comm.rank();
            sums_of(&comm, number, &[0, 1, 2]).expect("a sum");
            if number == 0 {
                return;
            }
            let shrunk = comm.shrink(&[]).expect("two ranks agree");
            sums_of(&shrunk, number, &[1, 2]).expect("a sum");
        });
    }
}

/// One rank does not shrink, so the others must name it.
fn an_idle_rank_is_named(world: World, idle: usize) {
    let mut setup = Setup::new(world, 3);
    setup.config.connect_timeout = Duration::from_secs(2);
    let barrier = std::sync::Barrier::new(3);
    let errors = spawn(&setup, |comm| {
        let error = (comm.rank() != idle).then(|| comm.shrink(&[]).expect_err("one rank does not shrink"));
        barrier.wait();
        error
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.kind(), ErrorKind::Timeout, "{world:?}: {error}");
        assert!(error.message().contains(&format!("rank {idle} has not called shrink")), "{error}");
    }
}

#[test]
fn ranks_that_are_alive_and_do_not_shrink_are_named() {
    std::thread::scope(|scope| {
        // Rank 0 would lead, rank 2 would not.
        for (world, idle) in [(0, 2), (1, 0), (1, 2)] {
            scope.spawn(move || an_idle_rank_is_named(World::any(world), idle));
        }
    });
}

#[test]
fn different_lists_of_excluded_ranks_are_a_disagreement() {
    for &world in World::enabled() {
        let mut setup = Setup::new(world, 3);
        setup.config.connect_timeout = Duration::from_secs(2);
        let errors = spawn(&setup, |comm| {
            let exclude: &[usize] = if comm.rank() == 2 { &[0] } else { &[] };
            let error = comm.shrink(exclude).err();
            error.unwrap_or_else(|| panic!("rank {} must not get a communicator", comm.rank()))
        });
        assert_eq!(errors[2].kind(), ErrorKind::Disagreement, "{world:?}: {}", errors[2]);
    }
}

#[test]
fn a_described_topology_is_kept_for_those_that_are_left() {
    for &world in World::enabled() {
        let mut setup = Setup::new(world, 5);
        setup.config.topology = Some("2+3".to_owned());
        setup.config.algo = Algorithm::Flexreduce;
        spawn(&setup, |comm| {
            let number = comm.rank();
            assert!(comm.summary().contains("2 nodes"), "{}", comm.summary());
            if number == 4 {
                return;
            }
            let shrunk = comm.shrink(&[4]).expect("four ranks agree");
            assert!(
                shrunk.summary().contains("rank") && shrunk.summary().contains("2 nodes"),
                "{}",
                shrunk.summary()
            );
            sums_of(&shrunk, number, &[0, 1, 2, 3]).expect("a sum");
            if number > 1 {
                let node = shrunk.shrink(&[0, 1]).expect("two ranks agree");
                assert!(node.summary().contains("1 node:"), "{}", node.summary());
                sums_of(&node, number, &[2, 3]).expect("a sum");
            }
        });
    }
}

#[test]
fn strangers_at_the_port_of_a_shrink_change_nothing() {
    with_watchdog(Duration::from_secs(30), || {
        let setup = Setup::new(World::Shm, 2);
        let (_coordinator, id) = Coordinator::create(&setup.config).expect("a coordinator");
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let identity = Identity::from_unique_id(2, &id, rank).expect("an identity");
                    let config = setup.config_of(rank);
                    scope.spawn(move || {
                        Communicator::with_config(&config, &identity).expect("the world meets")
                    })
                })
                .collect();
            let comms: Vec<Communicator> =
                ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
            // Those of the coordinator and of what the communicators of a process share.
            let ports = listening_ports();
            let strangers: Vec<std::net::TcpStream> = ports
                .iter()
                .flat_map(|port| {
                    [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 100], b"", &[8, 0, 0, 0, 1]]
                        .map(|text| (*port, text))
                })
                .filter_map(|(port, text)| {
                    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
                    std::io::Write::write_all(&mut stream, text).ok()?;
                    Some(stream)
                })
                .collect();
            assert!(strangers.len() >= 4 * 2, "the ranks listen at {ports:?}");
            let shrinking = comms.into_iter().map(|comm| {
                scope.spawn(move || {
                    let shrunk = comm.shrink(&[]).expect("both agree");
                    sums_of(&shrunk, comm.rank(), &[0, 1]).expect("a sum");
                })
            });
            Vec::from_iter(shrinking).into_iter().for_each(|rank| rank.join().expect("no panic"));
        });
    });
}

/// The TCP ports at which this process listens.
fn listening_ports() -> Vec<u16> {
    const LISTEN: &str = "0A";
    let mine: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .expect("the descriptors of this process")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok())
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap_or_default();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let is_mine = |row: &Vec<&str>| {
        let inode = row.get(9).map(|inode| format!("socket:[{inode}]"));
        row.get(3) == Some(&LISTEN) && inode.is_some_and(|inode| mine.contains(&inode))
    };
    let listening = rows.filter(is_mine);
    listening.filter_map(|row| u16::from_str_radix(row.get(1)?.rsplit(':').next()?, 16).ok()).collect()
}
