//! What moves over one link in one call: which message is which sub-chunk of which step, and how far each
//! message has come.
//!
//! Owns the numbers of messages. Must not know what a step waits for, nor what the other links do.

use super::{LinkProfile, Slot, Staging};
use crate::plan::program::{LinkEntry, StepId};
use std::collections::VecDeque;

/// A step's elements in this call, and how far it has come.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundStep {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Where its grid begins, how many sub-chunks that has, and the number among them of its own first.
    pub(super) origin: u64,
    pub(super) cells: u64,
    pub(super) first: u64,
    pub(super) subs: u64,
    /// Combines: sub-chunks handed to the device.
    pub(super) issued: u64,
    /// Combines: sub-chunks done.
    pub(super) done: u64,
    /// How many hops come before it, if that matters to the order of messages.
    pub(super) depth: u64,
}

/// One direction of a link. Messages are numbered from 0 in each call.
#[derive(Debug)]
pub(super) struct MessageOrder {
    entries: Vec<StepMessages>,
    /// By message: the entry and the sub-chunk.
    order: Vec<DueMessage>,
    /// By entry and sub-chunk: the message.
    numbers: Vec<u32>,
}

/// What one step sends or receives over this lane, bound to this call.
#[derive(Clone, Copy, Debug)]
struct StepMessages {
    entry: LinkEntry,
    /// Where its messages begin in `numbers`.
    base: u32,
    /// Its sub-chunks whose messages are over, for lanes that count them.
    completed: u64,
}

/// A message on its way to its place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DueMessage {
    /// When it is due, in sub-chunks; the same on both ends.
    due: u64,
    entry: u32,
    sub: u32,
}

impl MessageOrder {
    pub(super) fn new(entries: &[LinkEntry]) -> Self {
        let messages = |entry: &LinkEntry| StepMessages { entry: *entry, base: 0, completed: 0 };
        Self { entries: entries.iter().map(messages).collect(), order: Vec::new(), numbers: Vec::new() }
    }

    /// Numbers the messages of a call. Where steps move in waves, given as their number and the lag of each hop
    /// behind the one before, a message is due by the place of its sub-chunk on its grid and by its depth; steps of
    /// one grid have rising depths, so what a message waits for is due before it. Grids of different lengths keep
    /// step, so that the share of the work that each link has stays the same from the first wave to the last.
    /// Otherwise one step comes after the other.
    pub(super) fn number(&mut self, steps: &[BoundStep], waves: Option<(u64, u64)>) {
        self.order.clear();
        for (entry, messages) in (0..).zip(&mut self.entries) {
            let bound = &steps[messages.entry.step as usize];
            messages.base = self.order.len() as u32;
            let due = |sub| {
                waves.map_or(0, |(waves, lag)| (bound.first + sub) * waves / bound.cells + lag * bound.depth)
            };
            self.order.extend((0..bound.subs).map(|sub| DueMessage {
                due: due(sub),
                entry,
                sub: sub as u32,
            }));
        }
        if waves.is_some() {
            self.order.sort_unstable();
        }
        self.numbers.resize(self.order.len(), 0);
        for (message, ordered) in (0..).zip(&self.order) {
            self.numbers[(self.entries[ordered.entry as usize].base + ordered.sub) as usize] = message;
        }
    }

    /// Begins a call that is numbered like the one before it.
    pub(super) fn restart(&mut self) {
        self.entries.iter_mut().for_each(|messages| messages.completed = 0);
    }

    pub(super) fn messages(&self) -> u64 {
        self.order.len() as u64
    }

    /// The step and sub-chunk of a message, if there is such a message.
    pub(super) fn get(&self, message: u64) -> Option<(StepId, u64)> {
        let ordered = self.order.get(message as usize)?;
        Some((self.entries[ordered.entry as usize].entry.step, ordered.sub.into()))
    }

    /// The message that carries a step's sub-chunk; `part` as in [`LinkEntry`].
    pub(super) fn message_of(&self, step: StepId, part: u32, sub: u64) -> u64 {
        self.numbers[self.find(step, part).base as usize + sub as usize].into()
    }

    /// Counts a message, which is the next of its step, as over.
    pub(super) fn count_completed(&mut self, message: u64) {
        let entry = self.order[message as usize].entry;
        self.entries[entry as usize].completed += 1;
    }

    /// How many of a step's messages are over.
    pub(super) fn completed(&self, step: StepId, part: u32) -> u64 {
        self.find(step, part).completed
    }

