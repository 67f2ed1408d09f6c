//! A neighbour's arena, as a rank that reads it sees it.
//!
//! Owns its mappings: windows, each mapped when something in it is first used, so that neither address space nor page tables
//! grow with the memory of the whole node. Must not know what is written where.

use super::arena::{HUGE, PAGE, address_space, advise, piece_of};
use super::piece::Piece;
use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::Advice;
use std::os::fd::OwnedFd;
use std::sync::{PoisonError, RwLock};

/// Huge pages of a window where address space is not limited: a bit more than 1 GiB. It holds all that the communicator lays
/// out and, mostly, all buffers.
///
/// The number is odd, because the kernel maps windows side by side. At a distance of exactly 1 GiB the same element of two
/// ranks' vectors has addresses that differ only in high bits, which AMD's L1 cache does not tell apart (its way predictor
/// hashes bits 12 to 27), so that each read evicts the other's line. On an AMD EPYC, 4 ranks, 128 MiB, medians of 10 rounds:
/// 40.7 ms with 512 huge pages, 34.9 ms with 513.
const WINDOW: usize = 513;

/// Where address space is limited, the windows that a rank maps first, one for each neighbour, take at most this part of it.
const PART_OF_ADDRESS_SPACE: usize = 4;

/// A part of the arena that is mapped, from `start`.
#[derive(Debug)]
struct Window {
    start: usize,
    map: MmapRaw,
}

impl Window {
    fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        piece_of(&self.map, offset.checked_sub(self.start)?, len)
    }
}

/// A neighbour's arena, mapped for reading.
#[derive(Debug)]
pub struct PeerArena {
    file: OwnedFd,
    len: usize,
    /// Windows start at multiples of this.
    window: usize,
    /// In the order in which they are searched. They may overlap, and none is unmapped before the end: pieces point into
    /// them.
    windows: RwLock<Vec<Window>>,
}

impl PeerArena {
    /// The arena behind `file`, one of those of `neighbours` ranks, which has at least `fixed` bytes.
    ///
    /// # Errors
    /// `Disagreement` if it is shorter, or may become shorter, so that reading it would end this process; `System` if its
    /// length cannot be read.
    pub fn new(file: OwnedFd, neighbours: usize, fixed: usize) -> Result<Self> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        // Once it is sealed it is never shorter than it is now.
        let stat = fstat(&file)
            .map_err(|cause| Error::io("cannot read the length of a neighbour's shared memory", cause))?;
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        if !sealed || len < fixed {
            let found =
                if sealed { format!("{len} bytes long") } else { "not sealed against shrinking".into() };
            return Err(Error::disagreement(format!(
                "the shared memory of a rank on this node is {found}, and should be sealed and at least {fixed} bytes \
                 long: do all ranks run the same build of flexring?"
            )));
        }
        let share = |limit: usize| limit / PART_OF_ADDRESS_SPACE / neighbours.max(1) / HUGE;
        let huge_pages = address_space().map_or(WINDOW, |limit| share(limit).clamp(1, WINDOW));
        Ok(Self { file, len, window: huge_pages * HUGE, windows: RwLock::default() })
    }

    /// A range of the arena, mapped if it is not yet; `None` if it exceeds the arena. Offsets from a peer are not trusted.
    ///
    /// # Errors
    /// `System` if it cannot be mapped.
    pub fn piece(&self, offset: usize, len: usize) -> Result<Option<Piece>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.len) else { return Ok(None) };
        let find = |windows: &[Window]| windows.iter().find_map(|window| window.piece(offset, len));
        if let Some(piece) = find(&self.windows.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(Some(piece));
        }
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have mapped it meanwhile.
        if let Some(piece) = find(&windows) {
            return Ok(Some(piece));
        }
        let start = offset / self.window * self.window;
        let window = self.map(start, end.max(start.saturating_add(self.window)))?;
        let piece = window.piece(offset, len);
        windows.push(window);
        Ok(piece)
    }

    /// A range of the arena like that of [`piece`](Self::piece). All later pieces within it lie in this mapping, so that a
    /// device that the range is registered with reaches them.
    ///
    /// # Errors
    /// As for [`piece`](Self::piece).
    pub fn piece_for_device(&self, offset: usize, len: usize) -> Result<Option<Piece>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.len) else { return Ok(None) };
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        if windows.first().is_none_or(|window| window.piece(offset, len).is_none()) {
            let window = self.map(offset / PAGE * PAGE, end)?;
            windows.insert(0, window);
        }
        Ok(windows[0].piece(offset, len))
    }

    /// Maps the bytes from `start`, a multiple of a page, to `end` or to the end of the arena.
    fn map(&self, start: usize, end: usize) -> Result<Window> {
        let len = end.min(self.len).next_multiple_of(PAGE) - start;
        let map = MmapOptions::new()
            .offset(start as u64)
            .len(len)
            .no_reserve_swap()
            .map_raw_read_only(&self.file)
            .map_err(|cause| {
            let message = format!(
                "cannot map {len} bytes of a neighbour's memory for reading (fix: raise the limit of address \
                     space, `ulimit -v`, if there is one)"
            );
            Error::io(message, cause)
        })?;
        advise(&map);
        Ok(Window { start, map })
    }

    /// Maps a range and fills its page tables, so that reading it later does not fault. Best effort: failures are only logged.
    pub fn prefault(&self, offset: usize, len: usize) {
        let piece = match self.piece(offset, len) {
            Ok(Some(piece)) => piece,
            Ok(None) => return,
            Err(error) => return log::debug!("{}", error.message()),
        };
        // SAFETY: the range lies within a mapping that lives as long as `self`, and the advice changes no contents. Where
        // the kernel does not have it or the range is not page-aligned, it fails and does nothing.
        let outcome = unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateRead) };
        if let Err(cause) = outcome {
            log::debug!("cannot prefault {len} bytes of a neighbour's memory: {cause}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::memory::Arena;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap};

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
        let arena = Arena::new(1).expect("memory");
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

    #[test]
    fn peers_cannot_write_through_their_descriptor() {
        let arena = Arena::new(1).expect("memory");
        let file = arena.read_only_file().expect("a descriptor");
        // SAFETY: a mapping at an address that the kernel chooses; it fails.
        let writable =
            unsafe { mmap(std::ptr::null_mut(), PAGE, ProtFlags::WRITE, MapFlags::SHARED, &file, 0) };
        assert_eq!(writable, Err(rustix::io::Errno::ACCESS));
        assert!(rustix::io::write(&file, b"x").is_err() && ftruncate(&file, 0).is_err());
    }
}
