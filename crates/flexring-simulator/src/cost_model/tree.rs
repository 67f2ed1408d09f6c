//! FlexReduce and BlueConnect on a tree. Equation numbers are those of the FlexReduce paper.
//!
//! Owns the cost per level of the tree. Must not know how ranges are assigned. The paper counts levels from
//! the branches that have ranks (0) to the root (L - 1). It gives a branch x one bandwidth w_x for the links
//! to its children; where these differ, the slowest counts.

use flexring_plan::Rank;
use flexring_plan::topology::{Topology, VertexId};

/// Eq. 1: one message of `n` bytes, after the latency `alpha`.
#[must_use]
pub fn message(n: f64, alpha: f64, w: f64) -> f64 {
    alpha + n / w
}

/// Eq. 2: the reduce-scatter of `n` bytes in a ring of `d` ranks. An all-gather takes as long.
#[must_use]
pub fn reduce_scatter(n: f64, d: usize, alpha: f64, w: f64) -> f64 {
    let d = d as f64;
    (d - 1.0) * message(n / d, alpha, w)
}

/// A level of a symmetric tree, as in Eq. 7.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeLevel {
    /// Children of each branch of the level.
    pub degree: usize,
    /// Bandwidth of the link of each of these children.
    pub bandwidth: f64,
}

/// The levels of a symmetric topology, from the ranks up, each with the bandwidth of its slowest link; `None`
/// if it is not symmetric.
#[must_use]
pub fn symmetric_levels(topology: &Topology) -> Option<Vec<TreeLevel>> {
    topology.dimensions().ok()?;
    let level = |branches: Vec<VertexId>| TreeLevel {
        degree: degree(topology, branches[0]),
        bandwidth: branches.iter().map(|x| width(topology, *x)).fold(f64::INFINITY, f64::min),
    };
    Some(branches_by_level(topology).into_iter().map(level).collect())
}

/// Eq. 3: BlueConnect on a symmetric tree, whose `levels` are listed from the ranks up. The extracted text of
/// the equation has lost its limits; these are the ones that Eq. 10 derives.
#[must_use]
pub fn blueconnect(n: f64, alpha: f64, levels: &[TreeLevel]) -> f64 {
    let (mut ranks_below, mut narrowest, mut total) = (1.0, f64::INFINITY, 0.0);
    for level in levels {
        narrowest = f64::min(narrowest, level.bandwidth / ranks_below);
        total += reduce_scatter(n / ranks_below, level.degree, alpha, narrowest);
        ranks_below *= level.degree as f64;
    }
    2.0 * total
}

/// Eq. 4: the reduce-scatter at level 0 of the tree.
#[must_use]
pub fn flexreduce_first_level(n: f64, alpha: f64, topology: &Topology) -> f64 {
    let branches = branches_by_level(topology);
    let times =
        branches[0].iter().map(|x| reduce_scatter(n, degree(topology, *x), alpha, width(topology, *x)));
    times.fold(0.0, f64::max)
}

/// Eq. 5: the reduce-scatter at level 1, which takes as long as the links of level 1 or of level 0; 0 if
/// there is no level 1.
#[must_use]
pub fn flexreduce_second_level(n: f64, alpha: f64, topology: &Topology) -> f64 {
    let branches = branches_by_level(topology);
    let Some(above) = branches.get(1) else { return 0.0 };
    let upper = above.iter().map(|x| reduce_scatter(n, degree(topology, *x), alpha, width(topology, *x)));
    let lower = branches[0].iter().map(|x| {
        let parent = topology.vertices()[*x].parent.unwrap_or(0);
        let part = n / degree(topology, *x) as f64;
        reduce_scatter(part, degree(topology, parent), alpha, width(topology, *x))
    });
    upper.chain(lower).fold(0.0, f64::max)
}

/// Eq. 6: FlexReduce. At each level the slowest link of that level or of one below it determines the time.
#[must_use]
pub fn flexreduce(n: f64, alpha: f64, topology: &Topology) -> f64 {
    let branches = branches_by_level(topology);
    let mut slowest = vec![0.0; branches.len()];
    for (level, branches) in branches.iter().enumerate() {
        for x in branches {
            let (mut part, mut ancestor) = (n, *x);
            for slowest in &mut slowest[level..] {
                let degree = degree(topology, ancestor);
                *slowest = f64::max(*slowest, reduce_scatter(part, degree, alpha, width(topology, *x)));
                part /= degree as f64;
                ancestor = topology.vertices()[ancestor].parent.unwrap_or(0);
            }
        }
    }
    2.0 * slowest.iter().sum::<f64>()
}

/// Eq. 12: the most reductions onto `rank` at level `level` of the tree, if no two boundaries of ranges
/// coincide. The paper states it for the root's level; at a lower level the sum is over the children of the
/// rank's branch at that level. `None` if the rank has no branch at that level.
#[must_use]
pub fn reduce_call_bound(topology: &Topology, rank: Rank, level: usize) -> Option<u64> {
    let branches = branches_by_level(topology);
    let above = |vertex: VertexId| topology.vertices()[vertex].parent;
    let leaf = topology.leaf(rank);
    let branch = std::iter::successors(above(leaf), |vertex| above(*vertex))
        .find(|vertex| branches.get(level).is_some_and(|branches| branches.binary_search(vertex).is_ok()))?;
    // The product of the degrees from the parent of a leaf up to an ancestor, that ancestor included.
    let divisions = |leaf: VertexId, top: VertexId| -> f64 {
        let path =
            std::iter::successors(above(leaf), |vertex| above(*vertex)).filter(|vertex| *vertex >= top);
        path.take_while(|vertex| topology.lowest_common_ancestor(*vertex, top) == top)
            .map(|vertex| degree(topology, vertex) as f64)
            .product()
    };
    let next_range = 1.0 / divisions(leaf, branch);
    let children = topology.vertices()[branch].children.iter();
    let boundaries = children.map(|child| {
        let leaves = leaves_below(topology, *child);
        let shortest =
            leaves.iter().map(|leaf| if leaf == child { 1.0 } else { 1.0 / divisions(*leaf, *child) });
        // The tolerance covers rounding where the quotient is a whole number.
        (next_range / shortest.fold(1.0, f64::min) - 1e-9).ceil() as u64
    });
    Some(boundaries.sum::<u64>() + 1)
}

