//! The slots of a link whose one end is a kernel and whose other end is a thread of this process, which
//! carries the messages by a transport.
//!
//! Owns the words that say which slot holds a message, their memory order, and the number of slots.
//! `ProgramLink` in `kernels/collective.h` is the kernel's side. Must not know transports, nor who
//! allocated the memory.

use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a slot: the longest message of a kernel.
pub(crate) const SLOT: usize = 128 << 10;
/// Slots of each direction, at most: a power of two. As many messages as a TCP link has in flight.
const MOST_SLOTS: usize = 16;
/// Bytes of the slots of a rank's links to all ranks, as long as two for each direction are enough.
const BYTES_OF_ALL: usize = 512 << 20;
/// Bytes of the words.
pub(crate) const WORDS: usize = 4096;

/// The slots of each direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RelaySlots {
    /// A power of two.
    pub(crate) count: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
}

impl RelaySlots {
    /// Those of links between the ranks of a world.
    pub(crate) fn of_world(world: usize) -> Self {
        let room = BYTES_OF_ALL / (2 * SLOT * world.max(1));
        Self { count: 1 << room.clamp(2, MOST_SLOTS).ilog2(), bytes: SLOT }
    }

    /// Bytes of a direction.
    pub(crate) const fn len(self) -> usize {
        self.count * self.bytes
    }

    /// Where the slot of a message begins in its direction.
    const fn at(self, number: u64) -> usize {
        number as usize % self.count * self.bytes
    }
}

/// Bytes of the slots of a rank's links to all other ranks of a world, if it has a GPU.
#[must_use]
pub fn relay_bytes(world: usize) -> usize {
    world.saturating_sub(1) * 2 * RelaySlots::of_world(world).len()
}

/// An array of words, with one for each slot. The numbers of messages count from 1, over all calls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RelayWords {
    /// Written by the kernel: the message to the peer that the slot holds.
    Sent = 0,
    /// Written by the thread: the message to the peer whose bytes are not needed any more.
    Carried = 1,
    /// Written by the thread: the message from the peer that the slot holds.
    Received = 2,
    /// Written by the kernel: the message from the peer that it has used.
    Used = 3,
}

impl RelayWords {
    /// Where the array begins in the memory of a link.
    pub(crate) const fn offset(self) -> usize {
        self as usize * MOST_SLOTS * size_of::<AtomicU64>()
    }
}

/// The memory of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelayMemory {
    /// The words, [`WORDS`] bytes.
    pub(crate) words: Piece,
    /// The slots of messages to the peer, and from it.
    pub(crate) slots: [Piece; 2],
    /// Whether the kernel reads messages from the peer where the peer has written them, which is where
    /// `slots` says.
    pub(crate) reads_in_place: bool,
}

/// A link whose words are in host memory that the GPU accesses, and whose slots in memory that both the GPU
/// and the transport to the peer access.
pub(crate) struct RelayLink {
    /// The rank at the other end.
    pub(crate) peer: Rank,
    memory: RelayMemory,
    slots: RelaySlots,
    /// What is registered with devices, until this is dropped.
    registered: Option<(Piece, Arc<dyn Registrar>)>,
    /// What the memory belongs to.
    _owner: Box<dyn Any + Send + Sync>,
}

impl RelayLink {
    /// A link with this memory. `registered`: what of it is registered with devices.
    ///
    /// # Safety
    /// The words are host memory, zero, aligned to a page. They and the memory of the slots are valid as long
    /// as `owner` lives: for reads and writes, but slots of messages that are read in place for reads only.
    /// The kernels of this rank and of the peer access them as the words say, nothing else does.
    pub(crate) unsafe fn new(
        peer: Rank,
        memory: RelayMemory,
        slots: RelaySlots,
        owner: Box<dyn Any + Send + Sync>,
        registered: Option<(Piece, Arc<dyn Registrar>)>,
    ) -> Self {
        Self { peer, memory, slots, registered, _owner: owner }
    }

    /// A message to the peer, once the kernel has written it.
    pub(crate) fn outgoing(&self, number: u64, bytes: usize) -> Option<Piece> {
        let is_there = self.word(RelayWords::Sent, number).load(Ordering::Acquire) >= number;
        is_there.then(|| self.slot(self.memory.slots[0], number, bytes))
    }

    /// Lets the kernel write to the slot of a message to the peer again.
    pub(crate) fn set_carried(&self, number: u64) {
        self.word(RelayWords::Carried, number).store(number, Ordering::Release);
    }

    /// Where a message from the peer goes, once the kernel has used the one that was there before.
    pub(crate) fn incoming(&self, number: u64, bytes: usize) -> Option<Piece> {
        let before = number.saturating_sub(self.slots.count as u64);
        let is_free = self.word(RelayWords::Used, number).load(Ordering::Acquire) >= before;
        is_free.then(|| self.slot(self.memory.slots[1], number, bytes))
    }

