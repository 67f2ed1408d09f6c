//! The two boards of a link: what the peer writes for this rank, and what this rank is about to write for the peer.
//!
//! Owns the copying in and out of them. Must not know what makes anybody write. The peer's device writes to the
//! inbox whenever it likes; what is read there was announced by a completion, and is checked by whoever uses it.

use super::wire::{CALL_WORDS, CTS_WORDS, ClearToSend, ControlLayout, RECOVERY_WORDS, RecoveryState};
use crate::call::{Call, CallWords};
use crate::memory::Piece;

/// One link's inbox and outbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlBuffer {
    remote: Piece,
    local: Piece,
    pub layout: ControlLayout,
}

impl ControlBuffer {
    /// ControlMemory in memory that outlives the link, both as long as the layout asks for.
    pub(super) fn new(remote: Piece, local: Piece, layout: ControlLayout) -> Self {
        assert!(
            remote.len() >= layout.bytes() && local.len() >= layout.bytes(),
            "boards as long as their layout"
        );
        Self { remote, local, layout }
    }

    /// A stretch of the outbox.
    pub(super) fn local_entry(&self, offset: usize, len: usize) -> Piece {
        self.local.narrow(offset, len)
    }

    fn write_entry<const N: usize>(&mut self, offset: usize, words: [u64; N]) {
        let entry = self.local.narrow(offset, N * size_of::<u64>());
        let words = words.map(u64::to_le);
        // SAFETY: the place lies within the outbox, which only this rank writes, and has room for the words. No
        // request that still reads it is under way: places are used again when the peer has moved on.
        unsafe { entry.as_ptr().copy_from_nonoverlapping(words.as_ptr().cast(), entry.len()) };
    }

    fn read_entry<const N: usize>(&self, offset: usize) -> [u64; N] {
        let entry = self.remote.narrow(offset, N * size_of::<u64>());
        let mut words = [0u64; N];
        // SAFETY: the place lies within the inbox. Its completion was polled, so the peer's device is done with it;
        // a peer that breaks the rules changes numbers, which are checked, and nothing else.
        unsafe { entry.as_ptr().copy_to_nonoverlapping(words.as_mut_ptr().cast(), entry.len()) };
        words.map(u64::from_le)
    }

    /// Puts a call alone; where it is.
    pub(super) fn write_call(&mut self, epoch: u64, call: &Call) -> (usize, usize) {
        let offset = self.layout.call(epoch);
        self.write_entry(offset, call.to_words());
        (offset, CALL_WORDS * size_of::<u64>())
    }

    /// The peer's call, as it stands alone or before its first message.
    pub(super) fn read_call(&self, epoch: u64, with_message: bool) -> Option<Call> {
        let at = if with_message { self.layout.eager(epoch, 0) } else { self.layout.call(epoch) };
        let words: CallWords = self.read_entry(at);
        Call::from_words(words)
    }

    /// Puts the call before the first message; where both are, given the message's length.
    pub(super) fn write_eager_call(&mut self, epoch: u64, call: &Call, len: usize) -> (usize, usize) {
        let offset = self.layout.eager(epoch, 0);
        self.write_entry(offset, call.to_words());
        (offset, self.layout.eager_bytes(epoch, 0) - offset + len)
    }

    /// Puts a short message; where it is.
    pub(super) fn write_eager(&mut self, epoch: u64, message: u64, piece: Piece) -> (usize, usize) {
        let offset = self.layout.eager_bytes(epoch, message);
        let entry = self.local.narrow(offset, piece.len());
        // SAFETY: both are as long, the message is valid for the operation that it belongs to, and the outbox is
        // nobody else's memory.
        unsafe { entry.as_ptr().copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        (offset, piece.len())
    }

    /// Takes a short message of the peer's that has come.
    pub(super) fn read_eager(&self, epoch: u64, message: u64, into: Piece) {
        let entry = self.remote.narrow(self.layout.eager_bytes(epoch, message), into.len());
        // SAFETY: both are as long, and the landing is valid and this rank's alone for the operation.
        unsafe { entry.as_ptr().copy_to_nonoverlapping(into.as_ptr(), into.len()) };
    }

    pub(super) fn write_cts(&mut self, epoch: u64, message: u64, cts: ClearToSend) {
        self.write_entry(self.layout.cts(epoch, message), cts.to_words());
    }

    /// Where the grants of these messages are, which do not go round the end of their ring.
    pub(super) fn cts_range(&self, epoch: u64, messages: std::ops::Range<u64>) -> (usize, usize) {
        let len = (messages.end - messages.start) as usize * CTS_WORDS * size_of::<u64>();
        (self.layout.cts(epoch, messages.start), len)
    }

    pub(super) fn read_cts(&self, epoch: u64, message: u64) -> ClearToSend {
        ClearToSend::from_words(self.read_entry::<CTS_WORDS>(self.layout.cts(epoch, message)))
    }

    /// Puts what this rank knows; where it is.
    pub(super) fn write_recovery(&mut self, qp: usize, state: RecoveryState) -> (usize, usize) {
        let offset = self.layout.recovery(qp);
        self.write_entry(offset, state.to_words());
        (offset, RECOVERY_WORDS * size_of::<u64>())
    }

    pub(super) fn read_recovery(&self, qp: usize) -> RecoveryState {
        RecoveryState::from_words(self.read_entry::<RECOVERY_WORDS>(self.layout.recovery(qp)))
    }
}
