//! Topologies whose links form no tree.
//!
//! Owns the check that links form a connected graph of all ranks, and which vertices it has.

use super::super::Rank;
use super::super::fabric::{Fabric, FabricLink, components};
use super::super::topology::Uplink;
use super::draft::{Draft, DraftId, DraftKind, DraftLink, DraftVertex, LinkEnd};
use crate::source_file::SourceFile;
use flexring_core::error::Result;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// The name of an end, for errors and output.
fn end_name(draft: &Draft, end: LinkEnd) -> String {
    match end {
        LinkEnd::Vertex(id) => draft.vertices[id].name.clone(),
        LinkEnd::Rank(rank) => format!("rank {rank}"),
    }
}

/// The lines of links by their ends.
type LinkLines<End> = HashMap<[End; 2], usize>;

/// Checks that a link has two ends, and that no link before has the same ones.
fn check_ends<End: Copy + Ord + Hash>(
    file: SourceFile,
    draft: &Draft,
    link: &DraftLink,
    ends: [End; 2],
    lines: &mut LinkLines<End>,
) -> Result<()> {
    let [one, other] = link.ends.map(|end| end_name(draft, end));
    let message = if ends[0] != ends[1] {
        let Some(before) = lines.insert([ends[0].min(ends[1]), ends[0].max(ends[1])], link.line) else {
            return Ok(());
        };
        format!(
            "{one} and {other} are linked in line {before} already: expected one link with the sum of the bandwidths"
        )
    } else if one == other {
        format!("{one} is linked with itself: expected two ends")
    } else {
        format!("{one} and {other} are the same: expected two ends")
    };
    Err(file.refuse(link.line, message))
}

/// Checks what needs no ranks: the ends of links as they are written.
pub(super) fn check_links(file: SourceFile, draft: &Draft) -> Result<()> {
    let mut lines = LinkLines::new();
    draft.links.iter().try_for_each(|link| check_ends(file, draft, link, link.ends, &mut lines))
}

/// The fabric of a draft with links, whose ranks are assigned. Sets the bandwidths of its nodes to those of
/// their links together.
pub(super) fn fabric(file: SourceFile, draft: &mut Draft) -> Result<Option<Fabric>> {
    if draft.links.is_empty() {
        return Ok(None);
    }
    let mut builder = GraphBuilder::new(file, draft)?;
    for link in &draft.links {
        builder.add(draft, link)?;
    }
    builder.add_ranks(draft);
    builder.connect(draft)?;
    let GraphBuilder { world, names, links, outside, .. } = builder;
    for (item, bandwidth) in draft.vertices.iter_mut().zip(outside) {
        item.bandwidth = Some(bandwidth.max(1));
    }
    Ok(Some(Fabric::new(world, names, links)))
}

struct GraphBuilder<'a> {
    file: SourceFile<'a>,
    world: usize,
    names: Vec<String>,
    links: Vec<FabricLink>,
    /// By rank, its node.
    node_of: Vec<DraftId>,
    /// By node or switch, its vertex; `None` for nodes without ranks. A node with one rank is this rank,
    /// unless the description has a bandwidth or latency of its rank.
    vertex: Vec<Option<usize>>,
    /// By vertex, its node; `None` for switches.
    node: Vec<Option<DraftId>>,
    /// By node, the bandwidth of its links to others together.
    outside: Vec<u64>,
    /// By pair of vertices, the line of their link.
    lines: LinkLines<usize>,
    /// The vertices that have lost a link, because its other end is a node without ranks.
    cut: HashSet<usize>,
}

fn ranks_of(item: &DraftVertex) -> &[(Rank, usize)] {
    match &item.kind {
        DraftKind::Node { ranks: Some(ranks), .. } => ranks,
        _ => &[],
    }
}

impl<'a> GraphBuilder<'a> {
    fn new(file: SourceFile<'a>, draft: &Draft) -> Result<Self> {
        let mut placed: Vec<(Rank, DraftId)> = Vec::new();
        for (id, item) in draft.vertices.iter().enumerate() {
            placed.extend(ranks_of(item).iter().map(|(rank, _)| (*rank, id)));
        }
        placed.sort_unstable();
        let world = placed.len();
        let node_of: Vec<DraftId> = placed.into_iter().map(|(_, node)| node).collect();
        let mut names: Vec<String> = (0..world).map(|rank| format!("rank {rank}")).collect();
        let mut node: Vec<Option<DraftId>> = node_of.iter().copied().map(Some).collect();
        let mut vertex = vec![None; draft.vertices.len()];
        for (id, item) in draft.vertices.iter().enumerate() {
            match (&item.kind, ranks_of(item)) {
                (DraftKind::Node { .. }, []) => continue,
                (DraftKind::Node { uplink: Uplink::RANK_DEFAULT, .. }, [(rank, _)]) => {
                    names[*rank].clone_from(&item.name);
                    vertex[id] = Some(*rank);
                    continue;
                }
                (DraftKind::Node { .. }, _) => node.push(Some(id)),
                (DraftKind::Switch, _) if id == 0 => continue,
                (DraftKind::Switch, _) => node.push(None),
            }
            vertex[id] = Some(names.len());
            names.push(item.name.clone());
        }
        let outside = vec![0; draft.vertices.len()];
        let (lines, cut) = (LinkLines::new(), HashSet::new());
        Ok(Self { file, world, names, links: Vec::new(), node_of, vertex, node, outside, lines, cut })
    }

