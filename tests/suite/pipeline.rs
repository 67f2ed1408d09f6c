//! The state machine alone, in worlds that are made up: a seeded order of completions drives the pipelines of
//! all ranks of a world, with every delay that links and devices may have. A million seeds look for deadlock,
//! lost slots, memory that is reused too early, and contributions that are lost or counted twice.

use crate::effort::cases;
use crate::trees::{self, Random};
use flexring::call::Collective;
use flexring::plan::Rank;
use flexring::plan::fraction::Span;
use flexring::plan::lowering::{ExchangePattern, Plan, ProgramSpec};
use flexring::plan::pipeline::{Action, Binding, LinkProfile, Location, Pipeline, Staging};
use flexring::plan::program::{Body, BufferKind, OperandSource, StepId};
use flexring::plan::topology::Topology;
use flexring::plan::verifier::verify;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// What rank `rank` gives for element `at`: a digit per rank in base 4, so that a wrong sum tells which rank was
/// lost or doubled, and the element's number above them, so that it tells what was misplaced.
fn contribution(rank: Rank, at: u64) -> u64 {
    (1 << (2 * rank)) + (at << 32)
}

fn factor(rank: Rank, prescale: bool) -> u64 {
    if prescale { rank as u64 % 3 + 1 } else { 1 }
}

/// A message between two ranks.
#[derive(Clone)]
struct Message {
    location: Location,
    elements: Range<u64>,
    /// What a landing link has read of it.
    bytes: Option<Vec<u64>>,
}

/// A job of a rank's device; some read when they are submitted, some when they end.
struct Job {
    step: StepId,
    sub: u64,
    stage: Option<(BufferKind, u32)>,
    read_early: Option<Vec<u64>>,
}

struct Machine {
    pipeline: Pipeline,
    given: Vec<u64>,
    input: Vec<u64>,
    output: Vec<u64>,
    slots: Vec<Vec<u64>>,
    jobs: VecDeque<Job>,
    in_place: bool,
}

impl Machine {
    fn vector(&mut self, buffer: BufferKind) -> &mut Vec<u64> {
        if self.in_place || buffer == BufferKind::Output { &mut self.output } else { &mut self.input }
    }
    fn read(&mut self, location: Location, elements: Range<u64>) -> Vec<u64> {
        let len = (elements.end - elements.start) as usize;
        match location {
            Location::Buffer(buffer) => {
                self.vector(buffer)[elements.start as usize..elements.end as usize].to_vec()
            }
            Location::Slot(slot) => self.slots[slot as usize][..len].to_vec(),
            Location::Peer { .. } => unreachable!("views are read at their sender"),
        }
    }
    fn write(&mut self, location: Location, elements: Range<u64>, values: &[u64]) {
        let start = if matches!(location, Location::Buffer(_)) { elements.start as usize } else { 0 };
        let target = match location {
            Location::Buffer(buffer) => self.vector(buffer),
            Location::Slot(slot) => &mut self.slots[slot as usize],
            Location::Peer { .. } => unreachable!("nobody writes to a view"),
        };
        target[start..start + values.len()].copy_from_slice(values);
    }
}

/// One directed link.
#[derive(Default)]
struct Wire {
    in_place: bool,
    /// Sent and, in place, not yet released.
    sent: VecDeque<Message>,
    /// In place: messages announced to the receiver so far, and released ones whose sender was not told yet.
    announced: usize,
    history: Vec<Message>,
    acknowledged: usize,
    /// Landing: read by the link, not yet landed.
    flying: VecDeque<Message>,
    landings: VecDeque<(Location, Range<u64>)>,
}

struct World {
    machines: Vec<Machine>,
    wires: Vec<Vec<Wire>>,
}

/// What a world of random topology, algorithm, lowering and purpose is made from.
fn plan(random: &mut Random) -> (Topology, Plan, ProgramSpec) {
    let topology = trees::tree(random, 6, 3);
    let algorithms: Vec<_> = trees::algorithms().collect();
    let schedule = loop {
        let algorithm = algorithms[random.below(algorithms.len())];
        if let Some(schedule) = trees::plan(random, algorithm, &topology) {
            break schedule;
        }
    };
    let (mixed, direct) = (random.coin(), random.coin());
    let plan = Plan::new(schedule, |group| {
        let direct = if mixed { group.root % 2 == 0 } else { direct };
        if direct { ExchangePattern::Direct } else { ExchangePattern::Chain }
    });
    let collective = if random.coin() { Collective::AllReduce } else { Collective::ALL[random.below(5)] };
    let one_shot = collective == Collective::AllReduce && random.below(8) == 0;
    let spec = ProgramSpec {
        collective,
        root: if collective.has_root() { random.below(topology.world()) } else { 0 },
        prescale: collective.reduces() && !one_shot && random.below(4) == 0,
        reproducible: collective.reduces() && random.below(4) == 0,
        by_wave: random.coin(),
        one_shot,
    };
    (topology, plan, spec)
}

