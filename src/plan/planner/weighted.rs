//! Weighted FlexReduce: who hangs at a slow link owns less.
//!
//! Ours. FlexReduce divides what a branch holds evenly among its children, so the slowest child's link sets the
//! time. But a child must send its own contribution once in any case, and moves more only for what it owns.
//!
//! # What a link carries
//!
//! Let child v of branch u, one of d children, own the share y of what u's ranks hold together. At u's level v
//! sends (1 - y) and receives (d - 1) y of the vector on the way down, and the reverse on the way up: 1 + (d - 2) y
//! each way. What v's ranks hold then, y, is dealt with again at the levels above u, which costs u's link C(u)
//! per whole vector and so v's link y C(u). Together, with C(root) = 0:
//!
//! > C(v) = 1 + y (d - 2 + C(u)), and for an only child C(v) = C(u).
//!
//! # The shares
//!
//! The time is t = max C(v) / w(v) over all links, with w the bandwidth. A given t allows a link C(v) <= t w(v).
//! Then a branch whose own cost is C can share out everything if the sum of (c(v) - 1) / (d - 2 + C) over its
//! children is at least 1, where c(v) is what the child can bear: the less of t w(v) and, from below,
//! 2 - d + sum (c - 1) over its own children. So the least t is found by bisection, each step one walk up the tree.
//! Shares then are as even as what the children can bear allows.

use super::flexreduce::{even_share, with_shares};
use crate::error::Result;
use crate::plan::fraction::Fraction;
use crate::plan::schedule::Schedule;
use crate::plan::topology::Topology;

/// Plans FlexReduce with the shares that minimise the time of the slowest link. Where even shares do that, it is
/// FlexReduce itself.
///
/// # Errors
/// As for [`flexreduce::plan`](super::flexreduce::plan).
pub fn plan(topology: &Topology) -> Result<Schedule> {
    let shares = shares(topology);
    with_shares("weighted", topology, |vertex| shares[vertex])
}

/// Times that differ by less than this part are equal; even shares are preferred to them.
const CLOSE: f64 = 1e-9;

/// Of each vertex, its part of what its parent's ranks hold together.
fn shares(topology: &Topology) -> Vec<Fraction> {
    let vertices = topology.vertices();
    let exact_even: Vec<Fraction> = (0..vertices.len()).map(|vertex| even_share(topology, vertex)).collect();
    let even: Vec<f64> = exact_even.iter().map(|share| share.to_f64()).collect();

    // Bisection between what no plan can beat and what even shares need.
    let (mut low, mut high) = (0.0, time(topology, &even));
    let evenly = high;
    while high - low > CLOSE / 4.0 * high {
        let middle = f64::midpoint(low, high);
        if bearable(topology, middle).is_some() { high = middle } else { low = middle }
    }
    let Some(bearable) = bearable(topology, high).filter(|_| high < evenly * (1.0 - CLOSE)) else {
        return exact_even;
    };
    let mut shares = exact_even;
    let mut cost = vec![0.0; vertices.len()];
    for (branch, vertex) in vertices.iter().enumerate().filter(|(_, vertex)| !vertex.children.is_empty()) {
        let children = &vertex.children;
        if let [only] = children[..] {
            cost[only] = cost[branch];
            continue;
        }
        let per_share = children.len() as f64 - 2.0 + cost[branch];
        let bounds: Vec<f64> =
            children.iter().map(|child| ((bearable[*child] - 1.0) / per_share).clamp(0.0, 1.0)).collect();
        // With two children at the root any share costs the same.
        let bounds = if per_share > 0.0 { bounds } else { vec![1.0; children.len()] };
        for (child, share) in children.iter().zip(fractions(&as_even_as(&bounds))) {
            shares[*child] = share;
            cost[*child] = 1.0 + share.to_f64() * per_share;
        }
    }
    shares
}

/// The time of the slowest link with these shares, for one bit of vector.
fn time(topology: &Topology, shares: &[f64]) -> f64 {
    let vertices = topology.vertices();
    let mut cost = vec![0.0; vertices.len()];
    let mut slowest = 0.0f64;
    for (id, vertex) in vertices.iter().enumerate().skip(1) {
        let parent = vertex.parent.unwrap_or(0);
        cost[id] = match vertices[parent].children.len() {
            1 => cost[parent],
            degree => 1.0 + shares[id] * (degree as f64 - 2.0 + cost[parent]),
        };
        slowest = slowest.max(cost[id] / vertex.uplink.bandwidth as f64);
    }
    slowest
}

