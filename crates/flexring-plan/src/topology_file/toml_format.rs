//! flexring's own format, in TOML: tables of switches and nodes.
//!
//! Owns the format, which `examples/topology.toml` shows. Must not know hosts, or the defaults of missing
//! keys.

use super::super::Rank;
use super::super::topology::{MAX_BURST, Nics, Uplink};
use super::draft::{Draft, DraftId, DraftKind, DraftLink, DraftVertex, LinkEnd};
use super::graph;
use super::limits::MAX_NICS;
use super::units;
use crate::source_file::{Lines, SourceFile};
use flexring_core::config::Size;
use flexring_core::error::Result;
use serde::de::{Deserializer, Unexpected, Visitor};
use std::collections::HashMap;
use std::fmt;
use toml::Spanned;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyToml {
    #[serde(default)]
    switch: Vec<SwitchTable>,
    #[serde(default)]
    node: Vec<NodeTable>,
    #[serde(default)]
    link: Vec<GraphLinkTable>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchTable {
    name: Spanned<String>,
    up: Option<Spanned<String>>,
    bandwidth: Option<Bandwidth>,
    latency: Option<Latency>,
    burst: Option<Burst>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeTable {
    name: Spanned<String>,
    up: Option<Spanned<String>>,
    bandwidth: Option<Bandwidth>,
    latency: Option<Latency>,
    burst: Option<Burst>,
    ranks: Option<Vec<Spanned<RankNumber>>>,
    rank_bandwidth: Option<Bandwidth>,
    rank_latency: Option<Latency>,
    nics: Option<NicCount>,
    striped: Option<bool>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphLinkTable {
    between: Spanned<[EndName; 2]>,
    bandwidth: Bandwidth,
    back: Option<Bandwidth>,
    latency: Option<Latency>,
    burst: Option<Burst>,
}

/// The name of a node or switch, or a rank.
enum EndName {
    Name(String),
    Rank(Rank),
}

struct Bandwidth(u64);
struct Latency(u64);
struct Burst(u64);
struct RankNumber(Rank);
struct NicCount(u32);

impl<'de> serde::Deserialize<'de> for Bandwidth {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct BandwidthVisitor;
        impl Visitor<'_> for BandwidthVisitor {
            type Value = Bandwidth;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bit/s such as \"500M\", \"1G\" or \"2.5G\"")
            }

            fn visit_i64<E: serde::de::Error>(self, bits: i64) -> std::result::Result<Bandwidth, E> {
                let bits_or_error =
                    u64::try_from(bits).map_err(|_| E::invalid_value(Unexpected::Signed(bits), &self));
                units::within(bits_or_error?)
                    .map(Bandwidth)
                    .map_err(|message| E::custom(format!("{bits} is {message}")))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Bandwidth, E> {
                units::bandwidth(text).map(Bandwidth).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(BandwidthVisitor)
    }
}

impl<'de> serde::Deserialize<'de> for Latency {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct LatencyVisitor;
        impl Visitor<'_> for LatencyVisitor {
            type Value = Latency;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as \"800ns\", \"30us\" or \"1.5ms\"")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Latency, E> {
                units::latency(text).map(Latency).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(LatencyVisitor)
    }
}

impl<'de> serde::Deserialize<'de> for Burst {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct BurstVisitor;
        impl Visitor<'_> for BurstVisitor {
            type Value = Burst;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes such as \"256K\" or \"1M\", at most 1024G")
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> std::result::Result<Burst, E> {
                let valid = u64::try_from(bytes).ok().filter(|bytes| *bytes <= MAX_BURST);
                valid.map(Burst).ok_or_else(|| E::invalid_value(Unexpected::Signed(bytes), &self))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Burst, E> {
                let bytes = Size::parse(text).map(|size| size.0 as u64).filter(|bytes| *bytes <= MAX_BURST);
                bytes.map(Burst).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(BurstVisitor)
    }
}

impl<'de> serde::Deserialize<'de> for RankNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct RankVisitor;
        impl Visitor<'_> for RankVisitor {
            type Value = RankNumber;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a rank, a number from 0")
            }

            fn visit_i64<E: serde::de::Error>(self, rank: i64) -> std::result::Result<RankNumber, E> {
                let rank =
                    Rank::try_from(rank).map_err(|_| E::invalid_value(Unexpected::Signed(rank), &self));
                rank.map(RankNumber)
            }
        }
        deserializer.deserialize_any(RankVisitor)
    }
}

