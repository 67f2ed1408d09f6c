//! The fault matrix: a rank fails at each named point of its life, and every other rank soon names it.
//!
//! A run is a world of processes, one of which fails in one way at one point (`flexring_core::fault_point`).
//! Every survivor must end on its own, never with a wrong sum, and with an error that names the failed rank,
//! unless it had nothing to do with that rank any more. A selection runs in `make test`;
//! FLEXRING_TEST_EFFORT=10, as in `make test-long`, runs all points with every action, kind of link and
//! number of ranks. In the virtual machine of `make test-verbs-long` the links are RDMA devices.

mod disconnect;
pub mod network;

use crate::harness::{World, free_port, test_name, with_watchdog};
use crate::programs::program;
use flexring::{Communicator, ReduceOp, Result};
use flexring_core::fault_point::{FaultAction, FaultPoint};
use flexring_testkit::effort;
use network::Network;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;
use std::io::Read as _;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use strum::IntoEnumIterator;

/// The variable by which a process knows that it is a rank of a run.
const RANK: &str = "FLEXRING_RANK";
/// The variable by which a process knows that it is to make another last call than the others.
const DISAGREES: &str = "FAULT_MATRIX_DISAGREES";
/// The variable that names a file for whose creation, at the fault, a process is to wait before its last
/// call.
const AWAITS: &str = "FAULT_MATRIX_AWAITS";
/// Runs of a test at the same time: much of a run is waiting. One on an emulated processor.
const PARALLEL: usize = 3;
/// Ranks from which on a leader adds small messages, if there are fewer cores.
const LEADER_RANKS: usize = 8;
/// Elements of the vectors that a rank reduces: small messages, and programs with one and with many
/// sub-chunks.
const COUNTS: [usize; 4] = [1, 300, 20_000, 150_000];

/// How the ranks of a run are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Links {
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
    /// Two nodes: shared memory within, TCP between them.
    Mixed,
    /// Shared memory of so many ranks that small messages go through a leader.
    Leader,
    /// RDMA devices.
    Verbs,
}

impl Links {
    /// Whether this run tests RDMA, on an emulated processor.
    fn are_verbs() -> bool {
        World::enabled().contains(&World::Verbs)
    }
}

/// The time-out of a rank's calls and of its joining, in milliseconds.
fn timeout() -> u64 {
    if Links::are_verbs() { 20_000 } else { 8000 }
}

/// How long all survivors of a run may take to end. Longer than their time-outs.
fn limit() -> Duration {
    Duration::from_millis(3 * timeout())
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct Run {
    point: FaultPoint,
    /// The fault happens when the point is reached for this time.
    nth: usize,
    action: FaultAction,
    links: Links,
    ranks: usize,
    victim: usize,
}

/// What became of a run.
#[derive(Debug, Default)]
struct RunOutcome {
    /// Whether the rank reached the point, so that there was a fault.
    reached: bool,
    /// Time from the fault to each survivor's error.
    detection: Vec<Duration>,
    /// What was wrong; empty if nothing was.
    wrong: String,
    /// By rank, what it printed.
    logs: Vec<String>,
}

fn nanoseconds() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos())
}

/// A value from whose sums it is seen which rank was left out or counted twice: each rank has eight bits of
/// its own.
fn value(rank: usize, index: usize) -> i64 {
    (1 + index as i64 % 9) << (8 * rank)
}

/// Whether this machine has so few cores that the ranks of [`Links::Leader`] have to share them.
fn has_leader() -> bool {
    let few = std::thread::available_parallelism().is_ok_and(|cores| cores.get() < LEADER_RANKS);
    if !few {
        eprintln!(
            "skipped: the points of the leader of small messages need a machine of fewer than {LEADER_RANKS} cores"
        );
    }
    few
}

