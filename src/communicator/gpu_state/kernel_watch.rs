//! The thread that watches the kernels of collectives, of all communicators of a process.
//!
//! Owns what it looks for: failures that kernels report, waits that last too long, ends that callers wait
//! for, and communicators that have failed, whose kernels it ends. It calls no function of the driver, which
//! may wait for a kernel.

use crate::call::Call;
use crate::communicator::request::CallOutcome;
use crate::device::cuda::collective::{
    CALL_WORDS, CollectiveFailure, CollectiveMemory, CollectiveWait, Waited, tagged,
};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::process::{PerProcess, spawn};
use crate::rank::Rank;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How often the thread looks, and how often while a caller waits for the end of a kernel.
const INTERVALS: [Duration; 2] = [Duration::from_millis(5), Duration::from_micros(50)];
/// How long a kernel waits before the other ranks learn of it.
const UNUSUAL: Duration = Duration::from_millis(20);
/// Launches whose calls are known. A stream holds about as many.
const RECENT: u64 = 1024;
/// How long a kernel may wait for a rank that has left: what that rank sent before arrives sooner.
const DEPARTED: Duration = Duration::from_millis(200);
/// How long the report of a failure to the other ranks may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The communicator of kernels.
pub(in crate::communicator) trait KernelOwner: Send + Sync {
    /// Ends the communicator on all ranks.
    fn fail(&self, error: Error);

    /// A rank that has left, the one that has finished fewest calls.
    fn leaver(&self) -> Option<Rank>;

    /// Reports to the other ranks that a kernel waits in this call, or in none any more.
    fn set_kernel_call(&self, call: Option<Call>);

    /// Has a worker carry the messages of graphs that are launched.
    fn carry_replays(self: Arc<Self>);
}

/// The kernels of one communicator.
pub(in crate::communicator) struct KernelWatch {
    memory: Arc<CollectiveMemory>,
    owner: Weak<dyn KernelOwner>,
    fault: Arc<Fault>,
    rank: Rank,
    /// The ranks of the node; and whether there are others.
    node: Vec<Rank>,
    spans_nodes: bool,
    timeout: Duration,
    /// Whether a worker carries the messages of graphs, or is about to.
    carries: AtomicBool,
    state: Mutex<WatchState>,
    calls: Mutex<RecentCalls>,
}

/// The calls whose kernels were launched last.
#[derive(Default)]
struct RecentCalls {
    /// By number modulo [`RECENT`].
    calls: Vec<Call>,
    /// How many were launched.
    count: u64,
    /// Whether graphs launch kernels too, so that the numbers of kernels are not those of launches.
    are_captured: bool,
}

impl RecentCalls {
    fn add(&mut self, call: Call) {
        let place = (self.count % RECENT) as usize;
        if place < self.calls.len() {
            self.calls[place] = call;
        } else {
            self.calls.push(call);
        }
        self.count += 1;
    }

    /// The call of the kernel with this number, from 1.
    fn get(&self, epoch: u64) -> Option<Call> {
        let is_known = !self.are_captured && epoch <= self.count && epoch + RECENT > self.count;
        self.calls.get((epoch.checked_sub(1)? % RECENT) as usize).copied().filter(|_| is_known)
    }
}

#[derive(Default)]
struct WatchState {
    /// What a kernel waits for, and since when.
    waiting: Option<(CollectiveWait, Instant)>,
    /// Whether the other ranks know it.
    is_reported: bool,
    /// Launches whose ends callers wait for, in their order.
    expected: Vec<(u64, Arc<CallOutcome>)>,
    /// Whether a failure was reported.
    failed: bool,
    /// Whether the log says that kernels use registered memory, and for which rank they did not.
    is_direct: bool,
    unplaced: Option<Rank>,
}

impl KernelWatch {
    pub(super) fn new(
        memory: &Arc<CollectiveMemory>,
        owner: Weak<dyn KernelOwner>,
        fault: &Arc<Fault>,
        (rank, node, spans_nodes): (Rank, &[Rank], bool),
        timeout: Duration,
    ) -> Self {
        let (memory, fault, node) = (Arc::clone(memory), Arc::clone(fault), node.to_vec());
        let (state, calls) = (Mutex::default(), Mutex::default());
        let carries = AtomicBool::new(false);
        Self { memory, owner, fault, rank, node, spans_nodes, timeout, carries, state, calls }
    }

    /// Notes that no worker carries the messages of graphs any more.
    pub(in crate::communicator) fn end_replays(&self) {
        self.carries.store(false, Ordering::Release);
    }

    /// Notes the call of a kernel that is launched now; `None` for one that a graph captures.
    pub(in crate::communicator) fn note(&self, call: Option<Call>) {
        let mut calls = self.lock_calls();
        match call {
            Some(call) => calls.add(call),
            None => calls.are_captured = true,
        }
    }

