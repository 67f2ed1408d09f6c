//! The GPU of a communicator, over CUDA.

use super::kernel_offer::KernelOffer;
use super::kernel_state::KernelState;
use super::registered_memory::OfferedMemory;
use crate::bootstrap::host_name;
use crate::communicator::registration_gate::GATE;
use crate::config::{Config, environment};
use crate::device::cuda::collective::{CollectiveLayout, CollectiveMemory};
use crate::device::cuda::{self, Launcher};
use crate::device::cuda::{objects::Gpu, objects::GpuMemory};
use crate::device::relay_link::RelaySlots;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::fault::Fault;
use crate::memory::{Arena, MemorySpace, Piece, Registrar};
use crate::rank::Rank;
use crate::transport::shm::{ArenaLayout, MemoryNotices};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

pub(in crate::communicator) use crate::cuda_driver::forbid_calls;
pub(in crate::communicator) use cuda::PreparedCollective;

/// How long the slots wait for calls of this process before they are registered with RDMA devices. A call may
/// be one that ends only when the communicator which is being created is used, such as a receive in another
/// one; then data is staged in host memory.
const REGISTRATION_PATIENCE: Duration = Duration::from_secs(30);

/// The block size of CUDA's allocator. Shared allocations are whole blocks, because another process opens a
/// whole block.
const BLOCK: usize = 2 << 20;
/// Bytes before the memory of collectives, where a pattern shows other processes that they reach it.
const PATTERN: usize = 4096;

/// The GPU that this rank works with as far as it is known when the communicator is created: the one that
/// `FLEXRING_GPU` requests, else this thread's current one.
pub(in crate::communicator) fn known(requested: Option<usize>) -> Option<u32> {
    requested.map(|gpu| u32::try_from(gpu).unwrap_or(u32::MAX)).or_else(Gpu::current)
}

/// The slots of messages that kernels write for a rank of the node whose memory they do not reach: how many,
/// and bytes of each.
pub(in crate::communicator) fn relay_slots(world: usize) -> (usize, usize) {
    let RelaySlots { count, bytes } = RelaySlots::of_world(world);
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
    /// Whether other ranks of the communicator are threads of this process.
    shares_process: bool,
    /// How long to wait for calls of this process before memory is registered.
    timeout: Duration,
    layout: ArenaLayout,
    arena: Arc<Arena>,
    registrar: Option<Arc<dyn Registrar>>,
    /// The memory for collectives of ranks that reach each other's.
    collectives: CollectiveLayout,
    /// Where ranks name memory that they have registered, until a GPU is open.
    notices: Mutex<Option<(Rank, MemoryNotices)>>,
    opened: OnceLock<OpenedGpu>,
}

pub(in crate::communicator) struct OpenedGpu {
    pub(super) gpu: Arc<Gpu>,
    pub(in crate::communicator) launcher: Launcher,
    kernel_state: KernelState,
    /// The most CTAs of a call, if the user wants a number.
    wanted: Option<u32>,
}

impl OpenedGpu {
    /// The most CTAs of a call of this rank's kernels, if they reach the memory of no other one of the ranks
    /// of its node, `ranks`, which may share the GPU.
    pub(in crate::communicator) fn most_alone(&self, ranks: usize) -> u32 {
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX).max(2);
        self.wanted.unwrap_or(u32::MAX).min(self.launcher.resident() / ranks).max(1)
    }

    /// The kernels of collectives. `reaches_node`: whether they reach the memory of all ranks of the node.
    pub(in crate::communicator) fn offer(&self, reaches_node: bool) -> KernelOffer {
        let address = Gpu::address(self.gpu.ordinal).unwrap_or_else(|| self.gpu.ordinal.to_string());
        let gpu = format!("{} {address}", host_name());
        KernelOffer { gpu, resident: self.launcher.resident(), wanted: self.wanted, reaches_node }
    }
}

impl GpuState {
    pub(in crate::communicator) fn new(
        config: &Config,
        shares_process: bool,
        ranks_of_node: usize,
        layout: ArenaLayout,
        arena: &Arc<Arena>,
        registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        Self {
            collectives: CollectiveLayout::new(ranks_of_node).unwrap_or(CollectiveLayout::ALONE),
            requested: config.gpu,
            ipc: config.gpu_ipc.0,
            ctas: config.gpu_ctas.map(|ctas| u32::try_from(ctas).unwrap_or(u32::MAX)),
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

    /// Memory of the GPU that the next communicator would open, or this one has opened.
    pub(in crate::communicator) fn known_memory(&self) -> Option<MemorySpace> {
        let opened = self.opened.get().map(|opened| opened.gpu.ordinal);
        opened.or_else(|| known(self.requested)).map(MemorySpace::Gpu)
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
        if self.layout.relay_pool().slots().0 == 0 {
            return Err(Error::unsupported(
                "there was no GPU when this communicator was created (fix: create it when there is one, or set FLEXRING_GPU)",
            ));
        }
        let gpu = Gpu::open(gpu)?;
        let launcher = Launcher::new(&gpu)?;
        let layout = if shares { self.collectives } else { CollectiveLayout::ALONE };
        let shared = Arc::new(GpuMemory::new(&gpu, (PATTERN + layout.bytes()).next_multiple_of(BLOCK))?);
        if let Some(registrar) = &self.registrar {
            let registered = GATE.register(self.timeout.min(REGISTRATION_PATIENCE), || {
                registrar.try_register(shared.piece());
                Ok(())
            });
            if let Err(error) = registered {
                log::warn!(
                    "data is staged in host memory for RDMA devices: {} (fix: create communicators while no call on a GPU runs)",
                    error.message()
                );
            }
        }
        let sharing = shares.then(|| cuda::ipc::Ipc::new(&gpu, &shared)).transpose();
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
        let memory = CollectiveMemory::new(&gpu, &shared, layout)?;
        // Only kernels that reach each other's memory access what is registered.
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner).take().filter(|_| shares);
        let kernel_devices = self.registrar.as_ref().map(|devices| {
            // Other ranks wait for the call.
            let patience = self.timeout / 8;
            Arc::new(GatedDevices { devices: Arc::clone(devices), patience }) as Arc<dyn Registrar>
        });
        let registered = notices.map(|(rank, notices)| OfferedMemory::new(&gpu, &memory, rank, notices));
        let kernel_state = KernelState::new(memory, registered, kernel_devices);
        log::info!("vectors may be on {gpu:?}: {}", cuda::image::origin());
        if let Some(sharing) = sharing {
            executor.share_gpu(Box::new(sharing));
        }
        // Cannot be set already: only one thread at a time holds the executor.
        let _ = self.opened.set(OpenedGpu { gpu, launcher, kernel_state, wanted: self.ctas });
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

    /// What runs calls by kernels, if a GPU is open.
    pub(in crate::communicator) fn kernel_state(&self) -> Option<(&OpenedGpu, &KernelState)> {
        let opened = self.opened.get()?;
        Some((opened, &opened.kernel_state))
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
        let ended = opened.kernel_state.end(&opened.launcher, fault);
        if !ended {
            opened.kernel_state.leak();
        }
        ended
    }
}
