//! The arena: all memory of a rank that its peers on the node may read.
//!
//! One anonymous file (memfd) per rank, sparse, mapped once and for all by its owner for writing and by each
//! peer for reading only. It holds what the shared-memory transport writes for its peers, the slots of the
//! pool, and the buffers that users allocate. A place in it is an offset, which means the same on every rank;
//! nothing has to be registered, announced or mapped later. It has no name in any file system, so nothing is
//! left behind however its ranks end. Must not know what is written where.

use super::Piece;
use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::Advice;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Allocations of this size and more are aligned to it, so that the kernel can back them with huge pages.
const HUGE: usize = 2 << 20;
/// The grain of all other allocations. Also more than any page size that would matter here is aligned to.
const PAGE: usize = 4096;

/// A rank's own arena.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    map: MmapRaw,
    /// The part in front that is laid out by the communicator; the rest is for users' buffers.
    fixed: usize,
    free: Mutex<FreeList>,
    /// Allocations that are known by their address only, as C does: offset and length.
    leases: Mutex<BTreeMap<usize, usize>>,
}

impl Arena {
    /// An arena whose first `fixed` bytes are there at once, touched and zero, and which can grow to the
    /// machine's memory.
    ///
    /// # Errors
    /// `System` if the memory cannot be had.
    pub fn new(fixed: usize) -> Result<Self> {
        Self::near(fixed, None)
    }

    /// The same, on a NUMA node of the machine as far as that has room, for what is there at once.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn near(fixed: usize, node: Option<u32>) -> Result<Self> {
        let fixed = fixed.next_multiple_of(HUGE);
        let info = rustix::system::sysinfo();
        let machine = (info.totalram as usize).saturating_mul(info.mem_unit as usize);
        let file = memfd_create("flexring", MemfdFlags::CLOEXEC)
            .map_err(|cause| Error::io("cannot create shared memory", cause))?;
        // Address space, not memory: pages come when they are touched. Where it is limited, less will do.
        let mut len = (fixed + machine).next_multiple_of(HUGE);
        let map = loop {
            match Self::map(&file, len) {
                Ok(map) => break map,
                Err(_) if len / 2 >= fixed + HUGE => len = (len / 2).next_multiple_of(HUGE),
                Err(error) => return Err(error),
            }
        };
        let arena =
            Self { file, map, fixed, free: Mutex::new(FreeList::new(fixed, len)), leases: Mutex::default() };
        if let Some(node) = node {
            arena.prefer(node);
        }
        arena.populate(0, fixed)?;
        Ok(arena)
    }

    /// Has the pages of the fixed part, of which there are none yet, come from a NUMA node.
    fn prefer(&self, node: u32) {
        const PREFERRED: libc::c_ulong = 1;
        const NODES: usize = 1024;
        let mut mask = [0u64; NODES / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        // SAFETY: the range is the front of this mapping, the mask is as long as is said, and a policy changes no contents.
        let told = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.map.as_mut_ptr(),
                self.fixed,
                PREFERRED,
                mask.as_ptr(),
                NODES as libc::c_ulong,
                0 as libc::c_uint,
            )
        };
        if told != 0 {
            let cause = std::io::Error::last_os_error();
            log::debug!("memory is not placed on NUMA node {node}: {cause}");
        }
    }

    fn map(file: &OwnedFd, len: usize) -> Result<MmapRaw> {
        let failed =
            |cause: std::io::Error| Error::io(format_args!("cannot map {len} bytes of shared memory"), cause);
        ftruncate(file, len as u64).map_err(|cause| failed(cause.into()))?;
        let map = MmapOptions::new().len(len).no_reserve_swap().map_raw(file).map_err(failed)?;
        // Fewer faults and fewer misses in the address cache. Where the kernel does not do it for shared
        // memory, everything works with small pages.
        // SAFETY: the range is the whole mapping that was just made, and the advice changes no contents.
        let advised = unsafe { rustix::mm::madvise(map.as_mut_ptr().cast(), len, Advice::LinuxHugepage) };
        if let Err(cause) = advised {
            log::debug!("no huge pages for shared memory: {cause}");
        }
        Ok(map)
    }

    /// Makes sure that the pages of a range exist, so that touching them later can neither fail nor fault.
    fn populate(&self, offset: usize, len: usize) -> Result<()> {
        let piece = self.piece(offset, len).expect("the range lies within the arena");
        // SAFETY: the range lies within this mapping; populating it changes no contents.
        let populated =
            unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not know the advice: the pages come with the first touch.
            Err(rustix::io::Errno::INVAL) => rustix::fs::fallocate(
                &self.file,
                rustix::fs::FallocateFlags::empty(),
                offset as u64,
                len as u64,
            )
            .map_err(|cause| no_memory(len, cause)),
            Err(cause) => Err(no_memory(len, cause)),
        }
    }

    /// The descriptor that peers map.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Bytes of the whole arena.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there is nothing in it; never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A range of the arena, if it lies within.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        piece_of(&self.map, offset, len)
    }

    /// Where `piece` lies in the arena, if it does.
    #[must_use]
    pub fn offset_of(&self, piece: Piece) -> Option<usize> {
        self.offset(piece.as_ptr(), piece.len())
    }

    /// Whether the `len` bytes at `start` lie in the arena.
    #[must_use]
    pub fn has(&self, start: *const u8, len: usize) -> bool {
        self.offset(start, len).is_some()
    }

    fn offset(&self, start: *const u8, len: usize) -> Option<usize> {
        let offset = (start as usize).checked_sub(self.map.as_ptr() as usize)?;
        (offset.checked_add(len)? <= self.len()).then_some(offset)
    }

    /// Takes `len` bytes for a user, zeroed, touched, and aligned to a page at least.
    ///
    /// # Errors
    /// `System` if there is not that much memory.
    pub fn alloc(&self, len: usize) -> Result<usize> {
        let too_much = || no_memory(len, rustix::io::Errno::NOMEM);
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).checked_next_multiple_of(align).ok_or_else(too_much)?;
        let offset = self.free_list().take(len, align).ok_or_else(too_much)?;
        if let Err(error) = self.populate(offset, len) {
            self.give_back(offset, len);
            return Err(error);
        }
        Ok(offset)
    }

    /// Gives the `len` bytes back that [`alloc`](Self::alloc) returned as `offset`; their pages go to the system.
    pub fn free(&self, offset: usize, len: usize) {
        let align = if len >= HUGE { HUGE } else { PAGE };
        self.give_back(offset, len.max(1).next_multiple_of(align));
    }

    /// Allocates for somebody who keeps the address only: offset and address.
    ///
    /// # Errors
    /// `System` if there is not that much memory.
    pub fn lease(&self, len: usize) -> Result<(usize, NonNull<u8>)> {
        let offset = self.alloc(len)?;
        let piece = self.piece(offset, len).expect("an allocation lies within its arena");
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).insert(offset, len);
        Ok((offset, NonNull::new(piece.as_ptr()).expect("a mapping does not begin at zero")))
    }

    /// What was leased at this address, if anything.
    #[must_use]
    pub fn leased(&self, start: *const u8) -> Option<Piece> {
        let offset = (start as usize).wrapping_sub(self.map.as_ptr() as usize);
        let len = *self.leases.lock().unwrap_or_else(PoisonError::into_inner).get(&offset)?;
        self.piece(offset, len)
    }

    /// Takes a lease back; `false` if nothing was leased at this address.
    pub fn end_lease(&self, start: *const u8) -> bool {
        let offset = (start as usize).wrapping_sub(self.map.as_ptr() as usize);
        let lease = self.leases.lock().unwrap_or_else(PoisonError::into_inner).remove(&offset);
        lease.inspect(|len| self.free(offset, *len)).is_some()
    }

    fn give_back(&self, offset: usize, len: usize) {
        use rustix::fs::FallocateFlags;
        // A hole reads as zeros, which is what the next owner is promised.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(cause) = rustix::fs::fallocate(&self.file, flags, offset as u64, len as u64) {
            log::warn!("cannot return {len} bytes of shared memory, they stay taken: {cause}");
            return;
        }
        self.free_list().give(offset, len);
    }

    fn free_list(&self) -> std::sync::MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in front that are laid out by the communicator.
    #[must_use]
    pub fn fixed(&self) -> usize {
        self.fixed
    }
}

