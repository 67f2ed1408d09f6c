//! Two ranks that exchange the messages of several calls over the simulated fabric, and the invariants that
//! hold meanwhile.

use super::super::{ConnectInfo, ControlMemory, LinkConnectInfo, Peer};
use super::fabric::{Fabric, RETRY_EXCEEDED};
use super::scenario::{LONGEST, Scenario, content};
use crate::error::{Error, ErrorKind};
use crate::memory::Piece;
use crate::transport::fixtures::{call, piece};
use crate::transport::verbs::connect_info::RailMessage;
use crate::transport::verbs::control_buffer::ControlBuffer;
use crate::transport::verbs::link::{Link, RECV_DEPTH, WORK_REQUESTS};
use crate::transport::verbs::objects::{
    CompletionQueue, Context, Depth, Endpoint, PathAttributes, ProtectionDomain, QueuePair, WriteRequest,
};
use crate::transport::verbs::rail_counters::{RailCounters, RailStatistics};
use crate::transport::verbs::registry::{MemoryRegistry, RegisteredMemory};
use crate::transport::verbs::wire::{ControlLayout, ImmData, ImmKind, MAX_RAILS, WINDOW};
use crate::transport::{Event, Events};
use fastrand::Rng;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A simulation that has not ended after this many steps is stuck.
const MAX_STEPS: usize = 400_000;

/// How long a poll takes, for deadlines.
const POLL_TIME: Duration = Duration::from_millis(50);

/// How a simulation ended.
pub(super) struct SimulationOutcome {
    /// By rank: the error of its call.
    pub failed: [Option<Error>; 2],
    /// The most writes that ever waited on one queue pair to be polled.
    pub max_queued: usize,
    /// By rank: what its rails have carried.
    pub rails: [Vec<RailStatistics>; 2],
    /// Bytes of messages over queue pairs that were connected again.
    pub carried_again: u64,
    /// Messages that were written apart from their immediate data.
    pub split: u64,
}

fn bytes_of(piece: Piece) -> &'static [u8] {
    // SAFETY: the simulation keeps its memory to its end, and the bytes are compared at once.
    unsafe { std::slice::from_raw_parts(piece.as_ptr(), piece.len()) }
}

fn overwrite(piece: Piece) {
    // SAFETY: the piece belongs to the rank, and no device may access it any more.
    unsafe { std::ptr::write_bytes(piece.as_ptr(), 0xee, piece.len()) };
}

/// A posted receive: the number of its message, and its destination.
struct ExpectedMessage {
    message: u64,
    destination: Piece,
}

/// The progress of one rank in one call.
#[derive(Default)]
struct SimulatedCall {
    sources: VecDeque<Piece>,
    posted: usize,
    recvs_posted: VecDeque<ExpectedMessage>,
    recvs_completed: usize,
    call_received: bool,
}

struct SimulatedRank {
    peer: Peer,
    counters: Arc<[RailCounters]>,
    registry: MemoryRegistry,
    remote: Piece,
    /// Free destinations, reused as soon as possible.
    free: Vec<Piece>,
    /// Number of completed calls.
    done: usize,
    /// The call in progress.
    current: Option<SimulatedCall>,
    /// Messages that were written apart from their immediate data, which has not arrived yet: the queue pair,
    /// and the address.
    announced_later: Vec<(usize, u64)>,
    /// Memory that the link may keep registered during the call.
    held_memory: Vec<Weak<RegisteredMemory>>,
    leaving: bool,
    /// Whether its queue pairs are destroyed.
    destroyed: bool,
    failed: Option<Error>,
    /// Whether it polls at the moment.
    awake: bool,
    /// How often it has polled.
    polls: u32,
    /// Keeps everything that pieces point into.
    memory: Vec<Vec<u8>>,
}

pub(super) struct Simulation {
    scenario: Scenario,
    random: Rng,
    fabric: Fabric,
    ranks: [SimulatedRank; 2],
    breaks: usize,
    began: Instant,
    /// By rank: the messages about queue pairs that it has not read, in their order.
    messages: [VecDeque<RailMessage>; 2],
}

