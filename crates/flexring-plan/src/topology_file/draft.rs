//! The draft of a topology: switches and nodes as described, before they form a tree or a graph.
//!
//! Owns the check that they form a tree, and the default bandwidths. Must not know formats: parsers resolve
//! names before they attach a vertex.

use super::super::Rank;
use super::super::topology::{Nics, Topology, TopologyBuilder, Uplink};
use super::limits::MAX_DEPTH;
use crate::source_file::SourceFile;
use flexring_core::error::{Error, Result};

pub(super) type DraftId = usize;

/// A switch or a node.
#[derive(Debug)]
pub(super) struct DraftVertex {
    pub(super) name: String,
    /// Line of the description, from 1; 0 if there is none.
    pub(super) line: usize,
    pub(super) kind: DraftKind,
    /// Of the uplink, or of each NIC, in bit/s; `None` for the default.
    pub(super) bandwidth: Option<u64>,
    pub(super) latency: Option<u64>,
    /// Bytes that pass over the uplink, or over each NIC, at once after a pause.
    pub(super) burst: u64,
    /// Of a node. Each has the bandwidth.
    pub(super) nics: Nics,
    /// See [`Draft::attach`].
    parent: Option<DraftId>,
    children: Vec<DraftId>,
}

#[derive(Debug)]
pub(super) enum DraftKind {
    Switch,
    Node {
        /// Its ranks with their lines; `None` if host names decide.
        ranks: Option<Vec<(Rank, usize)>>,
        /// The uplink of each of its ranks.
        uplink: Uplink,
    },
}

impl DraftVertex {
    pub(super) fn switch(name: &str, line: usize) -> Self {
        Self {
            name: name.to_owned(),
            line,
            kind: DraftKind::Switch,
            bandwidth: None,
            latency: None,
            burst: 0,
            nics: Nics::ONE,
            parent: None,
            children: Vec::new(),
        }
    }

    pub(super) fn node(name: &str, line: usize, ranks: Option<Vec<(Rank, usize)>>) -> Self {
        Self { kind: DraftKind::Node { ranks, uplink: Uplink::RANK_DEFAULT }, ..Self::switch(name, line) }
    }

    /// The bandwidth of the uplink, that of all NICs together.
    fn width(&self) -> u64 {
        let each = self.bandwidth.unwrap_or(Uplink::NODE_DEFAULT.bandwidth);
        each.saturating_mul(u64::from(self.nics.count))
    }
}

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum LinkEnd {
    /// A node or a switch.
    Vertex(DraftId),
    /// A rank.
    Rank(Rank),
}

/// A link between two vertices.
#[derive(Clone, Debug)]
pub(super) struct DraftLink {
    pub(super) ends: [LinkEnd; 2],
    /// Line of the description, from 1.
    pub(super) line: usize,
    /// In bit/s, from the first to the second end, and back.
    pub(super) bandwidths: [u64; 2],
    pub(super) latency: Option<u64>,
    pub(super) burst: u64,
}

/// Switches and nodes, in the order of the description.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) vertices: Vec<DraftVertex>,
    /// The links of a graph, whose nodes and switches are children of the root; none for a tree.
    pub(super) links: Vec<DraftLink>,
}

impl Draft {
    pub(super) fn add(&mut self, item: DraftVertex) -> DraftId {
        self.vertices.push(item);
        self.vertices.len() - 1
    }

    /// Makes `child` the last child of `parent`.
    pub(super) fn attach(&mut self, child: DraftId, parent: DraftId) {
        self.vertices[child].parent = Some(parent);
        self.vertices[parent].children.push(child);
    }

    pub(super) fn parent(&self, item: DraftId) -> Option<DraftId> {
        self.vertices[item].parent
    }

