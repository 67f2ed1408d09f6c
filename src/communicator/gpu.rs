//! CallBuffers in the memory of a GPU.
//!
//! Owns which GPU a communicator works with, and what it has there. Must not know how anything is moved or added on it.

use super::{CheckedCall, Communicator, Core};
use crate::device::CallerStream;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Memory, Piece};

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{Gate, GpuState, node};
#[cfg(feature = "cuda")]
pub(super) use present::{Gate, GpuState, node};

impl Communicator {
    /// Whose memory the bytes at `start` are.
    ///
    /// # Errors
    /// `InvalidArgument` if they are nobody's, or cannot be used.
    pub(crate) fn memory_of(&self, start: *const u8, len: usize) -> Result<Memory> {
        if self.core.user_memory.has(start, len) {
            return Ok(Memory::Host);
        }
        if let Some(memory) = self.core.gpu_state.locate(start, len)? {
            return Ok(memory);
        }
        for end in [start, start.wrapping_add(len.saturating_sub(1))] {
            if !crate::memory::is_readable(end) {
                let words = format!(
                    "{end:p} is no memory of this process: was it freed, or is it a GPU's, and {}?",
                    self.core.gpu_state.why_none().unwrap_or_else(|| "of a context that is gone".to_owned())
                );
                return Err(Error::new(ErrorKind::InvalidArgument, words));
            }
        }
        Ok(Memory::Host)
    }

    /// Starts a checked call that takes effect in a stream: behind what is in it, and before what comes later. A failure
    /// ends the communicator, and is what the next call returns; the stream goes on all the same.
    ///
    /// # Errors
    /// `InvalidArgument` if memory or stream are not of the communicator's GPU; the failure of an earlier call.
    pub(crate) fn run_in_stream(&self, checked: CheckedCall, stream: CallerStream) -> Result<()> {
        self.submit_in_stream(checked, stream, None).map(drop)
    }

    /// The same, and returns what tells how it ended. It takes effect in `other` too, a stream that some of the memory
    /// belongs to.
    ///
    /// # Errors
    /// As for [`run_in_stream`](Self::run_in_stream).
    pub(crate) fn submit_in_stream(
        &self,
        checked: CheckedCall,
        stream: CallerStream,
        other: Option<CallerStream>,
    ) -> Result<std::sync::Arc<super::CallOutcome>> {
        if checked.is_empty() {
            // Nothing of it lies anywhere.
            return self.submit(checked);
        }
        if checked.is_on_host() {
            let words = "a stream was given, but the vectors are the host's memory: give NULL, or memory of the stream's GPU";
            return Err(Error::new(ErrorKind::InvalidArgument, words));
        }
        self.core.check_usable()?;
        [checked.input, checked.output].into_iter().try_for_each(|piece| self.core.prepare_gpu(piece))?;
        if checked.scratch() > 0 {
            self.core.gpu_state.reserve(checked.scratch())?;
        }
        self.submit_behind(checked, || self.core.gpu_state.gate(stream, other).map(Some))
    }
}

impl Core {
    /// Has all that is needed for a piece of memory, before a call that it is about has its turn.
    pub(super) fn prepare_gpu(&self, piece: Piece) -> Result<()> {
        if self.gpu_state.serves(piece.memory())? {
            return Ok(());
        }
        let mut engine = self.engine.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.gpu_state.prepare(piece.memory(), &mut engine)
    }
}

#[cfg(feature = "cuda")]
mod present {
    use crate::communicator::Engine;
    use crate::device::CallerStream;
    use crate::device::cuda::{self, objects::Gpu, objects::GpuMemory, order};
    use crate::error::{Error, ErrorKind, Result};
    use crate::executor::{Executor, GpuParts};
    use crate::memory::{Arena, Memory, Piece, Registrar, Sharing};
    use crate::transport::shm::ArenaLayout;
    use std::sync::{Arc, Mutex, OnceLock, PoisonError};

    pub(in crate::communicator) use order::Gate;

