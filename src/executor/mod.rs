//! The executor: drives a pipeline with real links and devices. Where the two wings meet.
//!
//! Owns one rank's end of everything that moves. Must not know any algorithm's name, and decides nothing: what
//! moves next is the pipeline's word, how it moves is the transports', what is added is the devices'.

mod devices;
mod links;
mod small;
mod wait;

use crate::call::{Call, Collective};
use crate::device::{self, Arithmetic, Device, Finish, Job, Submitted};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Sharing};
use crate::plan::pipeline::{Action, Binding, LinkProfile, Location, Pipeline, Staging, Violation};
use crate::plan::program::{Body, BufferKind, OperandSource, Program, StepId};
use crate::rank::{Rank, RankList};
use crate::transport::shm::Mailbox;
use crate::transport::{AnyTransport, Event, Events};
use devices::Devices;
use links::Links;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use wait::Wait;

/// Destinations of calls that move more than this in total are written past the cache. Half of a last-level
/// cache of a few dozen MiB: below, a result is still there when it is read next.
const STREAMING: usize = 16 << 20;

/// How many sub-chunks a rank's share of a vector has at least before they are made longer, so that little time is lost
/// until all stages are busy: 1/16 for each hop.
const SHARE: usize = 16;

/// One call, checked.
#[derive(Clone, Copy, Debug)]
pub struct BoundCall {
    /// What this rank calls, as it tells the others.
    pub call: Call,
    /// What this rank contributes: the input window of the program.
    pub input: Piece,
    /// Where the result goes: the output window of the program.
    pub output: Piece,
    /// As long as the whole vector, for what is made on the way outside the output window; empty where the
    /// window is the whole vector.
    pub scratch: Piece,
    /// Whether what input and output have in common is the same memory; else they are apart.
    pub in_place: bool,
    /// How elements are combined.
    pub arithmetic: Arithmetic,
    /// Whether the sum is divided by the number of ranks.
    pub average: bool,
    /// Whether contributions are multiplied with the call's factor.
    pub prescale: bool,
}

/// What an executor is made of.
pub struct Parts {
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// The links.
    pub transports: Vec<AnyTransport>,
    /// By rank, the transport that reaches it; anything for this rank itself.
    pub routes: Vec<usize>,
    /// What adds and copies in the host's memory.
    pub device: Box<dyn Device>,
    /// The slots of the pool, all of one size, and one more that is the executor's own.
    pub slots: Vec<Piece>,
    /// The path for small messages, if all ranks share a node.
    pub mailbox: Option<Mailbox>,
    /// What is raised when the communicator fails.
    pub fault: Arc<Fault>,
    /// How long a wait spins before it sleeps.
    pub spin: Duration,
    /// How long nothing may move.
    pub timeout: Duration,
    /// Whether more ranks than cores share this node, so that a wait must give way to others.
    pub crowded: bool,
}

/// What an executor needs for vectors in the memory of a GPU.
pub struct GpuParts {
    /// What adds and copies there, and between it and the host.
    pub device: Box<dyn Device>,
    /// The slots of the pool in calls on the GPU, as many as in others, and one more that is the executor's own.
    pub slots: Vec<Piece>,
    /// Memory of the GPU in the place of each of these, for what a transport can write there.
    pub on_gpu: Vec<Piece>,
    /// What neighbours may read of that, and of theirs, if they may.
    pub sharing: Option<Box<dyn Sharing>>,
}

/// How a call is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// All vectors in everybody's sight, without a program.
    Small,
    /// By the program that was installed under this number.
    Program(usize),
}

/// Where a peer's messages are that can be read in place, by their number on the link.
#[derive(Default)]
struct Views(Vec<Piece>);

/// Slots of the pool.
#[derive(Default)]
struct Slots {
    pool: Vec<Piece>,
    /// One more: for calls that have no elements, and for a short input whose place is needed.
    spare: Option<Piece>,
}

impl Slots {
    fn new(mut pool: Vec<Piece>) -> Self {
        let spare = pool.pop();
        Self { pool, spare }
    }

