//! The ranks of a world as processes, each of which runs the calling test again.

use crate::harness::{free_port, with_watchdog};
use crate::programs::program;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

/// The variable by which a process knows that it is a rank.
const RANK: &str = "FLEXRING_RANK";

/// Whether this process is a rank.
pub fn is_rank() -> bool {
    std::env::var_os(RANK).is_some()
}

/// Runs `body` in `ranks` processes, and returns how each ended, with its output; nothing in these processes.
/// `test` is the full name of the calling test, and `variables` are for the ranks.
pub fn run_ranks(
    test: &str,
    ranks: usize,
    variables: &[(&str, &str)],
    body: impl FnOnce(),
) -> Vec<(ExitStatus, String)> {
    if is_rank() {
        body();
        return Vec::new();
    }
    with_watchdog(Duration::from_secs(100), || {
        let port = free_port().to_string();
        let rank = |rank: usize| {
            let mut rank_program = program(std::env::current_exe().expect("this binary"));
            rank_program.args([test, "--exact", "--nocapture"]).stdout(Stdio::piped()).stderr(Stdio::piped());
            rank_program.envs([(RANK, rank.to_string()), ("FLEXRING_WORLD_SIZE", ranks.to_string())]);
            rank_program.envs([("FLEXRING_MASTER_ADDR", "127.0.0.1"), ("FLEXRING_MASTER_PORT", &port)]);
            rank_program.envs(variables.iter().copied());
            rank_program.env("FLEXRING_TIMEOUT_MS", "20000").spawn().expect("it starts")
        };
        let ranks: Vec<_> = (0..ranks).map(rank).collect();
        let end = |rank: std::process::Child| {
            let output = rank.wait_with_output().expect("it ends");
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            (output.status, text.into_owned())
        };
        ranks.into_iter().map(end).collect()
    })
}

/// As [`run_ranks`], and checks that all ranks succeed.
pub fn check_ranks(test: &str, ranks: usize, body: impl FnOnce()) {
    for (status, text) in run_ranks(test, ranks, &[], body) {
        assert!(status.success() && text.contains("1 passed"), "{text}");
        let is_forwarded = |line: &&str| line.starts_with('#') || line.starts_with("skipped: ");
        text.lines().filter(is_forwarded).for_each(|line| eprintln!("{line}"));
    }
}
