//! The order of the messages in one direction of a link, in one call.
//!
//! Owns message numbers: which message is which sub-chunk of which step. Must not know what a step waits for, nor
//! other links.

use super::bound_steps::BoundPlace;
use crate::plan::program::{LinkEntry, StepId};

/// The messages of one direction of a link, numbered from 0 in each call. Both ends derive the same order.
#[derive(Clone, Debug)]
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
        let messages = |entry: &LinkEntry| StepMessages { step: entry.step, base: 0 };
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

    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    /// The entry and sub-chunk of a message; `None` past the last message.
    pub(super) fn entry_of(&self, message: u64) -> Option<(usize, u64)> {
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

    /// How many of the first `messages` messages are of this entry, if messages are in the order of entries.
    pub(super) fn among_first(&self, entry: u32, messages: u64) -> u32 {
        let base = self.entries[entry as usize].base;
        let end = self.entries.get(entry as usize + 1).map_or(self.messages, |next| next.base.into());
        (messages.min(end) as u32).saturating_sub(base)
    }
}