    fn spare(&self, len: usize) -> Piece {
        self.spare.unwrap_or(Piece::EMPTY).narrow(0, len)
    }

    /// Bytes of a slot.
    fn grain(&self) -> usize {
        self.pool.first().map_or(usize::MAX, |slot| slot.len())
    }
}

/// Slots of the pool in calls on a GPU; none before there is one.
#[derive(Default)]
struct GpuSlots {
    slots: Slots,
    /// The same on the GPU.
    on_gpu: Slots,
    /// By slot, whether it is the one on the GPU that is in use.
    in_use: Vec<bool>,
}

/// Which elements of the whole vector the caller's memory holds in the call under way.
#[derive(Clone, Debug, Default)]
struct Frame {
    input: Range<u64>,
    output: Range<u64>,
}

/// One rank's end of everything that moves.
pub struct Executor {
    rank: Rank,
    world: usize,
    /// Before the transports, whose memory a GPU may have pinned.
    devices: Devices,
    links: Links,
    slots: Slots,
    gpu: GpuSlots,
    /// One for each program that was installed.
    pipelines: Vec<Pipeline>,
    /// Which of them runs.
    current: usize,
    frame: Frame,
    mailbox: Option<Mailbox>,
    fault: Arc<Fault>,
    wait: Wait,
    /// All peers that the program under way has traffic with.
    peers: Vec<Rank>,
    /// By rank: whether its call was heard.
    heard: Vec<bool>,
    views: Vec<Views>,
    events: Events,
    operands: Vec<device::Operand>,
    /// Tickets of jobs that were just done.
    done: Vec<u64>,
    failed: bool,
}

/// A call under way. However it ends, no piece of it outlives this.
struct Running<'a>(&'a mut Executor);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.0.failed {
            self.0.devices.give_up();
            self.0.links.abort();
        }
    }
}

/// What a job under way is about.
#[derive(Clone, Copy)]
struct Ticket {
    step: StepId,
    sub: u64,
    /// Whether it copies to a slot.
    staging: bool,
    /// Whether it reads where peers have their bytes.
    views: bool,
}

impl Ticket {
    fn pack(self) -> u64 {
        u64::from(self.step) << 32 | self.sub << 2 | u64::from(self.views) << 1 | u64::from(self.staging)
    }

    fn unpack(packed: u64) -> Self {
        let (step, sub) = ((packed >> 32) as StepId, (packed & 0xffff_ffff) >> 2);
        Self { step, sub, staging: packed & 1 == 1, views: packed & 2 == 2 }
    }
}

impl Executor {
    /// An executor without programs.
    pub fn new(parts: Parts) -> Self {
        let Parts { rank, world, .. } = parts;
        let links = Links::new(parts.transports, parts.routes);
        Self {
            wait: Wait::new(parts.spin, parts.timeout, parts.crowded),
            events: Events::with_capacity(links.most_events()),
            heard: vec![false; world],
            devices: Devices::new(parts.device),
            mailbox: parts.mailbox,
            fault: parts.fault,
            failed: false,
            views: std::iter::repeat_with(Views::default).take(world).collect(),
            // No step adds more than everybody's part.
            operands: Vec::with_capacity(world),
            done: Vec::new(),
            peers: Vec::with_capacity(world),
            pipelines: Vec::new(),
            current: 0,
            frame: Frame::default(),
            rank,
            world,
            links,
            slots: Slots::new(parts.slots),
            gpu: GpuSlots::default(),
        }
    }

    /// Takes a GPU in, so that vectors may be in its memory from now on.
    pub fn use_gpu(&mut self, parts: GpuParts) {
        if let Some(sharing) = parts.sharing {
            self.links.share_gpu(sharing);
        }
        self.gpu = GpuSlots {
            in_use: vec![false; parts.on_gpu.len()],
            slots: Slots::new(parts.slots),
            on_gpu: Slots::new(parts.on_gpu),
        };
        self.devices.use_gpu(parts.device);
        for index in 0..self.pipelines.len() {
            self.pipelines[index] = self.pipeline_of(Arc::clone(self.pipelines[index].program()));
        }
    }

