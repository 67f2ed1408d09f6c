//! The settings: one entry each, with name, type, default and sentence.
//!
//! Owns every environment variable that flexring reads as a setting. Nothing else in the crate calls
//! `getenv` for one (launchers' own variables, such as torchrun's, are the bootstrap's business). Must not
//! know what the settings do.

use crate::error::{Error, ErrorKind, Result};
use std::fmt;
use std::time::Duration;

/// A size in bytes; `K`, `M` and `G` are binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

impl Size {
    /// Parses `4096`, `512K`, `1M` or `2G`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (digits, shift) = match text.char_indices().last()? {
            (at, 'k' | 'K') => (&text[..at], 10),
            (at, 'm' | 'M') => (&text[..at], 20),
            (at, 'g' | 'G') => (&text[..at], 30),
            _ => (text, 0),
        };
        let number: usize = digits.parse().ok()?;
        number.checked_mul(1 << shift).map(Self)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n > 0 && n % (1 << 30) == 0 => write!(f, "{}G", n >> 30),
            n if n > 0 && n % (1 << 20) == 0 => write!(f, "{}M", n >> 20),
            n if n > 0 && n % (1 << 10) == 0 => write!(f, "{}K", n >> 10),
            n => write!(f, "{n}"),
        }
    }
}

/// How a setting's text becomes its value.
trait Value: Sized {
    /// What the reader of an error message should write instead.
    const EXPECTED: &'static str;
    fn parse(text: &str) -> Option<Self>;
    fn show(&self) -> String;
}

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
        impl Value for $name {
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
    TransportChoice: "auto, shm or tcp" {
        /// Shared memory within a node, TCP between nodes.
        Auto = "auto",
        /// Shared memory only: an error if the ranks do not share one node.
        Shm = "shm",
        /// TCP even within a node.
        Tcp = "tcp",
    }
}
choices! {
    /// Which Internet protocol TCP links use.
    Family: "auto, ipv4 or ipv6" {
        /// IPv4 where the interface has it, else IPv6.
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

impl Value for Size {
    const EXPECTED: &'static str = "a number of bytes such as 4096, 512K or 1M";
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for usize {
    const EXPECTED: &'static str = "a whole number";
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok()
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for Option<usize> {
    const EXPECTED: &'static str = "a whole number";
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().map(Some)
    }
    fn show(&self) -> String {
        self.map_or_else(|| "unset".to_owned(), |value| value.to_string())
    }
}

impl Value for Option<u16> {
    const EXPECTED: &'static str = "a port number from 1 to 65535";
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().filter(|port| *port != 0).map(Some)
    }
    fn show(&self) -> String {
        self.map_or_else(|| "unset".to_owned(), |value| value.to_string())
    }
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

impl Value for Switch {
    const EXPECTED: &'static str = "0 or 1";
    fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "0" => Some(Self(false)),
            "1" => Some(Self(true)),
            _ => None,
        }
    }
    fn show(&self) -> String {
        u8::from(self.0).to_string()
    }
}

/// The dimensions of a grid of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dimensions(pub Vec<usize>);

impl Value for Option<Dimensions> {
    const EXPECTED: &'static str = "whole numbers from 1 joined by x, such as 4x2";
    fn parse(text: &str) -> Option<Self> {
        let numbers = text.trim().split(['x', 'X']).map(|part| part.trim().parse().ok().filter(|n| *n > 0));
        numbers.collect::<Option<Vec<usize>>>().map(|numbers| Some(Dimensions(numbers)))
    }
    fn show(&self) -> String {
        let joined =
            |numbers: &Dimensions| numbers.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
        self.as_ref().map_or_else(|| "unset".to_owned(), joined)
    }
}

/// A list of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Servers(pub Vec<usize>);

impl Value for Option<Servers> {
    const EXPECTED: &'static str = "ranks joined by commas, such as 0,4";
    fn parse(text: &str) -> Option<Self> {
        let ranks = text.trim().split(',').map(|part| part.trim().parse().ok());
        ranks.collect::<Option<Vec<usize>>>().map(|ranks| Some(Servers(ranks)))
    }
    fn show(&self) -> String {
        let joined = |ranks: &Servers| ranks.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        self.as_ref().map_or_else(|| "unset".to_owned(), joined)
    }
}

impl Value for Option<String> {
    const EXPECTED: &'static str = "a text that is not empty";
    fn parse(text: &str) -> Option<Self> {
        (!text.trim().is_empty()).then(|| Some(text.trim().to_owned()))
    }
    fn show(&self) -> String {
        self.clone().unwrap_or_else(|| "unset".to_owned())
    }
}

/// Milliseconds in the environment.
impl Value for Duration {
    const EXPECTED: &'static str = "a number of milliseconds, at least 1";
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().filter(|ms| *ms > 0).map(Self::from_millis)
    }
    fn show(&self) -> String {
        self.as_millis().to_string()
    }
}

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
pub struct Row {
    /// The variable.
    pub name: &'static str,
    /// What it takes.
    pub expected: &'static str,
    /// Its default, as one would write it.
    pub default: String,
    /// Its value here.
    pub value: String,
    /// Where that value came from.
    pub origin: Origin,
    /// What it does.
    pub sentence: &'static str,
}

