//! Vectors on a GPU that are registered with a communicator.
//!
//! Owns how long a registration lasts. Must not know what it is for.

use crate::communicator::Communicator;
use crate::device::cuda::GpuVector;
use crate::error::Result;
use crate::memory::Piece;
use std::ops::{Deref, DerefMut};

impl Communicator {
    /// Registers a vector on a GPU for as long as the returned guard lives: with the RDMA devices that this
    /// communicator uses, and with the kernels of the other ranks of its node, which access it directly in
    /// long calls if all ranks' vectors are registered. [`RegisteredOnGpu::into_inner`] returns the vector.
    /// Ranks need not agree on what they register.
    ///
    /// # Errors
    /// `System` if a device has no room for it; `InvalidArgument` if it is memory of another GPU than the
    /// communicator's. The vector is then dropped.
    pub fn register_on_gpu<V: GpuVector>(&self, vector: V) -> Result<RegisteredOnGpu<'_, V>> {
        self.check_process()?;
        let piece = vector.lend_for_reading(|piece, _| Ok(piece))?;
        if !piece.is_empty() {
            self.register_piece(piece)?;
        }
        Ok(RegisteredOnGpu { comm: self, piece, vector: Some(vector) })
    }
}

/// A vector on a GPU that is registered with a communicator until it is dropped. See
/// [`register_on_gpu`](Communicator::register_on_gpu). Dropping it waits for calls that use it; if they do
/// not end within `FLEXRING_TIMEOUT_MS`, the vector is leaked, because other ranks may access it. Do not put
/// another vector in its place.
///
/// ```no_run
/// use flexring::gpu::{GpuBuffer, gpu_count};
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::from_env()?;
/// let vector = GpuBuffer::<f32>::new(comm.rank() % gpu_count()?, 1 << 20)?;
/// let mut gradient = comm.register_on_gpu(vector)?;
/// comm.all_reduce_on_gpu(&mut *gradient, ReduceOp::Sum)?;
/// let vector: GpuBuffer<f32> = gradient.into_inner()?;
/// # drop(vector);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RegisteredOnGpu<'a, V: GpuVector> {
    comm: &'a Communicator,
    piece: Piece,
    /// `None` when the registration has ended.
    vector: Option<V>,
}

const HAS_VECTOR: &str = "the guard holds the vector until it ends";

impl<V: GpuVector> RegisteredOnGpu<'_, V> {
    /// Ends the registration and returns the vector.
    ///
    /// # Errors
    /// `Timeout` if calls that use it do not end within `FLEXRING_TIMEOUT_MS`. The vector is then leaked,
    /// because other ranks may access it.
    pub fn into_inner(mut self) -> Result<V> {
        let ended = self.end();
        let vector = self.vector.take().expect(HAS_VECTOR);
        match ended {
            Ok(()) => Ok(vector),
            Err(error) => {
                std::mem::forget(vector);
                Err(error)
            }
        }
    }

    fn end(&mut self) -> Result<()> {
        let piece = std::mem::replace(&mut self.piece, Piece::EMPTY);
        if piece.is_empty() || self.comm.check_process().is_err() {
            return Ok(());
        }
        self.comm.deregister_piece(piece)
    }
}

impl<V: GpuVector> Deref for RegisteredOnGpu<'_, V> {
    type Target = V;
    fn deref(&self) -> &V {
        self.vector.as_ref().expect(HAS_VECTOR)
    }
}

impl<V: GpuVector> DerefMut for RegisteredOnGpu<'_, V> {
    fn deref_mut(&mut self) -> &mut V {
        self.vector.as_mut().expect(HAS_VECTOR)
    }
}

impl<V: GpuVector> Drop for RegisteredOnGpu<'_, V> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::error!("a registered vector on a GPU is leaked: {}", error.message());
            std::mem::forget(self.vector.take());
        }
    }
}
