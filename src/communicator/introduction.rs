//! The first exchange among the ranks of a new communicator.
//!
//! Owns what a rank opens so that it can name it to the others, and over which control connection they go on. Must not know how
//! links are made from it.

use super::carriers::{self, CarrierOffer};
use super::cores::Cores;
use super::endpoints;
use super::gpu;
use super::inter_node;
use super::node_memories::MemoryOffer;
use super::offers::{OfferKey, Offered};
use super::peer_info::PeerInfo;
use crate::bootstrap::{self, ControlConnection, ShrinkListener};
use crate::config::{Config, TransportChoice};
use crate::error::{ErrorKind, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::memory::why_not_shared;
use crate::process_number::process_number;
use crate::secret::random_bytes;
use crate::transport::shm::DescriptorExchange;
use crate::transport::tcp::Listener;
use std::sync::Arc;
use std::time::Instant;

/// Where the control connection of a new communicator comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConnectionOrigin {
    /// A rendezvous at an address. It is kept, because `flexring status` asks its coordinator.
    Address,
    /// A rendezvous by a unique id. It is given up for an earlier one of the same ranks, if there is one.
    UniqueId,
    /// It was opened over that of an earlier rendezvous.
    Opened(OfferKey),
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
    carriers: CarrierOffer,
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
        let shares = config.transport.shares_memory() && world > 1 && can_share(config.transport)?;
        let descriptors = shares.then(DescriptorExchange::new).transpose()?;
        let listens = config.transport.admits_tcp() && world > 1;
        let route = connection.route();
        let bind = || Listener::bind(&endpoints::listen_addresses(config, route)?, config.port_range);
        let listener = listens.then(bind).transpose()?;
        let bind = || ShrinkListener::bind(&endpoints::shrink_addresses(config, route)?, config.port_range);
        let shrink_listener = (world > 1).then(bind).transpose()?;
        reach(FaultPoint::JoinOpenedSockets);
        let memories = MemoryOffer::of_this_process();
        let carriers = match origin {
            ConnectionOrigin::UniqueId => CarrierOffer::of_this_process(connection),
            ConnectionOrigin::Address | ConnectionOrigin::Opened(_) => CarrierOffer::default(),
        };
        let info = PeerInfo {
            memories: memories.places(),
            carriers: carriers.ranks(),
            nonce: random_bytes()?,
            process: process_number()?,
            has_gpu: gpu::known(config.gpu).is_some(),
            may_have_gpus: gpu::may_exist(config.gpu),
            node: bootstrap::node_name(config),
            host: bootstrap::host_name(),
            topology_name: config.node.clone().unwrap_or_else(bootstrap::host_name),
            descriptors: descriptors.as_ref().map(DescriptorExchange::address),
            shrink_endpoints: shrink_listener.as_ref().map(|it| it.endpoints().to_vec()).unwrap_or_default(),
            endpoints: listener
                .as_ref()
                .map(|it| endpoints::described(&it.endpoints(), route))
                .unwrap_or_default(),
            cores: Cores::of_this_process(),
            rails: inter_node::offer(config, world),
        };
        let infos = info.exchange(connection)?;
        reach(FaultPoint::JoinKnowsPeers);
        Ok(Self { deadline, descriptors, listener, shrink_listener, memories, carriers, infos })
    }

    /// The control connection that the communicator uses, with the key of its rendezvous: `connection`, over which the ranks have
    /// met, or a world of an earlier one.
    pub(super) fn choose_connection(
        &mut self,
        connection: ControlConnection,
        origin: ConnectionOrigin,
        config: &Config,
        fault: &Arc<Fault>,
    ) -> Result<(OfferKey, Arc<ControlConnection>)> {
        // Connections that are not chosen must not live until joining ends: their other ranks wait for this one to leave.
        let carriers = std::mem::take(&mut self.carriers);
        let offers: Vec<&Offered> = self.infos.iter().map(|info| &info.carriers).collect();
        let (key, connection) = match (origin, carriers.common(&offers)) {
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
        carriers::keep(key, &connection);
        Ok((key, connection))
    }
}

/// Whether this process can share memory with other ranks of its node. If not, they use TCP if the settings allow it.
fn can_share(choice: TransportChoice) -> Result<bool> {
    match why_not_shared() {
        None => Ok(true),
        Some(error) if error.kind() != ErrorKind::Unsupported => Err(error),
        Some(error) if choice == TransportChoice::Shm => Err(error.context("FLEXRING_TRANSPORT=shm")),
        Some(error) => {
            log::warn!("the ranks of a node use TCP, which is slower: {}", error.message());
            Ok(false)
        }
    }
}