impl<'de> serde::Deserialize<'de> for EndName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct EndVisitor;
        impl Visitor<'_> for EndVisitor {
            type Value = EndName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a node or switch, or the number of a rank")
            }

            fn visit_i64<E: serde::de::Error>(self, rank: i64) -> std::result::Result<EndName, E> {
                let rank =
                    Rank::try_from(rank).map_err(|_| E::invalid_value(Unexpected::Signed(rank), &self));
                rank.map(EndName::Rank)
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> std::result::Result<EndName, E> {
                Ok(EndName::Name(name.to_owned()))
            }
        }
        deserializer.deserialize_any(EndVisitor)
    }
}

impl<'de> serde::Deserialize<'de> for NicCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct NicVisitor;
        impl Visitor<'_> for NicVisitor {
            type Value = NicCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a number of NICs from 1 to {MAX_NICS}")
            }

            fn visit_i64<E: serde::de::Error>(self, count: i64) -> std::result::Result<NicCount, E> {
                let valid = u32::try_from(count).ok().filter(|count| (1..=MAX_NICS).contains(count));
                valid.map(NicCount).ok_or_else(|| E::invalid_value(Unexpected::Signed(count), &self))
            }
        }
        deserializer.deserialize_any(NicVisitor)
    }
}

/// Parses the file.
pub(super) fn read(file: SourceFile, text: &str) -> Result<Draft> {
    let lines = Lines::of(text);
    let parsed: TopologyToml = file.parse_toml(text, &lines)?;
    if parsed.node.is_empty() {
        return Err(file.refuse_all("there are no nodes: expected [[node]] tables"));
    }
    // Children are in the order of the file, switches and nodes alike.
    let switches = parsed.switch.into_iter().map(|switch| ParsedTable::of_switch(switch, &lines));
    let mut tables: Vec<ParsedTable> =
        switches.chain(parsed.node.into_iter().map(|node| ParsedTable::of_node(node, &lines))).collect();
    tables.sort_by_key(|table| table.start);
    let tables = TopologyTables { file, tables };
    match parsed.link.is_empty() {
        true => tables.attach(),
        false => tables.join(parsed.link, &lines),
    }
}

/// A switch or a node, and the name and line of its parent.
struct ParsedTable {
    start: usize,
    item: DraftVertex,
    up: Option<(String, usize)>,
}

impl ParsedTable {
    fn of_switch(switch: SwitchTable, lines: &Lines) -> Self {
        let mut item = DraftVertex::switch(switch.name.get_ref(), lines.of_value(&switch.name));
        item.bandwidth = switch.bandwidth.map(|bandwidth| bandwidth.0);
        item.latency = switch.latency.map(|latency| latency.0);
        item.burst = switch.burst.map_or(0, |burst| burst.0);
        Self::new(&switch.name, switch.up, item, lines)
    }

    fn of_node(node: NodeTable, lines: &Lines) -> Self {
        let with_line = |rank: Spanned<RankNumber>| {
            let line = lines.of_value(&rank);
            (rank.into_inner().0, line)
        };
        let ranks = node.ranks.map(|ranks| ranks.into_iter().map(with_line).collect());
        let mut item = DraftVertex::node(node.name.get_ref(), lines.of_value(&node.name), ranks);
        item.bandwidth = node.bandwidth.map(|bandwidth| bandwidth.0);
        item.latency = node.latency.map(|latency| latency.0);
        item.burst = node.burst.map_or(0, |burst| burst.0);
        let count = node.nics.map_or(1, |nics| nics.0);
        item.nics = Nics { count, striped: node.striped.unwrap_or(false) };
        if let DraftKind::Node { uplink, .. } = &mut item.kind {
            *uplink = Uplink::new(
                node.rank_bandwidth.map_or(Uplink::RANK_DEFAULT.bandwidth, |bandwidth| bandwidth.0),
                node.rank_latency.map_or(Uplink::RANK_DEFAULT.latency, |latency| latency.0),
            );
        }
        Self::new(&node.name, node.up, item, lines)
    }

