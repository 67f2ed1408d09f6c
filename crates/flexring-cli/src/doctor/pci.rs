//! What stands in the way of an RDMA device on the PCI bus, and how it may use the bus.
//!
//! Owns the format of PCI configuration space, as far as it is read here.

use serde::{Deserialize, Serialize};
use std::path::Path;

/// A device's place on the PCI bus.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciFacts {
    /// Speed and width of the link, as in `16.0 GT/s PCIe x8`; empty if unknown.
    pub link: String,
    /// The most that the device allows.
    pub best_link: String,
    /// Bytes that the device reads at a time (MaxReadReq); `None` if unknown. Root sees it.
    pub read_request: Option<u32>,
    /// Bridges above the device that send transfers between devices through the root complex (Access Control
    /// Services). Root sees them.
    pub redirecting: Vec<String>,
    /// Whether an IOMMU translates the device's addresses.
    pub is_translated: bool,
}

impl PciFacts {
    /// The facts about the device with this directory in `/sys`, or with the one that this links to.
    pub fn read(folder: &Path) -> Self {
        let Ok(folder) = folder.canonicalize() else { return Self::default() };
        let text =
            |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default().trim().to_owned();
        let link =
            |kind: &str| match (text(&format!("{kind}_link_speed")), text(&format!("{kind}_link_width"))) {
                (speed, width) if speed.is_empty() || width.is_empty() => String::new(),
                (speed, width) => format!("{speed} x{width}"),
            };
        let space = |folder: &Path| std::fs::read(folder.join("config")).unwrap_or_default();
        let redirects = |folder: &&Path| redirects(&space(folder));
        let name = |folder: &Path| folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self {
            link: link("current"),
            best_link: link("max"),
            read_request: read_request(&space(&folder)),
            redirecting: folder.ancestors().skip(1).filter(redirects).map(name).collect(),
            is_translated: text("iommu_group/type").starts_with("DMA"),
        }
    }
}

fn word(space: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(space.get(at..at + 2)?.try_into().ok()?))
}

/// MaxReadReq, from the PCI Express capability.
fn read_request(space: &[u8]) -> Option<u32> {
    let mut at = usize::from(*space.get(0x34)?);
    // A list has at most 48 entries, and a broken one may be a ring.
    for _ in 0..48 {
        if at < 0x40 {
            return None;
        }
        if *space.get(at)? == 0x10 {
            return Some(128 << (word(space, at + 8)? >> 12 & 7));
        }
        at = usize::from(*space.get(at + 1)?);
    }
    None
}

/// Whether a bridge's Access Control Services redirect transfers between devices, or check their source.
fn redirects(space: &[u8]) -> bool {
    const SOURCE_AND_REDIRECTS: u16 = 0b1101;
    let mut at = 0x100;
    for _ in 0..960 {
        let Some((id, next)) = word(space, at).zip(word(space, at + 2)) else { return false };
        if id == 0x000d {
            return word(space, at + 6).is_some_and(|control| control & SOURCE_AND_REDIRECTS != 0);
        }
        at = usize::from(next >> 4);
        if at < 0x100 {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A space with a PCI Express capability at 0x60, and Access Control Services at 0x148.
    fn space(control: u16, services: u16) -> Vec<u8> {
        let mut space = vec![0; 4096];
        space[0x34] = 0x40;
        space[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
        space[0x60] = 0x10;
        space[0x68..0x6a].copy_from_slice(&control.to_le_bytes());
        space[0x100..0x104].copy_from_slice(&[0x01, 0, 0x81, 0x14]);
        space[0x148..0x14c].copy_from_slice(&[0x0d, 0, 0x01, 0]);
        space[0x14e..0x150].copy_from_slice(&services.to_le_bytes());
        space
    }

    #[test]
    fn read_requests_and_access_control_services_are_found_in_their_lists() {
        assert_eq!(read_request(&space(0x2010, 0)), Some(512));
        assert_eq!(read_request(&space(0x5010, 0)), Some(4096));
        assert!(redirects(&space(0, 0x1d)) && redirects(&space(0, 1)));
        assert!(!redirects(&space(0, 0)) && !redirects(&space(0, 2)));
        // What users without privileges see ends after 64 bytes.
        assert_eq!((read_request(&space(0x5010, 1)[..64]), redirects(&space(0, 1)[..64])), (None, false));
    }

    #[test]
    fn lists_that_are_rings_end() {
        let mut ring = space(0, 0);
        (ring[0x34], ring[0x40], ring[0x41]) = (0x40, 1, 0x40);
        ring[0x100..0x104].copy_from_slice(&[0x01, 0, 0x01, 0x10]);
        assert_eq!((read_request(&ring), redirects(&ring)), (None, false));
    }
}