    /// Peers' memory that their messages may lie in.
    pub fn view_pools(&self) -> Vec<Piece> {
        self.links.view_pools()
    }

    /// Forgets all programs; their numbers are free for others.
    pub fn uninstall_all(&mut self) {
        self.pipelines.clear();
    }

    /// Takes a program in, with all that running it will ever allocate for vectors of usual length.
    ///
    /// # Errors
    /// `InvalidSetting` if the pool has no slot for each of its links.
    pub fn install(&mut self, program: Arc<Program>) -> Result<Path> {
        let peers = program.links.len();
        let share = self.slots.pool.len() / peers.max(1);
        if share == 0 {
            let slots = self.slots.pool.len();
            let words = format!("{slots} slots are too few for {peers} links: raise FLEXRING_SLOTS");
            return Err(Error::invalid_setting(words));
        }
        for peer in program.peers() {
            let window = self.links.to(peer).common().window();
            self.views[peer].0.resize(window, Piece::EMPTY);
        }
        let pipeline = self.pipeline_of(program);
        self.pipelines.push(pipeline);
        Ok(Path::Program(self.pipelines.len() - 1))
    }

    fn pipeline_of(&self, program: Arc<Program>) -> Pipeline {
        let share = self.slots.pool.len() / program.links.len().max(1);
        let profile = |peer: Rank| {
            // Memory of a GPU is staged where a transport does not reach it.
            let gpu = !self.gpu.slots.pool.is_empty();
            let (in_place, stages) = match self.links.to(peer) {
                AnyTransport::InPlace(_) => (true, true),
                AnyTransport::Posted(transport) => (false, transport.stages_host_memory() || gpu),
            };
            let (send_slots, recv_slots) = match (in_place, stages) {
                (true, _) => (share, 0),
                (false, false) => (0, share),
                // A pool has two slots for each peer at least.
                (false, true) => (share / 2, share - share / 2),
            };
            LinkProfile { in_place, window: self.links.to(peer).common().window(), send_slots, recv_slots }
        };
        Pipeline::new(program, profile)
    }

    /// Whether there is a path for small messages here.
    #[must_use]
    pub fn small_path(&self) -> bool {
        self.mailbox.is_some() && self.world > 1
    }

    /// Runs one call to its end. After a failure no link and no device touches the caller's memory any more,
    /// and the executor refuses to run again.
    ///
    /// # Errors
    /// Whatever went wrong first on this rank.
    pub fn run(&mut self, work: &BoundCall, path: Path) -> Result<()> {
        if self.failed {
            return Err(Error::aborted("the communicator has failed before"));
        }
        // Until it is known to have gone well. What must be done if not is done even if this panics.
        self.failed = true;
        let running = Running(self);
        let outcome = match path {
            Path::Small => running.0.run_small(work),
            Path::Program(number) => {
                running.0.current = number;
                running.0.run_program(work)
            }
        };
        running.0.failed = outcome.is_err();
        outcome
    }

