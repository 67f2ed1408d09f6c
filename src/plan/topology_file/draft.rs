//! What a description says, until it has become a tree.
//!
//! Owns the check that switches hang below one another as a tree, and what is assumed where nothing is said.
//! Must not know the format: whoever reads one finds the switch that a name means.

use super::super::Rank;
use super::super::topology::{Builder, Link, Topology};
use super::{DEEPEST, Source};
use crate::error::{Error, Result};

pub(super) type ItemId = usize;

/// A switch or a node.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) name: String,
    /// Where it is described.
    pub(super) line: usize,
    pub(super) what: What,
    /// Of the link up, where it is said.
    pub(super) bandwidth: Option<u64>,
    pub(super) latency: Option<u64>,
    /// See [`Draft::hang`].
    up: Option<ItemId>,
    children: Vec<ItemId>,
}

#[derive(Debug)]
pub(super) enum What {
    Switch,
    Node {
        /// Its ranks with their lines; none if hosts tell.
        ranks: Option<Vec<(Rank, usize)>>,
        /// Of each of its ranks.
        link: Link,
    },
}

impl Item {
    pub(super) fn switch(name: &str, line: usize) -> Self {
        Self {
            name: name.to_owned(),
            line,
            what: What::Switch,
            bandwidth: None,
            latency: None,
            up: None,
            children: Vec::new(),
        }
    }

    pub(super) fn node(name: &str, line: usize, ranks: Option<Vec<(Rank, usize)>>) -> Self {
        Self { what: What::Node { ranks, link: Link::OF_RANK }, ..Self::switch(name, line) }
    }
}

/// Switches and nodes in the order of the description.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) items: Vec<Item>,
}

impl Draft {
    pub(super) fn add(&mut self, item: Item) -> ItemId {
        self.items.push(item);
        self.items.len() - 1
    }

    /// Hangs `child` below `parent`, to the right of what hangs there.
    pub(super) fn hang(&mut self, child: ItemId, parent: ItemId) {
        self.items[child].up = Some(parent);
        self.items[parent].children.push(child);
    }

    pub(super) fn parent(&self, item: ItemId) -> Option<ItemId> {
        self.items[item].up
    }

