//! Fabrics that are no trees: graphs of ranks, nodes and switches, with links that have a rate in each
//! direction.
//!
//! Owns the least time of an all-reduce on such a graph, and trees that come close to it.
//!
//! | module | owns |
//! |---|---|
//! | `graph` | the graph |
//! | `max_flow` | maximum flows |
//! | `throughput` | the least time, and the groups of ranks that prove it |
//! | `splitting` | routes through switches |
//! | `packing` | trees |
//! | `routed_division` | one route for each pair of ranks, and roots |
//! | `forest` | how many trees |
//! | `trees` | the result |

mod forest;
mod graph;
mod max_flow;
mod packing;
mod routed_division;
mod splitting;
mod throughput;
mod trees;

pub(crate) use graph::components;
pub use graph::{FabricLink, Route};
pub use trees::{Forest, SpanningTree};

use super::Rank;
use graph::FabricGraph;
use max_flow::{FlowNetwork, UNLIMITED};
use std::sync::OnceLock;
use throughput::{LeastTime, LinkNetwork, gcd};

/// A connected graph, and what an all-reduce on it can reach. The first vertices are the ranks, in their
/// order; the others are switches, and nodes whose ranks share links.
#[derive(Debug)]
pub struct Fabric {
    graph: FabricGraph,
    slower: OnceLock<DirectionLimit>,
    forest: OnceLock<Forest>,
    bound: OnceLock<FabricBound>,
}

/// What the slower direction of each link allows.
#[derive(Debug)]
struct DirectionLimit {
    /// By link, its rate in units.
    widths: Vec<i64>,
    /// Bits per second.
    unit: u64,
    least: LeastTime,
}

/// What limits every all-reduce on a fabric.
#[derive(Clone, Debug, PartialEq)]
pub struct FabricBound {
    /// Seconds for each byte of the vector.
    pub seconds_per_byte: f64,
    /// Disjoint sets of vertices, which hold all ranks.
    pub sets: Vec<Vec<usize>>,
    /// Vectors that the sets send to each other together, or 1 if it is those from the first to the second.
    pub vectors: usize,
    /// Bits per second of the links that carry them together.
    pub bandwidth: u64,
}

impl PartialEq for Fabric {
    fn eq(&self, other: &Self) -> bool {
        self.graph == other.graph
    }
}

impl Eq for Fabric {}

impl Fabric {
    /// A fabric of vertices with these names, of which the first `world` are the ranks. It must be connected.
    #[must_use]
    pub fn new(world: usize, names: Vec<String>, links: Vec<FabricLink>) -> Self {
        Self::of(FabricGraph::new(world, names, links))
    }

    fn of(graph: FabricGraph) -> Self {
        Self { graph, slower: OnceLock::new(), forest: OnceLock::new(), bound: OnceLock::new() }
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.graph.world()
    }

    /// By vertex, its name.
    #[must_use]
    pub fn names(&self) -> &[String] {
        self.graph.names()
    }

    /// The links.
    #[must_use]
    pub fn links(&self) -> &[FabricLink] {
        self.graph.links()
    }

    fn network(&self) -> LinkNetwork {
        LinkNetwork {
            vertices: self.names().len(),
            ranks: (0..self.world()).collect(),
            ends: self.links().iter().map(|link| link.ends).collect(),
            is_within_node: self.links().iter().map(|link| link.is_within_node).collect(),
        }
    }

    /// The trees among which an all-reduce divides the vector. They use each link equally in both directions,
    /// so its slower direction counts. Computed when it is first asked for.
    #[must_use]
    pub fn forest(&self) -> &Forest {
        self.forest.get_or_init(|| {
            if self.world() < 2 {
                return Forest::default();
            }
            let DirectionLimit { widths, unit, least } = self.slower();
            forest::forest(&self.graph, &self.network(), widths, *unit, least.clone())
        })
    }

    fn slower(&self) -> &DirectionLimit {
        self.slower.get_or_init(|| {
            let slower = self.links().iter().map(|link| link.bandwidths[0].min(link.bandwidths[1]));
            let (widths, unit) = self.scaled(slower.collect());
            let least = self.network().least_time(&widths);
            DirectionLimit { widths, unit, least }
        })
    }

    /// What limits every all-reduce; `None` with one rank.
    #[must_use]
    pub fn bound(&self) -> Option<&FabricBound> {
        (self.world() > 1).then(|| self.bound.get_or_init(|| self.compute_bound()))
    }

    fn compute_bound(&self) -> FabricBound {
        if self.links().iter().all(|link| link.bandwidths[0] == link.bandwidths[1]) {
            let DirectionLimit { unit, least, .. } = self.slower();
            return bound_of_sets(least.clone(), 2 * unit);
        }
        let both = self.links().iter().map(|link| link.bandwidths[0] + link.bandwidths[1]);
        let (widths, unit) = self.scaled(both.collect());
        let of_sets = bound_of_sets(self.network().least_time(&widths), unit);
        // A direction of a cut carries the vector once.
        let pairs = (1..self.world()).flat_map(|rank| [[0, rank], [rank, 0]]);
        pairs.map(|[from, to]| self.cut(from, to)).fold(of_sets, |longest, cut| {
            if cut.seconds_per_byte > longest.seconds_per_byte * (1.0 + 1e-9) { cut } else { longest }
        })
    }

