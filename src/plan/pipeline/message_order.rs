//! The order of the messages in one direction of a link, in one call.
//!
//! Owns message numbers: which message is which sub-chunk of which step. Must not know what a step waits for, nor
//! other links.

use crate::plan::program::{LinkEntry, StepId};

/// A step bound to a call: its elements, its sub-chunks and its progress.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundStep {
    pub(super) start: u64,
    pub(super) end: u64,
    /// First element of the step's grid.
    pub(super) origin: u64,
    /// Sub-chunks of the grid.
    pub(super) cells: u64,
    /// Index in the grid of the step's first sub-chunk.
    pub(super) first: u64,
    /// Sub-chunks of the step.
    pub(super) subs: u32,
    /// Combines: sub-chunks submitted to the device.
    pub(super) issued: u32,
    /// Combines: sub-chunks done.
    pub(super) done: u32,
    /// Hops of the collective before this step.
    pub(super) depth: u32,
    /// Whether it sends; otherwise it combines.
    pub(super) is_send: bool,
    /// Combines: whether the pipeline has queued it.
    pub(super) is_queued: bool,
}

/// The messages of one direction of a link, numbered from 0 in each call. Both ends derive the same order.
#[derive(Debug)]
pub(super) struct MessageOrder {
    entries: Vec<StepMessages>,
    /// Entry and sub-chunk of each message.
    order: Vec<DueMessage>,
    /// Message number of each sub-chunk of each entry; see [`StepMessages::base`].
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
        Self { entries: entries.iter().map(messages).collect(), order: Vec::new(), numbers: Vec::new() }
    }

    /// Numbers the messages of a call. `waves` is the number of waves and the lag of each hop behind the previous
    /// one, for programs that move in waves. A message is then due by the position of its sub-chunk in its grid plus
    /// the lag of its depth. Steps of one grid have rising depths, so whatever a message waits for is due before it.
    /// Positions are scaled to the number of waves, so short and long grids finish together and each link carries
    /// the same share of the work in every wave. Without waves, messages are ordered by step.
    pub(super) fn number(&mut self, steps: &[BoundStep], waves: Option<(u64, u64)>) {
        self.order.clear();
        for (entry, messages) in (0..).zip(&mut self.entries) {
            let bound = &steps[messages.step as usize];
            messages.base = self.order.len() as u32;
            let due = |sub| {
                waves.map_or(0, |(waves, lag)| {
                    (bound.first + sub) * waves / bound.cells + lag * u64::from(bound.depth)
                })
            };
            self.order.extend((0..u64::from(bound.subs)).map(|sub| DueMessage {
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

    /// Starts a call that has the numbering of the previous one.
    pub(super) fn restart(&mut self) {
        self.entries.iter_mut().for_each(|messages| messages.completed = 0);
    }

    pub(super) fn messages(&self) -> u64 {
        self.order.len() as u64
    }

    /// The step and sub-chunk of a message; `None` past the last message.
    pub(super) fn get(&self, message: u64) -> Option<(StepId, u64)> {
        let ordered = self.order.get(message as usize)?;
        Some((self.entries[ordered.entry as usize].step, ordered.sub.into()))
    }

    /// Number of the message that carries a sub-chunk of the step of this entry.
    pub(super) fn message_of(&self, entry: u32, sub: u64) -> u64 {
        self.numbers[self.entries[entry as usize].base as usize + sub as usize].into()
    }

    /// Counts a message as complete. It must be the next one of its step.
    pub(super) fn count_completed(&mut self, message: u64) {
        let entry = self.order[message as usize].entry;
        self.entries[entry as usize].completed += 1;
    }

    /// How many messages of an entry are complete.
    pub(super) fn completed(&self, entry: u32) -> u32 {
        self.entries[entry as usize].completed
    }
}
