//! The device by itself, without ranks.
//!
//! Owns a device that reduces vectors of one GPU, so that `bench/gpu_reduce` measures the code that calls run. Must not know
//! what is measured.

use super::device::{Cuda, HostSide};
use super::{GpuBuffer, objects::Gpu};
use crate::device::{Arithmetic, Device, Finish, Job, Operand};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::Arena;
use std::sync::Arc;

/// A device that reduces vectors of one GPU.
pub struct StandaloneDevice(Cuda);

impl StandaloneDevice {
    /// The device of the GPU with the index `gpu`.
    ///
    /// # Errors
    /// As for [`GpuBuffer::new`]; `Unsupported` if the GPU cannot run the kernels.
    pub fn new(gpu: usize) -> Result<Self> {
        const SLOT: usize = 4096;
        let gpu = Gpu::open(u32::try_from(gpu).unwrap_or(u32::MAX))?;
        let arena = Arc::new(Arena::new(SLOT)?);
        let pool =
            arena.piece(0, SLOT).ok_or_else(|| Error::internal("the arena is too small for a slot"))?;
        let host = HostSide { slots: (1, SLOT), pool, arena: &arena, viewed: &[] };
        Ok(Self(Cuda::new(&gpu, &host)?))
    }

    /// Sums `vectors` into `into`, in jobs of `grain` elements, and waits for the result.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; `System` if the GPU fails.
    pub fn sum<T: Element>(
        &mut self,
        into: &mut GpuBuffer<T>,
        vectors: &[&GpuBuffer<T>],
        grain: usize,
    ) -> Result<()> {
        if vectors.iter().any(|vector| vector.len() != into.len()) {
            return Err(Error::invalid_argument("vectors of different lengths"));
        }
        let (bytes, grain) = (into.len() * size_of::<T>(), grain.max(1) * size_of::<T>());
        let (mut submitted, mut done) = (0, 0);
        for first in (0..bytes).step_by(grain) {
            let len = grain.min(bytes - first);
            let operand =
                |vector: &&GpuBuffer<T>| Operand { piece: vector.piece().narrow(first, len), factor: None };
            let job = Job {
                dtype: T::DTYPE,
                arithmetic: Arithmetic::Sum,
                into: into.piece().narrow(first, len),
                operands: &vectors.iter().map(operand).collect::<Vec<_>>(),
                finish: Finish::Keep,
                streaming: true,
            };
            self.0.submit(&job, submitted)?;
            submitted += 1;
        }
        while done < submitted {
            self.0.poll(&mut |_| done += 1)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for StandaloneDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StandaloneDevice")
    }
}
