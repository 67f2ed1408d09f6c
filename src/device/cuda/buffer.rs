//! Users' buffers on a GPU, and slices of them.

use super::graph::GpuCapture;
use super::objects::{Gpu, GpuMemory, Stream};
use super::stream_memory::StreamMemory;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::{Piece, lend, lend_in_place};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// A vector on a GPU. It has its own stream, which orders all operations on it. Other processes of the node
/// can read its memory by CUDA IPC.
pub struct GpuBuffer<T: Element> {
    shared: Arc<StreamMemory>,
    /// Its bytes of the shared memory.
    bytes: Range<usize>,
    elements: PhantomData<T>,
}

impl<T: Element> GpuBuffer<T> {
    /// An uninitialized vector of `len` elements on a GPU, given by its index among the GPUs that the process
    /// sees.
    ///
    /// # Errors
    /// `Unsupported` without a driver; `InvalidArgument` if there is no such GPU; `System` if it has too
    /// little memory.
    pub fn new(gpu: usize, len: usize) -> Result<Self> {
        let gpu = Gpu::open(u32::try_from(gpu).unwrap_or(u32::MAX))?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| {
            Error::invalid_argument(format!("{len} elements are more than any memory holds"))
        })?;
        let shared = StreamMemory { memory: GpuMemory::new(&gpu, bytes)?, stream: Stream::new(&gpu)? };
        Ok(Self { shared: Arc::new(shared), bytes: 0..bytes, elements: PhantomData })
    }

    /// Splits off the elements from `at` on. Both vectors keep the stream, so calls on both can be captured
    /// in one graph. The memory is freed after both.
    ///
    /// # Panics
    /// If `at` is more than the length.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len(), "element {at} of {}", self.len());
        let middle = self.bytes.start + at * size_of::<T>();
        let bytes = middle..std::mem::replace(&mut self.bytes.end, middle);
        Self { shared: Arc::clone(&self.shared), bytes, elements: PhantomData }
    }

    /// Captures the work that this thread enqueues in the vector's stream until [`GpuCapture::end`].
    ///
    /// # Errors
    /// `System` if the GPU fails, or a capture of this stream has begun already.
    pub fn begin_capture(&mut self) -> Result<GpuCapture> {
        GpuCapture::begin(&self.shared)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `elements`, as many as the vector has, to the GPU, and waits for the copy.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; `System` if the GPU fails.
    pub fn write(&mut self, from: &[T]) -> Result<()> {
        self.write_to(self.piece(), from)
    }

    /// Copies the vector to `elements` after all earlier operations on it, and waits for the copy.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(&self, into: &mut [T]) -> Result<()> {
        self.read_from(self.piece(), into)
    }

    /// Copies another vector of the same length on the same GPU, and waits for the copy.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn copy_from(&mut self, from: &Self) -> Result<()> {
        check::<T>(self.piece(), from.len())?;
        from.synchronize()?;
        self.copy(self.piece(), from.piece())
    }

    /// A part of the vector for calls and copies. It uses the vector's stream.
    ///
    /// # Panics
    /// If the range exceeds the vector.
    pub fn slice_mut(&mut self, range: Range<usize>) -> GpuSlice<'_, T> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} elements", self.len());
        let size = size_of::<T>();
        let piece = match range.len() {
            0 => Piece::EMPTY,
            len => self.piece().narrow(range.start * size, len * size),
        };
        GpuSlice { piece, whole: self }
    }

    /// Waits for all operations on the vector, launches of graphs in its stream among them.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub fn synchronize(&self) -> Result<()> {
        self.shared.synchronize()
    }

    fn write_to(&self, part: Piece, from: &[T]) -> Result<()> {
        check::<T>(part, from.len())?;
        // The piece is only read: it is the source of the copy.
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
        let StreamMemory { stream, memory } = &*self.shared;
        let _entered = memory.gpu().enter()?;
        // SAFETY: both have the same length and are borrowed until the copy completes, which this waits for.
        unsafe { stream.copy(into, from)? };
        Ok(stream.synchronize()?)
    }

    pub(super) fn piece(&self) -> Piece {
        match self.bytes.len() {
            0 => Piece::EMPTY,
            len => self.shared.memory.piece().narrow(self.bytes.start, len),
        }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.shared.stream
    }
}

impl<T: Element> std::fmt::Debug for GpuBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuBuffer({} elements on {:?})", self.len(), self.shared.memory.gpu())
    }
}

/// A part of a [`GpuBuffer`].
#[derive(Debug)]
pub struct GpuSlice<'a, T: Element> {
    whole: &'a mut GpuBuffer<T>,
    piece: Piece,
}

impl<T: Element> GpuSlice<'_, T> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.piece.len() / size_of::<T>()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty()
    }

    /// Copies `elements`, as many as the vector has, to the GPU, and waits for the copy.
    ///
    /// # Errors
    /// As for [`GpuBuffer::write`].
    pub fn write(&mut self, from: &[T]) -> Result<()> {
        self.whole.write_to(self.piece, from)
    }

    /// Copies the vector to `elements` after all earlier operations on it, and waits for the copy.
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
