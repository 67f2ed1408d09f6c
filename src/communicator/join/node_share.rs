//! The memory that a new rank shares with the ranks of its node.
//!
//! Owns which ranks share, and how each gets the memory of the others.

use super::cpu_set::CpuSet;
use super::introduction::{Introduction, has_room};
use super::node_memories;
use super::peer_info::PeerInfo;
use super::region_layout::region_layout;
use crate::communicator::gpu_state;
use crate::config::{Config, TransportChoice};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::rank::Rank;
use crate::transport::shm::{NodeMemory, OwnMemory, Region};
use std::sync::Arc;

/// The memory of a rank and of those that share with it.
pub(super) struct NodeShare {
    /// The ranks that share memory, this one included.
    pub ranks: Vec<Rank>,
    /// Where each of them is in `memory`.
    pub places: Vec<usize>,
    pub memory: Arc<NodeMemory>,
    /// The part of this rank's memory that is for the new communicator.
    pub region: Region,
    /// Number of ranks of the node for each of its cores, rounded up.
    pub ranks_per_core: usize,
}

impl NodeShare {
    /// Shares memory with the ranks of the node of `me`, if all of them can.
    ///
    /// # Errors
    /// `InvalidSetting` if all ranks have to share memory, but are on several nodes; `System` if there is too
    /// little memory.
    pub(super) fn new(
        config: &Config,
        introduction: &mut Introduction,
        me: Rank,
        fault: &Fault,
    ) -> Result<Self> {
        let infos = &introduction.infos;
        let world = infos.len();
        let node = introduction.node_of(me);
        let ranks_per_core = CpuSet::ranks_per_core(node.iter().map(|rank| &infos[*rank].cores));
        let layout = |ranks: &[Rank]| {
            let may_use_gpus = ranks.iter().any(|rank| infos[*rank].has_gpu || infos[*rank].may_have_gpus);
            region_layout(config, ranks.len(), world, ranks_per_core, may_use_gpus)
        };
        let bytes = OwnMemory::bytes_with(layout(&node));
        let shares =
            introduction.descriptors.is_some() && has_room(config.transport, infos, (me, &node), bytes)?;
        let ranks = if shares { node } else { vec![me] };
        if config.transport == TransportChoice::Shm {
            check_all_share(infos, me, &ranks)?;
        }
        let offers: Vec<_> = infos.iter().map(|info| &info.memories).collect();
        let common = introduction.memories.common(&ranks, &offers);
        let own = match &common {
            Some((memory, _)) => Arc::clone(memory.own()),
            None => OwnMemory::new(ranks.len())?,
        };
        let region = own.region(layout(&ranks), gpu_state::numa_node(config.gpu))?;
        reach(FaultPoint::JoinHasArena);
        let (memory, places) = match common {
            Some(common) => common,
            None => {
                let memory = Arc::new(exchange(introduction, me, &ranks, own, fault)?);
                node_memories::keep(&memory);
                (memory, (0..ranks.len()).collect())
            }
        };
        Ok(Self { ranks, places, memory, region, ranks_per_core })
    }
}

/// The memory of `ranks`, which give each other descriptors of theirs.
fn exchange(
    introduction: &mut Introduction,
    me: Rank,
    ranks: &[Rank],
    own: Arc<OwnMemory>,
    fault: &Fault,
) -> Result<NodeMemory> {
    let infos = &introduction.infos;
    let key = infos[ranks[0]].nonce;
    match introduction.descriptors.take().filter(|_| ranks.len() > 1) {
        Some(descriptors) => {
            let address = |rank: &Rank| {
                let address = infos[*rank].descriptors.clone();
                address.map(|address| (*rank, address)).ok_or_else(|| not_shared(*rank))
            };
            let addresses = ranks.iter().map(address).collect::<Result<Vec<_>>>()?;
            descriptors.run(me, &addresses, &own, key, introduction.deadline, fault)
        }
        None => NodeMemory::new(key, 0, own, vec![None]),
    }
}

fn check_all_share(infos: &[PeerInfo], me: Rank, ranks: &[Rank]) -> Result<()> {
    match (0..infos.len()).find(|rank| !ranks.contains(rank)) {
        None => Ok(()),
        Some(other) => Err(Error::invalid_setting(format!(
            "FLEXRING_TRANSPORT=shm, but rank {me} on {} and rank {other} on {} do not share a node",
            infos[me].host, infos[other].host
        ))),
    }
}

fn not_shared(rank: Rank) -> Error {
    Error::disagreement(format!(
        "rank {rank} does not share its memory: does it have FLEXRING_TRANSPORT=tcp, or refuses its container memfd_create?"
    ))
}
