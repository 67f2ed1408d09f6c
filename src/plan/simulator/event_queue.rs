//! The events to come, by time.
//!
//! Owns their order, and the numbers by which they name things. Must not know what an event means.

use crate::plan::Rank;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Picoseconds since the call began.
pub type VirtualTime = u64;

/// Number of a transfer in progress.
pub type FlowId = u32;

/// Number of a channel: one for each rank and each of its peers.
pub type ChannelId = u32;

/// What happens at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimulatedEvent {
    /// The last bit of a transfer was sent, if the flow still has this number of changes.
    FlowEnds { flow: FlowId, changes: u32 },
    /// The last bit of a message arrived.
    Arrives { channel: ChannelId },
    /// The receiver was notified of a message that it reads in place.
    Announced { channel: ChannelId },
    /// The sender was notified that a message was read.
    Released { channel: ChannelId },
    /// A rank's addition or copy ended, as far as its thread is concerned.
    JobEnds { rank: u32 },
}

/// Events in the order of their times; those of one time in the order in which they were added.
#[derive(Debug, Default)]
pub struct EventQueue {
    heap: BinaryHeap<Reverse<(VirtualTime, u64, SimulatedEvent)>>,
    added: u64,
}

impl EventQueue {
    pub fn add(&mut self, time: VirtualTime, event: SimulatedEvent) {
        self.added += 1;
        self.heap.push(Reverse((time, self.added, event)));
    }

    pub fn job_ends(&mut self, time: VirtualTime, rank: Rank) {
        self.add(time, SimulatedEvent::JobEnds { rank: rank as u32 });
    }

    /// The time of the next event.
    pub fn next_time(&self) -> Option<VirtualTime> {
        self.heap.peek().map(|Reverse((time, ..))| *time)
    }

    /// The next event, if it is due at this time.
    pub fn pop_at(&mut self, now: VirtualTime) -> Option<SimulatedEvent> {
        if self.next_time() != Some(now) {
            return None;
        }
        self.heap.pop().map(|Reverse((_, _, event))| event)
    }
}
