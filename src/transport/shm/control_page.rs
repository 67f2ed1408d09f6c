//! The control page: what a rank publishes to its neighbours besides messages, at the start of a
//! communicator's region.
//!
//! Owns the layout of these records and the memory ordering of their fields.

use super::need_wakeup::NeedWakeup;
use crate::memory::Export;
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The largest number of ranks on a node that share GPU memory with each other.
pub(super) const GPU_NEIGHBOURS: usize = 256;

/// Flags and records of one rank, written by the rank itself and read by its neighbours. All zeros at first.
/// Each field has cache lines of its own.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct ControlPage {
    pub need_wakeup: CachePadded<NeedWakeup>,
    /// 1 once the rank has aborted: the memory that its messages refer to may change at any time.
    pub aborted: CachePadded<AtomicU32>,
    /// 1 once the rank has left: it sends and releases nothing any more.
    pub left: CachePadded<AtomicU32>,
    /// The leader of small calls: the local rank whose post it sleeps for, or 0, its own, if it does not
    /// sleep.
    pub awaited: CachePadded<AtomicU32>,
    pub gpu: CachePadded<GpuNotice>,
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
