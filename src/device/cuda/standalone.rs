//! The device by itself, without ranks.
//!
//! Owns a device that reduces vectors of one GPU, so that `bench/gpu_reduce` measures the code that calls
//! run. Must not know what is measured.

use super::engine::{Cuda, EngineParts, GpuEngine, HostSide, KernelKind, Launcher, ResidentCall};
use super::{GpuBuffer, objects::Gpu};
use crate::cuda_driver::forbid_calls;
use crate::device::kernel_start::wait_started;
use crate::device::{Arithmetic, CallerStream, Device, Finish, Job, Operand};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{Arena, Piece};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How long the worker spins until the kernel has started.
const SPIN: Duration = Duration::from_millis(1);

/// A device that reduces vectors of one GPU.
pub struct StandaloneDevice {
    device: Cuda,
    launcher: Launcher,
    fault: Fault,
}

/// The sum of vectors, as pieces.
struct StandaloneSum {
    dtype: DType,
    into: Piece,
    operands: Vec<Piece>,
    /// Bytes of a job.
    grain: usize,
}

impl StandaloneDevice {
    /// The device of the GPU with the index `gpu`, which keeps as many of `ctas` thread blocks on the GPU as
    /// fit.
    ///
    /// # Errors
    /// As for [`GpuBuffer::new`]; `Unsupported` if the GPU cannot run the kernels.
    pub fn new(gpu: usize, ctas: usize) -> Result<Self> {
        const SLOT: usize = 4096;
        let gpu = Gpu::open(u32::try_from(gpu).unwrap_or(u32::MAX))?;
        let arena = Arc::new(Arena::private(SLOT)?);
        let pool =
            arena.piece(0, SLOT).ok_or_else(|| Error::internal("the arena is too small for a slot"))?;
        let host = HostSide { slots: (1, SLOT), pool, arena: &arena, viewed: &[] };
        let ctas = u32::try_from(ctas).unwrap_or(u32::MAX).max(1);
        let engine = GpuEngine::new(&gpu, EngineParts { ctas, small: 0, alone: true })?;
        let device = Cuda::new(&engine, &host, 0)?;
        Ok(Self { device, launcher: Launcher::new(&engine)?, fault: Fault::new() })
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
        let sum = StandaloneSum {
            dtype: T::DTYPE,
            into: into.piece(),
            operands: vectors.iter().map(|vector| vector.piece()).collect(),
            grain: grain.max(1) * size_of::<T>(),
        };
        // SAFETY: the buffer waits for its stream before that is destroyed.
        let stream = unsafe { CallerStream::new(into.stream().raw()) };
        let kind = KernelKind::Reduce(T::DTYPE);
        let (mut launch, call) = self.launcher.prepare(stream, None, kind, None)?;
        let Self { device, fault, .. } = self;
        let fault = &*fault;
        // The driver may be set to wait for each kernel at its launch.
        std::thread::scope(|scope| {
            let worker = scope.spawn(move || run(device, fault, call, &sum));
            let launched = launch.launch().and_then(|()| launch.record());
            let launched = launched.map_err(|error| fault.raise(error));
            let outcome = worker.join().unwrap_or_else(|_| Err(Error::internal("the worker panicked")));
            launched.and(outcome)
        })?;
        into.synchronize()
    }
}

/// Runs a sum while its kernel is resident.
fn run(device: &mut Cuda, fault: &Fault, call: ResidentCall, sum: &StandaloneSum) -> Result<()> {
    let _forbidden = forbid_calls();
    wait_started(|| call.has_started(), fault, SPIN, &AtomicBool::new(false))?;
    let (mut submitted, mut done) = (0u64, 0);
    for first in (0..sum.into.len()).step_by(sum.grain) {
        let len = sum.grain.min(sum.into.len() - first);
        let operand = |piece: &Piece| Operand { piece: piece.narrow(first, len), factor: None };
        let job = Job {
            dtype: sum.dtype,
            arithmetic: Arithmetic::Sum,
            into: sum.into.narrow(first, len),
            operands: &sum.operands.iter().map(operand).collect::<Vec<_>>(),
            finish: Finish::Keep,
            streaming: true,
        };
        device.submit(&job, submitted)?;
        submitted += 1;
    }
    while done < submitted {
        fault.check()?;
        device.poll(&mut |_| done += 1)?;
        std::hint::spin_loop();
    }
    call.finish(Duration::ZERO)
}

impl std::fmt::Debug for StandaloneDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StandaloneDevice")
    }
}
