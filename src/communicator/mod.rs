//! The communicator: what users call.
//!
//! Owns the order of calls, their checking, and the story of a failure. Must not know how ranks found each
//! other (that is `bootstrap`), nor how anything moves (that is the executor).

mod join;
mod request;
mod turns;
mod watch;

pub(crate) use request::Outcome;
pub use request::{Owned, Request};

use crate::bootstrap::{Identity, UniqueId, identity};
use crate::call::{Call, Collective, Rank};
use crate::config::{Config, environment};
use crate::device::Arithmetic;
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::executor::{Executor, Work};
use crate::fault::Fault;
use crate::memory::{self, Arena, Buffer, Piece};
use crate::transport::shm::Growth;
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use turns::{Ticket, Turns};
use watch::Watch;

/// A group of ranks that reduce vectors together. Every rank must make the same calls in the same order.
///
/// Calls may come from any thread; they run one at a time. After an error the communicator refuses further
/// work on every rank; what remains is to drop it.
pub struct Communicator {
    core: Arc<Core>,
    /// Locked from the taking of a ticket to the sending of its job, so that the worker gets them in order.
    jobs: Mutex<Option<Sender<Job>>>,
    worker: Option<JoinHandle<()>>,
}

/// What callers and the worker share.
struct Core {
    rank: Rank,
    world: usize,
    /// Largest vector, in bytes, that takes the path for small messages.
    small: usize,
    digest: u64,
    arena: Arc<Arena>,
    /// Tells the neighbours of new buffers, if there are neighbours.
    growth: Option<Growth>,
    engine: Mutex<Engine>,
    turns: Turns,
    fault: Arc<Fault>,
    watch: Watch,
    summary: String,
}

struct Engine {
    executor: Executor,
    sequence: u64,
    /// Whether a call on this rank has returned the error that ended the communicator.
    told: bool,
}

/// A call whose turn comes later.
struct Job {
    ticket: Ticket,
    request: Asked,
    outcome: Arc<Outcome>,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Whatever happened to the job, nobody waits for it for ever.
        self.outcome.end(Err(Error::new(ErrorKind::Internal, "the worker thread ended before the call did")));
    }
}

/// What a caller asks for, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    input: Piece,
    output: Piece,
    dtype: DType,
    op: ReduceOp,
}

impl Asked {
    /// Checks an all-reduce of the elements of `input` into `output`.
    pub(crate) fn new(input: Piece, output: Piece, dtype: DType, op: ReduceOp) -> Result<Self> {
        let refuse = |words: String| Err(Error::new(ErrorKind::InvalidArgument, words));
        if input.len() != output.len() {
            return refuse(format!("{} bytes cannot be reduced into {} bytes", input.len(), output.len()));
        }
        for (name, piece) in [("send", input), ("receive", output)] {
            if !piece.is_empty() && !(piece.as_ptr() as usize).is_multiple_of(dtype.size()) {
                return refuse(format!(
                    "the {name} buffer at {:p} is not aligned to the {} bytes of a {}",
                    piece.as_ptr(),
                    dtype.size(),
                    dtype.name()
                ));
            }
        }
        let apart = (input.as_ptr() as usize).abs_diff(output.as_ptr() as usize);
        if apart != 0 && apart < input.len() {
            return refuse(format!(
                "the send buffer at {:p} and the receive buffer at {:p} overlap: they must be the same or apart",
                input.as_ptr(),
                output.as_ptr()
            ));
        }
        op.check(dtype)?;
        Ok(Self { input, output, dtype, op })
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
        let (jobs, queue) = channel();
        let worker = Arc::clone(&core);
        let worker = std::thread::Builder::new()
            .name("flexring-worker".to_owned())
            .spawn(move || worker.work(&queue))
            .map_err(|cause| Error::system("cannot start a thread for asynchronous calls", cause))?;
        log::info!("{}", core.summary);
        Ok(Self { core, jobs: Mutex::new(Some(jobs)), worker: Some(worker) })
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

    /// Reduces the vectors of all ranks, element by element; every rank ends with the same result in `vector`.
    ///
    /// # Errors
    /// `Disagreement` if ranks call with different counts, types or operations; `PeerLost`, `Timeout` or
    /// `Aborted` if a rank does not get through; `InvalidArgument` for an operation that the type cannot do.
    pub fn all_reduce<T: Element>(&self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend_in_place(vector, |piece| self.run(&Asked::new(piece, piece, T::DTYPE, op)?))
    }

    /// The same with the result in another vector, as long as the first.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and `InvalidArgument` if the lengths differ.
    pub fn all_reduce_into<T: Element>(&self, send: &[T], receive: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend(send, receive, |input, output| self.run(&Asked::new(input, output, T::DTYPE, op)?))
    }

    /// The same in place, while this thread goes on. Requests run in the order in which they were made.
    ///
    /// # Errors
    /// `InvalidArgument` at once; everything else when the request is waited for.
    pub fn all_reduce_async<B: Owned>(&self, mut vector: B, op: ReduceOp) -> Result<Request<B>> {
        let outcome = memory::lend_in_place(vector.elements(), |piece| {
            self.submit(Asked::new(piece, piece, B::Item::DTYPE, op)?)
        })?;
        Ok(Request { outcome, vector: Some(vector) })
    }

    /// A vector of `len` zeros in memory that the other ranks of this node read directly.
    ///
    /// # Errors
    /// `System` if there is not that much memory.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::new(Arc::clone(&self.core.arena), len)?;
        self.core.announce(buffer.offset(), size_of_val(&buffer[..]));
        Ok(buffer)
    }

