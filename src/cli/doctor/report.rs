//! The facts, as plain data.
//!
//! Owns what is told and what it is called in JSON. Must not know how it reads.

use super::device_probe::{self, DeviceProbe};
use super::findings::{self, Finding, Severity};
use super::gpu::GpuReport;
use super::process::{JobRank, MemoryReport, ProcessorReport, SettingsReport};
use crate::env;
use flexring::bootstrap::{self, Interface};
use flexring::config::{Config, TransportChoice};
use flexring::transport::verbs::inventory::{self, Affinity, Inventory};
use flexring::transport::verbs::port_selection::{self, PortSelection};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

/// The environment.
pub type Variables = BTreeMap<String, String>;

/// Everything that is told.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    pub version: &'static str,
    pub host: String,
    /// Name, release and machine, as `uname -srm` prints them.
    pub system: String,
    pub build: BuildInfo,
    /// Which rank of a job this process is, if it is one.
    pub rank: Option<JobRank>,
    pub processor: ProcessorReport,
    pub memory: MemoryReport,
    pub sockets: SocketReport,
    pub rdma: RdmaReport,
    pub gpus: GpuReport,
    pub settings: SettingsReport,
    pub transports: Vec<TransportReport>,
    /// What follows, the worst first.
    pub findings: Vec<Finding>,
}

/// What is compiled into this command.
#[derive(Clone, Debug, Serialize)]
pub struct BuildInfo {
    pub verbs: bool,
    pub cuda: bool,
    /// Where the GPU kernels come from, if there are any.
    pub kernels: Option<String>,
}

impl BuildInfo {
    /// What this command was built with.
    fn this() -> Self {
        Self { verbs: cfg!(feature = "verbs"), cuda: cfg!(feature = "cuda"), kernels: env::kernels() }
    }
}

/// What TCP has.
#[derive(Clone, Debug, Serialize)]
pub struct SocketReport {
    pub interfaces: Vec<InterfaceReport>,
    /// The address that other ranks connect to, if there is one.
    pub chosen: Option<IpAddr>,
    /// Why this one, or why none.
    pub why: String,
}

/// An address of an interface.
#[derive(Clone, Debug, Serialize)]
pub struct InterfaceReport {
    pub name: String,
    pub address: IpAddr,
    pub up: bool,
}

/// What verbs has.
#[derive(Clone, Debug, Serialize)]
pub struct RdmaReport {
    /// Kernel modules about RDMA that are loaded.
    pub modules: Vec<String>,
    #[serde(flatten)]
    pub inventory: Inventory,
    #[serde(flatten)]
    pub selection: PortSelection,
    /// Why there is no rail, if there is none.
    pub failure: Option<String>,
    /// How far each device is from this process, by NUMA nodes: 10 is near.
    pub distances: Vec<u32>,
    /// What devices say of themselves, if they are asked.
    pub probes: Vec<DeviceProbe>,
}

/// Whether a transport can be used.
#[derive(Clone, Debug, Serialize)]
pub struct TransportReport {
    pub name: &'static str,
    pub usable: bool,
    pub why: String,
}

impl DoctorReport {
    /// The facts about this process on the machine whose `/sys`, `/proc` and `/dev` are below `root`.
    pub fn gather(root: &Path, variables: &Variables) -> Self {
        let (config, settings) = SettingsReport::read(variables);
        let (rank, told) = JobRank::read(&config, variables);
        let affinity = Affinity::read(root, None);
        let rdma = RdmaReport::read(root, &config, &affinity);
        let gpus = GpuReport::read(root, config.gpu_direct, &rdma.software_only(), &rdma.rails_answers());
        let world = rank.as_ref().map_or(1, |rank| rank.world);
        let name = rustix::system::uname();
        let parts = [name.sysname(), name.release(), name.machine()].map(|part| part.to_string_lossy());
        let mut report = Self {
            version: env!("CARGO_PKG_VERSION"),
            host: bootstrap::host_name(),
            system: parts.join(" "),
            build: BuildInfo::this(),
            processor: ProcessorReport::read(&config, affinity),
            memory: MemoryReport::read(root, &config, world, !gpus.devices.is_empty()),
            rank,
            sockets: SocketReport::here(&config),
            gpus,
            rdma,
            settings: SettingsReport { launcher: told, ..settings },
            transports: Vec::new(),
            findings: Vec::new(),
        };
        report.conclude();
        report
    }

    /// Draws the conclusions from the facts.
    pub fn conclude(&mut self) {
        self.transports = vec![self.shm(), self.tcp(), self.verbs()];
        self.findings = findings::diagnose(self);
    }

