//! What this rank sends in one epoch of a link.

use super::super::registry::RegisteredMemory;
use super::super::wire::{EAGER_MESSAGES, WINDOW};
use super::carried::CarriedWrites;
use crate::call::Call;
use crate::memory::Piece;
use std::sync::Arc;

/// Whether a message is eager, in a call whose longest eager message has this many bytes; `None` if it has no
/// such messages.
pub(super) fn is_eager(longest: Option<usize>, message: u64, len: usize) -> bool {
    message < EAGER_MESSAGES && longest.is_some_and(|longest| len <= longest)
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
    /// Bytes of the longest eager message; `None` if there are none.
    longest_eager: Option<usize>,
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
    /// Begins an epoch with this call, whose longest eager message has this many bytes.
    pub(super) fn restart(&mut self, call: Call, longest_eager: Option<usize>) {
        (self.call, self.call_posted, self.longest_eager) = (Some(call), false, longest_eager);
        (self.queued, self.posted, self.reported) = (0, 0, 0);
    }

    /// Whether a message of this length is eager.
    pub(super) fn is_eager(&self, message: u64, len: usize) -> bool {
        is_eager(self.longest_eager, message, len)
    }

    /// A message within the window.
    pub(super) fn message(&mut self, number: u64) -> &mut OutgoingMessage {
        self.messages[number as usize % WINDOW].as_mut().expect("the message is within the window")
    }

    /// The length of a message within the window.
    pub(super) fn message_len(&self, number: u64) -> usize {
        self.messages[number as usize % WINDOW].as_ref().map_or(0, |message| message.piece.len())
    }

    /// The length of the first message, if there is one and it is eager.
    pub(super) fn eager_first(&self) -> Option<usize> {
        let first = self.messages[0].as_ref().filter(|_| self.queued > 0)?;
        let len = first.piece.len();
        self.is_eager(0, len).then_some(len)
    }
}
