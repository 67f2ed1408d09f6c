//! The settings: one entry each, with name, type, default and sentence.
//!
//! Owns every environment variable that flexring reads as a setting. Nothing else in the crate calls
//! `getenv` for one (launchers' own variables, such as torchrun's, are the bootstrap's business). Must not
//! know what the settings do.

mod choices;
#[cfg(test)]
mod tests;
mod values;

pub use choices::{Algorithm, Family, GpuDirect, LogLevel, Lowering, Registration, Simd, TransportChoice};
pub use values::{Dimensions, Servers, Size, Switch};

use crate::error::{Error, Result};
use std::borrow::Cow;
use std::time::Duration;
use values::{AnyValue, SettingValue, SizeRange, ValueCheck};

/// Where a setting's value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// An environment variable.
    Environment,
}

/// A row of the table that `flexring env` prints and the README shows.
#[derive(Clone, Debug)]
pub struct SettingRow {
    /// The variable.
    pub name: &'static str,
    /// What it takes, in words.
    pub expected: Cow<'static, str>,
    /// Its default, as one would write it.
    pub default: String,
    /// Its value here.
    pub value: String,
    /// Where that value came from.
    pub origin: Origin,
    /// What it does.
    pub description: &'static str,
}

macro_rules! settings {
    ($( $(#[agree $agree:tt])? $field:ident: $ty:ty = $name:literal, $default:expr, $check:expr, $description:literal; )*) => {
        /// Every setting, with its value for this process.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config { $(#[doc = $description] pub $field: $ty,)* }

        impl Default for Config {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl Config {
            /// The names of all settings, in the order of the table.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// Reads every setting through `lookup`, which gives a variable's text if it is set.
            ///
            /// # Errors
            /// `InvalidSetting`, quoting the variable and its text, for the first that cannot be parsed.
            pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
                let mut config = Self::default();
                $(if let Some(text) = lookup($name) {
                    config.$field = parse($name, &text, &$check)?;
                })*
                Ok(config)
            }

            /// The table: what each setting is, its value in this configuration, and where `lookup` says it came from.
            pub fn table(&self, lookup: impl Fn(&str) -> Option<String>) -> Vec<SettingRow> {
                let default = Self::default();
                vec![$(SettingRow {
                    name: $name,
                    expected: ValueCheck::<$ty>::expected(&$check),
                    default: default.$field.show(),
                    value: self.$field.show(),
                    origin: if lookup($name).is_some() { Origin::Environment } else { Origin::Default },
                    description: $description,
                }),*]
            }

            /// The settings that must be equal on all ranks, with their values.
            #[must_use]
            pub fn shared(&self) -> Vec<(String, String)> {
                let mut shared = Vec::new();
                $($( let _ = stringify!($agree); shared.push(($name.to_owned(), self.$field.show())); )?)*
                shared
            }
        }
    };
}

/// Not measured, but reckoned: four ports of 100 Gbit/s carry what one PCI Express 4 or 5 slot of 16 lanes does,
/// and four of 400 Gbit/s more than one rank adds up on the host. A further rail costs queue pairs with every peer.
const IB_RAILS: usize = 4;

const SUBCHUNKS: SizeRange = SizeRange {
    least: Size(4 << 10),
    most: Size(64 << 20),
    multiple_of: Size(4 << 10),
    expected: "a number of bytes from 4K to 64M in multiples of 4K, such as 512K",
};
const UP_TO_64K: SizeRange = SizeRange {
    least: Size(0),
    most: Size(64 << 10),
    multiple_of: Size(1),
    expected: "a number of bytes up to 64K, such as 4K",
};

settings! {
    rank: Option<usize> = "FLEXRING_RANK", None, AnyValue,
        "This process's rank, from 0; unset, the launcher's (torchrun, Open MPI, MPICH, Slurm) is used.";
    world_size: Option<usize> = "FLEXRING_WORLD_SIZE", None, AnyValue,
        "How many ranks there are; unset, the launcher's is used.";
    master_addr: Option<String> = "FLEXRING_MASTER_ADDR", None, AnyValue,
        "Host name or address of rank 0, where the ranks meet.";
    master_port: Option<u16> = "FLEXRING_MASTER_PORT", None, AnyValue,
        "TCP port of rank 0, where the ranks meet.";
    node: Option<String> = "FLEXRING_NODE", None, AnyValue,
        "Name of the node that this rank is on; ranks with equal names share memory. Unset, the machine and its network namespace tell.";
    #[agree yes]
    algo: Algorithm = "FLEXRING_ALGO", Algorithm::Auto, AnyValue,
        "Which planner makes the schedule; `flexring plan --explain` says what auto chooses and why.";
    #[agree yes]
    dimensions: Option<Dimensions> = "FLEXRING_DIMENSIONS", None, AnyValue,
        "Dimensions of the hierarchical ring, the nearest ranks first; unset, those of the topology.";
    #[agree yes]
    servers: Option<Servers> = "FLEXRING_SERVERS", None, AnyValue,
        "Ranks that are parameter servers; unset, the first rank of each node.";
    topology: Option<String> = "FLEXRING_TOPOLOGY", None, AnyValue,
        "Where the ranks are: a file (TOML, or Slurm's topology.conf), or a short form such as 2+3 or 1@1G+1@500M. Unset, nodes at one switch.";
    plan_file: Option<String> = "FLEXRING_PLAN_FILE", None, AnyValue,
        "A schedule in JSON, as `flexring plan --write` makes it, to be used for everything; it is verified first.";
    #[agree yes]
    reproducible: Switch = "FLEXRING_REPRODUCIBLE", Switch(false), AnyValue,
        "Whether sums have the same bits whatever the algorithm, layout, transport and sub-chunk size: all contributions are added in rank order by one rank.";
    #[agree yes]
    direct: Size = "FLEXRING_DIRECT", Size(64 << 10), AnyValue,
        "Vectors of at most this many bytes go straight between all ranks, where FLEXRING_ALGO is auto and no two ranks share memory.";
    #[agree yes]
    lowering: Lowering = "FLEXRING_LOWERING", Lowering::Auto, AnyValue,
        "How the groups of a schedule become transfers.";
    #[agree yes]
    transport: TransportChoice = "FLEXRING_TRANSPORT", TransportChoice::Auto, AnyValue,
        "What carries the bytes.";
    #[agree yes]
    subchunk: Size = "FLEXRING_SUBCHUNK", Size(128 << 10), SUBCHUNKS,
        "Bytes of one sub-chunk, the grain of the pipeline, and of one slot of the pool.";
    // Not measured: a copy over PCI Express costs 1 to 2 microseconds beside its bytes, of which a GPU's 16 lanes move
    // 128K in 3 to 5 microseconds and 1M in 20 to 40.
    #[agree yes]
    gpu_subchunk: Size = "FLEXRING_GPU_SUBCHUNK", Size(1 << 20), SUBCHUNKS,
        "Bytes of a sub-chunk of long vectors on GPUs, if that is more than FLEXRING_SUBCHUNK, which shorter ones have.";
    #[agree yes]
    small: Size = "FLEXRING_SMALL", Size(4 << 10), UP_TO_64K,
        "Vectors of at most this many bytes are reduced by every rank itself, in one hop, where all ranks share one node or no two do.";
    slots: usize = "FLEXRING_SLOTS", 64, 2..=65536,
        "Slots in a rank's pool; raised to two per peer if that is more.";
    #[agree yes]
    sockets_per_link: usize = "FLEXRING_SOCKETS_PER_LINK", 1, 1..=16,
        "TCP connections that one link stripes its sub-chunks over.";
    // Behind links of 1 Gbit/s the kernel's own 4M fill the switch's queues, and acknowledgements wait in them:
    // 1+1+1 with a node at 500 Mbit/s, 64 MiB: median 1133 to 1152 ms, with 128K 1125 ms (the link allows 1123).
    socket_buffer: Size = "FLEXRING_SOCKET_BUFFER", Size(128 << 10), AnyValue,
        "Bytes that the kernel may hold for one TCP connection until the peer has acknowledged them; more than bandwidth times delay of one connection only fills queues. 0 leaves it to the kernel.";
    socket_ifname: Option<String> = "FLEXRING_SOCKET_IFNAME", None, AnyValue,
        "Interfaces for TCP: a list of name prefixes; a leading = takes whole names, a leading ^ excludes.";
    socket_family: Family = "FLEXRING_SOCKET_FAMILY", Family::Auto, AnyValue,
        "Which Internet protocol TCP links use.";
    ib_hca: Option<String> = "FLEXRING_IB_HCA", None, AnyValue,
        "RDMA devices: a list of name prefixes, each with :port if only that port is meant; a leading = takes whole names, a leading ^ excludes.";
    ib_rails: usize = "FLEXRING_IB_RAILS", IB_RAILS, 1..=8,
        "How many RDMA ports a rank uses at most, the nearest first.";
    #[agree yes]
    ib_qps_per_rail: usize = "FLEXRING_IB_QPS_PER_RAIL", 1, 1..=8,
        "Queue pairs that a link has on each rail; more than one where switches spread flows over paths by their source port.";
    ib_gid_index: Option<usize> = "FLEXRING_IB_GID_INDEX", None, 0..=255,
        "Entry of the RDMA port's GID table that is this rank's address; unset, the best by RoCE version and family.";
    ib_roce_version: usize = "FLEXRING_IB_ROCE_VERSION", 2, 1..=2,
        "RoCE version of the GID; the other is taken where a port has none of it. Version 1 does not cross routers.";
    ib_family: Family = "FLEXRING_IB_FAMILY", Family::Auto, AnyValue,
        "Which Internet protocol the RoCE GID's address is of.";
    ib_pkey: usize = "FLEXRING_IB_PKEY", 0, 0..=65535,
        "Entry of the RDMA port's table of partition keys.";
    ib_sl: usize = "FLEXRING_IB_SL", 0, 0..=15,
        "InfiniBand service level; on RoCE its lower three bits are the priority of a VLAN's frames.";
    ib_tc: usize = "FLEXRING_IB_TC", 0, 0..=255,
        "Traffic class of RoCE packets: the DSCP times four, plus the two bits of ECN.";
    ib_timeout: usize = "FLEXRING_IB_TIMEOUT", 14, 1..=31,
        "How long an RDMA device waits for an acknowledgement before it sends again: 4.096 microseconds times two to this power; 14 is 67 ms.";
    ib_retries: usize = "FLEXRING_IB_RETRIES", 6, 0..=7,
        "How often an RDMA device sends again before the link counts as broken; 7 means for ever to some drivers, and is taken as 6 there.";
    ib_register: Registration = "FLEXRING_IB_REGISTER", Registration::Auto, AnyValue,
        "How memory that nobody registered is sent and received: registered sub-chunk by sub-chunk as part of the pipeline, or copied through slots; auto measures which is cheaper when the communicator is made.";
    ib_relaxed_ordering: Switch = "FLEXRING_IB_RELAXED_ORDERING", Switch(true), AnyValue,
        "Whether RDMA writes may pass each other on PCI Express; faster on many machines, and harmless where the device does not know it.";
    gpu: Option<usize> = "FLEXRING_GPU", None, AnyValue,
        "Number of the GPU whose memory calls may be about, among those that the process sees; unset, the one whose CUDA context is current on the thread that makes the communicator, else that of the first vector on a GPU.";
    gpu_ipc: Switch = "FLEXRING_GPU_IPC", Switch(true), AnyValue,
        "Whether ranks of a node read what is on each other's GPUs there; otherwise it goes by pinned memory of the host.";
    gpu_direct: GpuDirect = "FLEXRING_GPU_DIRECT", GpuDirect::Auto, AnyValue,
        "How RDMA devices reach a GPU's memory: by DMA-BUF, by peer memory, or not at all but through pinned host memory; auto takes the first that works.";
    timeout: Duration = "FLEXRING_TIMEOUT_MS", Duration::from_secs(300), AnyValue,
        "How long any call waits for other ranks before it fails.";
    connect_timeout: Duration = "FLEXRING_CONNECT_TIMEOUT_MS", Duration::from_secs(60), AnyValue,
        "How long creating a communicator waits for all ranks to come.";
    heartbeat: Duration = "FLEXRING_HEARTBEAT_MS", Duration::from_millis(500), AnyValue,
        "How often a rank says that it lives; silent for twenty of these, it counts as dead.";
    spin_us: usize = "FLEXRING_SPIN_US", 200, AnyValue,
        "Microseconds that a wait spins before it sleeps.";
    simd: Simd = "FLEXRING_SIMD", Simd::Auto, AnyValue,
        "The instruction set of the host reductions.";
    log: LogLevel = "FLEXRING_LOG", LogLevel::Warn, AnyValue,
        "How much flexring says on standard error.";
}

/// The value that `text` is for the setting of this name.
fn parse<T: SettingValue>(name: &str, text: &str, check: &impl ValueCheck<T>) -> Result<T> {
    T::parse(text).filter(|value| check.admits(value)).ok_or_else(|| {
        let expected = check.expected();
        Error::invalid_setting(format!("{name}=\"{text}\" cannot be used: expected {expected}"))
    })
}

impl Config {
    /// Reads every setting from the environment.
    ///
    /// # Errors
    /// `InvalidSetting`, quoting the variable and its text, for the first that cannot be parsed.
    pub fn from_env() -> Result<Self> {
        Self::read(environment)
    }

    /// How long a wait spins before it sleeps.
    #[must_use]
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us as u64)
    }

    /// Slots of a rank's pool in a world of `world` ranks: two per peer at least.
    #[must_use]
    pub fn slots_for(&self, world: usize) -> usize {
        self.slots.max(2 * world.saturating_sub(1))
    }

    /// Bytes of a slot for vectors on GPUs, no less than of another.
    #[must_use]
    pub fn gpu_slot_bytes(&self) -> usize {
        self.subchunk.0.max(self.gpu_subchunk.0)
    }

    /// Variables that start like ours and are none of them: most likely misspelt.
    pub fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
        names.filter(|name| name.starts_with("FLEXRING_") && !Self::known(name)).collect()
    }

    fn known(name: &str) -> bool {
        Self::NAMES.contains(&name) || name == "FLEXRING_UNIQUE_ID"
    }
}

/// Looks a variable up in this process's environment; text that is not Unicode is shown as well as it can be.
#[must_use]
pub fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}