/// A peer's arena, readable.
#[derive(Debug)]
pub struct PeerArena {
    map: MmapRaw,
}

impl PeerArena {
    /// Maps the arena behind `file`, of which the first `fixed` bytes are made ready for reading.
    ///
    /// # Errors
    /// `System` if it cannot be mapped, or is smaller than `fixed`.
    pub fn map(file: BorrowedFd<'_>, fixed: usize) -> Result<Self> {
        let failed = |cause: std::io::Error| Error::io("cannot map the shared memory of a peer", cause);
        let len = rustix::fs::fstat(file).map_err(|cause| failed(cause.into()))?.st_size as usize;
        if len < fixed {
            return Err(Error::disagreement(format!(
                "a peer's shared memory has {len} bytes and should have {fixed} at least"
            )));
        }
        let map = MmapOptions::new().len(len).no_reserve_swap().map_raw_read_only(&file).map_err(failed)?;
        let start = map.as_ptr().cast_mut().cast();
        // SAFETY: the range is the mapping that was just made, and the advice changes no contents.
        unsafe {
            let _ = rustix::mm::madvise(start, len, Advice::LinuxHugepage);
        }
        let arena = Self { map };
        arena.make_ready(0, fixed);
        Ok(arena)
    }

    /// Makes a range ready for reading, so that reading it faults no more. A range that cannot be is left alone.
    pub fn make_ready(&self, offset: usize, len: usize) {
        let Some(piece) = self.piece(offset, len) else { return };
        // SAFETY: the range lies within this mapping, which lives as long as `self`, and the advice changes no
        // contents. Where the kernel does not know it or the range is not a whole page, nothing happens.
        let ready = unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateRead) };
        if let Err(cause) = ready {
            log::debug!("cannot make {len} bytes of a neighbour's memory ready: {cause}");
        }
    }

    /// A range of the arena, if it lies within. What the peer says is not trusted to do so.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        piece_of(&self.map, offset, len)
    }
}

