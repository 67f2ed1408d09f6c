//! The layout of a region of an arena, which one communicator uses: the offsets of the control page, the
//! queues, the mailboxes, the notices of GPU memory and the pools.
//!
//! Owns every offset.

use super::control_page::ControlPage;
use super::notice_page::NoticePage;
use super::spsc_queue::SpscQueue;
use crate::error::Result;
use crate::memory::{Arena, Piece};

/// On nodes of at most this many ranks, pages and page tables exist before the first call, for every part
/// that a call may use. On larger ones that would take most of the start's time and, as it grows with the
/// square of the ranks, of the node's memory.
pub(super) const PREFAULTED_RANKS: usize = 16;

/// Bytes of the first part of a mailbox slot: a cache line, for the header and the shortest messages.
pub(super) const MAILBOX_LINE: usize = 64;

/// The offset in the arena of each part of a region, computed from the region's start, the number of ranks on
/// the node and the sizes of small messages and slots.
#[derive(Clone, Copy, Debug)]
pub struct ArenaLayout {
    start: usize,
    neighbours: usize,
    small: usize,
    slots: usize,
    slot_bytes: usize,
    /// Slots of messages that kernels write, for each rank of the node.
    relay_slots: usize,
    relay_slot_bytes: usize,
}

/// Slots of one size, side by side in an arena, from the start of a page.
#[derive(Clone, Copy, Debug)]
pub struct PoolLayout {
    offset: usize,
    slots: usize,
    slot_bytes: usize,
}

impl PoolLayout {
    /// The number of slots, and the bytes of each.
    #[must_use]
    pub fn slots(self) -> (usize, usize) {
        (self.slots, self.slot_bytes)
    }

    pub(super) fn offset(self) -> usize {
        self.offset
    }

    pub(super) fn bytes(self) -> usize {
        self.slots * self.slot_bytes
    }

    /// The memory of the whole pool in `arena`.
    #[must_use]
    pub fn piece(self, arena: &Arena) -> Piece {
        arena.piece(self.offset, self.bytes()).expect("pools lie within the arena")
    }

    /// Allocates the pages of the pool in `arena`.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn populate(self, arena: &Arena) -> Result<()> {
        arena.populate(self.offset, self.bytes())
    }

    /// Divides `piece`, which is as long as the pool, into slots.
    #[must_use]
    pub fn cut(self, piece: Piece) -> Vec<Piece> {
        (0..self.slots).map(|number| piece.narrow(number * self.slot_bytes, self.slot_bytes)).collect()
    }
}

impl ArenaLayout {
    /// The layout for a node of `neighbours` ranks, whose small messages have up to `small` bytes, with
    /// `slots` slots of `slot_bytes` in the pool, and no memory for calls on GPUs. It starts at 0. Equal on
    /// all ranks of the node, except for the start and the pools, which come last.
    #[must_use]
    pub const fn new(neighbours: usize, small: usize, slots: usize, slot_bytes: usize) -> Self {
        Self { start: 0, neighbours, small, slots, slot_bytes, relay_slots: 0, relay_slot_bytes: 0 }
    }

    /// This layout for ranks with GPUs, with slots for the messages that kernels write to each rank of the
    /// node.
    #[must_use]
    pub const fn with_relays(self, relay_slots: usize, relay_slot_bytes: usize) -> Self {
        Self { relay_slots, relay_slot_bytes, ..self }
    }

    /// The same layout for a region that starts at this offset, the start of a page.
    #[must_use]
    pub fn at(self, start: usize) -> Self {
        Self { start, ..self }
    }

    /// The offset of the region, and of the control page.
    #[must_use]
    pub fn start(self) -> usize {
        self.start
    }

    /// Bytes of the longest message that goes through a mailbox.
    pub(super) fn small(self) -> usize {
        self.small
    }

    /// The offset of the queue to the neighbour with this index on the node.
    pub(super) fn queue(self, neighbour: usize) -> usize {
        self.start + size_of::<ControlPage>() + neighbour * size_of::<SpscQueue>()
    }

    /// The offset of the mailbox slot with this index, 0 or 1.
    pub(super) fn mailbox(self, slot: usize) -> usize {
        let slot_bytes = (MAILBOX_LINE + self.small).next_multiple_of(MAILBOX_LINE);
        self.queue(self.neighbours).next_multiple_of(4096) + slot * slot_bytes
    }

    /// The offset of the notices of GPU memory, on a node with GPUs.
    pub(super) fn notices(self) -> Option<usize> {
        // Behind both slots of the mailbox.
        (self.relay_slots > 0).then(|| self.mailbox(2).next_multiple_of(4096))
    }

    /// The pool for vectors in host memory.
    #[must_use]
    pub fn pool(self) -> PoolLayout {
        let notices = self.notices().map(|offset| offset + size_of::<NoticePage>());
        let offset = notices.unwrap_or_else(|| self.mailbox(2).next_multiple_of(4096));
        PoolLayout { offset, slots: self.slots, slot_bytes: self.slot_bytes }
    }

    /// The pool of the messages that kernels write to ranks of the node whose GPU memory they do not reach.
    /// It has no slots on a node without GPUs, and takes no memory until it is needed.
    #[must_use]
    pub fn relay_pool(self) -> PoolLayout {
        let before = self.pool();
        PoolLayout {
            offset: before.offset + before.bytes(),
            slots: self.neighbours * self.relay_slots,
            slot_bytes: self.relay_slot_bytes,
        }
    }

    /// The part of `pool`, which is that of [`relay_pool`](Self::relay_pool), for messages to the neighbour
    /// with this index on the node.
    #[must_use]
    pub(super) fn relay_slots_to(self, neighbour: usize, pool: Piece) -> Piece {
        let bytes = self.relay_slots * self.relay_slot_bytes;
        pool.narrow(neighbour * bytes, bytes)
    }

    /// Bytes at the start of the region that are needed in any case: all but the pools.
    #[must_use]
    pub fn front(self) -> usize {
        self.pool().offset - self.start
    }

    /// Bytes at the start of the region that calls on the host use: all but the pool for kernels.
    #[must_use]
    pub fn on_host(self) -> usize {
        self.relay_pool().offset - self.start
    }

    /// Bytes at the start of the region whose pages exist before the first call, if the region is the first
    /// of its arena.
    #[must_use]
    pub fn populated(self) -> usize {
        if self.is_prefaulted() { self.on_host() } else { self.front() }
    }

    /// Whether all that calls use is made ready for neighbours in advance.
    #[must_use]
    pub fn is_prefaulted(self) -> bool {
        self.neighbours <= PREFAULTED_RANKS
    }

    /// Bytes of the region.
    #[must_use]
    pub fn bytes(self) -> usize {
        let last = self.relay_pool();
        last.offset + last.bytes() - self.start
    }
}
