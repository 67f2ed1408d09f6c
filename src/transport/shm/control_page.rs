//! The control page: what a rank publishes to its neighbours besides messages, at the start of its arena.
//!
//! Owns the layout of these records and the memory ordering of their fields. Must not know when they are written, or
//! what a reader does with them.

use super::need_wakeup::NeedWakeup;
use crate::memory::Export;
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Ranges that [`Prefault`] remembers. A reader that is further behind misses the older ones, which costs page faults
/// only.
const RANGES: usize = 16;

/// The largest number of ranks on a node that share GPU memory with each other.
pub(super) const GPU_NEIGHBOURS: usize = 256;

/// Flags and records of one rank, written by the rank itself and read by its neighbours. All zeros at first. Each field
/// has cache lines of its own.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct ControlPage {
    pub need_wakeup: CachePadded<NeedWakeup>,
    /// 1 while the rank reads neighbours' memory in place.
    pub reading: CachePadded<AtomicU32>,
    /// 1 once the rank has aborted: the memory that its messages refer to may change at any time.
    pub aborted: CachePadded<AtomicU32>,
    /// 1 once the rank has left: it sends and releases nothing any more.
    pub left: CachePadded<AtomicU32>,
    /// The leader of small calls: the local rank whose post it sleeps for, or 0, its own, if it does not sleep.
    pub awaited: CachePadded<AtomicU32>,
    pub prefault: CachePadded<Prefault>,
    pub gpu: CachePadded<GpuNotice>,
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

    /// The ranges published since `seen`, a count that this call updates. A range that is overwritten while it is read
    /// is wrong; the arena checks its bounds, so this is harmless.
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

/// The GPU memory that a rank shares with its neighbours, and whose memory it has opened.
#[derive(Debug)]
#[repr(C)]
pub(super) struct GpuNotice {
    /// 1 once `export` is valid.
    published: AtomicU64,
    /// Process, GPU, address, length, 8 words of handle, and 2 of pattern: see [`Export`].
    export: [AtomicU64; 14],
    /// The neighbours whose memory this rank has open: one bit each, by index on the node.
    opened: [AtomicU64; GPU_NEIGHBOURS / 64],
}

impl GpuNotice {
    /// Publishes this rank's GPU memory. Called once, by the owning rank.
    pub(super) fn publish(&self, export: &Export) {
        let head = [export.process, export.gpu.into(), export.address, export.len];
        for (field, value) in
            self.export.iter().zip(head.into_iter().chain(export.handle).chain(export.pattern))
        {
            field.store(value, Ordering::Relaxed);
        }
        self.published.store(1, Ordering::Release);
    }

    /// The memory that the rank shares, once it has published it.
    pub(super) fn read(&self) -> Option<Export> {
        if self.published.load(Ordering::Acquire) == 0 {
            return None;
        }
        let field = |index: usize| self.export[index].load(Ordering::Relaxed);
        Some(Export {
            process: field(0),
            gpu: field(1) as u32,
            address: field(2),
            len: field(3),
            handle: std::array::from_fn(|index| field(4 + index)),
            pattern: std::array::from_fn(|index| field(12 + index)),
        })
    }

    /// Whether this rank has the memory of the neighbour with this index open.
    pub(super) fn has_open(&self, neighbour: usize) -> bool {
        let word = self.opened.get(neighbour / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (neighbour % 64) & 1 == 1)
    }

    pub(super) fn set_open(&self, neighbour: usize) {
        if let Some(word) = self.opened.get(neighbour / 64) {
            word.fetch_or(1 << (neighbour % 64), Ordering::AcqRel);
        }
    }

    pub(super) fn clear_open(&self) {
        self.opened.iter().for_each(|word| word.store(0, Ordering::Release));
    }
}
