//! The path of calls that run a program: the pipeline decides, links and devices do.
//!
//! Owns the loop that performs the pipeline's actions and reports completions to it. Must not know any
//! algorithm, and decides nothing: the order is the pipeline's, and lengths and places come from
//! [`call_layout`].

use super::bound_call::{BoundCall, ProgramNumber};
use super::links::Links;
use super::resources::Resources;
use super::ticket::{OUTSIDE_JOB, Ticket};
use crate::device::{Finish, Job, Operand, Submitted};
use crate::error::{Error, ErrorKind, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::Piece;
use crate::plan::call_layout::{self, CallFacts, CallLayout, LinkDelivery, VectorAccess};
use crate::plan::pipeline::{Action, BlockLayout, Location, Pipeline, Staging, Violation};
use crate::plan::program::{Body, BufferKind, OperandSource, Program, StepId};
use crate::plan::scratch_layout::ScratchLayout;
use crate::rank::{Rank, RankList};
use crate::trace::{JobKind, MessagePart};
use crate::transport::{AnyTransport, Event, Events};
use std::sync::Arc;

/// Executes calls by programs.
pub(super) struct ProgramPath {
    /// One for each program that was installed.
    pipelines: Vec<Pipeline>,
    /// The index of the pipeline that runs.
    current: usize,
    /// The peers that exchange messages with this rank in the program that runs.
    peers: Vec<Rank>,
    /// By rank, whether it has entered the current call.
    entered: Vec<bool>,
    /// How many of the peers have not.
    missing: usize,
    /// By rank, its views, by their number on the link modulo the link's window.
    views: Vec<Vec<Piece>>,
    /// Events of links that were not handled yet.
    events: Events,
    /// Tickets of finished jobs that were not handled yet.
    finished: Vec<u64>,
    /// The blocks of the current call, if it is an all-to-all.
    blocks: BlockLayout,
    /// The scratch memory of the current call.
    scratch: ScratchLayout,
}

/// A call with its layout.
struct LaidOutCall {
    bound: BoundCall,
    layout: CallLayout,
}

impl ProgramPath {
    /// A path without programs.
    pub(super) fn new(links: &Links, world: usize) -> Self {
        Self {
            pipelines: Vec::new(),
            current: 0,
            peers: Vec::with_capacity(world),
            entered: vec![false; world],
            missing: 0,
            views: vec![Vec::new(); world],
            events: Events::with_capacity(links.most_events()),
            finished: Vec::new(),
            blocks: BlockLayout::default(),
            scratch: ScratchLayout::default(),
        }
    }

    /// Adds a program, and allocates what running it needs. Returns its number.
    pub(super) fn install(&mut self, resources: &Resources, program: Arc<Program>) -> Result<ProgramNumber> {
        for peer in program.peers() {
            let window = resources.links.to(peer).common().window();
            self.views[peer].resize(window, Piece::EMPTY);
        }
        self.pipelines.push(pipeline(resources, program)?);
        Ok(ProgramNumber(self.pipelines.len() - 1))
    }

    /// Removes all programs; their numbers may be used again.
    pub(super) fn clear(&mut self) {
        self.pipelines.clear();
    }

    /// Executes a call by the program with this number.
    pub(super) fn run(
        &mut self,
        resources: &mut Resources,
        bound: &BoundCall,
        number: ProgramNumber,
        facts: &CallFacts,
    ) -> Result<()> {
        self.current = number.0;
        let active = self.prepare(resources, bound, facts)?;
        reach(FaultPoint::ProgramPrepared);
        self.start(resources, &active)?;
        reach(FaultPoint::ProgramAnnounced);
        resources.wait.begin();
        loop {
            let mut busy = false;
            while let Some(action) = self.pipeline().next_action() {
                busy = true;
                let is_own_copy = self.pipeline().is_own_copy(&action);
                let performed = self.perform(resources, &active, action);
                performed.map_err(|error| with_rank(error, resources, &active))?;
                // No peer waits for it, and many together take long: the links must not idle meanwhile.
                if is_own_copy {
                    break;
                }
            }
            if self.missing == 0 && self.pipeline().is_done() {
                reach(FaultPoint::ProgramEnds);
                return Ok(());
            }
            busy |= self.poll(resources, &active)?;
            if busy {
                resources.progressed();
            } else if !resources.pause()? {
                return Err(self.timed_out(resources, &active));
            }
        }
    }

    fn pipeline(&mut self) -> &mut Pipeline {
        &mut self.pipelines[self.current]
    }

    /// Lays the call out, and copies its input if it must be.
    fn prepare(
        &mut self,
        resources: &mut Resources,
        bound: &BoundCall,
        facts: &CallFacts,
    ) -> Result<LaidOutCall> {
        let mut bound = bound.clone();
        let call = &bound.call;
        let program = self.pipelines[self.current].program();
        if let Some(counts) = bound.blocks.as_ref().filter(|_| program.blocks.is_none()) {
            let layout = CallLayout::of_blocks(facts, counts, resources.rank, &mut self.blocks)?;
            return Ok(LaidOutCall { bound, layout });
        }
        let layout = CallLayout::of_program(facts, program)?;
        self.scratch.lay_out(program, &layout.binding);
        if call.count == 0 {
            // The dummy element that the layout asks for.
            let dummy = resources.slots.spare(size_of::<u64>());
            (bound.input, bound.output, bound.scratch) = (dummy, dummy, dummy);
        }
        if layout.copies_input {
            bound.input = copy_input(resources, &bound)?;
            bound.in_place = false;
        }
        Ok(LaidOutCall { bound, layout })
    }

    /// Starts the pipeline, and announces the call to all peers.
    fn start(&mut self, resources: &mut Resources, active: &LaidOutCall) -> Result<()> {
        let mut staging = [Staging::default(); Links::TRANSPORTS];
        for (staging, transport) in staging.iter_mut().zip(resources.links.transports()) {
            *staging = staging_of(transport, &active.bound);
        }
        let pipeline = &mut self.pipelines[self.current];
        let stages = staging.iter().any(|staging| *staging != Staging::default());
        if stages && pipeline.program().waves.is_some() {
            resources.slots.populate();
        }
        self.peers.clear();
        self.peers.extend(pipeline.program().peers());
        let links = &mut resources.links;
        let (binding, staging) = (active.layout.binding, |peer| staging[links.route(peer)]);
        if active.bound.blocks.is_some() && pipeline.program().blocks.is_none() {
            pipeline.start_exchange(binding, &self.blocks, staging);
        } else {
            pipeline.start(binding, staging);
        }
        self.events.clear();
        self.entered.fill(false);
        self.missing = self.peers.len();
        links.begin(&active.bound.call);
        let announce = if pipeline.program().sends_all_to_peers {
            Links::announce_with_message
        } else {
            Links::announce
        };
        self.peers.iter().try_for_each(|peer| announce(links, *peer, &active.bound.announced().to(*peer)))
    }

    /// Takes completions from links and devices, and reports them to the pipeline. Whether there were any.
    fn poll(&mut self, resources: &mut Resources, active: &LaidOutCall) -> Result<bool> {
        let polled = resources.links.poll(&mut self.events);
        // First the events, because a call that differs explains why a link fails.
        while let Some(event) = self.events.pop_front() {
            self.handle(resources, active, event)?;
        }
        let mut busy = polled.map_err(|error| with_rank(error, resources, active))?;
        if resources.devices.are_busy() {
            let finished = &mut self.finished;
            resources.devices.poll(&mut |ticket| finished.push(ticket))?;
            busy |= !self.finished.is_empty();
            for index in 0..self.finished.len() {
                self.finish(resources, Ticket::unpack(self.finished[index]))?;
            }
            self.finished.clear();
        }
        Ok(busy)
    }

    fn handle(&mut self, resources: &mut Resources, active: &LaidOutCall, event: Event) -> Result<()> {
        let own = &active.bound.call;
        match event {
            Event::PeerEntered { peer, call } => {
                if !active.bound.announced().agrees_with(&call, peer) {
                    let message =
                        active.bound.announced().expected(peer).difference(resources.rank, &call, peer);
                    return Err(Error::disagreement(message));
                }
                if std::mem::replace(&mut self.entered[peer], true) {
                    return Err(Error::from(Violation(format!("rank {peer} announced two calls"))));
                }
                // A peer whose call agrees has a link with this rank in the program, too.
                self.missing = self.missing.saturating_sub(1);
            }
            Event::SendComplete { peer } => {
                resources.trace.send_ends(peer);
                self.pipeline().send_complete(peer)?;
            }
            Event::RecvComplete { peer } => {
                resources.trace.receive_ends(peer);
                self.pipeline().recv_complete(peer)?;
            }
            Event::RecvReady { peer, .. } if !self.entered[peer] => {
                let message = format!(
                    "rank {peer} sends a message to rank {}, which has called {own} without receiving it",
                    resources.rank
                );
                return Err(Error::disagreement(message));
            }
            Event::RecvReady { peer, view } => {
                let pipeline = self.pipeline();
                let next = pipeline.next_recv_part(peer);
                let expected = next
                    .map(|(step, sub)| pipeline.elements(step, sub))
                    .map(|elements| (elements.end - elements.start) as usize * own.dtype.size());
                if expected != Some(view.len()) {
                    let message = format!(
                        "rank {peer} sent {} bytes where rank {} expects {}: do all ranks run the same plan?",
                        view.len(),
                        resources.rank,
                        expected.map_or_else(|| "no message".to_owned(), |bytes| format!("{bytes} bytes"))
                    );
                    return Err(Error::disagreement(message));
                }
                let message = self.pipeline().recv_ready(peer)?;
                if let Some((step, sub)) = next {
                    resources.trace.receive_begins(peer, MessagePart { step, sub, bytes: view.len() });
                }
                let views = &mut self.views[peer];
                let at = message as usize % views.len();
                views[at] = view;
            }
        }
        Ok(())
    }

    fn perform(&mut self, resources: &mut Resources, active: &LaidOutCall, action: Action) -> Result<()> {
        match action {
            Action::Release { peer } => resources.release(peer),
            Action::Send { peer, location, step, sub } => {
                let piece = self.piece(resources, active, location, step, sub);
                resources.send(peer, piece, MessagePart { step, sub, bytes: piece.len() })
            }
            Action::PostRecv { peer, location, step, sub } => {
                let piece = self.piece(resources, active, location, step, sub);
                resources.post_recv(peer, piece, MessagePart { step, sub, bytes: piece.len() })
            }
            Action::Stage { step, sub, buffer, slot } => {
                let from = self.piece(resources, active, Location::Buffer(buffer), step, sub);
                let into = self.piece(resources, active, Location::Slot(slot), step, sub);
                let ticket = Ticket { step, sub, stages: true, reads_views: false };
                let operands = [Operand { piece: from, factor: None }];
                let part = MessagePart { step, sub, bytes: into.len() };
                resources.trace.job_begins(JobKind::Copy, ticket.pack(), part);
                match resources.devices.submit(&copy(&active.bound, into, &operands), ticket.pack())? {
                    Submitted::Done => self.finish(resources, ticket),
                    Submitted::InFlight => Ok(()),
                }
            }
            Action::Combine { step, sub } => self.combine(resources, active, step, sub),
        }
    }

    fn combine(
        &mut self,
        resources: &mut Resources,
        active: &LaidOutCall,
        step: StepId,
        sub: u64,
    ) -> Result<()> {
        let bound = &active.bound;
        let program = Arc::clone(self.pipeline().program());
        let Body::Combine { operands, into, last } = &*program.steps[step as usize].body else {
            return Err(Error::from(Violation(format!("step {step} has no operands to combine"))));
        };
        resources.operands.clear();
        let mut reads_views = false;
        for (part, operand) in operands.iter().enumerate() {
            let location = self.pipeline().operand_location(step, part, sub);
            reads_views |= matches!(location, Location::Peer { .. });
            let scaled = matches!(operand, OperandSource::Own { scaled: true, .. });
            let piece = self.piece(resources, active, location, step, sub);
            resources.operands.push(Operand { piece, factor: scaled.then_some(bound.call.factor) });
        }
        let into = self.piece(resources, active, Location::Buffer(*into), step, sub);
        let divide = *last && bound.average;
        let already_there =
            matches!(resources.operands[..], [only] if only.piece == into && only.factor.is_none());
        if already_there && !divide {
            return self.pipeline().combine_complete(step).map_err(Error::from);
        }
        if reads_views {
            reach(FaultPoint::ReadsBegin);
        }
        let job = Job {
            dtype: bound.call.dtype,
            arithmetic: bound.arithmetic,
            into,
            operands: &resources.operands,
            finish: if divide { Finish::Divide(resources.world as u32) } else { Finish::Keep },
            streaming: active.layout.streaming,
        };
        let ticket = Ticket { step, sub, stages: false, reads_views };
        let kind = JobKind::of(resources.operands.len(), divide);
        let part = MessagePart { step, sub, bytes: into.len() };
        resources.trace.job_begins(kind, ticket.pack(), part);
        match resources.devices.submit(&job, ticket.pack())? {
            Submitted::Done => self.finish(resources, ticket),
            Submitted::InFlight => Ok(()),
        }
    }

    /// Reports a finished job to the pipeline.
    fn finish(&mut self, resources: &mut Resources, ticket: Ticket) -> Result<()> {
        reach(FaultPoint::CombineDone);
        resources.trace.job_ends(ticket.pack());
        if ticket.reads_views {
            resources.links.check_reads()?;
        }
        if ticket.stages {
            self.pipeline().stage_complete(ticket.step, ticket.sub);
            return Ok(());
        }
        self.pipeline().combine_complete(ticket.step).map_err(Error::from)
    }

    /// The bytes of a step's sub-chunk at a location.
    fn piece(
        &self,
        resources: &Resources,
        active: &LaidOutCall,
        location: Location,
        step: StepId,
        sub: u64,
    ) -> Piece {
        let LaidOutCall { bound, layout } = active;
        let pipeline = &self.pipelines[self.current];
        let elements = pipeline.elements(step, sub);
        let size = bound.call.dtype.size();
        let len = (elements.end - elements.start) as usize * size;
        match location {
            Location::Buffer(buffer) => {
                let blocks = pipeline.program().blocks.as_deref();
                let held = if buffer == BufferKind::Input { bound.input } else { bound.output };
                let (vector, place) = match layout.place_of(buffer, elements.start, blocks) {
                    Some(place) => (held, place),
                    None => (bound.scratch, self.scratch.place_of(elements.start)),
                };
                vector.narrow(place as usize * size, len)
            }
            Location::Slot(slot) => resources.slots.piece(slot as usize).narrow(0, len),
            Location::Peer { peer, message } => {
                let views = &self.views[peer];
                views[message as usize % views.len()]
            }
        }
    }

    fn timed_out(&self, resources: &Resources, active: &LaidOutCall) -> Error {
        let mut missing: Vec<Rank> = self.peers.iter().copied().filter(|peer| !self.entered[*peer]).collect();
        let waiting = if let Some((peer, why)) = resources.links.stalled(&self.peers) {
            missing = vec![peer];
            format!("for rank {peer}: {why}")
        } else if !missing.is_empty() {
            format!("for {} to make the same call", RankList::new(&missing))
        } else if resources.devices.are_busy() {
            "for the threads that add, which do not go on".to_owned()
        } else {
            "for messages of ranks that have entered the call".to_owned()
        };
        let timeout = resources.wait.timeout();
        let message = format!("{}: no progress for {timeout:?}: waited {waiting}", active.bound.call);
        let error = Error::timeout(message);
        match missing.first() {
            Some(rank) => error.with_suspect(*rank),
            None => error,
        }
    }
}

/// A link's error, which names the peer. In an all-to-all a message may be shorter or longer than expected
/// because the two ranks gave different counts, so it names this rank and the call, too.
fn with_rank(error: Error, resources: &Resources, active: &LaidOutCall) -> Error {
    if active.bound.blocks.is_none() || error.kind() != ErrorKind::Disagreement {
        return error;
    }
    error.context(format_args!("rank {} in {}", resources.rank, active.bound.call))
}

/// A pipeline for a program over the links of this rank.
fn pipeline(resources: &Resources, program: Arc<Program>) -> Result<Pipeline> {
    let (slots, links) = (resources.slots.count(), program.links.len());
    let Some(share) = call_layout::slots_per_link(slots, links) else {
        let message = format!("{slots} slots are too few for {links} links: raise FLEXRING_SLOTS");
        return Err(Error::invalid_setting(message));
    };
    let profile = |peer: Rank| {
        let transport = resources.links.to(peer);
        let delivery = match transport {
            AnyTransport::InPlace(_) => LinkDelivery::InPlace,
            AnyTransport::Posted(posted) => LinkDelivery::Posted { may_stage: posted.stages_host_memory() },
        };
        call_layout::link_profile(delivery, transport.common().window(), share)
    };
    Ok(Pipeline::new(program, profile))
}

/// What a transport stages of a call's vectors.
fn staging_of(transport: &AnyTransport, bound: &BoundCall) -> Staging {
    let access = |piece: Piece| {
        let access = || VectorAccess {
            can_send_from: transport.common().can_send_from(piece),
            can_recv_into: match transport {
                AnyTransport::InPlace(_) => true,
                AnyTransport::Posted(posted) => posted.can_recv_into(piece),
            },
        };
        (!piece.is_empty()).then(access)
    };
    call_layout::staging(access(bound.input), access(bound.output), access(bound.scratch))
}

/// Copies the input to the spare slot, where it can be read while the output is written.
fn copy_input(resources: &mut Resources, bound: &BoundCall) -> Result<Piece> {
    let len = bound.input.len();
    let into = resources.slots.spare(len);
    let operands = [Operand { piece: bound.input, factor: None }];
    resources.trace.job_begins(JobKind::Copy, OUTSIDE_JOB, MessagePart::outside(len));
    resources.devices.run(&copy(bound, into, &operands), &resources.fault, resources.wait.timeout())?;
    resources.trace.job_ends(OUTSIDE_JOB);
    Ok(into)
}

/// A job that copies its one operand.
fn copy<'a>(bound: &BoundCall, into: Piece, operands: &'a [Operand; 1]) -> Job<'a> {
    Job {
        dtype: bound.call.dtype,
        arithmetic: bound.arithmetic,
        into,
        operands,
        finish: Finish::Keep,
        streaming: false,
    }
}
