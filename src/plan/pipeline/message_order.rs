//! The order of the messages in one direction of a link, in one call.
//!
//! Owns message numbers: which message is which sub-chunk of which step. Must not know what a step waits for, nor
//! other links.

use crate::plan::program::{LinkEntry, StepId};

/// The elements of steps with one place, bound to a call.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundPlace {
    pub(super) start: u64,
    pub(super) end: u64,
    /// First element of the grid.
    pub(super) origin: u64,
    /// Sub-chunks of the grid.
    pub(super) cells: u64,
    /// Index in the grid of the first sub-chunk.
    pub(super) first: u64,
    /// Sub-chunks of each step.
    pub(super) subs: u32,
    /// The first step with this place.
    pub(super) step: StepId,
}

/// The progress of a step in a call. Large programs run through many of these, so they are small.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundStep {
    /// Index of its [`BoundPlace`].
    pub(super) place: u32,
    /// Combines: sub-chunks submitted to the device.
    pub(super) issued: u32,
    /// Combines: sub-chunks done.
    pub(super) done: u32,
    /// Whether it sends; otherwise it combines.
    pub(super) is_send: bool,
    /// Combines: whether the pipeline has queued it.
    pub(super) is_queued: bool,
}

/// The messages of one direction of a link, numbered from 0 in each call. Both ends derive the same order.
#[derive(Debug)]
pub(super) struct MessageOrder {
    entries: Vec<StepMessages>,
    messages: u64,
    /// Entry and sub-chunk of each message; empty if messages are in the order of entries.
    order: Vec<DueMessage>,
    /// Message number of each sub-chunk of each entry, by [`StepMessages::base`]; empty if messages are in the order of entries.
    numbers: Vec<u32>,
}

/// The messages of one step in this direction.
#[derive(Clone, Copy, Debug)]
struct StepMessages {
    step: StepId,
    /// Index in `numbers` of the step's first sub-chunk.
    base: u32,
    /// Sends: messages that are complete.
    completed: u32,
}

/// A message with its sort key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DueMessage {
    /// When the message is due, in waves; equal on both ends.
    due: u64,
    entry: u32,
    sub: u32,
}

impl MessageOrder {
    pub(super) fn new(entries: &[LinkEntry]) -> Self {
        let messages = |entry: &LinkEntry| StepMessages { step: entry.step, base: 0, completed: 0 };
        let entries = entries.iter().map(messages).collect();
        Self { entries, messages: 0, order: Vec::new(), numbers: Vec::new() }
    }

    /// Numbers the messages of a call. `bound` gives the place and the depth of a step, `waves` the number of waves and the lag of
    /// each hop behind the previous one, for programs that move in waves. A message is then due by the position of its
    /// sub-chunk in its grid plus the lag of its depth. Steps of one grid have rising depths, so whatever a message waits for is
    /// due before it. Positions are scaled to the number of waves, so short and long grids finish together and each link
    /// carries the same share of the work in every wave. Without waves, messages are ordered by step.
    pub(super) fn number<'a>(
        &mut self,
        bound: impl Fn(StepId) -> (&'a BoundPlace, u32),
        waves: Option<(u64, u64)>,
    ) {
        self.order.clear();
        self.numbers.clear();
        let mut total = 0;
        for (entry, messages) in (0..).zip(&mut self.entries) {
            let (place, depth) = bound(messages.step);
            messages.base = total;
            total += place.subs;
            let Some((waves, lag)) = waves else { continue };
            let due = |sub| (place.first + sub) * waves / place.cells + lag * u64::from(depth);
            self.order.extend((0..u64::from(place.subs)).map(|sub| DueMessage {
                due: due(sub),
                entry,
                sub: sub as u32,
            }));
        }
        self.messages = total.into();
        if waves.is_some() {
            self.order.sort_unstable();
            self.numbers.resize(self.order.len(), 0);
            for (message, ordered) in (0..).zip(&self.order) {
                self.numbers[(self.entries[ordered.entry as usize].base + ordered.sub) as usize] = message;
            }
        }
    }

    /// Starts a call that has the numbering of the previous one.
    pub(super) fn restart(&mut self) {
        self.entries.iter_mut().for_each(|messages| messages.completed = 0);
    }

    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    /// The entry and sub-chunk of a message; `None` past the last message.
    fn entry_of(&self, message: u64) -> Option<(usize, u64)> {
        if message >= self.messages {
            return None;
        }
        let at = message as usize;
        if let Some(ordered) = self.order.get(at) {
            return Some((ordered.entry as usize, ordered.sub.into()));
        }
        let base = |entry: usize| self.entries.get(entry).map(|messages| u64::from(messages.base));
        // Steps have one message each, unless the vector is long.
        let entry = if base(at) == Some(message) && base(at + 1).is_none_or(|next| next > message) {
            at
        } else {
            self.entries.partition_point(|messages| u64::from(messages.base) <= message) - 1
        };
        Some((entry, message - u64::from(self.entries[entry].base)))
    }

    /// The step and sub-chunk of a message; `None` past the last message.
    pub(super) fn get(&self, message: u64) -> Option<(StepId, u64)> {
        let (entry, sub) = self.entry_of(message)?;
        Some((self.entries[entry].step, sub))
    }

    /// Number of the message that carries a sub-chunk of the step of this entry.
    pub(super) fn message_of(&self, entry: u32, sub: u64) -> u64 {
        let place = u64::from(self.entries[entry as usize].base) + sub;
        self.numbers.get(place as usize).map_or(place, |message| u64::from(*message))
    }

    /// Counts a message as complete. It must be the next one of its step.
    pub(super) fn count_completed(&mut self, message: u64) {
        if let Some((entry, _)) = self.entry_of(message) {
            self.entries[entry].completed += 1;
        }
    }

    /// How many messages of an entry are complete.
    pub(super) fn completed(&self, entry: u32) -> u32 {
        self.entries[entry as usize].completed
    }
}
