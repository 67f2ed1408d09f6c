//! How error messages identify a process.

use super::node::host_name;
use std::fmt;
use std::sync::OnceLock;

/// Identifies a process, for comparison and in messages.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Process {
    /// Its process id on that host.
    pub(super) pid: u32,
    /// The host's name.
    pub(super) host: String,
    /// Random number of the process: containers may share both a host name and a process id.
    pub(super) instance: u64,
}

impl Process {
    /// Identifies this process. Every call returns the same value.
    pub(super) fn current() -> Self {
        static INSTANCE: OnceLock<u64> = OnceLock::new();
        // Without random numbers, host name and process id must suffice.
        let instance = *INSTANCE.get_or_init(|| getrandom::u64().unwrap_or(0));
        Self { instance, pid: std::process::id(), host: host_name() }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on host {}", self.pid, self.host)
    }
}
