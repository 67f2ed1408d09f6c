//! The parent of `--ranks N`: starts the ranks, passes on what they say, and sees all of them to their end.
//!
//! Owns the processes: when this is over, none is left. If the parent itself is killed, the system ends them (see
//! `die_with_parent` in `rank`). Must not know what the ranks do.

use super::options::PerfOptions;
use super::report::ReportFile;
use crate::error::{CommandError, ERROR_PREFIX};
use flexring::bootstrap::Coordinator;
use flexring::config::Config;
use flexring::rank::RankList;
use flexring::{Error, Result};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long ranks have to end by themselves after the first one failed: they learn of it and say so.
const GRACE: Duration = Duration::from_secs(5);
/// How often a rank that has closed its standard error is asked whether it has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Launchers' variables, which would confuse ranks that those launchers did not start: the beginnings of names...
const FOREIGN_KINDS: [&str; 8] =
    ["OMPI_", "PMI_", "PMIX_", "SLURM_", "HYDRA_", "MPI_", "TORCHELASTIC_", "LOCAL_"];
/// ... and whole names.
const FOREIGN: [&str; 6] =
    ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEXRING_MASTER_ADDR", "FLEXRING_MASTER_PORT"];

/// How a rank ended.
struct RankExit {
    rank: usize,
    pid: u32,
    status: ExitStatus,
    /// What it said was wrong.
    error: Option<String>,
}

/// Starts `ranks` ranks and waits for all of them.
pub fn run(options: &PerfOptions, config: &Config, ranks: usize) -> std::result::Result<(), CommandError> {
    // The coordinator serves the ranks for as long as this function runs.
    let (_coordinator, id) = Coordinator::create(config)?;
    let (tell, told) = channel();
    let mut family = RankProcesses::default();
    for rank in 0..ranks {
        let mut command = command(options, rank, ranks)?;
        command.env("FLEXRING_UNIQUE_ID", id.to_hex());
        family.start(rank, command, tell.clone())?;
    }
    drop(tell);
    let failures = family.wait_all(&told);
    if failures.is_empty() {
        return Ok(());
    }
    let lines = summary(&failures);
    lines.iter().for_each(|line| say(line));
    if let Some(path) = &options.json {
        ReportFile::new(path).amend(&lines.join("; "))?;
    }
    Err(CommandError::Reported)
}

