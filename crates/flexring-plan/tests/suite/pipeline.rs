//! The pipeline without links and devices: a seeded order of completions drives the pipelines of all ranks of
//! a random world, with every delay that links and devices may have. Many seeds look for deadlocks, lost
//! slots, memory that is reused too early, and contributions that are lost or counted twice.

use fastrand::Rng;
use flexring_core::call::Collective;
use flexring_plan::Rank;
use flexring_plan::fraction::Span;
use flexring_plan::pipeline::{Action, Binding, LinkProfile, Location, Pipeline, Staging};
use flexring_plan::program::{Body, BufferKind, OperandSource, StepId};
use flexring_plan::scratch_layout::ScratchLayout;
use flexring_plan::test_util::{contribution, expected, factor, random_plan};
use flexring_plan::verifier::verify;
use flexring_testkit::effort::cases;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A message between two ranks.
#[derive(Clone)]
struct Message {
    location: Location,
    elements: Range<u64>,
    /// Its bytes, once a link with posted receives has read them.
    bytes: Option<Vec<u64>>,
}

/// A job of a rank's device. Some read their operands when they are submitted, others when they finish.
struct Job {
    step: StepId,
    sub: u64,
    stage: Option<(BufferKind, u32)>,
    read_early: Option<Vec<u64>>,
}

struct SimulatedRank {
    pipeline: Pipeline,
    initial_input: Vec<u64>,
    input: Vec<u64>,
    output: Vec<u64>,
    /// Sums outside of the caller's output, and data to pass on.
    scratch: Vec<u64>,
    scratch_layout: ScratchLayout,
    /// The elements that the caller's output holds.
    held: Range<u64>,
    slots: Vec<Vec<u64>>,
    jobs: VecDeque<Job>,
    in_place: bool,
}

impl SimulatedRank {
    /// The memory of elements in a vector.
    fn vector(&mut self, buffer: BufferKind, elements: &Range<u64>) -> &mut [u64] {
        let Range { start, end } = *elements;
        let (memory, start) = match buffer {
            BufferKind::Input if !self.in_place => (&mut self.input, start),
            BufferKind::Input => (&mut self.output, start),
            BufferKind::Output if self.held.contains(&start) => (&mut self.output, start),
            BufferKind::Output | BufferKind::Transit => {
                (&mut self.scratch, self.scratch_layout.place_of(start))
            }
        };
        let start = start as usize;
        &mut memory[start..start + (end - elements.start) as usize]
    }
    fn read(&mut self, location: Location, elements: Range<u64>) -> Vec<u64> {
        let len = (elements.end - elements.start) as usize;
        match location {
            Location::Buffer(buffer) => self.vector(buffer, &elements).to_vec(),
            Location::Slot(slot) => self.slots[slot as usize][..len].to_vec(),
            Location::Peer { .. } => unreachable!("messages in place are read at their sender"),
        }
    }
    fn write(&mut self, location: Location, elements: Range<u64>, values: &[u64]) {
        let target = match location {
            Location::Buffer(buffer) => self.vector(buffer, &elements),
            Location::Slot(slot) => &mut self.slots[slot as usize][..values.len()],
            Location::Peer { .. } => unreachable!("messages in place are not written"),
        };
        target.copy_from_slice(values);
    }
}

/// One directed link.
#[derive(Default)]
struct SimulatedLink {
    in_place: bool,
    /// Sent and, in place, not yet released.
    sent: VecDeque<Message>,
    /// In place: messages that the receiver was notified of.
    announced: usize,
    history: Vec<Message>,
    acknowledged: usize,
    /// Posted receives: messages that the link has read and not yet written.
    in_flight: VecDeque<Message>,
    posted_recvs: VecDeque<(Location, Range<u64>)>,
}

struct World {
    ranks: Vec<SimulatedRank>,
    links: Vec<Vec<SimulatedLink>>,
}

