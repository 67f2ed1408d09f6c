//! The messages of other ranks that have arrived and are unread.
//!
//! Owns their order and the limit on their length.

use super::protocol::FRAME_LIMIT;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wake::WakeFd;
use std::collections::VecDeque;
use std::sync::Arc;

/// Memory of unread messages at most, in bytes.
const UNREAD_LIMIT: usize = FRAME_LIMIT;
/// Memory of a message besides its bytes.
const OVERHEAD: usize = 32;

/// The messages of other ranks that are unread.
#[derive(Debug, Default)]
pub(super) struct PeerMessageQueue {
    messages: VecDeque<(Rank, Vec<u8>)>,
    /// Memory of all messages.
    bytes: usize,
    /// Notified of each message.
    wake: Option<Arc<WakeFd>>,
}

impl PeerMessageQueue {
    /// Adds a message, and wakes the reader.
    ///
    /// # Errors
    /// `Disagreement` if too many are unread.
    pub(super) fn push(&mut self, from: Rank, message: Vec<u8>) -> Result<()> {
        let bytes = message.len() + OVERHEAD;
        if self.bytes + bytes > UNREAD_LIMIT {
            return Err(Error::disagreement(format!(
                "more than {UNREAD_LIMIT} bytes of messages from other ranks are unread, the last one of rank {from}; do all \
                 ranks run the same version?"
            )));
        }
        self.bytes += bytes;
        self.messages.push_back((from, message));
        if let Some(wake) = &self.wake {
            wake.notify();
        }
        Ok(())
    }

    /// Sets what is notified of each message, or nothing. It is notified at once if one is unread.
    pub(super) fn set_wake(&mut self, wake: Option<Arc<WakeFd>>) {
        if let Some(wake) = wake.as_ref().filter(|_| !self.is_empty()) {
            wake.notify();
        }
        self.wake = wake;
    }

    /// Whether no message is unread.
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Takes the oldest message.
    pub(super) fn pop(&mut self) -> Option<(Rank, Vec<u8>)> {
        let (from, message) = self.messages.pop_front()?;
        self.bytes -= message.len() + OVERHEAD;
        Some((from, message))
    }
}
