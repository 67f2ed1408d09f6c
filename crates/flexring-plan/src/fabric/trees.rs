//! The trees among which the vector is divided.
//!
//! Owns what planners and simulations need of them.

use super::graph::Route;
use crate::Rank;
use std::collections::BTreeMap;

/// A tree, and its share of the vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanningTree {
    /// The rank that has the sums.
    pub root: Rank,
    /// By rank, its parent; `None` for the root.
    pub parent: Vec<Option<Rank>>,
    /// Its part of the vector, in [`Forest::shares`].
    pub share: u64,
}

/// Trees among which the vector is divided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forest {
    /// The trees, in the order of their spans.
    pub trees: Vec<SpanningTree>,
    /// The shares of all trees together.
    pub shares: u64,
    /// Seconds for each byte of the vector on the link that takes longest.
    pub seconds_per_byte: f64,
    /// By pair of ranks with an edge of a tree, the lesser one first, the route from there.
    pub(super) routes: BTreeMap<[Rank; 2], Route>,
}

impl Forest {
    /// The least deep tree of the pairs of ranks that the trees join.
    #[must_use]
    pub fn least_deep(&self, world: usize) -> SpanningTree {
        SpanningTree::least_deep(world, self.routes.keys(), 1, |_| 0)
    }
}

impl SpanningTree {
    /// The least deep tree in a connected graph of ranks; of several, one whose root has the lowest
    /// `rank_by`.
    pub(super) fn least_deep<'a>(
        world: usize,
        edges: impl IntoIterator<Item = &'a [Rank; 2]>,
        share: u64,
        rank_by: impl Fn(Rank) -> u64,
    ) -> Self {
        let mut neighbours = vec![Vec::new(); world];
        for [one, other] in edges {
            neighbours[*one].push(*other);
            neighbours[*other].push(*one);
        }
        let from = |root: Rank| {
            let mut parent = vec![None; world];
            let (mut order, mut next) = (vec![root], 0);
            while let Some(at) = order.get(next).copied() {
                next += 1;
                for other in &neighbours[at] {
                    if *other != root && parent[*other].is_none() {
                        parent[*other] = Some(at);
                        order.push(*other);
                    }
                }
            }
            Self { root, parent, share }
        };
        let key = |tree: &Self| (tree.depths().into_iter().max(), rank_by(tree.root));
        (0..world).map(from).min_by_key(key).expect("at least one rank")
    }

    /// By rank, the edges between it and the root.
    #[must_use]
    pub fn depths(&self) -> Vec<usize> {
        let up = |rank: Rank| std::iter::successors(self.parent[rank], |rank| self.parent[*rank]).count();
        (0..self.parent.len()).map(up).collect()
    }
}
