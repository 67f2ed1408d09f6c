//! Topology files of fabrics that are no trees, for tests and benchmarks.

use std::fmt::Write;

/// A topology file in the making.
#[derive(Default)]
struct FabricText(String);

impl FabricText {
    fn node(&mut self, name: impl std::fmt::Display, ranks: std::ops::Range<usize>) -> &mut Self {
        let ranks: Vec<usize> = ranks.collect();
        writeln!(self.0, "[[node]]\nname = \"{name}\"\nranks = {ranks:?}").expect("a string");
        self
    }

    fn nodes(&mut self, nodes: usize) -> &mut Self {
        for node in 0..nodes {
            self.node(node_name(node), node..node + 1);
        }
        self
    }

    fn switch(&mut self, name: impl std::fmt::Display) -> &mut Self {
        writeln!(self.0, "[[switch]]\nname = \"{name}\"").expect("a string");
        self
    }

    /// The ends are names in quotes, or ranks.
    fn link(&mut self, one: &str, other: &str, bandwidth: &str) -> &mut Self {
        let text =
            format!("[[link]]\nbetween = [{one}, {other}]\nbandwidth = \"{bandwidth}\"\nlatency = \"2us\"\n");
        self.0 += &text;
        self
    }

    fn join(&mut self, one: usize, other: usize, bandwidth: &str) -> &mut Self {
        self.link(&quoted(node_name(one)), &quoted(node_name(other)), bandwidth)
    }
}

fn node_name(node: usize) -> String {
    format!("n{node}")
}

fn quoted(name: impl std::fmt::Display) -> String {
    format!("\"{name}\"")
}

/// A torus of `rows` times `columns` nodes of one rank.
#[must_use]
pub fn torus(rows: usize, columns: usize, bandwidth: &str) -> String {
    let mut text = FabricText::default();
    text.nodes(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let at = row * columns + column;
            // Two nodes have one link.
            if columns > 2 || column == 0 {
                text.join(at, row * columns + (column + 1) % columns, bandwidth);
            }
            if rows > 2 || row == 0 {
                text.join(at, (row + 1) % rows * columns + column, bandwidth);
            }
        }
    }
    text.0
}

/// A ring of nodes of one rank, one link of which is broken.
#[must_use]
pub fn broken_ring(nodes: usize, bandwidth: &str) -> String {
    let mut text = FabricText::default();
    text.nodes(nodes);
    for node in 1..nodes {
        text.join(node - 1, node, bandwidth);
    }
    text.0
}

/// 2 + 2 GPUs in pairs with NVLink, on a PCIe switch. Each is a node, as it sends while it adds.
#[must_use]
pub fn bridged_pairs() -> String {
    let mut text = FabricText::default();
    text.nodes(4).switch("pcie");
    for gpu in 0..4 {
        text.link(&quoted(node_name(gpu)), "\"pcie\"", "128G");
    }
    text.join(0, 1, "400G").join(2, 3, "400G");
    text.0
}

/// A box of 8 GPUs at a switch, with one port of half the rate.
#[must_use]
pub fn slow_port() -> String {
    let mut text = FabricText::default();
    text.nodes(8).switch("crossbar");
    for node in 0..8 {
        text.link(&quoted(node_name(node)), "\"crossbar\"", if node == 5 { "200G" } else { "400G" });
    }
    text.0
}

/// 6 nodes, each with a link to each of two planes.
#[must_use]
pub fn two_planes() -> String {
    let mut text = FabricText::default();
    text.nodes(6).switch("left").switch("right");
    for node in 0..6 {
        for plane in ["\"left\"", "\"right\""] {
            text.link(&quoted(node_name(node)), plane, "100G");
        }
    }
    text.0
}

/// A hypercube of 2^dimensions nodes.
#[must_use]
pub fn hypercube(dimensions: usize) -> String {
    let mut text = FabricText::default();
    text.nodes(1 << dimensions);
    for node in 0..1_usize << dimensions {
        for bit in (0..dimensions).filter(|bit| node >> bit & 1 == 0) {
            text.join(node, node | 1 << bit, "100G");
        }
    }
    text.0
}

/// 3 groups of 2 routers with 2 nodes each. All routers of a group are linked, and each pair of groups is by
/// one link.
#[must_use]
pub fn dragonfly() -> String {
    let mut text = FabricText::default();
    text.nodes(12);
    let router = |group: usize, place: usize| quoted(format_args!("r{group}.{place}"));
    for group in 0..3 {
        for place in 0..2 {
            text.switch(format_args!("r{group}.{place}"));
            for node in 0..2 {
                text.link(&quoted(node_name(4 * group + 2 * place + node)), &router(group, place), "100G");
            }
        }
        text.link(&router(group, 0), &router(group, 1), "200G");
        text.link(&router(group, 1), &router((group + 1) % 3, 0), "200G");
    }
    text.0
}

/// Nodes of different sizes, some linked directly and some by switches, with links of different rates.
#[must_use]
pub fn irregular() -> String {
    let mut text = FabricText::default();
    for (name, ranks) in [("a", 0..3), ("b", 3..4), ("c", 4..6), ("d", 6..7), ("e", 7..8)] {
        text.node(name, ranks);
        text.0 += "rank_bandwidth = \"4T\"\n";
    }
    text.switch("s");
    for (one, other, bandwidth) in [
        ("a", "s", "200G"),
        ("b", "s", "100G"),
        ("c", "s", "50G"),
        ("a", "c", "150G"),
        ("c", "d", "100G"),
        ("d", "e", "80G"),
        ("e", "b", "60G"),
        ("d", "s", "25G"),
    ] {
        text.link(&quoted(one), &quoted(other), bandwidth);
    }
    text.0
}

/// The fabrics of the tests, with their names.
#[must_use]
pub fn all() -> Vec<(&'static str, String)> {
    vec![
        ("torus of 4x4", torus(4, 4, "100G")),
        ("torus of 2x3", torus(2, 3, "10G")),
        ("broken ring of 6", broken_ring(6, "100G")),
        ("pairs of GPUs", bridged_pairs()),
        ("slow port", slow_port()),
        ("two planes", two_planes()),
        ("hypercube", hypercube(4)),
        ("dragonfly", dragonfly()),
        ("irregular", irregular()),
    ]
}
