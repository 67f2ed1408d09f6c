//! The device that adds and copies on a GPU.
//!
//! Owns three streams, one for each way that bytes take: out to the host, in from it, and through the kernels, so that
//! all three are busy at once; the memory on the GPU that what comes from the host waits in; and which jobs share a
//! launch. Must not know what jobs belong to.
//!
//! Nothing waits here: jobs go into streams, events say when they are done, and what a kernel needs from another stream
//! it waits for there. Jobs on which others depend are never under way at once, as whoever submits them waits for the
//! first to be reported; so streams need not wait for each other but for that.

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

/// Bytes that one thread handles at a time: 16, four times over.
const BYTES_PER_THREAD: usize = 64;

/// What CUDA cuts allocations from. Those that others may open are whole blocks, as others open the whole of a block.
const BLOCK: usize = 2 << 20;

/// One stream and what is under way in it.
struct StreamQueue {
    stream: Stream,
    /// Put in the stream since its last event, with what they hold.
    open: JobGroup,
    /// Behind an event each, oldest first.
    under_way: VecDeque<(StreamEvent, JobGroup)>,
}

/// Jobs that are done together.
#[derive(Default)]
struct JobGroup {
    tickets: Vec<u64>,
    /// Slots that are free when they are.
    slots: Vec<Piece>,
}

impl StreamQueue {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self { stream: Stream::urgent(gpu)?, open: JobGroup::default(), under_way: VecDeque::new() })
    }
}

/// What a launch adds, which all its tasks have in common.
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
    /// The launch that is being put together.
    batch: BatchBuilder,
    /// Bytes that its longest task writes.
    longest: usize,
    kind: Option<ReductionKind>,
    /// Whether it needs what is still on its way in.
    needs_in: bool,
    arrived: StreamEvent,
    /// By type and arithmetic, and the one that copies.
    kernels: Vec<Kernel>,
    copier: Kernel,
    free: Vec<Piece>,
    /// Slots of the task that is being put together. They go to its launch's group and to no earlier one, though waiting
    /// for the next of them may launch what there is.
    taken: Vec<Piece>,
    /// Events and groups that have been used before.
    spare: Vec<(StreamEvent, JobGroup)>,
    failed: Option<Error>,
    landing: Arc<GpuMemory>,
    /// These go last, and in this order.
    _pinned: Vec<Pinned>,
    _arena: Arc<Arena>,
    _slots: GpuMemory,
    _module: Module,
}

/// The host's side of a device.
pub(crate) struct HostSide<'a> {
    /// Slots of the pool for calls on GPUs, and bytes of each.
    pub slots: (usize, usize),
    /// That pool, and the arena that it lies in.
    pub pool: Piece,
    pub arena: &'a Arc<Arena>,
    /// Where neighbours have what they send; mapped for as long as the device is used.
    pub viewed: &'a [Piece],
}

