//! Which algorithm, and why: a simple rule, in words.

use super::planner::Details;
use super::topology::Topology;
use crate::config::{Algorithm, Config, Lowering, Size, TransportChoice};

/// An algorithm for vectors whose bytes take the time, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlgorithmSelection {
    /// Never `auto`, unless a plan came from a file.
    pub algorithm: Algorithm,
    /// A clause that says why.
    pub reason: String,
}

/// Chooses by `setting`, or if that is `auto` by the shape of the topology.
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
        let reason = "all ranks share a node: each owns an equal part, and everybody reads it there";
        return selection(Algorithm::Ring, reason);
    }
    if let Some((one, other)) = uneven_links(topology) {
        return AlgorithmSelection {
            algorithm: Algorithm::Weighted,
            reason: format!(
                "the links of {one} and {other} differ in bandwidth: who hangs at a slow link owns less"
            ),
        };
    }
    match topology.dimensions() {
        Ok(dimensions) if dimensions.len() > 1 => AlgorithmSelection {
            algorithm: Algorithm::Hierarchical,
            reason: format!(
                "the topology is symmetric ({}): each level divides what the one below it left",
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

/// Whether small vectors go straight between all ranks, by a plan of their own, rather than by the one that was
/// chosen: where whoever runs the job leaves the choice to flexring, and no two ranks share memory. Where nodes have
/// several, the levels of the chosen plan are direct exchanges too, cross between nodes as often, and send fewer
/// messages: all-reduce of 8 B to 2 KiB on 2+3 takes 51 to 89 us by FlexReduce and 66 to 111 us straight, on 3+3+4
/// 119 to 256 us and 203 to 416 us (namespaces on 2 cores).
#[must_use]
pub fn uses_direct_plan(config: &Config, topology: &Topology) -> bool {
    let free =
        config.algo == Algorithm::Auto && config.lowering == Lowering::Auto && config.plan_file.is_none();
    let apart = topology.nodes() == topology.world()
        || matches!(config.transport, TransportChoice::Tcp | TransportChoice::Verbs);
    free && config.direct > Size(0) && topology.world() > 1 && apart
}

/// Two siblings whose links differ in bandwidth, by name.
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
        let topology = parse_short(topology).expect("a short form").expect("a good one");
        let selection = select_algorithm(Algorithm::Auto, &topology, &Details::default());
        (selection.algorithm, selection.reason)
    }

    #[test]
    fn the_shape_of_the_topology_decides() {
        assert_eq!(chosen("4").0, Algorithm::Ring);
        assert_eq!(chosen("1+1+1").0, Algorithm::Ring);
        assert_eq!(chosen("2+2").0, Algorithm::Hierarchical);
        assert_eq!(chosen("2+3").0, Algorithm::Flexreduce);
        let (algorithm, why) = chosen("1@1G+1@1G+1@500M");
        assert_eq!(algorithm, Algorithm::Weighted);
        assert!(why.contains("differ in bandwidth"), "{why}");
    }

    #[test]
    fn who_names_an_algorithm_gets_it() {
        let topology = Topology::from_names(&["a", "b"]);
        let selection = select_algorithm(Algorithm::Tree, &topology, &Details::default());
        assert_eq!(
            (selection.algorithm, &selection.reason[..]),
            (Algorithm::Tree, "FLEXRING_ALGO=tree was given")
        );
    }
}
