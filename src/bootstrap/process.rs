//! How processes and ranks are named in sentences.

use crate::bootstrap::node;
use crate::transport::Rank;
use std::fmt;
use std::sync::OnceLock;

/// A process, as people find it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Process {
    /// Its process id on that host.
    pub(super) pid: u32,
    /// The host's name.
    pub(super) host: String,
    /// A number of its own, as containers may share both of the above.
    pub(super) instance: u64,
}

impl Process {
    /// This process.
    pub(super) fn this() -> Self {
        static INSTANCE: OnceLock<u64> = OnceLock::new();
        let instance = *INSTANCE.get_or_init(|| {
            // Without random numbers, hosts and process ids must do.
            getrandom::u64().unwrap_or(0)
        });
        Self { instance, pid: std::process::id(), host: node::host_name() }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on host {}", self.pid, self.host)
    }
}

/// Names ranks: `rank 3`, `ranks 2 and 5`, `ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more`.
pub(super) fn ranks(ranks: &[Rank]) -> String {
    const NAMED: usize = 8;
    let numbers = |ranks: &[Rank]| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [.., last] if ranks.len() <= NAMED => {
            format!("ranks {} and {last}", numbers(&ranks[..ranks.len() - 1]))
        }
        _ => format!("ranks {} and {} more", numbers(&ranks[..NAMED]), ranks.len() - NAMED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_people_would() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[2, 5]), "ranks 2 and 5");
        assert_eq!(ranks(&[2, 5, 7]), "ranks 2, 5 and 7");
        assert_eq!(ranks(&(1..=100).collect::<Vec<_>>()), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more");
    }
}
