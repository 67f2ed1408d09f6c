//! Random topologies and random plans for tests, and large clusters for tests and benchmarks.

use crate::Rank;
use crate::call_layout::CallLayout;
use crate::device_program::DeviceProgram;
use crate::lowering::{ExchangePattern, Movement, Plan, ProgramSpec};
use crate::pipeline::Binding;
use crate::planner::{self, Details};
use crate::program::HeldSpans;
use crate::schedule::Schedule;
use crate::topology::{Nics, Topology, TopologyBuilder, Uplink, VertexId};
use crate::verifier::VerifiedPlan;
use fastrand::Rng;
use flexring_core::call::Collective;
use flexring_core::config::{Algorithm, Lowering};
use std::ops::Range;

/// A tree of 1 to `leaves` ranks in random order, and at most `depth` levels of switches and nodes, with
/// random bandwidths.
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

/// The schedule of `algorithm`, with random dimensions or servers that fit the topology; `None` if the
/// algorithm does not support the topology and its error says so.
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
            let expected = match algorithm {
                Algorithm::Blueconnect => "BlueConnect needs a symmetric topology: ",
                Algorithm::Forest => "the topology is a tree: ",
                _ => "no error",
            };
            assert!(error.message().starts_with(expected), "{}: {error}", algorithm.name());
            None
        }
    }
}

/// The tree of a seed, with up to 4 levels. Most have up to 8 leaves, some 24, a few 64.
#[must_use]
pub fn tree_of_seed(seed: u64) -> (Rng, Topology) {
    let mut random = Rng::with_seed(seed);
    let most = match random.usize(..20) {
        0 => 64,
        1..4 => 24,
        _ => 8,
    };
    let topology = tree(&mut random, most, 4);
    (random, topology)
}

/// A plan of each algorithm for the tree of a seed, with a random lowering.
fn plans(seed: u64) -> Vec<(Algorithm, Plan)> {
    let (mut random, topology) = tree_of_seed(seed);
    let lowering = [Lowering::Auto, Lowering::Auto, Lowering::Chain, Lowering::Direct][random.usize(..4)];
    let planned = |algorithm| {
        let schedule = plan(&mut random, algorithm, &topology)?;
        Some((algorithm, Plan::on(schedule, &topology, lowering)))
    };
    algorithms().filter_map(planned).collect()
}

/// The verified plans for the tree of a seed. For every fiftieth tree, all collectives are verified.
fn proven(seed: u64) -> Vec<(u64, Algorithm, VerifiedPlan)> {
    let prove = |(algorithm, plan): (Algorithm, Plan)| {
        let proven =
            if seed.is_multiple_of(50) { VerifiedPlan::for_all(plan) } else { VerifiedPlan::new(plan) };
        let proven = proven.unwrap_or_else(|error| panic!("seed {seed}, {}: {error}", algorithm.name()));
        (seed, algorithm, proven)
    };
    plans(seed).into_iter().map(prove).collect()
}

/// The verified plans of all seeds, computed on all cores.
///
/// # Panics
/// If the verifier refuses one.
#[must_use]
pub fn proven_in_parallel(seeds: &[u64]) -> Vec<(u64, Algorithm, VerifiedPlan)> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let share = |thread| {
            move || seeds.iter().skip(thread).step_by(threads).flat_map(|seed| proven(*seed)).collect()
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(share(thread))).collect();
        threads
            .into_iter()
            .flat_map(|thread| -> Vec<_> { thread.join().expect("all plans are verified") })
            .collect()
    })
}

/// The contribution of `rank` to element `at`: a digit for each rank in base 4, so that a wrong sum shows
/// which rank is missing or counted twice, and above them the element's number, so that it shows what was
/// misplaced.
#[must_use]
pub fn contribution(rank: Rank, at: u64) -> u64 {
    (1 << (2 * rank)) + (at << 32)
}

/// What a rank's contribution is multiplied by.
#[must_use]
pub fn factor(rank: Rank, prescale: bool) -> u64 {
    if prescale { rank as u64 % 3 + 1 } else { 1 }
}

/// What a rank's output is to have at an element: in a collective that moves blocks that of the rank `from`.
#[must_use]
pub fn expected(spec: ProgramSpec, world: usize, from: Rank, at: u64) -> u64 {
    match spec.collective {
        Collective::AllToAll | Collective::AllToAllV | Collective::AllGather | Collective::Gather => {
            contribution(from, at)
        }
        Collective::Broadcast | Collective::Scatter => contribution(spec.root, at),
        _ => (0..world).map(|from| contribution(from, at) * factor(from, spec.prescale)).sum(),
    }
}

