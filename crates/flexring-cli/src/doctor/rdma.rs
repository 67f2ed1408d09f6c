//! The RDMA devices, and which of their ports would be used.
//!
//! Owns the facts about RDMA. The library reads the devices and selects the ports.

use super::device_probe::{self, DeviceProbe, LibraryReport};
use flexring::internal::transport::verbs::inventory::{self, Affinity, Inventory};
use flexring::internal::transport::verbs::port_selection::{self, PortSelection};
use flexring_core::config::Config;
use serde::Serialize;
use std::path::Path;

/// Kernel modules of the RDMA core, of devices' drivers, and of software devices.
const MODULES: [&str; 12] = [
    "ib_core",
    "ib_uverbs",
    "rdma_cm",
    "mlx5_ib",
    "mlx4_ib",
    "bnxt_re",
    "irdma",
    "hns_roce_hw_v2",
    "ionic_rdma",
    "efa",
    "rdma_rxe",
    "siw",
];

/// The RDMA devices and the selection among their ports.
#[derive(Clone, Debug, Serialize)]
pub struct RdmaReport {
    /// The RDMA kernel modules that are loaded.
    pub modules: Vec<String>,
    /// libibverbs; `None` without verbs in this build, and for file trees.
    pub library: Option<LibraryReport>,
    #[serde(flatten)]
    pub inventory: Inventory,
    #[serde(flatten)]
    pub selection: PortSelection,
    /// Why there is no rail, if there is none.
    pub failure: Option<String>,
    /// The NUMA distance of each device from this process: 10 is local.
    pub distances: Vec<u32>,
    /// The answers of the devices that were opened.
    pub probes: Vec<DeviceProbe>,
}

impl RdmaReport {
    pub fn read(root: &Path, config: &Config, affinity: &Affinity) -> Self {
        let inventory = Inventory::read(root, inventory::addresses());
        let loaded = |name: &&str| root.join("sys/module").join(name).exists();
        let decided = port_selection::decide(&inventory, config, affinity);
        let failure = port_selection::select(&inventory, config, affinity).err();
        let selection = decided.unwrap_or_default();
        let distance = |device: &inventory::RdmaDevice| affinity.distance(&device.pci).numa;
        let name = config.ibverbs.as_deref();
        let library = device_probe::library(root, name);
        let is_open = library.as_ref().is_some_and(|library| library.failure.is_none());
        Self {
            modules: MODULES.iter().filter(|name| loaded(name)).map(ToString::to_string).collect(),
            distances: inventory.devices.iter().map(distance).collect(),
            library,
            probes: if is_open { device_probe::probe_all(root, name, &inventory) } else { Vec::new() },
            failure: failure.map(|error| error.message().to_owned()),
            selection,
            inventory,
        }
    }

    /// Why libibverbs cannot be used, if it was opened and cannot.
    pub fn library_failure(&self) -> Option<&str> {
        self.library.as_ref()?.failure.as_deref()
    }

    /// Whether a port of this device is a rail.
    pub fn has_rail(&self, device: &str) -> bool {
        self.selection.rails.iter().any(|rail| rail.device == device)
    }

    /// The answers of the rails' devices that could be opened.
    pub fn rail_probes(&self) -> Vec<DeviceProbe> {
        let relevant = |probe: &&DeviceProbe| self.has_rail(&probe.device) && probe.failure.is_none();
        self.probes.iter().filter(relevant).cloned().collect()
    }

    /// The rails' devices if all of them are software devices; else none.
    pub fn software_only(&self) -> Vec<String> {
        let devices: Vec<_> =
            self.inventory.devices.iter().filter(|device| self.has_rail(&device.name)).collect();
        let software = devices.iter().all(|device| device.driver.is_none());
        if software { devices.iter().map(|device| device.name.clone()).collect() } else { Vec::new() }
    }
}
