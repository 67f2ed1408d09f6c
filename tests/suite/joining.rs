//! Joining: what ranks say while they wait for others, that all end together if one cannot join, and a
//! connection that carries nothing.

use crate::fault_matrix::network::{self, Network};
use crate::harness::{RankProcess, free_port, test_name, with_watchdog};
use crate::programs::program;
use flexring::{Communicator, ReduceOp};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Shorter than the default time that ranks wait for others, 60 s.
const LIMIT: Duration = Duration::from_secs(40);
/// Begins the last line of a rank.
const ENDED: &str = "ENDED";
/// What a rank prints after its first call.
const READY: &str = "READY";
/// The variable that names the file for which ranks wait before their second call.
const SIGNAL_FILE: &str = "TEST_SIGNAL_FILE";
const SECRET: &str = "the secret of this job: 0123456789";

/// In a process that is a rank: joins, says how that ended, and ends.
fn join_if_rank() {
    if std::env::var_os("FLEXRING_RANK").is_none() {
        return;
    }
    match with_watchdog(LIMIT, Communicator::from_env) {
        Ok(_) => eprintln!("{ENDED} joined"),
        Err(error) => eprintln!("{ENDED} {error}"),
    }
    std::process::exit(0);
}

/// Starts `command` as a rank of the test `test`.
fn start(mut command: Command, test: &str, rank: usize, variables: &[(&str, &str)]) -> RankProcess {
    command.args([&test_name(module_path!(), test), "--exact", "--nocapture"]);
    command.env("FLEXRING_RANK", rank.to_string()).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    RankProcess::new(command.spawn().expect("a process for the rank"))
}

/// A job of three ranks of the test `test`.
struct Job<'a> {
    test: &'a str,
    port: String,
}

impl<'a> Job<'a> {
    fn new(test: &'a str) -> Self {
        Self { test, port: free_port().to_string() }
    }

    fn start(&self, rank: usize, variables: &[(&str, &str)]) -> RankProcess {
        let job = [
            ("FLEXRING_WORLD_SIZE", "3"),
            ("FLEXRING_MASTER_ADDR", "127.0.0.1"),
            ("FLEXRING_MASTER_PORT", &self.port),
            ("FLEXRING_SECRET", SECRET),
        ];
        let variables: Vec<(&str, &str)> = job.into_iter().chain(variables.iter().copied()).collect();
        let command = program(std::env::current_exe().expect("this binary"));
        start(command, self.test, rank, &variables)
    }
}

#[test]
fn ranks_say_for_whom_they_wait_and_who_was_refused() {
    join_if_rank();
    with_watchdog(LIMIT, || {
        let job = Job::new("ranks_say_for_whom_they_wait_and_who_was_refused");
        let mut waiting = [job.start(0, &[]), job.start(1, &[])];
        let mut refused = job.start(2, &[("FLEXRING_SECRET", "another secret, as by a typing error")]);
        refused.line_with("does not know the secret of the job");
        for rank in &mut waiting {
            rank.line_with("was refused: it claims rank 2 and does not know the job's secret");
        }
        waiting[0].line_with("waiting for rank 2 (2 of 3 joined)");
        refused.line_with("waiting for rank 0 at 127.0.0.1");
        drop(refused);
        // An impostor would look like this, so the job still comes about.
        let mut last = job.start(2, &[]);
        for rank in waiting.iter_mut().chain([&mut last]) {
            assert_eq!(rank.line_with(ENDED).trim_end(), format!("{ENDED} joined"));
        }
    });
}

#[test]
fn an_invalid_setting_on_one_rank_ends_all() {
    join_if_rank();
    with_watchdog(LIMIT, || {
        for invalid in [0, 1] {
            let job = Job::new("an_invalid_setting_on_one_rank_ends_all");
            let mut ranks: Vec<(usize, RankProcess)> =
                (0..3).filter(|rank| *rank != invalid).map(|rank| (rank, job.start(rank, &[]))).collect();
            ranks.push((invalid, job.start(invalid, &[("FLEXRING_SLOTS", "many")])));
            for (rank, process) in &mut ranks {
                let end = process.line_with(ENDED);
                assert!(end.contains("FLEXRING_SLOTS=\"many\" cannot be used"), "rank {rank}: {end}");
                assert!(
                    *rank == invalid || end.contains(&format!("rank {invalid} (pid ")),
                    "rank {rank}: {end}"
                );
            }
        }
    });
}

#[test]
fn a_rank_that_joins_after_the_failure_gets_its_cause() {
    join_if_rank();
    with_watchdog(LIMIT, || {
        let job = Job::new("a_rank_that_joins_after_the_failure_gets_its_cause");
        let _first = job.start(0, &[]);
        let mut second = job.start(1, &[("FLEXRING_SUBCHUNK", "8K")]);
        assert!(second.line_with(ENDED).contains("FLEXRING_SUBCHUNK"));
        let end = job.start(2, &[]).line_with(ENDED);
        assert!(end.contains("FLEXRING_SUBCHUNK"), "{end}");
    });
}

/// In a process that is a rank: makes a call, waits for the signal, makes a second one, and says how that
/// ended.
fn call_twice_if_rank() {
    let Some(file) = std::env::var_os(SIGNAL_FILE) else { return };
    let error = with_watchdog(LIMIT, || {
        let comm = Communicator::from_env().expect("the ranks meet");
        comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("the links work");
        eprintln!("{READY}");
        while !Path::new(&file).exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect_err("the links do not work")
    });
    eprintln!("{ENDED} {}", error.message().replace('\n', " "));
    std::process::exit(0);
}

#[test]
fn a_data_connection_that_carries_nothing_is_named() {
    call_twice_if_rank();
    let test = "a_data_connection_that_carries_nothing_is_named";
    match network::run_inside(&test_name(module_path!(), test)) {
        Ok(None) => {}
        Ok(Some(status)) => return assert!(status.success(), "see above"),
        Err(why) => return eprintln!("skipped: {why}"),
    }
    with_watchdog(LIMIT, || {
        let folder = tempfile::tempdir().expect("a folder");
        let signal = folder.path().join("signal");
        let network = Network::new(0, 2);
        network.add_data_network();
        let variables = [
            ("FLEXRING_WORLD_SIZE", "2"),
            ("FLEXRING_MASTER_ADDR", &*Network::address(0)),
            ("FLEXRING_MASTER_PORT", "29000"),
            ("FLEXRING_SECRET", SECRET),
            ("FLEXRING_TRANSPORT", "tcp"),
            ("FLEXRING_SOCKET_IFNAME", Network::DATA_INTERFACE),
            ("FLEXRING_TIMEOUT_MS", "3000"),
            (SIGNAL_FILE, signal.to_str().expect("text")),
        ];
        let mut ranks = [0, 1].map(|rank| start(network.command(rank), test, rank, &variables));
        for rank in &mut ranks {
            rank.line_with(READY);
        }
        network.cut_data(1);
        std::fs::write(&signal, "").expect("a file");
        for rank in &mut ranks {
            let end = rank.line_with(ENDED);
            for text in ["the TCP connection from 198.19.0.", " to 198.19.0.", "a firewall or the network"] {
                assert!(end.contains(text), "{end}");
            }
            assert!(!end.contains("to make the same call"), "{end}");
        }
    });
}
