//! How much heap memory a thread takes.
//!
//! Owns the allocator that counts, which the unit tests of a crate install as their global one.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes allocated less bytes freed by this thread, and the most of it since the last
    /// [`AllocationLimit::start`].
    static TAKEN: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Measures from its creation on, in this thread.
#[derive(Debug)]
pub struct AllocationLimit {
    before: isize,
}

impl AllocationLimit {
    /// Starts to measure.
    ///
    /// # Panics
    /// Unless [`MeasuringAllocator`] is the global allocator: nothing would be counted.
    #[must_use]
    pub fn start() -> Self {
        let before = TAKEN.get();
        let probe = std::hint::black_box(Box::new(0u8));
        assert!(TAKEN.get() > before, "MeasuringAllocator is not the global allocator of these tests");
        drop(probe);
        PEAK.set(before);
        Self { before }
    }

    /// The most bytes that were taken at once since the start.
    pub fn peak(&self) -> usize {
        usize::try_from(PEAK.get() - self.before).unwrap_or(0)
    }
}

/// The system's allocator, which counts the bytes of each thread. For `#[global_allocator]`.
#[derive(Debug)]
pub struct MeasuringAllocator;

fn count(bytes: isize) {
    // A thread that ends has no counters any more.
    let taken = TAKEN.try_with(|taken| {
        taken.set(taken.get() + bytes);
        taken.get()
    });
    if let Ok(taken) = taken {
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(taken)));
    }
}

// SAFETY: all arguments are passed to the system's allocator unchanged, and counting does not allocate.
unsafe impl GlobalAlloc for MeasuringAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
