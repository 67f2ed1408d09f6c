//! What `flexring doctor --pair` knows of the nodes, their ports and the tests, as plain data.
//!
//! Owns gathering a node's facts. Must not judge them.

use super::division;
use super::gpu::smallest_window;
use super::lossless::LosslessFacts;
use super::pci::PciFacts;
use super::process::MemoryReport;
use super::rdma::RdmaReport;
use crate::perf;
use flexring::Identity;
use flexring::internal::bootstrap::host_name;
use flexring::internal::device::relay_bytes;
use flexring::internal::transport::verbs::inventory::{Affinity, LinkLayer, sets_traffic_class};
use flexring::internal::transport::verbs::port_selection::{Offer, Rail, missing, offer};
use flexring_core::config::Config;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// A rank's node, as ranks exchange it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeFacts {
    pub rank: usize,
    pub host: String,
    /// The version of libibverbs, if its file has one.
    pub libibverbs: Option<String>,
    /// The limit of locked memory of this process, if it has one that is too low for the job.
    pub low_memlock: Option<u64>,
    /// The GPU that lets adapters access less memory than the slots of a job take, and how much.
    pub small_window: Option<(String, u64)>,
    /// Bytes of these slots.
    pub slot_bytes: u64,
    pub has_gpu: bool,
    /// By position.
    pub ports: Vec<PortFacts>,
    /// Why there are none.
    pub failure: Option<String>,
    /// Why the first port cannot be used that settings admit, with the fix, if others can.
    pub missing: Option<String>,
}

/// A port that can be used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PortFacts {
    pub name: String,
    pub is_ethernet: bool,
    pub rate_gbps: f64,
    pub firmware: Option<String>,
    pub driver: Option<String>,
    /// Whether packets have a traffic class, by a setting or the system's.
    pub has_traffic_class: bool,
    /// Of its network interface, if it is RoCE's.
    pub network: Option<LosslessFacts>,
    pub pci: PciFacts,
}

/// The test of one port of each rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RailTest {
    /// By rank, if it has one that reaches the others.
    pub ports: Vec<Option<String>>,
    /// The rate of the slowest.
    pub rate_gbps: f64,
    /// Gigabytes per second that each port sent and received; `None` if the test failed.
    pub gbytes_per_second: Option<f64>,
    pub failure: Option<String>,
    /// With vectors on GPUs likewise; `None` if a rank is without a GPU.
    pub gpu_gbytes_per_second: Option<f64>,
    /// What the ports sent again meanwhile, where drivers count it.
    pub retransmissions: u64,
    /// Other signs of loss or congestion that they counted meanwhile: the counter, with what it means.
    pub signs: BTreeMap<String, u64>,
}

impl NodeFacts {
    /// The facts about this node, the ports that it can use, and what the ranks of a job would offer.
    pub fn gather(identity: &Identity, config: &Config) -> (Self, Vec<Rail>, Vec<Offer>) {
        let root = Path::new("/");
        let affinity = Affinity::local(None);
        let rdma = RdmaReport::read(root, config, &affinity);
        let memory = MemoryReport::read(root, config, identity.world, false);
        let (mut rails, failure) = match offer(&rdma.inventory, config, &affinity) {
            Ok(offer) => (offer.rails, rdma.library_failure().map(str::to_owned)),
            Err(error) => (Vec::new(), Some(error.message().to_owned())),
        };
        let missing = missing(&rdma.inventory, config, &affinity).ok().flatten();
        rails.sort_by_key(|rail| rail.position);
        if failure.is_some() {
            rails.clear();
        }
        let port = |rail: &Rail| {
            let device = rdma.inventory.devices.iter().find(|device| device.name == rail.device);
            let folder = root.join("sys/class/infiniband").join(&rail.device).join("device");
            PortFacts {
                name: format!("{}:{}", rail.device, rail.port),
                is_ethernet: rail.layer == LinkLayer::Ethernet,
                rate_gbps: rail.rate_mbps as f64 / 1000.0,
                firmware: device.and_then(|device| device.firmware.clone()),
                driver: device.and_then(|device| device.driver.clone()),
                has_traffic_class: config.ib_tc != 0 || sets_traffic_class(root, &rail.device, rail.port),
                network: device
                    .and_then(|device| device.ports.iter().find(|port| port.number == rail.port))
                    .and_then(|port| Some(LosslessFacts::read(root, port.netdev.as_ref()?))),
                pci: PciFacts::read(&folder),
            }
        };
        let world = identity.world;
        let slot_bytes = relay_bytes(world) as u64;
        let low_memlock =
            memory.memlock_bytes.filter(|bytes| !memory.memlock_exempt && *bytes < memory.needed_bytes);
        let libibverbs = rdma.library.as_ref().and_then(|library| library.version.clone());
        let ports = rails.iter().map(port).collect();
        let facts = Self {
            rank: identity.rank,
            host: host_name(),
            libibverbs,
            low_memlock,
            small_window: smallest_window(root).filter(|(_, bytes)| *bytes < slot_bytes),
            slot_bytes,
            has_gpu: perf::gpu::gpu_count().is_ok_and(|gpus| gpus > 0),
            ports,
            missing: missing.filter(|_| failure.is_none()).map(|error| error.message().to_owned()),
            failure,
        };
        (facts, rails, division::offers(root, &rdma.inventory, config))
    }
}