    /// Whether the kernel reads a message from the peer where `view` is, if it reads in place.
    pub(crate) fn reads(&self, number: u64, view: Piece) -> bool {
        view.len() <= self.slots.bytes && self.slot(self.memory.slots[1], number, view.len()) == view
    }

    /// Whether the kernel reads all messages from the peer where the peer has written them.
    pub(crate) fn reads_in_place(&self) -> bool {
        self.memory.reads_in_place
    }

    /// Whether the kernel has used a message from the peer.
    pub(crate) fn has_used(&self, number: u64) -> bool {
        self.word(RelayWords::Used, number).load(Ordering::Acquire) >= number
    }

    /// Lets the kernel read a message from the peer.
    pub(crate) fn set_received(&self, number: u64) {
        self.word(RelayWords::Received, number).store(number, Ordering::Release);
    }

    fn slot(&self, slots: Piece, number: u64, bytes: usize) -> Piece {
        assert!(bytes <= self.slots.bytes, "a message of {bytes} bytes exceeds its slot");
        slots.narrow(self.slots.at(number), bytes)
    }

    fn word(&self, words: RelayWords, number: u64) -> &AtomicU64 {
        let at = words.offset() + number as usize % self.slots.count * size_of::<AtomicU64>();
        let word = self.memory.words.narrow(at, size_of::<AtomicU64>()).as_ptr().cast::<AtomicU64>();
        // SAFETY: `new` was given valid, aligned memory for as long as this lives; all access to words is
        // atomic.
        unsafe { &*word }
    }
}

impl Drop for RelayLink {
    fn drop(&mut self) {
        if let Some((piece, registrar)) = &self.registered {
            registrar.try_deregister(*piece);
        }
    }
}

/// The messages of a call on one link, in bytes and in their order.
pub struct RelayedMessages {
    pub(crate) link: Arc<RelayLink>,
    pub(crate) sends: Vec<u32>,
    pub(crate) receives: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    const SLOTS: RelaySlots = RelaySlots { count: 8, bytes: 64 };

    #[repr(align(4096))]
    struct Memory([u8; WORDS + 2 * SLOTS.len()]);

    /// A link, and the words of the kernel's side.
    fn link() -> RelayLink {
        let mut owner = Box::new(Memory([0; WORDS + 2 * SLOTS.len()]));
        let start = NonNull::new(owner.0.as_mut_ptr()).expect("an address");
        // SAFETY: the memory is as long, aligned to a page, and lives as long as its owner.
        unsafe {
            let all = Piece::new(start, WORDS + 2 * SLOTS.len());
            let slots = [0, 1].map(|way| all.narrow(WORDS + way * SLOTS.len(), SLOTS.len()));
            let memory = RelayMemory { words: all.narrow(0, WORDS), slots, reads_in_place: true };
            RelayLink::new(3, memory, SLOTS, owner, None)
        }
    }

    /// What the kernel does with the word of a message.
    fn store(link: &RelayLink, words: RelayWords, number: u64) {
        link.word(words, number).store(number, Ordering::Release);
    }

    #[test]
    fn links_of_large_worlds_have_fewer_slots() {
        let slots = |world| RelaySlots::of_world(world).count;
        assert_eq!([2, 128, 129, 1024, 5000].map(slots), [16, 16, 8, 2, 2]);
    }

    #[test]
    fn a_message_is_sent_once_the_kernel_has_written_it() {
        let link = link();
        for number in 1..=3 * SLOTS.count as u64 {
            assert_eq!(link.outgoing(number, SLOTS.bytes), None, "message {number}");
            store(&link, RelayWords::Sent, number);
            let piece = link.outgoing(number, 8).expect("a message");
            assert_eq!(piece, link.memory.slots[0].narrow(SLOTS.at(number), 8));
            link.set_carried(number);
            assert_eq!(link.word(RelayWords::Carried, number).load(Ordering::Relaxed), number);
        }
    }

    #[test]
    fn a_slot_is_received_into_once_the_kernel_has_used_it() {
        let link = link();
        for number in 1..=SLOTS.count as u64 {
            let piece = link.incoming(number, SLOTS.bytes).expect("a free slot");
            assert_eq!(piece, link.memory.slots[1].narrow(SLOTS.at(number), SLOTS.bytes));
            assert!(link.reads(number, piece) && !link.reads(number + 1, piece) && !link.has_used(number));
            link.set_received(number);
        }
        let next = SLOTS.count as u64 + 1;
        assert_eq!(link.incoming(next, SLOTS.bytes), None);
        store(&link, RelayWords::Used, 2);
        assert_eq!(link.incoming(next, SLOTS.bytes), None, "the kernel has used another slot");
        store(&link, RelayWords::Used, 1);
        assert!(link.incoming(next, SLOTS.bytes).is_some() && link.has_used(1));
        assert_eq!(link.incoming(next + SLOTS.count as u64, SLOTS.bytes), None);
    }
}
