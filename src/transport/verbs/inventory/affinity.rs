//! The affinity of a rank: the NUMA nodes it may run on and the PCI path of its GPU.
//!
//! Owns the distance between a rank and a PCI device.

use super::sysfs::{names, number, text};
use super::topology_file::TopologyFile;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// The place of a PCI device in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PciLocation {
    /// The PCI root, the bridges and switches on the path, and the device itself: `pci0000:3a`,
    /// `0000:3a:00.0`, `0000:3b:00.0`. Empty if there is no such PCI device.
    pub path: Vec<String>,
    /// The NUMA node, if the kernel reports one.
    pub numa: Option<u32>,
}

/// A NUMA node of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub number: u32,
    /// Whether this process may run on a processor of the node.
    pub local: bool,
    /// The number of processors of the node.
    pub processors: usize,
    /// The distances to all nodes, in the order of their numbers, as the firmware reports them: 10 to itself.
    pub distances: Vec<u32>,
}

/// The affinity of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Affinity {
    /// The NUMA nodes, by number; empty if the kernel reports none.
    pub nodes: Vec<NumaNode>,
    /// The location of the rank's GPU, if it has one.
    pub gpu: Option<PciLocation>,
    /// Whether a coherent link connects the GPU with its processor, as in GH200 and GB200: devices of the
    /// same NUMA node reach its memory over it as fast as below a switch.
    pub is_coherent: bool,
}

/// How far a device is from a rank's GPU or, without a GPU, from its processors; in NCCL's words, the nearest
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PciDistance {
    /// Below one PCI switch, or functions of one device.
    Pix,
    /// Below several PCI switches, and not across the root complex.
    Pxb,
    /// Across the root complex.
    Phb,
    /// Across root complexes of one NUMA node, or unknown.
    Node,
    /// Across NUMA nodes.
    Sys,
}

/// A sort key for distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Distance {
    /// By the PCI tree.
    pub pci: PciDistance,
    /// Between the NUMA nodes, as the firmware reports it: 10 is local.
    pub numa: u32,
}

impl fmt::Display for PciDistance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// The distance of a NUMA node to itself.
const LOCAL_DISTANCE: u32 = 10;

impl PciLocation {
    /// The location of the device with this directory in `/sys`, or with the directory that this links to.
    #[must_use]
    pub fn read(folder: &Path) -> Self {
        let real = std::fs::canonicalize(folder).unwrap_or_default();
        let parts = real.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
        let path: Vec<String> = parts.skip_while(|part| !part.starts_with("pci")).collect();
        if path.is_empty() {
            return Self::default();
        }
        // The kernel writes -1 if there is no NUMA node.
        let numa = number::<i64>(&folder.join("numa_node")).and_then(|node| u32::try_from(node).ok());
        Self { path, numa }
    }

    /// The PCI address of the device, such as `0000:3b:00.0`.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.path.last().map(String::as_str)
    }
}

impl Affinity {
    /// The affinity of this process, with the GPU at this PCI address.
    #[must_use]
    pub fn local(gpu: Option<&str>) -> Self {
        Self::read(Path::new("/"), gpu)
    }

    /// The affinity of this process on the machine whose `/sys` and `/proc` are below `root`, with the GPU at
    /// this PCI address.
    #[must_use]
    pub fn read(root: &Path, gpu: Option<&str>) -> Self {
        let folder = root.join("sys/devices/system/node");
        let status = text(&root.join("proc/self/status")).unwrap_or_default();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed = allowed.map(ranges);
        let node = |name: &String| {
            let number: u32 = name.strip_prefix("node")?.parse().ok()?;
            let processors = ranges(&text(&folder.join(name).join("cpulist")).unwrap_or_default());
            let distances = text(&folder.join(name).join("distance")).unwrap_or_default();
            let may_run = |processor: &usize| allowed.as_ref().is_none_or(|all| all.contains(processor));
            Some(NumaNode {
                number,
                local: processors.iter().any(may_run),
                processors: processors.len(),
                distances: distances.split_whitespace().flat_map(str::parse).collect(),
            })
        };
        let gpu = gpu.map(|address| {
            // CUDA writes addresses in upper case.
            let folder = root.join("sys/bus/pci/devices").join(address.to_ascii_lowercase());
            let given = TopologyFile::of(root).location(address);
            given.map_or_else(|| PciLocation::read(&folder), |(path, numa)| PciLocation { path, numa })
        });
        Self { nodes: names(&folder).iter().filter_map(node).collect(), gpu, is_coherent: false }
    }

    /// The location of the rank's GPU, if it has one and the kernel shows where it is.
    #[must_use]
    pub fn located_gpu(&self) -> Option<&PciLocation> {
        self.gpu.as_ref().filter(|gpu| !gpu.path.is_empty())
    }

    /// The distance to a device: from the GPU if it has a location, else from the processors that this
    /// process may run on. A device without a location counts as one of the same NUMA node.
    #[must_use]
    pub fn distance(&self, location: &PciLocation) -> Distance {
        let Some(gpu) = self.located_gpu() else {
            let local = self.nodes.iter().filter(|node| node.local).map(|node| Some(node.number));
            let numa =
                local.map(|node| self.numa_distance(node, location.numa)).min().unwrap_or(LOCAL_DISTANCE);
            return Distance { pci: across_roots(numa), numa };
        };
        let numa = self.numa_distance(gpu.numa, location.numa);
        let shared = gpu.path.iter().zip(&location.path).take_while(|(one, other)| one == other).count();
        // The device itself, and the port of the switch that it is below.
        let below = gpu.path.len().max(location.path.len()) - shared;
        let pci = match (shared, below) {
            (0, _) => across_roots(numa),
            (1, _) => PciDistance::Phb,
            (_, 0..=2) => PciDistance::Pix,
            _ => PciDistance::Pxb,
        };
        let is_near = self.is_coherent && pci <= PciDistance::Node;
        Distance { pci: if is_near { pci.min(PciDistance::Pxb) } else { pci }, numa }
    }

    fn numa_distance(&self, one: Option<u32>, other: Option<u32>) -> u32 {
        let (Some(one), Some(other)) = (one, other) else {
            return LOCAL_DISTANCE;
        };
        // The kernel lists distances in the order of node numbers. Numbers may be missing, so positions can
        // differ.
        let from = self.nodes.iter().find(|node| node.number == one);
        let at = self.nodes.iter().position(|node| node.number == other);
        let reported = from.zip(at).and_then(|(from, at)| from.distances.get(at).copied());
        reported.unwrap_or(if one == other { LOCAL_DISTANCE } else { 2 * LOCAL_DISTANCE })
    }
}

/// The distance between devices below different root complexes.
fn across_roots(numa: u32) -> PciDistance {
    if numa <= LOCAL_DISTANCE { PciDistance::Node } else { PciDistance::Sys }
}

/// Parses a list of ranges such as `0-3,8`.
fn ranges(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}
