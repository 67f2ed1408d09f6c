//! NCCL's topology file, which says where devices are if the PCI tree is not visible, as in virtual machines.
//!
//! Owns its format, as far as it is about places. The file of this machine is the one that NCCL would read.

use crate::config::environment;
use std::collections::BTreeMap;
use std::path::Path;

/// The file that hypervisors provide, if `NCCL_TOPO_FILE` names no other.
const USUAL: &str = "/var/run/nvidia-topologyd/virtualTopology.xml";

/// What is above a device and the device itself, and its NUMA node.
type Place = (Vec<String>, Option<u32>);

/// The places of PCI devices by their addresses.
#[derive(Debug, Default)]
pub(super) struct TopologyFile(BTreeMap<String, Place>);

/// What `NCCL_TOPO_FILE` names.
fn named() -> Option<String> {
    environment("NCCL_TOPO_FILE").filter(|path| !path.is_empty())
}

/// What `NCCL_TOPO_FILE` names, if that is no file of NCCL's.
#[must_use]
pub fn unusable_topology_file() -> Option<String> {
    named().filter(|_| TopologyFile::of(Path::new("/")).0.is_empty())
}

impl TopologyFile {
    /// That of the machine below `root`, which has one only if it is this machine.
    pub(super) fn of(root: &Path) -> Self {
        if root != Path::new("/") {
            return Self::default();
        }
        let path = named().unwrap_or_else(|| USUAL.to_owned());
        let is_file = std::fs::metadata(&path).is_ok_and(|file| file.is_file());
        let text = is_file.then(|| std::fs::read(path).ok()).flatten().unwrap_or_default();
        Self::parse(&String::from_utf8_lossy(&text))
    }

    /// Where the device with this address is, if the file says so.
    pub(super) fn location(&self, address: &str) -> Option<Place> {
        self.0.get(&address.to_ascii_lowercase()).cloned()
    }

    /// Elements `pci` with their `busid`, nested as the devices are, within elements `cpu`.
    fn parse(text: &str) -> Self {
        let mut found = BTreeMap::new();
        let mut open: Vec<Option<String>> = Vec::new();
        let mut numa = None;
        let text = without_comments(text);
        for tag in text.split('<').skip(1).filter_map(|part| Some(part.split_once('>')?.0)) {
            if tag.starts_with(['!', '?']) {
                continue;
            }
            if tag.starts_with('/') {
                open.pop();
                continue;
            }
            let value = |name: &str| {
                let text = tag.split_once(&format!(" {name}=\""))?.1;
                text.split_once('"').map(|(value, _)| value.to_ascii_lowercase())
            };
            let place = match tag.split(char::is_whitespace).next() {
                Some("cpu") => {
                    numa = value("numaid").and_then(|number| number.parse().ok());
                    Some(format!("pci-of-cpu-{}", value("numaid").unwrap_or_default()))
                }
                Some("pci") => value("busid"),
                _ => None,
            };
            if let (true, Some(address)) = (tag.starts_with("pci"), &place) {
                let path = open.iter().flatten().chain([address]).cloned().collect();
                found.insert(address.clone(), (path, numa));
            }
            if !tag.ends_with('/') {
                open.push(place);
            }
        }
        Self(found)
    }
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("<!--");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |kept, part| kept + part.split_once("-->").map_or("", |(_, behind)| behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_where_the_file_nests_them() {
        let file = TopologyFile::parse(
            r#"<?xml version="1.0"?>
            <!-- of an image of a cloud, without <pci busid="0105:00:00.0"> -->
            <system version="1">
              <cpu numaid="0" affinity="ffff" arch="x86_64">
                <pci busid="ffff:ff:01.0" class="0x060400">
                  <pci busid="0001:00:00.0" class="0x030200"><gpu dev="0"/></pci>
                  <pci busid="0101:00:00.0" class="0x020700"/>
                </pci>
                <pci busid="ffff:ff:02.0"><pci busid="0102:00:00.0" class="0x020700"/></pci>
              </cpu>
              <cpu numaid="1"><pci busid="0103:00:00.0"/></cpu>
            </system>"#,
        );
        let path = |address: &str| file.location(address).expect("it is in the file").0.join(" ");
        assert_eq!(path("0001:00:00.0"), "pci-of-cpu-0 ffff:ff:01.0 0001:00:00.0");
        assert_eq!(path("0101:00:00.0"), "pci-of-cpu-0 ffff:ff:01.0 0101:00:00.0");
        assert_eq!(path("0102:00:00.0"), "pci-of-cpu-0 ffff:ff:02.0 0102:00:00.0");
        let of_another = (vec!["pci-of-cpu-1".to_owned(), "0103:00:00.0".to_owned()], Some(1));
        assert_eq!(file.location("0103:00:00.0"), Some(of_another));
        assert_eq!(file.location("0104:00:00.0"), None);
    }

    #[test]
    fn other_text_has_no_places() {
        for text in ["", "<", "</pci></pci><pci>", "<pci busid=\"x>", "no markup"] {
            let TopologyFile(places) = TopologyFile::parse(text);
            assert!(places.is_empty(), "{text}: {places:?}");
        }
    }
}
