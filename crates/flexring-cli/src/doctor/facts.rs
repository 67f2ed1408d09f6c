//! The facts about a machine and this process, as plain data.
//!
//! Owns the keys of the facts in JSON, and gathering them. Must not judge them, nor know how they are
//! printed.

use super::gpu::GpuReport;
use super::process::{JobRank, MemoryReport, ProcessorReport, SettingsReport, Variables, file_errors};
use super::rdma::RdmaReport;
use super::sockets::SocketReport;
use super::topology::TopologyReport;
use crate::env;
use flexring::internal::bootstrap;
use flexring::internal::transport::verbs::inventory::Affinity;
use flexring_core::config::TransportChoice;
use serde::Serialize;
use std::path::Path;

/// Everything that the findings are derived from.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    pub version: &'static str,
    pub host: String,
    /// System name, release and machine, as `uname -srm` prints them.
    pub system: String,
    pub build: BuildInfo,
    /// The rank of this process, if it belongs to a job.
    pub rank: Option<JobRank>,
    pub processor: ProcessorReport,
    pub memory: MemoryReport,
    pub sockets: SocketReport,
    pub rdma: RdmaReport,
    pub gpus: GpuReport,
    pub topology: TopologyReport,
    pub settings: SettingsReport,
}

/// The features of this build.
#[derive(Clone, Debug, Serialize)]
pub struct BuildInfo {
    pub verbs: bool,
    pub cuda: bool,
    /// The origin of the GPU kernels, if there are any.
    pub kernels: Option<String>,
}

impl BuildInfo {
    fn this() -> Self {
        Self { verbs: cfg!(feature = "verbs"), cuda: cfg!(feature = "cuda"), kernels: env::kernels() }
    }
}

impl Facts {
    /// The facts about this process on the machine whose `/sys`, `/proc` and `/dev` are below `root`.
    pub fn gather(root: &Path, variables: &Variables) -> Self {
        let (config, mut settings) = SettingsReport::read(variables);
        let (rank, launcher_failure) = JobRank::read(&config, variables);
        if root == Path::new("/") {
            settings.unusable.extend(file_errors(&config, rank.as_ref()));
        }
        let affinity = Affinity::read(root, None);
        let rdma = RdmaReport::read(root, &config, &affinity);
        let gpus = GpuReport::read(root, config.gpu_direct, &rdma.software_only(), &rdma.rail_probes());
        let addresses: Vec<String> = gpus.devices.iter().map(|gpu| gpu.address.clone()).collect();
        let topology = TopologyReport::read(root, &config, &rdma.inventory, &affinity, &addresses);
        let world = rank.as_ref().map_or(1, |rank| rank.world);
        let name = rustix::system::uname();
        let parts = [name.sysname(), name.release(), name.machine()].map(|part| part.to_string_lossy());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            host: bootstrap::host_name(),
            system: parts.join(" "),
            build: BuildInfo::this(),
            processor: ProcessorReport::read(&config, affinity),
            memory: MemoryReport::read(root, &config, world, !gpus.devices.is_empty()),
            rank,
            sockets: SocketReport::local(root, &config),
            gpus,
            topology,
            rdma,
            settings: SettingsReport { launcher: launcher_failure, ..settings },
        }
    }

    /// The transports that the settings require, wherever the ranks are.
    pub fn required_transports(&self) -> &'static [&'static str] {
        match self.settings.transport {
            TransportChoice::Auto | TransportChoice::AutoTcp => &["shm", "tcp"],
            TransportChoice::Shm => &["shm"],
            TransportChoice::Tcp => &["tcp"],
            TransportChoice::Verbs => &["verbs"],
        }
    }
}