    /// The NUMA node of the GPU that vectors will be on, if it is known before there are any.
    pub(in crate::communicator) fn node(requested: Option<usize>) -> Option<u32> {
        Gpu::node(requested.and_then(|gpu| u32::try_from(gpu).ok()).or_else(Gpu::current)?)
    }

    /// The GPU that a communicator works with, once there is one.
    pub(in crate::communicator) struct GpuState {
        requested: Option<u32>,
        ipc: bool,
        layout: ArenaLayout,
        arena: Arc<Arena>,
        registrar: Option<Arc<dyn Registrar>>,
        ready: OnceLock<OpenedGpu>,
    }

    struct OpenedGpu {
        gpu: Arc<Gpu>,
        order: order::Order,
        /// For what is made on the way, each as long as the longest call needed when it was made; the last one is used.
        /// None is freed before the end: that would wait for all streams of this process, among them those that wait
        /// for the call.
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
            Self { requested, ipc, layout, arena: Arc::clone(arena), registrar, ready: OnceLock::new() }
        }

        /// Whose memory an address is, if CUDA's driver knows it.
        pub(in crate::communicator) fn locate(&self, start: *const u8, len: usize) -> Result<Option<Memory>> {
            cuda::pointer::locate(start, len)
        }

        /// Why there are no GPUs here, if there are none.
        pub(in crate::communicator) fn why_none(&self) -> Option<String> {
            cuda::driver::driver().err()
        }

        /// Makes the GPU ready that the settings name, or that this thread uses, so that the first call on it is as fast
        /// as the others.
        pub(in crate::communicator) fn prepare_early(&self, executor: &mut Executor) -> Result<()> {
            match (self.requested, Gpu::current()) {
                (Some(gpu), _) => {
                    let named = |error: Error| error.within(format_args!("FLEXRING_GPU={gpu}"));
                    self.make_ready(gpu, executor).map_err(named)
                }
                (None, Some(gpu)) => {
                    if let Err(error) = self.make_ready(gpu, executor) {
                        log::warn!("vectors on GPU {gpu} cannot be reduced: {}", error.message());
                    }
                    Ok(())
                }
                (None, None) => Ok(()),
            }
        }

        /// Whether this memory is the host's, or that of the GPU that is ready.
        pub(in crate::communicator) fn serves(&self, memory: Memory) -> Result<bool> {
            let Memory::Gpu(gpu) = memory else { return Ok(true) };
            let Some(ready) = self.ready.get() else { return Ok(false) };
            if gpu == ready.gpu.ordinal {
                return Ok(true);
            }
            let words = format!(
                "the vectors are memory of GPU {gpu}, but this communicator works with {:?}: make one for each GPU",
                ready.gpu
            );
            Err(Error::new(ErrorKind::InvalidArgument, words))
        }

        /// Makes the GPU ready that this memory is of.
        pub(in crate::communicator) fn prepare(&self, memory: Memory, engine: &mut Engine) -> Result<()> {
            match memory {
                Memory::Gpu(gpu) if !self.serves(memory)? => self.make_ready(gpu, &mut engine.executor),
                _ => Ok(()),
            }
        }

        fn make_ready(&self, gpu: u32, executor: &mut Executor) -> Result<()> {
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
            let landing = device.landing().piece();
            if let Some(registrar) = &self.registrar {
                registrar.tell(on_host);
                registrar.tell(landing);
            }
            let sharing = self.ipc.then(|| cuda::ipc::Ipc::new(&gpu, device.landing())).transpose();
            let sharing = sharing.unwrap_or_else(|error| {
                log::info!("neighbours get what is on {gpu:?} by the host's memory: {}", error.message());
                None
            });
            let order = order::Order::new(&gpu)?;
            log::info!("vectors may be on {gpu:?}: {}", cuda::image::origin());
            executor.use_gpu(GpuParts {
                device: Box::new(device),
                slots: pool.cut(on_host),
                on_gpu: pool.cut(landing),
                sharing: sharing.map(|ipc| Box::new(ipc) as Box<dyn Sharing>),
            });
            // Whoever holds the engine is alone here.
            let _ = self.ready.set(OpenedGpu { gpu, order, scratch: Mutex::default() });
            Ok(())
        }

