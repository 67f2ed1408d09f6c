//! DraftKind a description says, until it has become a tree.
//!
//! Owns the check that switches hang below one another as a tree, and what is assumed where nothing is said.
//! Must not know the format: whoever reads one finds the switch that a name means.

use super::super::Rank;
use super::super::topology::{Topology, TopologyBuilder, Uplink};
use super::{FileContext, MAX_DEPTH};
use crate::error::{Error, Result};

pub(super) type DraftId = usize;

/// A switch or a node.
#[derive(Debug)]
pub(super) struct DraftVertex {
    pub(super) name: String,
    /// Where it is described.
    pub(super) line: usize,
    pub(super) what: DraftKind,
    /// Of the link up, where it is said.
    pub(super) bandwidth: Option<u64>,
    pub(super) latency: Option<u64>,
    /// See [`Draft::hang`].
    up: Option<DraftId>,
    children: Vec<DraftId>,
}

#[derive(Debug)]
pub(super) enum DraftKind {
    Switch,
    Node {
        /// Its ranks with their lines; none if hosts tell.
        ranks: Option<Vec<(Rank, usize)>>,
        /// Of each of its ranks.
        uplink: Uplink,
    },
}

impl DraftVertex {
    pub(super) fn switch(name: &str, line: usize) -> Self {
        Self {
            name: name.to_owned(),
            line,
            what: DraftKind::Switch,
            bandwidth: None,
            latency: None,
            up: None,
            children: Vec::new(),
        }
    }

    pub(super) fn node(name: &str, line: usize, ranks: Option<Vec<(Rank, usize)>>) -> Self {
        Self { what: DraftKind::Node { ranks, uplink: Uplink::RANK_DEFAULT }, ..Self::switch(name, line) }
    }
}

/// Switches and nodes in the order of the description.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) vertices: Vec<DraftVertex>,
}

impl Draft {
    pub(super) fn add(&mut self, item: DraftVertex) -> DraftId {
        self.vertices.push(item);
        self.vertices.len() - 1
    }

    /// Hangs `child` below `parent`, to the right of what hangs there.
    pub(super) fn attach(&mut self, child: DraftId, parent: DraftId) {
        self.vertices[child].up = Some(parent);
        self.vertices[parent].children.push(child);
    }

    pub(super) fn parent(&self, item: DraftId) -> Option<DraftId> {
        self.vertices[item].up
    }

