//! Vectors that users allocate from the arena.

use super::{Arena, Piece, Registrar};
use crate::dtype::Element;
use crate::error::{Error, Result};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A vector in memory that peers on the node read directly, so that reducing it copies nothing. Starts as zeros.
pub struct Buffer<T: Element> {
    arena: Arc<Arena>,
    registrar: Option<Arc<dyn Registrar>>,
    piece: Piece,
    offset: usize,
    elements: PhantomData<T>,
}

// SAFETY: a buffer owns its bytes like a vector does; elements are plain numbers.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// A vector of `len` zeros, of which `registrar` is told for as long as it lives.
    pub(crate) fn new(arena: Arc<Arena>, len: usize, registrar: Option<Arc<dyn Registrar>>) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid_argument(format!("{len} elements are more than any memory holds"))
        })?;
        let offset = arena.alloc(bytes)?;
        let piece = arena.piece(offset, bytes).expect("an allocation lies within its arena");
        if let Some(registrar) = &registrar {
            registrar.tell(piece);
        }
        Ok(Self { arena, registrar, piece, offset, elements: PhantomData })
    }
}

impl<T: Element> Buffer<T> {
    /// All of it. The piece must not outlive the buffer.
    pub(crate) fn piece(&self) -> Piece {
        self.piece
    }

    /// Where it begins in its arena.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the bytes are this buffer's own for as long as it lives, page-aligned, initialised with zeros,
        // and every bit pattern is an element.
        unsafe { std::slice::from_raw_parts(self.piece.as_ptr().cast(), self.piece.len() / size_of::<T>()) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; the borrow of the buffer is exclusive, and peers only read it during an operation,
        // which borrows it too.
        unsafe {
            std::slice::from_raw_parts_mut(self.piece.as_ptr().cast(), self.piece.len() / size_of::<T>())
        }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(registrar) = &self.registrar {
            registrar.forget(self.piece);
        }
        self.arena.free(self.offset, self.piece.len());
    }
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} elements)", self.len())
    }
}
