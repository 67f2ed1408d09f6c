//! The least time of any all-reduce on a tree, from its bandwidths. ([`fabric`](flexring_plan::fabric) has
//! that on a graph.)
//!
//! Owns the bound and what limits it. Must not know schedules or latencies.
//!
//! - A link that separates ranks carries the vector once in each direction: the sums of each side need the
//!   other side's contributions.
//! - A region is a connected set of switches and nodes. Its d links to the rest of the tree separate d groups
//!   of ranks, which send at least 2 (d - 1) vectors to each other. Take one element. Before the first group
//!   has its sum, d - 1 groups have sent something that leads there; afterwards, each of the d - 1 others
//!   receives something. Each of these messages enters the region over one of its links, so the region takes
//!   at least 2 (d - 1) / (sum of the bandwidths of its links).
//!
//! No better bound follows from bandwidths. They allow time t if the elements can be divided among trees that
//! span the ranks, so that no link is crossed by more than its bandwidth times t; an element is reduced along
//! its tree, and broadcast back. Where a tree branches at a vertex with d links, its d - 1 edges there use 2
//! (d - 1) of the links' ends: each link once, and d - 2 more, which may be moved along the tree to where
//! there is bandwidth. So t suffices if and only if this linear program has a solution:
//!
//! ```text
//! least t   with   flow(u, v) = -flow(v, u),   |flow(u, v)| <= t bandwidth(u, v) - 1      for each link
//!                  sum over v of flow(u, v) = degree(u) - 2                               for each switch or node u
//! ```
//!
//! Its dual gives each link a price: the bound is the weight of the least spanning tree of the ranks, if the
//! distance of two ranks is the sum of the prices on their way. By the theorem of maximum flow and minimum
//! cut the flow exists unless some region has to give away more than its links take: the degrees of a region
//! with d links exceed 2 by d - 2 in all, and d - 2 <= t (sum of bandwidths) - d is the bound above. The best
//! region is found in a few passes over the tree, as that which the present t violates most (Dinkelbach
//! 1967).

use flexring_plan::fabric::FabricBound;
use flexring_plan::topology::{Topology, VertexId};

/// What limits every all-reduce.
#[derive(Clone, Debug, PartialEq)]
pub struct LowerBound {
    /// Seconds for each byte of the vector.
    pub seconds_per_byte: f64,
    /// Where the limit is.
    pub limit: Limit,
}

/// The part of a topology that limits every all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The uplink of this vertex, which carries the vector once each way.
    Link(VertexId),
    /// The d `branches` of a region, which carry 2 (d - 1) vectors together.
    Region {
        /// Its switches and nodes, in ascending order; the first one is the highest.
        vertices: Vec<VertexId>,
        /// Number of links that lead out of it.
        branches: usize,
    },
    /// Groups of ranks on a graph, which send vectors to each other.
    Groups {
        /// The names of the vertices of each group; the largest group is the last one.
        groups: Vec<Vec<String>>,
        /// Vectors that they send together, or 1 if it is that from the first to the second.
        vectors: usize,
        /// Bits per second of the links between them together.
        bandwidth: u64,
    },
}

/// Differences that are smaller than this part are rounding: of equal bounds the one with the simpler reason
/// is returned.
const ROUNDING: f64 = 1e-9;

/// The lower bound on this topology; `None` if there is one rank only, so that nothing needs to move.
#[must_use]
pub fn lower_bound(topology: &Topology) -> Option<LowerBound> {
    if let Some(fabric) = topology.fabric() {
        let FabricBound { seconds_per_byte, sets, vectors, bandwidth } = fabric.bound()?.clone();
        let names = |set: &Vec<usize>| set.iter().map(|vertex| fabric.names()[*vertex].clone()).collect();
        let mut groups: Vec<Vec<String>> = sets.iter().map(names).collect();
        if vectors > 1 {
            groups.sort_by_key(Vec::len);
        }
        return Some(LowerBound { seconds_per_byte, limit: Limit::Groups { groups, vectors, bandwidth } });
    }
    let tree = Tree::new(topology);
    let links = tree
        .separating()
        .map(|id| LowerBound { seconds_per_byte: 1.0 / tree.bandwidth[id], limit: Limit::Link(id) });
    // The first of bounds that are equal but for rounding.
    let mut bound = links.reduce(|first, next| {
        let is_longer = next.seconds_per_byte > first.seconds_per_byte * (1.0 + ROUNDING);
        if is_longer { next } else { first }
    })?;
    while let Some(longer) = tree.region_beyond(bound.seconds_per_byte) {
        bound = longer;
    }
    Some(bound)
}

/// The links that separate ranks.
struct Tree<'a> {
    topology: &'a Topology,
    /// By vertex, bytes per second of its uplink; 0 if it does not separate ranks.
    bandwidth: Vec<f64>,
}

