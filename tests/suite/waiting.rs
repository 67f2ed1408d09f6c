//! Which ranks wait for which: processes that are stopped, an id's creator that ends, and `flexring status`.

use crate::harness::{
    RankProcess, Setup, World, free_port, spawn, start_processes, test_name, with_watchdog,
};
use flexring::create_unique_id;
use flexring::{Communicator, Error, ErrorKind, ReduceOp};
use flexring_core::config::Config;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Interval of heartbeats in milliseconds: a rank that is silent for a second is considered dead.
const HEARTBEAT: &str = "50";
/// Longer than twenty heartbeats.
const PAUSE: Duration = Duration::from_millis(2500);
/// What a rank prints when it has joined.
const READY: &str = "the rank has joined";
/// The variable that names the file whose existence is the signal to continue.
const SIGNAL_FILE: &str = "TEST_SIGNAL_FILE";

/// A rank that is not woken sleeps for half a second.
#[test]
fn sleeping_ranks_are_woken_by_small_calls() {
    const CALLS: usize = 12;
    const WORK: Duration = Duration::from_millis(20);
    const LIMIT: Duration = Duration::from_millis(400);
    if !World::Shm.is_enabled() {
        return;
    }
    // With 9 ranks on few cores, a leader adds for all.
    for ranks in [2, 9] {
        let mut setup = Setup::new(World::Shm, ranks);
        setup.config.spin_us = 0;
        spawn(&setup, |comm| {
            let is_late = |call: usize| {
                if comm.rank() == call % ranks {
                    std::thread::sleep(WORK);
                }
                let begun = Instant::now();
                comm.all_reduce(&mut [1f32], ReduceOp::Sum).expect("a sum");
                begun.elapsed() > LIMIT
            };
            let late = (0..CALLS).filter(|call| is_late(*call)).count();
            // Other programs may delay a few.
            assert!(late < CALLS / 2, "rank {} was not woken in {late} of {CALLS} calls", comm.rank());
        });
    }
}

/// How long this thread has run.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Counter-example: a rank that had not read a peer's last word on their link did not sleep in small calls,
/// which read no links.
#[test]
fn a_rank_sleeps_in_small_calls_whatever_a_longer_call_left_unread() {
    const WORK: Duration = Duration::from_millis(200);
    if !World::Shm.is_enabled() {
        return;
    }
    let mut setup = Setup::new(World::Shm, 2);
    setup.config.spin_us = 0;
    spawn(&setup, |comm| {
        let mut vector = vec![1f32; 64 << 10];
        for _ in 0..3 {
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            comm.broadcast(&mut vector, 0).expect("a vector");
            if comm.rank() == 0 {
                std::thread::sleep(WORK);
            }
            let begun = processor_time();
            comm.barrier().expect("a barrier");
            let used = processor_time() - begun;
            assert!(used < WORK / 2, "rank {} ran for {used:?} while it waited", comm.rank());
        }
    });
}

fn is_rank() -> bool {
    std::env::var_os("FLEXRING_RANK").is_some()
}

/// Runs `body` as a rank of a world of processes, and ends the process.
fn as_rank(body: impl FnOnce(Communicator)) -> ! {
    with_watchdog(Duration::from_secs(50), || {
        let comm = Communicator::from_env().expect("the world meets");
        eprintln!("{READY}");
        body(comm);
    });
    std::process::exit(0);
}

