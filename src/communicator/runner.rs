//! Runs the calls of one rank, one at a time.
//!
//! Owns the executor, the plans, scratch memory, and what happens on this rank when a call fails.

use super::adaptation::{self, LinkAdaptation, SharedStatistics};
use super::block_lists::BlockLists;
use super::call_queue::{CallQueue, QueueTicket};
use super::checked_call::{CallValidator, CheckedCall};
use super::control_plane::ControlPlane;
use super::gpu_state::{self, GpuState, KernelOffer, RelayedCall, most_ctas};
use super::launch_group::LaunchMember;
use super::plans::{Installed, Plans};
use super::registration_gate::RunningCall;
use super::request::CallOutcome;
use super::shared_call::SharedCall;
use super::user_memory::UserMemory;
use crate::bootstrap::Abort;
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::executor::{BoundCall, BoundGroup, CallPath, Executor};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{Buffer, Piece};
use crate::plan::small_layout::SmallLayout;
use crate::rank::Rank;
use crate::transport::shm::Region;
use crate::transport::verbs::RailCounters;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Runs calls. Shared by the threads that make blocking calls and the worker that runs asynchronous ones.
pub(super) struct CallRunner {
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// Longest vector, in bytes, that goes through mailboxes.
    pub mailbox_limit: usize,
    /// Whether there are mailboxes: all ranks share memory, and there is more than one.
    pub has_mailboxes: bool,
    /// The ranks that share memory, this one included.
    pub node: Vec<Rank>,
    /// How long a wait for a stream spins before it sleeps.
    pub spin: Duration,
    /// How long a rank waits for others to make the same call.
    pub timeout: Duration,
    pub user_memory: UserMemory,
    pub block_lists: BlockLists,
    pub gpu_state: GpuState,
    /// The most CTAs of kernels. Equal on all ranks; set before the first call.
    pub kernel_ctas: AtomicU32,
    /// The ranks whose kernels reach each other's GPU memory, this one included: those of its node, or it
    /// alone. Set before the first call.
    pub kernel_node: OnceLock<Vec<Rank>>,
    /// This rank among those of its process, if there are others.
    pub launch_member: Option<LaunchMember>,
    /// Whether the communicator is being dropped.
    pub leaving: AtomicBool,
    /// Whether the process exits without waiting for its calls.
    pub abandoned: AtomicBool,
    pub state: Mutex<RunnerState>,
    /// Locked for short, also by callers while a call runs; after `state` where both are.
    pub plans: Mutex<Plans>,
    pub queue: Arc<CallQueue>,
    /// Gives work to the worker. Set with the communicator.
    pub submit: OnceLock<Submit>,
    pub fault: Arc<Fault>,
    /// What each rail carries. Empty without RDMA.
    pub rails: Arc<[RailCounters]>,
    /// Number of ranks of this node for each of its cores, rounded up. Equal on all of them.
    pub ranks_per_core: usize,
    /// Whether a caller on this rank has received the error that ended the communicator.
    pub error_reported: AtomicBool,
    pub control: ControlPlane,
    /// Links, schedule and other choices, in one sentence.
    pub summary: String,
    /// What adapts the plans to the links, if the settings ask for it.
    pub adaptation: Option<SharedStatistics>,
    /// This rank's part of the process's memory. The last field: neighbours' regions are read until all
    /// others are dropped.
    pub region: Mutex<Option<Region>>,
}

/// What only the running call uses.
pub(super) struct RunnerState {
    pub executor: Executor,
    /// Intermediate results outside the caller's memory; as long as the call that needed most so far.
    pub scratch: Option<Buffer<u8>>,
    /// Adapts the plans to the links, if the settings ask for it. Equal on all ranks.
    pub adaptation: Option<Box<LinkAdaptation>>,
    /// Sequence number of the last collective, from 1.
    pub sequence: u64,
    /// Collectives among them that kernels run.
    pub kernels: u64,
    /// A copy of [`Plans::digest`], so that small calls need not lock the plans. Set wherever plans are
    /// replaced.
    pub plans_digest: u64,
    /// Whether the next call panics.
    #[cfg(test)]
    pub panics: bool,
}