impl<'a> Tree<'a> {
    fn new(topology: &'a Topology) -> Self {
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
        let bandwidth = (0..vertices.len()).map(|id| if separates(id) { speed(id) } else { 0.0 });
        Self { topology, bandwidth: bandwidth.collect() }
    }

    fn separating(&self) -> impl Iterator<Item = VertexId> + '_ {
        (1..self.bandwidth.len()).filter(|id| self.bandwidth[*id] > 0.0)
    }

    fn children(&self, id: VertexId) -> impl Iterator<Item = VertexId> + '_ {
        let children = self.topology.vertices()[id].children.iter().copied();
        children.filter(|child| self.bandwidth[*child] > 0.0)
    }

    /// The region that exceeds this time, in seconds per byte, by the most vectors; `None` if there is none.
    fn region_beyond(&self, time: f64) -> Option<LowerBound> {
        // A link out of a region contributes two vectors less what it carries in this time. By vertex, the
        // most that the links out of it and of what belongs to its region below it contribute, and whether
        // that is more than its uplink does.
        let cut = |id: VertexId| 2.0 - time * self.bandwidth[id];
        let mut below = vec![f64::NEG_INFINITY; self.bandwidth.len()];
        let mut joins = vec![false; self.bandwidth.len()];
        let mut best: Option<(f64, VertexId)> = None;
        for id in (0..below.len()).rev() {
            let contribution = |child: VertexId| if joins[child] { below[child] } else { cut(child) };
            if self.children(id).next().is_none() {
                continue;
            }
            below[id] = self.children(id).map(contribution).sum();
            let mut excess = below[id] - 2.0;
            if self.bandwidth[id] > 0.0 {
                joins[id] = below[id] > cut(id) + ROUNDING * (1.0 + cut(id).abs());
                excess += cut(id);
            }
            // Above the vertices that join it, a region only grows: the last of equal ones is the highest.
            if best.is_none_or(|(most, _)| excess > most + ROUNDING) {
                best = Some((excess, id));
            }
        }
        let (_, top) = best?;
        let (mut vertices, mut next) = (vec![top], 0);
        let mut links: Vec<VertexId> = (self.bandwidth[top] > 0.0).then_some(top).into_iter().collect();
        while let Some(id) = vertices.get(next).copied() {
            for child in self.children(id) {
                if joins[child] { vertices.push(child) } else { links.push(child) }
            }
            next += 1;
        }
        vertices.sort_unstable();
        let branches = links.len();
        let together: f64 = links.iter().map(|id| self.bandwidth[*id]).sum();
        let seconds_per_byte = 2.0 * (branches as f64 - 1.0) / together;
        let is_longer = seconds_per_byte > time * (1.0 + ROUNDING);
        is_longer.then_some(LowerBound { seconds_per_byte, limit: Limit::Region { vertices, branches } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;
    use flexring_plan::topology::{TopologyBuilder, Uplink};
    use flexring_plan::topology_file::parse_short;

    fn short(topology: &str) -> Topology {
        parse_short(topology).expect("short form").expect("valid")
    }

    fn bound(topology: &str) -> (f64, Limit) {
        let bound = lower_bound(&short(topology)).expect("several ranks");
        ((bound.seconds_per_byte * 1e12).round() / 1e3, bound.limit)
    }

    /// Switches and nodes, at most three levels deep, with links of 1 to 12 bytes per second and 2 to 7
    /// ranks.
    fn random_tree(random: &mut Rng) -> Topology {
        let uplink = |random: &mut Rng| Uplink::new(8 * random.u64(1..=12), 0);
        let mut builder = TopologyBuilder::new("root");
        let mut switches = vec![0];
        for _ in 0..random.usize(..3) {
            let parent = switches[random.usize(..switches.len())];
            switches.push(builder.switch(parent, "switch", uplink(random)));
        }
        let mut rank = 0;
        let world = 2 + random.usize(..6);
        while rank < world {
            let parent = switches[random.usize(..switches.len())];
            let node = builder.node(parent, "node", uplink(random));
            for _ in 0..1 + random.usize(..2) {
                builder.rank(node, rank, uplink(random));
                rank += 1;
            }
        }
        builder.finish().expect("ranks on each node")
    }

    /// The links between two ranks.
    fn way(topology: &Topology, from: usize, to: usize) -> Vec<VertexId> {
        topology.uplinks_between(topology.leaf(from), topology.leaf(to)).concat()
    }

    /// The longest bound of any set of vertices that is connected, by trying all.
    fn of_all_regions(topology: &Topology) -> f64 {
        let tree = Tree::new(topology);
        let inner: Vec<VertexId> =
            (0..tree.bandwidth.len()).filter(|id| tree.children(*id).next().is_some()).collect();
        let parent = |id: VertexId| topology.vertices()[id].parent;
        let mut longest = tree.separating().map(|id| 1.0 / tree.bandwidth[id]).fold(0.0, f64::max);
        for set in 1..1_usize << inner.len() {
            let has = |id: VertexId| {
                inner.iter().position(|other| *other == id).is_some_and(|at| set >> at & 1 == 1)
            };
            let tops = inner.iter().filter(|id| has(**id) && !parent(**id).is_some_and(has)).count();
            let links: Vec<VertexId> =
                tree.separating().filter(|id| has(*id) != parent(*id).is_some_and(has)).collect();
            if tops == 1 {
                let together: f64 = links.iter().map(|id| tree.bandwidth[*id]).sum();
                longest = f64::max(longest, 2.0 * (links.len() as f64 - 1.0) / together);
            }
        }
        longest
    }

    #[test]
    fn the_sends_of_d_equal_nodes_are_divided_among_their_links() {
        // At 10 Gbit/s a byte takes 0.8 ns.
        assert_eq!(bound("1+1"), (0.8, Limit::Link(1)));
        let switch = |branches| Limit::Region { vertices: vec![0], branches };
        assert_eq!(bound("1+1+1+1"), (1.2, switch(4)));
        assert_eq!(bound("3+3+4"), (1.067, switch(3)));
    }

    #[test]
    fn switches_with_wide_links_count_as_one() {
        // Six links of 10 Gbit/s send ten vectors: 10 / 6 of 0.8 ns. Each switch alone would allow 6 / (3 +
        // 10) of it.
        let (time, limit) = bound("(1+1+1)@100G+(1+1+1)@100G");
        assert_eq!((time, limit), (1.333, Limit::Region { vertices: vec![0, 1, 2], branches: 6 }));
        assert_eq!(bound("(1+1+1)@6G+(1+1+1)@6G").0, 1.333);
        assert_eq!(bound("(1+1+1)@5G+(1+1+1)@5G"), (1.6, Limit::Link(1)));
    }

    #[test]
    fn a_slow_link_carries_the_vector_once() {
        assert_eq!(bound("1@1G+1@1G+1@500M").0, 16.0);
        assert!(matches!(bound("(2+2)@1G+4").1, Limit::Link(_)));
    }

    #[test]
    fn one_rank_has_nothing_to_wait_for() {
        assert_eq!(lower_bound(&short("1")), None);
    }

    #[test]
    fn the_bound_is_that_of_the_worst_region() {
        for seed in 0..300 {
            let topology = random_tree(&mut Rng::with_seed(seed));
            let found = lower_bound(&topology).expect("several ranks").seconds_per_byte;
            let longest = of_all_regions(&topology);
            assert!((found / longest - 1.0).abs() < 1e-6, "seed {seed}: {found}, not {longest}");
        }
    }

    /// Trees that span the ranks are chosen one after the other, each the cheapest by prices that grow with
    /// the loads of the links (Garg and Koenemann 2007). Their mean approaches the best division of the
    /// elements among trees.
    #[test]
    fn elements_divided_among_trees_reach_the_bound() {
        const ROUNDS: usize = 4_000;
        for seed in 0..12 {
            let topology = random_tree(&mut Rng::with_seed(seed));
            let bound = lower_bound(&topology).expect("several ranks").seconds_per_byte;
            let speeds: Vec<f64> =
                topology.vertices().iter().map(|vertex| vertex.uplink.bytes_per_second()).collect();
            let mut loads = vec![0.0; speeds.len()];
            for _ in 0..ROUNDS {
                let times: Vec<f64> = loads.iter().zip(&speeds).map(|(load, speed)| load / speed).collect();
                let longest = times.iter().copied().fold(0.0, f64::max);
                let rate = 0.05 / bound;
                let price = |link: &VertexId| ((times[*link] - longest) * rate).exp() / speeds[*link];
                let distance = |from, to| way(&topology, from, to).iter().map(price).sum::<f64>();
                // Prim's algorithm: by rank outside of the tree, the nearest inside and its distance.
                let mut outside: Vec<(usize, usize, f64)> =
                    (1..topology.world()).map(|rank| (rank, 0, distance(rank, 0))).collect();
                while let Some(at) =
                    (0..outside.len()).min_by(|one, other| outside[*one].2.total_cmp(&outside[*other].2))
                {
                    let (rank, nearest, _) = outside.swap_remove(at);
                    way(&topology, rank, nearest).iter().for_each(|link| loads[*link] += 1.0);
                    for (other, nearest, length) in &mut outside {
                        let next = distance(*other, rank);
                        if next < *length {
                            (*nearest, *length) = (rank, next);
                        }
                    }
                }
            }
            let times = loads.iter().zip(&speeds).map(|(load, speed)| load / speed / ROUNDS as f64);
            let reached = times.fold(0.0, f64::max) / bound;
            assert!((1.0 - 1e-9..1.05).contains(&reached), "seed {seed}: {reached} times the bound");
        }
    }
}
