//! How error messages identify a process.

use super::node::host_name;
use crate::peer_text::PeerText;
use crate::process_number::process_number;
use std::fmt;

/// Identifies a process, for comparison and in messages.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Process {
    /// Its process id on that host.
    pub(super) pid: u32,
    /// The host's name.
    pub(super) host: PeerText,
    /// Number of the process: containers may share both a host name and a process id.
    pub(super) instance: u64,
}

impl Process {
    /// Identifies this process. Every call returns the same value.
    pub(super) fn current() -> Self {
        // Without random numbers, host name and process id must suffice.
        let instance = process_number().unwrap_or(0);
        Self { instance, pid: std::process::id(), host: (&*host_name()).into() }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on host {}", self.pid, self.host)
    }
}

#[cfg(test)]
impl Process {
    /// The process of this rank, for tests.
    pub(super) fn example(rank: crate::rank::Rank) -> Self {
        Self { pid: 100 + rank as u32, host: "h".into(), instance: rank as u64 }
    }
}
