//! The arena: all memory of a rank that its peers on the node may read.
//!
//! An arena is one file without a name (`arena_file`) per process and set of peers, sparse. Its owner maps it
//! for writing in segments, a further one when the others are used up, and each peer maps it in windows for
//! reading (see `peer_arena`). It holds a region for each communicator, with the control words of the
//! shared-memory transport and the slots of the pools, and the buffers that users allocate. Peers find
//! something in it by its offset. Its length is sealed, so no access within it can fail because the file
//! became shorter. Nothing is left behind, however the ranks end. Where the system has no such file the
//! memory belongs to this process alone.

use super::arena_file::ArenaFile;
use super::free_list::FreeList;
use super::machine::available_memory;
use super::piece::Piece;
use super::reservation::{HUGE, PAGE, Reservation, advise};
use crate::error::{Error, ErrorKind, Result};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, mmap, mremap_fixed, munmap};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Most bytes for users' buffers.
const LONGEST: usize = 512 << 30;

/// Bytes besides, for what communicators [reserve](Arena::reserve): about 140 MiB each where there are GPUs,
/// else 9 MiB.
const RESERVED: usize = 256 << 30;

/// Bytes of the first segment. Each further one doubles the arena.
const SEGMENT: usize = 1 << 30;

/// Most segments of an arena. Where address space is limited (`ulimit -v`), each takes this part of it, or
/// what is needed.
const SEGMENTS: usize = 64;

/// A rank's own arena.
#[derive(Debug)]
pub struct Arena {
    /// `None` if the memory is not shared, or the system has no file for shared memory.
    file: Option<ArenaFile>,
    /// Bytes of the file, for most of which there are no pages, nor addresses.
    len: usize,
    /// What is mapped, in the order of offsets. The first segment stands alone, because every call searches
    /// it.
    first: ArenaSegment,
    further: [OnceLock<ArenaSegment>; SEGMENTS - 1],
    space: Mutex<Space>,
    /// Bytes that [`alloc`](Self::alloc) has handed out, and how many it may.
    allocated: AtomicUsize,
    most_allocated: usize,
}

/// A part of an arena that is mapped, from the offset `start` on.
#[derive(Debug)]
struct ArenaSegment {
    start: usize,
    map: Reservation,
}

impl ArenaSegment {
    fn contains(&self, offset: usize) -> bool {
        (self.start..self.start + self.map.len()).contains(&offset)
    }

    /// The offset in the arena of the accessible `len` bytes at an address.
    #[inline]
    fn offset(&self, start: *const u8, len: usize) -> Option<usize> {
        let offset = (start as usize).checked_sub(self.map.start() as usize)?;
        (offset.checked_add(len)? <= self.map.accessible()).then_some(self.start + offset)
    }
}

/// What of an arena is free.
#[derive(Debug)]
struct Space {
    /// In the segments.
    free: FreeList,
    /// Bytes of all segments.
    mapped: usize,
    /// Where the next segment starts. There is a gap between segments, so that no range spans two.
    next: usize,
}

impl Arena {
    /// An arena whose first `fixed` bytes are laid out by the caller. The rest is as large as the machine's
    /// memory and what communicators reserve, or as `ulimit -f` allows, and is allocated by
    /// [`alloc`](Self::alloc) and [`reserve`](Self::reserve). All bytes are zero. No page exists yet:
    /// [`populate`](Self::populate) allocates those of the front, and so does the first access to each.
    ///
    /// # Errors
    /// `System` if the memory cannot be allocated or mapped, or if `ulimit -f` is too low.
    pub fn new(fixed: usize) -> Result<Self> {
        let file = match ArenaFile::new() {
            Ok(file) => Some(file),
            Err(error) if error.kind() == ErrorKind::Unsupported => None,
            Err(error) => return Err(error),
        };
        Self::with_file(file, fixed)
    }

    /// As [`new`](Self::new), for memory that no other process maps. It has no file, so neither `ulimit -f`
    /// nor the size of `/dev/shm` limits it.
    ///
    /// # Errors
    /// `System` if the memory cannot be allocated or mapped.
    pub fn private(fixed: usize) -> Result<Self> {
        Self::with_file(None, fixed)
    }

