//! The first exchange among the ranks of a new communicator.
//!
//! Owns what a rank opens so that it can name it to the others, and over which control connection they go on.

use super::cpu_set::CpuSet;
use super::endpoints;
use super::inter_node;
use super::node_memories::MemoryOffer;
use super::peer_info::PeerInfo;
use crate::bootstrap::{self, ControlConnection, ShrinkListener};
use crate::communicator::gpu_state;
use crate::communicator::resource_offers::{OfferedResources, ResourceKey};
use crate::communicator::shared_connections::{self, ConnectionOffer};
use crate::config::{Config, TransportChoice};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::memory::shared_memory_room;
use crate::process_number::process_number;
use crate::rank::{Rank, RankList};
use crate::secret::random_bytes;
use crate::transport::shm::DescriptorExchange;
use crate::transport::tcp::Listener;
use std::sync::Arc;
use std::time::Instant;

/// Where the control connection of a new communicator comes from.
#[derive(Clone, Copy, Debug)]
pub(in crate::communicator) enum ConnectionOrigin {
    /// A rendezvous at an address. It is kept, because `flexring status` asks its coordinator.
    Address,
    /// A rendezvous by a unique id. It is given up for an earlier one of the same ranks, if there is one.
    UniqueId,
    /// It was opened over that of an earlier rendezvous.
    Opened(ResourceKey),
}

/// The sockets and offers of this rank, and the peer info of all ranks.
pub(super) struct Introduction {
    /// When joining has taken too long.
    pub deadline: Instant,
    /// Where neighbours meet to share memory, if they may.
    pub descriptors: Option<DescriptorExchange>,
    /// Where TCP links arrive, if they may.
    pub listener: Option<Listener>,
    /// Where other ranks will meet this one to shrink the communicator.
    pub shrink_listener: Option<ShrinkListener>,
    pub memories: MemoryOffer,
    connections: ConnectionOffer,
    /// By rank.
    pub infos: Vec<PeerInfo>,
}

impl Introduction {
    /// Opens what the other ranks may need, and exchanges the information of all ranks.
    pub(super) fn exchange(
        config: &Config,
        connection: &ControlConnection,
        origin: ConnectionOrigin,
    ) -> Result<Self> {
        let deadline = Instant::now() + config.connect_timeout;
        let world = connection.world();
        let may_share = config.transport.shares_memory() && world > 1;
        let room = may_share.then(|| room(config.transport)).transpose()?.flatten();
        let descriptors = room.map(|_| DescriptorExchange::new()).transpose()?;
        let listens = config.transport.admits_tcp() && world > 1;
        let route = connection.route();
        let bind = || Listener::bind(&endpoints::listen_addresses(config, route)?, config.port_range);
        let listener = listens.then(bind).transpose()?;
        let bind = || ShrinkListener::bind(&endpoints::shrink_addresses(config, route)?, config.port_range);
        let shrink_listener = (world > 1).then(bind).transpose()?;
        reach(FaultPoint::JoinOpenedSockets);
        let memories = MemoryOffer::of_this_process();
        let connections = match origin {
            ConnectionOrigin::UniqueId => ConnectionOffer::of_this_process(connection),
            ConnectionOrigin::Address | ConnectionOrigin::Opened(_) => ConnectionOffer::default(),
        };
        let info = PeerInfo {
            memories: memories.places(),
            connections: connections.ranks(),
            nonce: random_bytes()?,
            process: process_number()?,
            has_gpu: gpu_state::known(config.gpu).is_some(),
            may_have_gpus: gpu_state::may_exist(config.gpu),
            node: bootstrap::node_name(config),
            host: bootstrap::host_name(),
            topology_name: config.node.clone().unwrap_or_else(bootstrap::host_name),
            descriptors: descriptors.as_ref().map(DescriptorExchange::address),
            shared_room: room.flatten(),
            shrink_endpoints: shrink_listener
                .as_ref()
                .map(|it| endpoints::described(it.endpoints(), route))
                .unwrap_or_default(),
            endpoints: listener
                .as_ref()
                .map(|it| endpoints::described(&it.endpoints(), route))
                .unwrap_or_default(),
            cores: CpuSet::of_this_process(),
            rails: inter_node::offer(config, world),
        };
        let infos = info.exchange(connection)?;
        reach(FaultPoint::JoinKnowsPeers);
        Ok(Self { deadline, descriptors, listener, shrink_listener, memories, connections, infos })
    }

