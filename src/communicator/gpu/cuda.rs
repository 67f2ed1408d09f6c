//! The GPU of a communicator, over CUDA.

use super::kernel_calls::KernelCalls;
use super::kernel_offer::KernelOffer;
use super::registered_memory::OfferedMemory;
use crate::bootstrap::host_name;
use crate::communicator::checked_call::CheckedCall;
use crate::communicator::registration_gate::GATE;
use crate::config::GpuProgram;
use crate::config::{Config, environment};
use crate::device::CallerStream;
use crate::device::cuda::collective::{CollectiveLayout, CollectiveMemory, SLOT};
use crate::device::cuda::{self, EngineParts, GpuEngine, KernelKind, Launcher};
use crate::device::cuda::{objects::Gpu, objects::GpuMemory};
use crate::device::relay_link::RelaySlots;
use crate::error::{Error, Result};
use crate::executor::{Executor, GpuParts};
use crate::fault::Fault;
use crate::memory::{Arena, MemorySpace, Piece, Registrar, Sharing};
use crate::rank::Rank;
use crate::transport::shm::{ArenaLayout, MemoryNotices};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

pub(in crate::communicator) use crate::cuda_driver::forbid_calls;
pub(in crate::communicator) use cuda::{PreparedCollective, PreparedLaunch, ResidentCall};

/// How long the slots wait for calls of this process before they are registered with RDMA devices. A call may
/// be one that ends only when the communicator which is being created is used, such as a receive in another
/// one; then data is staged in host memory.
const REGISTRATION_PATIENCE: Duration = Duration::from_secs(30);

/// CTAs of a call that the host runs.
const HOST_CTAS: u32 = 16;

/// Bytes of a slot where kernels run collectives. 65 of them take 14.2 MiB on the GPU, and as much in pinned
/// memory.
const SLOT_BESIDE_KERNELS: usize = 224 << 10;

/// The GPU that this rank works with as far as it is known when the communicator is created: the one that
/// `FLEXRING_GPU` requests, else this thread's current one.
pub(in crate::communicator) fn known(requested: Option<usize>) -> Option<u32> {
    requested.map(|gpu| u32::try_from(gpu).unwrap_or(u32::MAX)).or_else(Gpu::current)
}

/// The memory for collectives that the settings and the number of ranks of a node call for.
fn collectives(config: &Config, ranks_of_node: usize) -> Option<CollectiveLayout> {
    let layout = || CollectiveLayout::new(ranks_of_node).unwrap_or(CollectiveLayout::ALONE);
    (config.gpu_engine == GpuProgram::Device).then(layout)
}

/// Bytes of a slot for vectors on GPUs; `ranks_of_node` is 0 unless kernels may run the calls of all ranks.
/// Equal on all ranks. Short where kernels run collectives, because only the few other calls need slots.
pub(in crate::communicator) fn slot_bytes(config: &Config, ranks_of_node: usize, world: usize) -> usize {
    let bytes = config.gpu_slot_bytes(world);
    match collectives(config, ranks_of_node).filter(|_| CollectiveLayout::new(ranks_of_node).is_some()) {
        Some(_) => bytes.min(SLOT_BESIDE_KERNELS).max(config.subchunk.0),
        None => bytes,
    }
}

/// The slots of messages that kernels write for a rank of the node whose memory they do not reach: how many,
/// and bytes of each.
pub(in crate::communicator) fn relay_slots(world: usize) -> (usize, usize) {
    let RelaySlots { count, bytes } = RelaySlots::of_world(world, SLOT);
    (count, bytes)
}

/// Whether this rank may use a GPU, now or later.
pub(in crate::communicator) fn may_exist(requested: Option<usize>) -> bool {
    requested.is_some() || crate::cuda_driver::may_have_gpus()
}

/// The NUMA node of the known GPU, if there is one and the system reports it.
pub(in crate::communicator) fn numa_node(requested: Option<usize>) -> Option<u32> {
    Gpu::node(known(requested)?)
}

/// Whether a coherent link connects the known GPU with its processor.
#[cfg(feature = "verbs")]
pub(in crate::communicator) fn is_coherent(requested: Option<usize>) -> bool {
    known(requested).is_some_and(Gpu::is_coherent)
}

