//! The communicator: the public API of the library.
//!
//! Owns the handle that users hold, the order of calls, their validation, and how a failure is reported. Must
//! not know how ranks find each other (`bootstrap`), nor how data moves (`executor`).
//!
//! | what | files |
//! |---|---|
//! | what users call | this file, `collectives`, `groups`, `gpu_calls`, `buffers`, `request`, `shrink`, `split` |
//! | making a communicator | `join`; from an earlier one: `world_template`, `shared_connections`, `resource_offers` |
//! | arguments | `checked_call`, `block_lists` |
//! | the order of calls | `call_queue`, `turns`, `thread_calls`; on a worker: `worker`, `worker_pool` |
//! | running one | `runner`, which plan: `plans`, `adaptation`; other ranks' news: `control_plane` |
//! | memory of users | `user_memory`, `registered_pages`, `shared_call` |
//! | the GPU | `gpu_state`, `registration_gate`; ranks that are threads: `launch_group`, `local_gathering` |
//! | the end | `unfinished`, `checked_wait`, `trace_files` |

mod adaptation;
mod block_lists;
mod buffers;
mod call_queue;
mod checked_call;
mod checked_wait;
mod collectives;
mod control_plane;
mod gpu_calls;
mod gpu_state;
mod groups;
mod join;
mod launch_group;
mod local_gathering;
mod plans;
#[cfg(all(test, feature = "verbs"))]
mod rdma_link_costs;
mod registered_pages;
mod registration_gate;
mod request;
mod resource_offers;
mod runner;
mod shared_call;
mod shared_connections;
mod shrink;
mod split;
mod thread_calls;
mod trace_files;
mod turns;
mod unfinished;
mod user_memory;
mod worker;
mod worker_pool;
mod world_template;

pub use crate::transport::verbs::RailStatistics;
pub use adaptation::{AdaptationStatistics, CallTimes, NodeLinkStatistics};
pub use checked_call::{CallValidator, CheckedCall};
#[cfg(feature = "cuda")]
pub use gpu_calls::RegisteredOnGpu;
pub use groups::{NO_RECV_FROM_ANY, Operation, OwnedOperation};
pub use request::{CallOutcome, Owned, Request};
pub use unfinished::abort_unfinished;
pub use user_memory::Registered;

use crate::bootstrap::{Abort, ControlConnection, Identity, UniqueId};
use crate::config::{Config, environment};
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::Piece;
use crate::plan::topology::Topology;
use crate::plan::tuning::ClusterIdentity;
use crate::plan::verifier::VerifiedPlan;
use crate::process::{CreatorProcess, DefaultFloatEnvironment};
use crate::rank::Rank;
use crate::transport::verbs::RailCounters;
use call_queue::QueueTicket;
use registration_gate::RunningCall;
use request::WaitCheck;
use runner::{CallRunner, QueuedCall, QueuedWork, RunnerState};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use thread_calls::ThreadCall;
use worker::Worker;
use world_template::WorldTemplate;

/// Ends a call that a panic leaves behind.
const PANICKED: Abort<'_> = Abort::AtOnce("its program panicked during a call");

/// Longest reason why a process is about to end, in characters.
const LONGEST_CAUSE: usize = 500;

/// A group of ranks that reduce vectors together. Every rank must make the same calls in the same order,
/// apart from [sends and receives](Self::group).
///
/// Calls may come from any thread; they run one at a time. After an error the communicator refuses all
/// further calls on every rank. Drop it and make a new one, or let the ranks that are left
/// [`shrink`](Self::shrink) it. Dropping it waits for calls that are not over; while the thread panics it
/// aborts them on all ranks.
///
/// A forked child of this process cannot use the communicator: threads and connections do not survive a fork.
/// There, calls fail with `InvalidArgument`, and dropping the communicator has no effect on the parent.
///
/// ```
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// std::thread::scope(|scope| {
///     for comm in Communicator::local(4)? {
///         scope.spawn(move || {
///             let mut vector = [comm.rank() as i32; 3];
///             comm.all_reduce(&mut vector, ReduceOp::Sum).expect("all ranks make the same call");
///             assert_eq!(vector, [6; 3]);
///         });
///     }
///     Ok(())
/// })
/// # }
/// ```
pub struct Communicator {
    creator: CreatorProcess,
    runner: Arc<CallRunner>,
    /// Locked from taking a ticket to submitting the call, so that the worker gets calls in ticket order.
    submissions: Mutex<()>,
    worker: Arc<Worker>,
    template: WorldTemplate,
}

