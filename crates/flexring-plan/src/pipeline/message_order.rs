//! The order of the messages in one direction of a link, in one call.
//!
//! Owns message numbers: which message is which sub-chunk of which step.

use super::bound_steps::BoundPlace;
use crate::program::{LinkEntry, StepId};

/// The messages of one direction of a link, numbered from 0 in each call. Both ends derive the same order.
#[derive(Clone, Debug)]
pub(super) struct MessageOrder {
    /// By entry, and one at the end for the messages past the last one.
    entries: Vec<StepMessages>,
    messages: u32,
    /// Entry and sub-chunk of each message; empty if messages are in the order of entries.
    order: Vec<DueMessage>,
    /// Message number of each sub-chunk of each entry, by [`StepMessages::base`]; empty if messages are in
    /// the order of entries.
    numbers: Vec<u32>,
}

/// The messages of one step in this direction.
#[derive(Clone, Copy, Debug)]
struct StepMessages {
    step: StepId,
    /// See [`LinkEntry::part`].
    part: u32,
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

/// A place in the order of messages, which moves from each message to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MessageCursor {
    /// Number of the message: how many are before it.
    message: u32,
    /// Its entry, if messages are in the order of entries.
    entry: u32,
}

/// One message of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderedMessage {
    pub(super) step: StepId,
    pub(super) sub: u32,
    /// See [`LinkEntry::part`].
    pub(super) part: u32,
    /// The index of the step among those that have messages in this direction of the link.
    pub(super) entry: u32,
}

impl MessageCursor {
    /// Number of the message.
    pub(super) fn number(self) -> u32 {
        self.message
    }
}

impl MessageOrder {
    pub(super) fn new(entries: &[LinkEntry]) -> Self {
        let messages = |entry: &LinkEntry| StepMessages { step: entry.step, part: entry.part, base: 0 };
        let end = LinkEntry { step: StepId::MAX, part: 0 };
        let entries = entries.iter().chain([&end]).map(messages).collect();
        Self { entries, messages: 0, order: Vec::new(), numbers: Vec::new() }
    }

    /// Numbers the messages of a call. `bound` gives the place and the depth of a step, `waves` the number of
    /// waves and the lag of each hop behind the previous one, for programs that move in waves. A message is
    /// then due by the position of its sub-chunk in its grid plus the lag of its depth. Steps of one grid
    /// have rising depths, and rings of scratch memory are so long that a sub-chunk waits for earlier ones
    /// only, so whatever a message waits for is due before it. Positions are scaled to the number of waves,
    /// so short and long grids finish together and each link carries the same share of the work in every
    /// wave. Without waves, messages are ordered by step.
    pub(super) fn number<'a>(
        &mut self,
        bound: impl Fn(StepId) -> (&'a BoundPlace, u32),
        waves: Option<(u64, u64)>,
    ) {
        self.order.clear();
        self.numbers.clear();
        let mut total = 0;
        let Some((end, entries)) = self.entries.split_last_mut() else { return };
        for (entry, messages) in (0..).zip(entries) {
            let (place, depth) = bound(messages.step);
            messages.base = total;
            total += place.subs;
            let Some(waves) = waves else { continue };
            self.order.extend((0..place.subs).map(|sub| DueMessage {
                due: place.due(sub, waves, depth),
                entry,
                sub,
            }));
        }
        end.base = total;
        self.messages = total;
        if waves.is_some() {
            self.order.sort_unstable();
            self.numbers.resize(self.order.len(), 0);
            for (message, ordered) in (0..).zip(&self.order) {
                self.numbers[(self.entries[ordered.entry as usize].base + ordered.sub) as usize] = message;
            }
        }
    }

    pub(super) fn messages(&self) -> u32 {
        self.messages
    }

    /// Number of steps with messages in this direction.
    pub(super) fn entries(&self) -> usize {
        self.entries.len() - 1
    }

    /// The place of the first message.
    pub(super) fn first(&self) -> MessageCursor {
        let mut cursor = MessageCursor::default();
        self.skip_empty(&mut cursor);
        cursor
    }

    /// The message at a place; `None` past the last message.
    pub(super) fn get(&self, cursor: MessageCursor) -> Option<OrderedMessage> {
        if cursor.message >= self.messages {
            return None;
        }
        let (entry, sub) = match self.order.get(cursor.message as usize) {
            Some(ordered) => (ordered.entry, ordered.sub),
            None => (cursor.entry, cursor.message - self.entries[cursor.entry as usize].base),
        };
        let StepMessages { step, part, .. } = self.entries[entry as usize];
        Some(OrderedMessage { step, sub, part, entry })
    }

    /// Moves a place to the next message.
    pub(super) fn advance(&self, cursor: &mut MessageCursor) {
        cursor.message += 1;
        if self.order.is_empty() {
            self.skip_empty(cursor);
        }
    }

    /// Moves a place to the next entry with messages if it is past the last one of its entry.
    fn skip_empty(&self, cursor: &mut MessageCursor) {
        while self.entries.get(cursor.entry as usize + 1).is_some_and(|next| next.base <= cursor.message) {
            cursor.entry += 1;
        }
    }

    /// Number of the message that carries a sub-chunk of the step of this entry.
    pub(super) fn message_of(&self, entry: u32, sub: u32) -> u32 {
        let place = self.entries[entry as usize].base + sub;
        self.numbers.get(place as usize).map_or(place, |message| *message)
    }

    /// How many of the first `messages` messages are of this entry, if messages are in the order of entries.
    pub(super) fn among_first(&self, entry: u32, messages: u32) -> u32 {
        let (base, end) = (self.entries[entry as usize].base, self.entries[entry as usize + 1].base);
        messages.min(end).saturating_sub(base)
    }
}