/// A random topology, and a plan for it with random algorithm, lowering and spec.
pub fn random_plan(random: &mut Rng) -> (Topology, Plan, ProgramSpec) {
    let topology = tree(random, 6, 3);
    let algorithms: Vec<_> = algorithms().collect();
    let schedule = loop {
        let algorithm = algorithms[random.usize(..algorithms.len())];
        if let Some(schedule) = plan(random, algorithm, &topology) {
            break schedule;
        }
    };
    let (mixed, direct) = (random.bool(), random.bool());
    let plan = Plan::new(schedule, |group| {
        let direct = if mixed { group.root % 2 == 0 } else { direct };
        if direct { ExchangePattern::Direct } else { ExchangePattern::Chain }
    });
    let plan = plan.with_nodes(&topology);
    let collective = if random.bool() {
        Collective::AllReduce
    } else {
        Collective::ALL[random.usize(..Collective::ALL.len())]
    };
    let mut movements = vec![Movement::Spans, Movement::Waves];
    match collective {
        Collective::AllReduce => movements.push(Movement::OneShot),
        Collective::AllToAll => movements.push(Movement::ByNode),
        _ => {}
    }
    let movement = movements[random.usize(..movements.len())];
    let spec = ProgramSpec {
        collective,
        root: if collective.has_root() { random.usize(..topology.world()) } else { 0 },
        prescale: collective.reduces() && movement != Movement::OneShot && random.usize(..4) == 0,
        reproducible: collective.reduces() && random.usize(..4) == 0,
        movement,
    };
    (topology, plan, spec)
}

/// The list of a rank for a call, and what the call's vectors are to have.
#[derive(Clone, Debug)]
pub struct ListedCall {
    /// The call.
    pub spec: ProgramSpec,
    /// Elements of the whole vector.
    pub count: u64,
    /// Whether input and output share memory: that of the whole vector.
    pub in_place: bool,
    /// The elements of the rank's input.
    pub input: Range<u64>,
    /// The elements of its output.
    pub output: Range<u64>,
    /// The list.
    pub program: DeviceProgram,
}

impl ListedCall {
    /// What the rank that runs it is to get at each element; `None` for those that are another rank's.
    pub fn expected(&self) -> impl Iterator<Item = Option<u64>> + '_ {
        let (world, rank) = (self.program.world, self.program.rank);
        self.output.clone().map(move |at| {
            let block = |blocks: usize| (at * blocks as u64 / self.count) as usize;
            let from = match self.spec.collective.is_all_to_all() {
                true if block(world * world) % world != rank => return None,
                true => block(world * world) / world,
                false => block(world),
            };
            Some(expected(self.spec, world, from, at))
        })
    }
}

/// The lists of all ranks for a call of random length, of at most `longest` elements in a sub-chunk and
/// `most_places` of an item; `None` if there can be none. With a `lag`, of calls so long that scratch
/// memory is used again.
///
/// # Panics
/// If a list would wait for a later item.
pub fn listed_calls(
    random: &mut Rng,
    plan: &Plan,
    spec: ProgramSpec,
    lag: Option<u64>,
    longest: u64,
    most_places: usize,
) -> Option<Vec<ListedCall>> {
    let world = plan.schedule().world();
    let (exchange, parts) = (spec.collective.is_all_to_all(), spec.collective.has_parts());
    let subchunk = random.u64(1..=longest);
    let units = subchunk.min(8) as usize;
    let count = match (exchange, parts || exchange) {
        (true, _) => world * world * (1 + random.usize(..4 * units)),
        (_, true) => world * (1 + random.usize(..if lag.is_some() { 40 } else { 8 } * units)),
        _ => 1 + random.usize(..if lag.is_some() { 160 } else { 32 } * units),
    } as u64;
    let align = if parts || exchange { 1 } else { random.u64(1..4) };
    let call = |rank| {
        let mut program = plan.program(rank, spec);
        if let (Some(waves), Some(lag)) = (&mut program.waves, lag) {
            waves.lag = lag;
        }
        let HeldSpans { input, output, disjoint } = program.held_spans;
        let in_place = random.bool() && !exchange;
        let binding = Binding { count, subchunk, align, in_place: in_place && !disjoint };
        let (input, output) = (input.elements(count, align), output.elements(count, align));
        let layout = CallLayout {
            binding,
            input: input.clone(),
            output: output.clone(),
            copies_input: in_place && disjoint,
            streaming: false,
        };
        let program =
            DeviceProgram::new(&program, &layout, most_places).unwrap_or_else(|error| panic!("{error}"))?;
        Some(ListedCall { spec, count, in_place, input, output, program })
    };
    (0..world).map(call).collect()
}
