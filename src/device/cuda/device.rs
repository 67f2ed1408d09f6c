//! The device that reduces and copies on a GPU.
//!
//! Owns three streams, so that all three directions work concurrently: copies to the host, copies from the host, and
//! kernels. Also owns the GPU memory that stages host operands, and the choice of the jobs that share a launch. Must not know
//! what jobs belong to.
//!
//! Nothing blocks: jobs are enqueued in streams, and events tell when they are complete. A kernel whose operands come from
//! another stream waits for that stream by an event. A job that depends on another one is submitted only after the other one
//! was reported, so streams need no further synchronization.

use super::batch::{self, BatchBuilder, OPERANDS};
use super::image;
use super::objects::{Gpu, GpuMemory, Kernel, Module, Pinned, Stream, StreamEvent, address};
use crate::device::{Arithmetic, Device, Finish, Job, Operand, Submitted};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Arena, MemorySpace, Piece};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that one thread handles at a time: four granules of 16.
const BYTES_PER_THREAD: usize = 64;

/// The block size of CUDA's allocator. Shared allocations are whole blocks, because another process opens a whole block.
const BLOCK: usize = 2 << 20;

/// One stream and the jobs in it.
struct StreamQueue {
    stream: Stream,
    /// Jobs enqueued since the last event, and the slots that they hold.
    open: JobGroup,
    /// Groups of jobs with the event behind each, oldest first.
    under_way: VecDeque<(StreamEvent, JobGroup)>,
}

/// Jobs that complete with the same event.
#[derive(Default)]
struct JobGroup {
    tickets: Vec<u64>,
    /// Slots to free when the jobs complete.
    slots: Vec<Piece>,
}

impl StreamQueue {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self { stream: Stream::urgent(gpu)?, open: JobGroup::default(), under_way: VecDeque::new() })
    }
}

/// The type and operation of a launch, which all its tasks share.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ReductionKind {
    dtype: DType,
    arithmetic: Arithmetic,
}

/// A GPU that reduces and copies.
pub struct Cuda {
    gpu: Arc<Gpu>,
    out: StreamQueue,
    in_: StreamQueue,
    reduction: StreamQueue,
    /// The launch that is being built.
    batch: BatchBuilder,
    /// Bytes that the longest task of the launch writes.
    longest: usize,
    kind: Option<ReductionKind>,
    /// Whether the launch reads slots that copies from the host still fill.
    needs_in: bool,
    arrived: StreamEvent,
    /// The reduction kernels, by type and arithmetic, and the copy kernel.
    kernels: Vec<Kernel>,
    copier: Kernel,
    free: Vec<Piece>,
    /// Slots of the task that is being built. They belong to the group of its own launch: waiting for a further slot may
    /// launch earlier tasks.
    taken: Vec<Piece>,
    /// Events and groups to reuse.
    spare: Vec<(StreamEvent, JobGroup)>,
    failed: Option<Error>,
    landing: Arc<GpuMemory>,
    /// Dropped last, in this order.
    _pinned: Vec<Pinned>,
    _arena: Arc<Arena>,
    _slots: GpuMemory,
    _module: Module,
}

/// The host memory that a device works with.
pub(crate) struct HostSide<'a> {
    /// Number of slots in the pool for calls on GPUs, and bytes of each.
    pub slots: (usize, usize),
    /// The memory of that pool, and its arena.
    pub pool: Piece,
    pub arena: &'a Arc<Arena>,
    /// The pools of neighbours; mapped for as long as the device is used.
    pub viewed: &'a [Piece],
}

