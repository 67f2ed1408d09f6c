//! Vectors that users keep on a GPU, and parts of them.

use super::objects::{Gpu, GpuMemory, Stream};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::{Piece, lend, lend_in_place};
use std::marker::PhantomData;
use std::ops::Range;

/// A vector on a GPU, with a stream of its own in which everything that is done with it takes effect. Its memory is such
/// that other processes of the node can read it.
pub struct GpuBuffer<T: Element> {
    // The stream goes first: it waits for what still uses the memory.
    stream: Stream,
    memory: GpuMemory,
    elements: PhantomData<T>,
}

impl<T: Element> GpuBuffer<T> {
    /// A vector of `len` elements on the GPU with this number among those that the process sees, whatever they are.
    ///
    /// # Errors
    /// `Unsupported` without a driver; `InvalidArgument` if there is no such GPU; `System` if it has too little memory.
    pub fn new(gpu: usize, len: usize) -> Result<Self> {
        let gpu = Gpu::open(u32::try_from(gpu).unwrap_or(u32::MAX))?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| {
            Error::invalid_argument(format!("{len} elements are more than any memory holds"))
        })?;
        Ok(Self { memory: GpuMemory::new(&gpu, bytes)?, stream: Stream::new(&gpu)?, elements: PhantomData })
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.piece().len() / size_of::<T>()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the elements, as many as there are, and waits until they are there.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; `System` if the GPU fails.
    pub fn write(&mut self, from: &[T]) -> Result<()> {
        self.write_to(self.piece(), from)
    }

    /// Reads the elements, as they are when everything that was done with the vector is done.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(&self, into: &mut [T]) -> Result<()> {
        self.read_from(self.piece(), into)
    }

    /// Copies another vector of the same GPU, of the same length, and waits until that is done.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn copy_from(&mut self, from: &Self) -> Result<()> {
        check::<T>(self.piece(), from.len())?;
        from.synchronize()?;
        self.copy(self.piece(), from.piece())
    }

    /// A part of the vector, for calls and copies on it alone. It has the vector's stream.
    ///
    /// # Panics
    /// As slices do, if it reaches beyond the vector.
    pub fn slice_mut(&mut self, range: Range<usize>) -> GpuSlice<'_, T> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} elements", self.len());
        let size = size_of::<T>();
        let piece = match range.len() {
            0 => Piece::EMPTY,
            len => self.piece().narrow(range.start * size, len * size),
        };
        GpuSlice { piece, whole: self }
    }

    /// Waits until everything that was done with the vector is done.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.memory.gpu().enter()?;
        Ok(self.stream.synchronize()?)
    }

    fn write_to(&self, part: Piece, from: &[T]) -> Result<()> {
        check::<T>(part, from.len())?;
        // Nobody writes to what is only lent as a source.
        lend(from, &mut [], |from, _| self.copy(part, from))
    }

    fn read_from(&self, part: Piece, into: &mut [T]) -> Result<()> {
        check::<T>(part, into.len())?;
        lend_in_place(into, |into| self.copy(into, part))
    }

    fn copy(&self, into: Piece, from: Piece) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let _entered = self.memory.gpu().enter()?;
        // SAFETY: both are as long, and borrowed until the copy is over, for which this waits.
        unsafe { self.stream.copy(into, from)? };
        Ok(self.stream.synchronize()?)
    }

    pub(super) fn piece(&self) -> Piece {
        self.memory.piece()
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl<T: Element> Drop for GpuBuffer<T> {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            log::debug!("a vector on a GPU is dropped: {}", error.message());
        }
    }
}

impl<T: Element> std::fmt::Debug for GpuBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuBuffer({} elements on {:?})", self.len(), self.memory.gpu())
    }
}

/// A part of a [`GpuBuffer`].
#[derive(Debug)]
pub struct GpuSlice<'a, T: Element> {
    whole: &'a mut GpuBuffer<T>,
    piece: Piece,
}

impl<T: Element> GpuSlice<'_, T> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.piece.len() / size_of::<T>()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty()
    }

    /// Writes the elements, as many as there are, and waits until they are there.
    ///
    /// # Errors
    /// As for [`GpuBuffer::write`].
    pub fn write(&mut self, from: &[T]) -> Result<()> {
        self.whole.write_to(self.piece, from)
    }

    /// Reads the elements, as they are when everything that was done with the vector is done.
    ///
    /// # Errors
    /// As for [`GpuBuffer::write`].
    pub fn read(&self, into: &mut [T]) -> Result<()> {
        self.whole.read_from(self.piece, into)
    }

    pub(super) fn piece(&self) -> Piece {
        self.piece
    }

    pub(super) fn stream(&self) -> &Stream {
        self.whole.stream()
    }
}

fn check<T>(part: Piece, len: usize) -> Result<()> {
    let there = part.len() / size_of::<T>();
    if len == there {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("{len} elements for a vector of {there}")))
}
