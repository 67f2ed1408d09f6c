//! The slots of the pool: memory for messages that cannot be sent from, or received into, the caller's
//! vectors.
//!
//! Owns the memory of each slot. Must not know which slot is free: the pipeline counts them.

use crate::memory::{Piece, populate};

/// The slots of a rank: equal slots in one memory, and a spare one that the pipeline does not use.
pub(super) struct Slots {
    slots: Vec<Piece>,
    /// For calls without elements, and for short inputs that must be copied.
    spare: Option<Piece>,
    /// Whether the pages of all slots exist.
    populated: bool,
}

impl Slots {
    /// A pool of these equal pieces, the last of which is the spare one.
    pub(super) fn new(mut slots: Vec<Piece>) -> Self {
        let spare = slots.pop();
        Self { slots, spare, populated: false }
    }

    /// Makes the pages of the slots exist, before the first call that uses many of them, so that later calls
    /// do not fault. On nodes of many ranks they do not exist before.
    pub(super) fn populate(&mut self) {
        if !std::mem::replace(&mut self.populated, true) {
            self.slots.iter().for_each(|slot| populate(*slot));
        }
    }

    /// The number of slots.
    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.slots.first().map_or(usize::MAX, |slot| slot.len())
    }

    /// The first `len` bytes of the spare slot.
    pub(super) fn spare(&self, len: usize) -> Piece {
        self.spare.unwrap_or(Piece::EMPTY).narrow(0, len)
    }

    /// The memory of a slot.
    pub(super) fn piece(&self, slot: usize) -> Piece {
        self.slots[slot]
    }
}
