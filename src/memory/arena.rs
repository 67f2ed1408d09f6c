//! The arena: all memory of a rank that its peers on the node may read.
//!
//! An arena is one anonymous file (memfd) per process and set of peers, sparse, mapped once by its owner for writing and in windows
//! by each peer for reading (see `peer_arena`). It holds a region for each communicator, with the control words of the
//! shared-memory transport and the slots of the pools, and the buffers that users allocate. Peers find something in it by its
//! offset. Its length is sealed, so no access within it can fail because the file became shorter. The file has no name in any file
//! system, so nothing is left behind, however the ranks end. Must not know what is written where.

use super::free_list::FreeList;
use super::piece::Piece;
use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, mmap, mremap_fixed, munmap};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Most bytes for users' buffers. Each rank maps the arenas of all ranks of its node, for which processes have 128 TiB of addresses.
const LONGEST: usize = 512 << 30;

/// Bytes besides, for what communicators [reserve](Arena::reserve): about 140 MiB each, most of which are slots for vectors on GPUs that no page exists of where
/// there is no GPU.
const RESERVED: usize = 16 << 30;

/// Bytes of a huge page. Allocations of this size and more are aligned to it, so that the kernel can use huge pages.
pub(super) const HUGE: usize = 2 << 20;
/// Alignment of all other allocations, in bytes: the smallest page size.
pub(super) const PAGE: usize = 4096;
/// Where address space is limited (`ulimit -v`), an arena takes at most this part of it.
const PART_OF_ADDRESS_SPACE: usize = 4;

/// A rank's own arena.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    map: MmapRaw,
    free: Mutex<FreeList>,
    /// Bytes that [`alloc`](Self::alloc) has handed out, and how many it may.
    allocated: AtomicUsize,
    most_allocated: usize,
}