    fn with_file(file: Option<ArenaFile>, laid_out: usize) -> Result<Self> {
        let fixed = laid_out.next_multiple_of(HUGE);
        let limit = if file.is_some() { longest_file() } else { usize::MAX };
        let longest = limit / HUGE * HUGE;
        if longest < fixed + HUGE {
            return Err(Error::system(format!(
                "shared memory needs files of {} bytes, and the limit of this process is {limit} bytes (fix: raise it, `ulimit -f`)",
                fixed + HUGE
            )));
        }
        let most_allocated = available_memory().min(LONGEST);
        let len = (fixed + most_allocated + RESERVED).next_multiple_of(HUGE).min(longest);
        if let Some(file) = &file {
            file.seal(len).map_err(|cause| Error::io("cannot create shared memory", cause))?;
        }
        let mut space = Space { free: FreeList::default(), mapped: 0, next: 0 };
        let first = Self::map_segment(file.as_ref(), len, &mut space, fixed)?;
        let arena = Self {
            file,
            len,
            first,
            further: [const { OnceLock::new() }; SEGMENTS - 1],
            space: Mutex::new(space),
            allocated: AtomicUsize::new(0),
            most_allocated,
        };
        arena.take(fixed, HUGE)?;
        arena.provide(0, laid_out)?;
        Ok(arena)
    }

