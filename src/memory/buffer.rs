//! Vectors that users allocate from the arena.

use super::arena::Arena;
use super::piece::Piece;
use super::registrar::Registrar;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::process::CreatorProcess;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A vector in memory that peers on the node read directly, so that reducing it needs no copies. Initially
/// zero.
///
/// A forked child of this process does not have the memory: using the vector ends the child by SIGSEGV,
/// dropping it has no effect.
///
/// ```
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::local(1)?.remove(0);
/// let mut gradient = comm.alloc::<f32>(1 << 20)?;
/// gradient.fill(0.5);
/// comm.all_reduce(&mut gradient, ReduceOp::Sum)?;
/// # Ok(())
/// # }
/// ```
pub struct Buffer<T: Element> {
    creator: CreatorProcess,
    arena: Arc<Arena>,
    registrar: Option<Arc<dyn Registrar>>,
    piece: Piece,
    offset: usize,
    elements: PhantomData<T>,
}

// SAFETY: a buffer owns its bytes as a Vec does, and elements are plain numbers.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// A vector of `len` zeros, registered with `registrar` until it is dropped.
    pub(crate) fn new(arena: Arc<Arena>, len: usize, registrar: Option<Arc<dyn Registrar>>) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid_argument(format!("{len} elements are more than any memory holds"))
        })?;
        let offset = arena.alloc(bytes)?;
        let piece = arena.piece(offset, bytes).expect("an allocation lies within its arena");
        if let Some(registrar) = &registrar {
            registrar.try_register(piece);
        }
        Ok(Self {
            creator: CreatorProcess::current(),
            arena,
            registrar,
            piece,
            offset,
            elements: PhantomData,
        })
    }
}

impl<T: Element> Buffer<T> {
    /// The whole buffer. The piece must not outlive it.
    pub(crate) fn piece(&self) -> Piece {
        self.piece
    }

    /// The buffer's offset in its arena.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the bytes belong to this buffer until it is dropped, are page-aligned and initialised with
        // zeros, and every bit pattern is a valid element.
        unsafe { std::slice::from_raw_parts(self.piece.as_ptr().cast(), self.piece.len() / size_of::<T>()) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; the borrow of the buffer is exclusive, and peers only read it during an
        // operation, which borrows it too.
        unsafe {
            std::slice::from_raw_parts_mut(self.piece.as_ptr().cast(), self.piece.len() / size_of::<T>())
        }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            // The memory and its registration are those of the parent.
            std::mem::forget(Arc::clone(&self.arena));
            return;
        }
        if let Some(registrar) = &self.registrar {
            registrar.try_deregister(self.piece);
        }
        self.arena.free(self.offset, self.piece.len());
    }
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} elements)", self.len())
    }
}
