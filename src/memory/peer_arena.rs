//! A neighbour's arena, as a rank that reads it sees it.
//!
//! Owns its mappings: windows, each mapped when something in it is first used, so that neither address space
//! nor page tables grow with the memory of the whole node.

use super::arena::{Arena, address_space};
use super::arena_file::memfd_failure;
use super::piece::Piece;
use super::reservation::{HUGE, PAGE, Reservation};
use crate::error::{Error, Result};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::Advice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock};

/// Huge pages of a window where address space is not limited: a bit more than 1 GiB. It holds all that the
/// communicator lays out and, mostly, all buffers.
///
/// The number is odd, because the kernel maps windows side by side. At a distance of exactly 1 GiB the same
/// element of two ranks' vectors has addresses that differ only in high bits, which AMD's L1 cache does not
/// tell apart (its way predictor hashes bits 12 to 27), so that each read evicts the other's line. On an AMD
/// EPYC, 4 ranks, 128 MiB, medians of 10 rounds: 40.7 ms with 512 huge pages, 34.9 ms with 513.
const WINDOW: usize = 513;

/// Where address space is limited, the windows that a rank maps first, one for each neighbour, take at most
/// this part of it.
const PART_OF_ADDRESS_SPACE: usize = 4;

/// A part of the arena that is mapped, from `start`. It is accessible up to the last byte that was used.
#[derive(Debug)]
struct Window {
    start: usize,
    map: Reservation,
}

impl Window {
    fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        self.map.piece(offset.checked_sub(self.start)?, len)
    }

    /// Makes a range accessible; `None` if it is not wholly in this window.
    fn grow(&self, offset: usize, len: usize) -> Option<rustix::io::Result<()>> {
        let end = offset.checked_sub(self.start)?.checked_add(len)?;
        (end <= self.map.len()).then(|| self.map.grow(end))
    }
}

/// A neighbour's arena, mapped for reading.
#[derive(Debug)]
pub struct PeerArena {
    backing: Backing,
    len: usize,
    /// Windows start at multiples of this.
    window: usize,
    /// In the order in which they are searched. They may overlap, and none is unmapped before the end: pieces
    /// point into them.
    windows: RwLock<Vec<Window>>,
}

/// Where a neighbour's arena comes from.
#[derive(Debug)]
enum Backing {
    File(OwnedFd),
    /// Memory of another rank of this process, which has no file.
    Private(Arc<Arena>),
}