impl Cuda {
    /// The device of a GPU. Allocates GPU memory for every slot of the pool twice: once for staged host operands, and once as
    /// the landing memory that peers read and write.
    ///
    /// # Errors
    /// `System` if the GPU has too little memory; `Unsupported` if it cannot run the kernels.
    pub(crate) fn new(gpu: &Arc<Gpu>, host: &HostSide<'_>) -> Result<Self> {
        let (slots, slot) = host.slots;
        let module = Module::load(gpu, &image_for(gpu.capability)?)?;
        let mut kernels = Vec::new();
        for dtype in DType::ALL {
            for arithmetic in Arithmetic::ALL {
                kernels.push(module.kernel(image::symbol(dtype, arithmetic))?);
            }
        }
        let copier = module.kernel(image::COPY)?;
        let pool = |bytes: usize| {
            let names = "FLEXRING_SLOTS and FLEXRING_GPU_SUBCHUNK";
            let message = || format!("a GPU needs twice {slots} slots of {slot} bytes, set by {names}");
            GpuMemory::new(gpu, bytes).map_err(|error| error.context(message()))
        };
        let memory = pool(slots * slot)?;
        let landing = Arc::new(pool((slots * slot).next_multiple_of(BLOCK))?);
        let mut pinned = Vec::new();
        for (piece, read_only) in
            std::iter::once((host.pool, false)).chain(host.viewed.iter().map(|piece| (*piece, true)))
        {
            // SAFETY: the device holds the arena, and the executor holds the neighbours' arenas for longer than the device lives.
            match unsafe { Pinned::new(gpu, piece, read_only) } {
                Ok(pin) => pinned.push(pin),
                Err(error) => log::warn!(
                    "{gpu:?} copies more slowly from the memory of {}: {}",
                    if read_only { "a neighbour" } else { "this rank" },
                    error.message()
                ),
            }
        }
        let free = (0..slots).map(|number| memory.piece().narrow(number * slot, slot)).collect();
        Ok(Self {
            gpu: Arc::clone(gpu),
            out: StreamQueue::new(gpu)?,
            in_: StreamQueue::new(gpu)?,
            reduction: StreamQueue::new(gpu)?,
            batch: BatchBuilder::default(),
            longest: 0,
            kind: None,
            needs_in: false,
            arrived: StreamEvent::new(gpu)?,
            kernels,
            copier,
            free,
            taken: Vec::new(),
            spare: Vec::new(),
            failed: None,
            landing,
            _pinned: pinned,
            _arena: Arc::clone(host.arena),
            _slots: memory,
            _module: module,
        })
    }

    /// GPU memory that peers read and write: one part for every slot of the pool, in order, then padding.
    pub(crate) fn landing(&self) -> &Arc<GpuMemory> {
        &self.landing
    }

    /// A slot for `len` bytes for the task that is being built. Waits until one is free.
    fn slot(&mut self, len: usize) -> Result<Piece> {
        loop {
            if let Some(slot) = self.free.pop() {
                if slot.len() < len {
                    let message = format!("{len} bytes do not fit a slot of {} on the GPU", slot.len());
                    self.free.push(slot);
                    return Err(Error::internal(message));
                }
                self.taken.push(slot);
                return Ok(slot.narrow(0, len));
            }
            self.launch()?;
            // The jobs are reported by the next poll; only the slots are needed here.
            let Some((event, group)) =
                self.reduction.under_way.iter_mut().find(|(_, group)| !group.slots.is_empty())
            else {
                return Err(Error::internal("no slot on the GPU is free, and no job holds one"));
            };
            while !event.is_over()? {
                std::thread::yield_now();
            }
            self.free.append(&mut group.slots);
        }
    }

    fn submit_entered(&mut self, job: &Job<'_>, ticket: u64) -> Result<()> {
        let plain = matches!(job.finish, Finish::Keep | Finish::Divide(1));
        if let [only] = job.operands
            && only.factor.is_none()
            && plain
        {
            let queue = match (only.piece.memory(), job.into.memory()) {
                (MemorySpace::Gpu(_), MemorySpace::Gpu(_)) => None,
                (MemorySpace::Gpu(_), MemorySpace::Host) => Some(&mut self.out),
                (MemorySpace::Host, _) => Some(&mut self.in_),
            };
            if let Some(queue) = queue {
                // SAFETY: as for every job, the pieces are valid and do not overlap until the job is reported.
                unsafe { queue.stream.copy(job.into, only.piece)? };
                queue.open.tickets.push(ticket);
                return Ok(());
            }
            return self.reduce(job, None, job.into, ticket);
        }
        let kind = Some(ReductionKind { dtype: job.dtype, arithmetic: job.arithmetic });
        if job.into.is_host() {
            // Reduced on the GPU and copied to the host in the same stream, which orders the two.
            let slot = self.slot(job.into.len())?;
            self.add(job, kind, slot)?;
            self.launch_batch()?;
            // SAFETY: as above; the slot is held until the group completes.
            unsafe { self.reduction.stream.copy(job.into, slot)? };
            self.reduction.open.tickets.push(ticket);
            return Ok(());
        }
        self.reduce(job, kind, job.into, ticket)
    }

