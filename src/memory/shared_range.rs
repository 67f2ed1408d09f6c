//! Memory of the user that peers on the node read directly, although the user has allocated it.
//!
//! The pages of the range that it covers entirely are replaced by pages of the arena with the same contents,
//! so the user's address and the arena's name the same bytes. The bytes before and after these pages share
//! their page with memory of others, so they stay where they are, and are copied to the arena and back for
//! each operation.
//!
//! Owns the replacement, which ends when the range is dropped: the bytes are then private again.

use super::arena::{Arena, move_mapping};
use super::mappings::mappings;
use super::piece::{Piece, populate};
use super::reservation::HUGE;
use crate::error::{Error, Result};
use crate::process::CreatorProcess;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of whole pages from which on they are shared.
const LEAST: usize = 64 << 10;

/// A range of user memory whose whole pages lie in an arena.
#[derive(Debug)]
pub struct SharedRange {
    creator: CreatorProcess,
    arena: Arc<Arena>,
    /// The range, at the user's address.
    user: Piece,
    /// Addresses of the pages that were replaced.
    pages: Range<usize>,
    /// The range in the arena: the bytes of these pages, and room for those before and after them.
    alias: Piece,
    /// What is reserved in the arena: offset and length.
    reserved: (usize, usize),
}

impl SharedRange {
    /// Replaces the whole pages of `user` by pages of `arena`. Until the range is dropped, the memory must
    /// stay allocated, and its pages must not be registered with a device at the user's address. Nothing may
    /// write the memory meanwhile, and nothing else may rely on its pages, such as a device that they are
    /// registered with.
    ///
    /// # Errors
    /// `Unsupported` if the range is too short, or not private memory of this process that may be replaced;
    /// `System` if there is too little memory. The memory is then as it was.
    pub fn new(arena: &Arc<Arena>, user: Piece) -> Result<Self> {
        let page = rustix::param::page_size();
        let (start, end) = (user.as_ptr() as usize, user.as_ptr() as usize + user.len());
        let pages = start.next_multiple_of(page)..end / page * page;
        if !user.is_host() || pages.len() < LEAST {
            return Err(Error::unsupported(format!("it has less than {LEAST} bytes of whole pages")));
        }
        check_replaceable(&pages)?;
        // Equal positions in huge pages, so that the kernel can map some at both addresses.
        let align = if pages.len() >= HUGE { HUGE } else { page };
        let first = start / page * page;
        let reserved_len = end.next_multiple_of(page) - first + align;
        let reserved = (arena.reserve(reserved_len)?, reserved_len);
        let offset = reserved.0 + first.wrapping_sub(reserved.0) % align;
        let shared = (|| {
            arena.populate(offset, end - first)?;
            let alias = arena.piece(offset + (start - first), user.len());
            let alias = alias.ok_or_else(|| Error::internal("a reservation exceeds its arena"))?;
            let inner = alias.narrow(pages.start - start, pages.len());
            let at = user.narrow(pages.start - start, pages.len());
            // SAFETY: the user's bytes are valid and not written meanwhile, and nothing else uses the
            // reservation, which is apart from them.
            unsafe { at.as_ptr().copy_to_nonoverlapping(inner.as_ptr(), inner.len()) };
            // SAFETY: these are whole pages of private memory within the user's range, no others' bytes are
            // in them, and the arena has the same contents.
            unsafe { arena.map_at(offset + (pages.start - first), at.as_ptr(), at.len())? };
            populate(at);
            Ok(alias)
        })();
        match shared {
            Ok(alias) => {
                let (arena, creator) = (Arc::clone(arena), CreatorProcess::current());
                Ok(Self { creator, arena, user, pages, alias, reserved })
            }
            Err(error) => {
                arena.end_reservation(reserved.0, reserved.1);
                Err(error)
            }
        }
    }

