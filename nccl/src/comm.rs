//! A communicator as NCCL's interface sees it: it may still be on its way, it can be finalized, and it has a
//! GPU.

use crate::cuda::{self, Device};
use crate::memory::Registrations;
use crate::red_op::RedOps;
use crate::status::{Failure, Outcome, check, record};
use crate::types::ncclResult_t;
use flexring_ffi::comm::{
    flexring_comm, flexring_comm_free, flexring_comm_rank, flexring_comm_size, flexring_comm_status,
};
use flexring_ffi::interrupt::flexring_set_interrupt_check;
use std::cell::RefCell;
use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// flexring's communicator. Freed with its last owner, so that no call uses it afterwards.
pub(crate) struct Live {
    comm: *mut flexring_comm,
    pub rank: c_int,
    pub world: c_int,
}

// SAFETY: flexring's functions may be called from any thread, all but flexring_comm_free at the same time,
// and that one is called by the last owner.
unsafe impl Send for Live {}
// SAFETY: flexring's functions may be called from several threads at once, as above.
unsafe impl Sync for Live {}

impl Live {
    /// Takes a communicator over.
    ///
    /// # Safety
    /// `comm` is a live handle of flexring, which nothing else frees.
    pub(crate) unsafe fn new(comm: *mut flexring_comm) -> Outcome<Self> {
        let mut live = Self { comm, rank: 0, world: 0 };
        // SAFETY: the handle is live, and both numbers may be written.
        unsafe {
            check(flexring_comm_rank(comm, &raw mut live.rank))?;
            check(flexring_comm_size(comm, &raw mut live.world))?;
        }
        Ok(live)
    }

    /// The handle, which is live as long as this value.
    pub(crate) fn handle(&self) -> *mut flexring_comm {
        self.comm
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // SAFETY: this is the last owner. The function always succeeds.
        unsafe { flexring_comm_free(self.comm) };
    }
}

enum CommState {
    /// It is made at the end of a group.
    Deferred,
    /// A thread makes it.
    Joining,
    Ready(Arc<Live>),
    Finalized(Arc<Live>),
    /// It could not be made or finalized.
    Failed(Failure),
    /// Destroyed or aborted.
    Ended,
}

/// What changes during a communicator's life.
struct Progress {
    state: CommState,
    /// Threads that finalize, split or shrink it in the background.
    busy: usize,
}

/// One communicator.
pub(crate) struct Comm {
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Set to end the thread that makes it.
    cancelled: Arc<AtomicBool>,
    /// Whether calls that make, finalize and split it wait.
    pub blocking: bool,
    pub device: Option<Device>,
    pub ops: Mutex<RedOps>,
    pub registered: Mutex<Registrations>,
    pub world: WorldKey,
    /// How it was made of another one.
    origin: Option<Origin>,
    /// How many communicators were made of it by splits, and by shrinks. Not all ranks take part in a shrink,
    /// so these must not count for the next split.
    splits: AtomicUsize,
    shrinks: AtomicUsize,
}

/// How a communicator is made of another one.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Origin {
    /// With the ranks of this color.
    Split(c_int),
    Shrink,
}

/// Tells communicators of this process that are ranks of the same world from others. Only for the order of
/// calls: ranks that differ in the number of their splits may get different keys for one world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorldKey(u64);

