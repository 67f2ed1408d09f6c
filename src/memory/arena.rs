//! The arena: all memory of a rank that its peers on the node may read.
//!
//! An arena is one anonymous file (memfd) per rank, sparse, mapped once by its owner for writing and once by each
//! peer for reading. It holds the control words of the shared-memory transport, the slots of the pool, and the buffers
//! that users allocate. An offset means the same on every rank, so nothing is registered, announced or mapped later.
//! The file has no name in any file system, so nothing is left behind, however the ranks end. Must not know what is
//! written where.

use super::free_list::FreeList;
use super::piece::Piece;
use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::Advice;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Bytes of a huge page. Allocations of this size and more are aligned to it, so that the kernel can use huge pages.
const HUGE: usize = 2 << 20;
/// Alignment of all other allocations, in bytes: the smallest page size.
const PAGE: usize = 4096;

/// A rank's own arena.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    map: MmapRaw,
    /// Bytes at the front that the communicator lays out; the rest is for users' buffers.
    fixed: usize,
    free: Mutex<FreeList>,
    /// Allocations that are identified by their address, for the C ABI: offset and length.
    leases: Mutex<BTreeMap<usize, usize>>,
}

impl Arena {
    /// An arena whose first `fixed` bytes are allocated and zero. The rest is as large as the machine's memory, and is
    /// allocated by [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// `System` if the memory cannot be allocated or mapped.
    pub fn new(fixed: usize) -> Result<Self> {
        Self::on_numa_node(fixed, None)
    }

    /// An arena like that of [`new`](Self::new), whose first `fixed` bytes are on this NUMA node as far as it has free
    /// memory.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn on_numa_node(fixed: usize, node: Option<u32>) -> Result<Self> {
        let fixed = fixed.next_multiple_of(HUGE);
        let info = rustix::system::sysinfo();
        let machine = (info.totalram as usize).saturating_mul(info.mem_unit as usize);
        let file = memfd_create("flexring", MemfdFlags::CLOEXEC)
            .map_err(|cause| Error::io("cannot create shared memory", cause))?;
        // This reserves address space only; pages are allocated when they are touched. Where address space is limited,
        // try again with half.
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

    /// Sets the NUMA node from which the pages of the fixed part, none of which exists yet, are allocated.
    fn prefer(&self, node: u32) {
        const PREFERRED: libc::c_ulong = 1;
        const NODES: usize = 1024;
        let mut mask = [0u64; NODES / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        // SAFETY: the range is the front of this mapping, the mask has NODES bits, and a policy changes no contents.
        let status = unsafe {
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
        if status != 0 {
            let cause = std::io::Error::last_os_error();
            log::debug!("memory is not placed on NUMA node {node}: {cause}");
        }
    }

    fn map(file: &OwnedFd, len: usize) -> Result<MmapRaw> {
        let failed =
            |cause: std::io::Error| Error::io(format_args!("cannot map {len} bytes of shared memory"), cause);
        ftruncate(file, len as u64).map_err(|cause| failed(cause.into()))?;
        let map = MmapOptions::new().len(len).no_reserve_swap().map_raw(file).map_err(failed)?;
        // Huge pages mean fewer page faults and fewer TLB misses. Where the kernel refuses them for shared memory, small
        // pages work too.
        // SAFETY: the range is the whole new mapping, and the advice changes no contents.
        let advised = unsafe { rustix::mm::madvise(map.as_mut_ptr().cast(), len, Advice::LinuxHugepage) };
        if let Err(cause) = advised {
            log::debug!("no huge pages for shared memory: {cause}");
        }
        hide_from_children(&map);
        Ok(map)
    }

    /// Allocates the pages of a range, so that touching them later neither fails nor faults.
    fn populate(&self, offset: usize, len: usize) -> Result<()> {
        let piece = self.piece(offset, len).expect("the range lies within the arena");
        // SAFETY: the range lies within this mapping; populating it changes no contents.
        let populated =
            unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not have this advice. Reserve the space; the first touch still faults.
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

    /// Bytes of the whole arena, most of which are not allocated.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it has no bytes; never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A range of the arena; `None` if it exceeds the arena.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        piece_of(&self.map, offset, len)
    }

    /// The offset of `piece`; `None` if it is not wholly in the arena.
    #[must_use]
    pub fn offset_of(&self, piece: Piece) -> Option<usize> {
        self.offset(piece.as_ptr(), piece.len())
    }

    /// Whether the `len` bytes at `start` are in the arena.
    #[must_use]
    pub fn contains(&self, start: *const u8, len: usize) -> bool {
        self.offset(start, len).is_some()
    }

    fn offset(&self, start: *const u8, len: usize) -> Option<usize> {
        let offset = (start as usize).checked_sub(self.map.as_ptr() as usize)?;
        (offset.checked_add(len)? <= self.len()).then_some(offset)
    }

    /// Allocates `len` zeroed bytes, aligned to a page at least, and returns their offset. Their pages exist.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn alloc(&self, len: usize) -> Result<usize> {
        let out_of_memory = || no_memory(len, rustix::io::Errno::NOMEM);
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).checked_next_multiple_of(align).ok_or_else(out_of_memory)?;
        let offset = self.free_list().alloc(len, align).ok_or_else(out_of_memory)?;
        if let Err(error) = self.populate(offset, len) {
            self.release(offset, len);
            return Err(error);
        }
        Ok(offset)
    }

