//! The lane: the single-producer, single-consumer ring between two ranks that share memory, and the need_wakeup
//! through which a sleeper is woken.
//!
//! Each rank writes to its own memory only and reads its peer's. So a lane is one half of a pair: in mine I
//! write what I send to the peer and how much of what it sent I have consumed; in its twin the peer does the
//! same for me. Owns the memory ordering between ranks; must not know what the words of an entry mean.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::ops::Deref;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;

/// Entries of a lane.
pub(super) const ENTRIES: usize = if cfg!(loom) { 2 } else { 64 };

/// What one entry carries: one cache line.
pub(super) type Entry = [u64; 8];

/// One rank's half of the pair.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SpscQueue {
    /// How many entries I have written.
    written: CachePadded<AtomicU64>,
    /// How many of the peer's entries I need no longer.
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

/// A peer's counter is one that it cannot have come to by the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidCounter;

/// Both halves as one of the two ranks sees them.
#[derive(Debug)]
pub(super) struct Duplex<L> {
    mine: L,
    theirs: L,
    /// Entries that I have written.
    written: u64,
    /// Entries of the peer that I have read.
    read: u64,
    /// Entries of the peer that I have given back.
    consumed: u64,
}

impl<L: Deref<Target = SpscQueue>> Duplex<L> {
    /// Two halves that nobody has used yet.
    pub(super) fn new(mine: L, theirs: L) -> Self {
        Self { mine, theirs, written: 0, read: 0, consumed: 0 }
    }

    /// How many of my entries the peer has given back.
    pub(super) fn acknowledged(&self) -> Result<u64, InvalidCounter> {
        let acknowledged = self.theirs.consumed.load(Ordering::Acquire);
        if acknowledged > self.written { Err(InvalidCounter) } else { Ok(acknowledged) }
    }

    /// Writes the next entry. The caller keeps within [`ENTRIES`] beyond what was acknowledged.
    pub(super) fn write(&mut self, words: Entry) {
        let entry = &self.mine.entries[self.written as usize % ENTRIES];
        for (slot, word) in entry.iter().zip(words) {
            // Ordered by the release below, and not overwritten before the peer has given the entry back.
            slot.store(word, Ordering::Relaxed);
        }
        self.written += 1;
        self.mine.written.store(self.written, Ordering::Release);
    }

    /// The peer's next entry, if it has written one. Looking does not take it.
    pub(super) fn peek(&self) -> Result<Option<Entry>, InvalidCounter> {
        let written = self.theirs.written.load(Ordering::Acquire);
        if written == self.read {
            return Ok(None);
        }
        if written < self.read || written - self.consumed > ENTRIES as u64 {
            return Err(InvalidCounter);
        }
        let entry = &self.theirs.entries[self.read as usize % ENTRIES];
        Ok(Some(std::array::from_fn(|word| entry[word].load(Ordering::Relaxed))))
    }

    /// Takes the entry that was looked at.
    pub(super) fn advance(&mut self) {
        self.read += 1;
    }

    /// Gives the oldest entry that was taken back to the peer.
    pub(super) fn consume(&mut self) {
        debug_assert!(self.consumed < self.read, "only what was read can be given back");
        self.consumed += 1;
        self.mine.consumed.store(self.consumed, Ordering::Release);
    }
}

/// A rank's word on whether it sleeps. It announces the sleep and then looks once more; a waker publishes and
/// then looks at the word. The two fences make sure that at least one of them sees the other.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct NeedWakeup(AtomicU32);

impl NeedWakeup {
    #[cfg(loom)]
    pub(super) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The owner is about to sleep and will look for news once more after this.
    pub(super) fn set(&self) {
        self.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The owner is awake.
    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether the owner must be woken for what the caller has published before.
    pub(super) fn is_set(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) != 0
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn pair() -> (Duplex<Arc<SpscQueue>>, Duplex<Arc<SpscQueue>>) {
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
                let words = loop {
                    match consumer.peek().unwrap() {
                        Some(words) => break words,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(words, [value; 8]);
                consumer.advance();
                consumer.consume();
            }
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_sleeper_sees_the_entry_or_is_woken() {
        loom::model(|| {
            let (mut producer, consumer) = pair();
            let need_wakeup = Arc::new(NeedWakeup::new());
            let sleeper = Arc::clone(&need_wakeup);
            let thread = thread::spawn(move || {
                producer.write([1; 8]);
                need_wakeup.is_set()
            });
            sleeper.set();
            let seen = consumer.peek().unwrap().is_some();
            let woken = thread.join().unwrap();
            assert!(seen || woken, "the sleeper would sleep for ever");
        });
    }
}