impl PeerArena {
    /// The arena behind `file`, one of those of `neighbours` ranks, which has at least `fixed` bytes.
    ///
    /// # Errors
    /// `Disagreement` if it is shorter, or may become shorter, so that reading it would end this process;
    /// `System` if its length cannot be read.
    pub fn new(file: OwnedFd, neighbours: usize, fixed: usize) -> Result<Self> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        // Once it is sealed it is never shorter than it is now.
        let stat = fstat(&file)
            .map_err(|cause| Error::io("cannot read the length of a neighbour's shared memory", cause))?;
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        // Where there are no memfds, no rank of the node can seal its memory.
        let may_be_open = || memfd_failure().is_some();
        if !(sealed || may_be_open()) || len < fixed {
            let found =
                if sealed { format!("{len} bytes long") } else { "not sealed against shrinking".into() };
            return Err(Error::disagreement(format!(
                "the shared memory of a rank on this node is {found}, and should be sealed and at least {fixed} bytes \
                 long: do all ranks run the same build of flexring, and is memfd_create allowed for all of them?"
            )));
        }
        let share = |limit: usize| limit / PART_OF_ADDRESS_SPACE / neighbours.max(1) / HUGE;
        let huge_pages = address_space().map_or(WINDOW, |limit| share(limit).clamp(1, WINDOW));
        let backing = Backing::File(file);
        Ok(Self { backing, len, window: huge_pages * HUGE, windows: RwLock::default() })
    }

    /// The arena of another rank of this process, one of `neighbours`, which has at least `fixed` bytes.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_this_process(arena: &Arc<Arena>, neighbours: usize, fixed: usize) -> Result<Self> {
        if !arena.is_private() {
            return Self::new(arena.read_only_file()?, neighbours, fixed);
        }
        let backing = Backing::Private(Arc::clone(arena));
        Ok(Self { backing, len: arena.len(), window: HUGE, windows: RwLock::default() })
    }

    /// A range of the arena, mapped if it is not yet; `None` if it exceeds the arena. Offsets from a peer are
    /// not trusted.
    ///
    /// # Errors
    /// `System` if it cannot be mapped.
    pub fn piece(&self, offset: usize, len: usize) -> Result<Option<Piece>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.len) else { return Ok(None) };
        let find = |windows: &[Window]| windows.iter().find_map(|window| window.piece(offset, len));
        if let Some(piece) = find(&self.windows.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(Some(piece));
        }
        if let Backing::Private(arena) = &self.backing {
            return Ok(arena.piece(offset, len));
        }
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        // It may be mapped and not accessible yet, or another thread may have mapped it meanwhile.
        if let Some(grown) = windows.iter().find_map(|window| window.grow(offset, len)) {
            grown.map_err(|cause| not_mapped(len, cause))?;
            return Ok(find(&windows));
        }
        let start = offset / self.window * self.window;
        // Where address space is short, only what is needed.
        let window = self.map(start, end.max(start.saturating_add(self.window)), end);
        let window = window.or_else(|_| self.map(offset / HUGE * HUGE, end, end))?;
        let piece = window.piece(offset, len);
        windows.push(window);
        Ok(piece)
    }

    /// A range of the arena like that of [`piece`](Self::piece). All later pieces within it lie in this
    /// mapping, so that a device that the range is registered with reaches them.
    ///
    /// # Errors
    /// As for [`piece`](Self::piece).
    pub fn piece_for_device(&self, offset: usize, len: usize) -> Result<Option<Piece>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.len) else { return Ok(None) };
        if let Backing::Private(arena) = &self.backing {
            return Ok(arena.piece(offset, len));
        }
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        if windows.first().is_none_or(|window| window.piece(offset, len).is_none()) {
            let window = self.map(offset / PAGE * PAGE, end, end)?;
            windows.insert(0, window);
        }
        Ok(windows[0].piece(offset, len))
    }

    /// Maps the bytes from `start`, a multiple of a page, to `end` or to the end of the arena, those before
    /// `accessible` for reading.
    fn map(&self, start: usize, end: usize, accessible: usize) -> Result<Window> {
        let len = end.min(self.len).next_multiple_of(PAGE) - start;
        let file = match &self.backing {
            Backing::File(file) => Some(file.as_fd()),
            Backing::Private(_) => None,
        };
        let map = Reservation::new(file, start, len, false);
        let map = map.and_then(|map| map.grow(accessible - start).map(|()| map));
        Ok(Window { start, map: map.map_err(|cause| not_mapped(len, cause))? })
    }

    /// Maps a range and fills its page tables, so that reading it later does not fault. Best effort: failures
    /// are only logged.
    pub fn prefault(&self, offset: usize, len: usize) {
        let piece = match self.piece(offset, len) {
            Ok(Some(piece)) => piece,
            Ok(None) => return,
            Err(error) => return log::debug!("{}", error.message()),
        };
        // SAFETY: the range lies within a mapping that lives as long as `self`, and the advice changes no
        // contents. Where the kernel does not have it or the range is not page-aligned, it fails and does
        // nothing.
        let outcome = unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateRead) };
        if let Err(cause) = outcome {
            log::debug!("cannot prefault {len} bytes of a neighbour's memory: {cause}");
        }
    }
}