/// Builds a random world for `seed` and plays it to its end.
fn play(seed: u64) {
    let mut random = Random::new(seed);
    let (topology, plan, spec) = plan(&mut random);
    let world = topology.world();
    let nodes: Vec<usize> = (0..world).map(|rank| topology.node_of(rank)).collect();
    let parts = matches!(spec.collective, Collective::ReduceScatter | Collective::AllGather);
    let count = match random.below(8) {
        0 => 0,
        _ if parts => (world * random.below(10)) as u64,
        _ => random.below(40) as u64,
    };
    let subchunk = 1 + random.below(5) as u64;
    let align = if parts { 1 } else { 1 + random.below(3) as u64 };
    let window = 1 + random.below(4);
    let slots = 1 + random.below(3);
    // Links of one node take nothing of the caller's memory as it lies, or all; the others, as it comes.
    let near = Staging { input: random.coin(), output: random.coin(), recv: false };
    let far = Staging { input: random.coin(), output: random.coin(), recv: random.coin() };
    let elements = |span: Span| span.elements(count, align);
    let machines = (0..world)
        .map(|rank| {
            let program = plan.program(rank, spec);
            let mut pipeline = Pipeline::new(Arc::new(program), |peer| LinkProfile {
                in_place: nodes[peer] == nodes[rank],
                window,
                send_slots: slots,
                recv_slots: slots,
            });
            let staging = |peer: Rank| if nodes[peer] == nodes[rank] { near } else { far };
            let in_place = random.coin() && !spec.one_shot;
            pipeline.start(Binding { count, subchunk, align, in_place }, staging);
            if random.below(8) == 0 {
                // Once more, as in the next call: nothing may be left of the first.
                pipeline.start(Binding { count, subchunk, align, in_place }, staging);
            }
            let given = elements(spec.windows(rank, world).input);
            let given: Vec<u64> = (0..count)
                .map(|at| if given.contains(&at) { contribution(rank, at) } else { u64::MAX / 2 })
                .collect();
            Machine {
                slots: vec![vec![u64::MAX; subchunk as usize]; pipeline.slots()],
                pipeline,
                output: if in_place { given.clone() } else { vec![u64::MAX; count as usize] },
                input: given.clone(),
                given,
                jobs: VecDeque::new(),
                in_place,
            }
        })
        .collect();
    let wires = (0..world)
        .map(|from| {
            (0..world).map(|to| Wire { in_place: nodes[from] == nodes[to], ..Wire::default() }).collect()
        })
        .collect();
    let mut world_state = World { machines, wires };
    world_state.run(&mut random, seed);
    for (rank, machine) in world_state.machines.iter().enumerate() {
        for at in elements(spec.windows(rank, world).output) {
            let expected: u64 = match spec.collective {
                Collective::AllGather => contribution((at * world as u64 / count) as Rank, at),
                Collective::Broadcast => contribution(spec.root, at),
                _ => (0..world).map(|from| contribution(from, at) * factor(from, spec.prescale)).sum(),
            };
            assert_eq!(
                machine.output[at as usize], expected,
                "seed {seed}: rank {rank}, element {at}, {spec:?}"
            );
        }
        if !machine.in_place {
            assert_eq!(machine.input, machine.given, "seed {seed}: rank {rank}'s input was written to");
        }
    }
}

impl World {
    fn run(&mut self, random: &mut Random, seed: u64) {
        let world = self.machines.len();
        let mut idle = 0;
        while !self.machines.iter().all(|machine| machine.pipeline.is_done()) {
            // Any rank may act, any wire may move, any device may finish: in random order.
            let rank = random.below(world);
            let peer = random.below(world);
            let moved = match random.below(5) {
                0 | 1 => self.act(rank, random),
                2 => self.finish_job(rank),
                3 => self.move_wire(rank, peer),
                _ => self.report_sent(rank, peer),
            };
            idle = if moved { 0 } else { idle + 1 };
            if idle > 200 * world * world && !self.anything_can_move(random) {
                panic!("seed {seed}: deadlock");
            }
        }
    }

    fn anything_can_move(&mut self, random: &mut Random) -> bool {
        let world = self.machines.len();
        (0..world).any(|rank| {
            self.act(rank, random)
                || self.finish_job(rank)
                || (0..world).any(|peer| self.move_wire(rank, peer) || self.report_sent(rank, peer))
        })
    }

    /// Lets a pipeline decide once.
    fn act(&mut self, rank: Rank, random: &mut Random) -> bool {
        let Some(action) = self.machines[rank].pipeline.next_action() else {
            return false;
        };
        match action {
            Action::Send { peer, location, step, sub } => {
                let elements = self.machines[rank].pipeline.elements(step, sub);
                let message = Message { location, elements, bytes: None };
                self.wires[rank][peer].history.push(message.clone());
                self.wires[rank][peer].sent.push_back(message);
            }
            Action::PostRecv { peer, location, step, sub } => {
                let elements = self.machines[rank].pipeline.elements(step, sub);
                self.wires[peer][rank].landings.push_back((location, elements));
            }
            Action::Release { peer } => self.wires[peer][rank].acknowledged += 1,
            Action::Stage { step, sub, buffer, slot } => {
                self.submit(rank, Job { step, sub, stage: Some((buffer, slot)), read_early: None }, random);
            }
            Action::Combine { step, sub } => {
                self.submit(rank, Job { step, sub, stage: None, read_early: None }, random);
            }
        }
        true
    }