/// What each vertex's link can bear in this time, the links below it considered; nothing if that is too little.
fn bearable(topology: &Topology, time: f64) -> Option<Vec<f64>> {
    let vertices = topology.vertices();
    let mut bearable = vec![0.0; vertices.len()];
    // Children come after their parents.
    for (id, vertex) in vertices.iter().enumerate().rev() {
        let link = if id == 0 { f64::INFINITY } else { time * vertex.uplink.bandwidth as f64 };
        let below = match vertex.children[..] {
            [] => f64::INFINITY,
            [only] => bearable[only],
            ref children => {
                if children.iter().any(|child| bearable[*child] < 1.0) {
                    return None;
                }
                2.0 - children.len() as f64 + children.iter().map(|child| bearable[*child] - 1.0).sum::<f64>()
            }
        };
        bearable[id] = link.min(below);
    }
    (bearable[0] >= 0.0).then_some(bearable)
}

/// Shares that add up to 1, none above its bound, and all that are below theirs equal.
fn as_even_as(bounds: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by(|one, other| bounds[*one].total_cmp(&bounds[*other]));
    let mut shares = vec![0.0; bounds.len()];
    let mut rest = 1.0;
    for (done, child) in order.iter().enumerate() {
        let level = rest / (bounds.len() - done) as f64;
        shares[*child] = bounds[*child].min(level);
        rest -= shares[*child];
    }
    // Rounding may leave a little: the last one can bear it.
    shares[order[bounds.len() - 1]] += rest;
    shares
}

/// Exact fractions that add up to 1. Shares that differ by rounding only become equal.
fn fractions(shares: &[f64]) -> Vec<Fraction> {
    /// Finer than any link's bandwidth is known.
    const PARTS: u64 = 1 << 16;
    let largest = shares.iter().copied().fold(0.0, f64::max);
    let alike = |share: f64| (largest - share).abs() < 1e-6;
    let owners = shares.iter().filter(|share| alike(**share)).count() as u64;
    if shares.iter().all(|share| alike(*share) || *share < 1e-6) {
        let part = |share: &f64| if alike(*share) { Fraction::new(1, owners) } else { Fraction::ZERO };
        return shares.iter().map(part).collect();
    }
    let mut parts: Vec<u64> = shares.iter().map(|share| (share * PARTS as f64).round() as u64).collect();
    let sum: u64 = parts.iter().sum();
    let most = (0..parts.len()).max_by_key(|child| parts[*child]).unwrap_or(0);
    parts[most] = parts[most] + PARTS - sum;
    parts.into_iter().map(|part| Fraction::new(part, PARTS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::topology::{TopologyBuilder, Uplink};

    fn megabits(bandwidth: u64) -> Uplink {
        Uplink { bandwidth: bandwidth * 1_000_000, ..Uplink::NODE_DEFAULT }
    }

    /// One rank on each node, with these links.
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
    fn a_slow_node_owns_nothing_where_its_contribution_alone_fills_its_link() {
        assert_eq!(shares_of(&[1000, 1000, 500]), ["1/2", "1/2", "0"]);
        assert_eq!(shares_of(&[1000, 500, 1000, 1000]), ["1/3", "0", "1/3", "1/3"]);
    }

    #[test]
    fn even_links_are_plain_flexreduce() {
        assert_eq!(shares_of(&[1000, 1000, 1000]), ["1/3", "1/3", "1/3"]);
        assert_eq!(shares_of(&[1000, 300]), ["1/2", "1/2"]);
        let topology = nodes(&[5, 5, 5, 5]);
        let (ours, theirs) = (plan(&topology), super::super::flexreduce::plan(&topology));
        assert_eq!(ours.expect("a plan").digest(), theirs.expect("a plan").digest());
    }

    #[test]
    fn a_slightly_slower_node_owns_slightly_less() {
        // Time 1/900 would leave the slow node nothing; the best is where all links take as long:
        // (1 + 2x) / 900 = (1 + 2(1 - x) / 3) / 1000.
        let topology = nodes(&[1000, 1000, 1000, 900]);
        let shares = shares(&topology);
        let slow = shares[topology.leaf(3) - 1].to_f64();
        let best = (900.0 * (1.0 + 2.0 / 3.0) - 1000.0) / (2000.0 + 600.0);
        assert!((slow - best).abs() < 1e-4, "{slow} and {best}");
    }

    #[test]
    fn a_slow_rack_is_spared_at_every_level() {
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
        let (ours, evenly) = (time(&topology, &as_floats), time(&topology, &even));
        assert!(ours < evenly * 0.97, "{ours} against {evenly}");
        // No grid of other shares at the root does better.
        let racks = topology.vertices()[0].children.clone();
        for slow in 0..=100 {
            let mut other = even.clone();
            other[racks[2]] = f64::from(slow) / 300.0;
            for rack in &racks[..2] {
                other[*rack] = (1.0 - other[racks[2]]) / 2.0;
            }
            assert!(time(&topology, &other) >= ours * (1.0 - 1e-4), "slow rack owns {}", other[racks[2]]);
        }
    }
}