    /// Frees the `len` bytes that [`alloc`](Self::alloc) returned as `offset`. Their pages return to the system.
    pub fn free(&self, offset: usize, len: usize) {
        let align = if len >= HUGE { HUGE } else { PAGE };
        self.release(offset, len.max(1).next_multiple_of(align));
    }

    /// Allocates for a caller that identifies memory by its address, as C does: offset and address.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn lease(&self, len: usize) -> Result<(usize, NonNull<u8>)> {
        let offset = self.alloc(len)?;
        let piece = self.piece(offset, len).expect("an allocation lies within its arena");
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).insert(offset, len);
        Ok((offset, NonNull::new(piece.as_ptr()).expect("a mapping does not begin at zero")))
    }

    /// The memory that was leased at this address, if any.
    #[must_use]
    pub fn leased(&self, start: *const u8) -> Option<Piece> {
        let offset = (start as usize).wrapping_sub(self.map.as_ptr() as usize);
        let len = *self.leases.lock().unwrap_or_else(PoisonError::into_inner).get(&offset)?;
        self.piece(offset, len)
    }

    /// Frees leased memory; `false` if nothing is leased at this address.
    pub fn end_lease(&self, start: *const u8) -> bool {
        let offset = (start as usize).wrapping_sub(self.map.as_ptr() as usize);
        let lease = self.leases.lock().unwrap_or_else(PoisonError::into_inner).remove(&offset);
        lease.inspect(|len| self.free(offset, *len)).is_some()
    }

    fn release(&self, offset: usize, len: usize) {
        use rustix::fs::FallocateFlags;
        // A hole reads as zeros, as `alloc` guarantees.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(cause) = rustix::fs::fallocate(&self.file, flags, offset as u64, len as u64) {
            log::warn!(
                "cannot return {len} bytes of shared memory to the system, they stay allocated: {cause}"
            );
            return;
        }
        self.free_list().free(offset, len);
    }

    fn free_list(&self) -> std::sync::MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes at the front that the communicator lays out.
    #[must_use]
    pub fn fixed(&self) -> usize {
        self.fixed
    }
}

/// A peer's arena, mapped for reading.
#[derive(Debug)]
pub struct PeerArena {
    map: MmapRaw,
}

