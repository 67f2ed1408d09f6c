//! The pipeline's brain: which sub-chunk moves next, through which stage, into which slot, and what a
//! completion sets free. A state machine without I/O: events in, actions out.
//!
//! Owns all decisions between a bound program and its end. Must not know pointers, bytes or clocks: it speaks
//! of elements, slots by number and messages by their place on their link. The executor drives it with real
//! links and devices; the tests drive it with random orders of completion.
//!
//! # Why it ends
//!
//! Messages of a link are sent, landed and released in one order for the whole world: by step, or in waves by
//! when they are due (see `link`), and what a message waits for comes before it in that order. So the earliest
//! unfinished message of the world has nothing unfinished before it: it is at the head of its link, what it
//! depends on is done, and since slots are counted per link and direction (a staged message to several peers counts
//! on each of their links) none of those that it may take is held by a later message. It can always move, with any
//! window and any number of slots from one per link and direction that needs them. The verifier checks, for every
//! program, that the order is one.

mod action;
mod dispatch;
mod link_state;

pub use action::{Action, Binding, LinkProfile, Location, Slot, Staging};

use super::Rank;
use super::program::{Body, BufferKind, OperandSource, Program, StepId, Waves};
use link_state::{BoundStep, LinkState, PendingRecv};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The state machine. Made once per program; [`start`](Self::start) binds it to a call without allocating.
#[derive(Debug)]
pub struct Pipeline {
    program: Arc<Program>,
    binding: Binding,
    /// Whether messages are numbered for the binding's elements.
    numbered: bool,
    steps: Vec<BoundStep>,
    combine_queued: Vec<bool>,
    /// By peer; `None` where there is no traffic.
    links: Vec<Option<Box<LinkState>>>,
    /// Those with traffic.
    peers: Vec<Rank>,
    free: Vec<Slot>,
    slots: usize,
    /// How many links still send from a slot.
    slot_users: Vec<u32>,
    /// Work that may have become possible, each entry queued at most once.
    to_send: VecDeque<Rank>,
    to_post_recv: VecDeque<Rank>,
    to_combine: VecDeque<StepId>,
    to_release: VecDeque<Rank>,
    /// Combine sub-chunks and messages that are not done yet.
    remaining: u64,
}

