//! Which algorithm, and why: a simple rule, in words.

use super::planner::Details;
use super::topology::Topology;
use crate::config::{Algorithm, Config, Lowering, Size, TransportChoice};

/// An algorithm for vectors whose bytes take the time, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Never `auto`, unless a plan came from a file.
    pub algorithm: Algorithm,
    /// A clause that says why.
    pub why: String,
}

/// Chooses by `setting`, or if that is `auto` by the shape of the topology.
#[must_use]
pub fn choose(setting: Algorithm, topology: &Topology, details: &Details) -> Choice {
    let choice = |algorithm, why: &str| Choice { algorithm, why: why.to_owned() };
    if setting != Algorithm::Auto {
        return Choice { algorithm: setting, why: format!("FLEXRING_ALGO={} was given", setting.name()) };
    }
    if !details.dimensions.is_empty() {
        return choice(Algorithm::Hierarchical, "dimensions were given");
    }
    if topology.nodes() == 1 {
        let why = "all ranks share a node: each owns an equal part, and everybody reads it there";
        return choice(Algorithm::Ring, why);
    }
    if let Some((one, other)) = uneven_links(topology) {
        return Choice {
            algorithm: Algorithm::Weighted,
            why: format!(
                "the links of {one} and {other} differ in bandwidth: who hangs at a slow link owns less"
            ),
        };
    }
    match topology.dimensions() {
        Ok(dimensions) if dimensions.len() > 1 => Choice {
            algorithm: Algorithm::Hierarchical,
            why: format!(
                "the topology is symmetric ({}): each level divides what the one below it left",
                dimensions.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ")
            ),
        },
        Ok(_) => choice(Algorithm::Ring, "every node has one rank, and their links are alike"),
        Err(asymmetry) => Choice {
            algorithm: Algorithm::Flexreduce,
            why: format!("{}: spans as uneven as the tree keep all links equally busy", asymmetry.message()),
        },
    }
}

/// Whether small vectors go straight between all ranks, by a plan of their own, rather than by the one that was
/// chosen: where whoever runs the job leaves the choice to flexring, and no two ranks share memory. Where nodes have
/// several, the levels of the chosen plan are direct exchanges too, cross between nodes as often, and send fewer
/// messages: all-reduce of 8 B to 2 KiB on 2+3 takes 51 to 89 us by FlexReduce and 66 to 111 us straight, on 3+3+4
/// 119 to 256 us and 203 to 416 us (namespaces on 2 cores).
#[must_use]
pub fn small_go_straight(config: &Config, topology: &Topology) -> bool {
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
        let bandwidth = |child: usize| vertices[child].link.bandwidth;
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
        let choice = choose(Algorithm::Auto, &topology, &Details::default());
        (choice.algorithm, choice.why)
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
        let choice = choose(Algorithm::Tree, &topology, &Details::default());
        assert_eq!((choice.algorithm, &choice.why[..]), (Algorithm::Tree, "FLEXRING_ALGO=tree was given"));
    }
}