impl WorldKey {
    pub(crate) fn new(identity: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        identity.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// Makes flexring's communicator; `None` for a split without a color.
pub(crate) type Make = Box<dyn FnOnce() -> Outcome<Option<Live>> + Send>;

impl Comm {
    /// A communicator that is being made.
    pub(crate) fn joining(
        blocking: bool,
        device: Option<Device>,
        world: WorldKey,
        origin: Option<Origin>,
    ) -> Arc<Self> {
        Arc::new(Self {
            progress: Mutex::new(Progress { state: CommState::Joining, busy: 0 }),
            changed: Condvar::new(),
            cancelled: Arc::default(),
            blocking,
            device,
            ops: Mutex::default(),
            registered: Mutex::default(),
            world,
            origin,
            splits: AtomicUsize::new(0),
            shrinks: AtomicUsize::new(0),
        })
    }

    /// The next communicator that is made of this one in this way.
    pub(crate) fn child(&self, blocking: Option<bool>, origin: Origin) -> Arc<Self> {
        let number = self.children(origin).fetch_add(1, Ordering::Relaxed);
        let world = WorldKey::new((self.world.0, number, origin));
        Self::joining(blocking.unwrap_or(self.blocking), self.device, world, Some(origin))
    }

    /// The last communicator that was made of this one, `child`, was refused before any rank made it.
    pub(crate) fn forget_child(&self, child: &Self) {
        if let Some(origin) = child.origin {
            self.children(origin).fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn children(&self, origin: Origin) -> &AtomicUsize {
        match origin {
            Origin::Split(_) => &self.splits,
            Origin::Shrink => &self.shrinks,
        }
    }

    /// Notes that it is made at the end of a group.
    pub(crate) fn defer(&self) {
        self.lock().state = CommState::Deferred;
    }

    /// Notes that a thread is about to make it. `false` if it was destroyed or aborted meanwhile.
    pub(crate) fn begin(&self) -> bool {
        let mut progress = self.lock();
        if matches!(progress.state, CommState::Deferred) {
            progress.state = CommState::Joining;
        }
        matches!(progress.state, CommState::Joining)
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes it on this thread, and notes the outcome.
    pub(crate) fn make(&self, make: Make) -> Outcome {
        let _cancellation = Cancellation::of(Arc::clone(&self.cancelled));
        // flexring's communicator works with the current GPU, which may be another one than that of the
        // communicator it is made of.
        let make = || {
            if self.is_cancelled() {
                return Err(cancelled());
            }
            let _device = self.device.map(cuda::use_device).transpose()?;
            make()
        };
        let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| Err(Failure::panicked()));
        let made = made.and_then(|live| if self.is_cancelled() { Err(cancelled()) } else { Ok(live) });
        let (state, outcome) = match made {
            Ok(Some(live)) => (CommState::Ready(Arc::new(live)), Ok(())),
            Ok(None) => (CommState::Ended, Ok(())),
            Err(failure) => {
                record(&failure);
                (CommState::Failed(failure.clone()), Err(failure))
            }
        };
        let mut progress = self.lock();
        // It is dropped after the lock: freeing a communicator takes time.
        let is_wanted = matches!(progress.state, CommState::Joining);
        let _unused = if is_wanted { std::mem::replace(&mut progress.state, state) } else { state };
        self.changed.notify_all();
        drop(progress);
        outcome
    }

    /// Ends its making soon.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// The communicator for calls.
    pub(crate) fn ready(&self) -> Outcome<Arc<Live>> {
        match &self.lock().state {
            CommState::Ready(live) => Ok(Arc::clone(live)),
            CommState::Finalized(_) => Err(Failure::argument("the communicator was finalized")),
            CommState::Deferred | CommState::Joining => Err(still_joining()),
            CommState::Failed(failure) => Err(failure.clone()),
            CommState::Ended => Err(ended()),
        }
    }

    /// The communicator, to make another one of it.
    pub(crate) fn idle(&self) -> Outcome<Arc<Live>> {
        if self.lock().busy > 0 {
            return Err(Failure::argument(
                "the communicator is still being split, shrunk or finalized: wait until ncclCommGetAsyncError reports \
                 ncclSuccess",
            ));
        }
        self.ready()
    }

    /// The communicator for questions, also after it was finalized.
    pub(crate) fn made(&self) -> Outcome<Arc<Live>> {
        match &self.lock().state {
            CommState::Ready(live) | CommState::Finalized(live) => Ok(Arc::clone(live)),
            CommState::Deferred | CommState::Joining => Err(still_joining()),
            CommState::Failed(failure) => Err(failure.clone()),
            CommState::Ended => Err(ended()),
        }
    }

    /// What `ncclCommGetAsyncError` reports.
    ///
    /// # Errors
    /// The failure that ended it.
    pub(crate) fn progress(&self) -> Outcome<ncclResult_t> {
        let progress = self.lock();
        if progress.busy > 0 {
            return Ok(ncclResult_t::ncclInProgress);
        }
        let live = match &progress.state {
            CommState::Deferred | CommState::Joining => return Ok(ncclResult_t::ncclInProgress),
            CommState::Failed(failure) => return Err(failure.clone()),
            CommState::Ended => return Err(ended()),
            CommState::Ready(live) | CommState::Finalized(live) => Arc::clone(live),
        };
        drop(progress);
        // SAFETY: the handle is live as long as its owner.
        check(unsafe { flexring_comm_status(live.handle()) })?;
        Ok(ncclResult_t::ncclSuccess)
    }

    /// The failure that ended it, if it has failed.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.progress().err()
    }

    /// Counts a step in the background until the returned value is dropped.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.lock().busy += 1;
        Busy(Arc::clone(self))
    }

    /// Notes that it was finalized, or why it could not be.
    pub(crate) fn finalized(&self, outcome: &Outcome) {
        let state = &mut self.lock().state;
        if let CommState::Ready(live) = state {
            *state = match outcome {
                Ok(()) => CommState::Finalized(Arc::clone(live)),
                Err(failure) => CommState::Failed(failure.clone()),
            };
        }
    }

    /// Ends it at once, and returns flexring's communicator if it was made.
    pub(crate) fn end(&self) -> Option<Arc<Live>> {
        self.end_after(|_| false)
    }

    /// [`end`](Self::end), when no thread makes it.
    pub(crate) fn end_made(&self) -> Option<Arc<Live>> {
        self.end_after(|progress| matches!(progress.state, CommState::Joining))
    }

    /// [`end`](Self::end), when no thread makes it, or works on it in the background.
    pub(crate) fn end_settled(&self) -> Option<Arc<Live>> {
        self.end_after(|progress| progress.busy > 0 || matches!(progress.state, CommState::Joining))
    }

    /// [`end`](Self::end), when `must_wait` no longer holds.
    fn end_after(&self, must_wait: impl Fn(&Progress) -> bool) -> Option<Arc<Live>> {
        let waited = self.changed.wait_while(self.lock(), |progress| must_wait(progress));
        let mut progress = waited.unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut progress.state, CommState::Ended);
        // Another thread may wait for the same.
        self.changed.notify_all();
        match before {
            CommState::Ready(live) | CommState::Finalized(live) => Some(live),
            CommState::Deferred | CommState::Joining | CommState::Failed(_) | CommState::Ended => None,
        }
    }
}

/// A step in the background.
pub(crate) struct Busy(Arc<Comm>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.lock().busy -= 1;
        self.0.changed.notify_all();
    }
}