/// The life of a rank: joins, makes calls of all kinds, and leaves.
fn live() -> Result<()> {
    let comm = Communicator::from_env()?;
    let (me, world) = (comm.rank(), comm.world_size());
    let sum = |index: usize| (0..world).map(|rank| value(rank, index)).sum::<i64>();
    let check = |vector: &[i64]| {
        if let Some(index) = (0..vector.len()).find(|index| vector[*index] != sum(*index)) {
            println!("WRONG SUM {:#x} instead of {:#x}", vector[index], sum(index));
        }
    };
    for round in 0..2 {
        if me != 0 {
            // Rank 0 waits until it sleeps.
            std::thread::sleep(Duration::from_millis(10));
        }
        for count in COUNTS {
            let mut vector: Vec<i64> = (0..count).map(|index| value(me, index)).collect();
            comm.all_reduce(&mut vector, ReduceOp::Sum)?;
            check(&vector);
        }
        let mut buffer = comm.alloc::<i64>(COUNTS[3])?;
        (0..buffer.len()).for_each(|index| buffer[index] = value(me, index));
        comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
        check(&buffer);
        let mut registered = comm.register((0..COUNTS[2]).map(|index| value(me, index)).collect())?;
        comm.all_reduce(&mut registered, ReduceOp::Sum)?;
        check(&registered);
        drop(registered);
        let own: Vec<i64> = (0..COUNTS[1] + round).map(|index| value(me, index)).collect();
        let vector = comm.all_reduce_async(own, ReduceOp::Sum)?.wait()?;
        check(&vector);
        let mut all = vec![0i64; world * 10];
        comm.all_gather(&[me as i64; 10], &mut all)?;
        if (0..all.len()).any(|index| all[index] != (index / 10) as i64) {
            println!("WRONG PARTS {all:?}");
        }
    }
    if let Some(fault) = std::env::var_os(AWAITS) {
        let begun = Instant::now();
        while !std::path::Path::new(&fault).exists() && begun.elapsed() < Duration::from_millis(timeout()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    // Who fails before this call fails the others in it, at the latest.
    let disagrees = std::env::var_os(DISAGREES).is_some();
    if disagrees {
        // The others are in the call before it fails.
        std::thread::sleep(Duration::from_millis(100));
    }
    let length = if disagrees { 2 } else { 1 };
    comm.all_reduce(&mut vec![1i64; length], ReduceOp::Sum)?;
    println!("ENDED CALLS");
    Ok(())
}

impl Run {
    /// Starts the process of a rank, which runs this binary with the test `name`.
    fn start(&self, name: &str, rank: usize, rendezvous: &Rendezvous, folder: &std::path::Path) -> Child {
        let log = std::fs::File::create(folder.join(format!("{rank}.log"))).expect("a file");
        let mut command = match &rendezvous.network {
            Some(network) => network.command(rank),
            None => program(std::env::current_exe().expect("this binary")),
        };
        command.args([name, "--exact", "--nocapture"]);
        command.env(RANK, rank.to_string()).env("FLEXRING_WORLD_SIZE", self.ranks.to_string());
        command.env("FLEXRING_MASTER_ADDR", &rendezvous.address);
        command.env("FLEXRING_MASTER_PORT", &rendezvous.port);
        command.env(
            "FLEXRING_TRANSPORT",
            match self.links {
                Links::Tcp => "tcp",
                Links::Verbs => "verbs",
                Links::Shm | Links::Mixed | Links::Leader => "auto",
            },
        );
        if self.links == Links::Mixed {
            command.env("FLEXRING_NODE", if rank < self.ranks.div_ceil(2) { "first" } else { "second" });
        }
        command.env("FLEXRING_SECRET", "of the fault matrix");
        command.envs([
            ("FLEXRING_SUBCHUNK", "16K"),
            ("FLEXRING_MAILBOX", "4K"),
            ("FLEXRING_IB_TIMEOUT", "18"),
        ]);
        // On an emulated processor, ranks are silent for longer.
        command.env("FLEXRING_HEARTBEAT_MS", if self.links == Links::Verbs { "500" } else { "50" });
        for variable in ["FLEXRING_TIMEOUT_MS", "FLEXRING_CONNECT_TIMEOUT_MS"] {
            command.env(variable, timeout().to_string());
        }
        if is_timed(self.point) {
            command.env(AWAITS, folder.join("fault"));
        }
        if rank == self.victim {
            let (point, action): (&str, &str) = (self.point.into(), self.action.into());
            command.env("FLEXRING_TEST_FAULT_POINT", format!("{point}:{}:{action}", self.nth));
            command.env("FLEXRING_TEST_FAULT_FILE", folder.join("fault"));
            if self.action == FaultAction::FullDisk {
                command.env("FLEXRING_LOG", "trace");
            }
        }
        if needs_failure(self.point) && rank == (self.victim + 1) % self.ranks {
            command.env(DISAGREES, "1");
        }
        let stdin = if rank == 0 { Stdio::piped() } else { Stdio::null() };
        command.stdin(stdin).stderr(log.try_clone().expect("a second handle")).stdout(log);
        command.spawn().expect("a process for the rank")
    }

    /// `number` differs from that of all runs at the same time.
    fn execute(&self, name: &str, number: usize) -> RunOutcome {
        let folder = tempfile::tempdir().expect("a folder");
        let rendezvous = Rendezvous::new(self, number);
        let mut ranks: Vec<Child> =
            (0..self.ranks).map(|rank| self.start(name, rank, &rendezvous, folder.path())).collect();
        let begun = Instant::now();
        let mut outcome = RunOutcome::default();
        let mut running: BTreeSet<usize> = (0..self.ranks).collect();
        let has_failed = || folder.path().join("fault").exists();
        let mut is_disconnected = false;
        // A rank that is stopped never ends.
        let ends = |rank: usize| rank != self.victim || self.action != FaultAction::Stop || !has_failed();
        while running.iter().any(|rank| ends(*rank)) {
            running.retain(|rank| ranks[*rank].try_wait().expect("a child").is_none());
            if self.action == FaultAction::Disconnect && !is_disconnected && has_failed() {
                is_disconnected = disconnect::once_stopped(&ranks[self.victim]);
            }
            if !running.iter().any(|rank| *rank != 0 && ends(*rank)) {
                // The process of rank 0 ends last.
                drop(ranks[0].stdin.take());
            }
            if begun.elapsed() > limit() {
                let _ = write!(outcome.wrong, "ranks {running:?} hang; ");
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for rank in running {
            let _ = ranks[rank].kill();
        }
        let status: Vec<_> = ranks.iter_mut().map(|rank| rank.wait().expect("a child")).collect();
        let logs: Vec<String> = (0..self.ranks)
            .map(|rank| {
                std::fs::read_to_string(folder.path().join(format!("{rank}.log"))).unwrap_or_default()
            })
            .collect();
        let fault: Option<u128> =
            std::fs::read_to_string(folder.path().join("fault")).ok().and_then(|time| time.parse().ok());
        outcome.reached = fault.is_some();
        for rank in 0..self.ranks {
            self.judge(rank, &logs[rank], status[rank].success(), fault, &mut outcome);
        }
        if !outcome.wrong.is_empty() {
            let _ = write!(outcome.wrong, "\n{}", logs.join("\n---\n"));
        }
        outcome.logs = logs;
        outcome
    }

    /// Checks how one rank ended.
    fn judge(&self, rank: usize, log: &str, succeeded: bool, fault: Option<u128>, outcome: &mut RunOutcome) {
        let mut wrong = |what: &str| {
            let _ = write!(outcome.wrong, "rank {rank} {what}; ");
        };
        if log.contains("WRONG") {
            wrong("has wrong results");
        }
        if log.contains("panicked") {
            wrong("panicked");
        }
        let is_victim = rank == self.victim;
        if is_victim && fault.is_some() && !self.survives() {
            return;
        }
        if !succeeded {
            return wrong("ended abnormally");
        }
        let error = log.lines().find_map(|line| line.strip_prefix("ERROR "));
        match (error, fault) {
            (None, None) => {}
            (Some(_), None) if needs_failure(self.point) => {}
            (Some(_), None) => wrong("failed without a fault"),
            // The victim may notice its fault late, or not at all.
            (None, Some(_)) if log.contains("ENDED CALLS") => {}
            (None, Some(_)) => wrong("ended without an error"),
            (Some(_), Some(_)) if self.action == FaultAction::FullDisk && !needs_failure(self.point) => {
                wrong("failed because another rank could not log");
            }
            (Some(_), Some(_)) if is_victim => {}
            (Some(error), Some(fault)) => {
                let Some((time, message)) = error.split_once(' ') else { return wrong("has no error") };
                let time: u128 = time.parse().unwrap_or_default();
                let late = time.saturating_sub(fault);
                outcome.detection.push(Duration::from_nanos(u64::try_from(late).unwrap_or(u64::MAX)));
                let is_named = names(message, self.victim);
                // While ranks join, a rank that has no connection yet learns from the coordinator which one
                // it has lost. The coordinator cannot know which end cut it off.
                let coordinator_lost_one = self.action == FaultAction::Disconnect
                    && self.victim == 0
                    && message.contains("before all ranks joined: its control connection");
                if !is_named && !coordinator_lost_one && !needs_failure(self.point) {
                    let _ = write!(outcome.wrong, "rank {rank} does not name rank {}; ", self.victim);
                }
            }
        }
    }

    /// Whether the process may go on after the fault.
    fn survives(&self) -> bool {
        !matches!(self.action, FaultAction::Kill | FaultAction::Stop | FaultAction::Exit)
    }
}

/// Whether a message names this rank: `rank 2 died` or `ranks 0, 1 and 2 of 4 did not join`. Advice does not
/// count.
fn names(message: &str, rank: usize) -> bool {
    let message = message.replace("look for rank 0 there", "");
    let is_number = |word: &str| word.trim_end_matches([',', ':', ')', ';', '.']).parse() == Ok(rank);
    let lists = message.split("rank ").skip(1).chain(message.split("ranks ").skip(1));
    let mut numbers = lists.flat_map(|list| {
        list.split_whitespace()
            .take_while(|word| *word == "and" || word.starts_with(|c: char| c.is_ascii_digit()))
    });
    numbers.any(is_number)
}

#[test]
fn advice_names_no_rank_and_a_list_names_each() {
    let late = "ranks 1 and 2 of 4 did not join within 8 s (rendezvous at x: check that they run and look for rank 0 there)";
    assert!(names(late, 1) && names(late, 2) && !names(late, 0) && !names(late, 4));
    assert!(names("rank 0: it failed", 0) && !names("rank 10 (pid 7) died", 1));
}

/// Where the ranks of a run meet.
struct Rendezvous {
    network: Option<Network>,
    address: String,
    port: String,
}

impl Rendezvous {
    fn new(run: &Run, number: usize) -> Self {
        let network = (run.action == FaultAction::LinkDown).then(|| Network::new(number, run.ranks));
        let address = if network.is_some() { Network::address(0) } else { "127.0.0.1".to_owned() };
        Self { network, address, port: free_port().to_string() }
    }
}

/// The kinds of links that this run tests and with which ranks reach this point.
fn links_of(point: FaultPoint) -> &'static [Links] {
    use FaultPoint as P;
    if Links::are_verbs() {
        let is_of_verbs = point == P::ReceivePosted || links_without_devices(point) == ALL_WITHOUT_DEVICES;
        return if is_of_verbs { &[Links::Verbs] } else { &[] };
    }
    links_without_devices(point)
}

/// Links with which ranks reach most points.
const ALL_WITHOUT_DEVICES: &[Links] = &[Links::Shm, Links::Tcp, Links::Mixed];

/// The kinds of links, but RDMA devices, with which ranks reach this point.
fn links_without_devices(point: FaultPoint) -> &'static [Links] {
    use FaultPoint as P;
    match point {
        // Only worlds that share memory have a path for small messages.
        P::SmallWritten | P::SmallPosted | P::SmallWaits | P::SmallCollected => &[Links::Shm],
        // Of mixed worlds, those with two ranks have one on each node.
        P::JoinSharesMemory | P::JoinSentDescriptors | P::JoinReceivedDescriptors | P::MemoryAnnounced => {
            &[Links::Shm]
        }
        P::LeaderCollected | P::LeaderPosted | P::MemberPosted | P::MemberReceived => &[Links::Leader],
        P::ReadsBegin | P::ReadsEnd | P::ViewReleased => &[Links::Shm],
        P::TcpConnects | P::TcpConnected | P::TcpAccepted | P::TcpEstablished | P::ReceivePosted => {
            &[Links::Tcp, Links::Mixed]
        }
        _ => ALL_WITHOUT_DEVICES,
    }
}

/// The rank that fails at this point: one that reaches it.
fn victim_at(point: FaultPoint, ranks: usize, turn: usize) -> usize {
    let name: &str = point.into();
    match point {
        // The rank with the higher number connects to the other; so does one to the leader of its node.
        FaultPoint::TcpConnects | FaultPoint::TcpConnected => ranks - 1,
        FaultPoint::JoinSentDescriptors | FaultPoint::JoinReceivedDescriptors => ranks - 1,
        FaultPoint::LeaderCollected | FaultPoint::LeaderPosted => 0,
        FaultPoint::MemberPosted | FaultPoint::MemberReceived => 1 + turn % (ranks - 1),
        FaultPoint::TcpAccepted | FaultPoint::TcpEstablished | FaultPoint::SleepBegins => 0,
        // The coordinator is in the process of rank 0.
        _ if name.starts_with("coordinator") => 0,
        _ => turn % ranks,
    }
}

/// Whether ranks reach this point only when another rank has failed.
fn needs_failure(point: FaultPoint) -> bool {
    matches!(point, FaultPoint::CallFails | FaultPoint::CoordinatorDecidedRootCause)
}

/// Whether ranks reach this point after some time, whatever they do: a life may be shorter.
fn is_timed(point: FaultPoint) -> bool {
    matches!(point, FaultPoint::ControlSentHeartbeat | FaultPoint::CoordinatorReceivedHeartbeat)
}

/// Whether a rank reaches this point again and again.
fn is_repeated(point: FaultPoint) -> bool {
    let name: &str = point.into();
    let once =
        ["coordinator_", "bootstrap_", "control_", "join_", "tcp_", "leave_", "worker_ended", "call_fails"];
    !once.iter().any(|prefix| name.starts_with(prefix))
}

/// All runs of a full matrix: every point, action, kind of link and number of ranks.
fn all_runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for point in FaultPoint::iter() {
        for action in FaultAction::iter() {
            for links in links_of(point) {
                // Each rank is in a namespace of its own where a link goes down, so it has TCP only.
                if action == FaultAction::LinkDown && *links != Links::Tcp {
                    continue;
                }
                let worlds = match links {
                    Links::Leader => LEADER_RANKS..=LEADER_RANKS,
                    Links::Verbs => 2..=3,
                    Links::Shm | Links::Tcp | Links::Mixed => 2..=5,
                };
                for ranks in worlds {
                    let turn = runs.len();
                    // A point that ranks reach only once in some runs is reached with three ranks.
                    let nth = if is_repeated(point) { 1 + ranks % 3 } else { 1 };
                    let victim = victim_at(point, ranks, turn);
                    runs.push(Run { point, nth, action, links: *links, ranks, victim });
                }
            }
        }
    }
    runs
}

/// Runs these, several at a time, and fails with a report of all that were wrong.
fn execute(runs: &[Run], name: &str) {
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..if Links::are_verbs() { 1 } else { PARALLEL } {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(run) = runs.get(number) else { break };
                    let outcome = run.execute(name, number);
                    outcomes.lock().expect("no panic").push((*run, outcome));
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().expect("no panic");
    let reached: BTreeSet<&str> =
        outcomes.iter().filter(|(_, outcome)| outcome.reached).map(|(run, _)| run.point.into()).collect();
    let mut detection: BTreeMap<&str, Vec<(Duration, &str)>> = BTreeMap::new();
    for (run, outcome) in &outcomes {
        let times = outcome.detection.iter().map(|time| (*time, run.point.into()));
        detection.entry(run.action.into()).or_default().extend(times);
    }
    println!("{} runs, {} points were reached", outcomes.len(), reached.len());
    for (action, times) in &mut detection {
        times.sort();
        let at = |share: f64| {
            times.get(((times.len() - 1) as f64 * share) as usize).map_or(Duration::ZERO, |it| it.0)
        };
        if !times.is_empty() {
            let slow: BTreeSet<&str> = times
                .iter()
                .filter(|(time, _)| *time > Duration::from_secs(2))
                .map(|(_, point)| *point)
                .collect();
            println!(
                "{action}: {} survivors, detection p50 {:?}, p99 {:?}, max {:?}; over 2 s at {slow:?}",
                times.len(),
                at(0.5),
                at(0.99),
                at(1.0)
            );
        }
    }
    let wrong: Vec<String> = outcomes
        .iter()
        .filter(|(_, outcome)| !outcome.wrong.is_empty())
        .map(|(run, outcome)| format!("{run:?}: {}", outcome.wrong))
        .collect();
    assert!(wrong.is_empty(), "{} of {} runs failed:\n{}", wrong.len(), outcomes.len(), wrong.join("\n\n"));
    let possible: HashSet<FaultPoint> =
        FaultPoint::iter().filter(|point| !links_of(*point).is_empty()).collect();
    if runs.iter().map(|run| run.point).collect::<HashSet<_>>() == possible {
        let points = possible.into_iter().map(<&str>::from);
        let unreached: Vec<&str> = points.filter(|point| !reached.contains(point)).collect();
        assert!(unreached.is_empty(), "no run reached {unreached:?}");
    }
}

/// Whether this process can begin runs: it ends here if it is a rank of one.
fn can_begin() -> bool {
    if !cfg!(debug_assertions) {
        eprintln!("skipped: only builds with debug assertions have fault points");
        return false;
    }
    if std::env::var_os(RANK).is_some() {
        with_watchdog(limit(), || match live() {
            Ok(()) => println!("ENDED"),
            Err(error) => {
                println!(
                    "ERROR {} {:?}: {}",
                    nanoseconds(),
                    error.kind(),
                    error.message().replace('\n', " ")
                );
            }
        });
        // The process of rank 0 reports a failed rendezvous to ranks that start late, as long as it runs.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    }
    true
}

/// The runs of one action: every run with a large effort, else one for each `every`-th point.
fn check(action: FaultAction, every: usize, name: &str) {
    let name = test_name(module_path!(), name);
    if !can_begin() {
        return;
    }
    let has_leader = has_leader();
    let is_wanted = |run: &Run| run.action == action && (has_leader || run.links != Links::Leader);
    let mut runs: Vec<Run> = all_runs().into_iter().filter(is_wanted).collect();
    if runs.is_empty() {
        return eprintln!("skipped: this fault is not tested with RDMA devices");
    }
    if action == FaultAction::LinkDown {
        match network::run_inside(&name) {
            Ok(None) => {}
            Ok(Some(status)) => return assert!(status.success(), "see above"),
            Err(why) => return eprintln!("skipped: {why}"),
        }
    }
    if effort::cases(10) < 100 {
        let every = if Links::are_verbs() { 3 * every } else { every };
        // Another kind of link and number of ranks for each point.
        let of_point = |(number, point): (usize, FaultPoint)| {
            let runs: Vec<&Run> = runs.iter().filter(|run| run.point == point).collect();
            Run { nth: 1, ..*runs[number * 5 % runs.len()] }
        };
        let points: Vec<FaultPoint> =
            FaultPoint::iter().filter(|point| runs.iter().any(|run| run.point == *point)).collect();
        runs = points.into_iter().enumerate().step_by(every).map(of_point).collect();
    }
    execute(&runs, &name);
}

#[test]
fn a_rank_that_is_killed_is_named() {
    check(FaultAction::Kill, 1, "a_rank_that_is_killed_is_named");
}

#[test]
fn a_rank_that_stops_is_named() {
    check(FaultAction::Stop, 5, "a_rank_that_stops_is_named");
}

#[test]
fn a_rank_that_exits_without_leaving_is_named() {
    check(FaultAction::Exit, 5, "a_rank_that_exits_without_leaving_is_named");
}

#[test]
fn a_rank_that_loses_its_connections_is_named() {
    check(FaultAction::Disconnect, 5, "a_rank_that_loses_its_connections_is_named");
}

#[test]
fn a_rank_without_descriptors_is_named() {
    check(FaultAction::ExhaustDescriptors, 5, "a_rank_without_descriptors_is_named");
}

#[test]
fn a_rank_whose_link_goes_down_is_named() {
    check(FaultAction::LinkDown, 10, "a_rank_whose_link_goes_down_is_named");
}

#[test]
fn a_rank_that_cannot_log_fails_nothing() {
    check(FaultAction::FullDisk, 12, "a_rank_that_cannot_log_fails_nothing");
}

/// Counter-example: the others waited a second until the dead rank would no longer read their memory.
#[test]
fn a_rank_that_is_killed_while_it_reads_delays_no_other() {
    if !can_begin() || Links::are_verbs() {
        return;
    }
    let name = test_name(module_path!(), "a_rank_that_is_killed_while_it_reads_delays_no_other");
    let (point, action) = (FaultPoint::ReadsBegin, FaultAction::Kill);
    let run = Run { point, nth: 1, action, links: Links::Shm, ranks: 4, victim: 2 };
    let detected = |number| {
        let outcome = run.execute(&name, number);
        assert!(outcome.reached && outcome.wrong.is_empty(), "{}", outcome.wrong);
        outcome.detection.into_iter().max().expect("survivors")
    };
    // On a busy machine one run may be late.
    let times: Vec<Duration> = (0..3).map(detected).collect();
    assert!(times.iter().any(|time| *time < Duration::from_millis(500)), "{times:?}");
}

#[test]
fn a_rank_that_cannot_join_tells_the_others_why() {
    if !can_begin() || Links::are_verbs() {
        return;
    }
    let name = test_name(module_path!(), "a_rank_that_cannot_join_tells_the_others_why");
    let (point, action) = (FaultPoint::ControlThreadStarted, FaultAction::ExhaustDescriptors);
    let run = Run { point, nth: 1, action, links: Links::Shm, ranks: 3, victim: 1 };
    let outcome = run.execute(&name, 0);
    assert!(outcome.reached && outcome.wrong.is_empty(), "{}", outcome.wrong);
    for log in &outcome.logs {
        let cause = log.lines().find(|line| line.contains("System: rank 1: cannot create shared memory"));
        assert!(cause.is_some_and(|line| line.contains("Too many open files")), "{log}");
    }
}