impl SimulatedRank {
    fn new(me: usize, scenario: &Scenario, controls: &[Piece; 2], memory: Vec<Vec<u8>>) -> Self {
        let rails: Vec<_> =
            scenario.rails.iter().map(|rails| if me == 0 { *rails } else { (rails.1, rails.0) }).collect();
        let count = 1 + rails.iter().map(|(mine, _)| *mine).max().unwrap_or(0);
        let pds: Vec<_> = (0..count)
            .map(|rail| {
                let context = Context::inert(&format!("inert{rail}"), scenario.shims[me].clone());
                ProtectionDomain::new(&context).expect("inert")
            })
            .collect();
        let queues: Vec<_> =
            pds.iter().map(|pd| CompletionQueue::new(pd.context(), 1).expect("inert")).collect();
        let registration = crate::config::Registration::Subchunk;
        let registry = MemoryRegistry::new(pds.clone(), false, registration, 4096).expect("inert");
        let layout = ControlLayout { qps: rails.len(), longest_eager: scenario.longest_eager };
        let mut memory = memory;
        memory.push(vec![0; layout.bytes()]);
        let local = piece(memory.last_mut().expect("just pushed"));
        memory.push(vec![0; LONGEST * (WINDOW + 4)]);
        let destinations = piece(memory.last_mut().expect("just pushed"));
        let control = ControlBuffer::new(controls[me], local, layout);
        let depth = Depth { sends: WORK_REQUESTS as u32, receives: RECV_DEPTH as u32, inline: 0 };
        let fresh = rails.iter().map(|(mine, _)| {
            let qp = QueuePair::new(&pds[*mine], &queues[*mine], depth, (1, 0), 1 - me, 1);
            qp.expect("inert")
        });
        let path = PathAttributes { split_above: scenario.split_above[me], ..PATH };
        let paths = vec![(Endpoint { qpn: 1, psn: 1 }, path); rails.len()];
        let address = controls[1 - me].as_ptr() as u64;
        let info = ConnectInfo { mtus: Vec::new(), address, keys: [7; MAX_RAILS] };
        let link_info = LinkConnectInfo { endpoints: Vec::new(), offset: 0 };
        let link = Link::new(1 - me, control, &rails);
        let control_memory = ControlMemory {
            remote: registry.register_internal(controls[me], true).expect("inert"),
            local: registry.register_internal(local, false).expect("inert"),
            _memory: memmap2::MmapMut::map_anon(1).expect("a page"),
        };
        let counters: Arc<[_]> = pds.iter().map(|_| RailCounters::new("inert", 1)).collect();
        let patience = if scenario.reconnects { Duration::MAX } else { Duration::ZERO };
        let peer = Peer::new(0, link, control, &Arc::new(control_memory), &counters);
        let mut peer = peer.with_reconnects(patience);
        // Its faults come at any time.
        peer.link.drop_none();
        peer.connect(fresh.collect(), &paths, (&info, &link_info), &[]).expect("inert");
        peer.set_ready().expect("nothing is suspected");
        Self {
            peer,
            counters,
            registry,
            remote: controls[me],
            free: (0..WINDOW + 4).map(|at| destinations.narrow(at * LONGEST, LONGEST)).collect(),
            done: 0,
            current: None,
            announced_later: Vec::new(),
            held_memory: Vec::new(),
            leaving: false,
            destroyed: false,
            failed: None,
            awake: true,
            polls: 0,
            memory,
        }
    }

    /// Panics unless the peer may write this now over a queue pair.
    fn allow(&mut self, qp: usize, request: &WriteRequest) {
        let (from, len) = (request.to, request.len as usize);
        let remote = self.remote.as_ptr() as u64;
        assert_eq!(request.rkey, 7, "the key of a rail that this rank has");
        if (remote..remote + self.remote.len() as u64).contains(&from) {
            assert!(from + len as u64 <= remote + self.remote.len() as u64, "within the control buffer");
            return;
        }
        let mut recvs = self.current.iter().flat_map(|current| &current.recvs_posted);
        let recv = recvs.find(|recv| recv.destination.as_ptr() as u64 == from);
        let Some(ExpectedMessage { message, destination }) = recv else {
            panic!("{request:?} is written where no receive is posted");
        };
        let is_whole = destination.len() == len;
        match request.immediate.map(|imm| ImmData::unpack(imm).kind) {
            None => {
                assert!(is_whole, "{request:?} is a part of a message");
                self.announced_later.push((qp, from));
            }
            Some(kind) => {
                assert_eq!(kind, ImmKind::Data(*message), "another receive is posted there");
                let written = self.announced_later.iter().rposition(|written| *written == (qp, from));
                assert!(is_whole || (len == 0 && written.is_some()), "{request:?} comes before its data");
                self.announced_later.retain(|(_, address)| *address != from);
            }
        }
    }
}

