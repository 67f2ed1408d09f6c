//! The algorithm for the shape of the topology, with the reason as text, and the plans of short vectors.
//!
//! Owns the plan with which `FLEXRING_ALGO=auto` begins, and what is not calculated: one node, fabrics,
//! reproducible sums. [`choice`](super::choice) replaces it by candidates that are faster. Must not know how
//! planners work, nor how long plans take.

use super::planner::{Details, forest, rabenseifner, ring, tree};
use super::schedule::Schedule;
use super::thresholds::MOST_DIRECT;
use super::topology::Topology;
use flexring_core::config::{Algorithm, Config, Lowering, TransportChoice};

/// The algorithm for vectors whose time depends on bandwidth, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlgorithmSelection {
    /// The algorithm; `auto` only if the plan came from a file.
    pub algorithm: Algorithm,
    /// A clause that gives the reason, for output.
    pub reason: String,
}

/// The algorithm that `setting` names, or if that is `auto`, the one for the shape of the topology.
#[must_use]
pub fn select_algorithm(setting: Algorithm, topology: &Topology, details: &Details) -> AlgorithmSelection {
    let selection = |algorithm, reason: &str| AlgorithmSelection { algorithm, reason: reason.to_owned() };
    if setting != Algorithm::Auto {
        return AlgorithmSelection {
            algorithm: setting,
            reason: format!("FLEXRING_ALGO={} was given", setting.name()),
        };
    }
    if !details.dimensions.is_empty() {
        return selection(Algorithm::Hierarchical, "dimensions were given");
    }
    if topology.fabric().is_some() && topology.world() > 1 {
        return AlgorithmSelection { algorithm: Algorithm::Forest, reason: reason_for_forest(topology) };
    }
    if topology.nodes() == 1 {
        let reason = "all ranks share a node: each owns an equal part, which the others read in place";
        return selection(Algorithm::Ring, reason);
    }
    if let Some((one, other)) = uneven_links(topology) {
        return AlgorithmSelection {
            algorithm: Algorithm::Weighted,
            reason: format!(
                "the links of {one} and {other} differ in bandwidth: of more than two ranks, those behind a slow link own less"
            ),
        };
    }
    match topology.dimensions() {
        Ok(dimensions) if dimensions.len() > 1 => AlgorithmSelection {
            algorithm: Algorithm::Hierarchical,
            reason: format!(
                "the topology is symmetric ({}): each level divides the result of the one below it",
                dimensions.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ")
            ),
        },
        Ok(_) => selection(Algorithm::Ring, "every node has one rank, and their links are alike"),
        Err(asymmetry) => AlgorithmSelection {
            algorithm: Algorithm::Flexreduce,
            reason: format!(
                "{}: spans as uneven as the tree keep all links equally busy",
                asymmetry.message()
            ),
        },
    }
}

/// Whether the settings leave the plan to flexring.
#[must_use]
pub fn is_automatic(config: &Config) -> bool {
    config.algo == Algorithm::Auto
        && config.lowering == Lowering::Auto
        && config.plan_file.is_none()
        && config.dimensions.is_none()
}

/// A plan for short vectors, whose time depends on the number of messages in a row and of messages in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShortPlan {
    /// Straight between all ranks: one message in a row, and one for each pair of ranks.
    Direct,
    /// Onto one rank and back: 2 messages in a row, and 2 (p - 1) in all.
    Star,
    /// Up a binary tree and down again: 2 log p messages in a row, and 2 (p - 1) in all.
    Tree,
    /// Recursive halving and doubling: 2 log p messages in a row, and 2 log p of each rank. They carry as few
    /// bytes as any algorithm's.
    Halving,
    /// Up one tree of links that the forest uses and down again: as few messages in a row as such a tree
    /// allows, and 2 (p - 1) in all.
    OneTree,
}

impl ShortPlan {
    /// The schedule.
    #[must_use]
    pub fn schedule(self, topology: &Topology) -> Schedule {
        match self {
            Self::Direct => ring::plan(topology),
            Self::Star => tree::star(topology),
            Self::Tree => tree::binary(topology),
            Self::Halving => rabenseifner::plan(topology),
            Self::OneTree => forest::one_tree(topology),
        }
    }

