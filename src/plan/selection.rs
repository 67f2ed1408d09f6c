//! The choice of an algorithm by the shape of the topology, with the reason as text.
//!
//! Owns the rule of `FLEXRING_ALGO=auto`. Must not know how planners work.

use super::planner::Details;
use super::topology::Topology;
use crate::config::{Algorithm, Config, Lowering, Size, TransportChoice};

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
    if topology.nodes() == 1 {
        let reason = "all ranks share a node: each owns an equal part, which the others read in place";
        return selection(Algorithm::Ring, reason);
    }
    if let Some((one, other)) = uneven_links(topology) {
        return AlgorithmSelection {
            algorithm: Algorithm::Weighted,
            reason: format!(
                "the links of {one} and {other} differ in bandwidth: ranks behind a slow link own less"
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

/// Whether small vectors use a separate plan with a direct exchange between all ranks, instead of the selected one. They
/// do where algorithm, lowering and plan are left to flexring, and no two ranks share memory. Where nodes have several
/// ranks, the levels of the selected plan are direct exchanges too, cross between nodes as often, and send fewer
/// messages: an all-reduce of 8 B to 2 KiB takes 51 to 89 us with FlexReduce and 66 to 111 us with a direct exchange on
/// 2+3, and 119 to 256 us and 203 to 416 us on 3+3+4 (network namespaces on 2 cores).
#[must_use]
pub fn uses_direct_plan(config: &Config, topology: &Topology) -> bool {
    let free =
        config.algo == Algorithm::Auto && config.lowering == Lowering::Auto && config.plan_file.is_none();
    let no_shared_memory = topology.nodes() == topology.world()
        || matches!(config.transport, TransportChoice::Tcp | TransportChoice::Verbs);
    free && config.direct > Size(0) && topology.world() > 1 && no_shared_memory
}

/// Names of two vertices with the same parent whose uplinks differ in bandwidth.
fn uneven_links(topology: &Topology) -> Option<(&str, &str)> {
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
    use crate::plan::topology_file::parse_short;

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
    fn an_algorithm_that_is_set_is_selected() {
        let topology = Topology::from_names(&["a", "b"]);
        let selection = select_algorithm(Algorithm::Tree, &topology, &Details::default());
        assert_eq!(
            (selection.algorithm, &selection.reason[..]),
            (Algorithm::Tree, "FLEXRING_ALGO=tree was given")
        );
    }
}