    /// Vertices without a parent.
    pub(super) fn roots(&self) -> impl Iterator<Item = DraftId> + '_ {
        (0..self.vertices.len()).filter(|id| self.vertices[*id].parent.is_none())
    }

    /// The topology. There must be at most one root, and it must be a switch.
    pub(super) fn finish(mut self, file: SourceFile) -> Result<Topology> {
        let order = self.walk(file)?;
        self.default_switch_bandwidths(&order);
        let mut builder = TopologyBuilder::new(&self.vertices[order[0]].name);
        let mut vertex = vec![0; self.vertices.len()];
        for (id, parent) in order.iter().filter_map(|id| Some((*id, self.vertices[*id].parent?))) {
            let item = &self.vertices[id];
            let uplink = Uplink {
                bandwidth: item.width(),
                latency: item.latency.unwrap_or(Uplink::NODE_DEFAULT.latency),
                burst: item.burst.saturating_mul(u64::from(item.nics.count)),
            };
            vertex[id] = match &item.kind {
                DraftKind::Switch => builder.switch(vertex[parent], &item.name, uplink),
                DraftKind::Node { ranks, uplink: inside } => {
                    let node = builder.node(vertex[parent], &item.name, uplink);
                    builder.set_nics(node, item.nics);
                    for (rank, _) in ranks.iter().flatten() {
                        builder.rank(node, *rank, *inside);
                    }
                    node
                }
            };
        }
        builder.finish().map_err(|error| error.context(file.name))
    }

    /// All vertices, level by level from the root. Fails if a vertex is not below the root, or too deep.
    pub(super) fn walk(&self, file: SourceFile) -> Result<Vec<DraftId>> {
        let mut order: Vec<DraftId> = self.roots().take(1).collect();
        let mut depth = vec![0; self.vertices.len()];
        let mut next = 0;
        while let Some(id) = order.get(next).copied() {
            let item = &self.vertices[id];
            if depth[id] > MAX_DEPTH && matches!(item.kind, DraftKind::Switch) {
                let message =
                    format!("{} is too deep: expected at most {MAX_DEPTH} switches above it", item.name);
                return Err(file.refuse(item.line, message));
            }
            for child in &item.children {
                depth[*child] = depth[id] + 1;
                order.push(*child);
            }
            next += 1;
        }
        let mut reached = vec![false; self.vertices.len()];
        for id in &order {
            reached[*id] = true;
        }
        match reached.iter().position(|reached| !reached) {
            Some(lost) => Err(self.cycle_error(file, lost)),
            None => Ok(order),
        }
    }

    /// The error for a vertex that is not below the root: it is in a cycle, or below one.
    fn cycle_error(&self, file: SourceFile, lost: DraftId) -> Error {
        const SHOWN: usize = 8;
        let parent = |id: &DraftId| self.vertices[*id].parent;
        let inside = std::iter::successors(Some(lost), parent).nth(self.vertices.len()).unwrap_or(lost);
        let cycle_of =
            |from: DraftId| std::iter::successors(parent(&from), parent).take_while(move |id| *id != from);
        let first = cycle_of(inside).min().map_or(inside, |other| other.min(inside));
        let rest = cycle_of(first);
        let names = std::iter::once(first).chain(rest).map(|id| self.vertices[id].name.as_str());
        let mut names: Vec<&str> = names.take(SHOWN + 1).collect();
        match names.len() > SHOWN {
            true => names[SHOWN] = "...",
            false => names.push(&self.vertices[first].name),
        }
        let message = format!("switches form a cycle: {}; expected a tree", names.join(" below "));
        file.refuse(self.vertices[first].line, message)
    }

    /// Sets the bandwidth of each switch that has none to the sum of its children's.
    fn default_switch_bandwidths(&mut self, order: &[DraftId]) {
        for id in order.iter().rev() {
            let children = self.vertices[*id].children.iter();
            let below = children.map(|child| self.vertices[*child].width()).reduce(u64::saturating_add);
            if matches!(self.vertices[*id].kind, DraftKind::Switch) {
                self.vertices[*id].bandwidth = self.vertices[*id].bandwidth.or(below);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::MAX_RANKS;
    use super::*;

    const SOURCE: SourceFile<'static> = SourceFile { name: "file" };

    /// A draft of switches with these parents.
    fn draft(parents: &[Option<DraftId>]) -> Draft {
        let mut draft = Draft::default();
        for id in 0..parents.len() {
            draft.add(DraftVertex::switch(&format!("s{id}"), id + 1));
        }
        for (id, up) in parents.iter().enumerate() {
            if let Some(up) = up {
                draft.attach(id, *up);
            }
        }
        draft
    }

    #[test]
    fn children_keep_their_order_if_described_before_their_parent() {
        let mut draft = draft(&[Some(1), None]);
        for rank in [1, 0] {
            let node = draft.add(DraftVertex::node("node", 9, Some(vec![(rank, 9)])));
            draft.attach(node, rank);
        }
        let topology = draft.finish(SOURCE).expect("a tree");
        assert_eq!(topology.ranks_in_tree_order(), [0, 1]);
        assert_eq!(topology.vertices()[0].name, "s1");
    }

    #[test]
    fn the_default_bandwidth_of_a_switch_is_the_sum_of_its_children() {
        let mut draft = draft(&[None, Some(0), Some(1), Some(0)]);
        draft.vertices[3].bandwidth = Some(5);
        for (rank, (up, bandwidth)) in
            [(1, Some(30)), (2, Some(1)), (2, Some(2)), (3, None)].into_iter().enumerate()
        {
            let mut node = DraftVertex::node("node", 9, Some(vec![(rank, 9)]));
            node.bandwidth = bandwidth;
            let node = draft.add(node);
            draft.attach(node, up);
        }
        let topology = draft.finish(SOURCE).expect("a tree");
        let widths: Vec<(&str, u64)> = topology.vertices()[1..]
            .iter()
            .filter(|vertex| vertex.name.starts_with('s'))
            .map(|vertex| (vertex.name.as_str(), vertex.uplink.bandwidth))
            .collect();
        assert_eq!(widths, [("s1", 33), ("s3", 5), ("s2", 3)]);
        let last = &topology.vertices()[topology.vertices()[topology.leaf(3)].parent.expect("a node")];
        assert_eq!(last.uplink, Uplink::NODE_DEFAULT);
    }

    #[test]
    fn descriptions_that_are_not_trees_are_refused() {
        let refuse = |parents: &[Option<DraftId>]| {
            draft(parents).finish(SOURCE).expect_err("no tree").message().to_owned()
        };
        assert_eq!(refuse(&[Some(0)]), "file:1: switches form a cycle: s0 below s0; expected a tree");
        assert_eq!(
            refuse(&[None, Some(2), Some(3), Some(2)]),
            "file:3: switches form a cycle: s2 below s3 below s2; expected a tree"
        );
        let ring: Vec<_> = (0..100).map(|id| Some((id + 1) % 100)).collect();
        assert_eq!(
            refuse(&ring),
            "file:1: switches form a cycle: s0 below s1 below s2 below s3 below s4 below s5 below s6 below s7 \
             below ...; expected a tree"
        );
        let chain: Vec<_> = (0..100usize).map(|id| id.checked_sub(1)).collect();
        assert_eq!(refuse(&chain), "file:66: s65 is too deep: expected at most 64 switches above it");
        assert_eq!(refuse(&chain[..65]), "file: the topology has no ranks");
    }

    #[test]
    fn a_cycle_of_a_million_switches_is_found() {
        let ring: Vec<_> = (0..MAX_RANKS).map(|id| Some((id + 1) % MAX_RANKS)).collect();
        assert!(draft(&ring).finish(SOURCE).is_err());
    }
}