    fn add(&mut self, draft: &Draft, link: &DraftLink) -> Result<()> {
        let mut found = [None; 2];
        for (end, vertex) in link.ends.iter().zip(&mut found) {
            *vertex = match *end {
                LinkEnd::Rank(rank) if rank >= self.world => {
                    let message = format!(
                        "rank {rank} is on no node: expected a rank from 0 to {}, or the name of a node or switch",
                        self.world.saturating_sub(1)
                    );
                    return Err(self.file.refuse(link.line, message));
                }
                LinkEnd::Rank(rank) => Some(rank),
                // `None` for a machine that is not in the job.
                LinkEnd::Vertex(id) => self.vertex[id],
            };
        }
        let [Some(one), Some(other)] = found else {
            self.cut.extend(found.into_iter().flatten());
            return Ok(());
        };
        let ends = [one, other];
        self.check_once(draft, link, ends)?;
        let nodes = ends.map(|end| self.node[end]);
        let is_within_node = nodes[0].is_some() && nodes[0] == nodes[1];
        if !is_within_node {
            for (node, bandwidth) in nodes.into_iter().zip(link.bandwidths) {
                if let Some(node) = node {
                    self.outside[node] = self.outside[node].saturating_add(bandwidth);
                }
            }
        }
        let default = if is_within_node { Uplink::RANK_DEFAULT } else { Uplink::NODE_DEFAULT };
        let name = link.ends.map(|end| end_name(draft, end)).join(" - ");
        let DraftLink { bandwidths, burst, .. } = *link;
        let latency = link.latency.unwrap_or(default.latency);
        self.links.push(FabricLink { name, ends, bandwidths, latency, burst, is_within_node });
        Ok(())
    }

    /// Checks that no two vertices have two links, of which names and ranks may be two descriptions, and no
    /// link has one vertex at both ends.
    fn check_once(&mut self, draft: &Draft, link: &DraftLink, ends: [usize; 2]) -> Result<()> {
        check_ends(self.file, draft, link, ends, &mut self.lines)?;
        let pair = [ends[0].min(ends[1]), ends[0].max(ends[1])];
        if pair[0] < self.world && self.vertex[self.node_of[pair[0]]] == Some(pair[1]) {
            let [one, other] = link.ends.map(|end| end_name(draft, end));
            let message = format!(
                "{one} and {other} are linked by the node already: expected rank_bandwidth and rank_latency of the node"
            );
            return Err(self.file.refuse(link.line, message));
        }
        Ok(())
    }

    /// Links the ranks of each node with it.
    fn add_ranks(&mut self, draft: &Draft) {
        for (rank, node) in self.node_of.iter().enumerate() {
            let DraftKind::Node { uplink, .. } = &draft.vertices[*node].kind else { continue };
            let Some(vertex) = self.vertex[*node].filter(|vertex| *vertex != rank) else { continue };
            self.links.push(FabricLink {
                name: format!("rank {rank}"),
                ends: [rank, vertex],
                bandwidths: [uplink.bandwidth; 2],
                latency: uplink.latency,
                burst: uplink.burst,
                is_within_node: true,
            });
        }
    }

