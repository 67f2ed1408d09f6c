//! Random numbers, and random trees for tests that plan on them.

#![allow(dead_code, reason = "`bench/planning.rs` uses a part of it")]

use flexring::config::Algorithm;
use flexring::plan::planner::{self, Details};
use flexring::plan::schedule::Schedule;
use flexring::plan::topology::{Topology, TopologyBuilder, Uplink, VertexId};

/// xorshift64*: a stream of numbers for a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound
    }
    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// A tree of at most `leaves` ranks, in any order, and at most `depth` levels of switches and nodes, with random
/// bandwidths.
pub fn tree(random: &mut Random, leaves: usize, depth: usize) -> Topology {
    let wanted = 1 + random.below(leaves);
    let mut ranks: Vec<usize> = (0..wanted).collect();
    for last in (1..wanted).rev() {
        ranks.swap(last, random.below(last + 1));
    }
    // In half of the trees all links of a level are alike.
    let alike = random.coin();
    let mut builder = TopologyBuilder::new("top");
    grow(random, &mut builder, 0, &ranks, depth.saturating_sub(1), alike);
    builder.finish().expect("every rank is on the tree once")
}

fn link(random: &mut Random, alike: bool) -> Uplink {
    let bandwidth = if alike { Uplink::NODE_DEFAULT.bandwidth } else { 1 + random.below(1000) as u64 };
    Uplink { bandwidth, latency: random.below(1000) as u64 }
}

fn grow(
    random: &mut Random,
    builder: &mut TopologyBuilder,
    parent: VertexId,
    ranks: &[usize],
    depth: usize,
    alike: bool,
) {
    let branches = 1 + random.below(ranks.len().min(5));
    let mut rest = ranks;
    for branch in 0..branches {
        let left = branches - branch - 1;
        let take = if left == 0 { rest.len() } else { 1 + random.below(rest.len() - left) };
        let (mine, others) = rest.split_at(take);
        rest = others;
        let link = link(random, alike);
        if depth > 1 && mine.len() > 1 && random.coin() {
            let switch = builder.switch(parent, "switch", link);
            grow(random, builder, switch, mine, depth - 1, alike);
        } else {
            let node = builder.node(parent, "node", link);
            for rank in mine {
                let link = if alike { Uplink::RANK_DEFAULT } else { self::link(random, false) };
                builder.rank(node, *rank, link);
            }
        }
    }
}

/// Pods, racks and nodes whose fan-outs differ, with at least so many ranks.
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
    builder.finish().expect("a tree")
}

/// Every algorithm but `auto`.
pub fn algorithms() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.iter().copied().filter(|algorithm| *algorithm != Algorithm::Auto)
}

/// Plans by `algorithm`, with details that fit: random dimensions, random servers. None where the algorithm
/// cannot be had on this topology, and says so.
pub fn plan(random: &mut Random, algorithm: Algorithm, topology: &Topology) -> Option<Schedule> {
    let world = topology.world();
    let mut details = Details::default();
    if algorithm == Algorithm::Hierarchical {
        let mut rest = world;
        while rest > 1 {
            let divisors: Vec<usize> = (2..=rest).filter(|divisor| rest.is_multiple_of(*divisor)).collect();
            let dimension = divisors[random.below(divisors.len())];
            details.dimensions.push(dimension);
            rest /= dimension;
        }
        details.dimensions.extend((world == 1).then_some(1));
    }
    if algorithm == Algorithm::ParameterServer && random.coin() {
        details.servers = (0..world).filter(|_| random.coin()).collect();
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
