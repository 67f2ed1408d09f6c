//! The pipeline decides which sub-chunk moves next, through which stage and into which slot, and what a
//! completion makes possible. It is a state machine without I/O: completions in, actions out.
//!
//! Owns all decisions from a bound program to its end. Must not know pointers, bytes or clocks: it handles
//! element ranges, slot numbers and message numbers. The executor drives it with real links and devices;
//! tests drive it with random orders of completion.
//!
//! | module | owns |
//! |---|---|
//! | `action` | what the executor is asked to do, and where the data is |
//! | `binding` | size of a call, properties of its links |
//! | `bound_steps` | the elements of steps in a call |
//! | `dispatch` | the choice of the next action |
//! | `link_state` | progress and slots of one link |
//! | `message_order` | the order of messages on a link |
//! | `step_progress` | how far each combine has come |
//!
//! # Why every program ends
//!
//! Messages of a link are sent, received and released in one order that is the same on all ranks: by step, or
//! with waves by due time (see `message_order`). Whatever a message waits for comes before it in that order.
//! So nothing unfinished comes before the earliest unfinished message of the world: it is at the head of its
//! link, its dependencies are done, and no later message holds a slot that it may take, because slots are
//! counted per link and direction (a staged message to several peers counts on each of their links). It can
//! always move, with any window of at least one message, and any number of slots from one per link and
//! direction that needs slots. The verifier checks for every program that such an order exists.

mod action;
mod binding;
mod bound_steps;
mod dispatch;
mod link_state;
mod message_order;
mod step_progress;

pub use action::{Action, Location, Slot};
pub use binding::{Binding, BlockLayout, LinkProfile, Staging};

use super::Rank;
use super::program::{Body, BufferKind, LinkPlace, OperandSource, Program, StepId};
pub(crate) use bound_steps::{BoundPlace, BoundSteps};
use flexring_core::error::Error;
use link_state::{LinkNumber, LinkTable, LinkTraffic};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use step_progress::StepProgress;

/// The state machine of one program. [`start`](Self::start) binds it to a call without allocating, so a
/// program needs only one.
#[derive(Debug)]
pub struct Pipeline {
    program: Arc<Program>,
    binding: Binding,
    /// The blocks that steps move; empty lists if steps move their spans of the vector.
    blocks: BlockLayout,
    /// Whether messages are numbered for the size and layout of `binding` and `blocks`.
    numbered: bool,
    /// Shared by pipelines of one program.
    bound: Arc<BoundSteps>,
    progress: StepProgress,
    links: LinkTable,
    free: Vec<Slot>,
    slots: usize,
    /// By slot: links that still send from it.
    slot_users: Vec<u32>,
    /// Work that may have become possible. Each link or step is queued at most once per queue.
    to_send: VecDeque<LinkNumber>,
    to_post_recv: VecDeque<LinkNumber>,
    to_combine: VecDeque<StepId>,
    /// The links of messages to release.
    to_release: VecDeque<LinkNumber>,
    /// Sub-chunks of combines and sends of messages that are not complete.
    remaining: u64,
}

/// An event that does not fit the program: a bug, or a peer that violates the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl From<Violation> for Error {
    fn from(violation: Violation) -> Self {
        Self::internal(format!("{}: please report this", violation.0))
    }
}

