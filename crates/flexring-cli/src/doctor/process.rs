//! The facts about this process: processors, memory limits, settings, its rank.
//!
//! Owns finding them out.

use flexring::internal::bootstrap;
use flexring::internal::description;
use flexring::internal::device::{host::Host, relay_bytes};
use flexring::internal::memory::{self, Arena};
use flexring::internal::transport::verbs::inventory::{Affinity, NumaNode};
use flexring_core::config::{Config, TransportChoice};
use flexring_plan::tuning;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The environment variables.
pub type Variables = BTreeMap<String, String>;

/// The processors of this process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessorReport {
    /// The number of processors that this process may use at once.
    pub cores: usize,
    /// The instruction set of the host reductions; `None` if the setting is not supported here.
    pub simd: Option<&'static str>,
    /// Why there is no instruction set.
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

/// The memory limits of this process, and what RDMA needs.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// The memlock limit in bytes, which applies to registered memory; `None` for no limit.
    pub memlock_bytes: Option<u64>,
    /// Whether the limit does not apply to this process, as it has `CAP_IPC_LOCK`.
    pub memlock_exempt: bool,
    /// Bytes that RDMA locks for the pool and the queues.
    pub needed_bytes: u64,
    /// The number of slots of the pool.
    pub slots: u64,
    pub slot_bytes: u64,
    /// Bytes of the slots for messages of kernels, if there is a GPU.
    pub relay_bytes: Option<u64>,
    /// Why the kernel refuses to create anonymous files, if it does.
    pub memfd_failure: Option<String>,
    /// Why this process cannot share memory, if it cannot.
    pub sharing_failure: Option<String>,
    /// Why this process cannot have the memory that every communicator needs, if it cannot.
    pub failure: Option<String>,
}

impl MemoryReport {
    /// The memory of the queues in bytes: estimated, not measured.
    const QUEUES: u64 = 1 << 20;

    /// The limits and needs of a rank in a world of `world` ranks, on a machine with GPUs or without.
    pub fn read(root: &Path, config: &Config, world: usize, gpus: bool) -> Self {
        let slots = config.slots_for(1, world) as u64;
        let slot_bytes = config.subchunk.0 as u64;
        let relay_bytes = gpus.then(|| relay_bytes(world) as u64);
        Self {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            memlock_exempt: exempt(root),
            // The executor has one more slot of its own.
            needed_bytes: (slots + 1) * slot_bytes + relay_bytes.unwrap_or(0) + Self::QUEUES,
            slots,
            slot_bytes,
            relay_bytes,
            memfd_failure: memory::memfd_failure().map(|cause| cause.to_string()),
            sharing_failure: memory::shared_memory_room().err().map(|error| error.message().to_owned()),
            failure: Arena::new(1).err().map(|error| error.message().to_owned()),
        }
    }
}

/// Whether this process may lock memory without a limit. The root user of a container has the capability too,
/// but mostly in another user namespace than the first, where it has no effect.
fn exempt(root: &Path) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_default();
    let status = read("proc/self/status");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let first_namespace = read("proc/self/uid_map").split_whitespace().eq(["0", "0", "4294967295"]);
    effective & CAP_IPC_LOCK != 0 && first_namespace
}

/// The settings of this process.
#[derive(Clone, Debug, Serialize)]
pub struct SettingsReport {
    /// The settings that are set, as (name, value).
    pub set: Vec<(&'static str, String)>,
    /// The error messages of invalid settings.
    pub unusable: Vec<String>,
    /// Variables with the prefix of settings that are not settings, as (name, the most similar setting).
    pub unknown: Vec<(String, Option<&'static str>)>,
    /// The error in the launcher's variables, if there is one.
    pub launcher: Option<String>,
    #[serde(serialize_with = "named")]
    pub transport: TransportChoice,
    /// Whether connections between nodes are encrypted.
    pub tls: bool,
}

fn named<S: serde::Serializer>(choice: &TransportChoice, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(choice.name())
}

impl SettingsReport {
    /// Reads the settings. Invalid ones count as not set.
    pub fn read(variables: &Variables) -> (Config, Self) {
        let lookup = |name: &str| variables.get(name).cloned();
        let (config, unusable) = Config::read_partly(lookup);
        let set = config.table(|_| None).into_iter().filter(|row| config.given.contains(row.name));
        let settings = Self {
            set: set.map(|row| (row.name, row.value)).collect(),
            unusable: unusable.iter().map(|(_, error)| error.message().to_owned()).collect(),
            unknown: Config::unknown_variables(variables.keys().cloned()),
            launcher: None,
            transport: config.transport,
            tls: config.tls.0,
        };
        (config, settings)
    }
}

/// What cannot be used of the secret and of the descriptions that settings name. Ranks other than 0 need no
/// tuning profile.
pub fn file_errors(config: &Config, rank: Option<&JobRank>) -> Vec<String> {
    let reads_profile = |path: &&str| rank.is_none_or(|rank| rank.rank == 0) || Path::new(path).exists();
    let errors = [
        bootstrap::check_secret(config).err(),
        config.topology.as_deref().and_then(|text| description::check_topology(text).err()),
        config.plan_file.as_deref().and_then(|path| description::plan(path).err()),
        config.tuning.as_deref().filter(reads_profile).and_then(|path| {
            description::tuning_profile(path).and_then(|text| tuning::parse(path, &text)).err()
        }),
    ];
    errors.into_iter().flatten().map(|error| error.message().to_owned()).collect()
}

/// The rank of this process in a job.
#[derive(Clone, Debug, Serialize)]
pub struct JobRank {
    pub rank: usize,
    pub world: usize,
    pub launcher: &'static str,
}

impl JobRank {
    /// Reads the launcher's variables. Returns the rank, if this process belongs to a job, or the error in
    /// the variables.
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
