//! The processes of this user that are ranks of jobs, as `/proc` shows them.
//!
//! Owns how they are recognised.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The thread of a rank that has joined a job of several processes.
const THREAD: &str = "flexring-ctrl";
/// Most characters of a command that are shown.
const LONGEST: usize = 60;

/// A process that is a rank.
#[derive(Debug)]
pub struct RankProcess {
    pub pid: u32,
    /// Its command, abridged.
    pub command: String,
    /// Its environment when it started.
    pub variables: BTreeMap<String, String>,
}

impl RankProcess {
    /// The error says why this command cannot ask the coordinator of the process's job.
    pub fn reachable(&self) -> Result<(), String> {
        let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        if network(&self.pid.to_string()) == network("self") {
            return Ok(());
        }
        Err(format!(
            "it is in another network namespace; run flexring status there (nsenter --net --target {})",
            self.pid
        ))
    }
}

/// The user of a process. `None` if there is no such process.
pub fn owner(pid: u32) -> Option<u32> {
    folder(pid).metadata().ok().map(|facts| facts.uid())
}

/// The user of this process.
pub fn this_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The command of a process, abridged.
pub fn command(pid: u32) -> String {
    let text = fs::read(folder(pid).join("cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).trim_end_matches('\0').replace(['\0', '\n'], " ");
    let printable: String = text.chars().filter(|letter| !letter.is_control()).collect();
    match printable.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &printable[..end]),
        None => printable,
    }
}

/// All processes of this user that are ranks, ordered by number.
pub fn ranks() -> Vec<RankProcess> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let ranks = pids.into_iter().filter(|pid| is_rank(*pid));
    ranks.map(|pid| RankProcess { pid, command: command(pid), variables: variables(pid) }).collect()
}

fn folder(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

fn is_rank(pid: u32) -> bool {
    if owner(pid) != Some(this_user()) {
        return false;
    }
    let tasks = fs::read_dir(folder(pid).join("task")).into_iter().flatten().flatten();
    tasks
        .into_iter()
        .any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim_end() == THREAD))
}

fn variables(pid: u32) -> BTreeMap<String, String> {
    let text = fs::read(folder(pid).join("environ")).unwrap_or_default();
    let variables = text.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    variables
        .filter_map(|one| one.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect()
}