/// Simulates the random world of `seed` to its end and checks the results. Whether a rank had less scratch
/// memory than its program has elements there.
fn simulate(seed: u64) -> bool {
    let mut random = Rng::with_seed(seed);
    let (topology, plan, spec) = random_plan(&mut random);
    let world = topology.world();
    let nodes: Vec<usize> = (0..world).map(|rank| topology.node_of(rank)).collect();
    let exchange = spec.collective.is_all_to_all();
    // Hops so close to each other, and vectors so long, that scratch memory is used again.
    let rings = spec.in_waves() && matches!(spec.collective, Collective::ReduceScatter | Collective::Reduce);
    let parts = spec.collective.has_parts() || exchange;
    let count = match random.usize(..8) {
        0 => 0,
        _ if exchange => (world * world * random.usize(..10)) as u64,
        _ if parts => (world * random.usize(..if rings { 60 } else { 10 })) as u64,
        _ => random.usize(..if rings { 240 } else { 40 }) as u64,
    };
    let subchunk = 1 + random.usize(..5) as u64;
    let align = if parts { 1 } else { 1 + random.usize(..3) as u64 };
    let window = 1 + random.usize(..4);
    let slots = 1 + random.usize(..3);
    // Links within a node never stage receives; each other access to the caller's memory is staged or not, at
    // random.
    let intra_node = Staging { input: random.bool(), output: random.bool(), recv: false };
    let inter_node = Staging { input: random.bool(), output: random.bool(), recv: random.bool() };
    let elements = |span: Span| span.elements(count, align);
    let ranks = (0..world)
        .map(|rank| {
            let mut program = plan.program(rank, spec);
            if let Some(waves) = program.waves.as_mut().filter(|_| rings) {
                waves.lag = 1;
            }
            let mut pipeline = Pipeline::new(Arc::new(program), |peer| LinkProfile {
                reads_in_place: nodes[peer] == nodes[rank],
                window,
                send_slots: slots,
                recv_slots: slots,
            });
            let staging = |peer: Rank| if nodes[peer] == nodes[rank] { intra_node } else { inter_node };
            let in_place = random.bool() && !spec.held_spans(rank, world).disjoint;
            let binding = Binding { count, subchunk, align, in_place };
            pipeline.start(binding, staging);
            if random.usize(..8) == 0 {
                // Start again, as for the next call: it must reset all state of the first.
                pipeline.start(binding, staging);
            }
            let mut scratch_layout = ScratchLayout::default();
            scratch_layout.lay_out(pipeline.program(), &binding);
            let held = elements(spec.held_spans(rank, world).input);
            let blocks = pipeline.program().blocks.clone();
            let is_given = |at: u64| match &blocks {
                Some(blocks) => blocks.ranks_at((at * (world * world) as u64 / count) as usize).0 == rank,
                None => held.contains(&at),
            };
            let initial_input: Vec<u64> = (0..count)
                .map(|at| if is_given(at) { contribution(rank, at) } else { u64::MAX / 2 })
                .collect();
            SimulatedRank {
                slots: vec![vec![u64::MAX; subchunk as usize]; pipeline.slots()],
                pipeline,
                scratch: vec![u64::MAX; scratch_layout.count() as usize],
                scratch_layout,
                held: elements(spec.held_spans(rank, world).output),
                output: if in_place { initial_input.clone() } else { vec![u64::MAX; count as usize] },
                input: initial_input.clone(),
                initial_input,
                jobs: VecDeque::new(),
                in_place,
            }
        })
        .collect();
    let links = (0..world)
        .map(|from| {
            (0..world)
                .map(|to| SimulatedLink { in_place: nodes[from] == nodes[to], ..SimulatedLink::default() })
                .collect()
        })
        .collect();
    let mut world_state = World { ranks, links };
    world_state.run(&mut random, seed);
    for (rank, rank_state) in world_state.ranks.iter().enumerate() {
        for at in elements(spec.held_spans(rank, world).output) {
            let block = (at * (world * world) as u64 / count) as usize;
            let (from, to) = match &rank_state.pipeline.program().blocks {
                Some(blocks) => blocks.ranks_at(block),
                None => (block / world, block % world),
            };
            if exchange && to != rank {
                continue;
            }
            let from = match spec.collective {
                Collective::AllToAll | Collective::AllToAllV => from,
                _ => (at * world as u64 / count) as Rank,
            };
            assert_eq!(
                rank_state.output[at as usize],
                expected(spec, world, from, at),
                "seed {seed}: rank {rank}, element {at}, {spec:?}"
            );
        }
        if !rank_state.in_place {
            assert_eq!(
                rank_state.input, rank_state.initial_input,
                "seed {seed}: rank {rank}'s input was written to"
            );
        }
    }
    world_state.ranks.iter().any(|rank_state| {
        let spans = rank_state.pipeline.program().scratch.iter().map(|scratch| elements(scratch.span));
        rank_state.scratch_layout.count() < spans.map(|span| span.end - span.start).sum()
    })
}

