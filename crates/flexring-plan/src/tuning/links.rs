//! Measured links as a topology.
//!
//! Owns the latencies of links from those of paths, and which measured bandwidths count as equal.

use super::profile::{MeasuredUplink, TuningProfile, WITHIN_NODES};
use crate::topology::{Topology, TopologyBuilder, Uplink, VertexId, VertexKind};
use std::collections::HashMap;

/// Bandwidths that differ by at most this part count as equal: planners make spans uneven where links differ,
/// which a scatter of measurements must not cause. Chosen, not measured: on a busy machine two equal links
/// have differed by more.
const ALIKE: f64 = 0.1;

/// Passes over all links that [`link_latencies`] makes.
const PASSES: usize = 64;

/// The latencies of `links` links whose sums are closest to the latencies of `paths`, each of the numbers of
/// its links with its latency, in the unit of these. Links on no path have 0. Where paths do not tell links
/// apart, such as the two of the only pair of nodes, they have equal parts.
#[must_use]
pub fn link_latencies(links: usize, paths: &[(Vec<usize>, f64)]) -> Vec<f64> {
    let mut sums = vec![(0.0, 0u32); links];
    let mut paths_of = vec![Vec::new(); links];
    for (number, (path, latency)) in paths.iter().enumerate() {
        for link in path {
            sums[*link].0 += latency / path.len() as f64;
            sums[*link].1 += 1;
            paths_of[*link].push(number);
        }
    }
    let mut latencies: Vec<f64> = sums.iter().map(|(sum, count)| sum / f64::from((*count).max(1))).collect();
    // Gauss-Seidel on the normal equations of least squares.
    for _ in 0..PASSES {
        for link in 0..links {
            let rest = |number: &usize| {
                let (path, latency) = &paths[*number];
                latency
                    - path.iter().filter(|other| **other != link).map(|other| latencies[*other]).sum::<f64>()
            };
            let sum: f64 = paths_of[link].iter().map(rest).sum();
            if !paths_of[link].is_empty() {
                latencies[link] = f64::max(sum / paths_of[link].len() as f64, 0.0);
            }
        }
    }
    latencies
}

/// The switches below the root in tree order, in which profiles list them.
#[must_use]
pub fn switches_below_root(topology: &Topology) -> Vec<VertexId> {
    let vertices = topology.vertices();
    let (mut open, mut found) = (vec![0], Vec::new());
    while let Some(id) = open.pop() {
        if id > 0 {
            found.push(id);
        }
        let is_switch = |child: &&VertexId| vertices[**child].kind == VertexKind::Switch;
        open.extend(vertices[id].children.iter().filter(is_switch).rev());
    }
    found
}

/// A measured uplink, in the units of the topology.
#[derive(Clone, Copy)]
struct EvenedUplink {
    bandwidth: u64,
    latency: u64,
    /// `None` if it was not measured.
    burst: Option<u64>,
}

impl EvenedUplink {
    /// The uplink in place of the topology's.
    fn replace(self, described: Uplink) -> Uplink {
        let Self { bandwidth, latency, burst } = self;
        Uplink { bandwidth, latency, burst: burst.unwrap_or(described.burst) }
    }
}

/// The uplinks with their bandwidths, where those that count as equal are.
fn evened(measured: impl Iterator<Item = Option<MeasuredUplink>>) -> Vec<Option<EvenedUplink>> {
    let measured: Vec<_> = measured.collect();
    let alike = alike(&measured.iter().flatten().map(bandwidth).collect::<Vec<_>>());
    let mut alike = alike.into_iter();
    let mut evened = |uplink: MeasuredUplink| {
        let bandwidth = alike.next().unwrap_or_else(|| bandwidth(&uplink));
        EvenedUplink { bandwidth: bandwidth.saturating_mul(8), latency: uplink.latency, burst: uplink.burst }
    };
    measured.into_iter().map(|uplink| uplink.map(&mut evened)).collect()
}

/// Bytes per second of a link in both directions: the mean if they count as equal, else the slower one.
fn bandwidth(MeasuredUplink { up, down, .. }: &MeasuredUplink) -> u64 {
    let (slower, faster) = (*up.min(down), *up.max(down));
    if are_alike(slower, faster) { slower.midpoint(faster) } else { slower }
}

fn are_alike(slower: u64, faster: u64) -> bool {
    faster as f64 <= slower as f64 * (1.0 + ALIKE)
}

/// `topology` with the uplinks of `profile`.
pub(super) fn measured(topology: &Topology, profile: &TuningProfile) -> Topology {
    let vertices = topology.vertices();
    let nodes = evened(profile.nodes.iter().map(|node| node.uplink));
    let switches = evened(profile.switches.iter().copied().map(Some));
    let switches: HashMap<VertexId, EvenedUplink> =
        switches_below_root(topology).into_iter().zip(switches.into_iter().flatten()).collect();
    let within = profile.classes.iter().find(|class| class.name == WITHIN_NODES);
    let mut builder = TopologyBuilder::new(&vertices[0].name);
    // The builder numbers vertices in the order in which they are added, which is theirs.
    for (id, vertex) in vertices.iter().enumerate().skip(1) {
        let parent = vertex.parent.unwrap_or(0);
        match vertex.kind {
            VertexKind::Switch => {
                let measured =
                    switches.get(&id).map_or(vertex.uplink, |uplink| uplink.replace(vertex.uplink));
                builder.switch(parent, &vertex.name, measured)
            }
            VertexKind::Node => {
                let number = vertex.children.first().and_then(|leaf| match vertices[*leaf].kind {
                    VertexKind::Rank(rank) => Some(topology.node_of(rank)),
                    _ => None,
                });
                let measured = number.and_then(|number| *nodes.get(number)?);
                let node = builder.node(
                    parent,
                    &vertex.name,
                    measured.map_or(vertex.uplink, |uplink| uplink.replace(vertex.uplink)),
                );
                builder.set_nics(node, vertex.nics);
                node
            }
            VertexKind::Rank(rank) => {
                // Two of these links are on the way.
                let uplink =
                    within.map(|class| Uplink::new(class.slowest.saturating_mul(8), class.latency / 2));
                builder.rank(parent, rank, uplink.unwrap_or(vertex.uplink))
            }
        };
        debug_assert!(parent < id);
    }
    // It has the ranks of a valid tree, and no bandwidth of zero.
    builder.finish().unwrap_or_else(|_| topology.clone())
}