macro_rules! settings {
    ($( $(#[agree $agree:tt])? $field:ident: $ty:ty = $name:literal, $default:expr, $check:expr, $sentence:literal; )*) => {
        /// Every setting, with its value for this process.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config { $(#[doc = $sentence] pub $field: $ty,)* }

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
                    config.$field = <$ty as Value>::parse(&text)
                        .filter($check)
                        .ok_or_else(|| unparsable($name, &text, expected::<$ty>($name)))?;
                })*
                Ok(config)
            }

            /// The table: what each setting is, its value in this configuration, and where `lookup` says it came from.
            pub fn table(&self, lookup: impl Fn(&str) -> Option<String>) -> Vec<Row> {
                let default = Self::default();
                vec![$(Row {
                    name: $name,
                    expected: expected::<$ty>($name),
                    default: default.$field.show(),
                    value: self.$field.show(),
                    origin: if lookup($name).is_some() { Origin::Environment } else { Origin::Default },
                    sentence: $sentence,
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

fn any<T>(_: &T) -> bool {
    true
}

/// What `name` takes; the bounds that a type alone does not tell are told here.
fn expected<T: Value>(name: &str) -> &'static str {
    match name {
        "FLEXRING_SUBCHUNK" => "a number of bytes from 4K to 64M in multiples of 4K, such as 512K",
        "FLEXRING_SLOTS" => "a whole number from 2 to 65536",
        "FLEXRING_SOCKETS_PER_LINK" => "a whole number from 1 to 16",
        "FLEXRING_SMALL" => "a number of bytes up to 64K, such as 4K",
        _ => T::EXPECTED,
    }
}

settings! {
    rank: Option<usize> = "FLEXRING_RANK", None, any,
        "This process's rank, from 0; unset, the launcher's (torchrun, Open MPI, MPICH, Slurm) is used.";
    world_size: Option<usize> = "FLEXRING_WORLD_SIZE", None, any,
        "How many ranks there are; unset, the launcher's is used.";
    master_addr: Option<String> = "FLEXRING_MASTER_ADDR", None, any,
        "Host name or address of rank 0, where the ranks meet.";
    master_port: Option<u16> = "FLEXRING_MASTER_PORT", None, any,
        "TCP port of rank 0, where the ranks meet.";
    node: Option<String> = "FLEXRING_NODE", None, any,
        "Name of the node that this rank is on; ranks with equal names share memory. Unset, the machine and its network namespace tell.";
    #[agree yes]
    algo: Algorithm = "FLEXRING_ALGO", Algorithm::Auto, any,
        "Which planner makes the schedule; `flexring plan --explain` says what auto chooses and why.";
    #[agree yes]
    dimensions: Option<Dimensions> = "FLEXRING_DIMENSIONS", None, any,
        "Dimensions of the hierarchical ring, the nearest ranks first; unset, those of the topology.";
    #[agree yes]
    servers: Option<Servers> = "FLEXRING_SERVERS", None, any,
        "Ranks that are parameter servers; unset, the first rank of each node.";
    topology: Option<String> = "FLEXRING_TOPOLOGY", None, any,
        "Where the ranks are: a file (TOML, or Slurm's topology.conf), or a short form such as 2+3 or 1@1G+1@500M. Unset, nodes at one switch.";
    plan_file: Option<String> = "FLEXRING_PLAN_FILE", None, any,
        "A schedule in JSON, as `flexring plan --write` makes it, to be used for everything; it is verified first.";
    #[agree yes]
    reproducible: Switch = "FLEXRING_REPRODUCIBLE", Switch(false), any,
        "Whether sums have the same bits whatever the algorithm, layout, transport and sub-chunk size: all contributions are added in rank order by one rank.";
    #[agree yes]
    direct: Size = "FLEXRING_DIRECT", Size(64 << 10), any,
        "Vectors of at most this many bytes go straight between all ranks, where FLEXRING_ALGO is auto and every node has one rank.";
    #[agree yes]
    lowering: Lowering = "FLEXRING_LOWERING", Lowering::Auto, any,
        "How the groups of a schedule become transfers.";
    #[agree yes]
    transport: TransportChoice = "FLEXRING_TRANSPORT", TransportChoice::Auto, any,
        "What carries the bytes.";
    #[agree yes]
    subchunk: Size = "FLEXRING_SUBCHUNK", Size(128 << 10),
        |size: &Size| (4096..=64 << 20).contains(&size.0) && size.0.is_multiple_of(4096),
        "Bytes of one sub-chunk, the grain of the pipeline, and of one slot of the pool.";
    #[agree yes]
    small: Size = "FLEXRING_SMALL", Size(4 << 10), |size: &Size| size.0 <= 64 << 10,
        "Vectors of at most this many bytes take the path for small messages where all ranks share one node.";
    slots: usize = "FLEXRING_SLOTS", 64, |slots: &usize| (2..=65536).contains(slots),
        "Slots in a rank's pool; raised to two per peer if that is more.";
    #[agree yes]
    sockets_per_link: usize = "FLEXRING_SOCKETS_PER_LINK", 1, |sockets: &usize| (1..=16).contains(sockets),
        "TCP connections that one link stripes its sub-chunks over.";
    // Behind links of 1 Gbit/s the kernel's own 4M fill the switch's queues, and acknowledgements wait in them:
    // 1+1+1 with a node at 500 Mbit/s, 64 MiB: median 1133 to 1152 ms, with 128K 1125 ms (the link allows 1123).
    socket_buffer: Size = "FLEXRING_SOCKET_BUFFER", Size(128 << 10), any,
        "Bytes that the kernel may hold for one TCP connection until the peer has acknowledged them; more than bandwidth times delay of one connection only fills queues. 0 leaves it to the kernel.";
    socket_ifname: Option<String> = "FLEXRING_SOCKET_IFNAME", None, any,
        "Interfaces for TCP: a list of name prefixes; a leading = takes whole names, a leading ^ excludes.";
    socket_family: Family = "FLEXRING_SOCKET_FAMILY", Family::Auto, any,
        "Which Internet protocol TCP links use.";
    timeout: Duration = "FLEXRING_TIMEOUT_MS", Duration::from_secs(300), any,
        "How long any call waits for other ranks before it fails.";
    connect_timeout: Duration = "FLEXRING_CONNECT_TIMEOUT_MS", Duration::from_secs(60), any,
        "How long creating a communicator waits for all ranks to come.";
    heartbeat: Duration = "FLEXRING_HEARTBEAT_MS", Duration::from_millis(500), any,
        "How often a rank says that it lives; silent for twenty of these, it counts as dead.";
    spin_us: usize = "FLEXRING_SPIN_US", 200, any,
        "Microseconds that a wait spins before it sleeps.";
    simd: Simd = "FLEXRING_SIMD", Simd::Auto, any,
        "The instruction set of the host reductions.";
    log: LogLevel = "FLEXRING_LOG", LogLevel::Warn, any,
        "How much flexring says on standard error.";
}

fn unparsable(name: &str, text: &str, expected: &str) -> Error {
    Error::new(ErrorKind::InvalidSetting, format!("{name}=\"{text}\" cannot be used: expected {expected}"))
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

    /// Variables that start like ours and are none of them: most likely misspelt.
    pub fn strangers(names: impl Iterator<Item = String>) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config> {
        Config::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, text)| (*text).to_owned()))
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(read(&[]).expect("defaults are valid"), Config::default());
    }

    #[test]
    fn every_value_is_read() {
        let config = read(&[
            ("FLEXRING_RANK", "3"),
            ("FLEXRING_ALGO", "RING"),
            ("FLEXRING_SUBCHUNK", "1M"),
            ("FLEXRING_TIMEOUT_MS", "1500"),
            ("FLEXRING_SOCKET_IFNAME", "^lo"),
        ])
        .expect("all valid");
        assert_eq!(config.rank, Some(3));
        assert_eq!(config.algo, Algorithm::Ring);
        assert_eq!(config.subchunk, Size(1 << 20));
        assert_eq!(config.timeout, Duration::from_millis(1500));
        assert_eq!(config.socket_ifname.as_deref(), Some("^lo"));
    }

    #[test]
    fn what_cannot_be_parsed_is_quoted() {
        for (name, text) in [
            ("FLEXRING_RANK", "-1"),
            ("FLEXRING_RANK", ""),
            ("FLEXRING_ALGO", "rign"),
            ("FLEXRING_SUBCHUNK", "1000"),
            ("FLEXRING_SUBCHUNK", "99999999999999999999G"),
            ("FLEXRING_TIMEOUT_MS", "0"),
            ("FLEXRING_MASTER_PORT", "70000"),
            ("FLEXRING_SLOTS", "1"),
            ("FLEXRING_SMALL", "65537"),
            ("FLEXRING_MASTER_ADDR", "  "),
            ("FLEXRING_LOG", "loud"),
        ] {
            let error = read(&[(name, text)]).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().starts_with(&format!("{name}=\"{text}\"")), "{error}");
            assert!(error.message().contains("expected"), "{error}");
        }
    }

    #[test]
    fn sizes_are_binary_and_print_as_they_parse() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("512K", 512 << 10), ("3M", 3 << 20), ("2g", 2 << 30)]
        {
            assert_eq!(Size::parse(text), Some(Size(bytes)));
            assert_eq!(Size::parse(&Size(bytes).to_string()), Some(Size(bytes)));
        }
        for text in ["", "K", "1.5M", "-1", "1T", "é"] {
            assert_eq!(Size::parse(text), None, "{text}");
        }
    }

    #[test]
    fn every_setting_is_named_alike_and_described() {
        for row in Config::default().table(|_| None) {
            assert!(row.name.starts_with("FLEXRING_"));
            assert!(row.sentence.ends_with('.'));
            assert_eq!(row.origin, Origin::Default);
        }
        assert_eq!(
            Config::strangers(["FLEXRING_RNAK".to_owned(), "PATH".to_owned()].into_iter()),
            ["FLEXRING_RNAK"]
        );
    }
}