/// An event that does not fit the program: a bug, or a peer that does not play by the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl Pipeline {
    /// A pipeline for `program` on links that `profile` describes, with as many slots as they may hold together.
    pub fn new(program: Arc<Program>, profile: impl Fn(Rank) -> LinkProfile) -> Self {
        let (mut slots, mut window) = (0, 0);
        let mut links: Vec<Option<Box<LinkState>>> = (0..program.world).map(|_| None).collect();
        for (peer, traffic) in &program.links {
            let profile = profile(*peer);
            slots += profile.send_slots + profile.recv_slots;
            window += profile.window;
            links[*peer] = Some(Box::new(LinkState::new(profile, &traffic.sends, &traffic.receives)));
        }
        let peers: Vec<Rank> = program.peers().collect();
        let steps = program.steps.len();
        Self {
            binding: Binding { count: 0, subchunk: 1, align: 1, in_place: false },
            numbered: false,
            steps: vec![BoundStep::default(); steps],
            combine_queued: vec![false; steps],
            to_send: VecDeque::with_capacity(peers.len()),
            to_post_recv: VecDeque::with_capacity(peers.len()),
            peers,
            to_combine: VecDeque::with_capacity(steps),
            to_release: VecDeque::with_capacity(window),
            links,
            free: Vec::with_capacity(slots),
            slots,
            slot_users: vec![0; slots],
            remaining: 0,
            program,
        }
    }

    /// The program that this pipeline runs.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// How many slots it uses.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Begins a call, in which each peer's link needs this staging; whatever was under way is forgotten.
    pub fn start(&mut self, binding: Binding, staging: impl Fn(Rank) -> Staging) {
        let elements = |binding: &Binding| (binding.count, binding.subchunk, binding.align);
        let numbered = self.numbered && elements(&self.binding) == elements(&binding);
        self.binding = binding;
        self.numbered = true;
        self.remaining = 0;
        self.free.clear();
        self.free.extend((0..self.slots as Slot).rev());
        self.slot_users.fill(0);
        self.to_send.clear();
        self.to_post_recv.clear();
        self.to_combine.clear();
        self.to_release.clear();
        if !numbered {
            self.bind();
        }
        for (step, bound) in self.program.steps.iter().zip(&mut self.steps) {
            (bound.issued, bound.done) = (0, 0);
            if matches!(step.body, Body::Combine { .. }) {
                self.remaining += bound.subs;
            }
        }
        // As many as the longest grid has sub-chunks.
        let number =
            |waves: &Waves| (waves.longest * binding.count as f64 / binding.subchunk as f64).ceil() as u64;
        let waves = self.program.waves.as_ref().map(|waves| (number(waves), waves.lag));
        for peer in &self.peers {
            let link = self.links[*peer].as_mut().expect("the peer has a link");
            if !numbered {
                link.sends.number(&self.steps, waves);
                link.receives.number(&self.steps, waves);
            }
            link.restart(staging(*peer));
            self.remaining += link.sends.messages();
            self.to_send.push_back(*peer);
            if link.recv_queued {
                self.to_post_recv.push_back(*peer);
            }
        }
        for (number, step) in (0..).zip(&self.program.steps) {
            self.combine_queued[number as usize] = step.is_local();
            if step.is_local() {
                self.to_combine.push_back(number);
            }
        }
    }

    /// Gives every step its elements.
    fn bind(&mut self) {
        let Binding { count, subchunk, align, .. } = self.binding;
        for (step, bound) in self.program.steps.iter().zip(&mut self.steps) {
            let Range { start, end } = step.span.elements(count, align);
            let grid = step.grid.elements(count, align);
            let (origin, cells) = (grid.start, (grid.end - grid.start).div_ceil(subchunk));
            let first = (start - origin) / subchunk;
            let subs = if start == end { 0 } else { (end - 1 - origin) / subchunk - first + 1 };
            let depth = step.depth.into();
            *bound = BoundStep { start, end, origin, cells, first, subs, depth, ..BoundStep::default() };
        }
    }

    /// Whether nothing is left to do and nobody reads this rank's memory any more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.remaining == 0 && self.to_release.is_empty()
    }

    /// The elements of a sub-chunk of a step.
    #[must_use]
    pub fn elements(&self, step: StepId, sub: u64) -> Range<u64> {
        let bound = &self.steps[step as usize];
        let cell = bound.origin + (bound.first + sub) * self.binding.subchunk;
        cell.max(bound.start)..(cell + self.binding.subchunk).min(bound.end)
    }

    /// Where the operand of a combine is for this sub-chunk.
    #[must_use]
    pub fn operand_location(&self, step: StepId, part: usize, sub: u64) -> Location {
        let Body::Combine { operands, .. } = &self.program.steps[step as usize].body else {
            unreachable!("only combines have operands");
        };
        match operands[part] {
            OperandSource::Own { buffer, .. } => Location::Buffer(buffer),
            OperandSource::Received { peer } => {
                let message = self.recv_message_of(peer, step, part as u32, sub);
                let link = self.links[peer].as_ref().expect("the operand's link exists");
                match link.incoming.peek(message).and_then(|incoming| incoming.slot) {
                    Some(slot) => Location::Slot(slot),
                    None => Location::Peer { peer, message },
                }
            }
        }
    }

    /// The transport has sent the oldest message to `peer`: its bytes may change.
    ///
    /// # Errors
    /// A violation if nothing was under way.
    pub fn send_complete(&mut self, peer: Rank) -> Result<(), Violation> {
        let link = self.links[peer].as_mut().ok_or_else(|| unexpected("sent", peer))?;
        if link.send_completed >= link.send_posted {
            return Err(unexpected("sent", peer));
        }
        let outgoing = *link.outgoing.get(link.send_completed);
        link.sends.count_completed(link.send_completed);
        link.send_completed += 1;
        if let Some(slot) = outgoing.slot {
            link.send_slots_held -= 1;
            let users = &mut self.slot_users[slot as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(slot);
            }
        }
        self.remaining -= 1;
        self.queue_send(peer);
        self.wake_dependents(outgoing.step);
        Ok(())
    }

    /// The next message of `peer` can be read where it is.
    ///
    /// # Errors
    /// A violation if the program expects none.
    pub fn recv_ready(&mut self, peer: Rank) -> Result<u64, Violation> {
        let link = self.links[peer].as_mut().ok_or_else(|| unexpected("arrived", peer))?;
        let message = link.recv_completed;
        let Some((step, _)) = link.receives.get(message).filter(|_| link.profile.in_place) else {
            return Err(unexpected("arrived", peer));
        };
        if message - link.released >= link.profile.window as u64 {
            return Err(unexpected("arrived beyond the window", peer));
        }
        link.incoming.set(message, PendingRecv { slot: None, consumed: false });
        link.recv_completed += 1;
        self.queue_combine(step);
        Ok(message)
    }

    /// The elements that the next message of `peer` carries, if the program expects one.
    #[must_use]
    pub fn next_recv(&self, peer: Rank) -> Option<Range<u64>> {
        let link = self.links[peer].as_ref()?;
        let (step, sub) = link.receives.get(link.recv_completed)?;
        Some(self.elements(step, sub))
    }

    /// The oldest landing of `peer` is filled.
    ///
    /// # Errors
    /// A violation if none was under way.
    pub fn recv_complete(&mut self, peer: Rank) -> Result<(), Violation> {
        let link = self.links[peer].as_mut().ok_or_else(|| unexpected("landed", peer))?;
        let message = link.recv_completed;
        let Some((step, _)) = link.receives.get(message).filter(|_| message < link.recv_posted) else {
            return Err(unexpected("landed", peer));
        };
        link.recv_completed += 1;
        if link.incoming.get(message).slot.is_none() {
            // It landed where it belongs: nothing is left to be done with it.
            link.incoming.get(message).consumed = true;
            link.release_consumed(peer, None);
            self.steps[step as usize].issued += 1;
            self.finish_sub(step);
        } else {
            self.queue_combine(step);
        }
        self.queue_recv(peer);
        Ok(())
    }

    /// A slot holds what [`Action::Stage`] asked for.
    pub fn stage_complete(&mut self, step: StepId, sub: u64) {
        for part in 0..self.peers_of(step).len() {
            let peer = self.peers_of(step)[part];
            if self.needs_staging(peer, step) {
                let message = self.send_message_of(peer, step, part as u32, sub);
                self.link(peer).outgoing.get(message).ready = true;
                self.queue_send(peer);
            }
        }
    }

    /// The device has done the oldest sub-chunk of the step that was under way.
    ///
    /// # Errors
    /// A violation if none was under way.
    pub fn combine_complete(&mut self, step: StepId) -> Result<(), Violation> {
        let bound = &self.steps[step as usize];
        if bound.done >= bound.issued {
            return Err(Violation(format!("a sum of step {step} was reported that nobody asked for")));
        }
        let sub = bound.done;
        let program = Arc::clone(&self.program);
        let Body::Combine { operands, .. } = &program.steps[step as usize].body else {
            return Err(Violation(format!("step {step} adds nothing")));
        };
        for (part, operand) in operands.iter().enumerate() {
            let OperandSource::Received { peer } = *operand else {
                continue;
            };
            let message = self.recv_message_of(peer, step, part as u32, sub);
            let link = self.links[peer].as_mut().expect("the operand's link exists");
            let incoming = link.incoming.get(message);
            incoming.consumed = true;
            if let Some(slot) = incoming.slot.take() {
                link.recv_slots_held -= 1;
                self.free.push(slot);
            }
            let releases = link.profile.in_place.then_some(&mut self.to_release);
            link.release_consumed(peer, releases);
            self.queue_recv(peer);
        }
        self.finish_sub(step);
        Ok(())
    }

    fn finish_sub(&mut self, step: StepId) {
        self.steps[step as usize].done += 1;
        self.remaining -= 1;
        self.queue_combine(step);
        self.wake_dependents(step);
    }

    /// Whatever waited for `step` may be possible now.
    fn wake_dependents(&mut self, step: StepId) {
        let program = Arc::clone(&self.program);
        for dependent in program.dependents(step) {
            let step = &program.steps[*dependent as usize];
            match &step.body {
                Body::Send { peers, .. } => peers.iter().for_each(|peer| self.queue_send(*peer)),
                Body::Combine { operands, .. } => {
                    self.queue_combine(*dependent);
                    if step.is_copy() {
                        for operand in operands {
                            if let OperandSource::Received { peer } = operand {
                                self.queue_recv(*peer);
                            }
                        }
                    }
                }
            }
        }
    }

    fn needs_staging(&self, peer: Rank, step: StepId) -> bool {
        let Body::Send { buffer, .. } = &self.program.steps[step as usize].body else {
            return false;
        };
        self.links[peer].as_ref().is_some_and(|link| match buffer {
            BufferKind::Input => link.staging.input,
            BufferKind::Output => link.staging.output,
        })
    }

    fn peers_of(&self, step: StepId) -> &[Rank] {
        match &self.program.steps[step as usize].body {
            Body::Send { peers, .. } => peers,
            Body::Combine { .. } => &[],
        }
    }

    fn recv_message_of(&self, peer: Rank, step: StepId, part: u32, sub: u64) -> u64 {
        let link = self.links[peer].as_ref().expect("the operand's link exists");
        link.receives.message_of(step, part, sub)
    }

    fn send_message_of(&self, peer: Rank, step: StepId, part: u32, sub: u64) -> u64 {
        let link = self.links[peer].as_ref().expect("the send's link exists");
        link.sends.message_of(step, part, sub)
    }

    fn link(&mut self, peer: Rank) -> &mut LinkState {
        self.links[peer].as_mut().expect("the link exists")
    }

    fn queue_send(&mut self, peer: Rank) {
        let link = self.links[peer].as_mut().expect("the link exists");
        if !std::mem::replace(&mut link.send_queued, true) {
            self.to_send.push_back(peer);
        }
    }

    fn queue_recv(&mut self, peer: Rank) {
        let link = self.links[peer].as_mut().expect("the link exists");
        if !link.profile.in_place && !std::mem::replace(&mut link.recv_queued, true) {
            self.to_post_recv.push_back(peer);
        }
    }

    fn queue_combine(&mut self, step: StepId) {
        if !std::mem::replace(&mut self.combine_queued[step as usize], true) {
            self.to_combine.push_back(step);
        }
    }
}

fn unexpected(what: &str, peer: Rank) -> Violation {
    Violation(format!("a message of rank {peer} was {what} that this program does not expect"))
}
