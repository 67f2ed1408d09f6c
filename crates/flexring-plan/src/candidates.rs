//! The plans among which flexring chooses for a topology.
//!
//! Owns the list: every planner on the tree as it is, on the tree without some levels of its switches, and on
//! the tree with wide branches divided into groups. Must not know how long plans take.
//!
//! FlexReduce on another tree of the same nodes is another hierarchy: without a level it sends more over the
//! links of that level and passes one level less; with groups of g nodes it passes one level more, in each of
//! which a rank has g partners instead of all nodes. On uniform nodes these are the hierarchies of Ueno and
//! Yokota (CCGrid 2019), which extend one layer to two; on others they are as uneven as the tree.

use super::Rank;
use super::lowering::Plan;
use super::planner::{flexreduce, hierarchical, local_master, rabenseifner, ring, tree, weighted};
use super::schedule::Schedule;
use super::thresholds::{DIRECT_BETWEEN_NODES, MOST_SIMULATED};
use super::topology::{Topology, VertexId, VertexKind};
use flexring_core::config::{Algorithm, Lowering};
use std::collections::HashSet;

/// Most levels of switches that are left out in all combinations.
const MOST_LEVELS: usize = 4;

/// Numbers of children into which wider branches are divided.
const WIDTHS: [usize; 4] = [DIRECT_BETWEEN_NODES, 8, 4, 2];

/// A plan with its name.
#[derive(Clone, Debug)]
pub struct CandidatePlan {
    /// The planner.
    pub algorithm: Algorithm,
    /// What differs from the planner's plan for the topology, as words; empty if nothing does.
    pub variant: String,
    /// The plan.
    pub plan: Plan,
}

impl CandidatePlan {
    /// The planner and the variant.
    #[must_use]
    pub fn name(&self) -> String {
        with_variant(self.algorithm.name(), &self.variant)
    }
}

/// The name of a plan that differs from its planner's by `variant`, which may be empty.
#[must_use]
pub fn with_variant(name: &str, variant: &str) -> String {
    format!("{name} {variant}").trim_end().to_owned()
}

/// The candidates for a topology, without repetitions. The planners on the tree as it is come first.
#[must_use]
pub fn candidates(topology: &Topology) -> Vec<CandidatePlan> {
    let (mut found, mut known) = (Vec::new(), HashSet::new());
    let mut add = |algorithm, variant: &str, schedule: Schedule| {
        // Trees may differ in levels that divide nothing.
        if !known.insert(schedule.digest_of_groups()) {
            return;
        }
        // In a chain of many nodes, a node that owns nothing passes on the sums of others. Sent directly, its
        // link carries the vector once.
        let owners = || schedule.shards().iter().map(|shard| shard.owner).collect::<HashSet<Rank>>().len();
        let may_be_direct = algorithm == Algorithm::Weighted && topology.world() <= MOST_SIMULATED;
        let direct = (may_be_direct && owners() < topology.world())
            .then(|| Plan::on(schedule.clone(), topology, Lowering::Direct));
        let plan = Plan::on(schedule, topology, Lowering::Auto);
        let direct = direct.filter(|direct| direct.digest() != plan.digest());
        found.push(CandidatePlan { algorithm, variant: variant.to_owned(), plan });
        if let Some(plan) = direct {
            let variant = format!("{variant} direct").trim_start().to_owned();
            found.push(CandidatePlan { algorithm, variant, plan });
        }
    };
    // Where ranks divide the NICs of their nodes, some may have more of them than others.
    let divides_nics = topology.node_vertices().into_iter().any(|node| topology.uplink_parts(node) > 1);
    let is_uneven = !has_equal_ways(topology) || divides_nics;
    let mut shapes = HashSet::new();
    for (variant, tree) in trees(topology) {
        if !shapes.insert(shape(&tree)) {
            continue;
        }
        // On symmetric trees FlexReduce is the hierarchical ring, whose groups are simpler. A tree that is so
        // irregular that its fractions cannot be expressed has no plan.
        match tree.dimensions() {
            Ok(dimensions) => {
                // With one dimension it is the ring.
                if dimensions.len() > 1
                    && let Ok(schedule) = hierarchical::plan(&tree, &dimensions)
                {
                    add(Algorithm::Hierarchical, &variant, schedule);
                }
            }
            Err(_) => {
                if let Ok(schedule) = flexreduce::plan(&tree) {
                    add(Algorithm::Flexreduce, &variant, schedule);
                }
            }
        }
        if is_uneven && let Ok(schedule) = weighted::plan(&tree) {
            add(Algorithm::Weighted, &variant, schedule);
        }
    }
    add(Algorithm::Ring, "", ring::plan(topology));
    add(Algorithm::Rabenseifner, "", rabenseifner::plan(topology));
    add(Algorithm::LocalMaster, "", local_master::plan(topology));
    add(Algorithm::Tree, "", tree::binary(topology));
    found
}

