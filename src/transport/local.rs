//! Ranks that are threads of one process: shared memory without sockets.
//!
//! Owns how such ranks share their arenas and wake-ups: by reference. Messages between them go over
//! [`Shm`](super::shm::Shm).

use super::shm::{ArenaLayout, Neighbour, Neighbours};
use crate::error::Result;
use crate::memory::Arena;
use crate::wake::WakeFd;
use std::sync::Arc;

/// For each rank, the neighbours that it sees. `arenas` lists the ranks' arenas, all laid out by `layout`, in order of ranks.
///
/// # Errors
/// `System` if the process has no descriptor left or an arena cannot be mapped.
pub fn share_arenas(arenas: &[Arc<Arena>], layout: ArenaLayout) -> Result<Vec<Neighbours>> {
    // One mapping of each arena serves all ranks of the process.
    let all = arenas.iter().enumerate().map(|(rank, arena)| {
        let prefault = layout.is_prefaulted().then(WakeFd::new).transpose()?;
        Neighbour::new(rank, rank, arena.read_only_file()?, WakeFd::new()?, prefault, layout)
    });
    let all: Vec<Neighbour> = all.collect::<Result<_>>()?;
    let seen_by = |local_rank: usize| Neighbours {
        local_rank,
        wake: Arc::clone(&all[local_rank].wake),
        prefault: all[local_rank].prefault.clone(),
        others: all.iter().filter(|other| other.local_rank != local_rank).cloned().collect(),
    };
    Ok((0..arenas.len()).map(seen_by).collect())
}