    /// The arena that the pages lie in.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// `piece` at its address in the arena; `None` if it is not wholly in this range.
    #[must_use]
    pub fn alias_of(&self, piece: Piece) -> Option<Piece> {
        let at = self.position(piece)?;
        Some(self.alias.narrow(at, piece.len()))
    }

    /// Whether `piece` and this range have bytes in common.
    #[must_use]
    pub fn overlaps(&self, piece: Piece) -> bool {
        let (start, user) = (piece.as_ptr() as usize, self.user.as_ptr() as usize);
        start < user + self.user.len() && user < start + piece.len()
    }

    /// Copies to the arena what of `piece`, a part of this range, is not in pages of the arena.
    pub fn load(&self, piece: Piece) {
        self.copy_edges(piece, |user, alias, len| {
            // SAFETY: the operation that gets the piece may read it, the alias belongs to this range and is
            // apart from it.
            unsafe { user.copy_to_nonoverlapping(alias, len) };
        });
    }

    /// Copies back from the arena what [`load`](Self::load) has copied. The operation writes `piece`, and is
    /// over.
    pub fn store(&self, piece: Piece) {
        self.copy_edges(piece, |user, alias, len| {
            // SAFETY: the operation that gets the piece may write it, the alias belongs to this range and is
            // apart from it.
            unsafe { alias.copy_to_nonoverlapping(user, len) };
        });
    }

    fn copy_edges(&self, piece: Piece, copy: impl Fn(*mut u8, *mut u8, usize)) {
        let Some(at) = self.position(piece) else { return };
        let head = self.pages.start - self.user.as_ptr() as usize;
        let tail = head + self.pages.len();
        for edge in [0..head, tail..self.user.len()] {
            let part = edge.start.max(at)..edge.end.min(at + piece.len());
            if !part.is_empty() {
                let [user, alias] = [self.user, self.alias].map(|whole| whole.narrow(part.start, part.len()));
                copy(user.as_ptr(), alias.as_ptr(), part.len());
            }
        }
    }

    /// The offset of `piece` in this range; `None` if it is not wholly in it.
    fn position(&self, piece: Piece) -> Option<usize> {
        let at = (piece.as_ptr() as usize).checked_sub(self.user.as_ptr() as usize)?;
        (piece.is_host() && at.checked_add(piece.len())? <= self.user.len()).then_some(at)
    }

    /// Replaces the pages by private ones with the same contents.
    fn make_private(&self) -> Result<()> {
        if !self.is_mapped()? {
            return Err(Error::internal("it was freed or moved before it was deregistered"));
        }
        let len = self.pages.len();
        let inner = self.alias.narrow(self.pages.start - self.user.as_ptr() as usize, len);
        let failed = |cause| Error::io(format_args!("cannot map {len} bytes"), cause);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is new, at an address that the kernel chooses.
        let copy = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        let copy = copy.map_err(failed)?;
        // SAFETY: both have this length, and are apart.
        unsafe { inner.as_ptr().copy_to_nonoverlapping(copy.cast(), len) };
        let target = self.user.narrow(self.pages.start - self.user.as_ptr() as usize, len).as_ptr();
        // SAFETY: the mapping was made above, and the range still has the pages of the arena with which `new`
        // has replaced private ones, as was checked above; the contents are equal.
        unsafe { move_mapping(copy.cast(), len, target) }.map_err(failed)
    }

    /// Whether the pages of the arena are still mapped in the range.
    fn is_mapped(&self) -> Result<bool> {
        let Some(start) = self.arena.offset_of(self.alias) else { return Ok(false) };
        let first = start + (self.pages.start - self.user.as_ptr() as usize);
        let mut next = self.pages.start;
        for mapping in mappings(&self.pages)? {
            let from = mapping.addresses.start.max(next);
            let expected = (first + (from - self.pages.start)) as u64;
            let found = mapping.offset + (from - mapping.addresses.start) as u64;
            if from != next || Some(mapping.file) != self.arena.file_id() || found != expected {
                return Ok(false);
            }
            next = mapping.addresses.end;
        }
        Ok(next >= self.pages.end)
    }
}