    /// Whether a communicator with these settings can be made here.
    pub fn runs(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity != Severity::Error)
    }

    /// The transports that the settings need, whatever the ranks' places.
    pub fn needed(&self) -> &'static [&'static str] {
        match self.settings.transport {
            TransportChoice::Auto => &["shm", "tcp"],
            TransportChoice::Shm => &["shm"],
            TransportChoice::Tcp => &["tcp"],
            TransportChoice::Verbs => &["verbs"],
        }
    }

    fn shm(&self) -> TransportReport {
        let why = match &self.memory.memfd_failure {
            None => "memfd works; /dev/shm is not needed".to_owned(),
            Some(cause) => format!("the kernel refuses memfd_create: {cause}"),
        };
        TransportReport { name: "shm", usable: self.memory.memfd_failure.is_none(), why }
    }

    fn tcp(&self) -> TransportReport {
        let SocketReport { chosen, why, .. } = &self.sockets;
        let why = chosen.map_or_else(|| why.clone(), |address| format!("at {address}"));
        TransportReport { name: "tcp", usable: chosen.is_some(), why }
    }

    fn verbs(&self) -> TransportReport {
        let rails: Vec<String> =
            self.rdma.selection.rails.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect();
        let missing = match (&self.rdma.failure, self.rdma.inventory.devices.len()) {
            (None, _) => None,
            (Some(_), 0) => Some("there is no RDMA device"),
            (Some(_), _) => Some("no RDMA port can be used"),
        };
        let why = match (self.build.verbs, missing) {
            (true, None) => format!("over {}", rails.join(", ")),
            (true, Some(missing)) => missing.to_owned(),
            (false, None) => "this build has no verbs".to_owned(),
            (false, Some(missing)) => format!("this build has no verbs, and {missing}"),
        };
        TransportReport { name: "verbs", usable: self.build.verbs && self.rdma.failure.is_none(), why }
    }
}

impl SocketReport {
    fn here(config: &Config) -> Self {
        let socket = |interface: Interface| InterfaceReport {
            name: interface.name,
            address: interface.address,
            up: interface.up,
        };
        let interfaces: Vec<InterfaceReport> =
            bootstrap::list().unwrap_or_default().into_iter().map(socket).collect();
        let (chosen, why) = match bootstrap::choose(config.socket_ifname.as_deref(), config.socket_family) {
            Ok(address) => (Some(address), Self::reason(config, address)),
            Err(error) => (None, error.message().to_owned()),
        };
        Self { interfaces, chosen, why }
    }

    fn reason(config: &Config, chosen: IpAddr) -> String {
        match &config.socket_ifname {
            Some(text) => format!("the first that is up and that FLEXRING_SOCKET_IFNAME=\"{text}\" admits"),
            None if chosen.is_loopback() => "nothing else is up".to_owned(),
            None => "the first that is up".to_owned(),
        }
    }
}

impl RdmaReport {
    fn read(root: &Path, config: &Config, affinity: &Affinity) -> Self {
        /// The core, the drivers of devices, and devices made of software.
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
        let inventory = Inventory::read(root, inventory::addresses());
        let loaded = |name: &&str| root.join("sys/module").join(name).exists();
        let decided = port_selection::decide(&inventory, config, affinity);
        let failure = port_selection::select(&inventory, config, affinity).err();
        let selection = decided.unwrap_or_default();
        let distance = |device: &inventory::RdmaDevice| affinity.distance(&device.pci).1;
        Self {
            modules: MODULES.iter().filter(|name| loaded(name)).map(ToString::to_string).collect(),
            distances: inventory.devices.iter().map(distance).collect(),
            probes: device_probe::probe_all(root, &inventory),
            failure: failure.map(|error| error.message().to_owned()),
            selection,
            inventory,
        }
    }

    /// Whether a port of this device is a rail.
    pub fn has_rail(&self, device: &str) -> bool {
        self.selection.rails.iter().any(|rail| rail.device == device)
    }

    /// What the rails' devices say of themselves, as far as they were asked.
    fn rails_answers(&self) -> Vec<DeviceProbe> {
        let told = |probe: &&DeviceProbe| self.has_rail(&probe.device) && probe.failure.is_none();
        self.probes.iter().filter(told).cloned().collect()
    }

    /// The rails, if all of them are made of software.
    fn software_only(&self) -> Vec<String> {
        let devices: Vec<_> =
            self.inventory.devices.iter().filter(|device| self.has_rail(&device.name)).collect();
        let software = devices.iter().all(|device| device.driver.is_none());
        if software { devices.iter().map(|device| device.name.clone()).collect() } else { Vec::new() }
    }
}
