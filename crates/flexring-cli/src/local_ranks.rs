//! `--ranks N`: starts the ranks on this machine, forwards their standard error, and waits until all have
//! ended.
//!
//! Owns the processes of the ranks: none is left when `run` returns. If the parent itself is killed, the
//! kernel kills them ([`die_with_parent`]).

use crate::error::{CommandError, ERROR_PREFIX};
use flexring::internal::bootstrap::Coordinator;
use flexring::{Error, ErrorKind, Result};
use flexring_core::config::Config;
use flexring_core::descriptor_limit;
use flexring_core::rank::RankList;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the other ranks may run after the first one failed, so that they detect the failure and report
/// it.
const GRACE_PERIOD: Duration = Duration::from_secs(5);
/// Most ranks on this machine. Chosen, not measured: a mistyped number must not fill the machine with
/// processes.
const MOST_RANKS: usize = 4096;
/// How often the exit status of a rank that closed its standard error is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Prefixes of variables that launchers set. They are removed because they do not describe the ranks started
/// here.
const LAUNCHER_PREFIXES: [&str; 8] =
    ["OMPI_", "PMI_", "PMIX_", "SLURM_", "HYDRA_", "MPI_", "TORCHELASTIC_", "LOCAL_"];
/// Variables that launchers set, and settings of an outer job, which are removed as well.
const LAUNCHER_VARIABLES: [&str; 6] =
    ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEXRING_MASTER_ADDR", "FLEXRING_MASTER_PORT"];

/// The exit of a rank's process.
struct RankExit {
    rank: usize,
    pid: u32,
    status: ExitStatus,
    /// The error message that it printed.
    error: Option<String>,
}