impl Drop for SharedRange {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            // The memory is that of the parent, and is not mapped here.
            std::mem::forget(Arc::clone(&self.arena));
            return;
        }
        match self.make_private() {
            Ok(()) => self.arena.end_reservation(self.reserved.0, self.reserved.1),
            // The pages stay in the arena, so that nothing else is written there while they may be mapped.
            Err(error) => log::warn!(
                "{} registered bytes at {:p} stay shared memory: {}",
                self.user.len(),
                self.user.as_ptr(),
                error.message()
            ),
        }
    }
}

/// Checks that these pages are private memory of this process without a file, which may be replaced.
fn check_replaceable(pages: &Range<usize>) -> Result<()> {
    let refuse = |reason: &str| Err(Error::unsupported(reason));
    let mut next = pages.start;
    for mapping in mappings(pages)? {
        if mapping.addresses.start > next {
            break;
        }
        if !mapping.is_private_writable || mapping.file.1 != 0 {
            return refuse("it is shared, belongs to a file or may not be written");
        }
        if mapping.name == "[stack]" || mapping.is_locked {
            return refuse("it is the stack, or locked in memory");
        }
        next = mapping.addresses.end;
    }
    if next < pages.end { refuse("it is not mapped") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lend_in_place;
    use rustix::mm::munmap;

    const LEN: usize = 300_000;

    /// Whether the pages at an address belong to a file.
    fn has_file(at: *const u8) -> bool {
        mappings(&(at as usize..at as usize + 1)).expect("the kernel lists mappings")[0].file.1 != 0
    }

    fn pattern(at: usize) -> u8 {
        (at % 251) as u8
    }

    fn byte(piece: Piece, at: usize) -> u8 {
        // SAFETY: the piece is memory that only this test accesses.
        unsafe { piece.narrow(at, 1).as_ptr().read() }
    }

    fn set(piece: Piece, at: usize, value: u8) {
        // SAFETY: as above.
        unsafe { piece.narrow(at, 1).as_ptr().write(value) }
    }

    fn new_arena() -> Arc<Arena> {
        Arc::new(Arena::new(1).expect("memory"))
    }

    #[test]
    fn a_range_names_the_bytes_of_the_arena_and_keeps_them_when_it_ends() {
        let arena = new_arena();
        for (before, after) in [(0, 0), (1, 5), (4095, 4097), (5000, 1)] {
            let mut vector: Vec<u8> = (0..LEN).map(pattern).collect();
            lend_in_place(&mut vector, |whole| {
                let user = whole.narrow(before, LEN - before - after);
                let range = SharedRange::new(&arena, user).expect("private memory");
                assert!(has_file(user.narrow(user.len() / 2, 1).as_ptr()));
                assert!((0..LEN).all(|at| byte(whole, at) == pattern(at)));
                let alias = range.alias_of(user).expect("the whole range");
                let middle = user.len() / 2;
                set(user, middle, 252);
                assert_eq!(byte(alias, middle), 252);
                set(alias, middle + 1, 253);
                assert_eq!(byte(user, middle + 1), 253);
                // An operation that writes all of it.
                range.load(user);
                assert!((0..user.len()).all(|at| byte(alias, at) == byte(user, at)));
                (0..user.len()).for_each(|at| set(alias, at, 254));
                range.store(user);
                drop(range);
                assert!(!has_file(user.narrow(middle, 1).as_ptr()));
                for at in 0..LEN {
                    let is_user = (before..LEN - after).contains(&at);
                    assert_eq!(byte(whole, at), if is_user { 254 } else { pattern(at) }, "{at}");
                }
            });
        }
    }

    #[test]
    fn an_operation_on_a_part_copies_bytes_of_that_part_only() {
        let arena = new_arena();
        let mut vector = vec![1u8; LEN];
        lend_in_place(&mut vector, |user| {
            let range = SharedRange::new(&arena, user).expect("private memory");
            for (from, to) in [(0, 10), (3, 5), (LEN - 7, LEN), (LEN - 9, LEN - 8), (1, LEN - 1)] {
                let part = user.narrow(from, to - from);
                let alias = range.alias_of(part).expect("a part");
                range.load(part);
                (0..part.len()).for_each(|at| set(alias, at, 2));
                range.store(part);
                for at in 0..LEN {
                    assert_eq!(
                        byte(user, at),
                        if (from..to).contains(&at) { 2 } else { 1 },
                        "{from}..{to}: {at}"
                    );
                }
                (0..part.len()).for_each(|at| set(part, at, 1));
            }
            drop(range);
        });
    }

    #[test]
    fn parts_of_other_memory_have_no_alias() {
        let arena = new_arena();
        let mut vector = vec![1u8; LEN];
        lend_in_place(&mut vector, |whole| {
            let user = whole.narrow(10_000, LEN - 20_000);
            let range = SharedRange::new(&arena, user).expect("private memory");
            assert!(range.alias_of(whole).is_none() && range.overlaps(whole));
            assert!(range.alias_of(whole.narrow(9_999, 2)).is_none());
            assert!(range.alias_of(whole.narrow(LEN - 10_001, 2)).is_none());
            assert!(
                !range.overlaps(whole.narrow(0, 10_000)) && !range.overlaps(whole.narrow(LEN - 10_000, 1))
            );
            assert_eq!(range.alias_of(user), Some(range.alias));
        });
    }

    /// `LEN` bytes of a new mapping, given to `body`.
    fn mapped(access: ProtFlags, flags: MapFlags, body: impl FnOnce(Piece)) {
        // SAFETY: the mapping is new, and nothing uses it after its end.
        unsafe {
            let start = mmap_anonymous(std::ptr::null_mut(), LEN, access, flags).expect("memory");
            body(Piece::new(std::ptr::NonNull::new(start.cast()).expect("not zero"), LEN));
            munmap(start, LEN).expect("mapped");
        }
    }

    #[test]
    fn memory_that_is_not_private_and_writable_is_refused() {
        let arena = new_arena();
        let refused = |piece: Piece, reason: &str| {
            let error = SharedRange::new(&arena, piece).expect_err(reason);
            assert!(error.message().contains(reason), "{error}");
        };
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        mapped(writable, MapFlags::SHARED, |piece| refused(piece, "it is shared, belongs to a file"));
        mapped(ProtFlags::READ, MapFlags::PRIVATE, |piece| refused(piece, "or may not be written"));
        mapped(writable, MapFlags::PRIVATE, |piece| {
            refused(piece.narrow(1, LEAST - 1), "it has less than");
            let range = SharedRange::new(&arena, piece).expect("private memory");
            refused(piece, "it is shared, belongs to a file");
            drop(range);
            let hole = piece.narrow(81_920, 4096);
            // SAFETY: nothing uses this page any more.
            unsafe { munmap(hole.as_ptr().cast(), hole.len()) }.expect("mapped");
            refused(piece, "it is not mapped");
        });
    }

    #[test]
    fn memory_that_took_the_place_of_a_range_stays_as_it_is() {
        let arena = new_arena();
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        mapped(writable, MapFlags::PRIVATE, |piece| {
            let range = SharedRange::new(&arena, piece).expect("private memory");
            // SAFETY: the old mapping is not used any more.
            let other = unsafe {
                mmap_anonymous(piece.as_ptr().cast(), LEN, writable, MapFlags::PRIVATE | MapFlags::FIXED)
            };
            assert!(other.is_ok());
            set(piece, LEN / 2, 9);
            drop(range);
            assert_eq!(byte(piece, LEN / 2), 9);
        });
    }
}
