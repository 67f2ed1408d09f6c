//! Weighted FlexReduce: ranks behind a slow link own less.
//!
//! An extension of FlexReduce by this project. FlexReduce divides what a branch holds evenly among its
//! children, so the child with the slowest link determines the time. But every child must send its own
//! contribution once; only the bytes beyond that depend on what it owns.
//!
//! # Load of a link
//!
//! Let v be one of d children of branch u, and own the share y of what u's ranks hold together. At u's level,
//! v sends (1 - y) and receives (d - 1) y of the vector in the reduction, and the reverse in the gather: 1 +
//! (d - 2) y in each direction. The share y is processed again at the levels above u, which loads u's link
//! with C(u) per whole vector, and so v's link with y C(u). Together, with C(root) = 0:
//!
//! > C(v) = 1 + y (d - 2 + C(u)), and for an only child C(v) = C(u).
//!
//! # Shares
//!
//! The time is t = max C(v) / w(v) over all links, where w is the bandwidth. A given t limits a link to C(v)
//! <= t w(v). A branch with cost C can distribute everything to its children if the sum of (c(v) - 1) / (d -
//! 2 + C) over them is at least 1. Here c(v) is the capacity of the child: the minimum of t w(v) and of the
//! limit from its own children, 2 - d + sum (c - 1). The smallest t is found by bisection, each step with one
//! walk up the tree. Each branch then divides its share so that the links to those of its children that own
//! some of it take as little of t as possible: where several links are busy all the time, they wait for each
//! other.
//!
//! Ranks that divide the NICs of their node ([`Nics`](crate::topology::Nics)) own so much that each NIC takes
//! equally long: with four NICs for six ranks, two pairs of ranks own an eighth each, and two ranks a quarter
//! each.

use super::flexreduce::{even_share, with_shares};
use crate::fraction::Fraction;
use crate::schedule::Schedule;
use crate::topology::{Topology, VertexId};
use flexring_core::error::Result;

/// FlexReduce with the shares that minimize the time of the slowest link. If even shares do that, it equals
/// FlexReduce.
///
/// # Errors
/// As for [`flexreduce::plan`](super::flexreduce::plan).
pub fn plan(topology: &Topology) -> Result<Schedule> {
    let shares = shares(topology);
    with_shares("weighted", topology, |vertex| shares[vertex])
}

/// Relative difference below which times count as equal. Even shares win over shares that are not faster by
/// this much.
const CLOSE: f64 = 1e-9;

/// Relative precision of the time within which the children of a branch can own all.
const PRECISION: f64 = 1e-6;

/// By vertex, its share of what its parent's ranks hold together.
fn shares(topology: &Topology) -> Vec<Fraction> {
    let vertices = topology.vertices();
    let exact_even: Vec<Fraction> = (0..vertices.len()).map(|vertex| even_share(topology, vertex)).collect();
    let even: Vec<f64> = exact_even.iter().map(|share| share.to_f64()).collect();

    // Bisection between 0 and the time of even shares.
    let (mut low, mut high) = (0.0, weighted_flexreduce(topology, &even));
    let evenly = high;
    while high - low > CLOSE / 4.0 * high {
        let middle = f64::midpoint(low, high);
        if capacities(topology, middle).is_some() { high = middle } else { low = middle }
    }
    if high >= evenly * (1.0 - CLOSE) || capacities(topology, high).is_none() {
        return exact_even;
    }
    // Exact spans have the product of the denominators of all levels, and numbers of more than 64 bits take
    // long.
    let parts = 1 << (60 / (1 + divisions(topology))).clamp(10, 16);
    let mut shares = exact_even;
    let mut cost = vec![0.0; vertices.len()];
    for (branch, vertex) in vertices.iter().enumerate().filter(|(_, vertex)| !vertex.children.is_empty()) {
        let children = &vertex.children;
        if let [only] = children[..] {
            cost[only] = cost[branch];
            continue;
        }
        let per_share = children.len() as f64 - 2.0 + cost[branch];
        let nics = NodeNics::of(topology, branch);
        // What each child can own in a time.
        let bounds_within = |time: f64| {
            let bound = |(place, child): (usize, &VertexId)| {
                // With two children at the root, every share costs the same.
                let most = match per_share > 0.0 {
                    true => ((capacity(topology, *child, time) - 1.0) / per_share).clamp(0.0, 1.0),
                    false => 1.0,
                };
                // What the ranks of a node send to others passes the NICs that each of them uses.
                let by_nic =
                    |nics: &NodeNics<'_>| time * nics.bytes_per_second(place) / cost[branch].max(CLOSE);
                nics.as_ref().map_or(most, |nics| most.min(by_nic(nics)))
            };
            children.iter().enumerate().map(bound).collect::<Vec<f64>>()
        };
        let (mut low, mut most) = (0.0, high);
        while most - low > PRECISION * most {
            let middle = f64::midpoint(low, most);
            if bounds_within(middle).iter().sum::<f64>() >= 1.0 { most = middle } else { low = middle }
        }
        for (child, share) in children.iter().zip(fractions(&even_within(&bounds_within(most)), parts)) {
            shares[*child] = share;
            cost[*child] = 1.0 + share.to_f64() * per_share;
        }
    }
    shares
}

