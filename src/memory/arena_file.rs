//! The files that arenas lie in.
//!
//! Owns how they are made: without a name in any file system, and sealed where the kernel allows it.

use crate::descriptor;
use crate::error::{Error, Result};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, fstatfs, fstatvfs,
    ftruncate,
};
use rustix::io::{Errno, retry_on_intr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// How many bytes are allocated at once.
const STEP: usize = 2 << 20;

/// A file for shared memory, mostly a memfd. Where a seccomp profile refuses `memfd_create`, it is a nameless
/// file in `/dev/shm`.
#[derive(Debug)]
pub(super) struct ArenaFile {
    file: OwnedFd,
    /// Whether it is in `/dev/shm`, whose size is limited: the first access to a page would end the process
    /// if there is no room, so pages are allocated before.
    is_limited: bool,
}

impl ArenaFile {
    /// An empty file. Its peers may rely on its length if it is a memfd, see [`seal`](Self::seal).
    ///
    /// # Errors
    /// `Unsupported` if the system has no file for shared memory; `System` if the process has no descriptor
    /// or memory left.
    pub(super) fn new() -> Result<Self> {
        let refused = match new_memfd() {
            Ok(file) => return Ok(Self { file, is_limited: false }),
            Err(cause) if is_refusal(cause) => std::io::Error::from(cause),
            Err(cause) => return Err(Error::io("cannot create shared memory", cause)),
        };
        let file = new_file().map_err(|cause| {
            Error::unsupported(format!(
                "this process cannot share memory: memfd_create is refused ({refused}), and /dev/shm cannot be used ({}) (fix: allow \
                 memfd_create in the seccomp profile, or mount a tmpfs at /dev/shm)",
                std::io::Error::from(cause)
            ))
        })?;
        log::debug!("shared memory is in /dev/shm, because memfd_create is refused: {refused}");
        Ok(Self { file, is_limited: true })
    }

    /// Sets its length, for ever if it is a memfd. Peers fault on pages beyond the end of a file that was
    /// shortened.
    pub(super) fn seal(&self, len: usize) -> rustix::io::Result<()> {
        ftruncate(&self.file, len as u64)?;
        if self.is_limited {
            return Ok(());
        }
        fcntl_add_seals(&self.file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
    }

    /// Makes sure that the pages of a range can be touched.
    ///
    /// # Errors
    /// `System` if there is no room.
    pub(super) fn provide(&self, offset: usize, len: usize) -> Result<()> {
        if !self.is_limited {
            return Ok(());
        }
        self.allocate(offset, len).map_err(|cause| {
            let message = format!(
                "cannot allocate {len} bytes in /dev/shm, which is used because memfd_create is refused (fix: allow memfd_create in the \
                 seccomp profile, or enlarge /dev/shm, in Docker with --shm-size)"
            );
            Error::io(message, cause)
        })
    }

    /// Allocates the pages of a range. Their contents stay.
    pub(super) fn allocate(&self, offset: usize, len: usize) -> rustix::io::Result<()> {
        let end = offset + len;
        // A signal ends the call and undoes it, so where signals come often only short ones succeed.
        (offset..end).step_by(STEP).try_for_each(|start| {
            let len = STEP.min(end - start) as u64;
            retry_on_intr(|| fallocate(&self.file, FallocateFlags::empty(), start as u64, len))
        })
    }

    /// Bytes for which there is room in `/dev/shm`; `None` if the file is not there, or that has no limit.
    fn room(&self) -> Option<u64> {
        let status = fstatvfs(&self.file).ok().filter(|status| self.is_limited && status.f_blocks > 0)?;
        Some(status.f_bavail.saturating_mul(status.f_frsize))
    }

    /// Returns the pages of a range to the system. They read as zeros then.
    pub(super) fn punch(&self, offset: usize, len: usize) -> rustix::io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, offset as u64, len as u64)
    }

    /// A new descriptor for peers, which can map the file through it for reading only. This protects from
    /// mistakes: a process of the same user can open the file again for writing.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub(super) fn read_only(&self) -> Result<OwnedFd> {
        // Opening it again through /proc is the only way to another access mode. A seal against writing would
        // also keep the owner from returning pages to the system.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        match descriptor::file(path, OFlags::RDONLY, Mode::empty()) {
            Ok(file) => Ok(file),
            // Without /proc. Peers map it for reading in any case.
            Err(Errno::NOENT) => {
                log::debug!(
                    "neighbours get a writable descriptor of this rank's memory: /proc is not mounted"
                );
                self.file.try_clone().map_err(|cause| Error::io("cannot duplicate a descriptor", cause))
            }
            Err(cause) => Err(Error::io("cannot open shared memory for reading", cause)),
        }
    }
}

impl AsFd for ArenaFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// How many bytes the processes of this machine can share; `None` if only its memory limits them.
///
/// # Errors
/// `Unsupported` if this process cannot share memory with others; `System` if it has no descriptor or memory
/// left.
pub fn shared_memory_room() -> Result<Option<u64>> {
    ArenaFile::new().map(|file| file.room())
}

/// Why `memfd_create` is refused; `None` if it works.
#[must_use]
pub fn memfd_failure() -> Option<std::io::Error> {
    new_memfd().err().filter(|cause| is_refusal(*cause)).map(Into::into)
}

/// Whether the system refuses a call whatever this process has left.
fn is_refusal(cause: Errno) -> bool {
    !matches!(cause, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

/// A file without a name in any file system.
fn new_memfd() -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::ALLOW_SEALING;
    // `vm.memfd_noexec=2` refuses files that could be executed. Kernels before 6.3 do not have the flag.
    match descriptor::memory("flexring", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => descriptor::memory("flexring", flags),
        outcome => outcome,
    }
}

/// A file in `/dev/shm` that never gets a name there.
fn new_file() -> rustix::io::Result<OwnedFd> {
    const TMPFS: i64 = 0x0102_1994;
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR;
    let file = descriptor::file("/dev/shm", flags, Mode::RUSR | Mode::WUSR)?;
    // Pages of a file on a disk would be written to it.
    if fstatfs(&file)?.f_type as i64 == TMPFS { Ok(file) } else { Err(Errno::OPNOTSUPP) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    extern "C" fn ignore(_: libc::c_int) {}

    #[test]
    fn signals_do_not_keep_memory_from_being_allocated() {
        static IS_DONE: AtomicBool = AtomicBool::new(false);
        const LEN: usize = 256 << 20;
        // SAFETY: the handler does nothing, and without SA_RESTART it ends system calls. By default the
        // signal is ignored.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut());
        }
        let allocating = std::thread::spawn(|| {
            let file = ArenaFile::new().expect("a file");
            file.seal(LEN).expect("a length");
            let allocated = file.allocate(0, LEN);
            IS_DONE.store(true, Ordering::Relaxed);
            allocated
        });
        while !IS_DONE.load(Ordering::Relaxed) {
            // SAFETY: the thread is not joined yet.
            unsafe { libc::pthread_kill(allocating.as_pthread_t(), libc::SIGURG) };
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        allocating.join().expect("no panic").expect("memory");
    }
}
