//! What RDMA devices say of themselves once they are open.
//!
//! Owns the asking, which takes a build with verbs, and devices that are this machine's and not those of files.

use flexring::transport::verbs::gpu::gdr_mode::GdrUnavailable;
use flexring::transport::verbs::inventory::Inventory;
use serde::Serialize;
use std::path::Path;

/// What a device said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceProbe {
    pub device: String,
    /// Why it cannot be opened, if so; then it said nothing.
    pub failure: Option<String>,
    /// By port, the bytes that its largest packets carry now.
    pub active_mtus: Vec<(u8, u32)>,
    /// Whether its driver takes GPU memory as DMA-BUFs, if it said so.
    pub imports_dmabuf: Option<bool>,
    /// Why not.
    #[serde(serialize_with = "as_message")]
    pub why_not: Option<GdrUnavailable>,
}

impl DeviceProbe {
    /// The active MTU of a port, if it was told.
    pub fn mtu(&self, port: u8) -> Option<u32> {
        self.active_mtus.iter().find(|(number, _)| *number == port).map(|(_, mtu)| *mtu)
    }
}

fn as_message<S: serde::Serializer>(reason: &Option<GdrUnavailable>, to: S) -> Result<S::Ok, S::Error> {
    reason.as_ref().map(|reason| &reason.message).serialize(to)
}

/// What the devices of this machine say that this process may open; nothing of a machine that is a tree of files.
#[cfg(feature = "verbs")]
pub fn probe_all(root: &Path, inventory: &Inventory) -> Vec<DeviceProbe> {
    use flexring::transport::verbs::{inventory, probe};
    if root != Path::new("/") {
        return Vec::new();
    }
    let probe = |device: &inventory::RdmaDevice| {
        let ports: Vec<u8> = device.ports.iter().map(|port| port.number).collect();
        let nothing = DeviceProbe {
            device: device.name.clone(),
            failure: None,
            active_mtus: Vec::new(),
            imports_dmabuf: None,
            why_not: None,
        };
        match probe::probe(&device.name, &ports) {
            Err(error) => DeviceProbe { failure: Some(error.message().to_owned()), ..nothing },
            Ok(told) => DeviceProbe {
                active_mtus: ports
                    .into_iter()
                    .zip(told.mtus)
                    .filter_map(|(port, mtu)| Some((port, mtu?)))
                    .collect(),
                imports_dmabuf: Some(told.dmabufs.is_ok()),
                why_not: told.dmabufs.err(),
                ..nothing
            },
        }
    };
    let devices = inventory.devices.iter().filter(|device| device.access == inventory::DeviceAccess::Granted);
    devices.map(probe).collect()
}

/// What devices say that nobody can ask: nothing.
#[cfg(not(feature = "verbs"))]
pub fn probe_all(_root: &Path, _survey: &Inventory) -> Vec<DeviceProbe> {
    Vec::new()
}
