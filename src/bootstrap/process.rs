//! How error messages identify a process.

use super::node::{host_name, pid_namespace};
use crate::peer_text::PeerText;
use crate::process_number::process_number;
use std::fmt;

/// Identifies a process, for comparison and in messages.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Process {
    /// Its process id, in its PID namespace.
    pub(super) pid: u32,
    /// The host's name.
    pub(super) host: PeerText,
    /// Its PID namespace. Processes can look each other up if theirs are equal.
    pub(super) pid_namespace: PeerText,
    /// Number of the process: containers may share both a host name and a process id.
    pub(super) instance: u64,
}

impl Process {
    /// Identifies this process. Every call returns the same value.
    pub(super) fn current() -> Self {
        Self {
            pid: std::process::id(),
            host: (&*host_name()).into(),
            pid_namespace: (&*pid_namespace()).into(),
            // Without random numbers, the other fields must suffice.
            instance: process_number().unwrap_or(0),
        }
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
        let pid = 100 + rank as u32;
        Self { pid, host: "h".into(), pid_namespace: "n".into(), instance: rank as u64 }
    }
}
