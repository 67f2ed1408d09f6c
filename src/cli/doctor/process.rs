//! What this process is and may do: processors, memory, settings, its rank.
//!
//! Owns how these are found out. Must not know what is enough.

use super::report::Variables;
use crate::settings;
use flexring::bootstrap;
use flexring::config::{Config, Origin, TransportChoice};
use flexring::device::host::Host;
use flexring::transport::verbs::inventory::{Affinity, NumaNode};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::path::Path;

/// The processors.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessorReport {
    /// How many this process may use at a time.
    pub cores: usize,
    /// The instruction set of the host reductions, if there is one that the settings allow.
    pub simd: Option<&'static str>,
    /// Why there is none.
    pub simd_failure: Option<String>,
    pub nodes: Vec<NumaNode>,
}

impl ProcessorReport {
    pub fn read(config: &Config, affinity: Affinity) -> Self {
        let (simd, simd_failure) = match Host::new(config.simd) {
            Ok(host) => (Some(host.simd().name()), None),
            Err(error) => (None, Some(error.message().to_owned())),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { cores, simd, simd_failure, nodes: affinity.nodes }
    }
}

/// The memory.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// Bytes that may be locked, as registering memory does; none if there is no limit.
    pub memlock_bytes: Option<u64>,
    /// Whether the limit does not count for this process, as it has `CAP_IPC_LOCK`.
    pub memlock_exempt: bool,
    /// Bytes that RDMA locks: the pool, and what the queues take.
    pub needed_bytes: u64,
    /// Slots of the pool, and bytes of each.
    pub slots: u64,
    pub slot_bytes: u64,
    /// Bytes of each of as many slots for vectors on GPUs, if there is a GPU.
    pub gpu_slot_bytes: Option<u64>,
    /// Why the kernel makes no anonymous files, if it does not.
    pub memfd_failure: Option<String>,
}

impl MemoryReport {
    /// What queues take: reckoned, not measured.
    const QUEUES: u64 = 1 << 20;

    /// What a rank of a world of `world` ranks has and needs, on a machine with GPUs or without.
    pub fn read(root: &Path, config: &Config, world: usize, gpus: bool) -> Self {
        let memfd = rustix::fs::memfd_create("flexring-doctor", rustix::fs::MemfdFlags::CLOEXEC);
        let slots = config.slots_for(world) as u64;
        let slot_bytes = config.subchunk.0 as u64;
        let gpu_slot_bytes = gpus.then(|| config.gpu_slot_bytes() as u64);
        Self {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            memlock_exempt: exempt(root),
            // One slot more is the executor's own.
            needed_bytes: (slots + 1) * (slot_bytes + gpu_slot_bytes.unwrap_or(0)) + Self::QUEUES,
            slots,
            slot_bytes,
            gpu_slot_bytes,
            memfd_failure: memfd.err().map(|cause| std::io::Error::from(cause).to_string()),
        }
    }
}

/// Whether the kernel lets this process lock as much as it likes. A container's root has the capability too, but
/// mostly in a user namespace of its own, where it does not count.
fn exempt(root: &Path) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_default();
    let status = read("proc/self/status");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let first_namespace = read("proc/self/uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    effective & CAP_IPC_LOCK != 0 && first_namespace
}

/// The settings.
#[derive(Clone, Debug, Serialize)]
pub struct SettingsReport {
    /// Those that are set: name and value.
    pub set: Vec<(&'static str, String)>,
    /// Those that cannot be used, in words.
    pub unusable: Vec<String>,
    /// Variables that look like settings and are none, and what they are like.
    pub unknown: Vec<(String, &'static str)>,
    /// What is wrong with what the launcher says, if anything.
    pub launcher: Option<String>,
    #[serde(serialize_with = "named")]
    pub transport: TransportChoice,
}

fn named<S: serde::Serializer>(choice: &TransportChoice, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(choice.name())
}

impl SettingsReport {
    /// The settings, and what they are. Those that cannot be used count as not set.
    pub fn read(variables: &Variables) -> (Config, Self) {
        let lookup = |name: &str| variables.get(name).cloned();
        let unusable = settings::unusable(lookup);
        let usable =
            |name: &str| lookup(name).filter(|_| unusable.iter().all(|(unusable, _)| *unusable != name));
        let config = Config::read(usable).unwrap_or_default();
        let set = config.table(usable).into_iter().filter(|row| row.origin == Origin::Environment);
        let settings = Self {
            set: set.map(|row| (row.name, row.value)).collect(),
            unusable: unusable.iter().map(|(_, error)| error.message().to_owned()).collect(),
            unknown: Config::unknown_variables(variables.keys().cloned())
                .into_iter()
                .map(|name| (name.clone(), settings::closest(&name)))
                .collect(),
            launcher: None,
            transport: config.transport,
        };
        (config, settings)
    }
}

/// A rank of a job.
#[derive(Clone, Debug, Serialize)]
pub struct JobRank {
    pub rank: usize,
    pub world: usize,
    pub launcher: &'static str,
}

impl JobRank {
    /// Which rank this process is, or what is wrong with what the launcher says.
    pub fn read(config: &Config, variables: &Variables) -> (Option<Self>, Option<String>) {
        let lookup = |name: &str| variables.get(name).cloned();
        match bootstrap::is_alone(config, lookup) {
            Ok(true) => return (None, None),
            Ok(false) => {}
            Err(error) => return (None, Some(error.message().to_owned())),
        }
        match bootstrap::identity(config, lookup) {
            Ok(identity) => {
                let (rank, world) = (identity.rank, identity.world);
                (Some(Self { rank, world, launcher: identity.launcher }), None)
            }
            Err(error) => (None, Some(error.message().to_owned())),
        }
    }
}
