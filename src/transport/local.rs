//! Ranks that are threads of one process: shared memory without sockets.
//!
//! Owns how such ranks get hold of each other's arena and bell, which is by handing them over. What is sent
//! between them afterwards is what [`Shm`](super::shm::Shm) sends.

use super::Rank;
use super::shm::{Neighbour, Neighbours, new_bell};
use crate::error::{Error, Result};
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
    let again =
        |bell: &OwnedFd| bell.try_clone().map_err(|cause| Error::system("cannot share a bell", cause));
    let neighbour = |rank: Rank| -> Result<Neighbour> {
        let arena = Arc::new(PeerArena::map(arenas[rank].file(), fixed)?);
        let (bell, growth) = (again(&bells[rank])?, again(&growths[rank])?);
        Ok(Neighbour { rank, place: rank, arena, bell, growth })
    };
    (0..arenas.len())
        .map(|place| {
            let others =
                (0..arenas.len()).filter(|rank| *rank != place).map(neighbour).collect::<Result<_>>()?;
            Ok(Neighbours { place, bell: again(&bells[place])?, growth: again(&growths[place])?, others })
        })
        .collect()
}