fn piece_of(map: &MmapRaw, offset: usize, len: usize) -> Option<Piece> {
    if offset.checked_add(len)? > map.len() {
        return None;
    }
    let start = NonNull::new(map.as_mut_ptr())?;
    // SAFETY: the range lies within the mapping, which outlives every operation: transports and executor hold
    // the arena for as long as they can hold a piece of it.
    Some(unsafe { Piece::new(start.add(offset), len) })
}

fn no_memory(len: usize, cause: rustix::io::Errno) -> Error {
    Error::io(format_args!("cannot allocate {len} bytes of shared memory"), cause)
}

/// The ranges that nobody has, by offset; neighbours are always joined.
#[derive(Debug)]
struct FreeList(BTreeMap<usize, usize>);

impl FreeList {
    fn new(start: usize, end: usize) -> Self {
        Self(BTreeMap::from([(start, end - start)]))
    }

    /// The first fit.
    fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let (start, size, at) = self.0.iter().find_map(|(start, size)| {
            let at = start.next_multiple_of(align);
            (at.checked_add(len)? <= start + size).then_some((*start, *size, at))
        })?;
        self.0.remove(&start);
        if at > start {
            self.0.insert(start, at - start);
        }
        if at + len < start + size {
            self.0.insert(at + len, start + size - at - len);
        }
        Some(at)
    }

    fn give(&mut self, mut start: usize, mut len: usize) {
        let before = self.0.range(..start).next_back().map(|(start, size)| (*start, *size));
        if let Some((before, size)) = before.filter(|(before, size)| before + size == start) {
            self.0.remove(&before);
            (start, len) = (before, size + len);
        }
        if let Some(size) = self.0.remove(&(start + len)) {
            len += size;
        }
        self.0.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fill(piece: Piece, byte: u8) {
        // SAFETY: the piece is a range of a live arena that nobody else touches.
        unsafe { piece.as_ptr().write_bytes(byte, piece.len()) }
    }

    fn first(piece: Piece) -> u8 {
        // SAFETY: as above.
        unsafe { piece.as_ptr().read() }
    }

    #[test]
    fn peers_see_what_the_owner_writes_and_cannot_reach_beyond() {
        let arena = Arena::new(1).expect("memory");
        let peer = PeerArena::map(arena.file(), arena.fixed()).expect("a second mapping");
        let offset = arena.alloc(10_000).expect("memory");
        fill(arena.piece(offset, 10_000).expect("just allocated"), 7);
        assert_eq!(first(peer.piece(offset + 9_999, 1).expect("within")), 7);
        assert_eq!(peer.piece(arena.len(), 1), None);
        assert_eq!(peer.piece(usize::MAX, 2), None);
        assert_eq!(arena.offset_of(arena.piece(offset, 5).expect("within")), Some(offset));
        assert_eq!(arena.offset_of(Piece::EMPTY), None);
    }

    #[test]
    fn a_place_that_is_asked_for_is_a_wish() {
        for node in [0, 700, 100_000] {
            let arena = Arena::near(1, Some(node)).expect("memory");
            assert_eq!(first(arena.piece(0, 1).expect("within")), 0);
        }
    }

    #[test]
    fn memory_comes_back_zeroed() {
        let arena = Arena::new(1).expect("memory");
        let offset = arena.alloc(3 * HUGE).expect("memory");
        assert_eq!(offset % HUGE, 0);
        fill(arena.piece(offset, 3 * HUGE).expect("within"), 9);
        arena.free(offset, 3 * HUGE);
        assert_eq!(arena.alloc(3 * HUGE).expect("memory"), offset);
        assert_eq!(first(arena.piece(offset, 1).expect("within")), 0);
    }

    #[test]
    fn absurd_sizes_are_refused_in_words() {
        let arena = Arena::new(1).expect("memory");
        for len in [usize::MAX, 1 << 60] {
            let error = arena.alloc(len).expect_err("no machine has that much");
            assert!(error.message().contains("cannot allocate"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_join_again(sizes in proptest::collection::vec(1usize..9, 1..30)) {
            let mut list = FreeList::new(3, 1000);
            let taken: Vec<(usize, usize)> =
                sizes.iter().map(|len| (list.take(*len, 4).expect("room"), *len)).collect();
            for (index, (start, len)) in taken.iter().enumerate() {
                prop_assert_eq!(start % 4, 0);
                prop_assert!(taken[..index].iter().all(|(other, size)| other + size <= *start || start + len <= *other));
            }
            taken.into_iter().for_each(|(start, len)| list.give(start, len));
            prop_assert_eq!(list.0, BTreeMap::from([(3, 997)]));
        }
    }
}