const PATH: PathAttributes = PathAttributes {
    port: 1,
    own_gid: None,
    gid_index: 0,
    gid: [0; 16],
    lid: 0,
    global: true,
    mtu: 3,
    service_level: 0,
    traffic_class: 0,
    timeout: 0,
    retries: 0,
    split_above: None,
};

impl Simulation {
    pub(super) fn new(scenario: Scenario) -> Self {
        let layout = ControlLayout { qps: scenario.rails.len(), longest_eager: scenario.longest_eager };
        let mut remote = [vec![0; layout.bytes()], vec![0; layout.bytes()]];
        let controls = remote.each_mut().map(|remote| piece(remote));
        let [one, other] = remote;
        let mut fabric = Fabric::new(&scenario.rails);
        fabric.stuck = scenario.stuck;
        let mut random = Rng::with_seed(!scenario.seed);
        let mut ranks = [
            SimulatedRank::new(0, &scenario, &controls, vec![one]),
            SimulatedRank::new(1, &scenario, &controls, vec![other]),
        ];
        for (me, rank) in ranks.iter_mut().enumerate() {
            for qp in 0..scenario.rails.len() {
                let hello = rank.peer.link.hello(qp).expect("alive");
                rank.peer.post_now(&hello).expect("alive");
            }
            execute(&mut fabric, me, rank, &mut random);
        }
        Self {
            breaks: scenario.breaks,
            scenario,
            random,
            fabric,
            ranks,
            began: Instant::now(),
            messages: Default::default(),
        }
    }

    /// One rank's end, for tests that simulate the device themselves.
    pub(super) fn peer(&mut self, me: usize) -> &mut Peer {
        &mut self.ranks[me].peer
    }

    /// Runs random steps until both ranks have left or failed.
    pub(super) fn run(mut self) -> SimulationOutcome {
        for _ in 0..MAX_STEPS {
            for me in 0..2 {
                if !self.ranks[me].destroyed && self.is_over(me) {
                    self.ranks[me].destroyed = true;
                    self.fabric.destroy(me, &mut self.random);
                }
            }
            if self.ranks.iter().all(|rank| rank.destroyed) {
                return self.finish();
            }
            let pace = if self.scenario.stepwise { 3_000 } else { 80 };
            if self.random.usize(..pace) == 0 {
                // A rank computes or sleeps for a while.
                self.ranks.iter_mut().for_each(|rank| rank.awake = self.random.usize(..3) != 0);
            }
            let (me, qp) = (self.random.usize(..2), self.random.usize(..self.scenario.rails.len()));
            match self.random.usize(..12) {
                0..=3 => self.fabric.deliver(me, qp, |request| self.ranks[1 - me].allow(qp, request)),
                4..=6 => self.fabric.acknowledge(me, qp),
                7 if self.random.usize(..8) == 0 => self.fabric.time_out(me, qp, &mut self.random),
                7 if self.breaks > 0
                    && self.scenario.unbroken != Some(qp)
                    && self.random.usize(..16) == 0 =>
                {
                    self.breaks -= 1;
                    self.fabric.break_end(me, qp, RETRY_EXCEEDED, &mut self.random);
                }
                8 | 9 if self.ranks[me].awake => {
                    self.act(me);
                    if self.scenario.stepwise {
                        self.poll(me);
                    }
                }
                10 | 11 if self.ranks[me].awake => self.poll(me),
                _ => {}
            }
        }
        let state = |rank: &SimulatedRank| format!("{} calls done, {:?}", rank.done, rank.peer.link);
        panic!(
            "the simulation is stuck\nrank 0: {}\nrank 1: {}",
            state(&self.ranks[0]),
            state(&self.ranks[1])
        );
    }

    fn is_over(&self, me: usize) -> bool {
        let rank = &self.ranks[me];
        let link = &rank.peer.link;
        let connects = self.fabric.connects() || self.scenario.reconnects;
        rank.failed.is_some()
            || (rank.leaving && self.scenario.reconnects && self.ranks[1 - me].destroyed)
            || (rank.leaving && (!connects || (link.is_drained() && link.has_left())))
    }

