//! The control buffer of a link: entries that the peer writes for this rank, and entries that this rank
//! prepares to write for the peer.
//!
//! Owns the copying in and out. The peer's device may write to the remote
//! side at any time; an entry is read only after its completion, and its reader validates it.

use super::wire::{
    CALL_BYTES, CTS_BYTES, CallEntry, ClearToSend, ControlLayout, RECOVERY_BYTES, RecoveryState,
};
use crate::call::{Call, CallWords};
use crate::memory::Piece;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Where an entry is in either side: its offset and length in bytes.
pub(super) type EntryRange = (usize, usize);

/// Both sides of one link's control buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlBuffer {
    /// Written by the peer.
    remote: Piece,
    /// Written by this rank; the source of its RDMA writes.
    local: Piece,
    pub layout: ControlLayout,
}

impl ControlBuffer {
    /// A control buffer in memory that outlives the link, both sides at least as long as the layout asks for.
    pub(super) fn new(remote: Piece, local: Piece, layout: ControlLayout) -> Self {
        assert!(
            remote.len() >= layout.bytes() && local.len() >= layout.bytes(),
            "a control buffer as long as its layout"
        );
        Self { remote, local, layout }
    }

    /// A range of the local side.
    pub(super) fn local_range(&self, (offset, len): EntryRange) -> Piece {
        self.local.narrow(offset, len)
    }

    fn write_entry(&mut self, offset: usize, entry: &(impl IntoBytes + Immutable)) {
        let bytes = entry.as_bytes();
        let to = self.local.narrow(offset, bytes.len());
        // SAFETY: `to` lies within the local side, which only this rank writes, and is as long as `bytes`. No
        // request that still reads it is in flight: entries are reused when the peer has entered a later
        // epoch.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read_entry<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let mut entry = T::new_zeroed();
        let bytes = entry.as_mut_bytes();
        let from = self.remote.narrow(offset, bytes.len());
        // SAFETY: `from` lies within the remote side and is as long as `bytes`. The completion of the write
        // was polled, so the peer's device is done with it. A peer that violates the protocol only changes
        // numbers, which are validated.
        unsafe { from.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        entry
    }

    /// Writes a call that is sent without a message.
    pub(super) fn write_call(&mut self, epoch: u64, call: &Call) -> EntryRange {
        let offset = self.layout.call(epoch);
        let entry: CallEntry = call.to_words().map(U64::new);
        self.write_entry(offset, &entry);
        (offset, CALL_BYTES)
    }

    /// The peer's call, sent alone or before its first message. `None` if the bytes are no call.
    pub(super) fn read_call(&self, epoch: u64, with_message: bool) -> Option<Call> {
        let offset = if with_message { self.layout.eager(epoch, 0) } else { self.layout.call(epoch) };
        let words: CallWords = self.read_entry::<CallEntry>(offset).map(U64::get);
        Call::from_words(words)
    }

    /// Writes the call before the first message, which has `len` bytes. The range covers both.
    pub(super) fn write_eager_call(&mut self, epoch: u64, call: &Call, len: usize) -> EntryRange {
        let offset = self.layout.eager(epoch, 0);
        let entry: CallEntry = call.to_words().map(U64::new);
        self.write_entry(offset, &entry);
        (offset, self.layout.eager_bytes(epoch, 0) - offset + len)
    }

    /// Copies an eager message into the local side.
    pub(super) fn write_eager(&mut self, epoch: u64, message: u64, piece: Piece) {
        let to = self.local.narrow(self.layout.eager_bytes(epoch, message), piece.len());
        // SAFETY: both have the same length, the message is valid for the operation that it belongs to, and
        // only this rank accesses the local side.
        unsafe { to.as_ptr().copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
    }

    /// Copies an eager message of the peer, which has arrived, to its destination.
    pub(super) fn read_eager(&self, epoch: u64, message: u64, destination: Piece) {
        let from = self.remote.narrow(self.layout.eager_bytes(epoch, message), destination.len());
        // SAFETY: both have the same length, and the destination is valid and exclusive to this rank for the
        // operation.
        unsafe { from.as_ptr().copy_to_nonoverlapping(destination.as_ptr(), destination.len()) };
    }

    /// Writes the CTS entry of a message.
    pub(super) fn write_cts(&mut self, epoch: u64, message: u64, cts: ClearToSend) {
        self.write_entry(self.layout.cts(epoch, message), &cts);
    }

    /// The range of the CTS entries of these messages, which must not wrap around the window.
    pub(super) fn cts_range(&self, epoch: u64, messages: std::ops::Range<u64>) -> EntryRange {
        let len = (messages.end - messages.start) as usize * CTS_BYTES;
        (self.layout.cts(epoch, messages.start), len)
    }

    /// The peer's CTS entry for a message.
    pub(super) fn read_cts(&self, epoch: u64, message: u64) -> ClearToSend {
        self.read_entry(self.layout.cts(epoch, message))
    }

    /// Writes this rank's recovery state for a queue pair.
    pub(super) fn write_recovery(&mut self, qp: usize, state: RecoveryState) -> EntryRange {
        let offset = self.layout.recovery(qp);
        self.write_entry(offset, &state);
        (offset, RECOVERY_BYTES)
    }

    /// The peer's recovery state for a queue pair.
    pub(super) fn read_recovery(&self, qp: usize) -> RecoveryState {
        self.read_entry(self.layout.recovery(qp))
    }
}
