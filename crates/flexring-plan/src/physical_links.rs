//! The links of a topology that carry messages: one for each uplink, or several for a node whose ranks divide its NICs.
//!
//! Owns their numbers, and which of them are between two ranks. Must not know what is sent.
//!
//! A rank with several NICs sends each message over the one with the fewest bytes in flight, so its NICs are one link that is as wide as they are
//! together. The NICs of different ranks are different links.

use super::Rank;
use super::topology::{Topology, VertexId};
use std::ops::Range;

/// Number of a link, from 0.
pub type PhysicalLink = usize;

/// The links of a topology.
#[derive(Clone, Debug)]
pub struct PhysicalLinks<'a> {
    topology: &'a Topology,
    /// By vertex, the number of its first link, and one at the end.
    first: Vec<PhysicalLink>,
}

impl<'a> PhysicalLinks<'a> {
    /// Numbers the links in the order of their vertices.
    #[must_use]
    pub fn new(topology: &'a Topology) -> Self {
        let mut first = vec![0];
        let mut next = 0;
        for vertex in 0..topology.vertices().len() {
            next += topology.uplink_parts(vertex);
            first.push(next);
        }
        Self { topology, first }
    }

    /// Number of links.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first[self.first.len() - 1]
    }

    /// Whether there are none: a topology has at least its root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The links of which the uplink of a vertex consists.
    #[must_use]
    pub fn of(&self, vertex: VertexId) -> Range<PhysicalLink> {
        self.first[vertex]..self.first[vertex + 1]
    }

    /// By link, the bytes that pass at once after a pause.
    pub fn bursts(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.topology.vertices().len()).flat_map(move |vertex| {
            (0..self.of(vertex).len()).map(move |part| self.topology.part_burst(vertex, part))
        })
    }

    /// By link, bits per second in each direction.
    pub fn bandwidths(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.topology.vertices().len()).flat_map(move |vertex| {
            (0..self.of(vertex).len()).map(move |part| self.topology.part_bandwidth(vertex, part))
        })
    }

    /// The links from one rank to another: those that are climbed, and those that are descended, each from the lowest.
    #[must_use]
    pub fn between(&self, from: Rank, to: Rank) -> [Vec<PhysicalLink>; 2] {
        let topology = self.topology;
        let ways = topology.uplinks_between(topology.leaf(from), topology.leaf(to));
        let mut ends = [from, to].into_iter();
        ways.map(|vertices| {
            let part = ends.next().map_or(0, |rank| topology.uplink_part_of(rank));
            let link = |vertex: VertexId| match self.of(vertex) {
                Range { start, end } if end - start == 1 => start,
                Range { start, .. } => start + part,
            };
            vertices.into_iter().map(link).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology_file::parse_short;

    #[test]
    fn the_ranks_of_a_node_take_its_nics_in_turn() {
        let topology = parse_short("2@3*10G+3@2*10G+1").expect("short form").expect("valid");
        let links = PhysicalLinks::new(&topology);
        let nodes = topology.node_vertices();
        let bandwidths: Vec<u64> = links.bandwidths().collect();
        let of = |node: usize| {
            bandwidths[links.of(nodes[node])].iter().map(|bits| bits / 1_000_000_000).collect::<Vec<_>>()
        };
        assert_eq!([of(0), of(1), of(2)], [vec![20, 10], vec![10, 10], vec![10]]);
        // The third rank of the second node shares the first NIC.
        let first = links.of(nodes[1]).start;
        let up = |rank| links.between(rank, 5)[0][1];
        assert_eq!([2, 3, 4].map(up), [first, first + 1, first]);
        assert_eq!(links.between(5, 4)[1], [links.of(topology.leaf(4)).start, first]);
        // Within a node nothing passes its NICs.
        assert_eq!(links.between(2, 3).concat().len(), 2);
    }
}
