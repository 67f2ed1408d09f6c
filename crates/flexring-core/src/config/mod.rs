//! The settings: one entry each, with name, type, default, accepted values and description.
//!
//! Owns every environment variable that is a setting of flexring; no other module reads one. (`bootstrap`
//! reads the variables that give this process its rank, FLEXRING_UNIQUE_ID among them, and torchrun's.)
//!
//! | file | owns |
//! |---|---|
//! | this file | the table of settings, [`Config`] |
//! | `choices` | types that are a choice among names |
//! | `values` | other types; how a text becomes a value |
//! | `log_filter`, `secret_text` | FLEXRING_LOG; texts that no message shows |
//! | `nccl` | settings of NCCL that count where flexring's are unset |

mod choices;
mod log_filter;
mod nccl;
mod secret_text;
#[cfg(test)]
mod tests;
mod values;

pub use choices::{
    AdaptiveRouting, Algorithm, Family, GdrLevel, GpuDirect, LogArea, LogLevel, Lowering, Registration, Simd,
    TransportChoice,
};
pub use log_filter::LogFilter;
#[doc(hidden)]
pub use nccl::NcclValue;
pub use secret_text::SecretText;
pub use values::{Dimensions, ListeningPorts, Servers, Size, Switch};

use crate::error::{Error, Result};
use nccl::NcclSettings;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use values::{AnyValue, SettingValue, SizeRange, ValueCheck};

/// Where a setting's value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default, because the variable is not set.
    Default,
    /// The environment variable.
    Environment,
}

/// A row of the table that `flexring env` prints and docs/settings.md shows.
#[derive(Clone, Debug)]
pub struct SettingRow {
    /// The environment variable.
    pub name: &'static str,
    /// The accepted values, as a phrase.
    pub expected: Cow<'static, str>,
    /// The default, as a user would write it.
    pub default: String,
    /// The value in this configuration.
    pub value: String,
    /// Where `value` comes from.
    pub origin: Origin,
    /// What the setting does, in one or more sentences.
    pub description: &'static str,
}

