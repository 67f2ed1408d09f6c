//! The results of a simulation.
//!
//! Owns their form. Must not know how they are printed or drawn.

use super::activity::{PathSummary, SimulatedActivity};
use super::parameters::PICOSECONDS;
use super::rank_timeline::RankTimeline;
use flexring_plan::topology::TopologyLink;

/// What one link carried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkUse {
    /// The link.
    pub vertex: TopologyLink,
    /// Bytes to the parent, or from the first end of a link of a fabric.
    pub up: u64,
    /// Bytes the other way.
    pub down: u64,
    /// The part of the time in which the busier direction carried data at full speed: 0 to 1. With several
    /// NICs, that of the busiest one.
    pub busy: f64,
}

/// A simulated all-reduce.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedRun {
    /// Picoseconds until the last rank returned.
    pub picoseconds: u64,
    /// All links, by number.
    pub links: Vec<LinkUse>,
    /// Messages between ranks.
    pub messages: u64,
    /// Events that were handled.
    pub events: u64,
    /// The chain of activities that determined the time; empty if nothing was recorded.
    pub critical_path: Vec<SimulatedActivity>,
    /// All activities in the order of their starts; empty if nothing was recorded.
    pub timeline: Vec<SimulatedActivity>,
    /// By rank, what it did; empty if that was not recorded.
    pub ranks: Vec<RankTimeline>,
}

impl SimulatedRun {
    /// The time in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.picoseconds as f64 / PICOSECONDS as f64
    }

    /// What the critical path was spent on.
    #[must_use]
    pub fn path_summary(&self) -> PathSummary {
        PathSummary::of(&self.critical_path, self.picoseconds)
    }

    /// The link that was busiest; `None` if nothing was sent.
    #[must_use]
    pub fn busiest(&self) -> Option<LinkUse> {
        let used = self.links.iter().copied().filter(|link| link.busy > 0.0);
        used.reduce(|first, next| if next.busy > first.busy + 1e-9 { next } else { first })
    }
}
