//! The pages of host memory that users have registered, in all communicators of this process.
//!
//! Replacing pages that another communicator has registered with its devices would leave those with the old
//! pages. So pages that are registered are not replaced, and pages that are shared stay shared until every
//! registration of them has ended.
//!
//! Owns that rule.

use crate::memory::{Arena, Piece, SharedRange};
use crate::process::PerProcess;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What is registered in this process. Locked while pages are replaced.
static ALL: PerProcess<Mutex<AllPages>> = PerProcess::new();

#[derive(Default)]
struct AllPages {
    registered: Vec<Weak<Piece>>,
    shared: Vec<Weak<SharedRange>>,
}

/// The pages of one registration.
#[derive(Debug)]
pub(super) struct RegisteredPages {
    _registered: Arc<Piece>,
    /// What of it is shared, by this registration or an earlier one.
    shared: Vec<Arc<SharedRange>>,
}

impl RegisteredPages {
    /// Registers `piece`. Its pages become those of `arena`, if there is one and they may be replaced.
    pub(super) fn new(arena: Option<&Arc<Arena>>, piece: Piece) -> Self {
        let mut all = ALL.get().lock().unwrap_or_else(PoisonError::into_inner);
        let AllPages { registered, shared } = &mut *all;
        registered.retain(|known| known.strong_count() > 0);
        shared.retain(|known| known.strong_count() > 0);
        let mut ranges: Vec<Arc<SharedRange>> =
            shared.iter().filter_map(Weak::upgrade).filter(|range| range.overlaps(piece)).collect();
        let is_known = registered.iter().filter_map(Weak::upgrade).any(|known| overlap(*known, piece));
        if let Some(arena) = arena.filter(|_| !is_known && ranges.is_empty()) {
            match SharedRange::new(arena, piece) {
                Ok(range) => {
                    let range = Arc::new(range);
                    shared.push(Arc::downgrade(&range));
                    ranges.push(range);
                }
                Err(error) => {
                    let (bytes, start) = (piece.len(), piece.as_ptr());
                    log::debug!("{bytes} registered bytes at {start:p} are not shared: {}", error.message());
                }
            }
        }
        let piece = Arc::new(piece);
        registered.push(Arc::downgrade(&piece));
        Self { _registered: piece, shared: ranges }
    }

    /// Whether any of them are shared.
    pub(super) fn are_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    /// Whether any byte of `piece` lies in a range that is shared.
    pub(super) fn share(&self, piece: Piece) -> bool {
        self.shared.iter().any(|range| range.overlaps(piece))
    }

    /// `piece` at its address in `arena`, and what copies the rest of it there; `None` if it is not shared
    /// there.
    pub(super) fn find(self: &Arc<Self>, arena: &Arc<Arena>, piece: Piece) -> Option<SharedVector> {
        let has =
            |range: &Arc<SharedRange>| Arc::ptr_eq(range.arena(), arena) && range.alias_of(piece).is_some();
        let index = self.shared.iter().position(has)?;
        Some(SharedVector { pages: Arc::clone(self), index, piece })
    }
}

impl Drop for RegisteredPages {
    fn drop(&mut self) {
        // Another registration of these pages comes before they are private again, and keeps them, or after.
        let _all = ALL.get().lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.clear();
    }
}

/// A vector in registered memory that is shared. The memory stays shared until it is dropped.
#[derive(Debug)]
pub(super) struct SharedVector {
    pages: Arc<RegisteredPages>,
    index: usize,
    piece: Piece,
}

impl SharedVector {
    fn range(&self) -> &SharedRange {
        &self.pages.shared[self.index]
    }

    /// The vector at its address in the arena.
    pub(super) fn alias(&self) -> Piece {
        self.range().alias_of(self.piece).unwrap_or(self.piece)
    }

    /// Whether `other` lies in the same range.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        std::ptr::eq(self.range(), other.range())
    }

    /// Copies to the arena what of the vector is not there, before an operation.
    pub(super) fn load(&self) {
        self.range().load(self.piece);
    }

    /// Copies it back, after an operation that writes the vector.
    pub(super) fn store(&self) {
        self.range().store(self.piece);
    }
}

/// Whether two ranges have bytes in common.
fn overlap(one: Piece, other: Piece) -> bool {
    let [(one, one_end), (other, other_end)] =
        [one, other].map(|piece| (piece.as_ptr() as usize, piece.as_ptr() as usize + piece.len()));
    one < other_end && other < one_end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lend_in_place;

    fn pages(arena: Option<&Arc<Arena>>, piece: Piece) -> Arc<RegisteredPages> {
        Arc::new(RegisteredPages::new(arena, piece))
    }

    #[test]
    fn pages_stay_shared_until_all_their_registrations_have_ended() {
        let [arena, other] = [0; 2].map(|_| Arc::new(Arena::new(1).expect("memory")));
        let mut vector = vec![7u8; 1 << 20];
        lend_in_place(&mut vector, |piece| {
            let first = pages(Some(&arena), piece);
            let second = pages(Some(&other), piece.narrow(1000, 500_000));
            let third = pages(Some(&arena), piece.narrow(2000, 1000));
            assert!(first.find(&arena, piece).is_some());
            drop(first);
            let part = piece.narrow(2000, 1000);
            assert!(second.find(&other, part).is_none() && second.find(&arena, part).is_some());
            let running = third.find(&arena, part).expect("shared");
            drop((second, third));
            // It stays shared for the call.
            assert!(pages(Some(&other), piece).find(&arena, part).is_some());
            drop(running);
            assert!(pages(Some(&other), piece).find(&other, part).is_some());
        });
        assert!(vector.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn pages_that_are_registered_already_are_not_replaced() {
        let arena = Arc::new(Arena::new(1).expect("memory"));
        let mut vector = vec![7u8; 1 << 20];
        lend_in_place(&mut vector, |piece| {
            let with_devices = pages(None, piece.narrow(5000, 1));
            assert!(pages(Some(&arena), piece).find(&arena, piece).is_none());
            drop(with_devices);
            assert!(pages(Some(&arena), piece).find(&arena, piece).is_some());
        });
    }
}