/// Starts `ranks` ranks of this command, with `settings` in their environment, and waits for all of them.
/// Returns the lines that say which ranks failed, which it has printed; none if all succeeded.
///
/// # Errors
/// `InvalidArgument` for more than [`MOST_RANKS`] ranks; any error of starting the ranks.
pub fn run(config: &Config, ranks: usize, settings: &[(&'static str, String)]) -> Result<Vec<String>> {
    check_number(ranks)?;
    // The parent has a few descriptors for each rank.
    descriptor_limit::raise();
    // The coordinator serves the ranks for as long as this function runs.
    let (_coordinator, id) = Coordinator::create(config)?;
    let (exited, exits) = channel();
    let mut processes = RankProcesses::default();
    for rank in 0..ranks {
        let mut command = command(settings, rank, ranks)?;
        command.env("FLEXRING_UNIQUE_ID", id.to_hex());
        processes.start(rank, command, exited.clone())?;
    }
    drop(exited);
    let lines = summary(&processes.wait_all(&exits));
    lines.iter().for_each(|line| print_line(line));
    Ok(lines)
}

fn check_number(ranks: usize) -> Result<()> {
    let message = format!(
        "{ranks} ranks are too many for one machine: expected at most {MOST_RANKS}; flexring simulate needs no processes"
    );
    if ranks > MOST_RANKS { Err(Error::invalid_argument(message)) } else { Ok(()) }
}

/// Adds the next step to the error of a process that finds no job to join.
pub fn no_job(error: Error) -> CommandError {
    if error.kind() != ErrorKind::Rendezvous {
        return error.into();
    }
    CommandError::Usage(format!(
        "give --ranks N to start N ranks on this machine; without it, {}",
        error.message()
    ))
}

/// Makes the kernel kill this process when its parent ends for any reason.
pub fn die_with_parent(parent: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|cause| Error::io("cannot set the parent-death signal", cause))?;
    // The parent may have ended before the signal was set.
    if getppid().map(Pid::as_raw_nonzero).is_none_or(|pid| pid.get() != parent) {
        return Err(Error::aborted("the process that started this rank is gone"));
    }
    Ok(())
}

/// This command with its arguments, to run as one rank of the world.
fn command(settings: &[(&'static str, String)], rank: usize, world: usize) -> Result<Command> {
    let program = std::env::current_exe()
        .map_err(|cause| Error::io("cannot determine the path of this executable", cause))?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--rank-of", &std::process::id().to_string()]);
    if std::io::stderr().is_terminal() {
        command.arg("--borrow-terminal");
    }
    for (name, _) in std::env::vars_os() {
        let known = name.to_string_lossy();
        if LAUNCHER_VARIABLES.contains(&known.as_ref())
            || LAUNCHER_PREFIXES.iter().any(|prefix| known.starts_with(prefix))
            // This process has warned of it.
            || Config::is_unknown(&known)
        {
            command.env_remove(&name);
        }
    }
    command
        .envs(settings.iter().map(|(name, value)| (*name, value)))
        .env("FLEXRING_RANK", rank.to_string())
        .env("FLEXRING_WORLD_SIZE", world.to_string())
        .stdin(Stdio::null())
        .stdout(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
        .stderr(Stdio::piped());
    Ok(command)
}

/// The running ranks. Dropping it kills and reaps them.
///
/// Ranks must be started by the main thread: the kernel sends the parent-death signal when the starting
/// thread ends.
#[derive(Default)]
struct RankProcesses(Vec<Arc<Mutex<Child>>>);

impl RankProcesses {
    fn start(&mut self, rank: usize, mut command: Command, exited: Sender<RankExit>) -> Result<()> {
        let mut child =
            command.spawn().map_err(|cause| Error::io(format!("cannot start rank {rank}"), cause))?;
        let (pid, stderr) = (child.id(), child.stderr.take());
        let child = Arc::new(Mutex::new(child));
        self.0.push(Arc::clone(&child));
        let forward = move || {
            let error = stderr.and_then(|stderr| forward_stderr(rank, stderr));
            // No other thread reaps this process. A closed channel means that the parent is leaving already.
            if let Some(status) = wait_for_exit(&child) {
                let _ = exited.send(RankExit { rank, pid, status, error });
            }
        };
        #[allow(clippy::disallowed_methods, reason = "a thread of the command, not of the library")]
        std::thread::Builder::new().name(format!("stderr-{rank}")).spawn(forward).map_err(|cause| {
            Error::io(format!("cannot start the thread that reads the output of rank {rank}"), cause)
        })?;
        Ok(())
    }

    /// Waits until every rank has ended. Kills those that still run [`GRACE_PERIOD`] after the first failure.
    /// Returns the failed ranks in the order in which they ended.
    fn wait_all(&self, exits: &Receiver<RankExit>) -> Vec<RankExit> {
        let mut failures = Vec::new();
        let mut deadline: Option<Instant> = None;
        loop {
            let end = match deadline {
                None => exits.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => exits.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match end {
                Ok(end) if end.status.success() => {}
                Ok(end) => {
                    failures.push(end);
                    deadline = deadline.or(Some(Instant::now() + GRACE_PERIOD));
                }
                Err(RecvTimeoutError::Timeout) => {
                    print_line("killing the ranks that still run after a failure");
                    self.kill();
                    deadline = None;
                }
                Err(RecvTimeoutError::Disconnected) => return failures,
            }
        }
    }

    fn kill(&self) {
        for child in &self.0 {
            // Fails harmlessly if the process was reaped.
            let _ = lock(child).kill();
        }
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        self.kill();
        for child in &self.0 {
            let _ = lock(child).wait();
        }
    }
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a rank to exit. Polls, so that the lock is free for [`RankProcesses::kill`].
fn wait_for_exit(child: &Mutex<Child>) -> Option<ExitStatus> {
    loop {
        let status = lock(child).try_wait();
        match status {
            Ok(Some(status)) => return Some(status),
            Ok(None) => std::thread::sleep(POLL_INTERVAL),
            Err(_) => return None,
        }
    }
}

/// Forwards the standard error of a rank line by line until it is closed. Returns the error message instead
/// of forwarding it, for the summary.
fn forward_stderr(rank: usize, stderr: ChildStderr) -> Option<String> {
    let mut error = None;
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line);
        match text.trim_end().strip_prefix(ERROR_PREFIX) {
            Some(message) => error = Some(message.to_owned()),
            None => print_line(&format!("[rank {rank}] {}", text.trim_end())),
        }
        line.clear();
    }
    error
}

/// Prints a line on standard error, in place of the progress bar that rank 0 may draw there.
fn print_line(line: &str) {
    let mut stderr = std::io::stderr().lock();
    let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
    // A failure to write to standard error cannot be reported anywhere.
    let _ = writeln!(stderr, "{clear}{line}");
}

/// One line for each rank that was killed or exited without a message, then one for each error message with
/// its ranks.
fn summary(failures: &[RankExit]) -> Vec<String> {
    let mut messages: Vec<(&str, Vec<usize>)> = Vec::new();
    let mut lines = Vec::new();
    for RankExit { rank, pid, status, error } in failures {
        match (status.signal(), status.code(), error) {
            (Some(signal), _, _) => {
                lines.push(format!(
                    "rank {rank} (pid {pid}) was killed by signal {signal}{}",
                    signal_name(signal)
                ));
            }
            (_, _, Some(error)) => match messages.iter_mut().find(|(message, _)| message == error) {
                Some((_, ranks)) => ranks.push(*rank),
                None => messages.push((error, vec![*rank])),
            },
            (_, code, None) => {
                lines.push(format!("rank {rank} (pid {pid}) exited with code {}", code.unwrap_or_default()));
            }
        }
    }
    lines.extend(messages.into_iter().map(|(message, mut ranks)| {
        ranks.sort_unstable();
        format!("{}: {message}", RankList::unabridged(&ranks))
    }));
    lines
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        2 => " (interrupt)",
        4 => " (illegal instruction)",
        6 => " (abort)",
        7 => " (bus error)",
        9 => " (kill)",
        11 => " (segmentation fault)",
        15 => " (termination)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, status: i32, error: Option<&str>) -> RankExit {
        let status = ExitStatus::from_raw(status);
        RankExit { rank, pid: 100 + rank as u32, status, error: error.map(str::to_owned) }
    }

    #[test]
    fn a_number_that_would_fill_the_machine_is_refused() {
        assert!(check_number(MOST_RANKS).is_ok());
        let error = check_number(99_999_999_999).expect_err("too many");
        assert!(error.message().starts_with("99999999999 ranks are too many"), "{error}");
    }

    #[test]
    fn equal_messages_of_ranks_are_merged() {
        let ends = [
            end(3, 1 << 8, Some("rank 2 died")),
            end(2, 9, None),
            end(0, 1 << 8, Some("rank 2 died")),
            end(1, 101 << 8, None),
            end(4, 1 << 8, Some("another error")),
            end(5, 1 << 8, Some("rank 2 died")),
        ];
        assert_eq!(
            summary(&ends),
            [
                "rank 2 (pid 102) was killed by signal 9 (kill)",
                "rank 1 (pid 101) exited with code 101",
                "ranks 0, 3 and 5: rank 2 died",
                "rank 4: another error",
            ]
        );
    }
}
