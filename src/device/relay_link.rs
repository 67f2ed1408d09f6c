//! The slots of a link whose one end is a kernel and whose other end is a thread of this process, which
//! carries the messages by a transport.
//!
//! Owns the words that say which slot holds a message, and their memory order. `ProgramLink` in
//! `kernels/collective.h` is the kernel's side. Must not know transports, nor who allocated the memory.

use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of each direction: a power of two. As many messages as a TCP link has in flight.
pub(crate) const SLOTS: usize = 16;
/// Where slots begin, behind the words.
const FIRST_SLOT: usize = 4096;

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
        self as usize * SLOTS * size_of::<AtomicU64>()
    }
}

/// A link in host memory that both the GPU and the transport to the peer access.
pub(crate) struct RelayLink {
    /// The rank at the other end.
    pub(crate) peer: Rank,
    memory: Piece,
    slot_bytes: usize,
    registrar: Option<Arc<dyn Registrar>>,
    /// What the memory belongs to.
    _owner: Box<dyn Any + Send + Sync>,
}

impl RelayLink {
    /// Bytes that a link needs, for messages of up to `slot_bytes`.
    pub(crate) const fn bytes(slot_bytes: usize) -> usize {
        Self::incoming_at(slot_bytes) + SLOTS * slot_bytes
    }

    /// Where the slots of messages to the peer begin in its memory, and those of messages from the peer.
    pub(crate) const OUT_AT: usize = FIRST_SLOT;
    pub(crate) const fn incoming_at(slot_bytes: usize) -> usize {
        FIRST_SLOT + SLOTS * slot_bytes
    }

    /// A link in `memory`, which is zero, and is registered with the devices of `registrar` as long as this
    /// lives.
    ///
    /// # Safety
    /// `memory` is valid for reads and writes, and aligned to a page, as long as `owner` lives, and at
    /// least as long as [`bytes`](Self::bytes). The kernels of this rank access it as the words say,
    /// nothing else does.
    pub(crate) unsafe fn new(
        peer: Rank,
        memory: Piece,
        slot_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
        registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        if let Some(registrar) = &registrar {
            registrar.try_register(memory);
        }
        Self { peer, memory, slot_bytes, registrar, _owner: owner }
    }

    /// A message to the peer, once the kernel has written it.
    pub(crate) fn outgoing(&self, number: u64, bytes: usize) -> Option<Piece> {
        let is_there = self.word(RelayWords::Sent, number).load(Ordering::Acquire) >= number;
        is_there.then(|| self.slot(Self::OUT_AT, number, bytes))
    }

    /// Lets the kernel write to the slot of a message to the peer again.
    pub(crate) fn set_carried(&self, number: u64) {
        self.word(RelayWords::Carried, number).store(number, Ordering::Release);
    }

    /// Where a message from the peer goes, once the kernel has used the one that was there before.
    pub(crate) fn incoming(&self, number: u64, bytes: usize) -> Option<Piece> {
        let before = number.saturating_sub(SLOTS as u64);
        let is_free = self.word(RelayWords::Used, number).load(Ordering::Acquire) >= before;
        is_free.then(|| self.slot(Self::incoming_at(self.slot_bytes), number, bytes))
    }

    /// Lets the kernel read a message from the peer.
    pub(crate) fn set_received(&self, number: u64) {
        self.word(RelayWords::Received, number).store(number, Ordering::Release);
    }

    fn slot(&self, first: usize, number: u64, bytes: usize) -> Piece {
        assert!(bytes <= self.slot_bytes, "a message of {bytes} bytes exceeds its slot");
        self.memory.narrow(first + number as usize % SLOTS * self.slot_bytes, bytes)
    }

    fn word(&self, words: RelayWords, number: u64) -> &AtomicU64 {
        let at = words.offset() + number as usize % SLOTS * size_of::<AtomicU64>();
        let word = self.memory.narrow(at, size_of::<AtomicU64>()).as_ptr().cast::<AtomicU64>();
        // SAFETY: `new` was given valid, aligned memory for as long as this lives; all access to words is
        // atomic.
        unsafe { &*word }
    }
}

impl Drop for RelayLink {
    fn drop(&mut self) {
        if let Some(registrar) = &self.registrar {
            registrar.try_deregister(self.memory);
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

    const SLOT: usize = 64;

    #[repr(align(4096))]
    struct Memory([u8; RelayLink::bytes(SLOT)]);

    /// A link, and the words of the kernel's side.
    fn link() -> RelayLink {
        let mut owner = Box::new(Memory([0; RelayLink::bytes(SLOT)]));
        let start = NonNull::new(owner.0.as_mut_ptr()).expect("an address");
        // SAFETY: the memory is as long, aligned to a page, and lives as long as its owner.
        unsafe { RelayLink::new(3, Piece::new(start, RelayLink::bytes(SLOT)), SLOT, owner, None) }
    }

    /// What the kernel does with the word of a message.
    fn store(link: &RelayLink, words: RelayWords, number: u64) {
        link.word(words, number).store(number, Ordering::Release);
    }

    #[test]
    fn a_message_is_sent_once_the_kernel_has_written_it() {
        let link = link();
        for number in 1..=3 * SLOTS as u64 {
            assert_eq!(link.outgoing(number, SLOT), None, "message {number}");
            store(&link, RelayWords::Sent, number);
            let piece = link.outgoing(number, 8).expect("a message");
            let at = piece.as_ptr() as usize - link.memory.as_ptr() as usize;
            assert_eq!((at, piece.len()), (RelayLink::OUT_AT + number as usize % SLOTS * SLOT, 8));
            link.set_carried(number);
            assert_eq!(link.word(RelayWords::Carried, number).load(Ordering::Relaxed), number);
        }
    }

    #[test]
    fn a_slot_is_received_into_once_the_kernel_has_used_it() {
        let link = link();
        for number in 1..=SLOTS as u64 {
            let piece = link.incoming(number, SLOT).expect("a free slot");
            let at = piece.as_ptr() as usize - link.memory.as_ptr() as usize;
            assert_eq!(at, RelayLink::incoming_at(SLOT) + number as usize % SLOTS * SLOT);
            link.set_received(number);
        }
        let next = SLOTS as u64 + 1;
        assert_eq!(link.incoming(next, SLOT), None);
        store(&link, RelayWords::Used, 2);
        assert_eq!(link.incoming(next, SLOT), None, "the kernel has used another slot");
        store(&link, RelayWords::Used, 1);
        assert!(link.incoming(next, SLOT).is_some());
        assert_eq!(link.incoming(next + SLOTS as u64, SLOT), None);
    }
}
