//! The time of an all-reduce by a plan, calculated from what the plan sends.
//!
//! Owns the formula and its constants. Must not know which plans there are. It is a pure function of plan and
//! topology, in additions, multiplications, divisions and comparisons of floating-point numbers only, which
//! are equal on all machines: ranks choose by it.
//!
//! A level of the plan takes the latencies of its messages in a row, and the time of its busiest link or rank
//! for its bytes. A vector that is shorter than a wave, which is a sub-chunk of each shard, passes the levels
//! one after the other. A longer one is divided into waves, which overlap: all but the first take as long as
//! the busiest link or rank is busy with them in all levels together. The
//! [simulator](../../flexring_simulator/simulator/index.html) times the same costs event by event, which
//! takes a thousand times as long.

use super::Rank;
use super::lowering::{ExchangePattern, Plan, chain_before_root};
use super::physical_links::{PhysicalLink, PhysicalLinks};
use super::schedule::{Group, Level};
use super::topology::{Topology, VertexId};

/// Bytes per second that additions and copies of a rank read and write together: a core that adds two vectors
/// of 128 KiB in 20 us. The simulator's default.
pub const MEMORY_BANDWIDTH: u64 = 20_000_000_000;

/// Nanoseconds that an addition or a copy takes besides. The simulator's default.
pub const JOB_NANOSECONDS: u64 = 1_000;

const JOB_SECONDS: f64 = JOB_NANOSECONDS as f64 * 1e-9;

/// Sub-chunks that links with several levels of messages between nodes idle for at the ends of a call in
/// waves, because each level lags behind the one before. By the simulator, 64 MiB in sub-chunks of 128 KiB
/// take as long as 5 to 15 MB more with two or three such levels, and 0.3 to 1.5 MB more with one.
const IDLE_SUBCHUNKS: f64 = 96.0;

/// The part of these for which they idle at least.
const LEAST_IDLE: f64 = 0.2;

/// The time of an all-reduce as a function of the length of the vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalculatedTime {
    /// Seconds of all messages in a row, however short they are.
    pub latency: f64,
    /// Seconds for each byte of the vector, if the levels do not overlap.
    pub in_turn: f64,
    /// Seconds for each byte of the vector on the busiest link or rank.
    pub busiest: f64,
    /// Levels of messages between nodes.
    levels: u32,
    /// Jobs of the rank with the most, for each sub-chunk of the whole vector.
    jobs: f64,
    /// The longest shard, as a part of the vector.
    longest_shard: f64,
}

impl CalculatedTime {
    /// Seconds for a vector of `bytes` in sub-chunks of `subchunk` bytes, if no level begins before the one
    /// before has ended on all ranks.
    #[must_use]
    pub fn seconds(&self, bytes: u64, subchunk: usize) -> f64 {
        let (bytes, subchunk) = (bytes as f64, subchunk as f64);
        let wave = subchunk / self.longest_shard;
        if bytes <= wave {
            return self.latency + self.in_turn * bytes;
        }
        let busiest = self.in_waves(subchunk).min(self.in_turn);
        self.latency + self.in_turn * wave + busiest * (bytes - wave + self.idle(bytes, subchunk))
    }

    /// The least seconds for a vector of `bytes`, if levels overlap as much as the links allow. Where links
    /// differ much, those of one level are busy while others still are with the level before.
    #[must_use]
    pub fn least_seconds(&self, bytes: u64, subchunk: usize) -> f64 {
        let (bytes, subchunk) = (bytes as f64, subchunk as f64);
        let idle = LEAST_IDLE * self.idle(bytes, subchunk);
        self.latency + self.in_waves(subchunk).min(self.in_turn) * (bytes + idle)
    }

    /// Whether a vector of `bytes` moves in several waves with one level of messages between nodes, so that
    /// the time of its busiest link is the calculated one.
    #[must_use]
    pub fn is_exact(&self, bytes: u64, subchunk: usize) -> bool {
        self.levels <= 1 && bytes as f64 > 4.0 * subchunk as f64 / self.longest_shard
    }

    /// Bytes that the busiest link would carry while it idles.
    fn idle(&self, bytes: f64, subchunk: f64) -> f64 {
        let in_waves = (bytes - subchunk / self.longest_shard).max(0.0);
        if self.levels > 1 { in_waves.min(IDLE_SUBCHUNKS * subchunk) } else { 0.0 }
    }

    /// Seconds for each byte on the busiest link or rank.
    fn in_waves(&self, subchunk: f64) -> f64 {
        self.busiest.max(self.jobs * JOB_SECONDS / subchunk)
    }
}

