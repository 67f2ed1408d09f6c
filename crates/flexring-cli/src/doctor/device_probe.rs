//! libibverbs, and the answers of RDMA devices to queries that require opening them.
//!
//! Owns opening both, which requires a build with verbs and the machine itself in contrast to a file tree.

use flexring::internal::transport::verbs::gpu::gdr_mode::GdrUnavailable;
use flexring::internal::transport::verbs::inventory::Inventory;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The library by which devices are used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LibraryReport {
    /// Why it cannot be used, if it cannot, with the fix.
    pub failure: Option<String>,
    /// The file, without symbolic links.
    pub file: Option<PathBuf>,
    /// The version in the file's name, such as `1.14.44.0`.
    pub version: Option<String>,
    /// Optional functions that it lacks, with their versions.
    pub missing: Vec<&'static str>,
}

/// Opens libibverbs by this name, or by its usual name. `None` if `root` is a file tree.
#[cfg(feature = "verbs")]
pub fn library(root: &Path, name: Option<&str>) -> Option<LibraryReport> {
    use flexring::internal::transport::verbs::probe::{self, LibraryProperties};
    (root == Path::new("/")).then(|| match probe::library(name) {
        Ok(LibraryProperties { file, version, missing }) => {
            LibraryReport { failure: None, file, version, missing }
        }
        Err(error) => LibraryReport { failure: Some(error.message().to_owned()), ..LibraryReport::default() },
    })
}

/// None: this build does not use libibverbs.
#[cfg(not(feature = "verbs"))]
pub fn library(_root: &Path, _name: Option<&str>) -> Option<LibraryReport> {
    None
}

/// The answers of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceProbe {
    pub device: String,
    /// Why the device cannot be opened, if it cannot; then there are no answers.
    pub failure: Option<String>,
    /// The active MTUs in bytes, as (port, MTU).
    pub active_mtus: Vec<(u8, u32)>,
    /// Whether the driver imports GPU memory as DMA-BUFs; `None` without an answer.
    pub imports_dmabuf: Option<bool>,
    /// Why it does not import them.
    #[serde(serialize_with = "as_message")]
    pub why_not: Option<GdrUnavailable>,
}

impl DeviceProbe {
    /// The active MTU of a port in bytes, if it is known.
    pub fn mtu(&self, port: u8) -> Option<u32> {
        self.active_mtus.iter().find(|(number, _)| *number == port).map(|(_, mtu)| *mtu)
    }
}

fn as_message<S: serde::Serializer>(reason: &Option<GdrUnavailable>, to: S) -> Result<S::Ok, S::Error> {
    reason.as_ref().map(|reason| &reason.message).serialize(to)
}

/// Probes all devices that this process may open. There are none if `root` is a file tree.
#[cfg(feature = "verbs")]
pub fn probe_all(root: &Path, library: Option<&str>, inventory: &Inventory) -> Vec<DeviceProbe> {
    use flexring::internal::transport::verbs::{inventory, probe};
    if root != Path::new("/") {
        return Vec::new();
    }
    let probe = |device: &inventory::RdmaDevice| {
        let ports: Vec<u8> = device.ports.iter().map(|port| port.number).collect();
        let unanswered = DeviceProbe {
            device: device.name.clone(),
            failure: None,
            active_mtus: Vec::new(),
            imports_dmabuf: None,
            why_not: None,
        };
        match probe::probe(library, &device.name, &ports) {
            Err(error) => DeviceProbe { failure: Some(error.message().to_owned()), ..unanswered },
            Ok(answers) => DeviceProbe {
                active_mtus: ports
                    .into_iter()
                    .zip(answers.mtus)
                    .filter_map(|(port, mtu)| Some((port, mtu?)))
                    .collect(),
                imports_dmabuf: Some(answers.dmabufs.is_ok()),
                why_not: answers.dmabufs.err(),
                ..unanswered
            },
        }
    };
    let devices = inventory.devices.iter().filter(|device| device.access == inventory::DeviceAccess::Granted);
    devices.map(probe).collect()
}

/// Probes nothing: this build cannot open devices.
#[cfg(not(feature = "verbs"))]
pub fn probe_all(_root: &Path, _library: Option<&str>, _inventory: &Inventory) -> Vec<DeviceProbe> {
    Vec::new()
}