    fn run_program(&mut self, work: &BoundCall) -> Result<()> {
        // With nothing to move nobody would hear of ranks that are not its neighbours. One element goes
        // through everybody's hands, so a call without elements moves one of nobody's.
        let zero = self.slots.spare(size_of::<u64>());
        let nothing = BoundCall { input: zero, output: zero, scratch: zero, ..*work };
        let mut work = if work.call.count == 0 { nothing } else { *work };
        if work.in_place && self.pipelines[self.current].program().windows.disjoint {
            work.input = self.copy_aside(&work)?;
            work.in_place = false;
        }
        let work = &work;
        let element = work.call.dtype.size();
        let binding = Binding {
            count: work.call.count.max(1),
            subchunk: (self.grain(&work.call) / element) as u64,
            align: self.alignment(work),
            in_place: work.in_place,
        };
        let mut staging = [Staging::default(); Links::TRANSPORTS];
        for (staging, transport) in staging.iter_mut().zip(self.links.transports()) {
            // What is made on the way is in the output or in the scratch memory.
            let made = || [work.output, work.scratch].into_iter().filter(|piece| !piece.is_empty());
            let can_send_from = |piece| transport.common().can_send_from(piece);
            *staging = Staging {
                input: !work.input.is_empty() && !can_send_from(work.input),
                output: !made().all(can_send_from),
                recv: match transport {
                    AnyTransport::InPlace(_) => false,
                    AnyTransport::Posted(transport) => !made().all(|piece| transport.can_recv_into(piece)),
                },
            };
        }
        let links = &self.links;
        let pipeline = &mut self.pipelines[self.current];
        let windows = pipeline.program().windows;
        self.frame = Frame {
            input: windows.input.elements(binding.count, binding.align),
            output: windows.output.elements(binding.count, binding.align),
        };
        self.peers.clear();
        self.peers.extend(pipeline.program().peers());
        pipeline.start(binding, |peer| staging[links.route(peer)]);
        self.events.clear();
        self.heard.fill(false);
        self.links.begin(work.call.sequence);
        for index in 0..self.peers.len() {
            let peer = self.peers[index];
            self.links.announce(peer, &work.call)?;
        }
        let mut unheard = self.peers.len();
        self.wait.begin();
        loop {
            let mut busy = false;
            while let Some(action) = self.pipeline().next_action() {
                busy = true;
                self.perform(work, action)?;
            }
            if unheard == 0 && self.pipeline().is_done() {
                return Ok(());
            }
            busy |= self.poll(work, &mut unheard)?;
            if busy {
                self.wait.progressed();
            } else if !self.wait.pause(&self.fault, &mut self.links, self.devices.are_busy())? {
                return Err(self.timed_out(work));
            }
        }
    }

    /// Bytes of a call's sub-chunks. Those of vectors on GPUs are longer where a rank's share has many.
    fn grain(&self, call: &Call) -> usize {
        let mut grain = self.slots.grain();
        if call.on_gpu {
            let bytes = (call.count as usize).saturating_mul(call.dtype.size());
            let most = self.gpu.slots.grain().min(bytes / self.world / SHARE);
            while grain <= most / 2 {
                grain *= 2;
            }
        }
        grain
    }

    /// Copies a short input to where it can be read while the output is written.
    fn copy_aside(&mut self, work: &BoundCall) -> Result<Piece> {
        let slots = if work.input.is_host() { &self.slots } else { &self.gpu.on_gpu };
        let into = slots.spare(work.input.len());
        let job = Job {
            dtype: work.call.dtype,
            arithmetic: work.arithmetic,
            into,
            operands: &[device::Operand { piece: work.input, factor: None }],
            finish: Finish::Keep,
            streaming: false,
        };
        self.devices.run(&job, &self.fault)?;
        Ok(into)
    }

    /// Where it matters spans begin on a cache line, and no line is written by two ranks; but not where the
    /// ends of the ranks' own parts would move.
    fn alignment(&self, work: &BoundCall) -> u64 {
        let line = (64 / work.call.dtype.size()) as u64;
        let (count, world) = (work.call.count, self.world as u64);
        let parts = matches!(work.call.collective, Collective::ReduceScatter | Collective::AllGather);
        let fits = !parts || (count / world).is_multiple_of(line);
        if fits && count >= 16 * line * world { line } else { 1 }
    }

    fn pipeline(&mut self) -> &mut Pipeline {
        &mut self.pipelines[self.current]
    }

    /// Hears what has happened and tells the pipeline. Whether there was anything.
    fn poll(&mut self, work: &BoundCall, unheard: &mut usize) -> Result<bool> {
        let mut busy = self.links.poll(&mut self.events)?;
        while let Some(event) = self.events.pop_front() {
            self.hear(work, event, unheard)?;
        }
        if self.devices.are_busy() {
            let Self { devices, done, .. } = self;
            devices.poll(&mut |ticket| done.push(ticket))?;
            busy |= !self.done.is_empty();
            for index in 0..self.done.len() {
                self.finish(Ticket::unpack(self.done[index]))?;
            }
            self.done.clear();
        }
        Ok(busy)
    }