impl Communicator {
    /// Joins the world that the environment describes: flexring's own variables, or those of torchrun,
    /// Open MPI, MPICH or Slurm. Returns when all ranks have joined and all links are ready.
    ///
    /// # Errors
    /// `InvalidSetting` for an environment variable whose value is not accepted; `Rendezvous` if the ranks do
    /// not find each other in time; `Disagreement` if they differ in version or settings.
    pub fn from_env() -> Result<Self> {
        let (config, identity) = Self::settings(Identity::from_env)?;
        Self::with_config(&config, &identity)
    }

    /// Joins the world of `world` ranks that share `id`, as `rank`. One rank creates the id with
    /// [`create_unique_id`](crate::create_unique_id) and the program passes it to the others.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env), and `InvalidArgument` if `rank` is not in the world.
    pub fn from_unique_id(world: usize, id: &UniqueId, rank: Rank) -> Result<Self> {
        let (config, identity) = Self::settings(|_| Identity::from_unique_id(world, id, rank))?;
        Self::with_config(&config, &identity)
    }

    /// The settings of the environment, and the rank that `identity` gives. If a setting is invalid, the
    /// ranks that wait for this one learn why it does not come.
    #[doc(hidden)]
    pub fn settings(identity: impl FnOnce(&Config) -> Result<Identity>) -> Result<(Config, Identity)> {
        let _default = DefaultFloatEnvironment::enter();
        let (config, failures) = Config::read_partly(environment);
        let failure = failures.into_iter().next().map(|(_, error)| error);
        match (identity(&config), failure) {
            (identity, None) => Ok((config, identity?)),
            (Err(_), Some(failure)) => Err(failure),
            (Ok(identity), Some(failure)) => {
                crate::logging::init(&config.log);
                Err(ControlConnection::decline(&identity, &config, failure))
            }
        }
    }

    /// A world of `world` ranks that are threads of this process, one communicator each, in the order of
    /// ranks.
    ///
    /// # Errors
    /// `InvalidSetting` for an environment variable whose value is not accepted; `System` if there is too
    /// little memory.
    pub fn local(world: usize) -> Result<Vec<Self>> {
        Self::local_with(&Config::from_env()?, world)
    }

    /// The communicator of a rank whose links are ready.
    fn new(runner: CallRunner, template: WorldTemplate) -> Self {
        log::info!("{}", runner.summary);
        let creator = CreatorProcess::current();
        let (runner, submissions, worker) = (Arc::new(runner), Mutex::new(()), Arc::new(Worker::new()));
        let weak = Arc::downgrade(&worker);
        let submit = move |runner: &_, queued| {
            weak.upgrade().map_or(Ok(()), |worker: Arc<Worker>| worker.submit(runner, queued))
        };
        let _ = runner.submit.set(Box::new(submit));
        unfinished::watch(&runner);
        if let Err(error) = runner.connect_kernels() {
            // The other ranks have connected theirs.
            runner.fail(error);
        }
        Self { creator, runner, submissions, worker, template }
    }