impl PeerArena {
    /// Maps the arena behind `file`, and prefaults its first `fixed` bytes.
    ///
    /// # Errors
    /// `System` if it cannot be mapped; `Disagreement` if it is smaller than `fixed`.
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
        // SAFETY: the range is the new mapping, and the advice changes no contents.
        unsafe {
            let _ = rustix::mm::madvise(start, len, Advice::LinuxHugepage);
        }
        hide_from_children(&map);
        let arena = Self { map };
        arena.prefault(0, fixed);
        Ok(arena)
    }

    /// Prefaults a range, so that reading it later does not fault. Best effort: failures are only logged.
    pub fn prefault(&self, offset: usize, len: usize) {
        let Some(piece) = self.piece(offset, len) else { return };
        // SAFETY: the range lies within this mapping, which lives as long as `self`, and the advice changes no
        // contents. Where the kernel does not have it or the range is not page-aligned, it fails and does nothing.
        let outcome = unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateRead) };
        if let Err(cause) = outcome {
            log::debug!("cannot prefault {len} bytes of a neighbour's memory: {cause}");
        }
    }

    /// A range of the arena; `None` if it exceeds the arena. Offsets from a peer are not trusted.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        piece_of(&self.map, offset, len)
    }
}

/// Keeps shared memory out of forked children. It would not be copied: what a child wrote to a vector in it would change
/// the parent's vector, and change sums. Without it, a child that uses such a vector ends by SIGSEGV.
fn hide_from_children(map: &MmapRaw) {
    // SAFETY: the range is the whole mapping, and the advice changes nothing in this process.
    let advised = unsafe { rustix::mm::madvise(map.as_mut_ptr().cast(), map.len(), Advice::LinuxDontFork) };
    if let Err(cause) = advised {
        log::debug!("forked children share the memory of this rank: {cause}");
    }
}

fn piece_of(map: &MmapRaw, offset: usize, len: usize) -> Option<Piece> {
    if offset.checked_add(len)? > map.len() {
        return None;
    }
    let start = NonNull::new(map.as_mut_ptr())?;
    // SAFETY: the range lies within the mapping, which outlives every operation: transports and executor keep the
    // arena for as long as they may hold a piece of it.
    Some(unsafe { Piece::new(start.add(offset), len) })
}

fn no_memory(len: usize, cause: rustix::io::Errno) -> Error {
    Error::io(format_args!("cannot allocate {len} bytes of shared memory"), cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(piece: Piece, byte: u8) {
        // SAFETY: the piece is a range of a live arena that only this test accesses.
        unsafe { piece.as_ptr().write_bytes(byte, piece.len()) }
    }

    fn first(piece: Piece) -> u8 {
        // SAFETY: as above.
        unsafe { piece.as_ptr().read() }
    }

    #[test]
    fn peers_read_what_the_owner_writes_within_bounds() {
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
    fn an_unavailable_numa_node_is_no_error() {
        for node in [0, 700, 100_000] {
            let arena = Arena::on_numa_node(1, Some(node)).expect("memory");
            assert_eq!(first(arena.piece(0, 1).expect("within")), 0);
        }
    }

    #[test]
    fn freed_memory_is_zero_when_allocated_again() {
        let arena = Arena::new(1).expect("memory");
        let offset = arena.alloc(3 * HUGE).expect("memory");
        assert_eq!(offset % HUGE, 0);
        fill(arena.piece(offset, 3 * HUGE).expect("within"), 9);
        arena.free(offset, 3 * HUGE);
        assert_eq!(arena.alloc(3 * HUGE).expect("memory"), offset);
        assert_eq!(first(arena.piece(offset, 1).expect("within")), 0);
    }

    #[test]
    fn sizes_beyond_the_machine_are_refused() {
        let arena = Arena::new(1).expect("memory");
        for len in [usize::MAX, 1 << 60] {
            let error = arena.alloc(len).expect_err("no machine has that much");
            assert!(error.message().contains("cannot allocate"), "{error}");
        }
    }
}
