//! The communicator: what users call.
//!
//! Owns the order of calls, their checking, and the story of a failure. Must not know how ranks found each
//! other (that is `bootstrap`), nor how anything moves (that is the executor).

mod call_queue;
mod checked_call;
mod control_plane;
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_collectives;
mod inter_node;
mod join;
mod plans;
mod request;
mod user_memory;

pub(crate) use checked_call::{CallValidator, CheckedCall};
pub(crate) use request::CallOutcome;
pub use request::{Owned, Request};
pub use user_memory::Registered;

use crate::bootstrap::{Identity, UniqueId, identity};
use crate::call::{Call, Collective};
use crate::config::{Config, environment};
use crate::device::Arithmetic;
use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::executor::{BoundCall, Executor, Path};
use crate::fault::Fault;
use crate::memory::{self, Buffer, Piece};
use crate::plan::verifier::VerifiedPlan;
use crate::rank::Rank;
use call_queue::{CallQueue, QueueTicket};
use control_plane::ControlPlane;
use gpu::{Gate, GpuState};
use plans::Plans;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use user_memory::UserMemory;

/// A group of ranks that reduce vectors together. Every rank must make the same calls in the same order.
///
/// Calls may come from any thread; they run one at a time. After an error the communicator refuses further
/// work on every rank; what remains is to drop it.
pub struct Communicator {
    core: Arc<Core>,
    /// Locked from the taking of a ticket to the sending of its job, so that the worker gets them in order.
    submissions: Mutex<Option<Sender<QueuedCall>>>,
    worker: Option<JoinHandle<()>>,
}

/// What callers and the worker share.
struct Core {
    rank: Rank,
    world: usize,
    /// Largest vector, in bytes, that takes the path for small messages.
    small: usize,
    /// Bytes of a slot of the pool.
    subchunk: usize,
    user_memory: UserMemory,
    gpu_state: GpuState,
    engine: Mutex<Engine>,
    call_queue: CallQueue,
    fault: Arc<Fault>,
    /// Whether a caller on this rank was told the error that ended the communicator.
    error_reported: AtomicBool,
    control: ControlPlane,
    summary: String,
}

struct Engine {
    executor: Executor,
    plans: Plans,
    /// For what is made on the way outside the caller's memory; as long as the longest call needed so far.
    scratch: Option<Buffer<u8>>,
    sequence: u64,
}

/// A call whose turn comes later.
struct QueuedCall {
    ticket: QueueTicket,
    request: CheckedCall,
    /// What lets the call's stream go on when the job is dropped.
    gate: Option<Gate>,
    outcome: Arc<CallOutcome>,
}

impl Drop for QueuedCall {
    fn drop(&mut self) {
        // Whatever happened to the job, nobody waits for it for ever.
        self.outcome.end(Err(Error::new(ErrorKind::Internal, "the worker thread ended before the call did")));
    }
}

impl Communicator {
    /// Joins the world that the environment describes: flexring's own variables, or those of torchrun,
    /// Open MPI, MPICH or Slurm. Returns when all ranks are there and all links are ready.
    ///
    /// # Errors
    /// `InvalidSetting` for a variable that cannot be used; `Rendezvous` if the ranks do not find each other
    /// in time; `Disagreement` if they differ in version or settings.
    pub fn from_env() -> Result<Self> {
        let config = Config::from_env()?;
        let identity = identity(&config, environment)?;
        Self::with_config(&config, &identity)
    }

    /// Joins the world of `world` ranks that share `id`, as `rank`. One rank makes the id by
    /// [`create_unique_id`](crate::bootstrap::create_unique_id) and the program passes it to the others.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env), and `InvalidArgument` if `rank` is not in the world.
    pub fn from_unique_id(world: usize, id: &UniqueId, rank: Rank) -> Result<Self> {
        let config = Config::from_env()?;
        let identity = Identity::from_unique_id(world, id, rank)?;
        Self::with_config(&config, &identity)
    }

    /// A world of `world` ranks that are threads of this process, one communicator each.
    ///
    /// # Errors
    /// `InvalidSetting` for a variable that cannot be used; `System` if there is too little memory.
    pub fn local(world: usize) -> Result<Vec<Self>> {
        Self::local_with(&Config::from_env()?, world)
    }

