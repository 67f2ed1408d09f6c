//! The links of a new rank.
//!
//! Owns which transport reaches which rank.

use super::inter_node::InterNodeSetup;
use super::introduction::Introduction;
use super::node_share::NodeShare;
use super::world_plan::WorldPlan;
use crate::bootstrap::ControlConnection;
use crate::communicator::plans::Plans;
use crate::error::Result;
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::memory::Registrar;
use crate::rank::Rank;
use crate::transport::AnyTransport;
use crate::transport::shm::{Mailbox, MemoryNotices, NodeMemory, Region, RegionOfRank, Shm};
use crate::transport::verbs::RailCounters;
use std::sync::Arc;

/// The transports of a rank.
#[derive(Default)]
pub(in crate::communicator) struct RankLinks {
    pub transports: Vec<AnyTransport>,
    /// By rank, the index of the transport that reaches it.
    pub routes: Vec<usize>,
    /// The path for small messages, if all ranks share memory.
    pub mailbox: Option<Mailbox>,
    /// Where the ranks name memory on their GPUs, if all share memory.
    pub notices: Option<MemoryNotices>,
    /// Registers memory with the RDMA devices, if there are devices.
    pub registrar: Option<Arc<dyn Registrar>>,
    /// What each rail carries.
    pub rails: Arc<[RailCounters]>,
}

impl RankLinks {
    /// Links this rank to all others: through the memory of its node, and by TCP or RDMA.
    ///
    /// # Errors
    /// Those of the transports; `InvalidSetting` if the tuning profile was measured with another transport.
    pub(super) fn new(
        plan: &mut WorldPlan,
        plans: &Plans,
        introduction: &mut Introduction,
        share: &mut NodeShare,
        connection: &ControlConnection,
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        let (me, world) = (connection.rank(), connection.world());
        let regions = connection.gather_values("regions", &share.region.address())?;
        let mut links = Self { routes: vec![0; world], ..Self::default() };
        let others: Vec<Rank> = (0..world).filter(|rank| !share.ranks.contains(rank)).collect();
        if share.ranks.len() > 1 {
            let of_rank = |(rank, place): (&Rank, &usize)| RegionOfRank {
                rank: *rank,
                place: *place,
                region: regions[*rank],
            };
            let ranks: Vec<RegionOfRank> = share.ranks.iter().zip(&share.places).map(of_rank).collect();
            links.share_memory("shm", (me, world), &share.memory, &mut share.region, &ranks)?;
            reach(FaultPoint::JoinSharesMemory);
        }
        if others.is_empty() {
            plan.set_transport(None)?;
            return Ok(links);
        }
        others.iter().for_each(|rank| links.routes[*rank] = links.transports.len());
        let usual = plans.usual_peers();
        let planned: Vec<Rank> = others.iter().copied().filter(|rank| usual.contains(rank)).collect();
        let (config, topology, node) = (&plan.config, &plan.topology, introduction.node_of(me));
        let setup = InterNodeSetup {
            config,
            me,
            infos: &introduction.infos,
            peers: &others,
            planned: &planned,
            bytes_in_flight: &|| plans.bytes_in_flight(config.socket_buffer.0, topology, &node),
            connection,
            deadline: introduction.deadline,
            fault,
        };
        let pool = share.region.layout().pool().piece(share.region.arena());
        let linked = setup.link(introduction.listener.take(), pool)?;
        plan.set_transport(Some(linked.transport.name()))?;
        links.transports.push(AnyTransport::Posted(linked.transport));
        (links.registrar, links.rails) = (linked.registrar, linked.rails);
        Ok(links)
    }

    /// Links rank `me` to the other ranks of one process.
    ///
    /// # Errors
    /// `System` if there is too little memory.
    pub(super) fn within_process(
        me: Rank,
        memory: &NodeMemory,
        region: &mut Region,
        ranks: &[RegionOfRank],
    ) -> Result<Self> {
        let mut links = Self { routes: vec![0; ranks.len()], ..Self::default() };
        links.share_memory("local", (me, ranks.len()), memory, region, ranks)?;
        Ok(links)
    }

    /// Adds links through the memory of `ranks`, and what needs the memory of all ranks if they are the
    /// world.
    fn share_memory(
        &mut self,
        name: &'static str,
        (me, world): (Rank, usize),
        memory: &NodeMemory,
        region: &mut Region,
        ranks: &[RegionOfRank],
    ) -> Result<()> {
        let neighbours = memory.neighbours(region, ranks)?;
        let shm = Shm::new(name, world, region.arena(), &neighbours)?;
        self.transports.push(AnyTransport::InPlace(Box::new(shm)));
        if ranks.len() == world {
            self.mailbox = Some(Mailbox::new(region.arena(), &neighbours, me)?);
            self.notices = MemoryNotices::new(region.arena(), &neighbours)?;
        }
        Ok(())
    }
}
