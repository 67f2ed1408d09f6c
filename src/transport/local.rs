//! Ranks that are threads of one process: shared memory without sockets.
//!
//! Owns how such ranks get hold of each other's arena and bell, which is by handing them over. What is sent
//! between them afterwards is what [`Shm`](super::shm::Shm) sends.

use super::Rank;
use super::shm::{Neighbour, Neighbours, new_bell, share_bell};
use crate::error::Result;
use crate::memory::{Arena, PeerArena};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Introduces the ranks, whose arenas these are in order, to each other.
///
/// # Errors
/// `System` if a descriptor or a mapping cannot be had.
pub fn introduce(arenas: &[Arc<Arena>], fixed: usize) -> Result<Vec<Neighbours>> {
    let bells = arenas.iter().map(|_| new_bell()).collect::<Result<Vec<OwnedFd>>>()?;
    let growths = arenas.iter().map(|_| new_bell()).collect::<Result<Vec<OwnedFd>>>()?;
    let neighbour = |rank: Rank| -> Result<Neighbour> {
        let arena = Arc::new(PeerArena::map(arenas[rank].file(), fixed)?);
        let (bell, growth) = (share_bell(&bells[rank])?, share_bell(&growths[rank])?);
        Ok(Neighbour { rank, place: rank, arena, bell, growth })
    };
    (0..arenas.len())
        .map(|place| {
            let others =
                (0..arenas.len()).filter(|rank| *rank != place).map(neighbour).collect::<Result<_>>()?;
            Ok(Neighbours {
                place,
                bell: share_bell(&bells[place])?,
                growth: share_bell(&growths[place])?,
                others,
            })
        })
        .collect()
}
