//! Trees that use all links of a graph (after Zhao, Wang et al., "ForestColl", 2024): each reduces and
//! broadcasts a span.

use crate::Rank;
use crate::fabric::SpanningTree;
use crate::fraction::{Fraction, Span};
use crate::schedule::{Group, Schedule};
use crate::topology::Topology;
use flexring_core::error::{Error, Result};

/// A level for each depth of the trees, and a group for each rank with children.
///
/// # Errors
/// `InvalidSetting` if the topology is a tree.
pub fn plan(topology: &Topology) -> Result<Schedule> {
    let Some(fabric) = topology.fabric() else {
        let message = "the topology is a tree: forest is for topology files with [[link]] tables";
        return Err(Error::invalid_setting(message.to_owned()));
    };
    let forest = fabric.forest();
    Ok(schedule(topology.world(), forest.trees.iter(), forest.shares))
}

/// A plan for short vectors: the least deep tree of the links that the forest uses, with the whole vector.
///
/// # Panics
/// If the topology is a tree.
#[must_use]
pub fn one_tree(topology: &Topology) -> Schedule {
    let fabric = topology.fabric().expect("a graph");
    schedule(topology.world(), std::iter::once(&fabric.forest().least_deep(topology.world())), 1)
}

/// The schedule of these trees, which have so many shares together.
fn schedule<'a>(world: usize, trees: impl Iterator<Item = &'a SpanningTree>, shares: u64) -> Schedule {
    let mut levels: Vec<Vec<Group>> = Vec::new();
    let mut before = 0;
    for tree in trees {
        let span =
            Span { start: Fraction::new(before, shares), end: Fraction::new(before + tree.share, shares) };
        before += tree.share;
        let mut members: Vec<Vec<Rank>> = vec![Vec::new(); world];
        for (rank, parent) in tree.parent.iter().enumerate() {
            if let Some(parent) = parent {
                members[*parent].push(rank);
            }
        }
        let depths = tree.depths();
        for (rank, mut ranks) in members.into_iter().enumerate().filter(|(_, ranks)| !ranks.is_empty()) {
            ranks.push(rank);
            if levels.len() <= depths[rank] {
                levels.resize_with(depths[rank] + 1, Vec::new);
            }
            levels[depths[rank]].push(Group::of(span, ranks, rank));
        }
    }
    // Sums move from the deepest ranks to the roots.
    levels.reverse();
    Schedule::new("forest", world, levels)
}