    /// A step stands in a lane's list in the order of steps.
    fn find(&self, step: StepId, part: u32) -> &StepMessages {
        let found = self
            .entries
            .binary_search_by_key(&(step, part), |messages| (messages.entry.step, messages.entry.part));
        &self.entries[found.expect("the step is in the list of its link")]
    }
}

/// What is remembered of a message that was planned to be sent and not yet reported as sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSend {
    pub(super) step: StepId,
    pub(super) sub: u64,
    /// Whether its bytes are where they are sent from; false while they are being staged.
    pub(super) ready: bool,
    pub(super) slot: Option<Slot>,
}

/// What is remembered of a message that was landed or has arrived and is still needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRecv {
    pub(super) slot: Option<Slot>,
    pub(super) consumed: bool,
}

/// One link's traffic in this call.
#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) profile: LinkProfile,
    pub(super) staging: Staging,
    pub(super) sends: MessageOrder,
    pub(super) receives: MessageOrder,
    /// Messages planned for sending.
    pub(super) planned: u64,
    /// Messages handed to the transport.
    pub(super) send_posted: u64,
    /// Messages whose sending was reported.
    pub(super) send_completed: u64,
    /// Messages given a landing.
    pub(super) recv_posted: u64,
    /// Messages that arrived or landed.
    pub(super) recv_completed: u64,
    /// Messages given back to the sender.
    pub(super) released: u64,
    pub(super) send_slots_held: usize,
    pub(super) recv_slots_held: usize,
    pub(super) outgoing: WindowRing<PendingSend>,
    pub(super) incoming: WindowRing<PendingRecv>,
    pub(super) send_queued: bool,
    pub(super) recv_queued: bool,
}

impl LinkState {
    pub(super) fn new(profile: LinkProfile, sends: &[LinkEntry], receives: &[LinkEntry]) -> Self {
        Self {
            profile,
            staging: Staging::default(),
            sends: MessageOrder::new(sends),
            receives: MessageOrder::new(receives),
            planned: 0,
            send_posted: 0,
            send_completed: 0,
            recv_posted: 0,
            recv_completed: 0,
            released: 0,
            send_slots_held: 0,
            recv_slots_held: 0,
            outgoing: WindowRing::new(profile.window),
            incoming: WindowRing::new(profile.window),
            send_queued: false,
            recv_queued: false,
        }
    }

    /// Forgets the call before.
    pub(super) fn restart(&mut self, staging: Staging) {
        self.staging = staging;
        self.sends.restart();
        self.receives.restart();
        (self.planned, self.send_posted, self.send_completed) = (0, 0, 0);
        (self.recv_posted, self.recv_completed, self.released) = (0, 0, 0);
        (self.send_slots_held, self.recv_slots_held) = (0, 0);
        self.send_queued = true;
        self.recv_queued = !self.profile.in_place;
    }

    /// Whether as many messages are under way as may be.
    pub(super) fn is_full(&self) -> bool {
        self.planned - self.send_completed >= self.profile.window as u64
    }

    pub(super) fn plan_send(&mut self, outgoing: PendingSend) {
        self.outgoing.set(self.planned, outgoing);
        self.planned += 1;
    }

    /// Gives consumed messages back, oldest first; tells the peer by `releases`.
    pub(super) fn release_consumed(&mut self, peer: usize, mut releases: Option<&mut VecDeque<usize>>) {
        while self.released < self.recv_completed && self.incoming.get(self.released).consumed {
            self.released += 1;
            if let Some(releases) = releases.as_deref_mut() {
                releases.push_back(peer);
            }
        }
    }
}

/// Entries by message number, as many as the window admits.
#[derive(Debug)]
pub(super) struct WindowRing<T>(Vec<Option<T>>);

impl<T: Copy> WindowRing<T> {
    fn new(window: usize) -> Self {
        Self(vec![None; window])
    }
    pub(super) fn set(&mut self, message: u64, entry: T) {
        let at = self.index(message);
        self.0[at] = Some(entry);
    }
    pub(super) fn get(&mut self, message: u64) -> &mut T {
        let at = self.index(message);
        self.0[at].as_mut().expect("the message is within the window")
    }
    pub(super) fn peek(&self, message: u64) -> Option<T> {
        self.0[self.index(message)]
    }
    fn index(&self, message: u64) -> usize {
        (message % self.0.len() as u64) as usize
    }
}