    fn reduce(&mut self, job: &Job<'_>, kind: Option<ReductionKind>, into: Piece, ticket: u64) -> Result<()> {
        self.add(job, kind, into)?;
        self.reduction.open.tickets.push(ticket);
        Ok(())
    }

    /// Adds a task to the launch that is being built. A task with more operands than a launch has room for takes several
    /// passes, each of which rounds.
    fn add(&mut self, job: &Job<'_>, kind: Option<ReductionKind>, into: Piece) -> Result<()> {
        if self.kind != kind {
            self.launch_batch()?;
            self.kind = kind;
        }
        let mut operands = job.operands;
        let mut so_far = None;
        loop {
            let room = OPERANDS - usize::from(so_far.is_some());
            let (now, later) = operands.split_at(operands.len().min(room));
            let finish = if later.is_empty() { job.finish } else { Finish::Keep };
            self.add_pass(job.dtype, kind, into, so_far, now, finish)?;
            if later.is_empty() {
                return Ok(());
            }
            // The next pass reads what this one writes, so it needs a launch of its own.
            self.launch_batch()?;
            self.kind = kind;
            operands = later;
            so_far = Some(Operand { piece: into, factor: None });
        }
    }

    fn add_pass(
        &mut self,
        dtype: DType,
        kind: Option<ReductionKind>,
        into: Piece,
        so_far: Option<Operand>,
        operands: &[Operand],
        finish: Finish,
    ) -> Result<()> {
        if !self.batch.has_room(operands.len() + usize::from(so_far.is_some())) {
            self.launch_batch()?;
            self.kind = kind;
        }
        let count = if kind.is_some() { into.len() / dtype.size() } else { into.len() };
        let divide = match finish {
            Finish::Keep => None,
            Finish::Divide(ranks) => NonZeroU32::new(ranks),
        };
        // Slots are taken before the task is added, because waiting for one may launch the batch.
        let mut staged = [Piece::EMPTY; OPERANDS];
        for (place, operand) in staged.iter_mut().zip(operands) {
            *place = operand.piece;
            if operand.piece.is_host() {
                *place = self.slot(operand.piece.len())?;
                // SAFETY: the operand is valid, and the slot belongs to the job, until the job is reported.
                unsafe { self.in_.stream.copy(*place, operand.piece)? };
                self.needs_in = true;
            }
        }
        self.kind = kind;
        let first = so_far.into_iter();
        let staged =
            staged.iter().zip(operands).map(|(place, operand)| Operand { piece: *place, ..*operand });
        let mut all = [batch::KernelOperand::default(); OPERANDS];
        let mut count_of_operands = 0;
        for (place, Operand { piece, factor }) in all.iter_mut().zip(first.chain(staged)) {
            *place = batch::KernelOperand::new(address(piece), factor);
            count_of_operands += 1;
        }
        if !self.batch.push(address(into), count as u64, all[..count_of_operands].iter().copied(), divide) {
            return Err(Error::internal("a task does not fit an empty launch"));
        }
        self.longest = self.longest.max(into.len());
        self.reduction.open.slots.append(&mut self.taken);
        Ok(())
    }

