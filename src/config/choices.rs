//! The types of settings that are a choice among names.
//!
//! Owns the names, and what each of them means. Must not know which settings use them.

use super::values::SettingValue;
use std::borrow::Cow;

/// `a, b or c`.
fn list(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        names => names.concat(),
    }
}

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant),* }
        impl $name {
            /// All choices, in the order of documentation.
            pub const ALL: &[Self] = &[$(Self::$variant),*];
            /// The name of this choice.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
            /// The choice with this name, in upper or lower case.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                $(if text.eq_ignore_ascii_case($text) { return Some(Self::$variant); })*
                None
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
    };
}

choices! {
    /// The planner that makes the schedule.
    Algorithm {
        /// Selected by size and topology.
        Auto = "auto",
        /// One level, a group per rank.
        Ring = "ring",
        /// Recursive halving: in each level pairs of ranks split the span that they share.
        Rabenseifner = "rabenseifner",
        /// A level of rings per dimension of a grid of ranks.
        Hierarchical = "hierarchical",
        /// The hierarchical ring, with the dimensions of a symmetric topology.
        Blueconnect = "blueconnect",
        /// A level per level of the topology tree; spans are as uneven as the tree.
        Flexreduce = "flexreduce",
        /// Flexreduce, with spans weighted by bandwidth.
        Weighted = "weighted",
        /// A binary tree of ranks.
        Tree = "tree",
        /// All ranks send to one rank.
        Star = "star",
        /// The ranks of a node send to its master; the masters form a ring.
        LocalMaster = "local-master",
        /// All ranks send to a few ranks, each of which reduces a part.
        ParameterServer = "parameter-server",
    }
}
choices! {
    /// How the groups of a schedule become transfers.
    Lowering {
        /// Direct if all ranks share a node or each has its own, else a chain.
        Auto = "auto",
        /// Each participant adds its own part and sends the sum to the next one.
        Chain = "chain",
        /// Every participant sends to the root, which adds all parts in one pass.
        Direct = "direct",
    }
}
choices! {
    /// The transport between ranks.
    TransportChoice {
        /// Shared memory within a node; between nodes RDMA if all ranks can use it, else TCP.
        Auto = "auto",
        /// Shared memory only. An error if the ranks do not share one node.
        Shm = "shm",
        /// TCP, within a node, too.
        Tcp = "tcp",
        /// RDMA, within a node, too. An error if a rank can use no port.
        Verbs = "verbs",
    }
}
choices! {
    /// IP version of an address.
    Family {
        /// IPv4 if there is such an address, else IPv6.
        Auto = "auto",
        /// IPv4 only.
        Ipv4 = "ipv4",
        /// IPv6 only.
        Ipv6 = "ipv6",
    }
}
choices! {
    /// Instruction set of reductions on the host.
    Simd {
        /// The widest that this processor supports.
        Auto = "auto",
        /// The baseline instruction set of the target; the compiler may vectorize.
        Scalar = "scalar",
        /// 256-bit AVX2 with F16C.
        Avx2 = "avx2",
        /// 512-bit AVX-512 (F, BW, DQ, VL).
        Avx512 = "avx512",
        /// 128-bit NEON.
        Neon = "neon",
    }
}
choices! {
    /// Level of detail of messages on standard error.
    LogLevel {
        /// No messages.
        Off = "off",
        /// Errors that made a call fail.
        Error = "error",
        /// Also problems that the user should fix.
        Warn = "warn",
        /// Also the choices of each communicator, once.
        Info = "info",
        /// Also every connection and program.
        Debug = "debug",
        /// Also every call.
        Trace = "trace",
    }
}
choices! {
    /// How an RDMA device reaches memory that is not registered.
    Registration {
        /// The faster of the two, measured when the communicator is created.
        Auto = "auto",
        /// Each sub-chunk's memory is registered, as a stage of the pipeline.
        Subchunk = "subchunk",
        /// Each sub-chunk is copied through a registered slot.
        Stage = "stage",
    }
}
choices! {
    /// How RDMA devices may reach the memory of a GPU.
    GpuDirect {
        /// DMA-BUF, else peer memory, else pinned host memory.
        Auto = "auto",
        /// Through a DMA-BUF that the GPU's driver exports.
        Dmabuf = "dmabuf",
        /// Through the peer memory module of the GPU's driver.
        Peer = "peer",
        /// Not directly: data is copied through pinned host memory.
        Off = "off",
    }
}
