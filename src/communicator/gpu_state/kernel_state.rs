//! What a communicator keeps for kernels on its GPU: memory of calls, lists, captured calls.
//!
//! Owns how it waits for kernels when it ends. Must not know which calls kernels run.

use super::kernel_watch::{self, KernelOwner, KernelWatch};
use super::recent_lists::RecentLists;
use super::registered_memory::OfferedMemory;
use crate::call::{BlockCounts, Call};
use crate::communicator::checked_wait::CHECK_INTERVAL;
use crate::communicator::plans::ListKey;
use crate::device::cuda::Launcher;
use crate::device::cuda::collective::{
    CollectiveMemory, ListMemory, ListedProgram, TransferTable, VectorTransfer,
};
use crate::device::cuda::naps::nap_until;
use crate::device::relay_link::RelayedMessages;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{NeighbourSlots, Piece, Registrar};
use crate::plan::device_program::DeviceProgram;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the end of a communicator waits for a stream that does not reach a kernel.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a kernel that was aborted may take to leave.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Lists of items that a communicator has at a time.
const MOST_LISTS: usize = 64;

/// What a communicator has for collectives that kernels run.
pub(in crate::communicator) struct KernelState {
    pub(in crate::communicator) memory: Arc<CollectiveMemory>,
    /// What users have registered, if the ranks' kernels can access it.
    pub(in crate::communicator) registered: Option<OfferedMemory>,
    /// Set once the memory of all ranks is connected.
    watch: OnceLock<Arc<KernelWatch>>,
    /// Captured calls, counted alike on all ranks.
    captures: AtomicU64,
    /// When a failure was noticed by a rank that ends a registration.
    failed: OnceLock<Instant>,
    /// What kernels run in calls that follow a plan.
    lists: Mutex<Lists>,
    /// By launch, captured calls whose messages are carried in each replay.
    captured: Mutex<BTreeMap<u64, CarriedCall>>,
    /// With the devices that carry messages between nodes, if they need that.
    registrar: Option<Arc<dyn Registrar>>,
}

/// A call whose kernel exchanges messages with ranks of other nodes.
#[derive(Clone)]
pub(in crate::communicator) struct CarriedCall {
    /// As ranks announce it, but for its sequence number.
    pub call: Call,
    /// The lengths of the blocks of an all-to-all.
    pub blocks: Option<BlockCounts>,
    pub messages: Arc<[RelayedMessages]>,
    /// Whether a graph launches it.
    pub is_captured: bool,
}

/// What a worker carries in a turn.
pub(in crate::communicator) enum RelayedCall {
    /// The messages of the call with this launch, and before those of graphs that are launched.
    Launched(u64, CarriedCall),
    /// The messages of graphs that are launched.
    Replayed,
}

struct Lists {
    recent: RecentLists<ListKey, ListedProgram>,
    memory: ListMemory,
}

impl Default for Lists {
    fn default() -> Self {
        Self { recent: RecentLists::new(MOST_LISTS), memory: ListMemory::default() }
    }
}

impl KernelState {
    pub(super) fn new(
        memory: Arc<CollectiveMemory>,
        registered: Option<OfferedMemory>,
        registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        Self {
            memory,
            registered,
            watch: OnceLock::new(),
            captures: AtomicU64::new(0),
            failed: OnceLock::new(),
            lists: Mutex::default(),
            captured: Mutex::default(),
            registrar,
        }
    }

    /// What watches the kernels, once the memory of all ranks is connected.
    pub(in crate::communicator) fn watch(&self) -> Option<&Arc<KernelWatch>> {
        self.watch.get()
    }

    /// Connects the memory of the ranks that reach each other's, `node`: by their places there, that of the
    /// others as this process has it open. `neighbours`: where messages to and from other ranks of the node
    /// are. Kernels are watched from now on.
    ///
    /// # Errors
    /// `System` if the GPU fails, or the process can start no thread.
    pub(in crate::communicator) fn connect(
        &self,
        peers: &[Option<Piece>],
        neighbours: Vec<NeighbourSlots>,
        owner: Weak<dyn KernelOwner>,
        fault: &Arc<Fault>,
        (rank, node, world): (Rank, &[Rank], usize),
        timeout: Duration,
    ) -> Result<()> {
        let own = node.iter().position(|neighbour| *neighbour == rank);
        let own = own.ok_or_else(|| Error::internal("a rank is not on its node"))?;
        self.memory.connect(node, own, world, peers, neighbours)?;
        let identity = (rank, node, node.len() < world);
        let watch = KernelWatch::new(&self.memory, owner, fault, identity, timeout);
        let watch = self.watch.get_or_init(|| Arc::new(watch));
        kernel_watch::add(watch)
    }

    /// The list of a call, which is launched before another thread can ask for one. The first call of its
    /// kind and length has it made; messages to and from ranks that are elsewhere are relayed. If there are
    /// many, the one that was used least recently is made again when it is needed. `wait` is called as long
    /// as kernels run all of them.
    ///
    /// # Errors
    /// Those of `wait` and `make`; `System` if the GPU has too little memory.
    pub(in crate::communicator) fn list(
        &self,
        key: ListKey,
        element: usize,
        is_elsewhere: impl Fn(Rank) -> bool,
        is_captured: bool,
        mut wait: impl FnMut() -> Result<()>,
        make: impl FnOnce() -> Result<DeviceProgram>,
    ) -> Result<Arc<ListedProgram>> {
        let Lists { recent, memory } = &mut *self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let launch = self.memory.following_launch();
        if let Some(found) = recent.take(&key, launch, is_captured) {
            return Ok(found);
        }
        while recent.is_full() && !recent.drop_one(self.memory.completed(), |list| memory.take_back(list)) {
            wait()?;
        }
        let registrar = self.registrar.as_ref();
        recent.insert(key, self.memory.list(&make()?, element, memory, is_elsewhere, registrar)?);
        recent.take(&key, launch, is_captured).ok_or_else(|| Error::internal("a list was not kept"))
    }

