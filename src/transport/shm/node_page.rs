//! The node page: what a process publishes to its neighbours for all communicators, at the start of its
//! arena.
//!
//! Owns the layout of these records and the memory ordering of their fields.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ranges that [`Prefault`] remembers. A reader that is further behind misses the older ones, which costs
/// page faults only.
const RANGES: usize = 16;

/// The largest number of regions that an arena has at once.
pub(super) const REGIONS: usize = 1024;

/// Records of one process, written by the process itself and read by its neighbours. All zeros at first.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct NodePage {
    pub prefault: CachePadded<Prefault>,
    /// By slot of the region: its number, shifted by one bit, and whether its communicator is gone.
    regions: [AtomicU64; REGIONS],
}

impl NodePage {
    /// The region with this number, from 1, takes this slot. Called by the owning process only.
    pub(super) fn open_region(&self, slot: usize, number: u64) {
        if let Some(word) = self.regions.get(slot) {
            word.store(number << 1, Ordering::Release);
        }
    }

    /// The communicator of the region with this number is gone: its process reads no neighbour's region any
    /// more. Called by the owning process only.
    pub(super) fn close_region(&self, slot: usize, number: u64) {
        if let Some(word) = self.regions.get(slot) {
            word.store(number << 1 | 1, Ordering::Release);
        }
    }

    /// Whether the communicator of the region with this number is gone. A later region takes its slot only
    /// then.
    pub(super) fn is_region_closed(&self, slot: usize, number: u64) -> bool {
        let word = self.regions.get(slot).map(|word| word.load(Ordering::Acquire));
        word.is_none_or(|word| word != number << 1)
    }
}

/// The ranges of its arena that a rank has allocated last, for neighbours to map their pages.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Prefault {
    /// Ranges published so far.
    count: AtomicU64,
    /// Offset and length; range `n` is at index `n % RANGES`.
    ranges: [[AtomicU64; 2]; RANGES],
}

impl Prefault {
    /// Publishes a range. Called by the owning rank only, from one thread at a time.
    pub(super) fn publish(&self, offset: usize, len: usize) {
        let count = self.count.load(Ordering::Relaxed);
        let [at, size] = &self.ranges[count as usize % RANGES];
        at.store(offset as u64, Ordering::Relaxed);
        size.store(len as u64, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Release);
    }

    /// The ranges published since `seen`, a count that this call updates. A range that is overwritten while
    /// it is read is wrong; the arena checks its bounds, so this is harmless.
    pub(super) fn since(&self, seen: &mut u64) -> impl Iterator<Item = (usize, usize)> {
        let count = self.count.load(Ordering::Acquire);
        let from = (*seen).clamp(count.saturating_sub(RANGES as u64), count);
        *seen = count;
        (from..count).map(|number| {
            let [at, size] = &self.ranges[number as usize % RANGES];
            (at.load(Ordering::Relaxed) as usize, size.load(Ordering::Relaxed) as usize)
        })
    }
}
