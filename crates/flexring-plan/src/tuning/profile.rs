//! The profile.
//!
//! Owns what a profile contains, and the bounds of its values.

use super::cluster::ClusterIdentity;
use flexring_core::config::{Algorithm, Lowering, Size};

/// Longest file in bytes. A profile of 4,096 nodes takes less than half of it.
pub const LONGEST_FILE: usize = 2 << 20;

/// Highest rate in bytes per second.
pub const MAX_RATE: u64 = 1_000_000_000_000_000;

/// Highest latency in nanoseconds: 1000 s.
pub const MAX_LATENCY: u64 = 1_000_000_000_000;

/// Longest vector in bytes for which a choice can be: 2^50.
pub const LONGEST_CHOICE: u64 = 1 << 50;

/// Most choices.
pub const MOST_CHOICES: usize = 64;

/// What was measured on a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TuningProfile {
    /// When it was measured, as in RFC 3339.
    pub date: String,
    /// Where it was measured.
    pub cluster: ClusterIdentity,
    /// By node, in the order of [`ClusterIdentity::nodes`].
    pub nodes: Vec<MeasuredNode>,
    /// The links of the switches below the root, in tree order. Empty if they were not measured.
    pub switches: Vec<MeasuredUplink>,
    /// The classes of links: first that of shared memory within nodes, if a node has several ranks, then
    /// those between nodes.
    pub classes: Vec<LinkClass>,
    /// Slots of a rank's pool with which the longest vector was fastest.
    pub slots: usize,
    /// TCP connections of a link with which the longest vector was fastest.
    pub sockets_per_link: usize,
    /// The fastest plans, in ascending order of the length of vectors. The last one has no limit. May be
    /// empty.
    pub choices: Vec<MeasuredChoice>,
}

/// What was measured on one node. Rates are in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredNode {
    /// The node's link to its switch; `None` if there is no other node.
    pub uplink: Option<MeasuredUplink>,
    /// Bytes that a copy reads and writes, of one rank while all ranks copy.
    pub copy: u64,
    /// Bytes that an addition of two vectors reads and writes, of one rank while all ranks add.
    pub reduce: u64,
}

/// The link of a node or of a switch to the switch above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredUplink {
    /// Bytes per second that the ranks below it send at once to the nodes that are not.
    pub up: u64,
    /// Bytes per second that the ranks below it receive at once from the nodes that are not.
    pub down: u64,
    /// Nanoseconds in one direction.
    pub latency: u64,
    /// Bytes that pass at once after a pause, as a shaper with a token bucket lets them; `None` if it was not
    /// measured.
    pub burst: Option<u64>,
}

/// Links of one kind: within nodes, or between nodes whose paths meet at one switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkClass {
    /// [`WITHIN_NODES`], or the name of the switch.
    pub name: String,
    /// Number of pairs of ranks that were measured.
    pub pairs: usize,
    /// Nanoseconds in one direction, the median.
    pub latency: u64,
    /// Bytes per second in one direction, the slowest pair.
    pub slowest: u64,
    /// Bytes per second in one direction, the fastest pair.
    pub fastest: u64,
}

/// The name of the class of links within nodes.
pub const WITHIN_NODES: &str = "within nodes";

/// The plan for vectors up to a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredChoice {
    /// Longest vector in bytes that uses it; `None` for no limit.
    pub up_to: Option<u64>,
    /// The planner; `auto` for the plans that vectors of these lengths have without a profile.
    pub algorithm: Algorithm,
    /// How groups become transfers.
    pub lowering: Lowering,
    /// Bytes of a sub-chunk.
    pub subchunk: Size,
}