impl World {
    fn run(&mut self, random: &mut Rng, seed: u64) {
        let world = self.ranks.len();
        let mut idle = 0;
        while !self.ranks.iter().all(|rank_state| rank_state.pipeline.is_done()) {
            // A random rank, link or device makes a step.
            let rank = random.usize(..world);
            let peer = random.usize(..world);
            let moved = match random.usize(..5) {
                0 | 1 => self.execute_action(rank, random),
                2 => self.finish_job(rank),
                3 => self.move_link(rank, peer),
                _ => self.report_sent(rank, peer),
            };
            idle = if moved { 0 } else { idle + 1 };
            if idle > 200 * world * world && !self.anything_can_move(random) {
                panic!("seed {seed}: deadlock");
            }
        }
    }

    fn anything_can_move(&mut self, random: &mut Rng) -> bool {
        let world = self.ranks.len();
        (0..world).any(|rank| {
            self.execute_action(rank, random)
                || self.finish_job(rank)
                || (0..world).any(|peer| self.move_link(rank, peer) || self.report_sent(rank, peer))
        })
    }

    /// Executes one action of a pipeline, if it has one.
    fn execute_action(&mut self, rank: Rank, random: &mut Rng) -> bool {
        let Some(action) = self.ranks[rank].pipeline.next_action() else {
            return false;
        };
        match action {
            Action::Send { peer, location, step, sub } => {
                let elements = self.ranks[rank].pipeline.elements(step, sub);
                let message = Message { location, elements, bytes: None };
                self.links[rank][peer].history.push(message.clone());
                self.links[rank][peer].sent.push_back(message);
            }
            Action::PostRecv { peer, location, step, sub } => {
                let elements = self.ranks[rank].pipeline.elements(step, sub);
                self.links[peer][rank].posted_recvs.push_back((location, elements));
            }
            Action::Release { peer } => self.links[peer][rank].acknowledged += 1,
            Action::Stage { step, sub, buffer, slot } => {
                self.submit(rank, Job { step, sub, stage: Some((buffer, slot)), read_early: None }, random);
            }
            Action::Combine { step, sub } => {
                self.submit(rank, Job { step, sub, stage: None, read_early: None }, random);
            }
        }
        true
    }

    fn submit(&mut self, rank: Rank, mut job: Job, random: &mut Rng) {
        // A device runs its jobs in order, so a job may read at once only if none is before it.
        if self.ranks[rank].jobs.is_empty() && random.bool() {
            job.read_early = Some(self.compute(rank, &job));
        }
        self.ranks[rank].jobs.push_back(job);
    }

