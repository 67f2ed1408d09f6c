//! The information that every rank sends to all others before links are made.
//!
//! Owns its contents and exchange.

use super::cpu_set::CpuSet;
use super::endpoints::LinkEndpoint;
use crate::bootstrap::ControlConnection;
use crate::communicator::resource_offers::OfferedResources;
use crate::error::{Error, Result};
use crate::peer_text;
use crate::transport::shm::ExchangeAddress;
use crate::transport::verbs::port_selection::Offer;

/// What a rank publishes about itself.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct PeerInfo {
    /// Ranks with equal names share memory.
    #[serde(deserialize_with = "peer_text::one_line")]
    pub node: String,
    #[serde(deserialize_with = "peer_text::one_line")]
    pub host: String,
    /// The node's name as users write it in a topology file.
    #[serde(deserialize_with = "peer_text::one_line")]
    pub topology_name: String,
    /// Where this rank exchanges descriptors with its neighbours; `None` if it does not share memory.
    pub descriptors: Option<ExchangeAddress>,
    /// Bytes that the processes of its node can share, if there is such a limit.
    pub shared_room: Option<u64>,
    /// The memory that it has exchanged with processes of its node before.
    pub memories: OfferedResources,
    /// The control connections that it can open a world over. Only of ranks that have met by a unique id.
    pub connections: OfferedResources,
    /// Where this rank listens for TCP links.
    pub endpoints: Vec<LinkEndpoint>,
    /// Where this rank answers ranks that shrink the communicator.
    pub shrink_endpoints: Vec<LinkEndpoint>,
    /// Random. The keys of links are derived from the job's secret and those of both ranks.
    pub nonce: [u8; 16],
    /// Ranks with equal numbers are threads of one process.
    pub process: u64,
    /// Whether this rank already has a GPU, whose memory it may share.
    pub has_gpu: bool,
    /// Whether it may use a GPU later.
    pub may_have_gpus: bool,
    pub cores: CpuSet,
    pub rails: RailOffer,
}

/// The RDMA ports that a rank can use for links.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct RailOffer {
    /// The ports that the ranks of this rank's node divide.
    pub ports: Offer,
    /// Why RDMA cannot be used, if it is wanted.
    pub why_not: Option<Error>,
    /// Whether the rank's node has RDMA devices of which none can be used.
    pub is_idle: bool,
    /// A port of the node that cannot be used, with cause and fix, where others can.
    pub missing: Option<Error>,
}

impl PeerInfo {
    /// Sends this rank's information to all ranks, and returns that of all ranks, by rank.
    pub(super) fn exchange(&self, connection: &ControlConnection) -> Result<Vec<Self>> {
        connection.gather_values("peer info", self)
    }

    /// Whether the rank is on the same node as `other`.
    pub(super) fn shares_node(&self, other: &Self) -> bool {
        self.node == other.node
    }

    /// What a rank has sent; `None` if it is malformed.
    #[cfg(test)]
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}