/// Reduces every ten milliseconds until rank 0 sees the signal, and checks the sums. Returns the first error.
fn reduce_until_signal(comm: &Communicator) -> Result<(), Error> {
    let file = std::env::var(SIGNAL_FILE).expect("the file's name");
    loop {
        let signalled = comm.rank() == 0 && Path::new(&file).exists();
        let mut vector = [1f32, f32::from(u8::from(signalled))];
        comm.all_reduce(&mut vector, ReduceOp::Sum)?;
        assert_eq!(vector[0], comm.world_size() as f32);
        if vector[1] > 0.0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts the ranks of a world that rendezvous as `variables` say, and waits until all have joined.
fn start_world(test: &str, ranks: usize, variables: &[(&str, &str)]) -> Vec<RankProcess> {
    let processes = start_processes(&test_name(module_path!(), test), ranks, variables);
    let mut running: Vec<RankProcess> = processes.into_iter().map(RankProcess::new).collect();
    for rank in &mut running {
        rank.line_with(READY);
    }
    running
}

fn signal(rank: &RankProcess, signal: Signal) {
    let pid = Pid::from_raw(rank.child.id() as i32).expect("a process id");
    kill_process(pid, signal).expect("a child");
}

/// The variables of a job whose coordinator listens on this port, and that goes on until `file` exists. Its
/// ranks notice a silent rank soon. The first two variables suffice to ask for its status.
fn job_at<'a>(port: &'a str, file: &'a Path) -> [(&'static str, &'a str); 4] {
    [
        ("FLEXRING_MASTER_ADDR", "127.0.0.1"),
        ("FLEXRING_MASTER_PORT", port),
        ("FLEXRING_HEARTBEAT_MS", HEARTBEAT),
        (SIGNAL_FILE, file.to_str().expect("text")),
    ]
}

/// Checks that all ranks succeed.
fn all_succeed(ranks: Vec<RankProcess>) -> Vec<String> {
    let ended: Vec<(bool, String)> = ranks.into_iter().map(RankProcess::wait).collect();
    for (rank, (succeeded, stderr)) in ended.iter().enumerate() {
        assert!(succeeded, "rank {rank}: {stderr}");
    }
    ended.into_iter().map(|(_, stderr)| stderr).collect()
}

#[test]
fn a_stopped_coordinator_blames_itself_when_it_continues() {
    if is_rank() {
        as_rank(|comm| {
            let error = reduce_until_signal(&comm).expect_err("rank 0 was stopped for too long");
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(error.message().starts_with("rank 0 (pid "), "{error}");
            assert!(
                error.message().contains("silent for") || error.message().contains("paused for"),
                "{error}"
            );
        });
    }
    with_watchdog(Duration::from_secs(60), || {
        let port = free_port().to_string();
        let variables = job_at(&port, Path::new("/nonexistent"));
        let test = "a_stopped_coordinator_blames_itself_when_it_continues";
        for transport in ["auto", "tcp"] {
            let variables: Vec<_> =
                variables.into_iter().chain([("FLEXRING_TRANSPORT", transport)]).collect();
            let ranks = start_world(test, 3, &variables);
            signal(&ranks[0], Signal::STOP);
            std::thread::sleep(PAUSE);
            signal(&ranks[0], Signal::CONT);
            all_succeed(ranks);
        }
    });
}

#[test]
fn a_job_that_is_stopped_as_a_whole_continues() {
    if is_rank() {
        as_rank(|comm| reduce_until_signal(&comm).expect("the job continues"));
    }
    with_watchdog(Duration::from_secs(60), || {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("signal");
        let port = free_port().to_string();
        let variables = job_at(&port, &file);
        let ranks = start_world("a_job_that_is_stopped_as_a_whole_continues", 2, &variables);
        ranks.iter().for_each(|rank| signal(rank, Signal::STOP));
        std::thread::sleep(PAUSE);
        ranks.iter().for_each(|rank| signal(rank, Signal::CONT));
        // Long enough for a silent rank to be considered dead.
        std::thread::sleep(Duration::from_millis(1500));
        std::fs::write(&file, "").expect("a file");
        all_succeed(ranks);
    });
}

/// The variable of the process that creates a unique id.
const CREATOR: &str = "TEST_CREATOR";

/// In the process that creates a unique id: prints it, waits until the parent closes standard input, and
/// ends.
fn create_id_if_asked() {
    if std::env::var_os(CREATOR).is_some() {
        let config = Config { socket_ifname: Some("lo".to_owned()), ..Config::default() };
        eprintln!("{}", create_unique_id(&config).expect("an id").to_hex());
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    }
}

/// Starts the process that creates a unique id. Returns the id with it.
fn start_creator(test: &str) -> (Child, String) {
    let mut creator = Command::new(std::env::current_exe().expect("this binary"))
        .args([&test_name(module_path!(), test), "--exact", "--nocapture"])
        .env(CREATOR, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process");
    let mut id = String::new();
    BufReader::new(creator.stderr.take().expect("standard error")).read_line(&mut id).expect("an id");
    (creator, id.trim().to_owned())
}

#[test]
fn the_creator_of_a_unique_id_may_end_once_all_ranks_have_joined() {
    let test = "the_creator_of_a_unique_id_may_end_once_all_ranks_have_joined";
    create_id_if_asked();
    if is_rank() {
        as_rank(|comm| {
            reduce_until_signal(&comm).expect("the world goes on without the id's creator");
            if comm.rank() == 2 {
                crate::harness::kill_self_soon();
            }
            let error = crate::harness::reduce_until_failure(&comm);
            assert!(error.message().starts_with("rank 2 (pid "), "{error}");
        });
    }
    with_watchdog(Duration::from_secs(60), || {
        let (mut creator, id) = start_creator(test);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("signal");
        let variables = [("FLEXRING_UNIQUE_ID", id.as_str()), (SIGNAL_FILE, file.to_str().expect("text"))];
        let ranks = start_world(test, 3, &variables);
        drop(creator.stdin.take());
        assert!(creator.wait().expect("a child").success());
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(&file, "").expect("a file");
        let ended: Vec<(bool, String)> = ranks.into_iter().map(RankProcess::wait).collect();
        for (rank, (succeeded, stderr)) in ended.iter().enumerate() {
            assert_eq!(*succeeded, rank != 2, "rank {rank}: {stderr}");
        }
    });
}

#[test]
fn a_rank_that_dies_while_the_world_moves_to_rank_0_is_named() {
    let test = "a_rank_that_dies_while_the_world_moves_to_rank_0_is_named";
    create_id_if_asked();
    if is_rank() {
        let error = Communicator::from_env().map(drop).expect_err("rank 2 has died");
        eprintln!("{error}");
        std::process::exit(0);
    }
    with_watchdog(Duration::from_secs(50), || {
        let (mut creator, id) = start_creator(test);
        let mut ranks: Vec<Child> = (0..3)
            .map(|rank| {
                // Rank 2 dies when it has connected to the second coordinator, which it has not sent
                // anything.
                let point =
                    if rank == 2 { "bootstrap_connected:2:kill" } else { "bootstrap_connected:9:kill" };
                Command::new(std::env::current_exe().expect("this binary"))
                    .args([&test_name(module_path!(), test), "--exact", "--nocapture"])
                    .env("FLEXRING_RANK", rank.to_string())
                    .env("FLEXRING_WORLD_SIZE", "3")
                    .env("FLEXRING_UNIQUE_ID", &id)
                    .env("FLEXRING_CONNECT_TIMEOUT_MS", "20000")
                    .env("FLEXRING_TEST_FAULT_POINT", point)
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .expect("a process")
            })
            .collect();
        let victim = ranks.pop().expect("rank 2").wait_with_output().expect("a child");
        assert!(!victim.status.success(), "{}", String::from_utf8_lossy(&victim.stderr));
        let begun = Instant::now();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().expect("a child");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && stderr.contains("rank 2 (pid "), "rank {rank}: {stderr}");
            assert!(begun.elapsed() < Duration::from_secs(10), "rank {rank}: {:?}", begun.elapsed());
        }
        drop(creator.stdin.take());
        assert!(creator.wait().expect("a child").success());
    });
}