impl RunnerState {
    /// Counts a call behind this number of collectives that kernels run.
    pub(super) fn count_call(&mut self, kernels: u64, is_collective: bool) {
        // Two threads may take their tickets at once.
        let kernels = kernels.max(self.kernels);
        self.sequence += kernels - self.kernels + u64::from(is_collective);
        self.kernels = kernels;
    }
}

/// Gives work to the worker of a communicator, as long as there is one.
pub(super) type Submit = Box<dyn Fn(&Arc<CallRunner>, QueuedCall) -> Result<()> + Send + Sync>;

/// What waits for the worker.
pub(super) enum QueuedWork {
    /// A call on host memory.
    Call(CheckedCall),
    /// Messages of calls that kernels run.
    Relayed(RelayedCall),
}

/// A call that waits for the worker.
pub(super) struct QueuedCall {
    /// Its turn; `None` for messages of graphs, which are carried whenever they are launched.
    pub ticket: Option<QueueTicket>,
    /// Taken by the worker.
    pub work: Option<QueuedWork>,
    /// Keeps GPU memory from being registered until the call is over.
    pub running: Option<RunningCall>,
    pub outcome: Arc<CallOutcome>,
}

impl Drop for QueuedCall {
    fn drop(&mut self) {
        // Has no effect after a regular end. Otherwise it releases the thread that waits for the call.
        self.outcome.end(Err(Error::internal("the worker thread ended before the call did")));
    }
}

impl CallRunner {
    /// Notes what the ranks say of their kernels. To be called before the first call.
    pub(super) fn agree_on_kernels(&self, offers: &[Option<KernelOffer>]) {
        self.kernel_ctas.store(most_ctas(offers), Ordering::Relaxed);
        let reaches_node = |rank: &Rank| offers[*rank].as_ref().is_some_and(|offer| offer.reaches_node);
        let is_node = self.node.iter().all(reaches_node);
        let _ = self.kernel_node.set(if is_node { self.node.clone() } else { vec![self.rank] });
    }

    /// Runs a queued call, on a worker.
    pub(super) fn run_queued(&self, mut queued: QueuedCall) {
        reach(FaultPoint::WorkerTakesCall);
        let ticket = queued.ticket.as_ref();
        ticket.inspect(|ticket| ticket.wait_turn(None));
        let Some(work) = queued.work.take() else { return };
        let on_gpu = !matches!(work, QueuedWork::Call(_));
        let kernels = ticket.map_or(0, QueueTicket::kernels);
        let outcome = self.guarded(|| self.run_in_turn(work, kernels));
        // The caller of a call in a stream does not get this outcome, so the next call reports it.
        self.error_reported.fetch_or(outcome.is_err() && !on_gpu, Ordering::Relaxed);
        drop(queued.running.take());
        queued.outcome.end(outcome);
    }

    /// Does what is queued, whose turn it is, behind this number of collectives that kernels run.
    fn run_in_turn(&self, work: QueuedWork, kernels: u64) -> Result<()> {
        match work {
            QueuedWork::Call(call) => self.run(&call, kernels),
            QueuedWork::Relayed(relayed) => self.run_relayed(relayed, kernels),
        }
    }

    /// Runs a call whose turn it is, behind this number of collectives that kernels run.
    pub(super) fn run(&self, checked: &CheckedCall, kernels: u64) -> Result<()> {
        // The kernels of later calls may wait in streams already, and of other communicators run: a driver
        // call could wait for them while they wait for this thread.
        let _no_driver = gpu_state::forbid_calls();
        let mut state = self.lock_state();
        self.check_usable()?;
        reach(FaultPoint::CallBegins);
        state.count_call(kernels, checked.is_collective());
        // Dropped after `shared`, so that a deregistration that waits for this call comes after the results
        // are in place.
        let in_use =
            self.user_memory.begin_call(checked.pieces(), self.timeout).map_err(|error| self.fail(error))?;
        let shared = if in_use.is_none() || self.uses_mailboxes(checked) {
            None
        } else {
            SharedCall::new(checked, |piece| self.user_memory.shared_vector(piece))
        };
        let checked = shared.as_ref().map_or(checked, SharedCall::call);
        // Failures are reported before `leave_call`, so that the report to the other ranks names the call.
        let outcome = self.guarded(|| self.attempt(checked, &mut state));
        reach(FaultPoint::CallEnds);
        self.control.leave_call();
        if outcome.is_err() {
            // The program may end without dropping the communicator.
            state.executor.write_trace();
        }
        outcome
    }

