//! Whether an address can be read, found out without reading it.

/// Whether this process can read the memory at an address. A mapping alone says nothing: drivers reserve addresses for
/// GPUs without any access, and keep them when the memory is freed.
pub(crate) fn is_readable(at: *const u8) -> bool {
    const SIGNAL_SET_BYTES: usize = 8;
    let word = at.map_addr(|address| address / SIGNAL_SET_BYTES * SIGNAL_SET_BYTES);
    // SAFETY: the kernel copies the set from user memory, and returns EFAULT if it cannot read it. Then it rejects the
    // first argument, which is no operation, and changes nothing.
    let status = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, -1, word, std::ptr::null_mut::<u8>(), SIGNAL_SET_BYTES)
    };
    status == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::is_readable;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn memory_without_access_is_not_readable() {
        let page = rustix::param::page_size();
        for (access, readable) in [(ProtFlags::READ, true), (ProtFlags::empty(), false)] {
            // SAFETY: the mapping is new, and only the kernel reads it.
            let start = unsafe { mmap_anonymous(std::ptr::null_mut(), page, access, MapFlags::PRIVATE) };
            let start = start.expect("memory");
            assert_eq!(is_readable(start.cast()), readable);
            assert_eq!(is_readable(start.cast::<u8>().wrapping_add(page - 1)), readable);
            // SAFETY: the mapping is not used afterwards.
            unsafe { munmap(start, page) }.expect("memory");
        }
        assert!(!is_readable(std::ptr::without_provenance(16)));
    }
}