/// The most branches with several children on the way to a rank.
fn divisions(topology: &Topology) -> usize {
    let vertices = topology.vertices();
    let mut above = vec![0; vertices.len()];
    for (id, vertex) in vertices.iter().enumerate().skip(1) {
        let parent = vertex.parent.unwrap_or(0);
        above[id] = above[parent] + usize::from(vertices[parent].children.len() > 1);
    }
    above.into_iter().max().unwrap_or(0)
}

/// The NICs of a node whose ranks divide them.
struct NodeNics<'a> {
    topology: &'a Topology,
    node: VertexId,
    parts: usize,
    ranks: usize,
}

impl<'a> NodeNics<'a> {
    /// `None` if each rank uses all NICs, or if the vertex is no node.
    fn of(topology: &'a Topology, node: VertexId) -> Option<Self> {
        let (parts, ranks) = (topology.uplink_parts(node), topology.vertices()[node].children.len());
        (parts > 1).then_some(Self { topology, node, parts, ranks })
    }

    /// What a rank, by its place on the node, has of its NICs if the others that use them have as much.
    fn bytes_per_second(&self, place: usize) -> f64 {
        let part = place % self.parts;
        let sharers = (self.ranks - part).div_ceil(self.parts);
        self.topology.part_bandwidth(self.node, part) as f64 / 8.0 / sharers as f64
    }
}

/// The time of the slowest link for each byte of the vector, if each vertex
/// owns the given share of what its parent's ranks hold. `shares` are by vertex.
fn weighted_flexreduce(topology: &Topology, shares: &[f64]) -> f64 {
    let vertices = topology.vertices();
    let mut load = vec![0.0; vertices.len()];
    let mut slowest = 0.0f64;
    for (id, vertex) in vertices.iter().enumerate().skip(1) {
        let parent = vertex.parent.unwrap_or(0);
        load[id] = match vertices[parent].children.len() {
            1 => load[parent],
            degree => 1.0 + shares[id] * (degree as f64 - 2.0 + load[parent]),
        };
        slowest = slowest.max(load[id] / vertex.uplink.bytes_per_second());
        if let Some(nics) = NodeNics::of(topology, parent) {
            let place = vertices[parent].children.iter().position(|child| *child == id).unwrap_or(0);
            slowest = slowest.max(shares[id] * load[parent] / nics.bytes_per_second(place));
        }
    }
    slowest
}

/// By vertex, the capacity c of its link in this time, limited by the links below it; `None` if the time is
/// too short.
fn capacities(topology: &Topology, time: f64) -> Option<Vec<f64>> {
    let vertices = topology.vertices();
    let mut capacity = vec![0.0; vertices.len()];
    // Children come after their parents.
    for (id, vertex) in vertices.iter().enumerate().rev() {
        let link = if id == 0 { f64::INFINITY } else { time * vertex.uplink.bytes_per_second() };
        let below = match vertex.children[..] {
            [] => f64::INFINITY,
            [only] => capacity[only],
            ref children => {
                if children.iter().any(|child| capacity[*child] < 1.0) {
                    return None;
                }
                2.0 - children.len() as f64 + children.iter().map(|child| capacity[*child] - 1.0).sum::<f64>()
            }
        };
        capacity[id] = link.min(below);
    }
    (capacity[0] >= 0.0).then_some(capacity)
}

/// The capacity of the link of `vertex` in this time, limited by the links below it, of which those that take
/// longer own nothing.
fn capacity(topology: &Topology, vertex: VertexId, time: f64) -> f64 {
    let vertices = topology.vertices();
    let below = match vertices[vertex].children[..] {
        [] => f64::INFINITY,
        [only] => capacity(topology, only, time),
        ref children => {
            let more = |child: &VertexId| (capacity(topology, *child, time) - 1.0).max(0.0);
            2.0 - children.len() as f64 + children.iter().map(more).sum::<f64>()
        }
    };
    below.min(time * vertices[vertex].uplink.bytes_per_second())
}