fn still_joining() -> Failure {
    Failure::argument(
        "the communicator is still being made: wait until ncclCommGetAsyncError reports ncclSuccess",
    )
}

fn ended() -> Failure {
    Failure::argument("the communicator was destroyed or aborted")
}

fn cancelled() -> Failure {
    Failure::usage("the communicator was aborted, or another one of its group failed")
}

thread_local! {
    /// What ends the communicator that this thread is making.
    static CANCELLED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Lets waits of this thread end when a flag is set, until it is dropped.
struct Cancellation;

impl Cancellation {
    fn of(flag: Arc<AtomicBool>) -> Self {
        CANCELLED.set(Some(flag));
        // SAFETY: the function returns normally.
        unsafe { flexring_set_interrupt_check(Some(is_cancelled)) };
        Self
    }
}

impl Drop for Cancellation {
    fn drop(&mut self) {
        // SAFETY: the check is removed.
        unsafe { flexring_set_interrupt_check(None) };
        CANCELLED.set(None);
    }
}

extern "C" fn is_cancelled() -> c_int {
    CANCELLED.with_borrow(|flag| c_int::from(flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed))))
}

/// The communicator that `make` writes; `None` if it is NULL.
///
/// # Safety
/// `make` writes NULL or a new handle of flexring, if it succeeds.
pub(crate) unsafe fn made_by(
    make: impl FnOnce(*mut *mut flexring_comm) -> flexring_ffi::status::flexring_result,
) -> Outcome<Option<Live>> {
    let mut comm = null_mut();
    check(make(&raw mut comm))?;
    // SAFETY: the caller guarantees the handle.
    (!comm.is_null()).then(|| unsafe { Live::new(comm) }).transpose()
}