/// The branches by level, from the lowest level to the root, each level in rising order.
fn branches_by_level(topology: &Topology) -> Vec<Vec<VertexId>> {
    let mut levels = topology.levels();
    levels.reverse();
    levels.iter_mut().for_each(|level| level.sort_unstable());
    levels
}

/// Number of children of a branch: d_x.
fn degree(topology: &Topology, branch: VertexId) -> usize {
    topology.vertices()[branch].children.len()
}

/// The bandwidth of the slowest link to a child of a branch: w_x.
fn width(topology: &Topology, branch: VertexId) -> f64 {
    let children = topology.vertices()[branch].children.iter();
    let bandwidths = children.map(|child| topology.vertices()[*child].uplink.bytes_per_second());
    bandwidths.fold(f64::INFINITY, f64::min)
}

fn leaves_below(topology: &Topology, top: VertexId) -> Vec<VertexId> {
    let (mut leaves, mut stack) = (Vec::new(), vec![top]);
    while let Some(vertex) = stack.pop() {
        match &topology.vertices()[vertex].children[..] {
            [] => leaves.push(vertex),
            children => stack.extend(children),
        }
    }
    leaves
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology::{TopologyBuilder, Uplink};
    use proptest::prelude::*;

    /// A symmetric tree with these levels, from the ranks up.
    fn symmetric(levels: &[TreeLevel]) -> Topology {
        let uplink = |level: &TreeLevel| Uplink::new((level.bandwidth * 8.0) as u64, 0);
        let mut builder = TopologyBuilder::new("root");
        let mut branches = vec![0];
        for (number, level) in levels.iter().enumerate().rev() {
            let mut below = Vec::new();
            for branch in branches {
                for _ in 0..level.degree {
                    below.push(match number {
                        0 => builder.rank(branch, below.len(), uplink(level)),
                        1 => builder.node(branch, "node", uplink(level)),
                        _ => builder.switch(branch, "switch", uplink(level)),
                    });
                }
            }
            branches = below;
        }
        builder.finish().expect("a tree")
    }

    fn trees() -> impl Strategy<Value = Vec<TreeLevel>> {
        let level = (1usize..6, 1_000_000u32..2_000_000_000);
        let level = level.prop_map(|(degree, bandwidth)| TreeLevel { degree, bandwidth: bandwidth.into() });
        proptest::collection::vec(level, 2..4)
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() <= 1e-9 * one.abs().max(other.abs())
    }

    proptest! {
        #[test]
        fn levels_are_found_in_symmetric_trees(levels in trees()) {
            let rounded = |level: &TreeLevel| (level.degree, (level.bandwidth * 8.0) as u64);
            let found = symmetric_levels(&symmetric(&levels)).expect("symmetric");
            prop_assert_eq!(found.iter().map(rounded).collect::<Vec<_>>(), levels.iter().map(rounded).collect::<Vec<_>>());
        }

        #[test]
        fn flexreduce_equals_blueconnect_on_symmetric_trees(levels in trees(), n in 1.0..1e12f64, alpha in 0.0..1e-3) {
            let (one, other) = (flexreduce(n, alpha, &symmetric(&levels)), blueconnect(n, alpha, &levels));
            prop_assert!(close(one, other), "Eq. 6 gives {one}, Eq. 3 {other}");
        }

        #[test]
        fn two_levels_are_the_sum_of_the_first_and_the_second(levels in trees(), n in 1.0..1e12f64, alpha in 0.0..1e-3) {
            let topology = symmetric(&levels[..2]);
            let sum = 2.0 * (flexreduce_first_level(n, alpha, &topology) + flexreduce_second_level(n, alpha, &topology));
            prop_assert!(close(flexreduce(n, alpha, &topology), sum));
        }
    }

    #[test]
    fn the_example_of_figure_2_takes_as_long_as_the_link_between_its_machines() {
        let nodes = ["a", "a", "b", "b", "b"];
        let topology = Topology::from_names(&nodes);
        // Node links carry 1.25 GB/s, each one half of the vector in each direction and each half of the
        // all-reduce.
        let at_nodes = 2.0 * (1e9 / 2.0) / 1.25e9;
        // The ranks' links carry two thirds of the vector at 50 GB/s before.
        let at_ranks = 2.0 * (2.0 / 3.0 * 1e9) / 50e9;
        assert!(close(flexreduce(1e9, 0.0, &topology), at_nodes + at_ranks));
    }

    #[test]
    fn the_bound_on_calls_is_3_or_4_on_the_machines_of_the_paper() {
        for (ranks, expected) in [(&[2, 3][..], 3), (&[4, 4], 3), (&[3, 3, 4], 4), (&[4, 4, 4], 4)] {
            let names = (0..).zip(ranks).flat_map(|(node, ranks)| vec![format!("node {node}"); *ranks]);
            let topology = Topology::from_names(&names.collect::<Vec<_>>());
            for rank in 0..topology.world() {
                assert_eq!(reduce_call_bound(&topology, rank, 1), Some(expected), "{ranks:?}");
                assert_eq!(reduce_call_bound(&topology, rank, 2), None);
            }
        }
    }
}