/// This very command, as one rank of the world.
fn command(options: &PerfOptions, rank: usize, world: usize) -> Result<Command> {
    let program = std::env::current_exe()
        .map_err(|cause| Error::system("cannot find this program's own file", cause))?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--rank-of", &std::process::id().to_string()]);
    if std::io::stderr().is_terminal() {
        command.arg("--borrow-terminal");
    }
    for (name, _) in std::env::vars_os() {
        let known = name.to_string_lossy();
        if FOREIGN.contains(&known.as_ref()) || FOREIGN_KINDS.iter().any(|kind| known.starts_with(kind)) {
            command.env_remove(&name);
        }
    }
    command
        .envs(options.settings())
        .env("FLEXRING_RANK", rank.to_string())
        .env("FLEXRING_WORLD_SIZE", world.to_string())
        .stdin(Stdio::null())
        .stdout(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
        .stderr(Stdio::piped());
    Ok(command)
}

/// The ranks that run. Dropping it ends them all.
///
/// They must be started by the main thread: the system ends a rank with the thread that started it.
#[derive(Default)]
struct RankProcesses(Vec<Arc<Mutex<Child>>>);

impl RankProcesses {
    fn start(&mut self, rank: usize, mut command: Command, tell: Sender<RankExit>) -> Result<()> {
        let mut child =
            command.spawn().map_err(|cause| Error::system(format!("cannot start rank {rank}"), cause))?;
        let (pid, stderr) = (child.id(), child.stderr.take());
        let child = Arc::new(Mutex::new(child));
        self.0.push(Arc::clone(&child));
        let listen = move || {
            let error = stderr.and_then(|stderr| forward_stderr(rank, stderr));
            // Nobody else waits for it, and nobody is interested any more if the channel is closed.
            if let Some(status) = wait_for_exit(&child) {
                let _ = tell.send(RankExit { rank, pid, status, error });
            }
        };
        std::thread::Builder::new().name(format!("listen-{rank}")).spawn(listen).map_err(|cause| {
            Error::system(format!("cannot start a thread to listen to rank {rank}"), cause)
        })?;
        Ok(())
    }

    /// Waits until every rank has ended, but not for ever once one has failed. Returns those that failed, first
    /// come first.
    fn wait_all(&self, told: &Receiver<RankExit>) -> Vec<RankExit> {
        let mut failures = Vec::new();
        let mut deadline: Option<Instant> = None;
        loop {
            let end = match deadline {
                None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => told.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match end {
                Ok(end) if end.status.success() => {}
                Ok(end) => {
                    failures.push(end);
                    deadline = deadline.or(Some(Instant::now() + GRACE));
                }
                Err(RecvTimeoutError::Timeout) => {
                    say("ranks that have not ended by themselves are ended now");
                    self.kill();
                    deadline = None;
                }
                Err(RecvTimeoutError::Disconnected) => return failures,
            }
        }
    }

    fn kill(&self) {
        for child in &self.0 {
            // One that has ended already is left alone.
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

/// Waits for a rank, without keeping others from killing it.
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

/// Passes on what a rank says, line by line, until it says no more; returns its error, which is told in the end.
fn forward_stderr(rank: usize, stderr: ChildStderr) -> Option<String> {
    let mut error = None;
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line);
        match text.trim_end().strip_prefix(ERROR_PREFIX) {
            Some(sentence) => error = Some(sentence.to_owned()),
            None => say(&format!("[rank {rank}] {}", text.trim_end())),
        }
        line.clear();
    }
    error
}

/// Says a line on standard error, over the progress bar if rank 0 draws one there.
fn say(line: &str) {
    let mut stderr = std::io::stderr().lock();
    let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
    // There is nowhere else to complain.
    let _ = writeln!(stderr, "{clear}{line}");
}

/// One line for each way in which ranks ended: those that died first, then what the others said of it.
fn summary(failures: &[RankExit]) -> Vec<String> {
    let mut said: Vec<(&str, Vec<usize>)> = Vec::new();
    let mut lines = Vec::new();
    for RankExit { rank, pid, status, error } in failures {
        match (status.signal(), status.code(), error) {
            (Some(signal), _, _) => {
                lines.push(format!(
                    "rank {rank} (pid {pid}) was killed by signal {signal}{}",
                    signal_name(signal)
                ));
            }
            (_, _, Some(error)) => match said.iter_mut().find(|(words, _)| words == error) {
                Some((_, ranks)) => ranks.push(*rank),
                None => said.push((error, vec![*rank])),
            },
            (_, code, None) => {
                lines.push(format!("rank {rank} (pid {pid}) exited with code {}", code.unwrap_or_default()));
            }
        }
    }
    lines.extend(said.into_iter().map(|(words, mut ranks)| {
        ranks.sort_unstable();
        format!("{}: {words}", RankList::unabridged(&ranks))
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
    fn what_ranks_agree_on_is_said_once() {
        let ends = [
            end(3, 1 << 8, Some("rank 2 died")),
            end(2, 9, None),
            end(0, 1 << 8, Some("rank 2 died")),
            end(1, 101 << 8, None),
            end(4, 1 << 8, Some("another story")),
            end(5, 1 << 8, Some("rank 2 died")),
        ];
        assert_eq!(
            summary(&ends),
            [
                "rank 2 (pid 102) was killed by signal 9 (kill)",
                "rank 1 (pid 101) exited with code 101",
                "ranks 0, 3 and 5: rank 2 died",
                "rank 4: another story",
            ]
        );
    }
}
