//! Random topologies and random plans for tests, and large clusters for tests and benchmarks.

#![allow(dead_code, reason = "`bench/planning.rs` uses a part of it")]

use fastrand::Rng;
use flexring::config::Algorithm;
use flexring::plan::planner::{self, Details};
use flexring::plan::schedule::Schedule;
use flexring::plan::topology::{Nics, Topology, TopologyBuilder, Uplink, VertexId};

/// A tree of 1 to `leaves` ranks in random order, and at most `depth` levels of switches and nodes, with random
/// bandwidths.
pub fn tree(random: &mut Rng, leaves: usize, depth: usize) -> Topology {
    let wanted = 1 + random.usize(..leaves);
    let mut ranks: Vec<usize> = (0..wanted).collect();
    for last in (1..wanted).rev() {
        ranks.swap(last, random.usize(..last + 1));
    }
    // In half of the trees, all nodes' links are equal, and all ranks' links.
    let equal_links = random.bool();
    let mut builder = TopologyBuilder::new("top");
    grow(random, &mut builder, 0, &ranks, depth.saturating_sub(1), equal_links);
    builder.finish().expect("every rank is on the tree once")
}

fn link(random: &mut Rng, equal_links: bool) -> Uplink {
    let bandwidth =
        if equal_links { Uplink::NODE_DEFAULT.bandwidth } else { 1 + random.usize(..1000) as u64 };
    let burst = if random.bool() { random.usize(..1000) as u64 } else { 0 };
    Uplink { bandwidth, latency: random.usize(..1000) as u64, burst }
}

fn grow(
    random: &mut Rng,
    builder: &mut TopologyBuilder,
    parent: VertexId,
    ranks: &[usize],
    depth: usize,
    equal_links: bool,
) {
    let branches = 1 + random.usize(..ranks.len().min(5));
    let mut rest = ranks;
    for branch in 0..branches {
        let left = branches - branch - 1;
        let take = if left == 0 { rest.len() } else { 1 + random.usize(..rest.len() - left) };
        let (mine, others) = rest.split_at(take);
        rest = others;
        let link = link(random, equal_links);
        if depth > 1 && mine.len() > 1 && random.bool() {
            let switch = builder.switch(parent, "switch", link);
            grow(random, builder, switch, mine, depth - 1, equal_links);
        } else {
            let node = builder.node(parent, "node", link);
            if random.usize(..4) == 0 {
                builder.set_nics(node, Nics { count: 1 + random.usize(..4) as u32, striped: random.bool() });
            }
            for rank in mine {
                let link = if equal_links { Uplink::RANK_DEFAULT } else { self::link(random, false) };
                builder.rank(node, *rank, link);
            }
        }
    }
}

/// Pods, racks and nodes with different fan-outs, and at least `ranks` ranks.
pub fn cluster(ranks: usize) -> Topology {
    let mut builder = TopologyBuilder::new("top");
    let (mut rank, mut pod) = (0, 0);
    while rank < ranks {
        let spine = builder.switch(0, &format!("pod {pod}"), Uplink::NODE_DEFAULT);
        for rack in 0..16 + pod % 3 {
            let switch = builder.switch(spine, &format!("rack {pod}.{rack}"), Uplink::NODE_DEFAULT);
            for node in 0..14 + rack % 3 {
                let host = builder.node(switch, &format!("node {pod}.{rack}.{node}"), Uplink::NODE_DEFAULT);
                for _ in 0..7 + node % 2 {
                    builder.rank(host, rank, Uplink::RANK_DEFAULT);
                    rank += 1;
                }
            }
        }
        pod += 1;
    }
    builder.finish().expect("every rank is on one node")
}

/// Every algorithm but `auto`.
pub fn algorithms() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.iter().copied().filter(|algorithm| *algorithm != Algorithm::Auto)
}

/// The schedule of `algorithm`, with random dimensions or servers that fit the topology; `None` if the algorithm does not
/// support the topology and its error says so.
pub fn plan(random: &mut Rng, algorithm: Algorithm, topology: &Topology) -> Option<Schedule> {
    let world = topology.world();
    let mut details = Details::default();
    if algorithm == Algorithm::Hierarchical {
        let mut rest = world;
        while rest > 1 {
            let divisors: Vec<usize> = (2..=rest).filter(|divisor| rest.is_multiple_of(*divisor)).collect();
            let dimension = divisors[random.usize(..divisors.len())];
            details.dimensions.push(dimension);
            rest /= dimension;
        }
        details.dimensions.extend((world == 1).then_some(1));
    }
    if algorithm == Algorithm::ParameterServer && random.bool() {
        details.servers = (0..world).filter(|_| random.bool()).collect();
    }
    match planner::plan(algorithm, topology, &details) {
        Ok(schedule) => Some(schedule),
        Err(error) => {
            assert_eq!(algorithm, Algorithm::Blueconnect, "{error}");
            assert!(error.message().starts_with("BlueConnect needs a symmetric topology: "), "{error}");
            None
        }
    }
}