impl Pipeline {
    /// A pipeline for `program` on links that `profile` describes. It uses as many slots as all links
    /// together may hold.
    pub fn new(program: Arc<Program>, profile: impl Fn(Rank) -> LinkProfile) -> Self {
        let (mut slots, mut window) = (0, 0);
        let links = program.links.iter().map(|(peer, messages)| {
            let profile = profile(*peer);
            slots += profile.send_slots + profile.recv_slots;
            window += profile.window;
            (*peer, profile, messages)
        });
        let links = LinkTable::new(links, program.waves.is_some());
        let (peers, steps) = (links.peers().len(), program.steps.len());
        Self {
            binding: Binding { count: 0, subchunk: 1, align: 1, in_place: false },
            blocks: BlockLayout::default(),
            numbered: false,
            bound: Arc::new(BoundSteps::new(&program)),
            progress: StepProgress::new(steps, true),
            to_send: VecDeque::with_capacity(peers),
            to_post_recv: VecDeque::with_capacity(peers),
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

    /// A pipeline of the same program on equal links. It shares all that does not change in a call, and
    /// allocates what it needs while it runs: for simulations of many ranks.
    #[must_use]
    pub fn twin(&self) -> Self {
        Self {
            program: Arc::clone(&self.program),
            binding: self.binding,
            blocks: self.blocks.clone(),
            numbered: self.numbered,
            bound: Arc::clone(&self.bound),
            progress: StepProgress::new(self.program.steps.len(), false),
            links: self.links.twin(),
            free: Vec::new(),
            slots: self.slots,
            slot_users: vec![0; self.slots],
            to_send: VecDeque::new(),
            to_post_recv: VecDeque::new(),
            to_combine: VecDeque::new(),
            to_release: VecDeque::new(),
            remaining: 0,
        }
    }

    /// The program that this pipeline runs.
    #[must_use]
    #[inline]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Number of slots that it uses: slots 0 up to this.
    #[must_use]
    #[inline]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Whether an action only copies data of this rank.
    #[must_use]
    #[inline]
    pub fn is_own_copy(&self, action: &Action) -> bool {
        let Action::Combine { step, .. } = action else { return false };
        match &*self.program.steps[*step as usize].body {
            Body::Combine { operands, .. } => {
                operands.iter().all(|operand| matches!(operand, OperandSource::Own { .. }))
            }
            Body::Send { .. } => false,
        }
    }

    /// Starts a call. `staging` says what the link to each peer needs staged. Resets all state of the
    /// previous call.
    pub fn start(&mut self, binding: Binding, staging: impl Fn(Rank) -> Staging) {
        self.start_call(binding, None, staging);
    }

    /// [`start`](Self::start) of a program whose steps move blocks. Their lengths come with the call.
    pub fn start_exchange(
        &mut self,
        binding: Binding,
        blocks: &BlockLayout,
        staging: impl Fn(Rank) -> Staging,
    ) {
        self.start_call(binding, Some(blocks), staging);
    }

    fn start_call(
        &mut self,
        binding: Binding,
        blocks: Option<&BlockLayout>,
        staging: impl Fn(Rank) -> Staging,
    ) {
        let elements = |binding: &Binding| (binding.count, binding.subchunk, binding.align);
        let mut numbered = self.numbered && elements(&self.binding) == elements(&binding);
        if let Some(blocks) = blocks {
            numbered &= self.blocks == *blocks;
            // Not `clone`, which allocates.
            self.blocks.sends.clone_from(&blocks.sends);
            self.blocks.receives.clone_from(&blocks.receives);
        }
        self.binding = binding;
        self.numbered = true;
        self.free.clear();
        self.free.extend((0..self.slots as Slot).rev());
        self.slot_users.fill(0);
        self.to_send.clear();
        self.to_post_recv.clear();
        self.to_combine.clear();
        self.to_release.clear();
        if !numbered {
            Arc::make_mut(&mut self.bound).bind(&self.program, &self.binding, &self.blocks);
        }
        self.progress.restart();
        self.remaining = self.bound.combined();
        let waves = self.program.waves.as_ref();
        let waves = waves.map(|waves| (waves.number(binding.count, binding.subchunk), waves.lag));
        if !numbered {
            let bound = |step: StepId| (self.bound.place(step), self.program.steps[step as usize].depth);
            for LinkTraffic { sends, receives, .. } in self.links.traffic_mut() {
                sends.number(bound, waves);
                receives.number(bound, waves);
            }
        }
        for number in 0..self.links.peers().len() as LinkNumber {
            let staging = staging(self.links.peer(number));
            let (traffic, link) = self.links.get_mut(number);
            link.restart(traffic, staging);
            self.remaining += u64::from(traffic.sends.messages());
            self.to_send.push_back(number);
            if link.recv_queued {
                self.to_post_recv.push_back(number);
            }
        }
        for step in self.bound.local() {
            queue_combine(&mut self.progress, &mut self.to_combine, *step);
        }
    }

    /// Whether all steps are complete and no peer reads this rank's memory any more.
    #[must_use]
    #[inline]
    pub fn is_done(&self) -> bool {
        self.remaining == 0 && self.to_release.is_empty()
    }

    /// Sub-chunks of combines and sends that are not complete.
    #[must_use]
    #[inline]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    fn place(&self, step: StepId) -> &BoundPlace {
        self.bound.place(step)
    }

    /// The elements of a sub-chunk of a step, as a range of the vector.
    #[must_use]
    #[inline]
    pub fn elements(&self, step: StepId, sub: u64) -> Range<u64> {
        self.place(step).elements(sub, self.binding.subchunk)
    }

    /// Where operand number `part` of a combine is for this sub-chunk.
    #[must_use]
    pub fn operand_location(&self, step: StepId, part: usize, sub: u64) -> Location {
        let Body::Combine { operands, .. } = &*self.program.steps[step as usize].body else {
            unreachable!("only combines have operands");
        };
        match operands[part] {
            OperandSource::Own { buffer, .. } => Location::Buffer(buffer),
            OperandSource::Received { peer } => {
                let LinkPlace { link, entry } = self.program.link_places(step)[part];
                let (traffic, link) = self.links.get(link);
                let message = traffic.receives.message_of(entry, sub as u32);
                match link.incoming_slot(traffic, message) {
                    Some(slot) => Location::Slot(slot),
                    None => Location::Peer { peer, message: message.into() },
                }
            }
        }
    }

    /// The oldest message in flight to `peer` is sent: its memory may be overwritten.
    ///
    /// # Errors
    /// A violation if no message is in flight.
    pub fn send_complete(&mut self, peer: Rank) -> Result<(), Violation> {
        let number = self.links.number_of(peer).ok_or_else(|| unexpected("send completion", peer))?;
        let (traffic, link) = self.links.get_mut(number);
        let (message, slot) =
            link.complete_send(traffic).ok_or_else(|| unexpected("send completion", peer))?;
        if let Some(slot) = slot {
            let users = &mut self.slot_users[slot as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(slot);
            }
        }
        self.remaining -= 1;
        self.queue_send(number);
        self.wake_dependents(message.step);
        Ok(())
    }

    /// The next message of `peer` can be read in place. Returns its number.
    ///
    /// # Errors
    /// A violation if the program expects no further message, or none within the window.
    pub fn recv_ready(&mut self, peer: Rank) -> Result<u64, Violation> {
        let number = self.links.number_of(peer).ok_or_else(|| unexpected("message", peer))?;
        let (traffic, link) = self.links.get_mut(number);
        let next = link.recv_completed;
        let Some(message) = traffic.receives.get(next).filter(|_| traffic.profile.reads_in_place) else {
            return Err(unexpected("message", peer));
        };
        if link.is_full_of_received(traffic, next) {
            return Err(unexpected("message beyond the window", peer));
        }
        link.announce(traffic);
        self.progress.receive(message.step, message.part);
        self.queue_combine(message.step);
        Ok(next.number().into())
    }

    /// The elements that the next message of `peer` carries; `None` if the program expects no further
    /// message.
    #[must_use]
    pub fn next_recv(&self, peer: Rank) -> Option<Range<u64>> {
        self.next_recv_part(peer).map(|(step, sub)| self.elements(step, sub))
    }

    /// The step that uses the next message of `peer`, and the sub-chunk of it.
    #[must_use]
    pub fn next_recv_part(&self, peer: Rank) -> Option<(StepId, u64)> {
        let (traffic, link) = self.links.get(self.links.number_of(peer)?);
        let message = traffic.receives.get(link.recv_completed)?;
        Some((message.step, message.sub.into()))
    }

    /// The oldest posted receive of `peer` is complete.
    ///
    /// # Errors
    /// A violation if no receive is posted.
    pub fn recv_complete(&mut self, peer: Rank) -> Result<(), Violation> {
        let number = self.links.number_of(peer).ok_or_else(|| unexpected("receive completion", peer))?;
        let (traffic, link) = self.links.get_mut(number);
        let next = link.recv_completed;
        let is_posted = next.number() < link.recv_posted.number();
        let Some(message) = traffic.receives.get(next).filter(|_| is_posted) else {
            return Err(unexpected("receive completion", peer));
        };
        traffic.receives.advance(&mut link.recv_completed);
        if link.incoming_slot(traffic, next.number()).is_none() {
            // The message was received at its destination: the step has nothing left to do.
            link.consume(traffic, next.number());
            link.release_consumed(traffic);
            self.progress.issue(message.step);
            self.finish_sub(message.step);
        } else {
            self.progress.receive(message.step, message.part);
            self.queue_combine(message.step);
        }
        self.queue_recv(number);
        Ok(())
    }

    /// The copy that [`Action::Stage`] requested is complete.
    pub fn stage_complete(&mut self, step: StepId, sub: u64) {
        for part in 0..self.program.link_places(step).len() {
            let LinkPlace { link: number, entry } = self.program.link_places(step)[part];
            if self.needs_staging(number, step) {
                let (traffic, link) = self.links.get_mut(number);
                link.set_ready(traffic, traffic.sends.message_of(entry, sub as u32));
                self.queue_send(number);
            }
        }
    }

    /// The device has completed the oldest submitted sub-chunk of the step.
    ///
    /// # Errors
    /// A violation if none was submitted.
    pub fn combine_complete(&mut self, step: StepId) -> Result<(), Violation> {
        let subs = self.place(step).subs;
        let done = self.progress.done(step, subs);
        if done >= self.progress.issued(step, subs) {
            return Err(Violation(format!("step {step} completed a sub-chunk that was not submitted")));
        }
        let Self { program, links, .. } = self;
        let Body::Combine { operands, .. } = &*program.steps[step as usize].body else {
            return Err(Violation(format!("step {step} is not a combine")));
        };
        for (operand, place) in operands.iter().zip(program.link_places(step)) {
            if matches!(operand, OperandSource::Own { .. }) {
                continue;
            }
            let LinkPlace { link: number, entry } = *place;
            let (traffic, link) = links.get_mut(number);
            let message = traffic.receives.message_of(entry, done);
            self.free.extend(link.consume(traffic, message));
            let released = link.release_consumed(traffic);
            if traffic.profile.reads_in_place {
                self.to_release.extend((0..released).map(|_| number));
            } else {
                links.queue_recv(number, &mut self.to_post_recv);
            }
        }
        self.finish_sub(step);
        Ok(())
    }

    fn finish_sub(&mut self, step: StepId) {
        self.progress.finish(step, &self.bound);
        self.remaining -= 1;
        self.queue_combine(step);
        self.wake_dependents(step);
    }

    /// Queues the steps that wait for `step`.
    fn wake_dependents(&mut self, step: StepId) {
        let Self { program, links, progress, to_send, to_post_recv, to_combine, .. } = self;
        for dependent in program.dependents(step) {
            let step = &program.steps[*dependent as usize];
            let links_of = || program.link_places(*dependent).iter().map(|place| place.link);
            match &*step.body {
                Body::Send { .. } => links_of().for_each(|number| links.queue_send(number, to_send)),
                Body::Combine { .. } => {
                    queue_combine(progress, to_combine, *dependent);
                    if step.is_copy() {
                        links_of().for_each(|number| links.queue_recv(number, to_post_recv));
                    }
                }
            }
        }
    }

    fn needs_staging(&self, number: LinkNumber, step: StepId) -> bool {
        let Body::Send { buffer, .. } = &*self.program.steps[step as usize].body else {
            return false;
        };
        let (_, link) = self.links.get(number);
        match buffer {
            BufferKind::Input => link.staging.input,
            BufferKind::Output | BufferKind::Transit => link.staging.output,
        }
    }

    /// The vector that a send reads.
    fn source(&self, step: StepId) -> BufferKind {
        match *self.program.steps[step as usize].body {
            Body::Send { buffer, .. } => buffer,
            Body::Combine { .. } => unreachable!("only sends have messages to peers"),
        }
    }

    fn queue_send(&mut self, number: LinkNumber) {
        self.links.queue_send(number, &mut self.to_send);
    }

    fn queue_recv(&mut self, number: LinkNumber) {
        self.links.queue_recv(number, &mut self.to_post_recv);
    }

    fn queue_combine(&mut self, step: StepId) {
        queue_combine(&mut self.progress, &mut self.to_combine, step);
    }
}

fn queue_combine(progress: &mut StepProgress, to_combine: &mut VecDeque<StepId>, step: StepId) {
    if progress.queue(step) {
        to_combine.push_back(step);
    }
}

fn unexpected(what: &str, peer: Rank) -> Violation {
    Violation(format!("unexpected {what} on the link to rank {peer}"))
}