/// The topology, and other trees of its nodes, each with words for the difference.
fn trees(topology: &Topology) -> Vec<(String, Topology)> {
    let levels: Vec<usize> = switch_levels(topology);
    let mut flat = vec![(String::new(), topology.clone())];
    let combinations = 1usize << levels.len().min(MOST_LEVELS);
    for combination in 1..combinations {
        let left_out: Vec<usize> = levels
            .iter()
            .copied()
            .enumerate()
            .filter(|(bit, _)| combination >> bit & 1 == 1)
            .map(|(_, level)| level)
            .collect();
        let names: Vec<String> = left_out.iter().map(ToString::to_string).collect();
        flat.push((format!("without level {}", names.join(" and ")), topology.without_switches(&left_out)));
    }
    let mut trees = Vec::new();
    for (variant, tree) in flat {
        let widest = tree.vertices().iter().filter(|vertex| vertex.kind == VertexKind::Switch);
        let widest = widest.map(|vertex| vertex.children.len()).max().unwrap_or(0);
        // Up to 64 children need two levels of groups of 16 or of 8, which send fewer messages.
        let sends_more = |width: usize| width == DIRECT_BETWEEN_NODES && widest <= 64;
        for width in WIDTHS.into_iter().filter(|width| *width < widest && !sends_more(*width)) {
            let words = format!("{variant} in groups of {width}");
            trees.push((words.trim_start().to_owned(), tree.in_groups(width)));
        }
        trees.push((variant, tree));
    }
    // The topology as it is comes first.
    trees.sort_by_key(|(variant, _)| (variant.contains("groups"), variant.len()));
    trees
}

/// Equal for trees of the same nodes on which all planners make the same plans: they differ in vertices with
/// one child.
fn shape(topology: &Topology) -> Vec<u64> {
    let vertices = topology.vertices();
    let mut shape = Vec::with_capacity(2 * vertices.len());
    let mut open = vec![(0, u64::MAX)];
    while let Some((vertex, narrowest)) = open.pop() {
        let of = &vertices[vertex];
        let narrowest = if vertex > 0 { of.uplink.bandwidth.min(narrowest) } else { narrowest };
        if let [only] = of.children[..] {
            open.push((only, narrowest));
            continue;
        }
        let rank = if let VertexKind::Rank(rank) = of.kind { rank } else { of.children.len() };
        shape.extend([narrowest, of.children.len() as u64, rank as u64]);
        open.extend(of.children.iter().map(|child| (*child, u64::MAX)));
    }
    shape
}

/// Whether the ways from all ranks to the root are alike: as many children and as much bandwidth.
fn has_equal_ways(topology: &Topology) -> bool {
    let vertices = topology.vertices();
    let way = |rank: Rank| {
        let up = |vertex: &VertexId| vertices[*vertex].parent;
        let vertices = std::iter::successors(Some(topology.leaf(rank)), up).map(|vertex| &vertices[vertex]);
        vertices.map(|vertex| (vertex.children.len(), vertex.uplink.bandwidth))
    };
    (1..topology.world()).all(|rank| way(rank).eq(way(0)))
}

/// The depths at which there are switches below the root.
fn switch_levels(topology: &Topology) -> Vec<usize> {
    let levels = topology.levels();
    let has_switch = |level: &Vec<usize>| {
        level.iter().any(|vertex| topology.vertices()[*vertex].kind == VertexKind::Switch)
    };
    (1..levels.len()).filter(|depth| has_switch(&levels[*depth])).collect()
}