    /// DraftKind hangs below nothing.
    pub(super) fn roots(&self) -> impl Iterator<Item = DraftId> + '_ {
        (0..self.vertices.len()).filter(|id| self.vertices[*id].up.is_none())
    }

    /// The tree. At most one item may be at the top, and it is a switch.
    pub(super) fn finish(mut self, file: FileContext) -> Result<Topology> {
        let order = self.walk(file)?;
        self.default_switch_bandwidths(&order);
        let mut builder = TopologyBuilder::new(&self.vertices[order[0]].name);
        let mut vertex = vec![0; self.vertices.len()];
        for (id, parent) in order.iter().filter_map(|id| Some((*id, self.vertices[*id].up?))) {
            let item = &self.vertices[id];
            let uplink = Uplink {
                bandwidth: item.bandwidth.unwrap_or(Uplink::NODE_DEFAULT.bandwidth),
                latency: item.latency.unwrap_or(Uplink::NODE_DEFAULT.latency),
            };
            vertex[id] = match &item.what {
                DraftKind::Switch => builder.switch(vertex[parent], &item.name, uplink),
                DraftKind::Node { ranks, uplink: inside } => {
                    let node = builder.node(vertex[parent], &item.name, uplink);
                    for (rank, _) in ranks.iter().flatten() {
                        builder.rank(node, *rank, *inside);
                    }
                    node
                }
            };
        }
        builder.finish().map_err(|error| error.context(file.name))
    }

    /// Everything, level by level from the top; an error if something is not below it, or too far below.
    fn walk(&self, file: FileContext) -> Result<Vec<DraftId>> {
        let mut order: Vec<DraftId> = self.roots().take(1).collect();
        let mut depth = vec![0; self.vertices.len()];
        let mut next = 0;
        while let Some(id) = order.get(next).copied() {
            let item = &self.vertices[id];
            if depth[id] > MAX_DEPTH && matches!(item.what, DraftKind::Switch) {
                let words =
                    format!("{} hangs too deep: expected at most {MAX_DEPTH} switches on the way", item.name);
                return Err(file.refuse(item.line, words));
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

    /// Whatever is not below the top is in a circle, or below one.
    fn cycle_error(&self, file: FileContext, lost: DraftId) -> Error {
        const SHOWN: usize = 8;
        let above = |id: &DraftId| self.vertices[*id].up;
        let inside = std::iter::successors(Some(lost), above).nth(self.vertices.len()).unwrap_or(lost);
        let around =
            |from: DraftId| std::iter::successors(above(&from), above).take_while(move |id| *id != from);
        let first = around(inside).min().map_or(inside, |other| other.min(inside));
        let rest = around(first);
        let names = std::iter::once(first).chain(rest).map(|id| self.vertices[id].name.as_str());
        let mut names: Vec<&str> = names.take(SHOWN + 1).collect();
        match names.len() > SHOWN {
            true => names[SHOWN] = "...",
            false => names.push(&self.vertices[first].name),
        }
        let words = format!("switches hang in a circle: {}; expected a tree", names.join(" below "));
        file.refuse(self.vertices[first].line, words)
    }

    /// Makes each switch of whose uplink nothing is said as wide as all that hangs on it.
    fn default_switch_bandwidths(&mut self, order: &[DraftId]) {
        for id in order.iter().rev() {
            let width =
                |child: &DraftId| self.vertices[*child].bandwidth.unwrap_or(Uplink::NODE_DEFAULT.bandwidth);
            let below = self.vertices[*id].children.iter().map(width).reduce(u64::saturating_add);
            if matches!(self.vertices[*id].what, DraftKind::Switch) {
                self.vertices[*id].bandwidth = self.vertices[*id].bandwidth.or(below);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_RANKS;
    use super::*;

    const SOURCE: FileContext<'static> = FileContext { name: "file" };

    /// A draft whose switches hang as `ups` says.
    fn draft(ups: &[Option<DraftId>]) -> Draft {
        let mut draft = Draft::default();
        for id in 0..ups.len() {
            draft.add(DraftVertex::switch(&format!("s{id}"), id + 1));
        }
        for (id, up) in ups.iter().enumerate() {
            if let Some(up) = up {
                draft.attach(id, *up);
            }
        }
        draft
    }

    #[test]
    fn children_stay_in_order_whatever_is_described_first() {
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
    fn a_switch_is_as_wide_as_what_hangs_on_it_unless_it_says_so() {
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
    fn what_is_no_tree_is_refused() {
        let refuse =
            |ups: &[Option<DraftId>]| draft(ups).finish(SOURCE).expect_err("no tree").message().to_owned();
        assert_eq!(refuse(&[Some(0)]), "file:1: switches hang in a circle: s0 below s0; expected a tree");
        assert_eq!(
            refuse(&[None, Some(2), Some(3), Some(2)]),
            "file:3: switches hang in a circle: s2 below s3 below s2; expected a tree"
        );
        let ring: Vec<_> = (0..100).map(|id| Some((id + 1) % 100)).collect();
        assert_eq!(
            refuse(&ring),
            "file:1: switches hang in a circle: s0 below s1 below s2 below s3 below s4 below s5 below s6 below s7 \
             below ...; expected a tree"
        );
        let chain: Vec<_> = (0..100usize).map(|id| id.checked_sub(1)).collect();
        assert_eq!(refuse(&chain), "file:66: s65 hangs too deep: expected at most 64 switches on the way");
        assert_eq!(refuse(&chain[..65]), "file: the topology has no ranks");
    }

    #[test]
    fn a_large_circle_is_found_at_once() {
        let ring: Vec<_> = (0..MAX_RANKS).map(|id| Some((id + 1) % MAX_RANKS)).collect();
        assert!(draft(&ring).finish(SOURCE).is_err());
    }
}