/// Calculates times on one topology.
pub struct Calculator<'a> {
    links: PhysicalLinks<'a>,
    /// By link, seconds for each byte.
    seconds_per_byte: Vec<f64>,
    /// By rank, the vertices and links from the root's child to the leaf.
    paths: Vec<Vec<(VertexId, PhysicalLink)>>,
    /// By vertex, seconds.
    latency: Vec<f64>,
    topology: &'a Topology,
}

/// What a phase of a level costs.
struct PhaseCosts {
    /// By link, parts of the vector in each direction.
    up: Vec<f64>,
    down: Vec<f64>,
    /// By rank, bytes that it reads and writes, for each byte of the vector; and jobs.
    moved: Vec<f64>,
    jobs: Vec<f64>,
    /// By rank, the length of what its jobs write.
    written: Vec<f64>,
    /// The longest way of one message.
    latency: f64,
    /// Whether there are messages between nodes.
    crosses: bool,
}

impl PhaseCosts {
    fn new(links: usize, world: usize) -> Self {
        Self {
            up: vec![0.0; links],
            down: vec![0.0; links],
            moved: vec![0.0; world],
            jobs: vec![0.0; world],
            written: vec![0.0; world],
            latency: 0.0,
            crosses: false,
        }
    }
}

impl<'a> Calculator<'a> {
    /// Prepares what all plans need. The links must form a tree.
    #[must_use]
    pub fn new(topology: &'a Topology) -> Self {
        let links = PhysicalLinks::new(topology);
        let vertices = topology.vertices();
        let path = |rank: Rank| {
            let up = |vertex: &VertexId| vertices[*vertex].parent.filter(|parent| *parent > 0);
            let leaf = topology.leaf(rank);
            let part = topology.uplink_part_of(rank);
            let link = |vertex: VertexId| {
                let of = links.of(vertex);
                (vertex, if of.len() == 1 { of.start } else { of.start + part })
            };
            let mut path: Vec<_> = std::iter::successors(Some(leaf), up).map(link).collect();
            path.reverse();
            path
        };
        Self {
            seconds_per_byte: links.bandwidths().map(|[up, _]| 8.0 / up as f64).collect(),
            paths: (0..topology.world()).map(path).collect(),
            latency: vertices.iter().map(|vertex| vertex.uplink.latency as f64 * 1e-9).collect(),
            links,
            topology,
        }
    }

    /// The time of an all-reduce by `plan`, which has as many ranks as the topology.
    #[must_use]
    pub fn time(&self, plan: &Plan) -> CalculatedTime {
        let world = self.topology.world();
        let (mut latency, mut in_turn, mut levels) = (0.0, 0.0, 0);
        let mut all = PhaseCosts::new(self.links.len(), world);
        for (level, patterns) in plan.levels() {
            for gathers in [false, true] {
                let phase = self.phase(level, patterns, gathers);
                latency += phase.latency;
                let link = self.busiest_link(&phase);
                let memory = largest(&phase.moved) / MEMORY_BANDWIDTH as f64;
                levels += u32::from(phase.crosses && gathers);
                in_turn += if phase.crosses { link + memory } else { link.max(memory) };
                latency += largest(&phase.jobs) * JOB_SECONDS;
                for (all, more) in [
                    (&mut all.up, &phase.up),
                    (&mut all.down, &phase.down),
                    (&mut all.moved, &phase.moved),
                    (&mut all.written, &phase.written),
                ] {
                    all.iter_mut().zip(more).for_each(|(all, more)| *all += more);
                }
            }
        }
        CalculatedTime {
            latency,
            in_turn,
            busiest: self.busiest_link(&all).max(largest(&all.moved) / MEMORY_BANDWIDTH as f64),
            levels,
            jobs: largest(&all.written),
            longest_shard: plan.longest_shard(),
        }
    }

    fn busiest_link(&self, phase: &PhaseCosts) -> f64 {
        let loads = phase.up.iter().zip(&phase.down).zip(&self.seconds_per_byte);
        loads.map(|((up, down), seconds)| up.max(*down) * seconds).fold(0.0, f64::max)
    }

    fn phase(&self, level: &Level, patterns: &[ExchangePattern], gathers: bool) -> PhaseCosts {
        let mut costs = PhaseCosts::new(self.links.len(), self.topology.world());
        for (_, block) in level.blocks() {
            let pattern = patterns[block.start];
            let groups = &level.groups()[block.clone()];
            let is_ring = |group: &Group| {
                let last = group.participant(group.len() - 1);
                last == group.root && group.len() > 2
            };
            if pattern == ExchangePattern::Chain && groups[0].set.is_fixed() && groups.iter().all(is_ring) {
                self.ring(groups, gathers, &mut costs);
                continue;
            }
            for group in groups.iter().filter(|group| group.moves()) {
                self.group(group, pattern, gathers, &mut costs);
            }
        }
        costs
    }

