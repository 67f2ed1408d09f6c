//! The ranks of one node in a communicator, as one of them sees them.
//!
//! Owns what a rank has of each neighbour: its region, and how it is woken.

use super::layout::ArenaLayout;
use super::wake_lanes::WakeLanes;
use crate::memory::PeerArena;
use crate::transport::Rank;
use crate::wake::WakeFd;
use std::sync::Arc;

/// Another rank of the node.
#[derive(Clone)]
pub struct Neighbour {
    /// Its rank in the world.
    pub rank: Rank,
    /// Its index among the ranks of the node.
    pub local_rank: usize,
    /// Its arena, mapped for reading.
    pub arena: Arc<PeerArena>,
    /// The layout of its region there.
    pub layout: ArenaLayout,
    /// Wake its executor. The only descriptors that neighbours write to: a forged notification costs its
    /// owner one look at its queues.
    pub wakes: Arc<[WakeFd]>,
}

/// All ranks of a node, as one of them sees them.
pub struct Neighbours {
    /// This rank's index among them.
    pub local_rank: usize,
    /// The layout of its region.
    pub layout: ArenaLayout,
    /// What this rank's executor sleeps on.
    pub lanes: Arc<WakeLanes>,
    /// All ranks of the node but this one, by index.
    pub others: Vec<Neighbour>,
}