fn not_mapped(len: usize, cause: rustix::io::Errno) -> Error {
    Error::io(format_args!("cannot map {len} bytes of a neighbour's memory for reading"), cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::memory::Arena;
    use rustix::fs::{MemfdFlags, Mode, OFlags, fcntl_add_seals, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use std::os::fd::AsRawFd;

    fn peer(arena: &Arena, neighbours: usize) -> PeerArena {
        PeerArena::new(arena.read_only_file().expect("a descriptor"), neighbours, 1).expect("an arena")
    }

    fn write(arena: &Arena, offset: usize, byte: u8) {
        let piece = arena.piece(offset, 1).expect("within");
        // SAFETY: only this test accesses the arena.
        unsafe { piece.as_ptr().write(byte) }
    }

    fn read(peer: &PeerArena, offset: usize, len: usize) -> u8 {
        let piece = peer.piece(offset, len).expect("a mapping").expect("within");
        // SAFETY: as above.
        unsafe { piece.as_ptr().add(len - 1).read() }
    }

    #[test]
    fn windows_are_mapped_where_something_is_read() {
        let arena = Arena::new(4 * HUGE).expect("memory");
        let mut peer = peer(&arena, 1);
        peer.window = HUGE;
        for (number, offset) in [0, HUGE - 1, HUGE, 3 * HUGE + 5].into_iter().enumerate() {
            write(&arena, offset, number as u8 + 1);
            assert_eq!(read(&peer, offset, 1), number as u8 + 1);
        }
        assert_eq!(peer.windows.read().expect("no panic").len(), 3);
        assert_eq!(read(&peer, HUGE / 2, 3 * HUGE), 0, "a range across windows");
        assert_eq!(read(&peer, arena.len() - 1, 1), 0);
    }

    #[test]
    fn a_window_is_accessible_up_to_what_was_used() {
        let arena = Arena::new(8 * HUGE).expect("memory");
        let peer = peer(&arena, 1);
        write(&arena, 3 * HUGE, 5);
        for (offset, accessible) in [(0, HUGE), (HUGE, 2 * HUGE), (3 * HUGE, 4 * HUGE), (HUGE, 4 * HUGE)] {
            read(&peer, offset, 1);
            let windows = peer.windows.read().expect("no panic");
            let is_accessible = |end: usize| windows[0].piece(end - 1, 1).is_some();
            assert_eq!((windows.len(), is_accessible(accessible)), (1, true), "{offset}");
            assert!(!is_accessible(accessible + 1), "{offset}");
        }
        assert_eq!(read(&peer, 3 * HUGE, 1), 5);
    }

    #[test]
    fn pieces_for_devices_and_later_ones_share_a_mapping() {
        let arena = Arena::new(1).expect("memory");
        let mut peer = peer(&arena, 1);
        peer.window = HUGE;
        let start = HUGE - PAGE;
        let before = peer.piece(start, 1).expect("a mapping").expect("within");
        let pool = peer.piece_for_device(start, 2 * PAGE).expect("a mapping").expect("within");
        assert_eq!(peer.piece_for_device(start, 2 * PAGE).expect("a mapping"), Some(pool));
        let after = peer.piece(start, 1).expect("a mapping").expect("within");
        assert_eq!((after.as_ptr(), pool.len()), (pool.as_ptr(), 2 * PAGE));
        assert_ne!(before.as_ptr(), pool.as_ptr());
    }

    #[test]
    fn memory_that_can_shrink_or_is_too_short_is_refused() {
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&unsealed, 1 << 20).expect("memory");
        let error = PeerArena::new(unsealed, 1, 4096).expect_err("its owner can shorten it");
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("not sealed against shrinking"), "{error}");
        let arena = Arena::new(1).expect("memory");
        let file = arena.read_only_file().expect("a descriptor");
        let error = PeerArena::new(file, 1, usize::MAX).expect_err("nothing is that long");
        assert!(error.message().contains("bytes long"), "{error}");
    }

    /// A process of the same user can open the file again for writing, see SECURITY.md.
    #[test]
    fn peers_cannot_write_by_mistake_nor_shorten_the_memory_on_purpose() {
        let arena = Arena::new(1).expect("memory");
        let map =
            Reservation::new(Some(arena.read_only_file().expect("a descriptor").as_fd()), 0, HUGE, true);
        assert_eq!(map.expect("addresses").grow(1), Err(rustix::io::Errno::ACCESS), "mapped, then writable");
        let file = arena.read_only_file().expect("a descriptor");
        // SAFETY: a mapping at an address that the kernel chooses; it fails.
        let writable =
            unsafe { mmap(std::ptr::null_mut(), PAGE, ProtFlags::WRITE, MapFlags::SHARED, &file, 0) };
        assert_eq!(writable, Err(rustix::io::Errno::ACCESS));
        assert!(rustix::io::write(&file, b"x").is_err() && ftruncate(&file, 0).is_err());
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let again = again.expect("its user may write it");
        assert_eq!(ftruncate(&again, 0), Err(rustix::io::Errno::PERM));
        assert_eq!(fcntl_add_seals(&again, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
    }
}