impl Arena {
    /// An arena whose first `fixed` bytes are laid out by the caller. The rest is as large as the machine's memory and what communicators reserve, or as `ulimit -f`
    /// allows, and is allocated by [`alloc`](Self::alloc) and [`reserve`](Self::reserve). All bytes are zero. No page exists yet: [`populate`](Self::populate) allocates
    /// those of the front, and so does the first access to each.
    ///
    /// # Errors
    /// `System` if the memory cannot be allocated or mapped, or if `ulimit -f` is too low.
    pub fn new(fixed: usize) -> Result<Self> {
        let failed = |cause| Error::io("cannot create shared memory", cause);
        let fixed = fixed.next_multiple_of(HUGE);
        let file =
            memfd_create("flexring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        let longest = longest_file() / HUGE * HUGE;
        if longest < fixed + HUGE {
            return Err(Error::system(format!(
                "shared memory needs files of {} bytes, and this process may have files of {longest} (fix: raise the limit, `ulimit -f`)",
                fixed + HUGE
            )));
        }
        // This reserves address space only; pages are allocated when they are touched. Where address space is limited,
        // try again with half.
        let most_allocated = buffer_space();
        let reserved = if address_space().is_none() { RESERVED.min(most_allocated) } else { 0 };
        let mut len = (fixed + most_allocated + reserved).next_multiple_of(HUGE).min(longest);
        let map = loop {
            match Self::map(&file, len) {
                Ok(map) => break map,
                Err(_) if len / 2 >= fixed + HUGE => len = (len / 2).next_multiple_of(HUGE),
                Err(error) => return Err(error),
            }
        };
        // Peers fault on pages beyond the end of a file that was shortened, so they refuse memory that can be.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        let free = Mutex::new(FreeList::new(fixed, len));
        Ok(Self { file, map, free, allocated: AtomicUsize::new(0), most_allocated })
    }

    /// Sets the NUMA node from which the pages of a range, none of which exists yet, are allocated as far as it has free memory.
    /// The range starts on a page.
    pub fn prefer(&self, node: u32, offset: usize, len: usize) {
        const PREFERRED: libc::c_ulong = 1;
        const NODES: usize = 1024;
        let mut mask = [0u64; NODES / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        let Some(range) = self.piece(offset, len) else { return };
        // SAFETY: the range lies within this mapping, the mask has NODES bits, and a policy changes no contents.
        let status = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                range.as_ptr(),
                len,
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
        advise(&map);
        Ok(map)
    }

    /// Allocates the pages of a range, which starts on a page, so that touching them later neither fails nor faults. Their
    /// contents stay.
    ///
    /// # Errors
    /// `System` if there is not enough memory; `Internal` if the range exceeds the arena.
    pub fn populate(&self, offset: usize, len: usize) -> Result<()> {
        let piece = self
            .piece(offset, len)
            .ok_or_else(|| Error::internal("a range to populate exceeds the arena"))?;
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

    /// Maps `len` bytes from `offset` on a second time, at the address `at` and in place of what is mapped there. All three are
    /// multiples of a page. As the rest of the arena, forked children do not have it.
    ///
    /// # Safety
    /// The caller may replace the pages at `at`: nothing else relies on them, or all of it accepts the contents of the arena.
    ///
    /// # Errors
    /// `System` if it cannot be mapped; `Internal` if the range exceeds the arena.
    pub(super) unsafe fn map_at(&self, offset: usize, at: *mut u8, len: usize) -> Result<()> {
        if self.piece(offset, len).is_none() {
            return Err(Error::internal("a range to map exceeds the arena"));
        }
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let failed = |cause| Error::io(format_args!("cannot map {len} bytes of shared memory"), cause);
        // SAFETY: the mapping is new, at an address that the kernel chooses, and the range lies within the file.
        let map = unsafe { mmap(std::ptr::null_mut(), len, access, flags, &self.file, offset as u64) }
            .map_err(failed)?;
        // A child that is forked meanwhile never has these pages at `at`.
        advise_range(map.cast(), len);
        // SAFETY: the mapping was made above, and the caller may replace the pages at `at`.
        unsafe { move_mapping(map.cast(), len, at) }.map_err(failed)
    }

    /// Device (major and minor number) and inode of the file, as the kernel lists mappings of it.
    pub(super) fn file_id(&self) -> Option<((u32, u32), u64)> {
        let stat = rustix::fs::fstat(&self.file).ok()?;
        Some(((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)), stat.st_ino))
    }

    /// A new descriptor for peers, which can map the arena through it for reading only.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn read_only_file(&self) -> Result<OwnedFd> {
        // Opening it again through /proc is the only way to another access mode. A seal against writing would also keep
        // the owner from returning pages to the system.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        match rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => Ok(file),
            // Without /proc. Peers map it for reading in any case.
            Err(rustix::io::Errno::NOENT) => {
                log::debug!(
                    "neighbours get a writable descriptor of this rank's memory: /proc is not mounted"
                );
                self.file.try_clone().map_err(|cause| Error::io("cannot duplicate a descriptor", cause))
            }
            Err(cause) => Err(Error::io("cannot open shared memory for reading", cause)),
        }
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
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).checked_next_multiple_of(align).ok_or_else(|| out_of_memory(len))?;
        // Before the pages exist: the kernel would end a process for want of memory.
        let allocated = self.allocated.fetch_add(len, Ordering::Relaxed).saturating_add(len);
        let offset = if allocated > self.most_allocated { None } else { self.free_list().alloc(len, align) };
        let populated = offset.ok_or_else(|| out_of_memory(len)).and_then(|offset| {
            self.populate(offset, len).inspect_err(|_| self.release(offset, len)).map(|()| offset)
        });
        if populated.is_err() {
            self.allocated.fetch_sub(len, Ordering::Relaxed);
        }
        populated
    }

    /// Frees the `len` bytes that [`alloc`](Self::alloc) returned as `offset`. Their pages return to the system.
    pub fn free(&self, offset: usize, len: usize) {
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).next_multiple_of(align);
        self.release(offset, len);
        self.allocated.fetch_sub(len, Ordering::Relaxed);
    }

    /// Reserves `len` bytes from the start of a page, whose pages do not exist yet: they are zero when they are touched. Returns
    /// their offset.
    ///
    /// # Errors
    /// `System` if the arena has no such range left.
    pub fn reserve(&self, len: usize) -> Result<usize> {
        let len = len.checked_next_multiple_of(PAGE).ok_or_else(|| out_of_memory(len))?;
        self.free_list().alloc(len, PAGE).ok_or_else(|| out_of_memory(len))
    }

    /// Frees the `len` bytes that [`reserve`](Self::reserve) returned as `offset`. Their pages return to the system.
    pub fn end_reservation(&self, offset: usize, len: usize) {
        self.release(offset, len.next_multiple_of(PAGE));
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
}