    fn new(name: &Spanned<String>, up: Option<Spanned<String>>, item: DraftVertex, lines: &Lines) -> Self {
        let up = up.map(|up| {
            let line = lines.of_value(&up);
            (up.into_inner(), line)
        });
        Self { start: name.span().start, item, up }
    }

    fn is_switch(&self) -> bool {
        matches!(self.item.kind, DraftKind::Switch)
    }
}

struct TopologyTables<'a> {
    file: SourceFile<'a>,
    tables: Vec<ParsedTable>,
}

impl TopologyTables<'_> {
    /// The draft, with every vertex attached to its parent.
    fn attach(self) -> Result<Draft> {
        let ups = self.ups()?;
        let mut draft = Draft::default();
        let implicit_root = self.tables.iter().all(|table| !table.is_switch());
        let shift = usize::from(implicit_root);
        if implicit_root {
            draft.add(DraftVertex::switch("switch", 0));
        }
        for table in self.tables {
            draft.add(table.item);
        }
        for (place, up) in ups.into_iter().enumerate() {
            match up {
                Some(up) => draft.attach(place + shift, up + shift),
                None if implicit_root => draft.attach(place + shift, 0),
                None => {}
            }
        }
        Ok(draft)
    }

    /// The draft of a graph: a root above all nodes and switches, and these links between them.
    fn join(self, links: Vec<GraphLinkTable>, lines: &Lines) -> Result<Draft> {
        let names = self.names()?;
        for ParsedTable { item, up, .. } in &self.tables {
            let has_uplink = item.bandwidth.is_some() || item.latency.is_some() || item.burst > 0;
            if up.is_some() || has_uplink || item.nics != Nics::ONE {
                let message = format!(
                    "{} has an uplink, but there are [[link]] tables: expected a [[link]] in place of up, bandwidth, latency, burst \
                     and nics",
                    item.name
                );
                return Err(self.file.refuse(item.line, message));
            }
        }
        let mut draft = Draft::default();
        for link in links {
            let line = lines.of_value(&link.between);
            let end = |end: &EndName| match end {
                EndName::Rank(rank) => Ok(LinkEnd::Rank(*rank)),
                // The root comes before all tables.
                EndName::Name(name) => match names.get(name.as_str()) {
                    Some(place) => Ok(LinkEnd::Vertex(place + 1)),
                    None => {
                        let message = format!(
                            "{name:?} is not defined: expected the name of a [[node]] or [[switch]], or the number of a rank"
                        );
                        Err(self.file.refuse(line, message))
                    }
                },
            };
            let [one, other] = link.between.get_ref();
            draft.links.push(DraftLink {
                ends: [end(one)?, end(other)?],
                line,
                bandwidths: [link.bandwidth.0, link.back.map_or(link.bandwidth.0, |back| back.0)],
                latency: link.latency.map(|latency| latency.0),
                burst: link.burst.map_or(0, |burst| burst.0),
            });
        }
        let root = draft.add(DraftVertex::switch("fabric", 0));
        for table in self.tables {
            let id = draft.add(table.item);
            draft.attach(id, root);
        }
        graph::check_links(self.file, &draft)?;
        Ok(draft)
    }

    /// By table, its parent; `None` for the root, or if there are no switches.
    fn ups(&self) -> Result<Vec<Option<DraftId>>> {
        let names = self.names()?;
        let switches: Vec<DraftId> =
            (0..self.tables.len()).filter(|place| self.tables[*place].is_switch()).collect();
        let mut top: Option<&DraftVertex> = None;
        let mut ups = Vec::with_capacity(self.tables.len());
        for table in &self.tables {
            let DraftVertex { name, line, .. } = &table.item;
            let up = match (&table.up, switches.as_slice()) {
                (Some((up, line)), _) => {
                    let refuse = |message: String| {
                        Err(self.file.refuse(*line, format!("{message}: expected the name of a [[switch]]")))
                    };
                    match names.get(up.as_str()) {
                        Some(place) if self.tables[*place].is_switch() => Some(*place),
                        Some(_) => return refuse(format!("{name} is below {up}, which is a node")),
                        None => return refuse(format!("{name} is below {up:?}, which is not defined")),
                    }
                }
                (None, _) if table.is_switch() => {
                    self.check_root(&table.item, top)?;
                    top = Some(&table.item);
                    None
                }
                (None, []) => None,
                (None, [only]) => Some(*only),
                (None, several) => {
                    let message =
                        format!("{name} has no parent: expected up = one of the {} switches", several.len());
                    return Err(self.file.refuse(*line, message));
                }
            };
            ups.push(up);
        }
        Ok(ups)
    }

    fn check_root(&self, item: &DraftVertex, other: Option<&DraftVertex>) -> Result<()> {
        let DraftVertex { name, line, .. } = item;
        if let Some(other) = other {
            let message = format!(
                "{name} has no parent, like {} in line {}: expected one root",
                other.name, other.line
            );
            return Err(self.file.refuse(*line, message));
        }
        if item.bandwidth.is_some() || item.latency.is_some() || item.burst > 0 {
            let message = format!(
                "{name} has a bandwidth, latency or burst but no parent: expected up, or none of them"
            );
            return Err(self.file.refuse(*line, message));
        }
        Ok(())
    }

    fn names(&self) -> Result<HashMap<&str, DraftId>> {
        let mut names = HashMap::new();
        for (place, table) in self.tables.iter().enumerate() {
            let DraftVertex { name, line, .. } = &table.item;
            // Errors print the name.
            if name.contains(char::is_control) {
                let message =
                    format!("the name {name:?} has a control character: expected a name without any");
                return Err(self.file.refuse(*line, message));
            }
            if name.is_empty() {
                return Err(self.file.refuse(*line, "the name is empty: expected a unique name"));
            }
            if let Some(other) = names.insert(name.as_str(), place) {
                let other = self.tables[other].item.line;
                let message = format!("the name {name} is already used in line {other}: expected another");
                return Err(self.file.refuse(*line, message));
            }
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::topology::Topology;
    use super::super::parse;
    use super::*;

    fn read(text: &str, hosts: Option<&[&str]>) -> std::result::Result<Topology, String> {
        let hosts: Option<Vec<String>> =
            hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect());
        parse("c.toml", text, hosts.as_deref()).map_err(|error| error.message().to_owned())
    }

    const TREE: &str = r#"
[[switch]]
name = "spine"
[[switch]]
name = "rack1"
up = "spine"
bandwidth = "100G"
latency = "2us"
burst = 3145728
[[node]]
name = "host3"
up = "spine"
[[switch]]
name = "rack2"
up = "spine"
[[node]]
name = "host1"
up = "rack1"
bandwidth = 1_000_000_000
latency = "40us"
burst = "256K"
nics = 2
rank_bandwidth = "200G"
rank_latency = "0.5us"
[[node]]
name = "host2.cluster"
up = "rack2"
ranks = [
    4,
    0,
]
"#;

    #[test]
    fn placement_and_links_are_as_described() {
        let hosts = ["x", "host1.cluster", "host3", "host1.cluster", "x"];
        let topology = read(TREE, Some(&hosts)).expect("a tree");
        assert_eq!((topology.world(), topology.nodes()), (5, 3));
        // rack1, host3 and rack2 are in the order of the file.
        assert_eq!(topology.ranks_in_tree_order(), [1, 3, 2, 4, 0]);
        let link = |name: &str| {
            let vertex = topology.vertices().iter().find(|vertex| vertex.name == name).expect(name);
            (vertex.uplink.bandwidth, vertex.uplink.latency)
        };
        assert_eq!(link("rack1"), (100_000_000_000, 2_000));
        assert_eq!(link("rack2"), (Uplink::NODE_DEFAULT.bandwidth, Uplink::NODE_DEFAULT.latency));
        assert_eq!(link("host1"), (2_000_000_000, 40_000));
        assert_eq!(link("rank 3"), (200_000_000_000, 500));
        assert_eq!(link("rank 4"), (Uplink::RANK_DEFAULT.bandwidth, Uplink::RANK_DEFAULT.latency));
        assert_eq!(topology.vertices()[0].name, "spine");
        let bursts = topology.vertices().iter().filter(|vertex| vertex.uplink.burst > 0);
        let bursts: Vec<(&str, u64)> = bursts.map(|vertex| (&*vertex.name, vertex.uplink.burst)).collect();
        // That of the node is of each NIC.
        assert_eq!(bursts, [("rack1", 3 << 20), ("host1", 512 << 10)]);
        let node = topology.node_vertices()[0];
        assert_eq!([0, 1].map(|part| topology.part_burst(node, part)), [256 << 10; 2]);
    }

    #[test]
    fn up_may_be_omitted_with_at_most_one_switch() {
        let nodes = "[[node]]\nname = \"a\"\nranks = [0, 1]\n[[node]]\nname = \"b\"\nranks = [2]\n";
        for text in [nodes.to_owned(), format!("{nodes}[[switch]]\nname = \"s\"")] {
            let topology = read(&text, None).expect("a tree");
            assert_eq!((topology.world(), topology.nodes(), topology.levels().len()), (3, 2, 2));
        }
    }

    #[test]
    fn errors_name_the_line() {
        let good = "[[switch]]\nname = \"s\"\n[[node]]\nname = \"a\"\n";
        let bits = "expected bit/s such as 500M, 1G or 2.5G";
        let time = "expected a time such as 800ns, 30us or 1.5ms";
        for (text, line, message) in [
            ("bandwidth = \"fast\"", ":5", &*format!("\"fast\" is not a bandwidth: {bits}")),
            ("\nbandwidth = \"0G\"", ":6", "\"0G\" is too low: expected at least 1 bit/s"),
            ("bandwidth = 0", ":5", "0 is too low: expected at least 1 bit/s"),
            (
                "bandwidth = -1",
                ":5",
                "invalid value: integer `-1`, expected bit/s such as \"500M\", \"1G\" or \"2.5G\"",
            ),
            (
                "bandwidth = 1.5",
                ":5",
                "invalid type: floating point `1.5`, expected bit/s such as \"500M\", \"1G\" or \"2.5G\"",
            ),
            ("rank_bandwidth = \"9999T\"", ":5", "\"9999T\" is too high: expected at most 1000T"),
            ("latency = \"30\"", ":5", &format!("\"30\" is not a latency: {time}")),
            (
                "rank_latency = 30",
                ":5",
                "invalid type: integer `30`, expected a time such as \"800ns\", \"30us\" or \"1.5ms\"",
            ),
            ("ranks = [0,\n-1]", ":6", "invalid value: integer `-1`, expected a rank, a number from 0"),
            ("ranks = [\"0\"]", ":5", "invalid type: string \"0\", expected a rank, a number from 0"),
            ("ranks = 2", ":5", "invalid type: integer `2`, expected a sequence"),
            ("ranks = [0,\n1000000]", ":6", "there is no rank 1000000: expected at most 999999"),
            ("ranks = [0,\n0]", ":6", "rank 0 is on a and, in line 5, on a: expected each rank once"),
            ("ranks = [1]", "", "rank 0 is on no node: expected all ranks from 0 to 1"),
            ("ranks = []", "", "the topology has no ranks"),
            (
                "color = 1",
                ":5",
                "unknown field `color`, expected one of `name`, `up`, `bandwidth`, `latency`, `burst`, \
                 `ranks`, `rank_bandwidth`, `rank_latency`, `nics`, `striped`",
            ),
            (
                "burst = \"2T\"",
                ":5",
                "invalid value: string \"2T\", expected a number of bytes such as \"256K\" or \"1M\", at most 1024G",
            ),
            (
                "burst = -1",
                ":5",
                "invalid value: integer `-1`, expected a number of bytes such as \"256K\" or \"1M\", at most 1024G",
            ),
            ("nics = 0", ":5", "invalid value: integer `0`, expected a number of NICs from 1 to 64"),
            ("nics = \"4\"", ":5", "invalid type: string \"4\", expected a number of NICs from 1 to 64"),
            ("striped = 1", ":5", "invalid type: integer `1`, expected a boolean"),
            ("[[nodes]]", ":5", "unknown field `nodes`, expected one of `switch`, `node`, `link`"),
            ("[[node]]\nup = \"s\"", ":5", "missing field `name`"),
            ("[[node]]\nname = 3", ":6", "invalid type: integer `3`, expected a string"),
            ("[[node]]\nname = \"\"", ":6", "the name is empty: expected a unique name"),
            ("[[node]]\nname = \"a\"", ":6", "the name a is already used in line 4: expected another"),
            ("[[node]]\nname = \"s\"", ":6", "the name s is already used in line 2: expected another"),
            ("up = \"x\"", ":5", "a is below \"x\", which is not defined: expected the name of a [[switch]]"),
            ("up = \"a\"", ":5", "a is below a, which is a node: expected the name of a [[switch]]"),
            (
                "up = \"s\"\n[[switch]]\nname = \"t\"\nup = \"a\"",
                ":8",
                "t is below a, which is a node: expected the name of a [[switch]]",
            ),
            (
                "up = \"s\"\n[[switch]]\nname = \"t\"",
                ":7",
                "t has no parent, like s in line 2: expected one root",
            ),
            (
                "[[switch]]\nname = \"t\"\nup = \"s\"",
                ":4",
                "a has no parent: expected up = one of the 2 switches",
            ),
            (
                "up = \"t\"\n[[switch]]\nname = \"t\"\nup = \"u\"\n[[switch]]\nname = \"u\"\nup = \"t\"",
                ":7",
                "switches form a cycle: t below u below t; expected a tree",
            ),
            ("ranks = [0", ":5", "unclosed array, expected `]`"),
            ("name", ":5", "key with no value, expected `=`"),
            ("ranks = [0]\nranks = [1]", ":6", "duplicate key"),
        ] {
            assert_eq!(
                read(&format!("{good}{text}"), None),
                Err(format!("c.toml{line}: {message}")),
                "{text}"
            );
        }
        for (text, line, message) in [
            ("", "", "there are no nodes: expected [[node]] tables"),
            ("[[switch]]\nname = \"s\"", "", "there are no nodes: expected [[node]] tables"),
            (
                "[[node]]\nname = \"a\"\n[[switch]]\nname = \"s\"\nbandwidth = \"1G\"",
                ":4",
                "s has a bandwidth, latency or burst but no parent: expected up, or none of them",
            ),
            (
                "[[node]]\nname = \"a\"\nup = \"s\"\n[[switch]]\nname = \"s\"\nup = \"s\"",
                ":5",
                "switches form a cycle: s below s; expected a tree",
            ),
            (
                "[[node]]\nname = \"a\"\nup = \"s\"",
                ":3",
                "a is below \"s\", which is not defined: expected the name of a [[switch]]",
            ),
        ] {
            assert_eq!(read(text, None), Err(format!("c.toml{line}: {message}")), "{text}");
        }
    }

    #[test]
    fn the_nics_of_a_node_are_divided_or_striped() {
        let text = "[[node]]\nname = \"a\"\nbandwidth = \"100G\"\nnics = 4\nranks = [0, 1]\n\
                    [[node]]\nname = \"b\"\nbandwidth = \"100G\"\nnics = 2\nstriped = true\nranks = [2, 3]";
        let topology = read(text, None).expect("valid");
        let [a, b] = topology.node_vertices()[..] else { panic!("two nodes") };
        let uplinks =
            [a, b].map(|node| (topology.uplink_parts(node), topology.vertices()[node].bandwidth_label()));
        assert_eq!(uplinks, [(2, "4*100G".to_owned()), (1, "2*100G".to_owned())]);
        assert_eq!(
            (topology.part_bandwidth(a, 1), topology.part_bandwidth(b, 0)),
            (200_000_000_000, 200_000_000_000)
        );
    }

    #[test]
    fn hosts_must_match_the_file() {
        for (text, message) in [
            (TREE, "c.toml: rank 0 is on h, but no node has that name: the nodes are host3 to host2.cluster"),
            (
                "[[node]]\nname = \"h\"\nranks = [\n1]",
                "c.toml:4: there is no rank 1: the job has 1 rank, counted from 0",
            ),
        ] {
            let text = text.replace("[\n    4,\n    0,\n]", "[]");
            assert_eq!(read(&text, Some(&["h"])), Err(message.to_owned()));
        }
        let text = "[[node]]\nname = \"h\"\nranks = [1]";
        assert_eq!(
            read(text, Some(&["h", "h"])),
            Err(
                "c.toml:2: the ranks of h do not include rank 0, which is on h: expected each rank on a node"
                    .to_owned()
            )
        );
    }
}