#[test]
fn a_running_job_can_be_asked_for_its_status() {
    if is_rank() {
        as_rank(|comm| {
            // Rank 1 makes the call when the signal comes.
            let file = std::env::var(SIGNAL_FILE).expect("the file's name");
            while comm.rank() == 1 && !Path::new(&file).exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
            comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("the call succeeds");
        });
    }
    with_watchdog(Duration::from_secs(60), || {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("signal");
        let port = free_port().to_string();
        let variables = job_at(&port, &file);
        let ranks = start_world("a_running_job_can_be_asked_for_its_status", 2, &variables);
        // By the environment of the job, by an address, and by either rank.
        let pids = [0, 1].map(|rank: usize| ranks[rank].child.id());
        for (arguments, variables) in [
            ("status".to_owned(), &variables[..2]),
            (format!("status --address 127.0.0.1:{port}"), &[][..]),
            (format!("status --pid {}", pids[0]), &[][..]),
            (format!("status --pid {}", pids[1]), &[][..]),
        ] {
            let until = Instant::now() + Duration::from_secs(10);
            loop {
                let (code, stdout, stderr) = crate::command::run(&arguments, variables);
                if arguments.contains("--pid") && code == Some(1) && Instant::now() < until {
                    // The rank has not joined yet.
                    continue;
                }
                assert_eq!(code, Some(0), "{stderr}");
                let is_row = |line: &&str| !line.starts_with("job of 2 ranks, coordinator in process ");
                let rows: Vec<&str> = stdout.lines().filter(is_row).collect();
                assert_eq!(rows.len(), 1 + 2, "{stdout}");
                if rows[1].contains("all_reduce #1 (8 x float, sum)") {
                    assert!(rows[1].contains("in call") && rows[1].ends_with("rank 1"), "{stdout}");
                    assert!(rows[2].contains("idle"), "{stdout}");
                    assert!(rows[1].contains(&ranks[0].child.id().to_string()), "{stdout}");
                    break;
                }
                assert!(Instant::now() < until, "{stdout}");
            }
        }
        // Among all jobs of this user, for programs. Other tests may run jobs at the same time.
        let (_, stdout, stderr) = crate::command::run("status --json", &[]);
        let report: serde_json::Value = serde_json::from_str(&stdout).expect(&stderr);
        let jobs = report["jobs"].as_array().expect("jobs");
        let job = jobs.iter().find(|job| job["coordinator"] == pids[0]).expect(&stdout);
        let states = [0, 1].map(|rank: usize| (&job["ranks"][rank]["pid"], &job["ranks"][rank]["state"]));
        assert_eq!(
            states,
            [(&pids[0].into(), &"in call".into()), (&pids[1].into(), &"idle".into())],
            "{stdout}"
        );
        assert_eq!(job["ranks"][0]["waits_for"], serde_json::json!([1]), "{stdout}");
        // From a network namespace where the coordinator cannot be seen.
        let mut elsewhere = std::process::Command::new("unshare");
        elsewhere
            .args(["--net", env!("CARGO_BIN_EXE_flexring"), "status", "--pid", &pids[1].to_string()])
            .env_clear();
        let output = elsewhere.output().expect("unshare starts");
        let printed = String::from_utf8_lossy(&output.stdout);
        if printed.is_empty() {
            eprintln!("skipped: no network namespace can be made here");
        } else {
            let reason = format!("process {}: no status: ", pids[1]);
            assert!(
                printed.starts_with(&reason) && printed.contains("another network namespace"),
                "{printed}"
            );
            assert!(printed.contains(&format!("nsenter --net --target {}", pids[1])), "{printed}");
            assert!(!printed.contains("firewall") && output.status.code() == Some(1), "{printed}");
        }
        // Rank 0 of a second job that wants the same port.
        let second = ("FLEXRING_RANK", "0");
        let others = [("FLEXRING_WORLD_SIZE", "2"), variables[0], variables[1]];
        let lookup = |name: &str| {
            let found = others.into_iter().chain([second]).find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_owned())
        };
        let config = Config::read(lookup).expect("settings");
        let identity = flexring::internal::bootstrap::identity(&config, lookup).expect("an identity");
        let error = Communicator::with_config(&config, &identity).map(drop).expect_err("the port is in use");
        let owner = format!("a flexring coordinator (pid {} on host ", ranks[0].child.id());
        assert!(error.message().contains(&owner), "{error}");
        assert!(error.message().contains("set FLEXRING_MASTER_PORT to a port that is free"), "{error}");
        std::fs::write(&file, "").expect("a file");
        all_succeed(ranks);
        let variables = [("FLEXRING_CONNECT_TIMEOUT_MS", "200")];
        let (code, _, stderr) =
            crate::command::run(&format!("status --address 127.0.0.1:{port}"), &variables);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(&format!("127.0.0.1 port {port}")), "{stderr}");
        let (code, _, stderr) = crate::command::run(&format!("status --pid {}", pids[1]), &[]);
        assert!(code == Some(2) && stderr.contains("there is no process"), "{stderr}");
        let (code, _, stderr) = crate::command::run(&format!("status --pid {}", std::process::id()), &[]);
        assert!(code == Some(1) && stderr.contains("is no rank of a job"), "{stderr}");
    });
}