/// The PCI address of the known GPU, if there is one and the driver reports it.
#[cfg(feature = "verbs")]
pub(in crate::communicator) fn address(requested: Option<usize>) -> Option<String> {
    Gpu::address(known(requested)?)
}

/// Devices that register memory of a GPU while no call runs on one that this process has work for.
struct GatedDevices {
    devices: Arc<dyn Registrar>,
    patience: Duration,
}

impl Registrar for GatedDevices {
    fn register(&self, piece: Piece) -> Result<()> {
        if piece.is_host() {
            return self.devices.register(piece);
        }
        GATE.register(self.patience, || self.devices.register(piece))
    }

    fn reaches(&self, piece: Piece) -> bool {
        self.devices.reaches(piece)
    }

    fn deregister(&self, piece: Piece) -> Result<()> {
        self.devices.deregister(piece)
    }
}

/// The GPU that a communicator works with. It is opened at most once: when the communicator is created, or by
/// the first thread that uses its memory.
pub(in crate::communicator) struct GpuState {
    requested: Option<usize>,
    /// Whether neighbours read the slots on the GPU by CUDA IPC.
    ipc: bool,
    /// The most CTAs of a call, if the user wants a number.
    ctas: Option<u32>,
    /// Bytes of the longest vector that is staged on the host; 0 if none is.
    small: usize,
    /// Whether other ranks of the communicator are threads of this process.
    shares_process: bool,
    /// How long to wait for calls of this process before memory is registered.
    timeout: Duration,
    layout: ArenaLayout,
    arena: Arc<Arena>,
    registrar: Option<Arc<dyn Registrar>>,
    /// The memory for collectives that kernels run, if the ranks may have it.
    collectives: Option<CollectiveLayout>,
    /// Where ranks name memory that they have registered, until a GPU is open.
    notices: Mutex<Option<(Rank, MemoryNotices)>>,
    opened: OnceLock<OpenedGpu>,
}

pub(in crate::communicator) struct OpenedGpu {
    pub(super) gpu: Arc<Gpu>,
    engine: Arc<GpuEngine>,
    pub(in crate::communicator) launcher: Launcher,
    kernel_calls: Option<KernelCalls>,
    /// The most CTAs of a call, if the user wants a number.
    wanted: Option<u32>,
    /// Whether other ranks of the communicator are threads of this process.
    shares_process: bool,
    /// For intermediate results. Each is as long as the longest call needed when it was allocated; the last
    /// one is used. None is freed before the end, because calls that are not over may use it.
    scratch: Mutex<Vec<GpuMemory>>,
}

impl OpenedGpu {
    /// The kernels of collectives. `reaches_node`: whether they reach the memory of all ranks of the node.
    pub(in crate::communicator) fn offer(&self, reaches_node: bool) -> KernelOffer {
        let address = Gpu::address(self.gpu.ordinal).unwrap_or_else(|| self.gpu.ordinal.to_string());
        let gpu = format!("{} {address}", host_name());
        KernelOffer {
            gpu,
            resident: self.engine.resident_collectives(),
            wanted: self.wanted,
            shares_process: self.shares_process,
            reaches_node,
        }
    }
}

impl GpuState {
    pub(in crate::communicator) fn new(
        config: &Config,
        small: usize,
        shares_process: bool,
        ranks_of_node: usize,
        layout: ArenaLayout,
        arena: &Arc<Arena>,
        registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        Self {
            collectives: collectives(config, ranks_of_node),
            requested: config.gpu,
            ipc: config.gpu_ipc.0,
            ctas: config.gpu_ctas.map(|ctas| u32::try_from(ctas).unwrap_or(u32::MAX)),
            small,
            shares_process,
            timeout: config.timeout,
            layout,
            arena: Arc::clone(arena),
            registrar,
            notices: Mutex::default(),
            opened: OnceLock::new(),
        }
    }