    /// Groups that are chained around one ring.
    fn ring(&self, groups: &[Group], gathers: bool, costs: &mut PhaseCosts) {
        let ring = &groups[0];
        let len = ring.len();
        // By place in the set, what is not sent to it.
        let mut spared = vec![0.0; len];
        let mut total = 0.0;
        for group in groups {
            let extent = group.span.extent();
            total += extent;
            let target = if gathers { group.root } else { group.participant(0) };
            let place = ring.place_of(target).unwrap_or(0);
            spared[place] += extent;
        }
        let mut latency = 0.0;
        let most = largest(&costs.jobs);
        for (place, spared) in spared.iter().enumerate() {
            let (from, to) = (ring.participant((place + len - 1) % len), ring.participant(place));
            latency += self.message(from, to, total - spared, gathers, costs);
        }
        let hops = (len - 1) as f64;
        costs.jobs.iter_mut().for_each(|jobs| *jobs = jobs.min(most.max(hops)));
        costs.latency = costs.latency.max(latency * hops / len as f64);
        if !gathers {
            for place in 0..len {
                costs.jobs[ring.participant(place)] = hops;
            }
        }
    }

    fn group(&self, group: &Group, pattern: ExchangePattern, gathers: bool, costs: &mut PhaseCosts) {
        let extent = group.span.extent();
        match pattern {
            ExchangePattern::Direct => {
                let mut longest = 0.0f64;
                for rank in group.participants().filter(|rank| *rank != group.root) {
                    let (from, to) = if gathers { (group.root, rank) } else { (rank, group.root) };
                    longest = longest.max(self.send(from, to, extent, costs));
                    if gathers {
                        self.copy(from, to, extent, costs);
                    }
                }
                costs.latency = costs.latency.max(longest);
                if !gathers {
                    self.add(group.root, group.len(), extent, costs);
                }
            }
            ExchangePattern::Chain => {
                // The gather continues from the root to the first rank, and ends at the last but the root.
                let start = gathers.then_some(group.root);
                let end = (!gathers).then_some(group.root);
                let mut chain = start.into_iter().chain(chain_before_root(group)).chain(end);
                let mut latency = 0.0;
                let mut from = chain.next().unwrap_or(group.root);
                for to in chain {
                    latency += self.message(from, to, extent, gathers, costs) + JOB_SECONDS;
                    from = to;
                }
                costs.latency = costs.latency.max(latency);
            }
        }
    }

    /// A message and what its receiver does with it. Returns its latency.
    fn message(&self, from: Rank, to: Rank, extent: f64, gathers: bool, costs: &mut PhaseCosts) -> f64 {
        if gathers {
            self.copy(from, to, extent, costs);
        } else {
            self.add(to, 2, extent, costs);
        }
        self.send(from, to, extent, costs)
    }

    /// An addition of `operands`.
    fn add(&self, rank: Rank, operands: usize, extent: f64, costs: &mut PhaseCosts) {
        costs.moved[rank] += extent * (operands + 1) as f64;
        costs.written[rank] += extent;
        costs.jobs[rank] += 1.0;
    }

    /// Within a node a receiver copies what it gathers; between nodes it is delivered to its place.
    fn copy(&self, from: Rank, to: Rank, extent: f64, costs: &mut PhaseCosts) {
        if self.topology.node_of(from) == self.topology.node_of(to) {
            costs.moved[to] += 2.0 * extent;
            costs.written[to] += extent;
            costs.jobs[to] += 1.0;
        }
    }

    /// Adds the load of a message. Returns its latency.
    fn send(&self, from: Rank, to: Rank, extent: f64, costs: &mut PhaseCosts) -> f64 {
        let (from, to) = (&self.paths[from], &self.paths[to]);
        let shared = from.iter().zip(to).take_while(|(one, other)| one.0 == other.0).count();
        let mut latency = 0.0;
        for (vertex, link) in &from[shared..] {
            costs.up[*link] += extent;
            latency += self.latency[*vertex];
        }
        for (vertex, link) in &to[shared..] {
            costs.down[*link] += extent;
            latency += self.latency[*vertex];
        }
        costs.crosses |= from.len() - shared > 1 || to.len() - shared > 1;
        latency
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}
