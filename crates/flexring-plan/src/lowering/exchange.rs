//! How the participants of one group exchange data: in a chain, or directly with the root.
//!
//! Owns the choice between the two, and the order of the ranks in a chain.

use crate::Rank;
use crate::schedule::{Group, ParticipantSet};
use crate::thresholds::DIRECT_BETWEEN_NODES;
use crate::topology::Topology;
use flexring_core::config::Lowering;
use std::collections::HashMap;

/// How the contributions to a group's span reach its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangePattern {
    /// Each participant adds its contribution to the partial sum and forwards it to the next; the root is
    /// last.
    Chain,
    /// Every participant sends its contribution to the root, which adds all of them in one pass.
    Direct,
}

/// The exchange pattern for groups of `set`. Within a node, a direct exchange touches memory least: each of k
/// contributions is read once and one sum is written. Between nodes with one participant each, it moves as
/// much data as a chain in fewer steps. If a node has several participants, only a chain crosses each node's
/// link just once.
#[must_use]
pub fn pattern_of(set: &ParticipantSet, topology: &Topology, setting: Lowering) -> ExchangePattern {
    match setting {
        Lowering::Chain => return ExchangePattern::Chain,
        Lowering::Direct => return ExchangePattern::Direct,
        // A chain would join ranks that no link joins.
        Lowering::Auto if topology.fabric().is_some() => return ExchangePattern::Direct,
        Lowering::Auto => {}
    }
    let mut place_of_node = HashMap::new();
    let mut one_per_node = true;
    for (rank, place) in set.members() {
        one_per_node &= *place_of_node.entry(topology.node_of(rank)).or_insert(place) == place;
    }
    if place_of_node.len() == 1 || (one_per_node && set.len() <= DIRECT_BETWEEN_NODES) {
        ExchangePattern::Direct
    } else {
        ExchangePattern::Chain
    }
}

/// Number of ranks in a group's chain: the participants, and the root if it is not one of them.
#[must_use]
pub fn chain_len(group: &Group) -> usize {
    group.len() + usize::from(group.place_of(group.root).is_none())
}

/// The ranks of a group's chain in order, without the root, which is last.
pub(crate) fn chain_before_root(group: &Group) -> impl Iterator<Item = Rank> + '_ {
    group.participants().filter(|rank| *rank != group.root)
}

/// The rank at `place` in the chain, from 0; the root is last.
#[must_use]
pub fn chain_rank(group: &Group, place: usize) -> Rank {
    match group.place_of(group.root) {
        _ if place + 1 == chain_len(group) => group.root,
        Some(root) if place >= root => group.participant(place + 1),
        _ => group.participant(place),
    }
}

/// The place of `rank` in the chain, from 0.
pub(super) fn chain_place(group: &Group, rank: Rank) -> usize {
    let root = group.place_of(group.root);
    match group.place_of(rank) {
        _ if rank == group.root => chain_len(group) - 1,
        Some(place) => place - usize::from(root.is_some_and(|root| root < place)),
        None => unreachable!("the rank is in the group"),
    }
}
