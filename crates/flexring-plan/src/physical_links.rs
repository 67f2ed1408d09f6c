//! The links of a topology that carry messages: one for each uplink, or several for a node whose ranks divide
//! its NICs.
//!
//! Owns their numbers, and which of them are between two ranks. This is the model, by which plans are chosen
//! and simulated; how RDMA ranks really divide the ports of their node is decided by
//! `src/transport/verbs/port_selection/division.rs`.
//!
//! A rank with several NICs sends each message over the one with the fewest bytes in flight, so its NICs are
//! one link that is as wide as they are together. The NICs of different ranks are different links.

use super::Rank;
use super::topology::{Topology, TopologyLink, VertexId};
use std::ops::Range;

/// Number of a link, from 0.
pub type PhysicalLink = usize;

/// A link, and whether it is crossed from a vertex to its parent, or from the first end of a link of a
/// fabric.
pub type DirectedLink = (PhysicalLink, bool);

/// The links of a topology.
#[derive(Clone, Debug)]
pub struct PhysicalLinks<'a> {
    topology: &'a Topology,
    /// By link in output, the number of its first part, and one at the end.
    first: Vec<PhysicalLink>,
}

impl<'a> PhysicalLinks<'a> {
    /// Numbers the links in the order of their vertices.
    #[must_use]
    pub fn new(topology: &'a Topology) -> Self {
        let mut first = vec![0];
        let mut next = 0;
        match topology.fabric() {
            // The first number stands for none.
            Some(fabric) => first.extend(0..=fabric.links().len()),
            None => {
                for vertex in 0..topology.vertices().len() {
                    next += topology.uplink_parts(vertex);
                    first.push(next);
                }
            }
        }
        Self { topology, first }
    }

    /// Number of links.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first[self.first.len() - 1]
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers of links in output, from 0, which is no link.
    #[must_use]
    pub fn in_output(&self) -> Range<TopologyLink> {
        0..self.first.len() - 1
    }

    /// The links that are one in output: the NICs of a node.
    #[must_use]
    pub fn of(&self, link: TopologyLink) -> Range<PhysicalLink> {
        self.first[link]..self.first[link + 1]
    }

    /// By link, the bytes that pass at once after a pause.
    pub fn bursts(&self) -> impl Iterator<Item = u64> + '_ {
        let burst = |link: TopologyLink, part: usize| match self.topology.fabric() {
            Some(fabric) => fabric.links()[link - 1].burst,
            None => self.topology.part_burst(link, part),
        };
        self.in_output().flat_map(move |link| (0..self.of(link).len()).map(move |part| burst(link, part)))
    }

    /// By link, bits per second in each direction: up and down, or from its first end and back.
    pub fn bandwidths(&self) -> impl Iterator<Item = [u64; 2]> + '_ {
        self.in_output().flat_map(move |link| {
            (0..self.of(link).len()).map(move |part| self.topology.part_bandwidths(link, part))
        })
    }

    /// The links from one rank to another, in order.
    #[must_use]
    pub fn path(&self, from: Rank, to: Rank) -> Vec<DirectedLink> {
        let topology = self.topology;
        if let Some(fabric) = topology.fabric() {
            return fabric.route(from, to);
        }
        let [up, down] = topology.uplinks_between(topology.leaf(from), topology.leaf(to));
        let link = |vertex: VertexId, rank: Rank| match self.of(vertex) {
            Range { start, end } if end - start == 1 => start,
            Range { start, .. } => start + topology.uplink_part_of(rank),
        };
        let up = up.into_iter().map(|vertex| (link(vertex, from), true));
        up.chain(down.into_iter().rev().map(|vertex| (link(vertex, to), false))).collect()
    }

    /// Nanoseconds from one rank to another.
    #[must_use]
    pub fn latency(&self, from: Rank, to: Rank) -> u64 {
        let topology = self.topology;
        match topology.fabric() {
            Some(fabric) => {
                fabric.route(from, to).iter().map(|(link, _)| fabric.links()[*link].latency).sum()
            }
            None => {
                let vertices =
                    topology.uplinks_between(topology.leaf(from), topology.leaf(to)).into_iter().flatten();
                vertices.map(|vertex| topology.vertices()[vertex].uplink.latency).sum()
            }
        }
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
        let bandwidths: Vec<[u64; 2]> = links.bandwidths().collect();
        let of = |node: usize| {
            bandwidths[links.of(nodes[node])].iter().map(|bits| bits[0] / 1_000_000_000).collect::<Vec<_>>()
        };
        assert_eq!([of(0), of(1), of(2)], [vec![20, 10], vec![10, 10], vec![10]]);
        // The third rank of the second node shares the first NIC.
        let first = links.of(nodes[1]).start;
        let up = |rank| links.path(rank, 5)[1].0;
        assert_eq!([2, 3, 4].map(up), [first, first + 1, first]);
        assert_eq!(links.path(5, 4)[2..], [(first, false), (links.of(topology.leaf(4)).start, false)]);
        // Within a node nothing passes its NICs.
        assert_eq!(links.path(2, 3).len(), 2);
    }
}