    /// Runs `body`. A panic in it ends the communicator on all ranks, because it would leave them waiting for
    /// this one.
    fn guarded(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        let outcome = catch_unwind(AssertUnwindSafe(body));
        outcome.unwrap_or_else(|panic| {
            Err(self.fail(Error::panicked(&*panic).context(format_args!("rank {}", self.rank))))
        })
    }

    /// Checks arguments of calls of this rank.
    pub(super) fn validator(&self) -> CallValidator<'_> {
        CallValidator { rank: self.rank, world: self.world, block_lists: &self.block_lists }
    }

    /// Ends the communicator on all ranks.
    pub(super) fn abort(&self, abort: Abort<'_>) {
        self.control.abort(&self.fault, self.rank, abort);
    }

    /// Locks the state. After a panic the executor has given up its links and refuses to run, so a poisoned
    /// lock is safe to use.
    pub(super) fn lock_state(&self) -> MutexGuard<'_, RunnerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the plans. A panic leaves them as they were, or without some programs.
    pub(super) fn lock_plans(&self) -> MutexGuard<'_, Plans> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses calls on a communicator that has failed. The first caller gets the original error, later
    /// callers get `Aborted` with its message.
    #[inline]
    pub(super) fn check_usable(&self) -> Result<()> {
        let Some(error) = self.fault.get() else { return Ok(()) };
        if !self.error_reported.swap(true, Ordering::Relaxed) {
            return Err(error.clone());
        }
        let message = format!("this communicator has failed before: {}", error.message());
        Err(Error::aborted(message))
    }

    /// Ends the communicator on all ranks, unless it has already failed, and returns the error that ended it.
    pub(super) fn fail(&self, failure: Error) -> Error {
        reach(FaultPoint::CallFails);
        if self.fault.get().is_none() && failure.kind() == ErrorKind::Aborted {
            // There is no other cause to wait for.
            self.abort(Abort::AtOnce(failure.message()));
        }
        let error = match self.fault.get() {
            Some(error) => error.clone(),
            None => self.fault.raise(self.control.report_failure(failure)),
        };
        if error.kind() == ErrorKind::PeerLost {
            self.user_memory.retire();
        }
        error
    }

    /// Runs a call. A failure ends the communicator on all ranks, before this rank's links are aborted.
    fn attempt(&self, checked: &CheckedCall, state: &mut RunnerState) -> Result<()> {
        #[cfg(test)]
        assert!(!state.panics, "a test wants a panic");
        let Some(mut adaptation) = state.adaptation.take_if(|_| adaptation::counts(checked)) else {
            return self.execute(checked, state);
        };
        if adaptation.is_due() {
            self.adapt(&mut adaptation, state)?;
        }
        let begun = Instant::now();
        self.execute(checked, state)?;
        adaptation.record(checked.whole_bytes(), begun.elapsed());
        state.adaptation = Some(adaptation);
        Ok(())
    }

    /// Makes other plans if links have changed. This comes before a call that already has its number, so the
    /// calls that it takes are numbered first.
    fn adapt(&self, adaptation: &mut LinkAdaptation, state: &mut RunnerState) -> Result<()> {
        state.sequence -= 1;
        let change = adaptation.adapt(self.validator(), &mut |checked| {
            state.sequence += u64::from(checked.is_collective());
            let outcome = self.execute(checked, state);
            self.control.leave_call();
            outcome
        });
        state.sequence += 1;
        let Some(change) = change? else { return Ok(()) };
        let RunnerState { executor, sequence, plans_digest, .. } = state;
        let mut plans = self.lock_plans();
        // An error would be the same on all ranks, and the plans that there are work.
        let next = match plans.for_links(adaptation.config(), adaptation.changed_topology().as_ref()) {
            Ok(next) => next,
            Err(error) => {
                log::warn!("cannot plan for links that have changed: {}", error.message());
                return Ok(());
            }
        };
        if let Err(failure) = plans.adopt(next, executor) {
            drop(plans);
            return Err(self.fail(failure));
        }
        *plans_digest = plans.digest();
        adaptation.note_plan(plans.algorithm(), |first| plans.traffic(first), Some(*sequence));
        if self.rank == 0 {
            let changed = adaptation.describe(&change);
            log::warn!("{changed}: {} is used from call {sequence} on", plans.algorithm());
        }
        Ok(())
    }

    /// Runs a call, and nothing else.
    fn execute(&self, checked: &CheckedCall, state: &mut RunnerState) -> Result<()> {
        // Every error ends the communicator, or else the other ranks wait for this one.
        let fail = |failure| self.fail(failure);
        if let Some(messages) = &checked.messages {
            // Groups come before the next collective, and are not counted.
            let call = Self::call(checked, state.sequence + 1, 0);
            self.enter(&call).map_err(fail)?;
            return state.executor.run_group(&BoundGroup { call, messages: Arc::clone(messages) }, &fail);
        }
        let (path, digest, scratch_bytes) = self.path(checked, state).map_err(fail)?;
        let call = Self::call(checked, state.sequence, digest);
        self.enter(&call).map_err(fail)?;
        let bound = BoundCall {
            call,
            input: checked.input,
            output: checked.output,
            scratch: self.scratch(scratch_bytes, state).map_err(fail)?,
            in_place: checked.in_place,
            arithmetic: checked.arithmetic(),
            average: checked.averages(),
            prescale: checked.prescales(),
            blocks: checked.blocks.clone(),
        };
        state.executor.run(&bound, &path, &fail)
    }

    /// The call with this number, as ranks announce it to each other.
    pub(super) fn call(checked: &CheckedCall, sequence: u64, program: u64) -> Call {
        Call {
            sequence,
            collective: checked.collective,
            dtype: checked.dtype,
            op: checked.op.code(),
            root: checked.root as u32,
            count: checked.count,
            program,
            on_gpu: checked.on_gpu,
            factor: checked.op.factor(),
        }
    }

    /// Notes the call where heartbeats read it. Threads of one process compare calls here.
    pub(super) fn enter(&self, call: &Call) -> Result<()> {
        log::trace!("rank {}: {call}", self.rank);
        self.control.enter_call(call)?;
        reach(FaultPoint::CallEntered);
        Ok(())
    }

    /// Whether a call goes through mailboxes.
    pub(super) fn uses_mailboxes(&self, checked: &CheckedCall) -> bool {
        self.has_mailboxes
            && SmallLayout::exists_for(checked.collective)
            && checked.whole_bytes() <= self.mailbox_limit
    }

    /// How the call is executed, the digest by which ranks check that they execute it alike, and the bytes of
    /// scratch memory for it.
    fn path(&self, checked: &CheckedCall, state: &mut RunnerState) -> Result<(CallPath, u64, usize)> {
        if self.uses_mailboxes(checked) {
            return Ok((CallPath::Small, state.plans_digest, 0));
        }
        let Installed { number, digest, facts, scratch_bytes } =
            self.lock_plans().program(checked, &mut state.executor)?;
        Ok((CallPath::Program { number, facts }, digest, scratch_bytes))
    }

    /// Scratch memory of this many bytes.
    fn scratch(&self, bytes: usize, state: &mut RunnerState) -> Result<Piece> {
        if bytes == 0 {
            return Ok(Piece::EMPTY);
        }
        if state.scratch.as_ref().is_none_or(|scratch| scratch.len() < bytes) {
            state.scratch = None;
            state.scratch = Some(self.user_memory.alloc(bytes)?);
        }
        Ok(state.scratch.as_ref().map_or(Piece::EMPTY, |scratch| scratch.piece().narrow(0, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Algorithm, Config, Lowering};
    use crate::{Communicator, ErrorKind, ReduceOp, Result};
    use std::time::{Duration, Instant};

    /// Bytes of scratch memory of a rank after a reduce-scatter of four ranks with `lowering`, of `count`
    /// elements of 4 bytes.
    fn scratch_after_reduce_scatter(lowering: Lowering, count: usize) -> usize {
        let (timeout, algo) = (Duration::from_secs(60), Algorithm::Ring);
        let config = Config { timeout, algo, lowering, ..Config::default() };
        let ranks = Communicator::local_with(&config, 4).expect("four ranks");
        let lengths: Vec<usize> = std::thread::scope(|scope| {
            let run = |comm: &Communicator| {
                let (send, mut receive) = (vec![1u32; count], vec![0u32; count / 4]);
                comm.reduce_scatter(&send, &mut receive, ReduceOp::Sum).expect("parts");
                assert!(receive.iter().all(|sum| *sum == 4));
                comm.runner.lock_state().scratch.as_ref().map_or(0, |scratch| scratch.len())
            };
            let threads: Vec<_> = ranks.iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
        });
        assert!(lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
        lengths[0]
    }

    #[test]
    fn a_reduce_scatter_keeps_the_partial_sums_that_it_passes_on_only() {
        assert_eq!(scratch_after_reduce_scatter(Lowering::Direct, 1 << 20), 0);
        assert_eq!(scratch_after_reduce_scatter(Lowering::Chain, 1 << 20), 2 << 20);
    }

    #[test]
    fn the_scratch_memory_of_a_reduce_scatter_does_not_grow_with_the_vector() {
        // A rank in the middle of two chains, each hop 8 sub-chunks of each shard before the next.
        let ring = (2 * 8 + 1) * (128 << 10);
        for count in [8 << 20, 16 << 20] {
            assert_eq!(scratch_after_reduce_scatter(Lowering::Chain, count), 2 * ring);
        }
    }

    fn two_ranks() -> [Communicator; 2] {
        let config = Config { timeout: Duration::from_secs(10), ..Config::default() };
        let ranks = Communicator::local_with(&config, 2).expect("two ranks");
        ranks.try_into().expect("two ranks")
    }

    fn names_the_panic<T>(outcome: Result<T>, kinds: &[ErrorKind]) {
        let error = outcome.map(drop).expect_err("a rank panicked");
        assert!(kinds.contains(&error.kind()), "{error}");
        assert!(error.message().contains("rank 0: flexring panicked"), "{error}");
        assert!(error.message().ends_with("a test wants a panic"), "{error}");
    }

    #[test]
    fn a_panic_of_the_program_waits_for_no_other_rank() {
        let config = Config { timeout: Duration::from_secs(120), ..Config::default() };
        let begun = Instant::now();
        for keeps_request in [true, false] {
            let mut ranks = Communicator::local_with(&config, 2).expect("two ranks");
            let (second, first) = (ranks.pop().expect("a rank"), ranks.pop().expect("a rank"));
            let program = std::thread::spawn(move || {
                let request = first.all_reduce_async(vec![1f32; 1000], ReduceOp::Sum).expect("a request");
                let _kept = if keeps_request {
                    Some(request)
                } else {
                    std::mem::forget(request);
                    None
                };
                panic!("on purpose");
            });
            assert!(program.join().is_err());
            let error = second.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).expect_err("rank 0 panicked");
            assert_eq!(error.kind(), ErrorKind::Aborted);
            assert!(error.message().contains("rank 0: its program panicked during a call"), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_panic_on_the_worker_fails_all_ranks_and_the_queued_calls() {
        let [first, second] = two_ranks();
        first.runner.lock_state().panics = true;
        let queued =
            [0; 3].map(|_| first.all_reduce_async(vec![1f32; 1000], ReduceOp::Sum).expect("a request"));
        names_the_panic(second.all_reduce(&mut [1f32; 1000], ReduceOp::Sum), &[ErrorKind::Internal]);
        for request in queued {
            names_the_panic(request.wait(), &[ErrorKind::Internal, ErrorKind::Aborted]);
        }
        names_the_panic(first.all_reduce(&mut [1f32], ReduceOp::Sum), &[ErrorKind::Aborted]);
        names_the_panic(first.synchronize(), &[ErrorKind::Internal]);
    }

    #[test]
    fn a_panic_in_a_blocking_call_is_an_error_on_all_ranks() {
        let [first, second] = two_ranks();
        first.runner.lock_state().panics = true;
        names_the_panic(first.all_reduce(&mut [1f32; 1000], ReduceOp::Sum), &[ErrorKind::Internal]);
        names_the_panic(second.all_reduce(&mut [1f32; 1000], ReduceOp::Sum), &[ErrorKind::Internal]);
    }
}