    fn start(core: Core) -> Result<Self> {
        let core = Arc::new(core);
        let (submissions, queue) = channel();
        let worker = Arc::clone(&core);
        let worker = std::thread::Builder::new()
            .name("flexring-worker".to_owned())
            .spawn(move || worker.run_queued(&queue))
            .map_err(|cause| Error::system("cannot start a thread for asynchronous calls", cause))?;
        log::info!("{}", core.summary);
        Ok(Self { core, submissions: Mutex::new(Some(submissions)), worker: Some(worker) })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.core.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.core.world
    }

    /// What was chosen and why, in one sentence.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.core.summary
    }

    pub(crate) fn validator(&self) -> CallValidator {
        CallValidator { rank: self.core.rank, world: self.core.world }
    }

    /// Reduces the vectors of all ranks, element by element; every rank ends with the same result in `vector`.
    ///
    /// # Errors
    /// `Disagreement` if ranks call with different counts, types or operations; `PeerLost`, `Timeout` or
    /// `Aborted` if a rank does not get through; `InvalidArgument` for an operation that the type cannot do.
    pub fn all_reduce<T: Element>(&self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().all_reduce(piece, piece, T::DTYPE, op)?)
        })
    }

    /// The same with the result in another vector, as long as the first.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and `InvalidArgument` if the lengths differ.
    pub fn all_reduce_into<T: Element>(&self, send: &[T], receive: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().all_reduce(input, output, T::DTYPE, op)?)
        })
    }

    /// Reduces the vectors `send` of all ranks; rank r ends with the r-th of equal parts of the result in
    /// `receive`, so `send` is as many times as long as there are ranks.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn reduce_scatter<T: Element>(&self, send: &[T], receive: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().reduce_scatter(input, output, T::DTYPE, op)?)
        })
    }

    /// The same with the result in `vector` itself: rank r's part of it is where the r-th part of `vector` was.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn reduce_scatter_in_place<T: Element>(&self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece);
            self.run(&self.validator().reduce_scatter(piece, part, T::DTYPE, op)?)
        })
    }

    /// Gathers the vectors `send` of all ranks, one after the other, in `receive` on every rank, which is as many
    /// times as long as there are ranks.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().all_gather(input, output, T::DTYPE)?)
        })
    }

    /// The same with what rank r gives in the r-th part of its own `vector`.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn all_gather_in_place<T: Element>(&self, vector: &mut [T]) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece);
            self.run(&self.validator().all_gather(part, piece, T::DTYPE)?)
        })
    }

    /// Makes `vector` on every rank what it is on `root`.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and `InvalidArgument` if there is no rank `root`.
    pub fn broadcast<T: Element>(&self, vector: &mut [T], root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().broadcast(piece, piece, T::DTYPE, root)?)
        })
    }

    /// The same from the root's `send`. That of the others is not looked at and may be empty.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn broadcast_into<T: Element>(&self, send: &[T], receive: &mut [T], root: Rank) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().broadcast(input, output, T::DTYPE, root)?)
        })
    }

    /// Reduces the vectors of all ranks; `root` ends with the result in `vector`, the others' stay as they are.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn reduce<T: Element>(&self, vector: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().reduce(piece, piece, T::DTYPE, op, root)?)
        })
    }

    /// The same with the result in the root's `receive`. That of the others is not looked at and may be empty.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn reduce_into<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        op: ReduceOp,
        root: Rank,
    ) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().reduce(input, output, T::DTYPE, op, root)?)
        })
    }

    /// An all-reduce in place, while this thread goes on. Requests run in the order in which they were made.
    ///
    /// # Errors
    /// `InvalidArgument` at once; everything else when the request is waited for.
    pub fn all_reduce_async<B: Owned>(&self, mut vector: B, op: ReduceOp) -> Result<Request<B>> {
        let outcome = memory::lend_in_place(vector.elements(), |piece| {
            self.submit(self.validator().all_reduce(piece, piece, B::Item::DTYPE, op)?)
        })?;
        Ok(Request { outcome, vector: Some(vector) })
    }

    /// Uses `plan` for all later calls, whatever the settings say. All ranks must do so between the same two
    /// calls; else the next one is refused as a disagreement.
    ///
    /// # Errors
    /// `InvalidArgument` if the plan is for another number of ranks.
    pub fn use_plan(&self, plan: &VerifiedPlan) -> Result<()> {
        let (planned, world) = (plan.plan().schedule().world(), self.core.world);
        if planned != world {
            let words = format!("the plan is for {planned} ranks, but there are {world}");
            return Err(Error::new(ErrorKind::InvalidArgument, words));
        }
        let _turn = self.core.call_queue.wait_turn(&self.core.call_queue.take_ticket());
        let mut engine = self.core.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let Engine { executor, plans, .. } = &mut *engine;
        plans.replace(plan, executor);
        Ok(())
    }

    /// A vector of `len` zeros in memory that the other ranks of this node read directly, and that is registered
    /// with the RDMA devices that this communicator uses.
    ///
    /// # Errors
    /// `System` if there is not that much memory.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.core.user_memory.alloc(len)
    }

    /// Registers a vector of one's own with the RDMA devices that this communicator uses, for as long as the
    /// returned guard lives: calls on it, or on parts of it, then copy and register nothing. Without RDMA devices
    /// nothing is done.
    ///
    /// # Errors
    /// `System` if the memory cannot be locked or a device has no room for it.
    pub fn register<'a, T: Element>(&'a self, vector: &'a mut [T]) -> Result<Registered<'a, T>> {
        Registered::new(&self.core.user_memory, vector)
    }

    /// The same for somebody who keeps the address only.
    pub(crate) fn register_piece(&self, piece: Piece) -> Result<()> {
        self.core.prepare_gpu(piece)?;
        self.core.user_memory.register(piece)
    }

    pub(crate) fn deregister_piece(&self, piece: Piece) -> Result<()> {
        self.core.user_memory.deregister(piece)
    }

    /// Waits until all calls that were made so far are over.
    ///
    /// # Errors
    /// What ended the communicator, if anything has.
    pub fn synchronize(&self) -> Result<()> {
        drop(self.core.call_queue.wait_turn(&self.core.call_queue.take_ticket()));
        self.status().inspect_err(|_| self.core.error_reported.store(true, Ordering::Relaxed))
    }

    /// Whether the communicator still works, without waiting for anything.
    ///
    /// # Errors
    /// What ended it.
    pub fn status(&self) -> Result<()> {
        self.core.fault.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Ends whatever all ranks do with this communicator, from any thread, at once: calls under way return an
    /// error on every rank.
    pub fn abort(&self) {
        self.core.control.abort(&self.core.fault, self.core.rank);
    }

    /// This rank's part of a vector that has one for each rank. A vector that cannot be divided into whole
    /// elements so is told by the parts being too short.
    fn part_of<T: Element>(&self, vector: Piece) -> Piece {
        let bytes = vector.len() / size_of::<T>() / self.core.world * size_of::<T>();
        vector.narrow(self.core.rank * bytes, bytes)
    }

    /// The same as plain bytes, for somebody who keeps the address only.
    pub(crate) fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.core.user_memory.lease(bytes)
    }

    /// Takes a lease back; `false` if nothing was leased at this address.
    pub(crate) fn end_lease(&self, start: *const u8) -> bool {
        self.core.user_memory.end_lease(start)
    }

    /// Runs a checked call to its end. The pieces are not used afterwards.
    pub(crate) fn run(&self, checked: &CheckedCall) -> Result<()> {
        let _turn = self.core.call_queue.wait_turn(&self.core.call_queue.take_ticket());
        let outcome = self.core.run(checked);
        self.core.error_reported.fetch_or(outcome.is_err(), Ordering::Relaxed);
        outcome
    }

    /// Starts a checked call. The pieces must stay valid until the outcome is there.
    pub(crate) fn submit(&self, checked: CheckedCall) -> Result<Arc<CallOutcome>> {
        self.submit_behind(checked, || Ok(None))
    }

    /// The same behind a gate, which is made in the order in which calls are started.
    fn submit_behind(
        &self,
        checked: CheckedCall,
        gate: impl FnOnce() -> Result<Option<Gate>>,
    ) -> Result<Arc<CallOutcome>> {
        let outcome = Arc::new(CallOutcome::default());
        let submissions = self.submissions.lock().unwrap_or_else(PoisonError::into_inner);
        // A caller's mistake ends nothing. That a GPU failed the others must know, for they wait for this rank.
        let gate = gate().map_err(|error| match error.kind() {
            ErrorKind::System => self.core.fail(error),
            _ => error,
        })?;
        let queued = QueuedCall {
            ticket: self.core.call_queue.take_ticket(),
            request: checked,
            gate,
            outcome: Arc::clone(&outcome),
        };
        let sent = submissions.as_ref().is_some_and(|submissions| submissions.send(queued).is_ok());
        sent.then_some(outcome).ok_or_else(|| Error::new(ErrorKind::Internal, "the worker thread has ended"))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // The worker ends when it has run what was asked for.
        *self.submissions.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if self.worker.take().is_some_and(|worker| worker.join().is_err()) {
            log::error!("the worker of rank {} panicked", self.core.rank);
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator({})", self.core.summary)
    }
}