impl Cuda {
    /// A GPU's device, with memory on the GPU in the place of every slot of the pool, once for what it copies in itself and once
    /// for what others write there.
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
            let words = || format!("a GPU needs twice {slots} slots of {slot} bytes, as {names} say");
            GpuMemory::new(gpu, bytes).map_err(|error| error.context(words()))
        };
        let memory = pool(slots * slot)?;
        let landing = Arc::new(pool((slots * slot).next_multiple_of(BLOCK))?);
        let mut pinned = Vec::new();
        for (piece, read_only) in
            std::iter::once((host.pool, false)).chain(host.viewed.iter().map(|piece| (*piece, true)))
        {
            // SAFETY: the device holds the arena, and the executor its neighbours' for longer than the device.
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

    /// Memory on the GPU in the place of every slot of the pool, one after the other and then nothing of use, for what
    /// others read or write.
    pub(crate) fn landing(&self) -> &Arc<GpuMemory> {
        &self.landing
    }

    /// A slot for `len` bytes for the task that is being put together, when there is one again.
    fn slot(&mut self, len: usize) -> Result<Piece> {
        loop {
            if let Some(slot) = self.free.pop() {
                if slot.len() < len {
                    let words = format!("{len} bytes do not fit a slot of {} on the GPU", slot.len());
                    self.free.push(slot);
                    return Err(Error::internal(words));
                }
                self.taken.push(slot);
                return Ok(slot.narrow(0, len));
            }
            self.launch()?;
            // Their jobs are reported at the next poll; here only the slots matter.
            let Some((event, group)) =
                self.reduction.under_way.iter_mut().find(|(_, group)| !group.slots.is_empty())
            else {
                return Err(Error::internal("the GPU's slots are all taken by nothing"));
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
                // SAFETY: the pieces are valid and apart until the job was reported, as for every job.
                unsafe { queue.stream.copy(job.into, only.piece)? };
                queue.open.tickets.push(ticket);
                return Ok(());
            }
            return self.reduce(job, None, job.into, ticket);
        }
        let kind = Some(ReductionKind { dtype: job.dtype, arithmetic: job.arithmetic });
        if job.into.is_host() {
            // Made on the GPU and handed out in the same stream, so that it comes after.
            let slot = self.slot(job.into.len())?;
            self.add(job, kind, slot)?;
            self.launch_batch()?;
            // SAFETY: as above; the slot is held until the group is done.
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

    /// Adds a task to the launch that is being put together. What has more operands than a launch can say is added in
    /// several passes, each of which rounds.
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
            // The next pass reads what this one writes, so it is a launch of its own.
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
        // Slots are taken before the task is begun: waiting for one may launch what there is.
        let mut staged = [Piece::EMPTY; OPERANDS];
        for (place, operand) in staged.iter_mut().zip(operands) {
            *place = operand.piece;
            if operand.piece.is_host() {
                *place = self.slot(operand.piece.len())?;
                // SAFETY: the operand is valid until the job was reported, and the slot is the job's own until then.
                unsafe { self.in_.stream.copy(*place, operand.piece)? };
                self.needs_in = true;
            }
        }
        self.kind = kind;
        let first = so_far.into_iter();
        let staged =
            staged.iter().zip(operands).map(|(place, operand)| Operand { piece: *place, ..*operand });
        let mut all = [batch::KernelOperand::default(); OPERANDS];
        let mut many = 0;
        for (place, Operand { piece, factor }) in all.iter_mut().zip(first.chain(staged)) {
            *place = batch::KernelOperand::new(address(piece), factor);
            many += 1;
        }
        if !self.batch.push(address(into), count as u64, all[..many].iter().copied(), divide) {
            return Err(Error::internal("a task does not fit an empty launch"));
        }
        self.longest = self.longest.max(into.len());
        self.reduction.open.slots.append(&mut self.taken);
        Ok(())
    }

    /// Launches what was put together, without an event behind it.
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
        // SAFETY: the kernel takes a batch. What it says is valid until its jobs were reported, or is a slot.
        unsafe { kernel.launch(&self.reduction.stream, (blocks, tasks), self.batch.batch())? };
        self.batch.clear();
        Ok(())
    }

    /// Launches what was put together, and has everything that is open reported when it is done.
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

    /// Has `act` use the GPU. After a failure nothing is tried any more: what the driver says then is about that.
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

    fn give_up(&mut self) {
        // What was not launched never will be: it may be part of what failed.
        self.batch.clear();
        for queue in [&mut self.out, &mut self.in_, &mut self.reduction] {
            if let Err(failure) = self.gpu.enter().and_then(|_entered| queue.stream.synchronize()) {
                // Then the context runs nothing any more.
                log::debug!("{:?}: {failure}", self.gpu);
            }
        }
        let error = || Error::aborted("the GPU's work was given up");
        self.failed.get_or_insert_with(error);
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.give_up();
    }
}