    /// Has kernels access memory that users register directly, if the ranks are processes of their own.
    pub(in crate::communicator) fn set_notices(&mut self, rank: Rank, notices: MemoryNotices) {
        self.notices = Mutex::new(Some((rank, notices)).filter(|_| !self.shares_process));
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

    /// Opens the GPU that is known when the communicator is created, and shares its memory with the
    /// neighbours.
    pub(in crate::communicator) fn open_known(&self, executor: &mut Executor) -> Result<()> {
        let Some(gpu) = known(self.requested) else { return Ok(()) };
        let opened = self.open(gpu, self.ipc, executor);
        match (opened, self.requested) {
            (Err(error), Some(requested)) => Err(error.context(format_args!("FLEXRING_GPU={requested}"))),
            (Err(error), None) => {
                log::warn!("vectors on GPU {gpu} cannot be reduced: {}", error.message());
                Ok(())
            }
            (Ok(()), _) => Ok(()),
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

    /// Opens the GPU of this memory, if it is not open yet, without sharing its memory: the neighbours do not
    /// take part.
    pub(in crate::communicator) fn open_late(
        &self,
        memory: MemorySpace,
        executor: &mut Executor,
    ) -> Result<()> {
        match memory {
            MemorySpace::Gpu(gpu) if !self.serves(memory)? => self.open(gpu, false, executor),
            _ => Ok(()),
        }
    }

    fn open(&self, gpu: u32, shares: bool, executor: &mut Executor) -> Result<()> {
        self.check_launches()?;
        let pool = self.layout.gpu_pool();
        if pool.slots().0 == 0 {
            return Err(Error::unsupported(
                "there was no GPU when this communicator was created (fix: create it when there is one, or set FLEXRING_GPU)",
            ));
        }
        let gpu = Gpu::open(gpu)?;
        let on_host = pool.piece(&self.arena);
        pool.populate(&self.arena)?;
        let ctas = self.ctas.unwrap_or(HOST_CTAS);
        let engine = GpuEngine::new(&gpu, EngineParts { ctas, small: self.small, alone: false })?;
        let host = cuda::HostSide {
            slots: pool.slots(),
            pool: on_host,
            arena: &self.arena,
            viewed: &executor.view_pools(),
        };
        let collectives =
            self.collectives.map(|layout| if shares { layout } else { CollectiveLayout::ALONE });
        let further = collectives.map_or(0, CollectiveLayout::bytes);
        let device = cuda::Cuda::new(&engine, &host, further)?;
        let on_gpu = device.landing().piece();
        if let Some(registrar) = &self.registrar {
            registrar.try_register(on_host);
            let registered = GATE.register(self.timeout.min(REGISTRATION_PATIENCE), || {
                registrar.try_register(on_gpu);
                Ok(())
            });
            if let Err(error) = registered {
                log::warn!(
                    "data is staged in host memory for RDMA devices: {} (fix: create communicators while no call on a GPU runs)",
                    error.message()
                );
            }
        }
        let sharing = shares.then(|| cuda::ipc::Ipc::new(&gpu, device.landing())).transpose();
        let sharing = sharing.unwrap_or_else(|error| {
            log::info!("neighbours read vectors on {gpu:?} through host memory: {}", error.message());
            None
        });
        if self.ipc && !shares {
            log::info!(
                "neighbours read vectors on {gpu:?} through host memory, because the communicator was created without \
                 it: set FLEXRING_GPU, or make the GPU current before"
            );
        }
        let memory =
            collectives.map(|layout| CollectiveMemory::new(&gpu, device.landing(), layout)).transpose()?;
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner).take();
        let kernel_devices = self.registrar.as_ref().map(|devices| {
            // Other ranks wait for the call.
            let patience = self.timeout / 8;
            Arc::new(GatedDevices { devices: Arc::clone(devices), patience }) as Arc<dyn Registrar>
        });
        let kernel_calls = memory.map(|memory| {
            let registered = notices.map(|(rank, notices)| OfferedMemory::new(&gpu, &memory, rank, notices));
            KernelCalls::new(memory, registered, kernel_devices)
        });
        let launcher = Launcher::new(&engine)?;
        log::info!("vectors may be on {gpu:?}: {}", cuda::image::origin());
        executor.use_gpu(GpuParts {
            device: Box::new(device),
            slots: pool.cut(on_host),
            on_gpu: pool.cut(on_gpu),
            sharing: sharing.map(|ipc| Box::new(ipc) as Box<dyn Sharing>),
        })?;
        // Cannot be set already: only one thread at a time holds the executor.
        let (wanted, shares_process, scratch) = (self.ctas, self.shares_process, Mutex::default());
        let opened = OpenedGpu { gpu, engine, launcher, kernel_calls, wanted, shares_process, scratch };
        let _ = self.opened.set(opened);
        Ok(())
    }

    /// Allocates the memory of messages to ranks of the node.
    ///
    /// # Errors
    /// `System` if there is too little memory.
    pub(in crate::communicator) fn populate_relays(&self) -> Result<()> {
        self.layout.relay_pool().populate(&self.arena)
    }

    /// Refuses several ranks in a process whose launches block.
    fn check_launches(&self) -> Result<()> {
        let blocking = environment("CUDA_LAUNCH_BLOCKING").is_some_and(|value| !matches!(&*value, "" | "0"));
        if self.shares_process && blocking {
            let message = "CUDA_LAUNCH_BLOCKING is set, and other ranks are threads of this process: the first rank's \
                           launch would wait for the second's; unset it, or run each rank in a process of its own";
            return Err(Error::unsupported(message));
        }
        Ok(())
    }

    /// Scratch memory on the GPU. Must be called before the call is launched, by the caller's thread:
    /// allocating may wait for earlier calls.
    pub(in crate::communicator) fn scratch(&self, bytes: usize) -> Result<Piece> {
        if bytes == 0 {
            return Ok(Piece::EMPTY);
        }
        let opened = self.opened()?;
        let mut scratch = opened.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = scratch.last().filter(|last| last.piece().len() >= bytes) {
            return Ok(last.piece().narrow(0, bytes));
        }
        let memory = GpuMemory::new(&opened.gpu, bytes.next_power_of_two())?;
        let piece = memory.piece().narrow(0, bytes);
        scratch.push(memory);
        Ok(piece)
    }

    /// The host memory between the vectors of a small call and the ranks' mailboxes.
    pub(in crate::communicator) fn staging(&self, input: usize, output: usize) -> Result<(Piece, Piece)> {
        Ok(self.opened()?.engine.staging(input, output))
    }

    fn opened(&self) -> Result<&OpenedGpu> {
        self.opened.get().ok_or_else(|| Error::internal("no GPU is open"))
    }

    /// Prepares the kernel of a call at the current end of `stream`, and of `other` if it is given. A `small`
    /// call is run on [`staging`](Self::staging).
    pub(in crate::communicator) fn prepare_launch(
        &self,
        call: &CheckedCall,
        small: bool,
        stream: CallerStream,
        other: Option<CallerStream>,
    ) -> Result<(PreparedLaunch, ResidentCall)> {
        let copies = small || !call.collective.reduces();
        let kind = if copies { KernelKind::Copy } else { KernelKind::Reduce(call.dtype) };
        let small = small.then_some((call.input, call.output));
        self.opened()?.launcher.prepare(stream, other, kind, small)
    }

    /// What runs collectives by kernels, if the GPU and the ranks have it.
    pub(in crate::communicator) fn kernel_calls(&self) -> Option<(&OpenedGpu, &KernelCalls)> {
        let opened = self.opened.get()?;
        Some((opened, opened.kernel_calls.as_ref()?))
    }

    /// Whether a GPU is open.
    pub(in crate::communicator) fn is_open(&self) -> bool {
        self.opened.get().is_some()
    }

    /// Checks that the GPU's context works. Must not be called by the worker.
    ///
    /// # Errors
    /// `System` if it is broken: no kernel reports anything then.
    pub(in crate::communicator) fn check(&self) -> Result<()> {
        self.opened.get().map_or(Ok(()), |opened| opened.launcher.check_health())
    }

    /// Waits until no kernel of the communicator accesses memory. If one still may after a while, its memory
    /// is never freed, and `false` is returned.
    pub(in crate::communicator) fn end(&self, fault: &Fault) -> bool {
        let Some(opened) = self.opened.get() else { return true };
        let collectives_ended =
            opened.kernel_calls.as_ref().is_none_or(|calls| calls.end(&opened.launcher, fault));
        if opened.engine.wait_ended() && collectives_ended {
            return true;
        }
        let mut scratch = opened.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut *scratch));
        std::mem::forget(Arc::clone(&opened.engine));
        if let Some(calls) = &opened.kernel_calls {
            calls.leak();
        }
        false
    }
}