    /// Launches the batch, without an event behind it.
    fn launch_batch(&mut self) -> Result<()> {
        if self.batch.tasks() == 0 {
            return Ok(());
        }
        if std::mem::take(&mut self.needs_in) {
            self.arrived.record(&self.in_.stream)?;
            self.reduction.stream.wait(&self.arrived)?;
        }
        let kernel = match self.kind {
            None => self.copier,
            Some(kind) => {
                self.kernels[kind.dtype as usize * Arithmetic::ALL.len() + kind.arithmetic as usize]
            }
        };
        let tasks = self.batch.tasks() as u32;
        let enough = std::mem::take(&mut self.longest).div_ceil(BYTES_PER_THREAD * kernel.threads as usize);
        let blocks = (kernel.blocks / tasks).clamp(1, u32::try_from(enough).unwrap_or(u32::MAX).max(1));
        // SAFETY: the kernel takes a batch. Its memory is valid until its jobs are reported, or is a slot.
        unsafe { kernel.launch(&self.reduction.stream, (blocks, tasks), self.batch.batch())? };
        self.batch.clear();
        Ok(())
    }

    /// Launches the batch, and records an event behind the open jobs of each stream.
    fn launch(&mut self) -> Result<()> {
        self.launch_batch()?;
        let Self { out, in_, reduction, spare, gpu, .. } = self;
        for queue in [out, in_, reduction] {
            if queue.open.tickets.is_empty() && queue.open.slots.is_empty() {
                continue;
            }
            let (event, empty) = match spare.pop() {
                Some(used) => used,
                None => (StreamEvent::new(gpu)?, JobGroup::default()),
            };
            event.record(&queue.stream)?;
            queue.under_way.push_back((event, std::mem::replace(&mut queue.open, empty)));
        }
        Ok(())
    }

    fn poll_entered(&mut self, done: &mut dyn FnMut(u64)) -> Result<()> {
        self.launch()?;
        let Self { out, in_, reduction, spare, free, .. } = self;
        for queue in [out, in_, reduction] {
            while let Some((event, _)) = queue.under_way.front()
                && event.is_over()?
            {
                let (event, mut group) = queue.under_way.pop_front().expect("just looked at");
                group.tickets.drain(..).for_each(&mut *done);
                free.append(&mut group.slots);
                spare.push((event, group));
            }
        }
        Ok(())
    }

    /// Runs `act` with the GPU's context current. After a failure nothing is tried any more, because later errors of the driver
    /// only repeat the first one.
    fn within<R>(&mut self, act: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let gpu = Arc::clone(&self.gpu);
        let entered = gpu.enter()?;
        let outcome = act(self).map_err(|error| error.context(format_args!("{gpu:?}")));
        drop(entered);
        outcome.inspect_err(|error| self.failed = Some(error.clone()))
    }
}

/// The kernels for a GPU of this capability. Where they must be compiled first, that is done once at a time, and on a thread
/// of its own: NVRTC 13.0 was seen to run out of the 2 MiB that threads usually have for their stack.
fn image_for((major, minor): (u32, u32)) -> Result<Cow<'static, [u8]>> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let compiler = std::thread::Builder::new().name("flexring-kernels".to_owned()).stack_size(64 << 20);
    let compiled = compiler
        .spawn(move || image::image(major, minor))
        .map_err(|cause| Error::io("cannot start a thread for the compiler of kernels", cause))?;
    compiled.join().unwrap_or_else(|_| Err(Error::internal("the compiler of kernels panicked")))
}

impl Device for Cuda {
    fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted> {
        if job.into.is_empty() {
            return Ok(Submitted::Done);
        }
        self.within(|cuda| cuda.submit_entered(job, ticket))?;
        Ok(Submitted::InFlight)
    }

    fn poll(&mut self, done: &mut dyn FnMut(u64)) -> Result<()> {
        let idle = |queue: &StreamQueue| queue.open.tickets.is_empty() && queue.under_way.is_empty();
        if [&self.out, &self.in_, &self.reduction].into_iter().all(idle) {
            return Ok(());
        }
        self.within(|cuda| cuda.poll_entered(done))
    }

    fn abort(&mut self) {
        // What was not launched never will be: it may be part of what failed.
        self.batch.clear();
        for queue in [&mut self.out, &mut self.in_, &mut self.reduction] {
            if let Err(failure) = self.gpu.enter().and_then(|_entered| queue.stream.synchronize()) {
                // Then the context runs nothing any more.
                log::debug!("{:?}: {failure}", self.gpu);
            }
        }
        let error = || Error::aborted("the GPU's work was aborted");
        self.failed.get_or_insert_with(error);
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.abort();
    }
}