    /// The ranks of the node of rank `me`, which is one of them.
    pub(super) fn node_of(&self, me: Rank) -> Vec<Rank> {
        (0..self.infos.len()).filter(|rank| self.infos[*rank].shares_node(&self.infos[me])).collect()
    }

    /// The control connection that the communicator uses, with the key of its rendezvous: `connection`, over
    /// which the ranks have met, or a world of an earlier one.
    pub(super) fn choose_connection(
        &mut self,
        connection: ControlConnection,
        origin: ConnectionOrigin,
        config: &Config,
        fault: &Arc<Fault>,
    ) -> Result<(ResourceKey, Arc<ControlConnection>)> {
        // Connections that are not chosen must not live until joining ends: their other ranks wait for this
        // one to leave.
        let connections = std::mem::take(&mut self.connections);
        let offers: Vec<&OfferedResources> = self.infos.iter().map(|info| &info.connections).collect();
        let (key, connection) = match (origin, connections.common(&offers)) {
            (ConnectionOrigin::Opened(key), _) => (key, connection),
            (ConnectionOrigin::UniqueId, Some((key, common, members))) => {
                // A random number that only these ranks have.
                let id = self.infos.iter().fold(0, |id, info| id ^ u128::from_le_bytes(info.nonce));
                let opened = common.open_world_over_connection(id, &members, config, Arc::clone(fault));
                (key, opened.map_err(|error| connection.report(error))?.with_secret_of(&connection))
            }
            (ConnectionOrigin::UniqueId | ConnectionOrigin::Address, _) => (self.infos[0].nonce, connection),
        };
        let connection = Arc::new(connection);
        shared_connections::keep(key, &connection);
        Ok((key, connection))
    }
}

/// How many bytes this process can share with other ranks of its node, if there is a limit. `None` if it
/// cannot share memory: the ranks then use TCP if the settings allow it.
fn room(choice: TransportChoice) -> Result<Option<Option<u64>>> {
    match shared_memory_room() {
        Ok(room) => Ok(Some(room)),
        Err(error) if error.kind() != ErrorKind::Unsupported => Err(error),
        Err(error) if choice == TransportChoice::Shm => Err(error.context("FLEXRING_TRANSPORT=shm")),
        Err(error) => {
            log::warn!("the ranks of a node use TCP, which is slower: {}", error.message());
            Ok(None)
        }
    }
}

/// Whether there is room for the memory of all ranks of `node`, which take `bytes` each. All of them get the
/// same result.
///
/// # Errors
/// `System` if there is not, and the ranks must share memory.
pub(super) fn has_room(
    choice: TransportChoice,
    infos: &[PeerInfo],
    (me, node): (Rank, &[Rank]),
    bytes: u64,
) -> Result<bool> {
    // A rank alone on its node shares nothing.
    let needed = if node.len() > 1 { bytes.saturating_mul(node.len() as u64) } else { 0 };
    let least = node.iter().filter_map(|rank| infos[*rank].shared_room).min();
    let Some(room) = least.filter(|room| *room < needed) else { return Ok(true) };
    let message = format!(
        "{} need {needed} bytes of shared memory, and /dev/shm, which is used because memfd_create is refused, has room for {room} (fix: \
         allow memfd_create in the seccomp profile, or enlarge /dev/shm, in Docker with --shm-size)",
        RankList::new(node)
    );
    if choice == TransportChoice::Shm {
        return Err(Error::system(message).context("FLEXRING_TRANSPORT=shm"));
    }
    if me == node[0] {
        log::warn!("the ranks of a node use TCP, which is slower: {message}");
    }
    Ok(false)
}
