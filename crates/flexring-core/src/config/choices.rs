//! The types of settings that are a choice among names.
//!
//! Owns the names, and what each of them means.

use super::values::SettingValue;
use std::borrow::Cow;
use strum::{EnumString, IntoStaticStr, VariantArray};

/// `a, b or c`.
fn list(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        names => names.concat(),
    }
}

/// Implements a choice among the names of an enum's variants.
macro_rules! choice {
    ($($name:ident),* $(,)?) => {$(
        impl $name {
            /// All choices, in the order of documentation.
            pub const ALL: &[Self] = Self::VARIANTS;
            /// The name of this choice.
            #[must_use]
            pub fn name(self) -> &'static str {
                self.into()
            }
            /// The choice with this name, in upper or lower case.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
        }
        impl SettingValue for $name {
            fn expected() -> Cow<'static, str> {
                list(&Self::ALL.iter().map(|choice| choice.name()).collect::<Vec<_>>()).into()
            }
            fn parse(text: &str) -> Option<Self> {
                Self::parse(text)
            }
            fn show(&self) -> String {
                self.name().to_owned()
            }
        }
    )*};
}

choice!(
    Algorithm,
    Lowering,
    TransportChoice,
    Family,
    Simd,
    LogArea,
    LogLevel,
    Registration,
    AdaptiveRouting,
    GpuDirect,
    GdrLevel,
);

/// The planner that makes the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
pub enum Algorithm {
    /// Selected by size and topology.
    Auto,
    /// One level, a group per rank.
    Ring,
    /// Recursive halving: in each level pairs of ranks split the span that they share.
    Rabenseifner,
    /// A level of rings per dimension of a grid of ranks.
    Hierarchical,
    /// The hierarchical ring, with the dimensions of a symmetric topology.
    Blueconnect,
    /// A level per level of the topology tree; spans are as uneven as the tree.
    Flexreduce,
    /// Flexreduce, with spans weighted by bandwidth.
    Weighted,
    /// A binary tree of ranks.
    Tree,
    /// All ranks send to one rank.
    Star,
    /// The ranks of a node send to its master; the masters form a ring.
    LocalMaster,
    /// All ranks send to a few ranks, each of which reduces a part.
    ParameterServer,
    /// Trees that use all links of a graph.
    Forest,
}

/// How the groups of a schedule become transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
pub enum Lowering {
    /// Direct for groups within one node, and for groups of at most 16 participants on nodes of their own;
    /// else a chain.
    Auto,
    /// Each participant adds its own part and sends the sum to the next one.
    Chain,
    /// Every participant sends to the root, which adds all parts in one pass.
    Direct,
}

/// The transport between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
pub enum TransportChoice {
    /// Shared memory within a node. Between nodes RDMA if all ranks can use it, or TCP if none can. An error
    /// if only some can, or if RDMA fails.
    Auto,
    /// As auto, but TCP with a warning where auto is an error.
    AutoTcp,
    /// Shared memory only. An error if the ranks do not share one node.
    Shm,
    /// TCP, within a node, too.
    Tcp,
    /// RDMA, within a node, too. An error if a rank can use no port.
    Verbs,
}

#[doc(hidden)]
impl TransportChoice {
    /// Whether ranks of one node share memory.
    #[must_use]
    pub fn shares_memory(self) -> bool {
        matches!(self, Self::Auto | Self::AutoTcp | Self::Shm)
    }

    /// Whether ranks may be linked by TCP.
    #[must_use]
    pub fn admits_tcp(self) -> bool {
        matches!(self, Self::Auto | Self::AutoTcp | Self::Tcp)
    }

    /// Whether ranks may be linked by RDMA.
    #[must_use]
    pub fn admits_rdma(self) -> bool {
        matches!(self, Self::Auto | Self::AutoTcp | Self::Verbs)
    }
}

/// IP version of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
pub enum Family {
    /// IPv4 if there is such an address, else IPv6.
    Auto,
    /// IPv4 only.
    Ipv4,
    /// IPv6 only.
    Ipv6,
}

/// Instruction set of reductions on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
#[non_exhaustive]
pub enum Simd {
    /// The widest that this processor supports.
    Auto,
    /// The baseline instruction set of the target; the compiler may vectorize.
    Scalar,
    /// 256-bit AVX2 with F16C.
    Avx2,
    /// 512-bit AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// 128-bit NEON.
    Neon,
}

/// Level of detail of messages on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
#[non_exhaustive]
pub enum LogLevel {
    /// No messages.
    Off,
    /// Errors that made a call fail.
    Error,
    /// Also problems that the user should fix.
    Warn,
    /// Also the choices of each communicator, once.
    Info,
    /// Also every connection and program.
    Debug,
    /// Also every call.
    Trace,
}

/// A part of flexring whose messages can have a level of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
#[non_exhaustive]
pub enum LogArea {
    /// Rendezvous, failure detection, shrinking.
    Bootstrap,
    /// Communicators and their calls.
    Calls,
    /// GPUs.
    Gpu,
    /// Buffers and registration.
    Memory,
    /// Topologies, plans and tuning profiles.
    Plan,
    /// Links over shared memory.
    Shm,
    /// Links over TCP.
    Tcp,
    /// Links over RDMA devices.
    Verbs,
}

/// How an RDMA device reaches memory that is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
pub enum Registration {
    /// The faster of the two, measured when the communicator is created.
    Auto,
    /// Each sub-chunk's memory is registered, as a stage of the pipeline.
    Subchunk,
    /// Each sub-chunk is copied through a registered slot.
    Stage,
}

/// Whether long messages are written so that switches may route them adaptively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(ascii_case_insensitive)]
pub enum AdaptiveRouting {
    /// On InfiniBand ports.
    #[strum(serialize = "auto")]
    Auto,
    /// On no port.
    #[strum(serialize = "0")]
    Off,
    /// On all ports.
    #[strum(serialize = "1")]
    On,
}

/// The largest distance between an RDMA device and a GPU whose memory it accesses, in NCCL's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "UPPERCASE", ascii_case_insensitive)]
pub enum GdrLevel {
    /// No device accesses memory of GPUs.
    Loc,
    /// Below the same PCI switch.
    Pix,
    /// Below several PCI switches.
    Pxb,
    /// On the same NUMA node, across the root complex.
    Phb,
    /// Anywhere.
    Sys,
}

/// How RDMA devices may reach the memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", ascii_case_insensitive)]
#[non_exhaustive]
pub enum GpuDirect {
    /// DMA-BUF, else peer memory, else pinned host memory.
    Auto,
    /// Through a DMA-BUF that the GPU's driver exports.
    Dmabuf,
    /// Through the peer memory module of the GPU's driver.
    Peer,
    /// Not directly: data is copied through pinned host memory.
    Off,
}
