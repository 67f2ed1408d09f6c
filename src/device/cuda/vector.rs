//! The vector types on a GPU that calls accept.
//!
//! Owns how each type lends its memory and its stream. A call is ordered in that stream and may still run
//! when it has returned. If a type does not free its memory in stream order, calls on it wait for completion.

use super::buffer::{GpuBuffer, GpuSlice};
use crate::device::CallerStream;
use crate::dtype::Element;
use crate::error::Result;
use crate::memory::Piece;
use cudarc::driver::{CudaSlice, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice};
use std::ptr::NonNull;

mod sealed {
    pub trait Sealed {}
}

/// A vector on a GPU: flexring's own [`GpuBuffer`] and [`GpuSlice`], cudarc's `CudaSlice` and `CudaViewMut`,
/// and, with the feature `cust`, cust's `DeviceBuffer`.
pub trait GpuVector: sealed::Sealed {
    /// The element type.
    type Item: Element;

    /// Whether calls must be complete when they return.
    #[doc(hidden)]
    const WAITS: bool = false;

    /// Lends the memory, and the stream that orders calls on it.
    #[doc(hidden)]
    fn lend<R>(&mut self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R>;

    /// Lends the memory for reading only.
    #[doc(hidden)]
    fn lend_for_reading<R>(&self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R>;
}

/// # Safety
/// The memory is valid in the order of its stream.
unsafe fn piece(start: u64, bytes: usize, gpu: usize) -> Piece {
    match NonNull::new(start as *mut u8).filter(|_| bytes > 0) {
        // SAFETY: the caller guarantees the memory.
        Some(start) => unsafe { Piece::on_gpu(start, bytes, gpu as u32) },
        None => Piece::EMPTY,
    }
}

impl<T: Element> sealed::Sealed for GpuBuffer<T> {}
impl<T: Element> GpuVector for GpuBuffer<T> {
    type Item = T;

    fn lend<R>(&mut self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
        self.lend_for_reading(call)
    }

    fn lend_for_reading<R>(&self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
        // SAFETY: the buffer waits for its stream before its memory is freed.
        call(self.piece(), unsafe { CallerStream::new(self.stream().raw()) })
    }
}

impl<T: Element> sealed::Sealed for GpuSlice<'_, T> {}
impl<T: Element> GpuVector for GpuSlice<'_, T> {
    type Item = T;

    fn lend<R>(&mut self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
        self.lend_for_reading(call)
    }

    fn lend_for_reading<R>(&self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
        // SAFETY: the whole buffer waits for its stream before its memory is freed.
        call(self.piece(), unsafe { CallerStream::new(self.stream().raw()) })
    }
}

macro_rules! cudarc_vector {
    ($($vector:ty),*) => {$(
        impl<T: Element> sealed::Sealed for $vector {}
        impl<T: Element> GpuVector for $vector {
            type Item = T;

            fn lend<R>(&mut self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
                let (bytes, stream) = (self.num_bytes(), std::sync::Arc::clone(DeviceSlice::stream(self)));
                // The guard makes the stream wait for other users of the memory, and, when dropped, makes
                // others wait for it.
                let (start, _order) = self.device_ptr_mut(&stream);
                // SAFETY: the memory is freed in stream order, and the stream is destroyed after its work
                // completes.
                unsafe {
                    let vector = piece(start, bytes, stream.context().ordinal());
                    call(vector, CallerStream::new(stream.cu_stream().cast()))
                }
            }

            fn lend_for_reading<R>(&self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
                let (bytes, stream) = (self.num_bytes(), std::sync::Arc::clone(DeviceSlice::stream(self)));
                let (start, _order) = self.device_ptr(&stream);
                // SAFETY: as above.
                unsafe {
                    let vector = piece(start, bytes, stream.context().ordinal());
                    call(vector, CallerStream::new(stream.cu_stream().cast()))
                }
            }
        }
    )*};
}

cudarc_vector!(CudaSlice<T>, CudaViewMut<'_, T>);

/// cust's buffers, which are freed without stream order while a call may still run. So calls on them wait for
/// completion. They are ordered in the default stream, with which all streams of cust synchronize.
#[cfg(feature = "cust")]
mod of_cust {
    use super::{CallerStream, Element, GpuVector, NonNull, Piece, Result, piece, sealed};
    use crate::device::cuda::pointer::locate;
    use crate::error::Error;
    use crate::memory::MemorySpace;
    use cust::memory::{DeviceBuffer, DeviceCopy};

    impl<T: Element + DeviceCopy> sealed::Sealed for DeviceBuffer<T> {}
    impl<T: Element + DeviceCopy> GpuVector for DeviceBuffer<T> {
        type Item = T;
        const WAITS: bool = true;

        fn lend<R>(&mut self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
            self.lend_for_reading(call)
        }

        fn lend_for_reading<R>(&self, call: impl FnOnce(Piece, CallerStream) -> Result<R>) -> Result<R> {
            let (start, bytes) = (self.as_device_ptr().as_raw(), self.len() * size_of::<T>());
            let memory = match NonNull::new(start as *mut u8).filter(|_| bytes > 0) {
                Some(start) => locate(start.as_ptr(), bytes)?,
                None => Some(MemorySpace::Gpu(0)),
            };
            let Some(MemorySpace::Gpu(gpu)) = memory else {
                let message =
                    format!("the {bytes} bytes at {start:#x} of a buffer of cust are not GPU memory");
                return Err(Error::invalid_argument(message));
            };
            // SAFETY: calls wait for completion, so the memory is valid until they are over.
            call(unsafe { piece(start, bytes, gpu as usize) }, CallerStream::DEFAULT)
        }
    }
}
