//! What the pipeline says and is told: actions, places, and what a call is about.

use crate::plan::Rank;
use crate::plan::program::{BufferKind, StepId};

/// A slot of the pool, by number.
pub type Slot = u32;

/// How one link hands messages over; what the transport of the link says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    /// Whether received messages are read where they are; otherwise they land where this rank says.
    pub in_place: bool,
    /// Messages under way at most, in each direction.
    pub window: usize,
    /// Slots that messages to the peer may hold while they are staged.
    pub send_slots: usize,
    /// Slots that messages from the peer may hold. Apart from the others: a landing is made long before its
    /// message is due, and must not keep an earlier message to the peer from leaving.
    pub recv_slots: usize,
}

/// What of the caller's memory a link cannot take as it lies in a call, so that a slot stands in for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staging {
    /// Sending from the input.
    pub input: bool,
    /// Sending from the output.
    pub output: bool,
    /// Landing in the output.
    pub recv: bool,
}

/// What a call is about, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Elements of the vector.
    pub count: u64,
    /// Elements of a sub-chunk, at least 1.
    pub subchunk: u64,
    /// Span boundaries are multiples of this many elements.
    pub align: u64,
    /// Whether input and output are the same memory.
    pub in_place: bool,
}

/// Where a message's bytes are, on the side that has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// In a vector of the caller.
    Buffer(BufferKind),
    /// In a slot of the pool, from its start.
    Slot(Slot),
    /// Where the peer has it: the `message`-th of this call on the link from `peer`.
    Peer {
        /// From whom.
        peer: Rank,
        /// Its place on its link, from 0.
        message: u64,
    },
}

/// What the executor shall do. Elements are ranges of the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Copy these elements of a vector to the slot, then say [`Pipeline::stage_complete`](super::Pipeline::stage_complete) with the
    /// same step and sub-chunk.
    Stage {
        /// The send that this is for.
        step: StepId,
        /// Which of its sub-chunks.
        sub: u64,
        /// From which vector.
        buffer: BufferKind,
        /// Where to.
        slot: Slot,
    },
    /// Send these elements as the next message to the peer.
    Send {
        /// To whom.
        peer: Rank,
        /// Where they are.
        location: Location,
        /// The step and sub-chunk that they belong to.
        step: StepId,
        /// Which of its sub-chunks.
        sub: u64,
    },
    /// Have the peer's next message that has no landing yet written here.
    PostRecv {
        /// From whom.
        peer: Rank,
        /// Where to: the output or a slot.
        location: Location,
        /// The step and sub-chunk that it belongs to.
        step: StepId,
        /// Which of its sub-chunks.
        sub: u64,
    },
    /// Add the operands of the step, then say [`Pipeline::combine_complete`](super::Pipeline::combine_complete).
    Combine {
        /// The step.
        step: StepId,
        /// Which of its sub-chunks.
        sub: u64,
    },
    /// Tell the peer that its oldest message is no longer read.
    Release {
        /// Who.
        peer: Rank,
    },
}
