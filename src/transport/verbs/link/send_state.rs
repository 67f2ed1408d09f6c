//! What this rank sends in one epoch of a link.

use super::super::registry::RegisteredMemory;
use super::super::wire::{EAGER_MESSAGES, MAX_EAGER_BYTES, WINDOW};
use super::carried::CarriedWrites;
use crate::call::Call;
use crate::memory::Piece;
use std::sync::Arc;

/// Whether a message is eager, in a call that is `on_gpu` or not. Control buffers are host memory, so the messages of
/// a call on GPUs never are.
pub(super) fn is_eager(on_gpu: bool, message: u64, len: usize) -> bool {
    !on_gpu && message < EAGER_MESSAGES && len <= MAX_EAGER_BYTES
}

/// A message that was passed to [`Link::send`](super::Link::send) and not yet reported as sent.
#[derive(Debug)]
pub(super) struct OutgoingMessage {
    pub piece: Piece,
    /// Keeps the memory registered; `None` for an eager message.
    pub region: Option<Arc<RegisteredMemory>>,
    /// Whether the caller may change its bytes again.
    pub done: bool,
}

/// What this rank sends in one epoch.
#[derive(Debug, Default)]
pub(super) struct SendState {
    pub call: Option<Call>,
    pub call_posted: bool,
    /// Messages passed to `send`.
    pub queued: u64,
    /// Messages posted to a queue pair: the number of the next to post.
    pub posted: u64,
    /// Messages reported as sent.
    pub reported: u64,
    /// By message number modulo the window.
    pub messages: [Option<OutgoingMessage>; WINDOW],
    /// What the peer may not have received, of this epoch's messages and of the CTS entries for the peer's.
    pub carried: CarriedWrites,
}

impl SendState {
    /// Begins an epoch with this call.
    pub(super) fn restart(&mut self, call: Call) {
        (self.call, self.call_posted) = (Some(call), false);
        (self.queued, self.posted, self.reported) = (0, 0, 0);
    }

    /// Whether the call of this epoch is on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.call.is_some_and(|call| call.on_gpu)
    }

    /// Whether the next message to queue is eager at this length.
    pub(super) fn next_is_eager(&self, len: usize) -> bool {
        is_eager(self.is_on_gpu(), self.queued, len)
    }

    /// A message within the window.
    pub(super) fn message(&mut self, number: u64) -> &mut OutgoingMessage {
        self.messages[number as usize % WINDOW].as_mut().expect("the message is within the window")
    }

    /// The length of the first message, if there is one and it is eager.
    pub(super) fn eager_first(&self) -> Option<usize> {
        let first = self.messages[0].as_ref().filter(|_| self.queued > 0)?;
        let len = first.piece.len();
        is_eager(self.is_on_gpu(), 0, len).then_some(len)
    }
}
