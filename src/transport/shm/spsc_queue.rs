//! The single-producer, single-consumer queue between two ranks that share memory.
//!
//! Each rank writes to its own memory only and reads its peer's, so a connection takes two [`SpscQueue`]s,
//! one in each arena. In its own, a rank writes the entries that it sends and how many of the peer's entries
//! it has consumed. Owns the memory ordering between the two ranks.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
use std::ops::Deref;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

/// Capacity of a queue, in entries.
pub(super) const ENTRIES: usize = if cfg!(loom) { 2 } else { 64 };

/// One entry: a cache line.
pub(super) type Entry = [u64; 8];

/// The half of a connection that one of the two ranks writes.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SpscQueue {
    /// Entries written by the owner so far.
    written: CachePadded<AtomicU64>,
    /// Entries of the peer that the owner has consumed so far.
    consumed: CachePadded<AtomicU64>,
    entries: [CachePadded<[AtomicU64; 8]>; ENTRIES],
}

#[cfg(loom)]
impl Default for SpscQueue {
    fn default() -> Self {
        Self {
            written: CachePadded::new(AtomicU64::new(0)),
            consumed: CachePadded::new(AtomicU64::new(0)),
            entries: std::array::from_fn(|_| CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0)))),
        }
    }
}

/// A peer's counter has a value that the protocol excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidCounter;

/// Both halves of a connection, as one of its two ranks uses them.
#[derive(Debug)]
pub(super) struct Duplex<Q> {
    mine: Q,
    theirs: Q,
    /// Entries that this rank has written.
    written: u64,
    /// Entries of the peer that this rank has read.
    read: u64,
    /// Entries of the peer that this rank has consumed.
    consumed: u64,
}

impl<Q: Deref<Target = SpscQueue>> Duplex<Q> {
    /// A connection over two unused queues: this rank's own, and the peer's.
    pub(super) fn new(mine: Q, theirs: Q) -> Self {
        Self { mine, theirs, written: 0, read: 0, consumed: 0 }
    }

    /// The number of this rank's entries that the peer has consumed.
    pub(super) fn acknowledged(&self) -> Result<u64, InvalidCounter> {
        let acknowledged = self.theirs.consumed.load(Ordering::Acquire);
        if acknowledged > self.written { Err(InvalidCounter) } else { Ok(acknowledged) }
    }

    /// Writes the next entry. The caller keeps at most [`ENTRIES`] entries unacknowledged.
    pub(super) fn write(&mut self, entry: Entry) {
        let slot = &self.mine.entries[self.written as usize % ENTRIES];
        for (word, value) in slot.iter().zip(entry) {
            // The release store below orders these. The slot is free: the peer has consumed its last entry.
            word.store(value, Ordering::Relaxed);
        }
        self.written += 1;
        self.mine.written.store(self.written, Ordering::Release);
    }

    /// The peer's next entry, if it has written one. It stays the next entry until
    /// [`advance`](Self::advance).
    pub(super) fn peek(&self) -> Result<Option<Entry>, InvalidCounter> {
        let written = self.theirs.written.load(Ordering::Acquire);
        if written == self.read {
            return Ok(None);
        }
        if written < self.read || written - self.consumed > ENTRIES as u64 {
            return Err(InvalidCounter);
        }
        let slot = &self.theirs.entries[self.read as usize % ENTRIES];
        Ok(Some(std::array::from_fn(|word| slot[word].load(Ordering::Relaxed))))
    }

    /// Moves past the entry that [`peek`](Self::peek) returned. It still takes room until it is consumed.
    pub(super) fn advance(&mut self) {
        self.read += 1;
    }

    /// Gives the slot of the oldest entry that was read back to the peer.
    pub(super) fn consume(&mut self) {
        debug_assert!(self.consumed < self.read, "only an entry that was read can be consumed");
        self.consumed += 1;
        self.mine.consumed.store(self.consumed, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
pub(super) mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Both ends of a connection.
    pub(in super::super) fn pair() -> (Duplex<Arc<SpscQueue>>, Duplex<Arc<SpscQueue>>) {
        let (left, right) = (Arc::new(SpscQueue::default()), Arc::new(SpscQueue::default()));
        (Duplex::new(Arc::clone(&left), Arc::clone(&right)), Duplex::new(right, left))
    }

    #[test]
    fn entries_arrive_whole_and_in_order_and_are_never_overwritten_early() {
        loom::model(|| {
            let (mut producer, mut consumer) = pair();
            let thread = thread::spawn(move || {
                for value in 1..=3u64 {
                    while value - producer.acknowledged().unwrap() > ENTRIES as u64 {
                        thread::yield_now();
                    }
                    producer.write([value; 8]);
                }
            });
            for value in 1..=3u64 {
                let entry = loop {
                    match consumer.peek().unwrap() {
                        Some(entry) => break entry,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(entry, [value; 8]);
                consumer.advance();
                consumer.consume();
            }
            thread.join().unwrap();
        });
    }
}
