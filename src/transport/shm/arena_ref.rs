//! A typed reference into an arena.
//!
//! Owns the checks that make it sound: size, alignment and lifetime.

use crate::error::{Error, Result};
use crate::memory::Piece;
use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// What keeps an arena mapped: the `Arc` of an `Arena` or a `PeerArena`.
pub(super) type ArenaOwner = Arc<dyn Any + Send + Sync>;

/// A `T` that lies in an arena, and the owner that keeps the arena mapped.
#[derive(Debug)]
pub(super) struct ArenaRef<T> {
    target: NonNull<T>,
    _owner: ArenaOwner,
}

// SAFETY: every `T` that is placed in an arena consists of atomics, which any thread may use.
unsafe impl<T: Sync> Send for ArenaRef<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for ArenaRef<T> {}

impl<T> ArenaRef<T> {
    /// The `T` at the start of `piece`. `T` must consist of atomics, and `piece` must lie in the arena that
    /// `owner` keeps mapped.
    ///
    /// # Errors
    /// `Internal` if `piece` is `None`, too short or not aligned.
    pub(super) fn new(piece: Option<Piece>, owner: ArenaOwner) -> Result<Self> {
        let fits = |piece: &Piece| piece.len() >= size_of::<T>() && piece.as_ptr().cast::<T>().is_aligned();
        let target = piece
            .filter(fits)
            .and_then(|piece| NonNull::new(piece.as_ptr().cast::<T>()))
            .ok_or_else(|| Error::internal("the layout does not fit the arena"))?;
        Ok(Self { target, _owner: owner })
    }
}

impl<T> Deref for ArenaRef<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the memory holds a T for as long as `_owner` lives: zeros are a valid T, since it consists
        // of atomic integers, and arenas start as zeros; `new` checked alignment and size.
        unsafe { self.target.as_ref() }
    }
}