    /// Sets the NUMA node from which the pages of a range, none of which exists yet, are allocated as far as
    /// it has free memory. The range starts on a page.
    pub fn prefer(&self, node: u32, offset: usize, len: usize) {
        const PREFERRED: libc::c_ulong = 1;
        const NODES: usize = 1024;
        let mut mask = [0u64; NODES / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        let Some(range) = self.piece(offset, len) else { return };
        // SAFETY: the range lies within this mapping, the mask has NODES bits, and a policy changes no
        // contents.
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

    /// Maps the next segment of an arena of `total` bytes, with room for `len` bytes at a multiple of a huge
    /// page.
    fn map_segment(
        file: Option<&ArenaFile>,
        total: usize,
        space: &mut Space,
        len: usize,
    ) -> Result<ArenaSegment> {
        let needed = len.checked_next_multiple_of(HUGE).ok_or_else(|| out_of_memory(len))?;
        let start = space.next;
        let room = total.saturating_sub(start);
        if needed > room {
            return Err(out_of_memory(len));
        }
        let usual = address_space().map_or(space.mapped.max(SEGMENT), |limit| limit / SEGMENTS / HUGE * HUGE);
        let mut bytes = usual.clamp(needed, room);
        // This reserves address space only; pages are allocated when they are touched. Where it is short, try
        // again with half.
        let map = loop {
            match Reservation::new(file.map(AsFd::as_fd), start, bytes, true) {
                Ok(map) => break map,
                Err(_) if bytes > needed => bytes = (bytes / 2).next_multiple_of(HUGE).max(needed),
                Err(cause) => return Err(not_mapped(bytes, cause)),
            }
        };
        space.free.free(start, bytes);
        space.mapped += bytes;
        space.next = start + bytes + HUGE;
        Ok(ArenaSegment { start, map })
    }

    /// Maps a further segment.
    fn add_segment(&self, space: &mut Space, len: usize) -> Result<()> {
        let place = self.further.iter().find(|place| place.get().is_none());
        let place = place.ok_or_else(|| out_of_memory(len))?;
        // Only this function sets it, under the lock.
        let _ = place.set(Self::map_segment(self.file.as_ref(), self.len, space, len)?);
        Ok(())
    }

    /// Takes `len` bytes at a multiple of `align`, and makes them accessible. Returns their offset.
    fn take(&self, len: usize, align: usize) -> Result<usize> {
        let mut space = self.space();
        let offset = match space.free.alloc(len, align) {
            Some(offset) => offset,
            None => {
                self.add_segment(&mut space, len)?;
                space.free.alloc(len, align).ok_or_else(|| out_of_memory(len))?
            }
        };
        drop(space);
        let accessible = (|| {
            let segment = self.segment(offset).ok_or_else(|| Error::internal("a range in no segment"))?;
            segment.map.grow(offset - segment.start + len).map_err(|cause| no_memory(len, cause))
        })();
        accessible.inspect_err(|_| self.release(offset, len)).map(|()| offset)
    }

    /// The segment that contains an offset.
    fn segment(&self, offset: usize) -> Option<&ArenaSegment> {
        let first = Some(&self.first).filter(|first| first.contains(offset));
        first.or_else(|| self.further().find(|segment| segment.contains(offset)))
    }

    fn further(&self) -> impl Iterator<Item = &ArenaSegment> {
        self.further.iter().map_while(OnceLock::get)
    }

    /// Allocates the pages of a range, which starts on a page, so that touching them later neither fails nor
    /// faults. Their contents stay.
    ///
    /// # Errors
    /// `System` if there is not enough memory; `Internal` if the range exceeds the arena.
    pub fn populate(&self, offset: usize, len: usize) -> Result<()> {
        let piece = self
            .piece(offset, len)
            .ok_or_else(|| Error::internal("a range to populate exceeds the arena"))?;
        self.provide(offset, len)?;
        // SAFETY: the range lies within this mapping; populating it changes no contents.
        let populated =
            unsafe { rustix::mm::madvise(piece.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
        match populated {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not have this advice. Reserve the space; the first touch still faults.
            Err(rustix::io::Errno::INVAL) => self
                .file
                .as_ref()
                .map_or(Ok(()), |file| file.allocate(offset, len))
                .map_err(|cause| no_memory(len, cause)),
            Err(cause) => Err(no_memory(len, cause)),
        }
    }

    /// Makes sure that the pages of a range can be touched, where the file is limited: to touch one for which
    /// there is no room would end this process. [`populate`](Self::populate) does, too.
    ///
    /// # Errors
    /// `System` if there is no room.
    pub fn provide(&self, offset: usize, len: usize) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.provide(offset, len))
    }

    /// Maps `len` bytes from `offset` on a second time, at the address `at` and in place of what is mapped
    /// there. All three are multiples of a page. As the rest of the arena, forked children do not have it.
    ///
    /// # Safety
    /// The caller may replace the pages at `at`: nothing else relies on them, or all of it accepts the
    /// contents of the arena.
    ///
    /// # Errors
    /// `System` if it cannot be mapped; `Internal` if the range exceeds the arena.
    pub(super) unsafe fn map_at(&self, offset: usize, at: *mut u8, len: usize) -> Result<()> {
        let file = self.file.as_ref().filter(|_| self.piece(offset, len).is_some());
        let file = file.ok_or_else(|| Error::internal("a range to map exceeds the arena, or has no file"))?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let failed = |cause| Error::io(format_args!("cannot map {len} bytes of shared memory"), cause);
        // SAFETY: the mapping is new, at an address that the kernel chooses, and the range lies within the
        // file.
        let map =
            unsafe { mmap(std::ptr::null_mut(), len, access, flags, file, offset as u64) }.map_err(failed)?;
        // A child that is forked meanwhile never has these pages at `at`.
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: the mapping was made above.
            unsafe { advise(map.cast(), len, advice) };
        }
        // SAFETY: the mapping was made above, and the caller may replace the pages at `at`.
        unsafe { move_mapping(map.cast(), len, at) }.map_err(failed)
    }

    /// Device (major and minor number) and inode of the file, as the kernel lists mappings of it.
    pub(super) fn file_id(&self) -> Option<((u32, u32), u64)> {
        let stat = rustix::fs::fstat(self.file.as_ref()?).ok()?;
        Some(((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)), stat.st_ino))
    }

    /// A new descriptor for peers, which can map the arena through it for reading only.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left; `Unsupported` if the arena has no file.
    pub fn read_only_file(&self) -> Result<OwnedFd> {
        let file = self.file.as_ref();
        file.ok_or_else(|| Error::unsupported("this process cannot share memory"))?.read_only()
    }