/// Shares that add up to 1 and do not exceed their bounds. All shares below their bounds are equal.
fn even_within(bounds: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by(|one, other| bounds[*one].total_cmp(&bounds[*other]));
    let mut shares = vec![0.0; bounds.len()];
    let mut rest = 1.0;
    for (done, child) in order.iter().enumerate() {
        let level = rest / (bounds.len() - done) as f64;
        shares[*child] = bounds[*child].min(level);
        rest -= shares[*child];
    }
    // The share with the largest bound takes what rounding leaves.
    shares[order[bounds.len() - 1]] += rest;
    shares
}

/// The shares as exact fractions that add up to 1, of this many parts or more. Shares that differ only by
/// rounding become equal.
fn fractions(shares: &[f64], parts: u64) -> Vec<Fraction> {
    let largest = shares.iter().copied().fold(0.0, f64::max);
    let near_largest = |share: f64| (largest - share).abs() < 1e-6;
    let owners = shares.iter().filter(|share| near_largest(**share)).count() as u64;
    if shares.iter().all(|share| near_largest(*share) || *share < 1e-6) {
        let part = |share: &f64| if near_largest(*share) { Fraction::new(1, owners) } else { Fraction::ZERO };
        return shares.iter().map(part).collect();
    }
    // Finer than the accuracy of any link's bandwidth. The largest share takes the rounding of all, at most
    // half a part each, which must be little beside the share of one of many.
    let all = if shares.len() <= 8 { parts } else { parts * shares.len().next_power_of_two() as u64 };
    let mut parts: Vec<u64> = shares.iter().map(|share| (share * all as f64).round() as u64).collect();
    let sum: u64 = parts.iter().sum();
    let most = (0..parts.len()).max_by_key(|child| parts[*child]).unwrap_or(0);
    parts[most] = (parts[most] + all).saturating_sub(sum);
    parts.into_iter().map(|part| Fraction::new(part, all)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{TopologyBuilder, Uplink};

    fn megabits(bandwidth: u64) -> Uplink {
        Uplink { bandwidth: bandwidth * 1_000_000, ..Uplink::NODE_DEFAULT }
    }

    /// Nodes of one rank each, with these bandwidths in Mbit/s.
    fn nodes(bandwidths: &[u64]) -> Topology {
        let mut builder = TopologyBuilder::new("switch");
        for (rank, bandwidth) in bandwidths.iter().enumerate() {
            let node = builder.node(0, &format!("n{rank}"), megabits(*bandwidth));
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        builder.finish().expect("a tree")
    }

    fn shares_of(bandwidths: &[u64]) -> Vec<String> {
        let topology = nodes(bandwidths);
        let shares = shares(&topology);
        topology.vertices()[0].children.iter().map(|node| shares[*node].to_string()).collect()
    }

    #[test]
    fn a_slow_node_owns_nothing_if_its_contribution_alone_fills_its_link() {
        assert_eq!(shares_of(&[1000, 1000, 500]), ["1/2", "1/2", "0"]);
        assert_eq!(shares_of(&[1000, 500, 1000, 1000]), ["1/3", "0", "1/3", "1/3"]);
    }

    #[test]
    fn equal_links_give_plain_flexreduce() {
        assert_eq!(shares_of(&[1000, 1000, 1000]), ["1/3", "1/3", "1/3"]);
        assert_eq!(shares_of(&[1000, 300]), ["1/2", "1/2"]);
        let topology = nodes(&[5, 5, 5, 5]);
        let (ours, theirs) = (plan(&topology), super::super::flexreduce::plan(&topology));
        assert_eq!(ours.expect("a plan").digest(), theirs.expect("a plan").digest());
    }

    #[test]
    fn nodes_whose_links_have_time_to_spare_own_all() {
        assert_eq!(shares_of(&[100, 180, 10_000, 10_000]), ["0", "0", "1/2", "1/2"]);
    }

    #[test]
    fn a_slightly_slower_node_owns_slightly_less() {
        // With time 1/900 the slow node would own nothing. The optimum is where all links take equally long:
        // (1 + 2x) / 900 = (1 + 2(1 - x) / 3) / 1000.
        let topology = nodes(&[1000, 1000, 1000, 900]);
        let shares = shares(&topology);
        let slow = shares[topology.leaf(3) - 1].to_f64();
        let best = (900.0 * (1.0 + 2.0 / 3.0) - 1000.0) / (2000.0 + 600.0);
        assert!((slow - best).abs() < 1e-4, "{slow} and {best}");
    }

    #[test]
    fn ranks_that_share_a_nic_own_less() {
        let topology =
            crate::topology_file::parse_short("6@4*10G+6@4*10G").expect("short form").expect("valid");
        let shares = shares(&topology);
        for node in topology.node_vertices() {
            let ranks = topology.vertices()[node].children.iter();
            let shares: Vec<String> = ranks.map(|rank| shares[*rank].to_string()).collect();
            assert_eq!(shares, ["1/8", "1/8", "1/4", "1/4", "1/8", "1/8"]);
        }
    }

    #[test]
    fn a_slow_rack_owns_less_at_every_level() {
        let mut builder = TopologyBuilder::new("spine");
        let mut rank = 0;
        for (rack, bandwidth) in [4000, 4000, 500].into_iter().enumerate() {
            let switch = builder.switch(0, &format!("rack {rack}"), megabits(bandwidth));
            for node in 0..3 {
                let node = builder.node(switch, &format!("node {rack}.{node}"), megabits(1000));
                builder.rank(node, rank, Uplink::RANK_DEFAULT);
                rank += 1;
            }
        }
        let topology = builder.finish().expect("a tree");
        let found = shares(&topology);
        let as_floats: Vec<f64> = found.iter().map(|share| share.to_f64()).collect();
        let even: Vec<f64> = topology
            .vertices()
            .iter()
            .map(|vertex| vertex.parent.map_or(1.0, |p| 1.0 / topology.vertices()[p].children.len() as f64))
            .collect();
        let (ours, evenly) =
            (weighted_flexreduce(&topology, &as_floats), weighted_flexreduce(&topology, &even));
        assert!(ours < evenly * 0.97, "{ours} against {evenly}");
        // No other shares at the root, on a grid of 101, are faster.
        let racks = topology.vertices()[0].children.clone();
        for slow in 0..=100 {
            let mut other = even.clone();
            other[racks[2]] = f64::from(slow) / 300.0;
            for rack in &racks[..2] {
                other[*rack] = (1.0 - other[racks[2]]) / 2.0;
            }
            assert!(
                weighted_flexreduce(&topology, &other) >= ours * (1.0 - 1e-4),
                "slow rack owns {}",
                other[racks[2]]
            );
        }
    }

    /// Counter-example: the rounding of 699 equal shares made that of one node negative, or twice as large as
    /// the others.
    #[test]
    fn shares_of_many_nodes_are_as_even_as_their_links() {
        for nodes in [9, 64, 600, 700] {
            let mut shares = vec![1.0 / (nodes as f64 - 0.2); nodes];
            shares[nodes / 2] *= 0.8;
            let found: Vec<f64> = fractions(&shares, 1 << 16).iter().map(|share| share.to_f64()).collect();
            assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{nodes}");
            let differs = |(share, found): (&f64, &f64)| (share - found).abs() > 0.01 * share;
            assert!(!shares.iter().zip(&found).any(differs), "{nodes}: {found:?}");
        }
    }

    #[test]
    fn the_slowest_link_determines_the_time_of_weighted_shares() {
        let mut builder = TopologyBuilder::new("switch");
        for (rank, bandwidth) in [8_000_000_000, 8_000_000_000, 4_000_000_000].into_iter().enumerate() {
            let node = builder.node(0, "node", Uplink::new(bandwidth, 0));
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        let topology = builder.finish().expect("a tree");
        let time = |slow: f64| {
            let fast = (1.0 - slow) / 2.0;
            let share = |bandwidth| match bandwidth {
                4_000_000_000 => slow,
                8_000_000_000 => fast,
                _ => 1.0,
            };
            let vertices = topology.vertices().iter();
            let shares: Vec<f64> = vertices.map(|vertex| share(vertex.uplink.bandwidth)).collect();
            weighted_flexreduce(&topology, &shares)
        };
        // The slow link sends the vector once at least.
        assert!((time(0.0) * 0.5e9 - 1.0).abs() < CLOSE);
        assert!((time(1.0 / 3.0) * 0.5e9 - 4.0 / 3.0).abs() < CLOSE);
    }
}
