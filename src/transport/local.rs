//! Ranks that are threads of one process: shared memory without sockets.
//!
//! Owns how such ranks share their memory and wake-ups: by reference. Messages between them go over
//! [`Shm`](super::shm::Shm).

use super::shm::{NodeKey, NodeMemory, OwnMemory, PeerMemory};
use crate::error::Result;
use std::sync::Arc;

/// What each of `world` ranks sees of the others' memory, in order of ranks.
///
/// # Errors
/// `System` if there is too little memory, or the process has no descriptor or thread left.
pub fn share_memory(world: usize, key: NodeKey) -> Result<Vec<NodeMemory>> {
    let own = (0..world).map(|_| OwnMemory::new(world)).collect::<Result<Vec<_>>>()?;
    // One mapping of each arena serves all ranks of the process.
    let peers = own.iter().map(|own| PeerMemory::of_this_process(own, world)).collect::<Result<Vec<_>>>()?;
    let seen_by = |(place, own): (usize, Arc<OwnMemory>)| {
        let other = |(index, peer): (usize, &PeerMemory)| (index != place).then(|| peer.clone());
        NodeMemory::new(key, place, own, peers.iter().enumerate().map(other).collect())
    };
    own.into_iter().enumerate().map(seen_by).collect()
}