    fn finish(self) -> SimulationOutcome {
        let rails =
            self.ranks.each_ref().map(|rank| rank.counters.iter().map(RailCounters::statistics).collect());
        let qps = self.ranks.iter().flat_map(|rank| &rank.peer.link.qps);
        let carried_again = qps.map(|qp| qp.carried_again()).sum();
        let failed = self.ranks.map(|rank| {
            let SimulatedRank { peer, held_memory, failed, memory, .. } = rank;
            // An aborted link keeps its memory registered until it is destroyed.
            let living = failed.is_none().then_some(peer);
            let held_memory = held_memory.iter().filter(|region| region.upgrade().is_some()).count();
            assert_eq!(held_memory, 0, "memory stays registered after the last call");
            drop(living);
            assert!(memory.len() > 2, "memory is kept to the end");
            failed
        });
        SimulationOutcome {
            failed,
            max_queued: self.fabric.max_queued,
            rails,
            carried_again,
            split: self.fabric.split,
        }
    }

    /// A rank acts: it begins the next call, sends, or posts a receive.
    fn act(&mut self, me: usize) {
        let Self { scenario, random, ranks, .. } = self;
        let rank = &mut ranks[me];
        if rank.destroyed || rank.leaving {
            return;
        }
        let sequence = rank.done as u64 + 1;
        let Some(call_plan) = scenario.calls.get(rank.done) else {
            rank.peer.link.goodbye();
            rank.leaving = true;
            return;
        };
        let Some(current) = &mut rank.current else {
            if random.usize(..4) == 0 {
                assert!(!rank.peer.link.is_busy(), "nothing is in flight between calls");
                rank.peer.link.begin(sequence);
                rank.current = Some(SimulatedCall::default());
                if call_plan.uses_link
                    && let Err(error) = rank.peer.link.announce(&call(sequence))
                {
                    self.fail(me, error);
                }
            }
            return;
        };
        if !call_plan.uses_link {
            // The call completes over other links.
            if random.usize(..4) == 0 {
                (rank.current, rank.done) = (None, rank.done + 1);
            }
            return;
        }
        let (sends, recvs) = (&call_plan.lens[me], &call_plan.lens[1 - me]);
        let mut outcome = Ok(());
        for _ in 0..if scenario.stepwise { 1 } else { 1 + random.usize(..5) } {
            if random.usize(..2) == 0 {
                if current.posted < sends.len() && current.sources.len() < WINDOW {
                    let len = sends[current.posted];
                    rank.memory.push(content(scenario.seed, me, sequence, current.posted, len));
                    let source = piece(rank.memory.last_mut().expect("just pushed"));
                    let eager = rank.peer.link.sends_eagerly(len);
                    let region = (!eager).then(|| rank.registry.for_sending(source));
                    rank.held_memory.extend(region.as_ref().map(Arc::downgrade));
                    outcome = outcome.and(rank.peer.link.send(source, region));
                    current.sources.push_back(source);
                    current.posted += 1;
                }
            } else {
                let message = current.recvs_completed + current.recvs_posted.len();
                if message < recvs.len() && current.recvs_posted.len() < WINDOW {
                    let len = recvs[message];
                    let destination =
                        rank.free.pop().expect("more destinations than receives").narrow(0, len);
                    let eager = rank.peer.link.receives_eagerly(len);
                    let region = (!eager).then(|| rank.registry.for_receiving(destination));
                    rank.held_memory.extend(region.as_ref().map(Arc::downgrade));
                    let keys =
                        region.as_ref().map_or([0; MAX_RAILS], |region| region.rkeys().expect("inert"));
                    current.recvs_posted.push_back(ExpectedMessage { message: message as u64, destination });
                    outcome = outcome.and(rank.peer.link.post_recv(destination, region, keys));
                }
            }
        }
        if let Err(error) = outcome {
            self.fail(me, error);
        }
    }