impl Core {
    fn run_queued(&self, queue: &Receiver<QueuedCall>) {
        for queued in queue {
            let _turn = self.call_queue.wait_turn(&queued.ticket);
            let ready = queued.gate.as_ref().map_or(Ok(()), |gate| gate.wait_ready(&self.fault));
            let ready = ready.map_err(|failure| self.fail(failure));
            // Within the turn: whoever comes next may rely on all before being over. If the fault was raised while the
            // stream was waited for, this returns it.
            let outcome = ready.and_then(|()| self.run(&queued.request));
            // In a stream nobody hears it: the next call tells.
            self.error_reported.fetch_or(outcome.is_err() && queued.gate.is_none(), Ordering::Relaxed);
            queued.outcome.end(outcome);
            // The stream goes on before another call has its turn.
            drop(queued);
        }
    }

    /// Runs a call whose turn it is.
    fn run(&self, checked: &CheckedCall) -> Result<()> {
        // After a panic in an earlier call the executor has given its links up and refuses to run.
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_usable()?;
        engine.sequence += 1;
        // While this rank still stands in the call, so that others can be told in which.
        let outcome = self.attempt(checked, &mut engine).map_err(|failure| self.fail(failure));
        self.control.leave();
        outcome
    }

    /// Refuses calls on a communicator that has failed. The first caller who hears of that is told why.
    fn check_usable(&self) -> Result<()> {
        let Some(error) = self.fault.get() else { return Ok(()) };
        if !self.error_reported.swap(true, Ordering::Relaxed) {
            return Err(error.clone());
        }
        let words = format!("this communicator has failed before: {}", error.message());
        Err(Error::new(ErrorKind::Aborted, words))
    }