macro_rules! settings {
    (
        $( $(#[shared $shared:tt])? $field:ident: $ty:ty = $name:literal, $default:expr, $check:expr, $description:literal; )*
        => hidden { $( $(#[doc = $document:literal])* $hidden:ident: $hidden_ty:ty = $hidden_default:expr; )* }
    ) => {
        /// Every setting, with its value for this process.
        ///
        /// Versions add fields, so begin with the settings of [`from_env`](Self::from_env) or `default`:
        ///
        /// ```
        /// # use flexring_core::config::{Config, Size};
        /// # fn main() -> flexring_core::error::Result<()> {
        /// let config = Config { subchunk: Size(256 << 10), ..Config::from_env()? };
        /// # Ok(())
        /// # }
        /// ```
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $(#[doc = $description] pub $field: $ty,)*
            $($(#[doc = $document])* #[doc(hidden)] pub $hidden: $hidden_ty,)*
            /// Names of the settings that were given, also with their defaults. Filled by
            /// [`read`](Self::read). A tuning profile changes none of them.
            #[doc(hidden)]
            pub given: BTreeSet<&'static str>,
            /// Those of them that have a value of NCCL's.
            #[doc(hidden)]
            pub of_nccl: BTreeMap<&'static str, NcclValue>,
        }

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    $($hidden: $hidden_default,)*
                    given: BTreeSet::new(),
                    of_nccl: BTreeMap::new(),
                }
            }
        }

        impl Config {
            /// The names of all settings, in the order of the table.
            #[doc(hidden)]
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// Reads every setting through `lookup`, which gives a variable's text if it is set. An empty
            /// text is as good as none, because shells and YAML files cannot always unset a variable.
            ///
            /// # Errors
            /// `InvalidSetting`, quoting the variable and its text, for the first that cannot be parsed.
            pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
                let (config, failures) = Self::read_with(lookup, |_| None);
                failures.into_iter().next().map_or(Ok(config), |(_, error)| Err(error))
            }

            /// As [`read`](Self::read), but settings that have no text may have one of NCCL's, and those that
            /// cannot be parsed have their defaults and are returned with the errors.
            fn read_with(
                lookup: impl Fn(&str) -> Option<String>,
                of_nccl: impl Fn(&str) -> Option<NcclValue>,
            ) -> (Self, Vec<(&'static str, Error)>) {
                let (mut config, mut failures) = (Self::default(), Vec::new());
                $({
                    let own = set(lookup($name)).map(|text| ($name.to_owned(), text, None));
                    let given = own.or_else(|| {
                        let value = of_nccl($name)?;
                        Some((value.source(), value.text.clone(), Some(value)))
                    });
                    if let Some((source, text, of_nccl)) = given {
                        match parse(&source, &text, &$check) {
                            Ok(value) => {
                                config.$field = value;
                                config.given.insert($name);
                                config.of_nccl.extend(of_nccl.map(|value| ($name, value)));
                            }
                            Err(error) => failures.push(($name, error)),
                        }
                    }
                })*
                (config, failures)
            }

            /// The table of settings. `lookup` decides the origin: a variable that it returns a text for was
            /// set, unless the text is empty.
            #[doc(hidden)]
            pub fn table(&self, lookup: impl Fn(&str) -> Option<String>) -> Vec<SettingRow> {
                let default = Self::default();
                vec![$(SettingRow {
                    name: $name,
                    expected: ValueCheck::<$ty>::expected(&$check),
                    default: default.$field.show(),
                    value: self.$field.show(),
                    origin: if set(lookup($name)).is_some() { Origin::Environment } else { Origin::Default },
                    description: $description,
                }),*]
            }

            /// Names and values of the settings that must be equal on all ranks. With a tuning profile it
            /// also matters whether those that it may change were given.
            #[doc(hidden)]
            #[must_use]
            pub fn shared(&self) -> Vec<(String, String)> {
                let mut shared = Vec::new();
                let note = |name| {
                    let wins = self.tuning.is_some() && TUNED.contains(&name) && self.given.contains(name);
                    if wins { " (set)" } else { "" }
                };
                $($( let _ = stringify!($shared); shared.push(($name.to_owned(), self.$field.show() + note($name))); )?)*
                shared
            }
        }
    };
}

/// Default of `FLEXRING_IB_RAILS`. Estimated, not measured: four ports of 100 Gbit/s carry as much as one PCI
/// Express 4 or 5 slot of 16 lanes, and four ports of 400 Gbit/s more than one rank can add up on the host.
/// Each further rail needs queue pairs with every peer.
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

/// The settings that a tuning profile may change, unless they were given.
const TUNED: [&str; 3] = ["FLEXRING_SUBCHUNK", "FLEXRING_SLOTS", "FLEXRING_SOCKETS_PER_LINK"];

settings! {
    rank: Option<usize> = "FLEXRING_RANK", None, AnyValue,
        "Rank of this process, from 0. Unset: the rank that the launcher assigned (torchrun, Open MPI, MPICH, Slurm).";
    world_size: Option<usize> = "FLEXRING_WORLD_SIZE", None, AnyValue,
        "Number of ranks. Unset: the number that the launcher gives.";
    master_addr: Option<String> = "FLEXRING_MASTER_ADDR", None, AnyValue,
        "Host name or address of rank 0, where the ranks find each other.";
    master_port: Option<u16> = "FLEXRING_MASTER_PORT", None, AnyValue,
        "TCP port of rank 0, where the ranks find each other. Unset: one from 20000 to 30000 that follows from the name of the job, or one of two further ones if another process has it. More: docs/bootstrap.md.";
    secret: Option<SecretText> = "FLEXRING_SECRET", None, AnyValue,
        "Secret of the job, equal on all ranks, such as from `openssl rand -hex 32`: only processes that know it can join. Unset: random for jobs that a launcher starts on one node and unique ids; else none. More: docs/bootstrap.md.";
    secret_file: Option<String> = "FLEXRING_SECRET_FILE", None, AnyValue,
        "File that contains the secret of the job, instead of FLEXRING_SECRET. Only the user may be able to read it, or root and one group if it is root's.";
    #[shared yes]
    tls: Switch = "FLEXRING_TLS", Switch(false), AnyValue,
        "Whether connections between ranks are encrypted by TLS 1.3. Needs a secret of the job. RDMA devices cannot encrypt and are not used; memory that ranks of a node share is not encrypted. More: docs/bootstrap.md.";
    node: Option<String> = "FLEXRING_NODE", None, AnyValue,
        "Name of this rank's node; ranks with equal names share memory. Unset: derived from the machine, its network namespace and the user.";
    #[shared yes]
    algo: Algorithm = "FLEXRING_ALGO", Algorithm::Auto, AnyValue,
        "Planner that makes the schedule. `flexring plan --explain` prints which one auto selects, and why.";
    #[shared yes]
    dimensions: Option<Dimensions> = "FLEXRING_DIMENSIONS", None, AnyValue,
        "Dimensions of the hierarchical ring, the one of the nearest ranks first. Unset: the dimensions of the topology.";
    #[shared yes]
    servers: Option<Servers> = "FLEXRING_SERVERS", None, AnyValue,
        "Ranks that are parameter servers. Unset: the first rank of each node.";
    topology: Option<String> = "FLEXRING_TOPOLOGY", None, AnyValue,
        "Topology of the cluster: a file (TOML, or Slurm's topology.conf), or a short form such as 2+3 or 1@1G+1@500M. Unset: all nodes at one switch.";
    plan_file: Option<String> = "FLEXRING_PLAN_FILE", None, AnyValue,
        "JSON file of a schedule, as written by `flexring plan --write`. It is verified, and then used for all calls.";
    #[shared yes]
    tuning: Option<String> = "FLEXRING_TUNING", None, AnyValue,
        "File of a tuning profile that `flexring tune` wrote on this cluster; rank 0 reads it. Its links replace those of the topology, and auto takes from it what is not set. More: docs/tuning.md.";
    #[shared yes]
    adapt: Switch = "FLEXRING_ADAPT", Switch(false), AnyValue,
        "Whether auto plans again when the link of a node becomes slower or faster than the others. For vectors on the host, from three nodes on, if the settings name no algorithm, lowering, dimensions or plan file. More: docs/tuning.md.";
    #[shared yes]
    reproducible: Switch = "FLEXRING_REPRODUCIBLE", Switch(false), AnyValue,
        "Whether sums have the same bits for every algorithm, layout, transport and sub-chunk size. If 1, one rank adds all contributions, in rank order.";
    #[shared yes]
    direct: Size = "FLEXRING_DIRECT", Size(64 << 10), AnyValue,
        "Longest vector for which auto sends few messages in a row rather than few bytes. Not where ranks share memory. More: docs/schedules.md.";
    #[shared yes]
    lowering: Lowering = "FLEXRING_LOWERING", Lowering::Auto, AnyValue,
        "How the members of a group send their parts to its root. chain: each adds its part to what it receives, and sends the sum on. direct: each sends its part to the root. auto: by their nodes. More: docs/schedules.md.";
    #[shared yes]
    transport: TransportChoice = "FLEXRING_TRANSPORT", TransportChoice::Auto, AnyValue,
        "Transport between ranks. auto: shared memory within a node; between nodes RDMA if all ranks can use it, TCP if none can, else an error. auto-tcp: TCP instead of that error. shm, tcp, verbs: this one between all ranks.";
    #[shared yes]
    subchunk: Size = "FLEXRING_SUBCHUNK", Size(128 << 10), SUBCHUNKS,
        "Length of a sub-chunk, the unit of the pipeline, and of a slot of the pool.";
    #[shared yes]
    small: Size = "FLEXRING_SMALL", Size(4 << 10), UP_TO_64K,
        "Longest vector for which only the number of messages counts where ranks share no memory: one hop, or a binary tree of more than 16 ranks. In an all-to-all: all blocks of a rank together. More: docs/schedules.md.";
    #[shared yes]
    mailbox: Size = "FLEXRING_MAILBOX", Size(64 << 10), UP_TO_64K,
        "Longest vector that ranks of one node exchange through mailboxes in shared memory. This is an upper bound: lower limits follow from the numbers of ranks and cores. 0: never. More: docs/schedules.md.";
    slots: usize = "FLEXRING_SLOTS", 64, 2..=65536,
        "Number of slots in a rank's pool. Raised to the number of other ranks if all ranks share memory, and else to twice that number.";
    #[shared yes]
    sockets_per_link: usize = "FLEXRING_SOCKETS_PER_LINK", 1, 1..=16,
        "Number of TCP connections per link; sub-chunks are striped over them.";
    // What is in flight waits in the switch's queues, and sums are late by that time. Times by the links'
    // bound of 1 Gbit/s with 128K and 64K, 64 MiB: 1+1+2 1.05 and 1.02, 5+2+1 1.08 and 1.05, 3+3+4 1.03 and
    // 1.02, 1+1+1+1+1+1 1.02 and 1.00, 1+4 1.02 and 1.04; 16 MiB: 1.04 and 1.00, 1.07 and 1.04, 1.06 and
    // 1.04, 1.05 and 1.01, 1.01 and 1.00. 32K: 1.04, 1.06, 1.07 with 64 MiB on the first three.
    socket_buffer: Size = "FLEXRING_SOCKET_BUFFER", Size(64 << 10), AnyValue,
        "Mean number of bytes that a TCP connection between nodes may have in flight: busy connections get more, slow links less. More than bandwidth times delay only fills queues. 0: the kernel decides. More: docs/tuning.md.";
    socket_ifname: Option<String> = "FLEXRING_SOCKET_IFNAME", None, AnyValue,
        "Interfaces for TCP: a list of name prefixes. A leading = matches whole names, a leading ^ excludes. Unset: those that are not link-local, first the one that reaches rank 0, or a faster one. More: docs/bootstrap.md.";
    port_range: Option<ListeningPorts> = "FLEXRING_PORT_RANGE", None, AnyValue,
        "Ports of this node's listening sockets but rank 0's, which firewalls must allow: up to two for each address of a rank, and one more for each further communicator. Unset: the kernel chooses.";
    socket_family: Family = "FLEXRING_SOCKET_FAMILY", Family::Auto, AnyValue,
        "IP version of TCP links.";
    ibverbs: Option<String> = "FLEXRING_IBVERBS", None, AnyValue,
        "Name or path of the library libibverbs, which is opened when RDMA devices are first used. Unset: libibverbs.so.1.";
    ib_hca: Option<String> = "FLEXRING_IB_HCA", None, AnyValue,
        "RDMA devices: a list of name prefixes, each optionally with :port. A leading = matches whole names, a leading ^ excludes.";
    ib_rails: usize = "FLEXRING_IB_RAILS", IB_RAILS, 1..=8,
        "Largest number of RDMA ports that a rank uses. The nearest ports are used first.";
    #[shared yes]
    ib_qps_per_rail: Option<usize> = "FLEXRING_IB_QPS_PER_RAIL", None, 1..=8,
        "Number of queue pairs per link and rail. Use more than one if switches select paths by source port. Unset: 4 if some adapters use RoCE, 2 if some are bonds of ports, else 1.";
    // Two ranks of one virtual machine with Soft-RoCE, medians of 4 rounds: 8 KiB take 210 us eager and 262
    // with a CTS, 16 and 32 KiB the same both ways (396 to 410, 677 to 752), 64 KiB 1,402 and 1,250. Not
    // measured on adapters, where a copy of 8 KiB takes each rank less than 1 us, and a CTS half a round trip
    // of 2 to 4 us.
    #[shared yes]
    ib_eager: Size = "FLEXRING_IB_EAGER", Size(8 << 10), UP_TO_64K,
        "Longest RDMA message that is written to a buffer of the peer at once, for the first four of a call on a link. Longer ones wait for the address of their destination. More: docs/rdma.md.";
    ib_gid_index: Option<usize> = "FLEXRING_IB_GID_INDEX", None, 0..=255,
        "Index into the port's GID table of the GID that this rank uses. Unset: the best entry by RoCE version and IP version.";
    ib_family: Family = "FLEXRING_IB_FAMILY", Family::Auto, AnyValue,
        "IP version of the RoCE GID's address.";
    ib_pkey: usize = "FLEXRING_IB_PKEY", 0, 0..=65535,
        "Index into the port's table of partition keys.";
    ib_sl: usize = "FLEXRING_IB_SL", 0, 0..=15,
        "InfiniBand service level. On RoCE its lower three bits are the priority of VLAN frames.";
    ib_tc: usize = "FLEXRING_IB_TC", 0, 0..=255,
        "Traffic class of RoCE packets: the DSCP times four, plus the two ECN bits.";
    ib_timeout: Option<usize> = "FLEXRING_IB_TIMEOUT", None, 1..=31,
        "Time that an RDMA device waits for an acknowledgement before it retransmits: 4.096 microseconds times two to this power. Unset: 20, which is 4.3 s; for software devices 14, which is 67 ms.";
    ib_retries: usize = "FLEXRING_IB_RETRIES", 7, 0..=7,
        "Number of retransmissions before an RDMA device reports the link as broken. Software devices take 7 as unlimited; flexring uses 6 there.";
    ib_reconnect: Duration = "FLEXRING_IB_RECONNECT_MS", Duration::from_secs(10), AnyValue,
        "Time that a rank waits for a rail when no rail to a peer works, before the peer counts as lost. Broken rails are connected again in the background: docs/rdma.md.";
    // The default is NCCL's.
    ib_adaptive_routing: AdaptiveRouting = "FLEXRING_IB_ADAPTIVE_ROUTING", AdaptiveRouting::Auto, AnyValue,
        "Whether RDMA messages longer than 8 KiB are written apart from their immediate data, because InfiniBand switches route only writes without such data adaptively. auto: on InfiniBand ports.";
    register_shared: Switch = "FLEXRING_REGISTER_SHARED", Switch(false), AnyValue,
        "Whether host memory that the program registers becomes memory of the node, which its ranks read directly, by the rules of docs/c-api.md, Registered memory. If 0, it is registered with RDMA devices only.";
    ib_relaxed_ordering: Switch = "FLEXRING_IB_RELAXED_ORDERING", Switch(true), AnyValue,
        "Whether RDMA writes may pass each other on PCI Express. Faster on many machines; no effect if the device does not support it.";
    gpu: Option<usize> = "FLEXRING_GPU", None, AnyValue,
        "Index of the GPU for calls on GPU memory, among those that the process sees. Unset: the GPU whose CUDA context is current on the thread that creates the communicator, else the GPU of the first vector.";
    gpu_ctas: Option<usize> = "FLEXRING_GPU_CTAS", None, 1..=1024,
        "Largest number of thread blocks (CTAs) of 512 threads that a call keeps on the GPU. Unset: 32, and 64 if ranks share a GPU: docs/gpu.md.";
    gpu_ipc: Switch = "FLEXRING_GPU_IPC", Switch(true), AnyValue,
        "Whether ranks of one node read each other's GPU memory directly. If 0, messages pass through pinned host memory.";
    gpu_direct: GpuDirect = "FLEXRING_GPU_DIRECT", GpuDirect::Auto, AnyValue,
        "How RDMA devices reach GPU memory. dmabuf: by DMA-BUF. peer: by peer memory. off: through pinned host memory. auto: the first of these that works.";
    gdr_level: GdrLevel = "FLEXRING_GDR_LEVEL", GdrLevel::Pxb, AnyValue,
        "Largest distance between an RDMA device and a GPU whose memory it accesses: LOC (never), PIX (one PCI switch), PXB (several), PHB (one NUMA node) or SYS (any). Farther: through host memory. Applies if FLEXRING_GPU_DIRECT is auto.";
    timeout: Duration = "FLEXRING_TIMEOUT_MS", Duration::from_secs(300), AnyValue,
        "Time that a call waits for other ranks before it fails.";
    connect_timeout: Duration = "FLEXRING_CONNECT_TIMEOUT_MS", Duration::from_secs(60), AnyValue,
        "Time that the creation of a communicator waits for all ranks to join.";
    heartbeat: Duration = "FLEXRING_HEARTBEAT_MS", Duration::from_millis(500), AnyValue,
        "Interval of heartbeats. A rank that sends none for twenty intervals is considered dead.";
    spin_us: usize = "FLEXRING_SPIN_US", 200, AnyValue,
        "Time in microseconds that a wait spins before it sleeps. While other programs compute on its core, it sleeps at once.";
    threads: usize = "FLEXRING_THREADS", 1, 1..=64,
        "Number of threads that add and copy vectors on the host in a call of this rank, the caller's included; at most the node's cores divided by its ranks. Sums have the same bits for every number. More: docs/rdma.md.";
    #[shared yes]
    trace: Option<String> = "FLEXRING_TRACE", None, AnyValue,
        "File of a timeline: each rank writes what it did when, as Chrome trace events, with `.rank` and its number before the extension `.json`, when its communicator ends. `flexring trace` merges these files.";
    trace_events: usize = "FLEXRING_TRACE_EVENTS", 1 << 18, 1024..=1 << 24,
        "Number of spans that a rank keeps for its timeline, of 96 bytes each. Further ones replace the oldest.";
    log: LogFilter = "FLEXRING_LOG", LogLevel::Warn.into(), AnyValue,
        "Most detailed level of messages that flexring writes to standard error, and other levels for areas of it, as in tcp=debug,bootstrap=trace.";
    // For tests and benchmarks: no user knows a better value.
    => hidden {
        /// Index into the GID table of an InfiniBand port of the GID by which routers reach the port from
        /// other subnets. Used if that GID contains a FLID. The default is NCCL's.
        ib_flid_gid_index: usize = 1;
        /// Preferred RoCE version of the GID. The other version is used if a port has no GID of this one.
        ib_roce_version: usize = 2;
        /// Longest RDMA message that is written together with its immediate data although adaptive routing
        /// applies. The default is NCCL's.
        ib_ar_threshold: Size = Size(8 << 10);
        /// How RDMA devices reach memory that is not registered: by default as is faster, measured when a
        /// communicator is created.
        ib_register: Registration = Registration::Auto;
        /// Instruction set of reductions on the host.
        simd: Simd = Simd::Auto;
    }
}

/// How the names of all settings begin.
const PREFIX: &str = "FLEXRING_";

/// The longest time of a setting, 136 years. Rust programs and messages of other ranks can give times that
/// overflow an `Instant`.
pub const LONGEST_TIME: Duration = Duration::from_secs(1 << 32);

/// The text of a variable that is set, and not to an empty text.
fn set(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

/// Parses `text` as the value of the setting `name`.
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
        let (config, failures) = Self::read_partly(environment);
        failures.into_iter().next().map_or(Ok(config), |(_, error)| Err(error))
    }
}

/// What flexring's crates ask of the settings.
#[doc(hidden)]
impl Config {
    /// Reads every setting through `lookup`, or what NCCL's variables and files have for it. Settings that
    /// cannot be parsed have their defaults, and are returned with the errors, which name where the text was
    /// read.
    pub fn read_partly(lookup: impl Fn(&str) -> Option<String>) -> (Self, Vec<(&'static str, Error)>) {
        let nccl = NcclSettings::read(&lookup);
        Self::read_with(&lookup, |name| nccl.value(name, &lookup))
    }

    /// Where the value of this setting was read: its own variable, or one of NCCL's and the file that has it.
    #[must_use]
    pub fn source(&self, name: &str) -> String {
        self.of_nccl.get(name).map_or_else(|| name.to_owned(), NcclValue::source)
    }

    /// The settings with values of NCCL's, as in `FLEXRING_IB_TC=106 (NCCL_IB_TC)`.
    #[must_use]
    pub fn nccl_settings(&self) -> Vec<String> {
        let used = |(name, value): (&&str, &NcclValue)| format!("{name}={} ({})", value.text, value.source());
        self.of_nccl.iter().map(used).collect()
    }

    /// These settings, in which no time is longer than [`LONGEST_TIME`].
    pub fn with_bounded_times(&self) -> Self {
        let bounded = |time: Duration| time.min(LONGEST_TIME);
        Self {
            ib_reconnect: bounded(self.ib_reconnect),
            timeout: bounded(self.timeout),
            connect_timeout: bounded(self.connect_timeout),
            heartbeat: bounded(self.heartbeat),
            ..self.clone()
        }
    }

    /// Time that a wait spins before it sleeps.
    #[must_use]
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us as u64)
    }

    /// Number of slots in a rank's pool: the setting, but at least one per peer if all ranks share memory,
    /// and else two: the slots are divided equally among the links, and a link that stages messages needs one
    /// for each direction. `local_ranks` of the `world` ranks share memory, this rank included.
    #[must_use]
    pub fn slots_for(&self, local_ranks: usize, world: usize) -> usize {
        let per_peer = if local_ranks >= world { 1 } else { 2 };
        self.slots.max(per_peer * world.saturating_sub(1))
    }

    /// Whether algorithm, lowering and plan are left to flexring.
    #[must_use]
    pub fn chooses_no_plan(&self) -> bool {
        self.algo == Algorithm::Auto && self.lowering == Lowering::Auto && self.plan_file.is_none()
    }

    /// The names among `names` that start with `FLEXRING_` but are no settings, which are most likely
    /// misspelt, each with the setting that has almost this name, if there is one.
    pub fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<(String, Option<&'static str>)> {
        let unknown = names.filter(|name| Self::is_unknown(name));
        unknown.map(|name| (name.clone(), Self::closest(&name))).collect()
    }

    /// A sentence for each of the [`unknown_variables`](Self::unknown_variables) of this process.
    #[must_use]
    pub fn warnings() -> Vec<String> {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        let sentence = |(name, closest): (String, Option<&str>)| {
            let guess = closest.map(|closest| format!("; did you mean {closest}?")).unwrap_or_default();
            format!("{name} is not a flexring setting{guess}")
        };
        Self::unknown_variables(names).into_iter().map(sentence).collect()
    }

    /// Whether this name looks like a setting but is not one.
    #[must_use]
    pub fn is_unknown(name: &str) -> bool {
        name.starts_with(PREFIX) && !Self::known(name)
    }

    /// The setting with almost this name, if there is one: with up to a third of the letters wrong, or with
    /// an end that `name` lacks.
    fn closest(name: &str) -> Option<&'static str> {
        let own = name.strip_prefix(PREFIX).filter(|own| !own.is_empty())?;
        let distance = |known: &str| strsim::damerau_levenshtein(known, name);
        let is_close = |known: &&&str| {
            distance(known) <= (own.len() / 3).max(1) || known.starts_with(&format!("{name}_"))
        };
        Self::NAMES.iter().filter(is_close).min_by_key(|known| distance(known)).copied()
    }

    fn known(name: &str) -> bool {
        // Read by the bootstrap, by build.rs, by the Python module and by the tests.
        let others = [
            "FLEXRING_UNIQUE_ID",
            "FLEXRING_CUDA_KERNELS",
            "FLEXRING_CUDA_WHEELS",
            "FLEXRING_WHEEL_CARGO_ARGS",
            "FLEXRING_WHEEL_FROM",
            "FLEXRING_BLESS",
            "FLEXRING_LIBRARY",
            "FLEXRING_FUZZ_SECONDS",
            "FLEXRING_TEST_EFFORT",
            "FLEXRING_TEST_FAULT_POINT",
            "FLEXRING_TEST_FAULT_FILE",
        ];
        Self::NAMES.contains(&name) || others.contains(&name)
    }
}

/// Reads a variable from this process's environment. Text that is not Unicode is converted lossily.
#[must_use]
pub fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}