    /// Ends whatever all ranks do with this communicator, from any thread, at once: calls under way return an
    /// error on every rank.
    pub fn abort(&self) {
        self.core.watch.abort(&self.core.fault, self.core.rank);
    }

    /// The same as plain bytes, for somebody who keeps the address only.
    pub(crate) fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        let (offset, start) = self.core.arena.lease(bytes)?;
        self.core.announce(offset, bytes);
        Ok(start)
    }

    /// Takes a lease back; `false` if nothing was leased at this address.
    pub(crate) fn end_lease(&self, start: *const u8) -> bool {
        self.core.arena.end_lease(start)
    }

    /// Runs a checked call to its end. The pieces are not used afterwards.
    pub(crate) fn run(&self, asked: &Asked) -> Result<()> {
        let _turn = self.core.turns.wait(&self.core.turns.take());
        self.core.run(asked)
    }

    /// Starts a checked call. The pieces must stay valid until the outcome is there.
    pub(crate) fn submit(&self, asked: Asked) -> Result<Arc<Outcome>> {
        let outcome = Arc::new(Outcome::default());
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = Job { ticket: self.core.turns.take(), request: asked, outcome: Arc::clone(&outcome) };
        let sent = jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        sent.then_some(outcome).ok_or_else(|| Error::new(ErrorKind::Internal, "the worker thread has ended"))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // The worker ends when it has run what was asked for.
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
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
    fn announce(&self, offset: usize, bytes: usize) {
        if let Some(growth) = &self.growth {
            growth.announce(offset, bytes);
        }
    }

    fn work(&self, queue: &Receiver<Job>) {
        for job in queue {
            let _turn = self.turns.wait(&job.ticket);
            // Within the turn: whoever comes next may rely on all before being over.
            job.outcome.end(self.run(&job.request));
        }
    }

    /// Runs a call whose turn it is.
    fn run(&self, asked: &Asked) -> Result<()> {
        // After a panic in an earlier call the executor has given its links up and refuses to run.
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = self.fault.get() {
            if !std::mem::replace(&mut engine.told, true) {
                return Err(error.clone());
            }
            let words = format!("this communicator has failed before: {}", error.message());
            return Err(Error::new(ErrorKind::Aborted, words));
        }
        engine.sequence += 1;
        let work = self.work_for(asked, engine.sequence);
        log::trace!("rank {}: {}", self.rank, work.call);
        self.watch.enter(&work.call);
        let small = asked.input.len() <= self.small && engine.executor.small_path();
        let outcome = engine.executor.run(&work, small).map_err(|failure| match self.fault.get() {
            Some(error) => error.clone(),
            // While this rank still stands in the call, so that others can be told in which.
            None => self.fault.raise(self.watch.report(failure)),
        });
        engine.told |= outcome.is_err();
        self.watch.leave();
        outcome
    }

    fn work_for(&self, asked: &Asked, sequence: u64) -> Work {
        Work {
            call: Call {
                sequence,
                collective: Collective::AllReduce,
                dtype: asked.dtype,
                op: asked.op.code(),
                count: (asked.input.len() / asked.dtype.size()) as u64,
                program: self.digest,
                factor: asked.op.factor(),
            },
            input: asked.input,
            output: asked.output,
            arithmetic: match asked.op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => Arithmetic::Sum,
                ReduceOp::Prod => Arithmetic::Prod,
                ReduceOp::Max => Arithmetic::Max,
                ReduceOp::Min => Arithmetic::Min,
            },
            average: asked.op == ReduceOp::Avg,
            prescale: matches!(asked.op, ReduceOp::PreMulSum(_)),
        }
    }
}