    /// Whether the memory belongs to this process alone, because it is not shared or the system has no file
    /// for shared memory.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.file.is_none()
    }

    /// Bytes of the whole arena, most of which are not allocated.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes; never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A range of the arena; `None` if it is not wholly accessible. What is laid out, allocated or reserved
    /// is; free bytes may be, too.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Option<Piece> {
        let segment = self.segment(offset)?;
        segment.map.piece(offset - segment.start, len)
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
        let first = self.first.offset(start, len);
        first.or_else(|| self.further().find_map(|segment| segment.offset(start, len)))
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
        let offset =
            if allocated > self.most_allocated { Err(out_of_memory(len)) } else { self.take(len, align) };
        let populated = offset.and_then(|offset| {
            self.populate(offset, len).inspect_err(|_| self.release(offset, len))?;
            // Vectors of the user belong into a core dump.
            self.advise(offset, len, Advice::LinuxDoDump);
            Ok(offset)
        });
        if populated.is_err() {
            self.allocated.fetch_sub(len, Ordering::Relaxed);
        }
        populated
    }

    /// Frees the `len` bytes that [`alloc`](Self::alloc) returned as `offset`. Their pages return to the
    /// system.
    pub fn free(&self, offset: usize, len: usize) {
        let align = if len >= HUGE { HUGE } else { PAGE };
        let len = len.max(1).next_multiple_of(align);
        self.advise(offset, len, Advice::LinuxDontDump);
        self.release(offset, len);
        self.allocated.fetch_sub(len, Ordering::Relaxed);
    }

    /// Reserves `len` bytes from the start of a page, whose pages do not exist yet: they are zero when they
    /// are touched, after [`provide`](Self::provide). Returns their offset.
    ///
    /// # Errors
    /// `System` if the arena has no such range left.
    pub fn reserve(&self, len: usize) -> Result<usize> {
        let len = len.checked_next_multiple_of(PAGE).ok_or_else(|| out_of_memory(len))?;
        self.take(len, PAGE)
    }

    /// Frees the `len` bytes that [`reserve`](Self::reserve) returned as `offset`. Their pages return to the
    /// system.
    pub fn end_reservation(&self, offset: usize, len: usize) {
        self.release(offset, len.next_multiple_of(PAGE));
    }

    fn release(&self, offset: usize, len: usize) {
        // A hole reads as zeros, as `alloc` guarantees.
        let punched = match (&self.file, self.piece(offset, len)) {
            (Some(file), _) => file.punch(offset, len),
            // SAFETY: the range lies within private memory of this arena, and its user has freed it.
            (None, Some(range)) => unsafe {
                rustix::mm::madvise(range.as_ptr().cast(), len, Advice::LinuxDontNeed)
            },
            (None, None) => Ok(()),
        };
        if let Err(cause) = punched {
            log::warn!(
                "cannot return {len} bytes of shared memory to the system, they stay allocated: {cause}"
            );
            return;
        }
        self.space().free.free(offset, len);
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) {
        if let Some(range) = self.piece(offset, len) {
            // SAFETY: the range lies within this arena, and the advice concerns core dumps.
            unsafe { advise(range.as_ptr(), len, advice) };
        }
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The limit of this process's address space in bytes (`ulimit -v`), if it has one.
pub(super) fn address_space() -> Option<usize> {
    getrlimit(Resource::As).current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// The longest file that the process may have (`ulimit -f`). A longer one, also in memory, ends the process
/// by SIGXFSZ.
fn longest_file() -> usize {
    getrlimit(Resource::Fsize)
        .current
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Moves a mapping of `len` bytes to the address `at`, in place of what is mapped there. This is one step:
/// other threads find either at `at`. A mapping that cannot be moved is removed.
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

fn not_mapped(len: usize, cause: rustix::io::Errno) -> Error {
    Error::io(format_args!("cannot map {len} bytes of shared memory"), cause)
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
    use rustix::fs::{fstat, ftruncate};
    use std::sync::Arc;

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

    /// The file of an arena, as the system has memfds here.
    fn file(arena: &Arena) -> &ArenaFile {
        arena.file.as_ref().expect("memory that can be shared")
    }

    /// The flags of the mapping at an offset of an arena, as `/proc/self/smaps` lists them.
    #[cfg(any(feature = "cuda", feature = "verbs"))]
    fn flags(arena: &Arena, offset: usize) -> Vec<String> {
        let segment = arena.segment(offset).expect("mapped");
        let at = segment.map.start() as u64 + (offset - segment.start) as u64;
        crate::memory::mapping_flags(at).expect("mapped")
    }

    #[cfg(any(feature = "cuda", feature = "verbs"))]
    #[test]
    fn forked_children_do_not_have_an_arena_and_dumps_have_only_what_users_allocated() {
        let arena = Arena::new(1).expect("memory");
        let has = |offset, flag: &str| flags(&arena, offset).iter().any(|one| one == flag);
        let [short, long] = [5, 5 << 20].map(|len| arena.alloc(len).expect("memory"));
        let slots = arena.reserve(SEGMENT).expect("addresses");
        for offset in [0, short, long, SEGMENT - 1, slots, slots + SEGMENT - 1] {
            assert!(has(offset, "dc"), "offset {offset} is copied in a forked child");
            let is_users = [short, long].contains(&offset);
            assert_eq!(has(offset, "dd"), !is_users, "offset {offset}");
        }
        arena.free(long, 5 << 20);
        assert!(has(long, "dd"));
    }

    #[test]
    fn only_what_was_used_is_accessible_and_little_is_mapped() {
        let arena = Arena::new(1).expect("memory");
        assert_eq!((arena.first.map.len(), arena.further().count()), (SEGMENT, 0));
        assert_eq!((arena.piece(HUGE - 1, 1).is_some(), arena.piece(HUGE, 1)), (true, None));
        let offset = arena.reserve(3 * HUGE).expect("addresses");
        assert!(arena.piece(offset, 3 * HUGE).is_some());
        assert_eq!(arena.piece(offset + 3 * HUGE, 1), None);
        // In another segment, as the first is too short.
        let long = arena.reserve(SEGMENT).expect("addresses");
        let end = arena.piece(long + SEGMENT - 1, 1).expect("accessible");
        fill(end, 3);
        assert_eq!(arena.offset_of(end), Some(long + SEGMENT - 1));
        let peer = PeerArena::new(arena.read_only_file().expect("a descriptor"), 1, 1).expect("an arena");
        assert_eq!(first(peer.piece(long + SEGMENT - 1, 1).expect("a mapping").expect("within")), 3);
        arena.end_reservation(long, SEGMENT);
        assert_eq!(arena.reserve(SEGMENT).expect("addresses"), long);
    }

    /// With `overcommit_memory=2` the kernel refuses memory beyond the machine's, whether it is used or not.
    #[test]
    fn addresses_do_not_count_as_memory_that_is_committed() {
        let committed = || {
            let text = std::fs::read_to_string("/proc/meminfo").expect("the kernel sums it up");
            let line = text.lines().find_map(|line| line.strip_prefix("Committed_AS:")).expect("a sum");
            line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
        };
        let before = committed();
        let arenas = [0; 8].map(|_| Arena::new(1).expect("memory"));
        let reserved = arenas.each_ref().map(|arena| arena.reserve(64 << 30).expect("addresses")).len();
        // Other processes allocate, too, but not that much.
        assert!(committed() < before + (reserved << 36), "{before} bytes before");
    }

    #[test]
    fn memory_without_a_file_is_used_as_other_memory_is() {
        let arena = Arc::new(Arena::with_file(None, 1).expect("memory"));
        assert!(arena.is_private() && arena.read_only_file().is_err());
        let offset = arena.alloc(3 * HUGE).expect("memory");
        fill(arena.piece(offset, 3 * HUGE).expect("within"), 9);
        let peer = PeerArena::of_this_process(&arena, 2, 1).expect("an arena");
        assert_eq!(first(peer.piece(offset, 1).expect("a mapping").expect("within")), 9);
        arena.free(offset, 3 * HUGE);
        assert_eq!(arena.alloc(3 * HUGE).expect("memory"), offset);
        assert_eq!(first(arena.piece(offset, 1).expect("within")), 0);
    }

    #[test]
    fn no_page_exists_before_it_is_populated_or_touched() {
        let arena = Arena::new(64 << 20).expect("memory");
        let blocks = || fstat(file(&arena)).expect("an open file").st_blocks as usize * 512;
        assert_eq!(blocks(), 0);
        arena.populate(4096, 8192).expect("memory");
        assert!((8192..=HUGE).contains(&blocks()), "{} bytes exist", blocks());
        assert!(arena.populate(arena.len(), 1).is_err());
    }

    #[test]
    fn the_length_of_an_arena_is_sealed() {
        let arena = Arena::new(1).expect("memory");
        for len in [0, 2 * arena.len() as u64] {
            assert_eq!(ftruncate(file(&arena), len), Err(rustix::io::Errno::PERM), "{len} bytes");
        }
    }

    #[test]
    fn an_unavailable_numa_node_is_no_error() {
        for node in [0, 700, 100_000] {
            let arena = Arena::new(2 * HUGE).expect("memory");
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
