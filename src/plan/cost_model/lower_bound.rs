//! The least time of any all-reduce on a tree, from its bandwidths.
//!
//! Owns the two arguments below. Must not know schedules or latencies.
//!
//! - A link that separates ranks carries the vector once in each direction: the sums of each side need the other side's
//!   contributions.
//! - Ranks at d branches of one vertex send at least 2 (d - 1) vectors between these branches: of each element, d - 1 branches
//!   must give a contribution away, and d - 1 must get the sum. The link to the rest of the tree counts as a branch.

use crate::plan::topology::{Topology, VertexId};

/// What limits every all-reduce on a tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowerBound {
    /// Seconds for each byte of the vector.
    pub seconds_per_byte: f64,
    /// Where the limit is.
    pub limit: Limit,
}

/// The part of a tree that limits every all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The uplink of this vertex, which carries the vector once each way.
    Link(VertexId),
    /// All links of this vertex that separate ranks, d `branches`, which carry 2 (d - 1) vectors together.
    Vertex {
        /// The vertex.
        id: VertexId,
        /// Number of its links that separate ranks.
        branches: usize,
    },
}

/// The lower bound on this tree; `None` if there is one rank only, so that nothing needs to move.
#[must_use]
pub fn lower_bound(topology: &Topology) -> Option<LowerBound> {
    let vertices = topology.vertices();
    let world = topology.world();
    // By vertex, the ranks below it. Parents have smaller numbers than their children.
    let mut below = vec![0; vertices.len()];
    (0..world).for_each(|rank| below[topology.leaf(rank)] = 1);
    for id in (1..vertices.len()).rev() {
        below[vertices[id].parent.unwrap_or(0)] += below[id];
    }
    let separates = |id: VertexId| id > 0 && below[id] < world;
    let speed = |id: VertexId| vertices[id].uplink.bytes_per_second();
    let links = (1..vertices.len())
        .filter(|id| separates(*id))
        .map(|id| LowerBound { seconds_per_byte: 1.0 / speed(id), limit: Limit::Link(id) });
    let joints = vertices.iter().enumerate().filter_map(|(id, vertex)| {
        let branches: Vec<VertexId> =
            vertex.children.iter().copied().chain([id]).filter(|branch| separates(*branch)).collect();
        let together: f64 = branches.iter().map(|branch| speed(*branch)).sum();
        let seconds_per_byte = 2.0 * (branches.len() as f64 - 1.0) / together;
        let limit = Limit::Vertex { id, branches: branches.len() };
        (branches.len() > 1).then_some(LowerBound { seconds_per_byte, limit })
    });
    // The first of bounds that are equal but for rounding: a link is the simpler reason.
    links.chain(joints).reduce(|first, next| {
        if next.seconds_per_byte > first.seconds_per_byte * (1.0 + 1e-9) { next } else { first }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::topology_file::parse_short;

    fn bound(topology: &str) -> (f64, Limit) {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let bound = lower_bound(&topology).expect("several ranks");
        ((bound.seconds_per_byte * 1e12).round() / 1e3, bound.limit)
    }

    #[test]
    fn the_sends_of_d_equal_nodes_are_divided_among_their_links() {
        // At 10 Gbit/s a byte takes 0.8 ns.
        assert_eq!(bound("1+1"), (0.8, Limit::Link(1)));
        assert_eq!(bound("1+1+1+1"), (1.2, Limit::Vertex { id: 0, branches: 4 }));
        assert_eq!(bound("3+3+4"), (1.067, Limit::Vertex { id: 0, branches: 3 }));
    }

    #[test]
    fn a_slow_link_carries_the_vector_once() {
        assert_eq!(bound("1@1G+1@1G+1@500M").0, 16.0);
        assert!(matches!(bound("(2+2)@1G+4").1, Limit::Link(_)));
    }

    #[test]
    fn one_rank_has_nothing_to_wait_for() {
        let topology = parse_short("1").expect("short form").expect("valid");
        assert_eq!(lower_bound(&topology), None);
    }
}
