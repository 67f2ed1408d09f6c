//! Whether memory can be read, found out without reading it.

use super::reservation::PAGE;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages that are remembered: the ends of the vectors of several calls.
const REMEMBERED: usize = 32;

/// Pages that this process can read.
///
/// Those at the ends of vectors of up to a page are remembered, because asking the kernel about both ends
/// takes 0.65 us, twice as long as an all-reduce of 8 bytes between two ranks. So memory that is given back
/// to the kernel after a call has used it, and used again, is not noticed, also if its addresses are a GPU's
/// by then and no driver is known that could say so: the process ends as after any access to freed memory.
/// Longer vectors, whose memory malloc does give back, are asked about in each call.
#[derive(Debug)]
pub(crate) struct ReadablePages {
    /// Numbers of pages, each at the place that its number says modulo the length. The last page of the
    /// address space is no user's.
    known: [AtomicUsize; REMEMBERED],
}

impl ReadablePages {
    pub(crate) fn new() -> Self {
        Self { known: [const { AtomicUsize::new(usize::MAX) }; REMEMBERED] }
    }

    /// The end of the vector of `len` bytes at `start` that this process cannot read, if there is one. A
    /// mapping alone says nothing: drivers reserve addresses for GPUs without any access, and keep them when
    /// the memory is freed.
    pub(crate) fn unreadable_end(&self, start: *const u8, len: usize) -> Option<*const u8> {
        let ends = [start, start.wrapping_add(len.saturating_sub(1))];
        let is_readable =
            |end: &*const u8| if len <= PAGE { self.remembers(*end) } else { is_readable(*end) };
        ends.into_iter().find(|end| !is_readable(end))
    }

    /// Whether this process can read the page at an address, or could when it was asked about.
    fn remembers(&self, at: *const u8) -> bool {
        let page = at.addr() / PAGE;
        let place = &self.known[page % REMEMBERED];
        if place.load(Ordering::Relaxed) == page {
            return true;
        }
        let is_readable = is_readable(at);
        if is_readable {
            place.store(page, Ordering::Relaxed);
        }
        is_readable
    }
}

/// Whether this process can read the memory at an address.
fn is_readable(at: *const u8) -> bool {
    const SIGNAL_SET_BYTES: usize = 8;
    let word = at.map_addr(|address| address / SIGNAL_SET_BYTES * SIGNAL_SET_BYTES);
    // SAFETY: the kernel copies the set from user memory, and returns EFAULT if it cannot read it. Then it
    // rejects the first argument, which is no operation, and changes nothing.
    let status = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, -1, word, std::ptr::null_mut::<u8>(), SIGNAL_SET_BYTES)
    };
    status == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::ReadablePages;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    /// Pages of a mapping of its own.
    struct Pages {
        start: *mut u8,
        number: usize,
    }

    impl Pages {
        fn new(number: usize) -> Self {
            let len = number * rustix::param::page_size();
            // SAFETY: the mapping is new, and only the kernel reads it.
            let start =
                unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE) };
            Self { start: start.expect("memory").cast(), number }
        }

        fn at(&self, page: usize) -> *const u8 {
            self.start.wrapping_add(page * rustix::param::page_size())
        }

        fn protect(&self, page: usize) {
            let start = self.at(page).cast_mut().cast();
            // SAFETY: the page belongs to this mapping, and only the kernel reads it.
            unsafe { mprotect(start, rustix::param::page_size(), MprotectFlags::empty()) }.expect("memory");
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping is not used afterwards.
            let _ = unsafe { munmap(self.start.cast(), self.number * rustix::param::page_size()) };
        }
    }

    #[test]
    fn the_end_that_cannot_be_read_is_named() {
        let (pages, page) = (Pages::new(4), rustix::param::page_size());
        pages.protect(1);
        pages.protect(2);
        let last = pages.at(1).wrapping_sub(1);
        for (at, len, end) in [
            (last, 0, None),
            (last, 1, None),
            (last, 2, Some(pages.at(1))),
            (pages.at(1), 1, Some(pages.at(1))),
            (last, page + 2, Some(pages.at(2))),
            (pages.at(2), page + 1, Some(pages.at(2))),
            (pages.at(0), 4 * page, None),
            (std::ptr::without_provenance(16), 1, Some(std::ptr::without_provenance(16))),
        ] {
            assert_eq!(ReadablePages::new().unreadable_end(at, len), end);
        }
    }

    #[test]
    fn only_pages_of_short_vectors_are_remembered() {
        let (pages, page) = (Pages::new(2), rustix::param::page_size());
        let short = ReadablePages::new();
        let long = ReadablePages::new();
        assert_eq!(short.unreadable_end(pages.at(0), 8), None);
        assert_eq!(long.unreadable_end(pages.at(0), 2 * page), None);
        pages.protect(0);
        assert_eq!(short.unreadable_end(pages.at(0), 8), None, "it is remembered");
        assert_eq!(short.unreadable_end(pages.at(0), 2 * page), Some(pages.at(0)));
        assert_eq!(long.unreadable_end(pages.at(0), 8), Some(pages.at(0)));
    }
}