    /// The last call whose kernel was launched.
    pub(in crate::communicator) fn last_call(&self) -> Option<Call> {
        let calls = self.lock_calls();
        let last = calls.count.checked_sub(1)? % RECENT;
        calls.calls.get(last as usize).copied()
    }

    fn lock_calls(&self) -> MutexGuard<'_, RecentCalls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the outcome when this launch reports its end, or the communicator fails.
    pub(in crate::communicator) fn expect(&self, launch: u64, outcome: Arc<CallOutcome>) {
        self.lock().expected.push((launch, outcome));
        THREAD.get().changed.notify_all();
    }

    /// Ends the communicator at once if a kernel has failed. The thread would notice it a few milliseconds
    /// later.
    pub(in crate::communicator) fn notice_failure(&self) {
        if self.memory.failure().is_none() {
            return;
        }
        self.look();
        // Another thread may be about to report it.
        let begun = Instant::now();
        while self.fault.get().is_none() && begun.elapsed() < REPORT_TIMEOUT {
            std::thread::sleep(INTERVALS[1]);
        }
    }

    /// Looks once. Whether it is urgent to look again: a caller waits for the end of a kernel, or graphs
    /// may be launched whose messages are carried.
    fn look(&self) -> bool {
        let mut state = self.lock();
        if self.fault.get().is_none()
            && !state.failed
            && let Some(error) = self.failure(&mut state)
        {
            state.failed = true;
            drop(state);
            // Tells the other ranks, which may take a while. If the communicator is gone already, no caller
            // asks.
            if let Some(owner) = self.owner.upgrade() {
                owner.fail(error);
            }
            state = self.lock();
        }
        let failed = self.fault.get();
        if failed.is_some() {
            self.memory.abort();
        }
        if !state.is_direct && self.memory.was_direct() {
            state.is_direct = true;
            log::debug!("rank {}: kernels access registered vectors directly", self.rank);
        }
        if let Some(rank) = self.memory.unplaced().filter(|rank| state.unplaced != Some(*rank)) {
            state.unplaced = Some(rank);
            log::debug!(
                "rank {}: a call goes through stages, because rank {rank} has not registered its vectors, or they are not open on \
                 all ranks yet",
                self.rank
            );
        }
        // A worker that waits for a launch finds it itself.
        let may_be_replayed = self.spans_nodes && self.memory.is_captured();
        if may_be_replayed
            && self.memory.started().is_some()
            && !self.carries.swap(true, Ordering::Acquire)
            && let Some(owner) = self.owner.upgrade()
        {
            owner.carry_replays();
        }
        let completed = self.memory.completed();
        state.expected.retain(|(launch, outcome)| {
            let result = match failed {
                _ if *launch <= completed => Ok(()),
                Some(error) => Err(error.clone()),
                None => return true,
            };
            outcome.end(result);
            false
        });
        may_be_replayed || !state.expected.is_empty()
    }