    /// What hangs below nothing.
    pub(super) fn tops(&self) -> impl Iterator<Item = ItemId> + '_ {
        (0..self.items.len()).filter(|id| self.items[*id].up.is_none())
    }

    /// The tree. At most one item may be at the top, and it is a switch.
    pub(super) fn finish(mut self, source: Source) -> Result<Topology> {
        let order = self.walk(source)?;
        self.widen(&order);
        let mut builder = Builder::new(&self.items[order[0]].name);
        let mut vertex = vec![0; self.items.len()];
        for (id, parent) in order.iter().filter_map(|id| Some((*id, self.items[*id].up?))) {
            let item = &self.items[id];
            let link = Link {
                bandwidth: item.bandwidth.unwrap_or(Link::OF_NODE.bandwidth),
                latency: item.latency.unwrap_or(Link::OF_NODE.latency),
            };
            vertex[id] = match &item.what {
                What::Switch => builder.switch(vertex[parent], &item.name, link),
                What::Node { ranks, link: inside } => {
                    let node = builder.node(vertex[parent], &item.name, link);
                    for (rank, _) in ranks.iter().flatten() {
                        builder.rank(node, *rank, *inside);
                    }
                    node
                }
            };
        }
        builder.finish().map_err(|error| error.within(source.name))
    }

    /// Everything, level by level from the top; an error if something is not below it, or too far below.
    fn walk(&self, source: Source) -> Result<Vec<ItemId>> {
        let mut order: Vec<ItemId> = self.tops().take(1).collect();
        let mut depth = vec![0; self.items.len()];
        let mut next = 0;
        while let Some(id) = order.get(next).copied() {
            let item = &self.items[id];
            if depth[id] > DEEPEST && matches!(item.what, What::Switch) {
                let words =
                    format!("{} hangs too deep: expected at most {DEEPEST} switches on the way", item.name);
                return Err(source.refuse(item.line, words));
            }
            for child in &item.children {
                depth[*child] = depth[id] + 1;
                order.push(*child);
            }
            next += 1;
        }
        let mut reached = vec![false; self.items.len()];
        for id in &order {
            reached[*id] = true;
        }
        match reached.iter().position(|reached| !reached) {
            Some(lost) => Err(self.circle(source, lost)),
            None => Ok(order),
        }
    }

    /// Whatever is not below the top is in a circle, or below one.
    fn circle(&self, source: Source, lost: ItemId) -> Error {
        const SHOWN: usize = 8;
        let above = |id: &ItemId| self.items[*id].up;
        let inside = std::iter::successors(Some(lost), above).nth(self.items.len()).unwrap_or(lost);
        let around =
            |from: ItemId| std::iter::successors(above(&from), above).take_while(move |id| *id != from);
        let first = around(inside).min().map_or(inside, |other| other.min(inside));
        let rest = around(first);
        let names = std::iter::once(first).chain(rest).map(|id| self.items[id].name.as_str());
        let mut names: Vec<&str> = names.take(SHOWN + 1).collect();
        match names.len() > SHOWN {
            true => names[SHOWN] = "...",
            false => names.push(&self.items[first].name),
        }
        let words = format!("switches hang in a circle: {}; expected a tree", names.join(" below "));
        source.refuse(self.items[first].line, words)
    }

    /// Makes each switch of whose uplink nothing is said as wide as all that hangs on it.
    fn widen(&mut self, order: &[ItemId]) {
        for id in order.iter().rev() {
            let width = |child: &ItemId| self.items[*child].bandwidth.unwrap_or(Link::OF_NODE.bandwidth);
            let below = self.items[*id].children.iter().map(width).reduce(u64::saturating_add);
            if matches!(self.items[*id].what, What::Switch) {
                self.items[*id].bandwidth = self.items[*id].bandwidth.or(below);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MOST;
    use super::*;

    const SOURCE: Source<'static> = Source { name: "file" };

    /// A draft whose switches hang as `ups` says.
    fn draft(ups: &[Option<ItemId>]) -> Draft {
        let mut draft = Draft::default();
        for id in 0..ups.len() {
            draft.add(Item::switch(&format!("s{id}"), id + 1));
        }
        for (id, up) in ups.iter().enumerate() {
            if let Some(up) = up {
                draft.hang(id, *up);
            }
        }
        draft
    }

    #[test]
    fn children_stay_in_order_whatever_is_described_first() {
        let mut draft = draft(&[Some(1), None]);
        for rank in [1, 0] {
            let node = draft.add(Item::node("node", 9, Some(vec![(rank, 9)])));
            draft.hang(node, rank);
        }
        let topology = draft.finish(SOURCE).expect("a tree");
        assert_eq!(topology.ranks_by_place(), [0, 1]);
        assert_eq!(topology.vertices()[0].name, "s1");
    }

    #[test]
    fn a_switch_is_as_wide_as_what_hangs_on_it_unless_it_says_so() {
        let mut draft = draft(&[None, Some(0), Some(1), Some(0)]);
        draft.items[3].bandwidth = Some(5);
        for (rank, (up, bandwidth)) in
            [(1, Some(30)), (2, Some(1)), (2, Some(2)), (3, None)].into_iter().enumerate()
        {
            let mut node = Item::node("node", 9, Some(vec![(rank, 9)]));
            node.bandwidth = bandwidth;
            let node = draft.add(node);
            draft.hang(node, up);
        }
        let topology = draft.finish(SOURCE).expect("a tree");
        let widths: Vec<(&str, u64)> = topology.vertices()[1..]
            .iter()
            .filter(|vertex| vertex.name.starts_with('s'))
            .map(|vertex| (vertex.name.as_str(), vertex.link.bandwidth))
            .collect();
        assert_eq!(widths, [("s1", 33), ("s3", 5), ("s2", 3)]);
        let last = &topology.vertices()[topology.vertices()[topology.leaf(3)].parent.expect("a node")];
        assert_eq!(last.link, Link::OF_NODE);
    }

    #[test]
    fn what_is_no_tree_is_refused() {
        let refuse =
            |ups: &[Option<ItemId>]| draft(ups).finish(SOURCE).expect_err("no tree").message().to_owned();
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
        let ring: Vec<_> = (0..MOST).map(|id| Some((id + 1) % MOST)).collect();
        assert!(draft(&ring).finish(SOURCE).is_err());
    }
}