/// For each bandwidth the mean of those that count as equal to it: from the lowest on, all that differ by at
/// most [`ALIKE`] from the lowest one.
fn alike(bandwidths: &[u64]) -> Vec<u64> {
    let mut ascending: Vec<u64> = bandwidths.to_vec();
    ascending.sort_unstable();
    let mut means = HashMap::new();
    let mut rest = &ascending[..];
    while let Some(lowest) = rest.first() {
        let (group, faster) = rest.split_at(rest.partition_point(|bandwidth| are_alike(*lowest, *bandwidth)));
        rest = faster;
        let sum: u128 = group.iter().map(|bandwidth| u128::from(*bandwidth)).sum();
        let mean = (sum / group.len() as u128) as u64;
        means.extend(group.iter().map(|bandwidth| (*bandwidth, mean.max(1))));
    }
    bandwidths.iter().map(|bandwidth| means[bandwidth]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology_file::parse_short;
    use crate::tuning::parse;

    #[test]
    fn uplinks_have_the_latencies_that_add_up_to_those_of_pairs() {
        let expected = [10.0, 500.0, 30.0, 40.0];
        let mut pairs = Vec::new();
        for one in 0..4 {
            for other in one + 1..4 {
                pairs.push((vec![one, other], expected[one] + expected[other]));
            }
        }
        let found = link_latencies(4, &pairs);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3, "{found} instead of {expected}");
        }
        assert_eq!(link_latencies(2, &[(vec![0, 1], 30.0)]), [15.0, 15.0]);
        assert_eq!(link_latencies(1, &[]), [0.0]);
        // Two nodes of a switch, link 3, and a third node elsewhere.
        let paths = [(vec![0, 1], 40.0), (vec![0, 3, 2], 100.0), (vec![1, 3, 2], 100.0)];
        let found = link_latencies(4, &paths);
        for (path, latency) in paths {
            let sum: f64 = path.iter().map(|link| found[*link]).sum();
            assert!((sum - latency).abs() < 1e-3, "{sum} instead of {latency}");
        }
    }

    #[test]
    fn bandwidths_within_a_tenth_count_as_equal() {
        assert_eq!(alike(&[117, 112, 60, 110, 118]), [114, 114, 60, 114, 114]);
        assert_eq!(alike(&[0]), [1]);
        let uplink = |up, down| MeasuredUplink { up, down, latency: 0, burst: None };
        assert_eq!([uplink(110, 100), uplink(100, 50)].map(|uplink| bandwidth(&uplink)), [105, 50]);
    }

    #[test]
    fn switches_have_their_measured_uplinks_in_tree_order() {
        let topology = parse_short("((1+1)+(1+1))+1").expect("a short form").expect("valid");
        let mut profile = parse("f", include_str!("../../../../tests/data/tuning.toml")).expect("a profile");
        let uplink = |up| MeasuredUplink { up, down: up + 1, latency: up, burst: Some(up + 2) };
        profile.switches = vec![uplink(300), uplink(100), uplink(200)];
        let measured = profile.topology(&topology);
        let uplinks: Vec<Uplink> =
            switches_below_root(&topology).into_iter().map(|id| measured.vertices()[id].uplink).collect();
        let expected = [300, 100, 200].map(|up| Uplink { bandwidth: 8 * up, latency: up, burst: up + 2 });
        assert_eq!(uplinks, expected);
        let parents = switches_below_root(&topology).into_iter().map(|id| topology.vertices()[id].parent);
        assert_eq!(parents.filter(|parent| *parent == Some(0)).count(), 1);
    }

    #[test]
    fn the_topology_has_the_measured_uplinks() {
        let profile = parse("f", include_str!("../../../../tests/data/tuning.toml")).expect("a profile");
        let topology = profile.topology(&Topology::from_names(&["a", "a", "b", "c"]));
        let uplinks: Vec<Uplink> = topology
            .vertices()
            .iter()
            .filter(|vertex| vertex.kind == VertexKind::Node)
            .map(|vertex| vertex.uplink)
            .collect();
        let uplink = Uplink::new;
        assert_eq!(
            uplinks,
            [uplink(938_000_000, 20_000), uplink(938_000_000, 21_000), uplink(468_000_000, 30_000)]
        );
        assert_eq!(topology.vertices()[topology.leaf(0)].uplink, uplink(64_000_000_000, 450));
        // A burst that was not measured is that of the topology.
        let described = Uplink { burst: 7, ..Uplink::NODE_DEFAULT };
        let measured = EvenedUplink { bandwidth: 8, latency: 9, burst: None };
        assert_eq!(measured.replace(described), Uplink { bandwidth: 8, latency: 9, burst: 7 });
        assert_eq!(EvenedUplink { burst: Some(0), ..measured }.replace(described), Uplink::new(8, 9));
    }
}
