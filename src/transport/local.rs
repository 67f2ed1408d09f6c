//! Ranks that are threads of one process: shared memory without sockets.
//!
//! Owns how such ranks share their arenas and wake-ups: by reference. Messages between them go over
//! [`Shm`](super::shm::Shm).

use super::shm::{Neighbour, Neighbours};
use crate::error::Result;
use crate::memory::{Arena, PeerArena};
use crate::rank::Rank;
use crate::wake::WakeFd;
use std::sync::Arc;

/// For each rank, the neighbours that it sees. `arenas` lists the ranks' arenas in order of ranks; the first
/// `fixed` bytes of each are prefaulted.
///
/// # Errors
/// `System` if the process has no descriptor left or an arena cannot be mapped.
pub fn share_arenas(arenas: &[Arc<Arena>], fixed: usize) -> Result<Vec<Neighbours>> {
    let wakes = arenas.iter().map(|_| WakeFd::new()).collect::<Result<Vec<_>>>()?;
    let prefaults = arenas.iter().map(|_| WakeFd::new()).collect::<Result<Vec<_>>>()?;
    let neighbour = |rank: Rank| -> Result<Neighbour> {
        let arena = Arc::new(PeerArena::map(arenas[rank].file(), fixed)?);
        let (wake, prefault) = (wakes[rank].try_clone()?, prefaults[rank].try_clone()?);
        Ok(Neighbour { rank, local_rank: rank, arena, wake, prefault })
    };
    (0..arenas.len())
        .map(|local_rank| {
            let others =
                (0..arenas.len()).filter(|rank| *rank != local_rank).map(neighbour).collect::<Result<_>>()?;
            let (wake, prefault) = (wakes[local_rank].try_clone()?, prefaults[local_rank].try_clone()?);
            Ok(Neighbours { local_rank, wake, prefault, others })
        })
        .collect()
}