        /// Makes sure that a call finds as much scratch memory. Before the call is put in a stream: allocating may wait
        /// for what is in streams.
        pub(in crate::communicator) fn reserve(&self, bytes: usize) -> Result<()> {
            let ready = self.ready()?;
            let mut scratch = ready.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            if scratch.last().map_or(0, |last| last.piece().len()) < bytes {
                scratch.push(GpuMemory::new(&ready.gpu, bytes.next_power_of_two())?);
            }
            Ok(())
        }

        /// Scratch memory that was reserved.
        pub(in crate::communicator) fn scratch(&self, bytes: usize) -> Result<Piece> {
            let scratch = self.ready()?.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            let last = scratch.last().filter(|last| last.piece().len() >= bytes);
            let last =
                last.ok_or_else(|| Error::new(ErrorKind::Internal, "no scratch memory was reserved"))?;
            Ok(last.piece().narrow(0, bytes))
        }

        fn ready(&self) -> Result<&OpenedGpu> {
            self.ready.get().ok_or_else(|| Error::new(ErrorKind::Internal, "no GPU is ready"))
        }

        /// A place in a stream.
        pub(in crate::communicator) fn gate(
            &self,
            stream: CallerStream,
            other: Option<CallerStream>,
        ) -> Result<Gate> {
            self.ready()?.order.enqueue(stream, other)
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use crate::communicator::Engine;
    use crate::device::CallerStream;
    use crate::error::{Error, ErrorKind, Result};
    use crate::executor::Executor;
    use crate::fault::Fault;
    use crate::memory::{Arena, Memory, Piece, Registrar};
    use crate::transport::shm::ArenaLayout;
    use std::sync::Arc;

    const WHY: &str = "this build of flexring has no CUDA";

    pub(in crate::communicator) fn node(_requested: Option<usize>) -> Option<u32> {
        None
    }

    /// No GPU.
    pub(in crate::communicator) struct GpuState;

    /// There are no streams either.
    pub(in crate::communicator) enum Gate {}

    impl Gate {
        pub(in crate::communicator) fn wait_ready(&self, _fault: &Fault) -> Result<()> {
            match *self {}
        }
    }

    #[allow(clippy::unused_self, reason = "the same as where there are GPUs")]
    impl GpuState {
        pub(in crate::communicator) fn new(
            _requested: Option<usize>,
            _ipc: bool,
            _layout: ArenaLayout,
            _arena: &Arc<Arena>,
            _registrar: Option<Arc<dyn Registrar>>,
        ) -> Self {
            Self
        }

        pub(in crate::communicator) fn locate(
            &self,
            _start: *const u8,
            _len: usize,
        ) -> Result<Option<Memory>> {
            Ok(None)
        }

        pub(in crate::communicator) fn why_none(&self) -> Option<String> {
            Some(WHY.to_owned())
        }

        pub(in crate::communicator) fn prepare_early(&self, _executor: &mut Executor) -> Result<()> {
            Ok(())
        }

        pub(in crate::communicator) fn serves(&self, _: Memory) -> Result<bool> {
            Ok(true)
        }

        pub(in crate::communicator) fn prepare(&self, _: Memory, _: &mut Engine) -> Result<()> {
            Ok(())
        }

        pub(in crate::communicator) fn reserve(&self, _bytes: usize) -> Result<()> {
            Err(Error::new(ErrorKind::Unsupported, WHY))
        }

        pub(in crate::communicator) fn scratch(&self, _bytes: usize) -> Result<Piece> {
            Err(Error::new(ErrorKind::Unsupported, WHY))
        }

        pub(in crate::communicator) fn gate(&self, _: CallerStream, _: Option<CallerStream>) -> Result<Gate> {
            Err(Error::new(ErrorKind::Unsupported, WHY))
        }
    }
}