    /// Writes the transfers of a call that is about to be launched where its kernel finds them. Returns also
    /// the messages to and from ranks that are elsewhere. `wait` is called as long as too many kernels have
    /// not ended.
    ///
    /// # Errors
    /// Those of `wait`; `System` if the GPU has too little memory.
    pub(in crate::communicator) fn transfers(
        &self,
        transfers: &[VectorTransfer],
        world: (usize, impl Fn(Rank) -> bool),
        is_captured: bool,
        wait: impl FnMut() -> Result<()>,
    ) -> Result<(TransferTable, Arc<[RelayedMessages]>)> {
        self.memory.transfers(transfers, world, self.registrar.as_ref(), is_captured, wait)
    }

    /// Has the messages of a captured call carried in each replay.
    pub(in crate::communicator) fn keep_captured(&self, launch: u64, call: CarriedCall) {
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.memory.is_captured() {
            captured.clear();
        }
        captured.insert(launch, call);
    }

    /// The captured call with this launch.
    pub(in crate::communicator) fn captured(&self, launch: u64) -> Option<CarriedCall> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner).get(&launch).cloned()
    }

    /// Never frees what a kernel accesses, because one has not ended.
    pub(super) fn leak(&self) {
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut *lists));
        std::mem::forget(Arc::clone(&self.memory));
    }

    /// The number of a captured call, which is the same on all ranks.
    pub(in crate::communicator) fn next_capture(&self) -> u64 {
        self.captures.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Ends the use of `piece`, which was registered, by kernels. Those that were launched or replayed before
    /// end first.
    ///
    /// # Errors
    /// `Timeout` if they do not within `limit`: then it stays registered.
    pub(in crate::communicator) fn forget(
        &self,
        piece: Piece,
        launcher: &Launcher,
        fault: &Fault,
        limit: Duration,
    ) -> Result<()> {
        let Some(registered) = &self.registered else { return Ok(()) };
        let begun = Instant::now();
        registered.forget(piece, &|| {
            let mut has_ended = false;
            nap_until(|| {
                has_ended = launcher.has_ended().unwrap_or(true) && !self.memory.is_running();
                if fault.get().is_none() {
                    return has_ended || begun.elapsed() > limit;
                }
                // Kernels leave soon after a failure; those of other ranks may do so later.
                self.failed.get_or_init(Instant::now).elapsed() > ABORT_TIMEOUT
            });
            has_ended
        })
    }

    /// Waits until all kernels that were launched have ended, or the communicator has failed. `check` is
    /// called meanwhile.
    pub(in crate::communicator) fn await_kernels(
        &self,
        launcher: &Launcher,
        fault: &Fault,
        check: impl Fn(),
    ) {
        if self.watch.get().is_some() {
            let mut checked = Instant::now();
            nap_until(|| {
                let is_over = fault.get().is_some() || launcher.has_ended().unwrap_or(true);
                if !is_over && checked.elapsed() >= CHECK_INTERVAL {
                    check();
                    checked = Instant::now();
                }
                is_over
            });
        }
    }

    /// Waits until the kernels that were launched have ended, and closes the memory. `false` if one may still
    /// run: then no memory that it names is freed.
    pub(super) fn end(&self, launcher: &Launcher, fault: &Fault) -> bool {
        let ended = self.await_end(launcher, fault);
        if ended {
            self.await_receivers(fault);
        }
        if let Some(watch) = self.watch.get() {
            kernel_watch::remove(watch);
        }
        let ended = self.memory.close() && ended;
        if ended {
            self.memory.unlock();
            self.registered.iter().for_each(OfferedMemory::close);
        }
        ended
    }

    /// Waits until the ranks of the node have received what kernels have sent to them, or the communicator
    /// has failed, for a while.
    fn await_receivers(&self, fault: &Fault) {
        let begun = Instant::now();
        nap_until(|| {
            let is_over = fault.get().is_some() || self.memory.are_transfers_used().unwrap_or(true);
            is_over || begun.elapsed() > LEAVE_TIMEOUT
        });
    }

    fn await_end(&self, launcher: &Launcher, fault: &Fault) -> bool {
        let begun = Instant::now();
        let mut aborted = None;
        let mut ended = true;
        nap_until(|| {
            // Nothing runs in a broken context.
            if launcher.has_ended().unwrap_or(true) {
                return true;
            }
            if begun.elapsed() > LEAVE_TIMEOUT && self.memory.waiting().is_none() && fault.get().is_none() {
                fault.raise(Error::aborted(format!(
                    "the communicator was dropped, and {LEAVE_TIMEOUT:?} later the stream has not reached its last call: \
                     synchronize the stream first"
                )));
            }
            if fault.get().is_some() {
                self.memory.abort();
                if aborted.get_or_insert_with(Instant::now).elapsed() > ABORT_TIMEOUT {
                    log::warn!(
                        "a kernel did not end within {ABORT_TIMEOUT:?}: the memory that it may access is not freed"
                    );
                    ended = false;
                    return true;
                }
            }
            false
        });
        ended
    }
}