    /// What ranks do, as a phrase for output.
    #[must_use]
    pub fn phrase(self) -> &'static str {
        match self {
            Self::Direct => "a direct exchange between all ranks",
            Self::Star => "a star",
            Self::Tree => "a binary tree",
            Self::Halving => "recursive halving (rabenseifner)",
            Self::OneTree => "the least deep tree of the same links",
        }
    }
}

/// Whether ranks reduce short vectors onto one of them: over TCP within a node a message takes processor time
/// at both ends, and a hop little else, so few messages count more than few hops. On 2 cores, medians in us
/// by a direct exchange, a binary tree and a star: 4 KiB with 3 ranks 24, 21, 21; with 4 ranks 48, 28, 28; 8
/// ranks 152, 75, 60; 16 ranks 690, 210, 147; 32 KiB with 16 ranks 1,300, 270, 230. With 64 ranks a star
/// takes 1.1 ms for 4 KiB and 1.6 for 32, a tree 1.6, and recursive halving 5.4 for 32. Ranks that have a
/// core each were not measured; they can share memory.
fn uses_star(config: &Config, topology: &Topology) -> bool {
    topology.nodes() == 1 && config.transport == TransportChoice::Tcp && topology.world() > 2
}

/// The plans that vectors use instead of the selected one, each with the longest vector in bytes that uses
/// it, in ascending order. There are some where algorithm, lowering and plan are left to flexring, and no two
/// ranks share memory. Where nodes have several ranks, the levels of the selected plan are direct exchanges
/// too, cross between nodes as often, and send fewer messages: an all-reduce of 8 B to 2 KiB takes 51 to 89
/// us with FlexReduce and 66 to 111 us with a direct exchange on 2+3, and 119 to 256 us and 203 to 416 us on
/// 3+3+4 (network namespaces on 2 cores). On many nodes those levels are chains, so short vectors have plans
/// of their own again.
#[must_use]
pub fn short_plans(config: &Config, topology: &Topology) -> Vec<(ShortPlan, usize)> {
    let no_shared_memory = topology.nodes() == topology.world() || !config.transport.shares_memory();
    let longest = config.direct.0;
    if !config.chooses_no_plan() || longest == 0 || topology.world() < 2 {
        return Vec::new();
    }
    // Other plans would join ranks that no link joins.
    if topology.fabric().is_some() {
        let tiny = config.small.0.min(longest);
        return if tiny > 0 { vec![(ShortPlan::OneTree, tiny)] } else { Vec::new() };
    }
    if !no_shared_memory {
        // One rank adds all contributions of a reproducible sum, so halving would send a message for each
        // pair of ranks.
        let halves = topology.nodes() > MOST_DIRECT && !config.reproducible.0;
        return if halves { vec![(ShortPlan::Halving, longest)] } else { Vec::new() };
    }
    if uses_star(config, topology) {
        return vec![(ShortPlan::Star, longest)];
    }
    if topology.world() <= MOST_DIRECT {
        return vec![(ShortPlan::Direct, longest)];
    }
    let longer = if config.reproducible.0 { ShortPlan::Direct } else { ShortPlan::Halving };
    let tiny = config.small.0.min(longest);
    [(ShortPlan::Tree, tiny), (longer, longest)].into_iter().filter(|(_, most)| *most > 0).collect()
}

/// How many trees divide the vector, and what that loses.
fn reason_for_forest(topology: &Topology) -> String {
    let forest = topology.fabric().map(|fabric| (fabric.forest(), fabric.bound()));
    let (trees, longer) = match forest {
        Some((forest, Some(bound))) => {
            (forest.trees.len(), forest.seconds_per_byte / bound.seconds_per_byte - 1.0)
        }
        _ => (0, 0.0),
    };
    let loss = match longer {
        ..0.0005 => "the least time of any schedule".to_owned(),
        _ => format!("{:.1} % longer than the least time of any schedule", 100.0 * longer),
    };
    let trees = if trees == 1 { "one tree has".to_owned() } else { format!("{trees} trees divide") };
    format!("the links form no tree themselves: {trees} the vector, and the busiest link takes {loss}")
}

