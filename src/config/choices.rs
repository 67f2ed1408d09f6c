//! The settings that are a choice among words.
//!
//! Owns the words and what each of them stands for. Must not know which settings take them.

use super::values::SettingValue;

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident: $expected:literal { $($(#[$vdoc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant),* }
        impl $name {
            /// Every choice there is.
            pub const ALL: &[Self] = &[$(Self::$variant),*];
            /// The word for this choice.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
            /// The choice that `text` names, in any case.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                $(if text.eq_ignore_ascii_case($text) { return Some(Self::$variant); })*
                None
            }
        }
        impl SettingValue for $name {
            const EXPECTED: &'static str = $expected;
            fn parse(text: &str) -> Option<Self> { Self::parse(text) }
            fn show(&self) -> String { self.name().to_owned() }
        }
    };
}

choices! {
    /// Which planner makes the schedule.
    Algorithm: "auto, ring, rabenseifner, hierarchical, blueconnect, flexreduce, weighted, tree, star, local-master or parameter-server" {
        /// Chosen by size and topology.
        Auto = "auto",
        /// One level, a group per rank.
        Ring = "ring",
        /// Pairs that halve what they hold.
        Rabenseifner = "rabenseifner",
        /// A level of rings per dimension.
        Hierarchical = "hierarchical",
        /// The same, with the dimensions of a symmetric topology.
        Blueconnect = "blueconnect",
        /// A level per level of the tree, spans as uneven as the tree.
        Flexreduce = "flexreduce",
        /// The same, with spans weighed by bandwidth.
        Weighted = "weighted",
        /// A binary tree.
        Tree = "tree",
        /// Everybody onto one rank.
        Star = "star",
        /// Each node onto its master, then a ring of masters.
        LocalMaster = "local-master",
        /// Everybody onto some ranks.
        ParameterServer = "parameter-server",
    }
}
choices! {
    /// How groups become transfers.
    Lowering: "auto, chain or direct" {
        /// Direct where all ranks share a node or have one each, a chain otherwise.
        Auto = "auto",
        /// A participant adds its own part and hands the sum to the next one.
        Chain = "chain",
        /// Every participant sends to the root, which adds all in one pass.
        Direct = "direct",
    }
}
choices! {
    /// What carries the bytes.
    TransportChoice: "auto, shm, tcp or verbs" {
        /// Shared memory within a node; between nodes RDMA where all ranks can, else TCP.
        Auto = "auto",
        /// Shared memory only: an error if the ranks do not share one node.
        Shm = "shm",
        /// TCP even within a node.
        Tcp = "tcp",
        /// RDMA even within a node: an error where a rank can use no port.
        Verbs = "verbs",
    }
}
choices! {
    /// Which Internet protocol addresses are of.
    Family: "auto, ipv4 or ipv6" {
        /// IPv4 where there is such an address, else IPv6.
        Auto = "auto",
        /// IPv4 only.
        Ipv4 = "ipv4",
        /// IPv6 only.
        Ipv6 = "ipv6",
    }
}
choices! {
    /// The instruction set of the host reductions.
    Simd: "auto, scalar, avx2, avx512 or neon" {
        /// The best that this processor has.
        Auto = "auto",
        /// What the compiler makes of the baseline instruction set.
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
    /// How much flexring says on standard error.
    LogLevel: "off, error, warn, info, debug or trace" {
        /// Nothing.
        Off = "off",
        /// What made a call fail.
        Error = "error",
        /// And what a user should change.
        Warn = "warn",
        /// And what was chosen, once per communicator.
        Info = "info",
        /// And every connection and program.
        Debug = "debug",
        /// And every call.
        Trace = "trace",
    }
}
choices! {
    /// How memory that nobody registered reaches an RDMA device.
    Registration: "auto, subchunk or stage" {
        /// Whichever was cheaper when the communicator was made.
        Auto = "auto",
        /// Each sub-chunk's memory is registered as a stage of the pipeline.
        Subchunk = "subchunk",
        /// Each sub-chunk is copied through a slot that is registered.
        Stage = "stage",
    }
}
choices! {
    /// Which ways an RDMA device may take to a GPU's memory.
    GpuDirect: "auto, dmabuf, peer or off" {
        /// DMA-BUF, else peer memory, else pinned host memory.
        Auto = "auto",
        /// Through a DMA-BUF that the GPU's driver exports.
        Dmabuf = "dmabuf",
        /// Through the peer memory module of the GPU's driver.
        Peer = "peer",
        /// Not at all: through pinned host memory.
        Off = "off",
    }
}