    fn compute(&mut self, rank: Rank, job: &Job) -> Vec<u64> {
        let elements = self.ranks[rank].pipeline.elements(job.step, job.sub);
        if let Some((buffer, _)) = job.stage {
            return self.ranks[rank].read(Location::Buffer(buffer), elements);
        }
        let program = Arc::clone(self.ranks[rank].pipeline.program());
        let Body::Combine { operands, .. } = &*program.steps[job.step as usize].body else {
            panic!("step {} is not a combine", job.step)
        };
        let mut sum = vec![0; (elements.end - elements.start) as usize];
        for (part, operand) in operands.iter().enumerate() {
            let location = self.ranks[rank].pipeline.operand_location(job.step, part, job.sub);
            let mut values = match location {
                Location::Peer { peer, message } => {
                    let sent = self.links[peer][rank].history[message as usize].clone();
                    assert_eq!(sent.elements, elements, "both ranks see the same message");
                    self.ranks[peer].read(sent.location, sent.elements)
                }
                location => self.ranks[rank].read(location, elements.clone()),
            };
            if let OperandSource::Own { scaled: true, .. } = operand {
                values.iter_mut().for_each(|value| *value *= factor(rank, true));
            }
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = u64::wrapping_add(*sum, value));
        }
        sum
    }

    fn finish_job(&mut self, rank: Rank) -> bool {
        let Some(job) = self.ranks[rank].jobs.pop_front() else {
            return false;
        };
        let values = job.read_early.clone().unwrap_or_else(|| self.compute(rank, &job));
        let rank_state = &mut self.ranks[rank];
        let elements = rank_state.pipeline.elements(job.step, job.sub);
        match job.stage {
            Some((_, slot)) => {
                rank_state.write(Location::Slot(slot), elements, &values);
                rank_state.pipeline.stage_complete(job.step, job.sub);
            }
            None => {
                let into = rank_state.pipeline.program().steps[job.step as usize].destination();
                rank_state.write(Location::Buffer(into), elements, &values);
                rank_state.pipeline.combine_complete(job.step).expect("the combine was submitted");
            }
        }
        true
    }

    /// Makes one step of the link from `from` to `to`, if one is possible.
    fn move_link(&mut self, from: Rank, to: Rank) -> bool {
        let link = &mut self.links[from][to];
        if link.in_place {
            if link.announced == link.history.len() {
                return false;
            }
            let message = self.ranks[to].pipeline.recv_ready(from).expect("the message is expected");
            assert_eq!(message as usize, link.announced);
            link.announced += 1;
            return true;
        }
        if let Some(message) = link.sent.iter_mut().find(|message| message.bytes.is_none()) {
            message.bytes = Some(self.ranks[from].read(message.location, message.elements.clone()));
            link.in_flight.push_back(message.clone());
            return true;
        }
        if let (Some(_), Some(_)) = (link.in_flight.front(), link.posted_recvs.front()) {
            let message = link.in_flight.pop_front().expect("checked above");
            let (location, elements) = link.posted_recvs.pop_front().expect("checked above");
            assert_eq!(elements, message.elements, "both ranks see the same message");
            let bytes = message.bytes.expect("the link has read it");
            self.ranks[to].write(location, elements, &bytes);
            self.ranks[to].pipeline.recv_complete(from).expect("the receive was posted");
            return true;
        }
        false
    }

    fn report_sent(&mut self, from: Rank, to: Rank) -> bool {
        let link = &mut self.links[from][to];
        let ready = if link.in_place {
            let ready = link.acknowledged > 0;
            link.acknowledged -= usize::from(ready);
            ready
        } else {
            link.sent.front().is_some_and(|message| message.bytes.is_some())
        };
        if ready {
            link.sent.pop_front();
            self.ranks[from].pipeline.send_complete(to).expect("it was sent");
        }
        ready
    }
}

#[test]
fn plans_of_random_worlds_are_proved_by_the_verifier() {
    for seed in 0..cases(2_000) {
        let (_, plan, spec) = random_plan(&mut Rng::with_seed(seed));
        verify(&plan, spec).unwrap_or_else(|error| panic!("seed {seed}: {error}: {spec:?}"));
    }
}

#[test]
fn random_orders_of_completion_end_in_the_right_sums() {
    let seeds = cases(40_000);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let reusing: usize = std::thread::scope(|scope| {
        let run = |thread| (thread..seeds).step_by(threads as usize).filter(|seed| simulate(*seed)).count();
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no failure")).sum()
    });
    assert!(reusing as u64 > seeds / 200, "scratch memory was used again with {reusing} seeds only");
}