    /// This process's rank, from 0.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.runner.rank
    }

    /// Number of ranks, as `MPI_Comm_size` and `ncclCommCount` give it.
    #[must_use]
    pub fn size(&self) -> usize {
        self.runner.world
    }

    /// This rank's place among those of its node, from 0: the usual number of its GPU, modulo the GPUs that
    /// there are.
    ///
    /// ```
    /// # use flexring::{Communicator, config::Config};
    /// # fn main() -> flexring::Result<()> {
    /// let config = Config { topology: Some("2+3".to_owned()), ..Config::default() };
    /// let ranks = Communicator::local_with(&config, 5)?;
    /// let places: Vec<usize> = ranks.iter().map(Communicator::local_rank).collect();
    /// assert_eq!(places, [0, 1, 0, 1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn local_rank(&self) -> usize {
        let nodes = self.topology().ranks_of_nodes();
        let of_node = |ranks: &Vec<Rank>| ranks.iter().position(|rank| *rank == self.rank());
        nodes.iter().find_map(of_node).unwrap_or(0)
    }

    /// [`size`](Self::size), by the name that PyTorch has for it.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.size()
    }

    /// Number of ranks of this node for each core that they may use together, rounded up. If it is more than
    /// 1, short calls also wait until the ranks get their turns on the cores.
    #[must_use]
    pub fn ranks_per_core(&self) -> usize {
        self.runner.ranks_per_core
    }

    /// The links, schedule and settings in use, and why the schedule was chosen, in one sentence.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.runner.summary
    }

    /// The topology that plans are made for: the nodes of the ranks, below the switches that the settings
    /// describe. With a tuning profile its links have the measured bandwidths and latencies.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.template.topology
    }

    /// The ranks, hosts and switches, and what links the nodes, as tuning profiles identify a cluster.
    #[doc(hidden)]
    #[must_use]
    pub fn cluster(&self) -> &ClusterIdentity {
        &self.template.cluster
    }

    /// What each rail of this rank has carried, in the order of the rails. Empty if it sends nothing over
    /// RDMA devices. May be called from any thread, also during a call.
    #[must_use]
    pub fn rail_statistics(&self) -> Vec<RailStatistics> {
        self.runner.rails.iter().map(RailCounters::statistics).collect()
    }

    /// How the times of calls compare with predictions, and how plans were adapted to links that changed.
    /// `None` if `FLEXRING_ADAPT` is not set or has no effect. May be called from any thread, also during a
    /// call.
    #[must_use]
    pub fn adaptation_statistics(&self) -> Option<AdaptationStatistics> {
        self.runner.adaptation.as_ref().map(adaptation::read)
    }

    /// Uses `plan` for all later calls, whatever the settings say. All ranks must do so between the same two
    /// calls; otherwise the next call fails with `Disagreement`.
    ///
    /// # Errors
    /// `InvalidArgument` if the plan is for another number of ranks.
    #[doc(hidden)]
    pub fn use_plan(&self, plan: &VerifiedPlan) -> Result<()> {
        let _default = DefaultFloatEnvironment::enter();
        self.check_process()?;
        let (planned, world) = (plan.plan().schedule().world(), self.runner.world);
        if planned != world {
            let message = format!("the plan is for {planned} ranks, but there are {world}");
            return Err(Error::invalid_argument(message));
        }
        let _call = self.begin_call()?;
        let ticket = QueueTicket::take(&*self.runner.queue);
        self.runner.wait_turn(&ticket);
        let RunnerState { executor, adaptation, plans_digest, .. } = &mut *self.runner.lock_state();
        let mut plans = self.runner.lock_plans();
        plans.replace(plan, executor);
        *plans_digest = plans.digest();
        // The program has chosen.
        *adaptation = None;
        Ok(())
    }

    /// Waits until all earlier calls are over.
    ///
    /// # Errors
    /// The error that ended the communicator, if it has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.check_process()?;
        let _call = self.begin_call()?;
        let ticket = QueueTicket::take(&*self.runner.queue);
        self.runner.wait_turn(&ticket);
        drop(ticket);
        self.runner.await_kernels();
        self.status().inspect_err(|_| self.runner.error_reported.store(true, Ordering::Relaxed))
    }

    /// Whether the communicator still works. Does not wait.
    ///
    /// # Errors
    /// The error that ended the communicator, if it has failed.
    pub fn status(&self) -> Result<()> {
        self.check_process()?;
        self.runner.notice_kernel_failure();
        self.runner.fault.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Ends the communicator on all ranks. May be called from any thread, and takes effect at once: running
    /// calls return an error on every rank. Has no effect in a forked child.
    pub fn abort(&self) {
        if self.is_in_creator() {
            self.runner.abort(Abort::AtOnce("the communicator was aborted"));
        }
    }

    /// Ends the communicator on all ranks because this process is about to end. `cause` is a verb phrase such
    /// as `raised ValueError: no data (train.py:20)`, which the errors of the other ranks contain after this
    /// rank. Those on this machine get their errors when this process has ended, or 5 s later, so that a
    /// launcher sees which one failed first. Otherwise as [`abort`](Self::abort).
    pub fn abort_on_exit(&self, cause: &str) {
        if self.is_in_creator() {
            let printable = |letter: char| if letter.is_control() { ' ' } else { letter };
            let cause: String = cause.chars().map(printable).take(LONGEST_CAUSE).collect();
            self.runner.abort(Abort::OnExit(&cause));
        }
    }

    /// Whether this process has created the communicator, and is not a forked child.
    #[doc(hidden)]
    pub fn is_in_creator(&self) -> bool {
        self.creator.is_current()
    }

    /// Whether the exit of the process has ended its calls, while other threads may still be in them.
    #[doc(hidden)]
    pub fn is_abandoned(&self) -> bool {
        self.runner.abandoned.load(Ordering::Relaxed)
    }

    /// Checks that this process has created the communicator.
    ///
    /// # Errors
    /// `InvalidArgument` in a forked child.
    #[doc(hidden)]
    pub fn check_process(&self) -> Result<()> {
        self.creator.check("this communicator")
    }

    /// Begins a call of this thread that waits for others of the communicator.
    ///
    /// # Errors
    /// `InvalidArgument` if this thread is in such a call.
    #[inline]
    fn begin_call(&self) -> Result<ThreadCall> {
        ThreadCall::begin(&self.runner.queue)
    }

    /// Checks that this thread is in no call of the communicator, for which it would wait.
    ///
    /// # Errors
    /// `InvalidArgument` if it is in one.
    #[doc(hidden)]
    pub fn check_not_nested(&self) -> Result<()> {
        WaitCheck::check_not_nested(&*self.runner)
    }

    /// Checks arguments of calls of this rank.
    #[doc(hidden)]
    pub fn validator(&self) -> CallValidator<'_> {
        self.runner.validator()
    }

    /// Runs a checked call to its end. The pieces are not used afterwards.
    #[doc(hidden)]
    pub fn run(&self, checked: &CheckedCall) -> Result<()> {
        let _default = DefaultFloatEnvironment::enter();
        self.check_process()?;
        let _call = self.begin_call()?;
        let ticket = QueueTicket::take(&*self.runner.queue);
        self.pass_launch(checked.is_collective());
        self.runner.wait_turn(&ticket);
        let outcome = self.runner.run(checked, ticket.kernels());
        outcome.inspect_err(|_| self.runner.error_reported.store(true, Ordering::Relaxed))
    }

    /// Starts a checked call on the worker. The pieces must stay valid until the outcome is set.
    #[doc(hidden)]
    pub fn submit(&self, checked: CheckedCall) -> Result<Arc<CallOutcome>> {
        self.check_process()?;
        let _call = self.begin_call()?;
        let is_collective = checked.is_collective();
        let outcome = self.enqueue(&self.lock_submissions(), QueuedWork::Call(checked), None)?;
        self.pass_launch(is_collective);
        Ok(outcome)
    }

    /// Counts a call without a kernel, if all ranks make it.
    fn pass_launch(&self, is_collective: bool) {
        if is_collective {
            let _number = self.runner.queue.count_collective();
        }
        if let Some(member) = self.runner.launch_member.as_ref().filter(|_| is_collective) {
            member.pass();
        }
    }

    fn lock_submissions(&self) -> MutexGuard<'_, ()> {
        self.submissions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits work to the worker. `running`: of a call on a GPU.
    fn enqueue(
        &self,
        _submissions: &MutexGuard<'_, ()>,
        work: QueuedWork,
        running: Option<RunningCall>,
    ) -> Result<Arc<CallOutcome>> {
        let check: Weak<dyn WaitCheck> = Arc::downgrade(&self.runner) as _;
        let outcome = Arc::new(CallOutcome::new(check, self.creator));
        reach(FaultPoint::CallQueued);
        let ticket = QueueTicket::take(Arc::clone(&self.runner.queue));
        let queued =
            QueuedCall { ticket: Some(ticket), work: Some(work), running, outcome: Arc::clone(&outcome) };
        // The other ranks wait for the call.
        self.worker.submit(&self.runner, queued).map_err(|error| self.runner.fail(error))?;
        Ok(outcome)
    }

    /// Leaves everything as it is: in a forked child, where its threads do not exist, and its links, its
    /// devices and its shared memory are those of the parent; and where the process exits.
    fn leak(&mut self) {
        std::mem::forget(Arc::clone(&self.runner));
        self.worker.leak();
    }

    /// This rank's part of a vector that consists of one equal part per rank.
    ///
    /// # Errors
    /// `InvalidArgument` if the vector's length is not a multiple of the number of ranks.
    fn part_of<T>(&self, vector: Piece) -> Result<Piece> {
        let (whole, world) = (vector.len(), self.runner.world);
        let bytes = whole / size_of::<T>() / world * size_of::<T>();
        if bytes * world != whole {
            let message = format!("{whole} bytes are not {world} parts of {bytes} bytes");
            return Err(Error::invalid_argument(message));
        }
        Ok(vector.narrow(self.runner.rank * bytes, bytes))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.is_in_creator() || self.is_abandoned() {
            self.leak();
            return;
        }
        reach(FaultPoint::LeaveBegins);
        if std::thread::panicking() && !self.runner.queue.is_idle() {
            // The other ranks may never make the calls that this one waits for.
            self.runner.abort(PANICKED);
        }
        self.runner.leaving.store(true, Ordering::Release);
        self.runner.watch_gpu(|| self.worker.is_idle());
        self.worker.wait_idle();
        reach(FaultPoint::WorkerEnded);
        self.runner.end_gpu();
        if !self.runner.lock_state().executor.needs_control_connection() {
            self.runner.control.begin_leaving();
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator({})", self.runner.summary)
    }
}