    /// Why the communicator must end, if it must.
    fn failure(&self, state: &mut WatchState) -> Option<Error> {
        match self.memory.failure() {
            None => {}
            Some(CollectiveFailure::Mismatch { rank, epoch, mine, theirs }) => {
                let rank = self.node[rank];
                let number = self.lock_calls().get(epoch).map_or(epoch, |call| call.sequence);
                return Some(Error::disagreement(difference(self.rank, mine, rank, theirs, number)));
            }
            Some(CollectiveFailure::Unexpected { rank, expected, received }) => {
                return Some(Error::disagreement(unexpected(self.rank, rank, expected, received)));
            }
            Some(CollectiveFailure::Overlap) => {
                return Some(Error::invalid_argument(
                    "two calls of this communicator ran on the GPU at the same time, in two streams or graphs: order them by events",
                ));
            }
            Some(CollectiveFailure::Ended) => {
                return Some(Error::aborted("a kernel found that the communicator had failed before"));
            }
        }
        let Some(wait) = self.memory.waiting() else {
            state.waiting = None;
            if std::mem::take(&mut state.is_reported)
                && let Some(owner) = self.owner.upgrade()
            {
                owner.set_kernel_call(None);
            }
            return None;
        };
        let since = match state.waiting {
            Some((before, since)) if before == wait => since,
            _ => state.waiting.insert((wait, Instant::now())).1,
        };
        let CollectiveWait { epoch, rank, waited: act, .. } = wait;
        let enters = act == Waited::Entry;
        let rank = if enters { self.node[rank] } else { rank };
        let me = self.rank;
        // Only the two ranks know of it.
        let missing = match act {
            Waited::Receive => Some(format!("receive what rank {me} sends to it on a GPU")),
            Waited::Send => Some(format!("send what rank {me} receives from it on a GPU")),
            Waited::Entry | Waited::Data => None,
        };
        let is_near = enters || missing.is_some() && self.node.contains(&rank);
        // Threads that carry messages between nodes know better what such a wait is for.
        let timeout = if self.spans_nodes && !is_near { 2 * self.timeout } else { self.timeout };
        let waited = since.elapsed();
        // Another rank may be in a call that its host runs, and wait there for this one.
        if waited > UNUSUAL
            && missing.is_none()
            && let (Some(call), Some(owner)) = (self.lock_calls().get(epoch), self.owner.upgrade())
        {
            state.is_reported = true;
            owner.set_kernel_call(Some(call));
        }
        // A transport notices the end of its own link.
        if waited > DEPARTED
            && (is_near || !self.spans_nodes)
            && let Some(owner) = self.owner.upgrade()
            && owner.leaver() == Some(rank)
        {
            let message = match missing {
                Some(missing) => format!("rank {rank} left, and did not {missing}"),
                None => {
                    format!(
                        "rank {rank} left before it made call #{epoch} on a GPU, in which rank {me} waits for it"
                    )
                }
            };
            return Some(Error::peer_lost(message).with_suspect(rank));
        }
        (waited > timeout).then(|| {
            let message = match missing {
                Some(missing) => format!("rank {rank} did not {missing} within {timeout:?}, or its GPU is busy"),
                None => format!(
                    "call #{epoch} on a GPU: rank {rank} did not make the same call within {timeout:?}, or its GPU is busy"
                ),
            };
            Error::timeout(message).with_suspect(rank)
        })
    }

    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How two ranks' calls differ, as far as their words say. `number`: that of the call among those that
/// kernels run.
pub(in crate::communicator) fn difference(
    me: Rank,
    mine: [u64; CALL_WORDS],
    them: Rank,
    theirs: [u64; CALL_WORDS],
    number: u64,
) -> String {
    let call = |[kinds, count, program, _]: [u64; CALL_WORDS]| {
        Call::from_words([number, kinds, count, program, 1f64.to_bits()])
    };
    match (call(mine), call(theirs)) {
        (Some(mine), Some(theirs)) if mine == theirs => {
            format!("ranks {me} and {them} replay different graphs, both with {mine}")
        }
        (Some(mine), Some(theirs)) => mine.difference(me, &theirs, them),
        _ => format!("ranks {me} and {them} are in different calls: do they run the same build of flexring?"),
    }
}

/// How a message from `them` differs from what this rank expects: the tags of both, and where they are among
/// the collectives.
fn unexpected(me: Rank, them: Rank, expected: [u64; 2], received: [u64; 2]) -> String {
    let vector = |tag| tagged(tag).map(|(dtype, count)| format!("{count} x {}", dtype.name()));
    match (vector(received[0]), vector(expected[0])) {
        (Some(sent), Some(wanted)) if expected[0] != received[0] => {
            format!("rank {them} sends {sent} to rank {me}, which expects {wanted}")
        }
        (Some(_), Some(_)) => format!(
            "rank {them} sent a message to rank {me} before or after a collective that is not between the receive and that: do all \
             ranks make the same calls?"
        ),
        _ => format!(
            "rank {them} sent something else than a message to rank {me}: do they run the same build of flexring?"
        ),
    }
}

/// What the thread watches.
#[derive(Default)]
struct WatchThread {
    watches: Mutex<Watches>,
    changed: Condvar,
}

#[derive(Default)]
struct Watches {
    all: Vec<Arc<KernelWatch>>,
    /// Whether the thread runs. It ends when it has nothing to watch.
    runs: bool,
}

static THREAD: PerProcess<WatchThread> = PerProcess::new();

/// Watches these kernels from now on.
///
/// # Errors
/// `System` if the process can start no thread.
pub(super) fn add(watch: &Arc<KernelWatch>) -> Result<()> {
    let thread = THREAD.get();
    let mut watches = thread.lock();
    if !watches.runs {
        let builder = Builder::new().name("flexring-gpu".to_owned());
        spawn(builder, || THREAD.get().run())
            .map_err(|cause| Error::system(format!("the thread that watches the GPU: {cause}")))?;
        watches.runs = true;
    }
    watches.all.push(Arc::clone(watch));
    thread.changed.notify_all();
    Ok(())
}

/// Watches these kernels no more. Callers that wait for one get its outcome.
pub(super) fn remove(watch: &Arc<KernelWatch>) {
    let mut watches = THREAD.get().lock();
    watches.all.retain(|other| !Arc::ptr_eq(other, watch));
    drop(watches);
    watch.look();
}

impl WatchThread {
    fn lock(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut watches = self.lock();
        loop {
            let mut busy = false;
            // Under the lock, so that the last owner of a communicator is not this thread.
            for watch in &watches.all {
                busy |= watch.look();
            }
            CollectiveMemory::log_late_replays();
            if watches.all.is_empty() && !CollectiveMemory::any_may_be_replayed() {
                watches.runs = false;
                return;
            }
            let interval = INTERVALS[usize::from(busy)];
            let waited = self.changed.wait_timeout(watches, interval);
            watches = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