    /// The bound by what can be sent from one rank to another.
    fn cut(&self, from: Rank, to: Rank) -> FabricBound {
        let mut network = FlowNetwork::new(self.names().len());
        for FabricLink { ends, bandwidths, .. } in self.links() {
            network.add(ends[0], ends[1], bandwidths.map(|bandwidth| bandwidth as i64));
        }
        let bandwidth = network.send(from, to, UNLIMITED) as u64;
        let side = network.source_side(from);
        let set = |is_source: bool| (0..side.len()).filter(|vertex| side[*vertex] == is_source).collect();
        let seconds_per_byte = 8.0 / bandwidth as f64;
        FabricBound { seconds_per_byte, sets: vec![set(true), set(false)], vectors: 1, bandwidth }
    }

    /// Rates as whole numbers of a unit, which is returned too, so small that sums for all ranks fit 64 bits.
    fn scaled(&self, rates: Vec<u64>) -> (Vec<i64>, u64) {
        let divisor = rates.iter().fold(0, |divisor, rate| gcd(divisor, *rate as i64));
        let sum: u128 = rates.iter().map(|rate| u128::from(*rate) / divisor.max(1) as u128).sum();
        let most = (1_u128 << 57) / self.world().max(1) as u128;
        let unit = (divisor.max(1) as u128 * sum.div_ceil(most).max(1)) as u64;
        (rates.iter().map(|rate| (rate / unit).max(1) as i64).collect(), unit)
    }

    /// The links from one rank to another: those that the forest's trees use, or the fewest.
    #[must_use]
    pub fn route(&self, from: Rank, to: Rank) -> Route {
        let pair = [from.min(to), from.max(to)];
        match self.forest().routes.get(&pair) {
            Some(route) if from < to => route.clone(),
            Some(route) => splitting::reversed(route),
            None => self.graph.fewest_links(from, to),
        }
    }

    /// The fabric of some of the ranks, in this order. Other ranks and their links are left out, unless these
    /// ranks are connected by them only.
    #[must_use]
    pub(super) fn restricted_to(&self, ranks: &[Rank]) -> Self {
        Self::of(self.graph.restricted_to(ranks))
    }
}

/// The bound by sets. `unit`: bits per second of both directions of a link for a width of 1.
fn bound_of_sets(least: LeastTime, unit: u64) -> FabricBound {
    let LeastTime { numerator, denominator, sets } = least;
    // Each message passes two ends of links, where it leaves a set and where it enters another.
    let bandwidth = (denominator as u64).saturating_mul(unit) / 2;
    FabricBound {
        seconds_per_byte: 8.0 * numerator as f64 / bandwidth as f64,
        sets: sets.0,
        vectors: numerator as usize,
        bandwidth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_fabrics;
    use crate::topology_file::parse;
    use fastrand::Rng;
    use std::time::{Duration, Instant};
    use throughput::random_network;

    /// A random graph with links of different rates, some of them other in the other direction.
    fn random_fabric(random: &mut Rng) -> Fabric {
        let (network, widths) = random_network(random, 12);
        // Ranks come first.
        let mut order = network.ranks.clone();
        order.extend((0..network.vertices).filter(|vertex| !network.ranks.contains(vertex)));
        let place = |vertex: usize| order.iter().position(|other| *other == vertex).expect("all vertices");
        let back = random.bool();
        let links = network.ends.iter().zip(widths).map(|(ends, width)| FabricLink {
            name: String::new(),
            ends: ends.map(place),
            bandwidths: [width as u64, if back { random.u64(1..8) } else { width as u64 }]
                .map(|rate| rate << 30),
            latency: 0,
            burst: 0,
            is_within_node: false,
        });
        let names = (0..network.vertices).map(|vertex| vertex.to_string()).collect();
        Fabric::new(network.ranks.len(), names, links.collect())
    }

    #[test]
    fn forests_of_random_graphs_take_little_longer_than_possible() {
        let mut longer = Vec::new();
        for seed in 0..200 {
            let fabric = random_fabric(&mut Rng::with_seed(seed));
            let bound = fabric.bound().expect("several ranks").seconds_per_byte;
            let forest = fabric.forest();
            assert!(forest.trees.len() <= 64, "seed {seed}: {} trees", forest.trees.len());
            assert_eq!(forest.trees.iter().map(|tree| tree.share).sum::<u64>(), forest.shares, "seed {seed}");
            let alike = fabric.links().iter().all(|link| link.bandwidths[0] == link.bandwidths[1]);
            let ratio = forest.seconds_per_byte / bound;
            if alike && fabric.world() < fabric.names().len() {
                longer.push(ratio);
            } else if alike {
                assert!(ratio < 1.002, "seed {seed}: {ratio} times the least time");
            }
        }
        // Two ranks with several ways through switches have one route, so not all of these can take the least
        // time.
        longer.sort_by(f64::total_cmp);
        assert!(longer[longer.len() * 8 / 10] < 1.02, "{longer:?}");
    }

    #[test]
    fn a_fabric_of_256_ranks_is_planned_in_seconds() {
        for text in [test_fabrics::torus(16, 16, "100G"), test_fabrics::hypercube(8)] {
            let topology = parse("f", &text, None).expect("a graph");
            let begun = Instant::now();
            let fabric = topology.fabric().expect("a graph");
            let longer =
                fabric.forest().seconds_per_byte / fabric.bound().expect("many ranks").seconds_per_byte;
            let depth = fabric.forest().trees.iter().flat_map(SpanningTree::depths).max();
            eprintln!(
                "{:?}: {longer} {} trees, depth {depth:?}",
                begun.elapsed(),
                fabric.forest().trees.len()
            );
            assert!(longer < 1.01, "{longer} times the least time");
            // On a machine that does other things, too.
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        }
    }
}
