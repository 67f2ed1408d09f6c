//! Where GPUs and RDMA devices are in the machine, and which ports the ranks of a job would use.
//!
//! Owns the tree and the expectation: one rank for each GPU or, without GPUs, one rank, and one for each NUMA
//! node. The library divides the ports.

use flexring::internal::transport::verbs::inventory::{Affinity, Inventory, PciDistance, PciLocation};
use flexring::internal::transport::verbs::port_selection::{self, Offer, Rail, divide, reaches_gpu};
use flexring_core::config::{Config, GdrLevel};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The places of the devices, and the ports that ranks would use.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TopologyReport {
    /// NUMA nodes, with root complexes, PCI switches and devices below them.
    pub tree: Vec<TreeNode>,
    /// For the ranks of a job.
    pub ranks: Vec<RankPorts>,
    /// `FLEXRING_GDR_LEVEL`
    pub gdr_level: &'static str,
}

/// A place, or a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TreeNode {
    pub label: String,
    pub below: Vec<TreeNode>,
}

/// The ports of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPorts {
    /// Which rank: that of a GPU, of a NUMA node, or the only one.
    pub rank: String,
    pub ports: Vec<PortOfRank>,
}

/// A port that a rank uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortOfRank {
    pub device: String,
    pub port: u8,
    pub distance: PciDistance,
    /// Whether the device may access the memory of the rank's GPU; `None` without a GPU.
    pub reaches_gpu: Option<bool>,
}

impl TopologyReport {
    /// The report on the machine below `root`, with GPUs at these PCI addresses. `affinity` is that of this
    /// process.
    pub fn read(
        root: &Path,
        config: &Config,
        inventory: &Inventory,
        affinity: &Affinity,
        gpus: &[String],
    ) -> Self {
        let located = |address: &String| Affinity::read(root, Some(address)).gpu.unwrap_or_default();
        let gpus: Vec<(&String, PciLocation)> =
            gpus.iter().map(|address| (address, located(address))).collect();
        Self {
            tree: tree(inventory, &gpus),
            ranks: ranks(config, inventory, affinity, &gpus),
            gdr_level: config.gdr_level.name(),
        }
    }
}

/// What ranks would use. Empty without ports.
fn ranks(
    config: &Config,
    inventory: &Inventory,
    affinity: &Affinity,
    gpus: &[(&String, PciLocation)],
) -> Vec<RankPorts> {
    let with = |local: Option<u32>, gpu: Option<&PciLocation>| {
        let mut affinity = Affinity { gpu: gpu.cloned(), ..affinity.clone() };
        affinity
            .nodes
            .iter_mut()
            .for_each(|node| node.local = local.is_none_or(|local| node.number == local));
        port_selection::offer(inventory, config, &affinity).unwrap_or_default()
    };
    let mut groups: Vec<Vec<(String, Offer)>> = Vec::new();
    if gpus.is_empty() {
        groups.push(vec![("the only rank".to_owned(), with(None, None))]);
        let nodes = affinity
            .nodes
            .iter()
            .map(|node| (format!("rank on NUMA node {}", node.number), with(Some(node.number), None)));
        groups.extend((affinity.nodes.len() > 1).then(|| nodes.collect()));
    } else {
        let of_gpus =
            gpus.iter().map(|(address, gpu)| (format!("rank of GPU {address}"), with(None, Some(gpu))));
        groups.push(of_gpus.collect());
    }
    let ports = |rails: &[Rail], share: Vec<usize>, level: Option<GdrLevel>| {
        let port = |port: usize| {
            let Rail { device, port, distance, .. } = &rails[port];
            let reaches_gpu = level.map(|level| reaches_gpu(*distance, level));
            PortOfRank { device: device.clone(), port: *port, distance: *distance, reaches_gpu }
        };
        share.into_iter().map(port).collect()
    };
    let of_group = |group: Vec<(String, Offer)>| {
        let offers: Vec<&Offer> = group.iter().map(|(_, offer)| offer).collect();
        let shares = divide(&offers);
        let rank = |((rank, offer), share): (&(String, Offer), Vec<usize>)| {
            let level = offer.is_near_gpu.then_some(config.gdr_level);
            RankPorts { rank: rank.clone(), ports: ports(&offer.rails, share, level) }
        };
        group.iter().zip(shares).map(rank).collect::<Vec<_>>()
    };
    let all: Vec<RankPorts> = groups.into_iter().flat_map(of_group).collect();
    if all.iter().all(|rank| rank.ports.is_empty()) { Vec::new() } else { all }
}

/// The tree of all GPUs and RDMA devices that have a place.
fn tree(inventory: &Inventory, gpus: &[(&String, PciLocation)]) -> Vec<TreeNode> {
    let adapters = inventory.devices.iter().map(|device| {
        let mut rates: Vec<u64> = device.ports.iter().map(|port| port.rate_mbps).collect();
        rates.sort_unstable();
        let rate = rates.last().map(|rate| format!(", {} Gbit/s", *rate as f64 / 1000.0)).unwrap_or_default();
        (device.name.clone(), rate, &device.pci)
    });
    let gpus = gpus.iter().map(|(_, pci)| ("GPU".to_owned(), String::new(), pci));
    let mut numa: BTreeMap<Option<u32>, Branch> = BTreeMap::new();
    for (name, rate, pci) in adapters.chain(gpus) {
        if let Some((address, places)) = pci.path.split_last() {
            let label = format!("{address}  {name}{rate}");
            numa.entry(pci.numa).or_default().insert(places, label);
        }
    }
    let node = |(number, branch): (Option<u32>, Branch)| {
        let label = number.map_or_else(|| "no NUMA node".to_owned(), |number| format!("NUMA node {number}"));
        TreeNode { label, below: branch.nodes() }
    };
    numa.into_iter().map(node).collect()
}

/// What is below a place.
#[derive(Default)]
struct Branch {
    places: BTreeMap<String, Branch>,
    devices: Vec<String>,
}

impl Branch {
    fn insert(&mut self, places: &[String], device: String) {
        match places.split_first() {
            None => self.devices.push(device),
            Some((place, rest)) => self.places.entry(place.clone()).or_default().insert(rest, device),
        }
    }

    /// The places and devices. A bridge with one thing below it is left out.
    fn nodes(self) -> Vec<TreeNode> {
        let places = self.places.into_iter().flat_map(|(name, branch)| {
            let below = branch.nodes();
            let is_root = name.starts_with("pci");
            if below.len() == 1 && !is_root {
                return below;
            }
            let label =
                if is_root { format!("root complex {}", &name[3..]) } else { format!("bridge {name}") };
            vec![TreeNode { label, below }]
        });
        let mut nodes: Vec<TreeNode> = places.collect();
        nodes.extend(self.devices.into_iter().map(|label| TreeNode { label, below: Vec::new() }));
        nodes
    }
}
