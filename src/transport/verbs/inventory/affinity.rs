//! From where a rank looks at the devices: the processors it may run on, and its GPU.
//!
//! Owns what is near and what is far on one machine. Must not know what is looked at.

use super::sysfs::{names, number, text};
use serde::Serialize;
use std::path::Path;

/// Where a PCI device is plugged in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PciLocation {
    /// The root, the bridges and switches on the way, and the device itself: `pci0000:3a`, `0000:3a:00.0`,
    /// `0000:3b:00.0`. Empty if there is no such device.
    pub path: Vec<String>,
    /// The NUMA node, if it has one.
    pub numa: Option<u32>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Whether this process may run on one of its processors.
    pub local: bool,
    /// How many processors it has.
    pub processors: usize,
    /// How far it is to each node that there is, as the firmware says: 10 to itself.
    pub distances: Vec<u32>,
}

/// From where a rank looks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Affinity {
    /// The NUMA nodes, by number; empty where the kernel tells of none.
    pub nodes: Vec<NumaNode>,
    /// Where the GPU is, if the rank has one.
    pub gpu: Option<PciLocation>,
}

/// The distance of a node to itself.
const HERE: u32 = 10;

impl PciLocation {
    /// The place of the device whose folder in `/sys` this is, or links to.
    #[must_use]
    pub fn read(folder: &Path) -> Self {
        let real = std::fs::canonicalize(folder).unwrap_or_default();
        let parts = real.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
        let path: Vec<String> = parts.skip_while(|part| !part.starts_with("pci")).collect();
        if path.is_empty() {
            return Self::default();
        }
        // The kernel writes -1 for none.
        let numa = number::<i64>(&folder.join("numa_node")).and_then(|node| u32::try_from(node).ok());
        Self { path, numa }
    }

    /// Its PCI address, such as `0000:3b:00.0`.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.path.last().map(String::as_str)
    }
}

impl Affinity {
    /// This process on this machine, with the GPU at this PCI address.
    #[must_use]
    pub fn local(gpu: Option<&str>) -> Self {
        Self::read(Path::new("/"), gpu)
    }

    /// The same, on the machine whose `/sys` and `/proc` are below `root`.
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
            let ours = |processor: &usize| allowed.as_ref().is_none_or(|all| all.contains(processor));
            Some(NumaNode {
                number,
                local: processors.iter().any(ours),
                processors: processors.len(),
                distances: distances.split_whitespace().flat_map(str::parse).collect(),
            })
        };
        let gpu = gpu.map(|address| {
            // CUDA writes addresses in capitals.
            PciLocation::read(&root.join("sys/bus/pci/devices").join(address.to_ascii_lowercase()))
        });
        Self { nodes: names(&folder).iter().filter_map(node).collect(), gpu }
    }

    /// How far `place` is from here, the nearest first: by the PCI bridges that it shares with the GPU if there is
    /// one, then by the distance of NUMA nodes. What is nowhere counts as near.
    #[must_use]
    pub fn distance(&self, location: &PciLocation) -> (usize, u32) {
        let Some(gpu) = self.gpu.as_ref().filter(|gpu| !gpu.path.is_empty()) else {
            let ours = self.nodes.iter().filter(|node| node.local).map(|node| Some(node.number));
            return (0, ours.map(|node| self.between(node, location.numa)).min().unwrap_or(HERE));
        };
        let shared = gpu.path.iter().zip(&location.path).take_while(|(one, other)| one == other).count();
        (gpu.path.len() - shared, self.between(gpu.numa, location.numa))
    }

    fn between(&self, one: Option<u32>, other: Option<u32>) -> u32 {
        let (Some(one), Some(other)) = (one, other) else {
            return HERE;
        };
        // The kernel lists the distances of nodes in the order of their numbers, of which some may be missing.
        let from = self.nodes.iter().find(|node| node.number == one);
        let at = self.nodes.iter().position(|node| node.number == other);
        let told = from.zip(at).and_then(|(from, at)| from.distances.get(at).copied());
        told.unwrap_or(if one == other { HERE } else { 2 * HERE })
    }
}

/// `0-3,8` as numbers.
fn ranges(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}
