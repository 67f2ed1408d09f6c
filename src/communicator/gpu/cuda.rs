//! The GPU of a communicator, over CUDA.

use crate::device::CallerStream;
use crate::device::cuda::{self, objects::Gpu, objects::GpuMemory, stream_order};
use crate::error::{Error, Result};
use crate::executor::{Executor, GpuParts};
use crate::memory::{Arena, MemorySpace, Piece, Registrar, Sharing};
use crate::transport::shm::ArenaLayout;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub(in crate::communicator) use stream_order::StreamGate;

/// The NUMA node of the GPU that `FLEXRING_GPU` requests, else of this thread's current one; `None` if it is
/// not known.
pub(in crate::communicator) fn numa_node(requested: Option<usize>) -> Option<u32> {
    Gpu::node(requested.and_then(|gpu| u32::try_from(gpu).ok()).or_else(Gpu::current)?)
}

/// The GPU that a communicator works with. It is opened at most once: early, or by the first call on its
/// memory.
pub(in crate::communicator) struct GpuState {
    requested: Option<u32>,
    /// Whether neighbours read the slots on the GPU by CUDA IPC.
    ipc: bool,
    layout: ArenaLayout,
    arena: Arc<Arena>,
    registrar: Option<Arc<dyn Registrar>>,
    opened: OnceLock<OpenedGpu>,
}

struct OpenedGpu {
    gpu: Arc<Gpu>,
    order: stream_order::StreamOrder,
    /// For intermediate results. Each is as long as the longest call needed when it was allocated; the last
    /// one is used. None is freed before the end: freeing waits for all streams of this process, among them
    /// those that wait for the call.
    scratch: Mutex<Vec<GpuMemory>>,
}

impl GpuState {
    pub(in crate::communicator) fn new(
        requested: Option<usize>,
        ipc: bool,
        layout: ArenaLayout,
        arena: &Arc<Arena>,
        registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        let requested = requested.map(|gpu| u32::try_from(gpu).unwrap_or(u32::MAX));
        Self { requested, ipc, layout, arena: Arc::clone(arena), registrar, opened: OnceLock::new() }
    }

    /// Where an address is according to CUDA's driver; `None` if the driver does not know it.
    pub(in crate::communicator) fn locate(
        &self,
        start: *const u8,
        len: usize,
    ) -> Result<Option<MemorySpace>> {
        cuda::pointer::locate(start, len)
    }

    /// Why this process has no GPUs; `None` if it has any.
    pub(in crate::communicator) fn why_none(&self) -> Option<String> {
        crate::cuda_driver::driver().err()
    }

    /// Opens the GPU that the settings name, or that is current on this thread, so that the first call on it
    /// is as fast as later ones.
    pub(in crate::communicator) fn prepare_early(&self, executor: &mut Executor) -> Result<()> {
        match (self.requested, Gpu::current()) {
            (Some(gpu), _) => {
                let named = |error: Error| error.context(format_args!("FLEXRING_GPU={gpu}"));
                self.open(gpu, executor).map_err(named)
            }
            (None, Some(gpu)) => {
                if let Err(error) = self.open(gpu, executor) {
                    log::warn!("vectors on GPU {gpu} cannot be reduced: {}", error.message());
                }
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// Whether this memory is the host's or that of the open GPU. `false` if no GPU is open yet.
    ///
    /// # Errors
    /// `InvalidArgument` if it is memory of another GPU than the open one.
    pub(in crate::communicator) fn serves(&self, memory: MemorySpace) -> Result<bool> {
        let MemorySpace::Gpu(gpu) = memory else { return Ok(true) };
        let Some(opened) = self.opened.get() else { return Ok(false) };
        if gpu == opened.gpu.ordinal {
            return Ok(true);
        }
        let message = format!(
            "the vectors are memory of GPU {gpu}, but this communicator works with {:?}: make one for each GPU",
            opened.gpu
        );
        Err(Error::invalid_argument(message))
    }

    /// Opens the GPU of this memory, if it is not open yet.
    pub(in crate::communicator) fn prepare(
        &self,
        memory: MemorySpace,
        executor: &mut Executor,
    ) -> Result<()> {
        match memory {
            MemorySpace::Gpu(gpu) if !self.serves(memory)? => self.open(gpu, executor),
            _ => Ok(()),
        }
    }

    fn open(&self, gpu: u32, executor: &mut Executor) -> Result<()> {
        let gpu = Gpu::open(gpu)?;
        let pool = self.layout.gpu_pool();
        let on_host = pool.piece(&self.arena);
        let host = cuda::HostSide {
            slots: pool.slots(),
            pool: on_host,
            arena: &self.arena,
            viewed: &executor.view_pools(),
        };
        let device = cuda::Cuda::new(&gpu, &host)?;
        let on_gpu = device.landing().piece();
        if let Some(registrar) = &self.registrar {
            registrar.try_register(on_host);
            registrar.try_register(on_gpu);
        }
        let sharing = self.ipc.then(|| cuda::ipc::Ipc::new(&gpu, device.landing())).transpose();
        let sharing = sharing.unwrap_or_else(|error| {
            log::info!("neighbours read vectors on {gpu:?} through host memory: {}", error.message());
            None
        });
        let order = stream_order::StreamOrder::new(&gpu)?;
        log::info!("vectors may be on {gpu:?}: {}", cuda::image::origin());
        executor.use_gpu(GpuParts {
            device: Box::new(device),
            slots: pool.cut(on_host),
            on_gpu: pool.cut(on_gpu),
            sharing: sharing.map(|ipc| Box::new(ipc) as Box<dyn Sharing>),
        })?;
        // Cannot be set already: only one thread at a time holds the executor.
        let _ = self.opened.set(OpenedGpu { gpu, order, scratch: Mutex::default() });
        Ok(())
    }

    /// Makes sure that `scratch` finds this many bytes. Must be called before the call is put in a stream,
    /// because allocating may wait for streams.
    pub(in crate::communicator) fn reserve(&self, bytes: usize) -> Result<()> {
        let opened = self.opened()?;
        let mut scratch = opened.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.last().map_or(0, |last| last.piece().len()) < bytes {
            scratch.push(GpuMemory::new(&opened.gpu, bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// Scratch memory that was reserved.
    pub(in crate::communicator) fn scratch(&self, bytes: usize) -> Result<Piece> {
        let scratch = self.opened()?.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let last = scratch.last().filter(|last| last.piece().len() >= bytes);
        let last = last.ok_or_else(|| Error::internal("no scratch memory was reserved"))?;
        Ok(last.piece().narrow(0, bytes))
    }

    fn opened(&self) -> Result<&OpenedGpu> {
        self.opened.get().ok_or_else(|| Error::internal("no GPU is open"))
    }

    /// Inserts a call at the current end of `stream`, and of `other` if it is given.
    pub(in crate::communicator) fn gate(
        &self,
        stream: CallerStream,
        other: Option<CallerStream>,
    ) -> Result<StreamGate> {
        self.opened()?.order.enqueue(stream, other)
    }
}