/// Names of two vertices with the same parent whose uplinks differ in bandwidth.
pub(crate) fn uneven_links(topology: &Topology) -> Option<(&str, &str)> {
    let vertices = topology.vertices();
    vertices.iter().find_map(|vertex| {
        let first = *vertex.children.first()?;
        let bandwidth = |child: usize| vertices[child].uplink.bandwidth;
        let other = vertex.children.iter().find(|child| bandwidth(**child) != bandwidth(first))?;
        Some((vertices[first].name.as_str(), vertices[*other].name.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lowering::{Plan, ProgramSpec};
    use crate::program::Body;
    use crate::topology_file::parse_short;
    use flexring_core::config::{Size, Switch};

    fn chosen(topology: &str) -> (Algorithm, String) {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let selection = select_algorithm(Algorithm::Auto, &topology, &Details::default());
        (selection.algorithm, selection.reason)
    }

    #[test]
    fn auto_selects_by_the_shape_of_the_topology() {
        assert_eq!(chosen("4").0, Algorithm::Ring);
        assert_eq!(chosen("1+1+1").0, Algorithm::Ring);
        assert_eq!(chosen("2+2").0, Algorithm::Hierarchical);
        assert_eq!(chosen("2+3").0, Algorithm::Flexreduce);
        let (algorithm, reason) = chosen("1@1G+1@1G+1@500M");
        assert_eq!(algorithm, Algorithm::Weighted);
        assert!(reason.contains("differ in bandwidth"), "{reason}");
    }

    #[test]
    fn short_vectors_use_plans_whose_messages_grow_with_the_logarithm_of_the_ranks() {
        use ShortPlan::{Direct, Halving, Star, Tree};
        let of = |config: &Config, nodes: usize, ranks: usize| {
            let names: Vec<String> = (0..nodes * ranks).map(|rank| (rank / ranks).to_string()).collect();
            short_plans(config, &Topology::from_names(&names))
        };
        let config = Config::default();
        assert_eq!(of(&config, 16, 1), [(Direct, 64 << 10)]);
        assert_eq!(of(&config, 17, 1), [(Tree, 4 << 10), (Halving, 64 << 10)]);
        assert_eq!(of(&config, 16, 2), []);
        assert_eq!(of(&config, 17, 2), [(Halving, 64 << 10)]);
        assert_eq!(of(&config, 1, 64), []);
        let tcp = Config { transport: TransportChoice::Tcp, ..Config::default() };
        for (ranks, plan) in [(2, Direct), (3, Star), (16, Star), (64, Star)] {
            assert_eq!(of(&tcp, 1, ranks), [(plan, 64 << 10)], "{ranks} ranks");
        }
        for config in [
            Config { algo: Algorithm::Ring, ..Config::default() },
            Config { direct: Size(0), ..Config::default() },
        ] {
            assert_eq!(of(&config, 64, 1), []);
        }
        let no_tree = Config { small: Size(0), ..Config::default() };
        assert_eq!(of(&no_tree, 64, 1), [(Halving, 64 << 10)]);
        let reproducible = Config { reproducible: Switch(true), ..Config::default() };
        assert_eq!(of(&reproducible, 64, 1), [(Tree, 4 << 10), (Direct, 64 << 10)]);
        assert_eq!(of(&reproducible, 64, 2), []);
        let reproducible = Config { transport: TransportChoice::Tcp, ..reproducible };
        assert_eq!(of(&reproducible, 1, 4), [(Star, 64 << 10)]);
    }

    #[test]
    fn the_plan_of_the_shortest_vectors_sends_few_messages() {
        for world in [17, 32, 64, 100] {
            let names: Vec<String> = (0..world).map(|rank| rank.to_string()).collect();
            let topology = Topology::from_names(&names);
            let plan = Plan::on(ShortPlan::Tree.schedule(&topology), &topology, Lowering::Direct);
            let sends = |rank| {
                let program = plan.program(rank, ProgramSpec::ALL_REDUCE);
                let peers = program.steps.iter().map(|step| match &*step.body {
                    Body::Send { peers, .. } => peers.len(),
                    Body::Combine { .. } => 0,
                });
                peers.sum::<usize>()
            };
            assert_eq!((0..world).map(sends).sum::<usize>(), 2 * (world - 1), "{world} ranks");
        }
    }

    #[test]
    fn an_algorithm_that_is_set_is_selected() {
        let topology = Topology::from_names(&["a", "b"]);
        let selection = select_algorithm(Algorithm::Tree, &topology, &Details::default());
        assert_eq!(
            (selection.algorithm, &selection.reason[..]),
            (Algorithm::Tree, "FLEXRING_ALGO=tree was given")
        );
    }
}
