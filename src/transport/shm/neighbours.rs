//! The ranks of one node, as one of them sees them.
//!
//! Owns what a rank has of each neighbour: its arena, and how it is woken. Must not know how descriptors reach this process.

use super::layout::ArenaLayout;
use crate::error::Result;
use crate::memory::PeerArena;
use crate::transport::Rank;
use crate::wake::WakeFd;
use std::os::fd::OwnedFd;
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
    /// Wakes its executor. The only descriptor that neighbours write to: a forged notification costs its owner one look at
    /// its queues.
    pub wake: Arc<WakeFd>,
    /// Wakes the thread that prefaults neighbours' buffers for it, if there is one.
    pub prefault: Option<Arc<WakeFd>>,
}

/// All ranks of a node, as one of them sees them.
pub struct Neighbours {
    /// This rank's index among them.
    pub local_rank: usize,
    /// Wakes this rank's executor.
    pub wake: Arc<WakeFd>,
    /// Wakes the thread that prefaults neighbours' buffers for this rank, if there is one.
    pub prefault: Option<Arc<WakeFd>>,
    /// All ranks of the node but this one, by index.
    pub others: Vec<Neighbour>,
}

impl Neighbour {
    /// The rank `rank` of the world, number `local_rank` on the node, with its descriptors. Its arena is laid out by `layout`.
    ///
    /// # Errors
    /// As for [`PeerArena::new`].
    pub fn new(
        rank: Rank,
        local_rank: usize,
        arena: OwnedFd,
        wake: WakeFd,
        prefault: Option<WakeFd>,
        layout: ArenaLayout,
    ) -> Result<Self> {
        let arena = PeerArena::new(arena, layout.neighbours(), layout.bytes())
            .map_err(|error| error.context(format_args!("rank {rank}")))?;
        if layout.is_prefaulted() {
            arena.prefault(0, layout.populated());
        }
        let (wake, prefault) = (Arc::new(wake), prefault.map(Arc::new));
        Ok(Self { rank, local_rank, arena: Arc::new(arena), wake, prefault })
    }
}
