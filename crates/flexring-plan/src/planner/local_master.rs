//! Local masters: each node reduces onto its master, and the masters form a ring.

use crate::Rank;
use crate::fraction::Span;
use crate::schedule::{Group, ParticipantSet, Schedule};
use crate::topology::Topology;
use std::sync::Arc;

/// The three phases of Jia et al. (2018, as Lee et al., "FlexReduce", describe them): a reduction onto the
/// first rank of each node, a ring of these ranks, and a broadcast within each node. It sends as few bytes
/// over each node's link as possible, but one rank per node sends them while the others wait.
#[must_use]
pub fn plan(topology: &Topology) -> Schedule {
    let mut nodes: Vec<Vec<Rank>> = vec![Vec::new(); topology.nodes()];
    for rank in topology.ranks_in_tree_order() {
        nodes[topology.node_of(rank)].push(rank);
    }
    let masters: Vec<Rank> = nodes.iter().map(|ranks| ranks[0]).collect();
    let onto_master = |ranks: &Vec<Rank>| {
        let mut order = ranks.clone();
        order.rotate_left(1);
        Group::of(Span::WHOLE, order, ranks[0])
    };
    let within = nodes.iter().filter(|ranks| ranks.len() > 1).map(onto_master).collect();
    let set = ParticipantSet::all(masters.clone());
    let ring = |(place, root): (usize, &Rank)| Group {
        span: Span::part(place, masters.len()),
        set: Arc::clone(&set),
        first: (place + 1) % masters.len(),
        root: *root,
    };
    let between = masters.iter().enumerate().filter(|_| masters.len() > 1).map(ring).collect();
    let mut levels: Vec<Vec<Group>> = vec![within, between];
    levels.retain(|groups| !groups.is_empty());
    Schedule::new("local-master", topology.world(), levels)
}