    /// A rank polls its completion queues, posts what is due, and handles events.
    fn poll(&mut self, me: usize) {
        let Self { random, fabric, ranks, began, messages, .. } = self;
        let rank = &mut ranks[me];
        // Ranks do not poll between calls.
        if rank.destroyed || !(rank.leaving || rank.current.is_some()) {
            return;
        }
        let mut events = Events::new();
        let mut outcome = Ok(());
        for rail in 0..fabric.rails(me) {
            // Once the peer has left, completions are no longer delayed.
            let all = rank.peer.link.has_left() || random.usize(..2) == 0;
            let most = if all { usize::MAX } else { random.usize(..40) };
            for _ in 0..most {
                let Some(completion) = fabric.completion(me, rail) else { break };
                outcome = outcome.and_then(|()| rank.peer.handle_completion(&completion));
                execute(fabric, me, rank, random);
            }
        }
        if random.usize(..8) == 0 {
            for qp in 0..rank.peer.qp_count() {
                if let Ok(Some(probe)) = rank.peer.link.probe(qp) {
                    outcome = outcome.and_then(|()| rank.peer.post_now(&probe));
                }
            }
        }
        rank.polls += 1;
        let (now, mut answers) = (*began + POLL_TIME * rank.polls, Vec::new());
        // Ports come and go.
        let works = random.usize(..3) != 0;
        if random.bool() {
            while let Some(message) = messages[me].pop_front() {
                outcome =
                    outcome.and_then(|()| rank.peer.on_rail_message(message, now, &|_| works, &mut answers));
            }
        }
        rank.peer.look(now, &|_| works, &mut answers);
        messages[1 - me].extend(answers);
        execute(fabric, me, rank, random);
        let outcome = outcome.and_then(|()| rank.peer.progress(&mut events).map(drop));
        execute(fabric, me, rank, random);
        events.into_iter().for_each(|event| self.handle_event(me, event));
        if let Err(error) = outcome {
            self.fail(me, error);
        }
        let rank = &mut self.ranks[me];
        let Some(call_plan) = self.scenario.calls.get(rank.done) else { return };
        let done = rank.current.as_ref().is_some_and(|current| {
            let sent = current.posted == call_plan.lens[me].len() && current.sources.is_empty();
            current.call_received && sent && current.recvs_completed == call_plan.lens[1 - me].len()
        });
        if done && rank.failed.is_none() {
            (rank.current, rank.done) = (None, rank.done + 1);
            rank.held_memory.retain(|region| region.upgrade().is_some());
            assert!(rank.held_memory.is_empty(), "memory stays registered after the call");
        }
    }

    fn handle_event(&mut self, me: usize, event: Event) {
        let rank = &mut self.ranks[me];
        let sequence = rank.done as u64 + 1;
        let current = rank.current.as_mut().expect("events are reported within a call");
        match event {
            Event::PeerEntered { peer, call: theirs } => {
                assert_eq!((peer, theirs), (1 - me, call(sequence)));
                assert!(
                    !std::mem::replace(&mut current.call_received, true),
                    "the peer enters the call once"
                );
            }
            Event::SendComplete { .. } => {
                let source = current.sources.pop_front().expect("a queued message");
                let start = source.as_ptr() as u64;
                let read = self.fabric.reads(me, &(start..start + source.len() as u64));
                assert!(!read, "a device may still read the message");
                overwrite(source);
            }
            Event::RecvComplete { .. } => {
                assert!(current.call_received, "the call is reported first");
                let recv = current.recvs_posted.pop_front().expect("a posted receive");
                let len = recv.destination.len();
                let expected = content(self.scenario.seed, 1 - me, sequence, current.recvs_completed, len);
                assert!(bytes_of(recv.destination) == expected, "message {} has other bytes", recv.message);
                current.recvs_completed += 1;
                overwrite(recv.destination);
                // SAFETY: the destination was narrowed from one of `LONGEST` bytes.
                rank.free.push(unsafe {
                    Piece::new(NonNull::new(recv.destination.as_ptr()).expect("memory"), LONGEST)
                });
            }
            Event::RecvReady { .. } => panic!("nothing is delivered in place"),
        }
    }

    /// A rank's call has failed. That is correct only if no connection is left, or if a device refuses.
    fn fail(&mut self, me: usize, error: Error) {
        let is_faulty = self.scenario.shims[me].triggered() || self.scenario.stuck == Some(me);
        let refused = is_faulty && error.message().contains("ibv_");
        let is_destroyed = |rank: &SimulatedRank| rank.peer.qps.iter().any(|qp| qp.connected.is_none());
        let lost =
            self.ranks.iter().any(is_destroyed) && error.message().contains("was lost with a queue pair");
        assert!(
            refused || lost || !self.fabric.connects(),
            "rank {me} fails while a connection is left: {error}"
        );
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().starts_with(&format!("rank {} ", 1 - me)), "{error}");
        let rank = &mut self.ranks[me];
        rank.peer.abort(&error);
        rank.failed = Some(error);
        rank.current = None;
    }
}

/// Makes the fabric execute what a rank's queue pairs recorded.
fn execute(fabric: &mut Fabric, me: usize, rank: &mut SimulatedRank, random: &mut Rng) {
    let generations: Vec<u32> = rank.peer.link.qps.iter().map(|qp| qp.generation).collect();
    for (number, qp) in rank.peer.qps.iter_mut().enumerate() {
        fabric.connect_end(me, number, generations[number]);
        fabric.execute(me, number, qp.recorded_calls(), random);
        if qp.connected.is_none() {
            fabric.destroy_end(me, number, random);
        }
    }
}