    /// A job is done.
    fn finish(&mut self, ticket: Ticket) -> Result<()> {
        if ticket.views {
            self.links.end_reading_job()?;
        }
        if ticket.staging {
            self.pipeline().stage_complete(ticket.step, ticket.sub);
            return Ok(());
        }
        self.pipeline().combine_complete(ticket.step).map_err(bug)
    }

    fn hear(&mut self, work: &BoundCall, event: Event, unheard: &mut usize) -> Result<()> {
        match event {
            Event::PeerEntered { peer, call } => {
                if !work.call.agrees_with(&call) {
                    let words = work.call.difference(self.rank, &call, peer);
                    return Err(Error::disagreement(words));
                }
                if std::mem::replace(&mut self.heard[peer], true) {
                    return Err(bug(Violation(format!("rank {peer} called twice"))));
                }
                // Whoever agrees has a link with us in the program, too.
                *unheard = unheard.saturating_sub(1);
            }
            Event::SendComplete { peer } => self.pipeline().send_complete(peer).map_err(bug)?,
            Event::RecvComplete { peer } => self.pipeline().recv_complete(peer).map_err(bug)?,
            Event::RecvReady { peer, view } => {
                let expected = self
                    .pipeline()
                    .next_recv(peer)
                    .map(|elements| (elements.end - elements.start) as usize * work.call.dtype.size());
                if expected != Some(view.len()) {
                    let words = format!(
                        "rank {peer} sent {} bytes where rank {} expects {expected:?}",
                        view.len(),
                        self.rank
                    );
                    return Err(Error::disagreement(words));
                }
                let message = self.pipeline().recv_ready(peer).map_err(bug)?;
                let views = &mut self.views[peer].0;
                let at = message as usize % views.len();
                views[at] = view;
            }
        }
        Ok(())
    }

    fn perform(&mut self, work: &BoundCall, action: Action) -> Result<()> {
        match action {
            Action::Release { peer } => self.links.release(peer)?,
            Action::Send { peer, location, step, sub } => {
                let piece = self.piece(work, location, step, sub);
                self.links.send(peer, piece)?;
            }
            Action::PostRecv { peer, location, step, sub } => {
                if let Location::Slot(slot) = location {
                    self.choose_slot(work, peer, slot as usize);
                }
                let piece = self.piece(work, location, step, sub);
                self.links.post_recv(peer, piece)?;
            }
            Action::Stage { step, sub, buffer, slot } => {
                self.choose_staging_slot(work, step, slot as usize);
                let from = self.piece(work, Location::Buffer(buffer), step, sub);
                let into = self.piece(work, Location::Slot(slot), step, sub);
                let operands = [device::Operand { piece: from, factor: None }];
                let job = Job {
                    dtype: work.call.dtype,
                    arithmetic: work.arithmetic,
                    into,
                    operands: &operands,
                    finish: Finish::Keep,
                    streaming: false,
                };
                let ticket = Ticket { step, sub, staging: true, views: false };
                if self.devices.submit(&job, ticket.pack())? == Submitted::Done {
                    self.finish(ticket)?;
                }
            }
            Action::Combine { step, sub } => self.combine(work, step, sub)?,
        }
        Ok(())
    }

    /// Whether a peer's message lands in a slot of the pool or in its place on the GPU, where it is nearer to the sum.
    fn choose_slot(&mut self, work: &BoundCall, peer: Rank, slot: usize) {
        if let (Some(in_use), Some(place)) = (self.gpu.in_use.get_mut(slot), self.gpu.on_gpu.pool.get(slot)) {
            let AnyTransport::Posted(transport) = self.links.to(peer) else { return };
            *in_use = work.call.on_gpu && transport.can_recv_into(*place);
        }
    }

    /// Whether what is sent is staged in a slot of the pool or in its place on the GPU, from where all must be able to
    /// get it.
    fn choose_staging_slot(&mut self, work: &BoundCall, step: StepId, slot: usize) {
        let (Some(in_use), Some(place)) = (self.gpu.in_use.get_mut(slot), self.gpu.on_gpu.pool.get(slot))
        else {
            return;
        };
        let program = self.pipelines[self.current].program();
        let Body::Send { peers, .. } = &program.steps[step as usize].body else { return };
        let mut transports = peers.iter().map(|peer| self.links.to(*peer).common());
        *in_use = work.call.on_gpu && transports.all(|transport| transport.can_send_from(*place));
    }