/// Bytes for users' buffers: as many as the machine has, up to [`LONGEST`], or a part of the address space if that is limited.
fn buffer_space() -> usize {
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as usize).saturating_mul(info.mem_unit as usize).min(LONGEST);
    address_space().map_or(machine, |limit| machine.min(limit / PART_OF_ADDRESS_SPACE))
}

/// The limit of this process's address space in bytes (`ulimit -v`), if it has one.
pub(super) fn address_space() -> Option<usize> {
    getrlimit(Resource::As).current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// The longest file that the process may have (`ulimit -f`). A longer one, also in memory, ends the process by SIGXFSZ.
fn longest_file() -> usize {
    getrlimit(Resource::Fsize)
        .current
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Moves a mapping of `len` bytes to the address `at`, in place of what is mapped there. This is one step: other threads find either at `at`.
/// A mapping that cannot be moved is removed.
///
/// # Safety
/// `map` is a whole mapping of this length that nothing uses, and the caller may replace the pages at `at`.
pub(super) unsafe fn move_mapping(map: *mut u8, len: usize, at: *mut u8) -> rustix::io::Result<()> {
    // SAFETY: the caller guarantees both ranges.
    let moved = unsafe { mremap_fixed(map.cast(), len, len, MremapFlags::MAYMOVE, at.cast()) };
    if moved.is_err() {
        // SAFETY: the mapping is still where it was, and nothing uses it.
        let _ = unsafe { munmap(map.cast(), len) };
    }
    moved.map(drop)
}

/// Advises the kernel about a new mapping of shared memory. Best effort.
pub(super) fn advise(map: &MmapRaw) {
    advise_range(map.as_mut_ptr(), map.len());
}

/// Advises the kernel on `len` bytes at `start`, which are mappings of an arena.
fn advise_range(start: *mut u8, len: usize) {
    let advice = [
        // Huge pages mean fewer page faults and fewer TLB misses. Where the kernel refuses them for shared memory, small
        // pages work too.
        Advice::LinuxHugepage,
        // It would not be copied in a forked child: what the child wrote to a vector in it would change the parent's
        // vector, and change sums. A child that uses such a vector ends by SIGSEGV.
        Advice::LinuxDontFork,
    ];
    for advice in advice {
        // SAFETY: neither advice changes contents.
        let advised = unsafe { rustix::mm::madvise(start.cast(), len, advice) };
        if let Err(cause) = advised {
            log::debug!("the kernel refuses {advice:?} for shared memory: {cause}");
        }
    }
}

pub(super) fn piece_of(map: &MmapRaw, offset: usize, len: usize) -> Option<Piece> {
    if offset.checked_add(len)? > map.len() {
        return None;
    }
    let start = NonNull::new(map.as_mut_ptr())?;
    // SAFETY: the range lies within the mapping, which outlives every operation: transports and executor keep the
    // arena for as long as they may hold a piece of it.
    Some(unsafe { Piece::new(start.add(offset), len) })
}

fn out_of_memory(len: usize) -> Error {
    no_memory(len, rustix::io::Errno::NOMEM)
}

fn no_memory(len: usize, cause: rustix::io::Errno) -> Error {
    Error::io(format_args!("cannot allocate {len} bytes of shared memory"), cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PeerArena;

    fn fill(piece: Piece, byte: u8) {
        // SAFETY: the piece is a range of a live arena that only this test accesses.
        unsafe { piece.as_ptr().write_bytes(byte, piece.len()) }
    }

    fn first(piece: Piece) -> u8 {
        // SAFETY: as above.
        unsafe { piece.as_ptr().read() }
    }

    #[test]
    fn buffers_take_no_more_than_the_machine_has_and_return_what_they_took() {
        let arena = Arena::new(1).expect("memory");
        arena.alloc(arena.most_allocated + 1).expect_err("more than the machine has");
        arena.alloc(usize::MAX).expect_err("more than there are addresses");
        let allocated = || arena.allocated.load(Ordering::Relaxed);
        assert_eq!(allocated(), 0);
        let [short, long] = [5, 3 << 20].map(|len| arena.alloc(len).expect("memory"));
        assert_eq!(allocated(), PAGE + (4 << 20));
        arena.free(short, 5);
        arena.free(long, 3 << 20);
        assert_eq!(allocated(), 0);
        // What communicators reserve does not count.
        let reserved = arena.reserve(1 << 30).expect("addresses");
        assert_eq!(allocated(), 0);
        arena.end_reservation(reserved, 1 << 30);
    }

    #[test]
    fn peers_read_what_the_owner_writes_within_bounds() {
        let arena = Arena::new(1).expect("memory");
        let peer = PeerArena::new(arena.read_only_file().expect("a descriptor"), 1, 1).expect("an arena");
        let read = |offset, len| peer.piece(offset, len).expect("a mapping");
        let offset = arena.alloc(10_000).expect("memory");
        fill(arena.piece(offset, 10_000).expect("just allocated"), 7);
        assert_eq!(first(read(offset + 9_999, 1).expect("within")), 7);
        assert_eq!(read(arena.len(), 1), None);
        assert_eq!(read(usize::MAX, 2), None);
        assert_eq!(arena.offset_of(arena.piece(offset, 5).expect("within")), Some(offset));
        assert_eq!(arena.offset_of(Piece::EMPTY), None);
    }

    #[cfg(feature = "verbs")]
    #[test]
    fn forked_children_do_not_have_an_arena() {
        let arena = Arena::new(1).expect("memory");
        for offset in [0, arena.len() - 1] {
            let at = arena.piece(offset, 1).expect("within").as_ptr() as u64;
            assert!(crate::memory::is_unforked(at), "offset {offset}");
        }
    }

    #[test]
    fn no_page_exists_before_it_is_populated_or_touched() {
        let arena = Arena::new(64 << 20).expect("memory");
        let blocks = || rustix::fs::fstat(&arena.file).expect("an open file").st_blocks as usize * 512;
        assert_eq!(blocks(), 0);
        arena.populate(4096, 8192).expect("memory");
        assert!((8192..=HUGE).contains(&blocks()), "{} bytes exist", blocks());
        assert!(arena.populate(arena.len(), 1).is_err());
    }

    #[test]
    fn the_length_of_an_arena_is_sealed() {
        let arena = Arena::new(1).expect("memory");
        for len in [0, 2 * arena.len() as u64] {
            assert_eq!(ftruncate(&arena.file, len), Err(rustix::io::Errno::PERM), "{len} bytes");
        }
    }

    #[test]
    fn an_unavailable_numa_node_is_no_error() {
        for node in [0, 700, 100_000] {
            let arena = Arena::new(1).expect("memory");
            arena.prefer(node, HUGE, HUGE);
            assert_eq!(first(arena.piece(HUGE, 1).expect("within")), 0);
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
