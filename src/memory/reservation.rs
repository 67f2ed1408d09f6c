//! Addresses of shared memory, of which only the front is accessible.
//!
//! Owns a mapping, and how far it is accessible. What is beyond has no access (`PROT_NONE`), so what walks or
//! populates whole mappings, such as `mlockall`, creates no pages there. Core dumps leave the mapping out,
//! and forked children do not have it.

use super::piece::Piece;
use rustix::io::Result;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of a huge page. Allocations of this size and more are aligned to it, so that the kernel can use huge
/// pages.
pub(super) const HUGE: usize = 2 << 20;
/// Alignment of all other allocations, in bytes: the smallest page size.
pub(super) const PAGE: usize = 4096;

/// A mapping whose front is accessible.
#[derive(Debug)]
pub(super) struct Reservation {
    start: NonNull<u8>,
    len: usize,
    /// Bytes that are accessible. Only grows, under the lock.
    accessible: AtomicUsize,
    growing: Mutex<()>,
    access: MprotectFlags,
}

// SAFETY: it is a range of addresses. Access to the bytes is governed by the contract of `Piece`.
unsafe impl Send for Reservation {}
// SAFETY: as above; how far it is accessible is atomic.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Maps `len` bytes of a file from `offset` on, both multiples of a page, or `len` zeros that belong to
    /// no file. Nothing is accessible yet; what will be can be written if `is_writable`, else only read.
    pub(super) fn new(
        file: Option<BorrowedFd<'_>>,
        offset: usize,
        len: usize,
        is_writable: bool,
    ) -> Result<Self> {
        let (nowhere, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: the mapping is new, at an address that the kernel chooses.
        let map = unsafe {
            match file {
                Some(file) => {
                    mmap(nowhere, len, none, MapFlags::SHARED | MapFlags::NORESERVE, file, offset as u64)
                }
                // With strict accounting (`overcommit_memory=2`) only what is accessible counts.
                None => mmap_anonymous(nowhere, len, none, MapFlags::PRIVATE | MapFlags::NORESERVE),
            }
        }?;
        let advice = [
            // Huge pages mean fewer page faults and fewer TLB misses. Where the kernel refuses them for
            // shared memory, small pages work too.
            Advice::LinuxHugepage,
            // It would not be copied in a forked child: what the child wrote to a vector in it would change
            // the parent's vector, and change sums. A child that uses such a vector ends by SIGSEGV.
            Advice::LinuxDontFork,
            // A core dump would create the pages that do not exist yet.
            Advice::LinuxDontDump,
        ];
        // SAFETY: the mapping was made above.
        advice.into_iter().for_each(|advice| unsafe { advise(map.cast(), len, advice) });
        let write = if is_writable { MprotectFlags::WRITE } else { MprotectFlags::empty() };
        Ok(Self {
            start: NonNull::new(map.cast()).unwrap_or(NonNull::dangling()),
            len,
            accessible: AtomicUsize::new(0),
            growing: Mutex::new(()),
            access: MprotectFlags::READ | write,
        })
    }

    /// The first address.
    #[inline]
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes of the mapping.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes at the front that are accessible.
    #[inline]
    pub(super) fn accessible(&self) -> usize {
        self.accessible.load(Ordering::Acquire)
    }

    /// Makes the bytes up to `end`, which is at most the length, accessible. Creates no pages.
    pub(super) fn grow(&self, end: usize) -> Result<()> {
        if end <= self.accessible() {
            return Ok(());
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.accessible();
        let end = end.next_multiple_of(HUGE).min(self.len);
        if end > from {
            // SAFETY: the range lies within this mapping, and nothing uses it yet.
            unsafe { mprotect(self.start.add(from).as_ptr().cast(), end - from, self.access) }?;
            self.accessible.store(end, Ordering::Release);
        }
        Ok(())
    }

    /// A range; `None` if it is not wholly accessible.
    #[inline]
    pub(super) fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        if offset.checked_add(len)? > self.accessible() {
            return None;
        }
        // SAFETY: the range lies within the mapping, which outlives every operation: transports and executor
        // keep the arena for as long as they may hold a piece of it.
        Some(unsafe { Piece::new(self.start.add(offset), len) })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and nothing uses it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Advises the kernel on `len` bytes at `start`. Best effort.
///
/// # Safety
/// The range is mapped, and the caller accepts what the advice does to it.
pub(super) unsafe fn advise(start: *mut u8, len: usize, advice: Advice) {
    // SAFETY: the caller guarantees the range.
    if let Err(cause) = unsafe { madvise(start.cast(), len, advice) } {
        log::debug!("the kernel refuses {advice:?} for shared memory: {cause}");
    }
}