    fn submit(&mut self, rank: Rank, mut job: Job, random: &mut Random) {
        // A device runs its jobs in order, so only one that has nothing before it may read at once.
        if self.machines[rank].jobs.is_empty() && random.coin() {
            job.read_early = Some(self.compute(rank, &job));
        }
        self.machines[rank].jobs.push_back(job);
    }

    fn compute(&mut self, rank: Rank, job: &Job) -> Vec<u64> {
        let elements = self.machines[rank].pipeline.elements(job.step, job.sub);
        if let Some((buffer, _)) = job.stage {
            return self.machines[rank].read(Location::Buffer(buffer), elements);
        }
        let program = Arc::clone(self.machines[rank].pipeline.program());
        let Body::Combine { operands, .. } = &program.steps[job.step as usize].body else {
            panic!("step {} is no combine", job.step)
        };
        let mut sum = vec![0; (elements.end - elements.start) as usize];
        for (part, operand) in operands.iter().enumerate() {
            let location = self.machines[rank].pipeline.operand_location(job.step, part, job.sub);
            let mut values = match location {
                Location::Peer { peer, message } => {
                    let sent = self.wires[peer][rank].history[message as usize].clone();
                    assert_eq!(sent.elements, elements, "the message is the one that is meant");
                    self.machines[peer].read(sent.location, sent.elements)
                }
                location => self.machines[rank].read(location, elements.clone()),
            };
            if let OperandSource::Own { scaled: true, .. } = operand {
                values.iter_mut().for_each(|value| *value *= factor(rank, true));
            }
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = u64::wrapping_add(*sum, value));
        }
        sum
    }

    fn finish_job(&mut self, rank: Rank) -> bool {
        let Some(job) = self.machines[rank].jobs.pop_front() else {
            return false;
        };
        let values = job.read_early.clone().unwrap_or_else(|| self.compute(rank, &job));
        let machine = &mut self.machines[rank];
        let elements = machine.pipeline.elements(job.step, job.sub);
        match job.stage {
            Some((_, slot)) => {
                machine.write(Location::Slot(slot), elements, &values);
                machine.pipeline.stage_complete(job.step, job.sub);
            }
            None => {
                machine.write(Location::Buffer(BufferKind::Output), elements, &values);
                machine.pipeline.combine_complete(job.step).expect("the sum was asked for");
            }
        }
        true
    }

    /// Lets the wire from `from` to `to` do one thing.
    fn move_wire(&mut self, from: Rank, to: Rank) -> bool {
        let wire = &mut self.wires[from][to];
        if wire.in_place {
            if wire.announced == wire.history.len() {
                return false;
            }
            let message = self.machines[to].pipeline.recv_ready(from).expect("the message is expected");
            assert_eq!(message as usize, wire.announced);
            wire.announced += 1;
            return true;
        }
        if let Some(message) = wire.sent.iter_mut().find(|message| message.bytes.is_none()) {
            message.bytes = Some(self.machines[from].read(message.location, message.elements.clone()));
            wire.flying.push_back(message.clone());
            return true;
        }
        if let (Some(_), Some(_)) = (wire.flying.front(), wire.landings.front()) {
            let message = wire.flying.pop_front().expect("just seen");
            let (location, elements) = wire.landings.pop_front().expect("just seen");
            assert_eq!(elements, message.elements, "both ends mean the same message");
            let bytes = message.bytes.expect("it was read before it flew");
            self.machines[to].write(location, elements, &bytes);
            self.machines[to].pipeline.recv_complete(from).expect("the landing was asked for");
            return true;
        }
        false
    }

    fn report_sent(&mut self, from: Rank, to: Rank) -> bool {
        let wire = &mut self.wires[from][to];
        let ready = if wire.in_place {
            let ready = wire.acknowledged > 0;
            wire.acknowledged -= usize::from(ready);
            ready
        } else {
            wire.sent.front().is_some_and(|message| message.bytes.is_some())
        };
        if ready {
            wire.sent.pop_front();
            self.machines[from].pipeline.send_complete(to).expect("it was sent");
        }
        ready
    }
}

#[test]
fn plans_of_random_worlds_are_proved_by_the_verifier() {
    for seed in 0..cases(2_000) {
        let (_, plan, spec) = plan(&mut Random::new(seed));
        verify(&plan, spec).unwrap_or_else(|error| panic!("seed {seed}: {error}: {spec:?}"));
    }
}

#[test]
fn random_orders_of_completion_end_in_the_right_sums() {
    let seeds = cases(100_000);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || (thread..seeds).step_by(threads as usize).for_each(play));
        }
    });
}