    /// Leaves out switches that only nodes without ranks connect with the others.
    ///
    /// # Errors
    /// If another vertex is not connected with rank 0.
    fn connect(&mut self, draft: &Draft) -> Result<()> {
        let connected = components(self.names.len(), self.links.iter().map(|link| link.ends));
        let Some(first) = connected[..self.world].first().copied() else { return Ok(()) };
        // Groups with a rank or a node are not left out.
        let has_ranks: HashSet<usize> =
            self.node.iter().zip(&connected).filter_map(|(node, group)| node.map(|_| *group)).collect();
        let cut: HashSet<usize> = self.cut.iter().map(|vertex| connected[*vertex]).collect();
        let is_left_out =
            |group: usize| group != first && cut.contains(&group) && !has_ranks.contains(&group);
        if let Some(lost) = connected.iter().position(|group| *group != first && !is_left_out(*group)) {
            let id = self.node[lost].or_else(|| self.vertex.iter().position(|vertex| *vertex == Some(lost)));
            let item = &draft.vertices[id.unwrap_or(0)];
            let message = format!(
                "{} is not connected with {}: expected [[link]] tables that connect all nodes and switches",
                item.name, draft.vertices[self.node_of[0]].name
            );
            return Err(self.file.refuse(item.line, message));
        }
        let mut kept = 0;
        let numbers: Vec<Option<usize>> = connected
            .iter()
            .map(|group| {
                let number = (*group == first).then_some(kept);
                kept += usize::from(number.is_some());
                number
            })
            .collect();
        let names = std::mem::take(&mut self.names);
        self.names = names.into_iter().zip(&numbers).filter_map(|(name, kept)| kept.map(|_| name)).collect();
        self.links.retain_mut(|link| {
            let [Some(one), Some(other)] = link.ends.map(|end| numbers[end]) else { return false };
            link.ends = [one, other];
            true
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use crate::topology::Topology;

    fn read(text: &str, hosts: Option<&[&str]>) -> Result<Topology, String> {
        let hosts: Option<Vec<String>> =
            hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect());
        parse("f", text, hosts.as_deref()).map_err(|error| error.message().to_owned())
    }

    const NODES: &str = "[[node]]\nname = \"a\"\nranks = [2]\n[[node]]\nname = \"b\"\nranks = [0, 1]\n";

    #[test]
    fn links_join_ranks_nodes_and_switches() {
        let text = format!(
            "{NODES}[[switch]]\nname = \"s\"
[[link]]\nbetween = [\"a\", \"s\"]\nbandwidth = \"100G\"\nback = \"50G\"\nlatency = \"3us\"\nburst = \"1M\"
[[link]]\nbetween = [\"s\", \"b\"]\nbandwidth = \"25G\"
[[link]]\nbetween = [0, 1]\nbandwidth = \"900G\"
[[link]]\nbetween = [1, \"a\"]\nbandwidth = \"10G\"\n"
        );
        let topology = read(&text, None).expect("a graph");
        assert_eq!((topology.world(), topology.nodes()), (3, 2));
        assert_eq!((topology.node_of(2), topology.node_of(0)), (0, 1));
        let fabric = topology.fabric().expect("a graph");
        // The only rank of a node is the node.
        assert_eq!(fabric.names(), ["rank 0", "rank 1", "a", "b", "s"]);
        let links: Vec<_> = fabric
            .links()
            .iter()
            .map(|link| {
                (&*link.name, link.ends, link.bandwidths.map(|rate| rate / 1_000_000_000), link.latency)
            })
            .collect();
        assert_eq!(
            links,
            [
                ("a - s", [2, 4], [100, 50], 3_000),
                ("s - b", [4, 3], [25, 25], 30_000),
                ("rank 0 - rank 1", [0, 1], [900, 900], 1_000),
                ("rank 1 - a", [1, 2], [10, 10], 30_000),
                ("rank 0", [0, 3], [400, 400], 1_000),
                ("rank 1", [1, 3], [400, 400], 1_000),
            ]
        );
        assert_eq!(fabric.links()[0].burst, 1 << 20);
        // Of some of the ranks, in another order.
        let restricted = topology.restricted_to(&[2, 0]);
        let fabric = restricted.fabric().expect("a graph");
        assert_eq!(fabric.names(), ["rank 0", "rank 1", "b", "s"]);
        assert_eq!(fabric.links().len(), 3);
    }

    #[test]
    fn ranks_that_only_others_connect_keep_these_on_their_way() {
        let text = crate::test_fabrics::broken_ring(3, "1G");
        let ends = read(&text, None).expect("a graph").restricted_to(&[2, 0]);
        let fabric = ends.fabric().expect("a graph");
        assert_eq!(fabric.names(), ["rank 0", "rank 1", "n1"]);
        assert_eq!(fabric.route(0, 1).len(), 2);
    }

    #[test]
    fn hosts_place_ranks_and_nodes_without_any_are_left_out() {
        let text = "[[node]]\nname = \"a\"\n[[node]]\nname = \"b\"\n[[node]]\nname = \"c\"
[[link]]\nbetween = [\"a\", \"b\"]\nbandwidth = \"1G\"\n[[link]]\nbetween = [\"b\", \"c\"]\nbandwidth = \"1G\"\n";
        let topology = read(text, Some(&["b", "a"])).expect("a graph");
        assert_eq!(topology.fabric().expect("a graph").names(), ["b", "a"]);
        let message = read(text, Some(&["c", "a"])).expect_err("b has no rank");
        assert_eq!(
            message,
            "f:2: a is not connected with c: expected [[link]] tables that connect all nodes and switches"
        );
    }

    #[test]
    fn switches_that_only_absent_nodes_reach_are_left_out() {
        let text = "[[node]]\nname = \"a\"\n[[node]]\nname = \"b\"\n[[node]]\nname = \"c\"
[[switch]]\nname = \"s\"\n[[switch]]\nname = \"t\"
[[link]]\nbetween = [\"c\", \"s\"]\nbandwidth = \"1G\"\n[[link]]\nbetween = [\"a\", \"t\"]\nbandwidth = \"1G\"
[[link]]\nbetween = [\"t\", \"b\"]\nbandwidth = \"1G\"\n";
        let topology = read(text, Some(&["b", "a"])).expect("a graph");
        let fabric = topology.fabric().expect("a graph");
        assert_eq!(fabric.names(), ["b", "a", "t"]);
        let ends: Vec<_> = fabric.links().iter().map(|link| link.ends).collect();
        assert_eq!(ends, [[1, 2], [2, 0]]);
        let message = read(text, Some(&["b", "c"])).expect_err("b and c are apart");
        assert_eq!(
            message,
            "f:6: c is not connected with b: expected [[link]] tables that connect all nodes and switches"
        );
    }

    #[test]
    fn errors_name_the_line_the_cause_and_the_fix() {
        let link = |between: &str, rest: &str| format!("{NODES}[[link]]\nbetween = [{between}]\n{rest}\n");
        let good = link("\"a\", \"b\"", "bandwidth = \"1G\"");
        assert!(read(&good, None).is_ok());
        let rate = "expected bit/s such as 500M, 1G or 2.5G";
        for (text, expected) in [
            (link("\"a\", \"b\"", "bandwidth = \"0\""), "9: \"0\" is too low: expected at least 1 bit/s"),
            (
                link("\"a\", \"b\"", "bandwidth = \"1G\"\nback = \"0\""),
                "10: \"0\" is too low: expected at least 1 bit/s",
            ),
            (
                link("\"a\", \"b\"", "bandwidth = \"1001T\""),
                "9: \"1001T\" is too high: expected at most 1000T",
            ),
            (
                link("\"a\", \"b\"", "bandwidth = \"fast\""),
                &*format!("9: \"fast\" is not a bandwidth: {rate}"),
            ),
            (link("\"a\", \"b\"", "back = \"1G\""), "7: missing field `bandwidth`"),
            (
                link("\"a\", 7", "bandwidth = \"1G\""),
                "8: rank 7 is on no node: expected a rank from 0 to 2, or the name of a node or switch",
            ),
            (
                link("\"a\", \"z\"", "bandwidth = \"1G\""),
                "8: \"z\" is not defined: expected the name of a [[node]] or [[switch]], or the number of a rank",
            ),
            (link("\"a\", \"a\"", "bandwidth = \"1G\""), "8: a is linked with itself: expected two ends"),
            (link("\"a\", 2", "bandwidth = \"1G\""), "8: a and rank 2 are the same: expected two ends"),
            (
                format!("{good}[[link]]\nbetween = [2, \"b\"]\nbandwidth = \"1G\""),
                "11: rank 2 and b are linked in line 8 already: expected one link with the sum of the bandwidths",
            ),
            (
                link("1, \"b\"", "bandwidth = \"1G\""),
                "8: rank 1 and b are linked by the node already: expected rank_bandwidth and rank_latency of the node",
            ),
            (
                format!("{good}[[link]]\nbetween = [\"b\", \"a\"]\nbandwidth = \"1G\""),
                "11: b and a are linked in line 8 already: expected one link with the sum of the bandwidths",
            ),
            (
                format!("{good}[[node]]\nname = \"c\"\nranks = [3]"),
                "11: c is not connected with b: expected [[link]] tables that connect all nodes and switches",
            ),
            (
                format!("{good}[[switch]]\nname = \"s\""),
                "11: s is not connected with b: expected [[link]] tables that connect all nodes and switches",
            ),
            (
                format!("{good}[[node]]\nname = \"c\"\nup = \"a\"\nranks = [3]"),
                "11: c has an uplink, but there are [[link]] tables: expected a [[link]] in place of up, bandwidth, latency, burst and nics",
            ),
            (
                format!("{good}[[switch]]\nname = \"a\""),
                "11: the name a is already used in line 2: expected another",
            ),
        ] {
            assert_eq!(read(&text, None).err().as_deref(), Some(&*format!("f:{expected}")), "{text}");
        }
    }
}
