//! The pipeline's output: actions, and the locations of the data that they name.
//!
//! Owns the vocabulary between the pipeline and the executor.

use crate::Rank;
use crate::program::{BufferKind, StepId};

/// Number of a slot in the pool, from 0.
pub type Slot = u32;

/// Where the bytes of a message are, as seen by this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// In one of the caller's vectors.
    Buffer(BufferKind),
    /// In a slot of the pool, from the slot's first byte.
    Slot(Slot),
    /// In the memory of `peer`, which this rank reads in place.
    Peer {
        /// The sender.
        peer: Rank,
        /// Sequence number of the message on its link in this call, from 0.
        message: u64,
    },
}

/// A request to the executor. A step and a sub-chunk index (from 0 within the step) name a range of elements;
/// see [`Pipeline::elements`](super::Pipeline::elements).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Copy the elements from a vector to a slot, then call
    /// [`Pipeline::stage_complete`](super::Pipeline::stage_complete) with the same step and sub-chunk.
    Stage {
        /// The send that reads the slot.
        step: StepId,
        /// Sub-chunk index within the step.
        sub: u64,
        /// The vector to copy from.
        buffer: BufferKind,
        /// The slot to copy to.
        slot: Slot,
    },
    /// Send the elements as the next message to the peer.
    Send {
        /// The receiver.
        peer: Rank,
        /// The memory to send from: a vector or a slot.
        location: Location,
        /// The step that sends.
        step: StepId,
        /// Sub-chunk index within the step.
        sub: u64,
    },
    /// Post a receive for the peer's next message that has none yet.
    PostRecv {
        /// The sender.
        peer: Rank,
        /// The memory to receive into: the output or a slot.
        location: Location,
        /// The step that uses the message.
        step: StepId,
        /// Sub-chunk index within the step.
        sub: u64,
    },
    /// Add the operands of the step, then call
    /// [`Pipeline::combine_complete`](super::Pipeline::combine_complete).
    Combine {
        /// The step that adds.
        step: StepId,
        /// Sub-chunk index within the step.
        sub: u64,
    },
    /// Inform the peer that this rank no longer reads its oldest message.
    Release {
        /// The sender of the message.
        peer: Rank,
    },
}
