//! Measured links as a topology.
//!
//! Owns the latency of uplinks from those of pairs, and which measured bandwidths count as equal. Must not know how they were
//! measured.

use super::profile::{TuningProfile, WITHIN_NODES};
use crate::plan::topology::{Topology, TopologyBuilder, Uplink, VertexKind};

/// Bandwidths that differ by at most this part count as equal: planners make spans uneven where links differ, which a scatter
/// of measurements must not cause. Chosen, not measured: on a busy machine two equal links have differed by more.
const ALIKE: f64 = 0.1;

/// Passes over all nodes that [`uplink_latencies`] makes.
const PASSES: usize = 64;

/// The latencies of nodes' uplinks whose sums are closest to the latencies of `pairs`, each of two of the `nodes` nodes with its
/// latency, in the unit of these. Nodes in no pair have 0.
#[must_use]
pub fn uplink_latencies(nodes: usize, pairs: &[(usize, usize, f64)]) -> Vec<f64> {
    let mut sums = vec![(0.0, 0u32); nodes];
    for (one, other, latency) in pairs {
        for node in [*one, *other] {
            sums[node].0 += latency / 2.0;
            sums[node].1 += 1;
        }
    }
    let mut latencies: Vec<f64> = sums.iter().map(|(sum, count)| sum / f64::from((*count).max(1))).collect();
    // Gauss-Seidel on the normal equations of least squares. With two nodes the halves stay as they are.
    for _ in 0..PASSES {
        for node in 0..nodes {
            let rests =
                pairs.iter().filter_map(|(one, other, latency)| match (*one == node, *other == node) {
                    (true, false) => Some(latency - latencies[*other]),
                    (false, true) => Some(latency - latencies[*one]),
                    _ => None,
                });
            let (sum, count) = rests.fold((0.0, 0u32), |(sum, count), rest| (sum + rest, count + 1));
            if count > 0 {
                latencies[node] = f64::max(sum / f64::from(count), 0.0);
            }
        }
    }
    latencies
}

/// `topology` with the uplinks of `profile`.
pub(super) fn measured(topology: &Topology, profile: &TuningProfile) -> Topology {
    let vertices = topology.vertices();
    let bandwidths = profile.nodes.iter().map(|node| node.uplink.map(|uplink| uplink.up.min(uplink.down)));
    let alike = alike(&bandwidths.map(|bandwidth| bandwidth.unwrap_or(1)).collect::<Vec<_>>());
    let within = profile.classes.iter().find(|class| class.name == WITHIN_NODES);
    let mut builder = TopologyBuilder::new(&vertices[0].name);
    // The builder numbers vertices in the order in which they are added, which is theirs.
    for (id, vertex) in vertices.iter().enumerate().skip(1) {
        let parent = vertex.parent.unwrap_or(0);
        match vertex.kind {
            VertexKind::Switch => builder.switch(parent, &vertex.name, vertex.uplink),
            VertexKind::Node => {
                let number = vertex.children.first().and_then(|leaf| match vertices[*leaf].kind {
                    VertexKind::Rank(rank) => Some(topology.node_of(rank)),
                    _ => None,
                });
                let measured = number.and_then(|number| {
                    let uplink = profile.nodes.get(number)?.uplink?;
                    Some(Uplink { bandwidth: alike[number].saturating_mul(8), latency: uplink.latency })
                });
                builder.node(parent, &vertex.name, measured.unwrap_or(vertex.uplink))
            }
            VertexKind::Rank(rank) => {
                // Two of these links are on the way.
                let uplink = within.map(|class| Uplink {
                    bandwidth: class.slowest.saturating_mul(8),
                    latency: class.latency / 2,
                });
                builder.rank(parent, rank, uplink.unwrap_or(vertex.uplink))
            }
        };
        debug_assert!(parent < id);
    }
    // It has the ranks of a valid tree, and no bandwidth of zero.
    builder.finish().unwrap_or_else(|_| topology.clone())
}

/// Each bandwidth, or the lowest one that counts as equal to it.
fn alike(bandwidths: &[u64]) -> Vec<u64> {
    let mut ascending: Vec<u64> = bandwidths.to_vec();
    ascending.sort_unstable();
    ascending.dedup();
    let mut lowest = 0;
    let mut group = std::collections::HashMap::new();
    for bandwidth in ascending {
        if bandwidth as f64 > lowest as f64 * (1.0 + ALIKE) {
            lowest = bandwidth;
        }
        group.insert(bandwidth, lowest.max(1));
    }
    bandwidths.iter().map(|bandwidth| group[bandwidth]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tuning::parse;

    #[test]
    fn uplinks_have_the_latencies_that_add_up_to_those_of_pairs() {
        let expected = [10.0, 500.0, 30.0, 40.0];
        let mut pairs = Vec::new();
        for one in 0..4 {
            for other in one + 1..4 {
                pairs.push((one, other, expected[one] + expected[other]));
            }
        }
        let found = uplink_latencies(4, &pairs);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3, "{found} instead of {expected}");
        }
        assert_eq!(uplink_latencies(2, &[(0, 1, 30.0)]), [15.0, 15.0]);
        assert_eq!(uplink_latencies(1, &[]), [0.0]);
    }

    #[test]
    fn bandwidths_within_a_tenth_count_as_equal() {
        assert_eq!(alike(&[117, 112, 60, 110, 118]), [110, 110, 60, 110, 110]);
        assert_eq!(alike(&[0]), [1]);
    }

    #[test]
    fn the_topology_has_the_measured_uplinks() {
        let profile = parse("f", include_str!("../../../tests/data/tuning.toml")).expect("a profile");
        let topology = profile.topology(&Topology::from_names(&["a", "a", "b", "c"]));
        let uplinks: Vec<Uplink> = topology
            .vertices()
            .iter()
            .filter(|vertex| vertex.kind == VertexKind::Node)
            .map(|vertex| vertex.uplink)
            .collect();
        let uplink = |bandwidth, latency| Uplink { bandwidth, latency };
        assert_eq!(
            uplinks,
            [uplink(928_000_000, 20_000), uplink(928_000_000, 21_000), uplink(464_000_000, 30_000)]
        );
        assert_eq!(topology.vertices()[topology.leaf(0)].uplink, uplink(64_000_000_000, 450));
    }
}