    fn combine(&mut self, work: &BoundCall, step: StepId, sub: u64) -> Result<()> {
        let program = Arc::clone(self.pipeline().program());
        let Body::Combine { operands, last } = &program.steps[step as usize].body else {
            return Err(bug(Violation(format!("step {step} adds nothing"))));
        };
        self.operands.clear();
        let mut views = false;
        for (part, operand) in operands.iter().enumerate() {
            let location = self.pipeline().operand_location(step, part, sub);
            views |= matches!(location, Location::Peer { .. });
            let scaled = matches!(operand, OperandSource::Own { scaled: true, .. });
            let piece = self.piece(work, location, step, sub);
            self.operands.push(device::Operand { piece, factor: scaled.then_some(work.call.factor) });
        }
        let into = self.piece(work, Location::Buffer(BufferKind::Output), step, sub);
        let divide = *last && work.average;
        let already_there =
            matches!(self.operands[..], [only] if only.piece == into && only.factor.is_none());
        if already_there && !divide {
            return self.pipeline().combine_complete(step).map_err(bug);
        }
        if views {
            self.links.begin_reading_job()?;
        }
        let job = Job {
            dtype: work.call.dtype,
            arithmetic: work.arithmetic,
            into,
            operands: &self.operands,
            finish: if divide { Finish::Divide(self.world as u32) } else { Finish::Keep },
            streaming: work.output.len() > STREAMING,
        };
        let ticket = Ticket { step, sub, staging: false, views };
        match self.devices.submit(&job, ticket.pack())? {
            Submitted::Done => self.finish(ticket),
            Submitted::InFlight => Ok(()),
        }
    }

    /// The bytes of a step's sub-chunk at a place.
    fn piece(&mut self, work: &BoundCall, location: Location, step: StepId, sub: u64) -> Piece {
        let elements = self.pipeline().elements(step, sub);
        let size = work.call.dtype.size();
        let len = (elements.end - elements.start) as usize * size;
        let from = |start: u64| (elements.start - start) as usize * size;
        match location {
            Location::Buffer(BufferKind::Input) => work.input.narrow(from(self.frame.input.start), len),
            // Programs cut their steps at the ends of the windows, so a piece is wholly inside or outside.
            Location::Buffer(BufferKind::Output) if self.frame.output.contains(&elements.start) => {
                work.output.narrow(from(self.frame.output.start), len)
            }
            Location::Buffer(BufferKind::Output) => work.scratch.narrow(from(0), len),
            Location::Slot(slot) => {
                let slot = slot as usize;
                let slots = match (work.call.on_gpu, self.gpu.in_use.get(slot)) {
                    (false, _) => &self.slots,
                    (true, Some(true)) => &self.gpu.on_gpu,
                    (true, _) => &self.gpu.slots,
                };
                slots.pool[slot].narrow(0, len)
            }
            Location::Peer { peer, message } => {
                let views = &self.views[peer].0;
                views[message as usize % views.len()]
            }
        }
    }

    fn timed_out(&self, work: &BoundCall) -> Error {
        let silent: Vec<Rank> = self.peers.iter().copied().filter(|peer| !self.heard[*peer]).collect();
        let waiting = match silent[..] {
            [] if self.devices.are_busy() => {
                "for the GPU, which may be at work on something that waits for this call (more queues for its streams: CUDA_DEVICE_MAX_CONNECTIONS=32)".to_owned()
            }
            [] => "for messages of ranks that are in the same call".to_owned(),
            _ => format!("for {} to make the same call", RankList::new(&silent)),
        };
        let words = format!("{}: nothing moved for {:?}: waited {waiting}", work.call, self.wait.timeout());
        let error = Error::timeout(words);
        match silent.first() {
            Some(rank) => error.with_suspect(*rank),
            None => error,
        }
    }
}

fn bug(violation: Violation) -> Error {
    Error::internal(format!("{}: please report this", violation.0))
}