    /// Ends the communicator on all ranks, unless something did before, and returns what did.
    fn fail(&self, failure: Error) -> Error {
        match self.fault.get() {
            Some(error) => error.clone(),
            None => self.fault.raise(self.control.report(failure)),
        }
    }

    fn attempt(&self, checked: &CheckedCall, engine: &mut Engine) -> Result<()> {
        self.gpu_state.prepare(checked.memory(), engine)?;
        let (path, program) = self.path(checked, engine)?;
        let call = Call {
            sequence: engine.sequence,
            collective: checked.collective,
            dtype: checked.dtype,
            op: checked.op.code(),
            root: checked.root as u32,
            count: checked.count,
            program,
            on_gpu: !checked.is_on_host(),
            factor: checked.op.factor(),
        };
        log::trace!("rank {}: {call}", self.rank);
        self.control.enter(&call);
        let work = BoundCall {
            call,
            input: checked.input,
            output: checked.output,
            scratch: self.scratch(checked, engine)?,
            in_place: checked.in_place,
            arithmetic: match checked.op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => Arithmetic::Sum,
                ReduceOp::Prod => Arithmetic::Prod,
                ReduceOp::Max => Arithmetic::Max,
                ReduceOp::Min => Arithmetic::Min,
            },
            average: checked.op == ReduceOp::Avg,
            prescale: matches!(checked.op, ReduceOp::PreMulSum(_)),
        };
        engine.executor.run(&work, path)
    }

    fn path(&self, checked: &CheckedCall, engine: &mut Engine) -> Result<(Path, u64)> {
        // What is reduced for a GPU on the host needs a slot there.
        let limit = if checked.input.is_host() { self.small } else { self.small.min(self.subchunk) };
        let small = checked.collective == Collective::AllReduce && checked.input.len() <= limit;
        if small && engine.executor.small_path() {
            return Ok((Path::Small, engine.plans.digest()));
        }
        engine.plans.path(checked, &mut engine.executor)
    }

    /// Memory as long as the whole vector, if the caller's is not.
    fn scratch(&self, checked: &CheckedCall, engine: &mut Engine) -> Result<Piece> {
        let bytes = checked.scratch();
        if bytes == 0 {
            return Ok(Piece::EMPTY);
        }
        if !checked.is_on_host() {
            return self.gpu_state.scratch(bytes);
        }
        if engine.scratch.as_ref().is_none_or(|scratch| scratch.len() < bytes) {
            engine.scratch = None;
            engine.scratch = Some(self.user_memory.alloc(bytes)?);
        }
        Ok(engine.scratch.as_ref().map_or(Piece::EMPTY, |scratch| scratch.piece().narrow(0, bytes)))
    }
}
