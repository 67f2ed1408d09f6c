//! A communicator as NCCL's interface sees it: it may still be on its way, it can be finalized, and it has a GPU.

use crate::cuda::{self, Device};
use crate::red_op::RedOps;
use crate::status::{Failure, Outcome, check, record};
use crate::types::ncclResult_t;
use flexring::c_api::comm::{
    flexring_comm, flexring_comm_free, flexring_comm_rank, flexring_comm_size, flexring_comm_status,
};
use flexring::c_api::interrupt::flexring_set_interrupt_check;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// flexring's communicator. Freed with its last owner, so that no call uses it afterwards.
pub(crate) struct Live {
    comm: *mut flexring_comm,
    pub rank: c_int,
    pub world: c_int,
}

// SAFETY: flexring's functions may be called from any thread, all but flexring_comm_free at the same time, and that one is
// called by the last owner.
unsafe impl Send for Live {}
// SAFETY: the same.
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
    /// Registered memory, as address and length, by handle.
    pub registered: Mutex<BTreeMap<usize, (usize, usize)>>,
}

/// Makes flexring's communicator; `None` for a split without a color.
pub(crate) type Make = Box<dyn FnOnce() -> Outcome<Option<Live>> + Send>;

impl Comm {
    /// A communicator that is being made.
    pub(crate) fn joining(blocking: bool, device: Option<Device>) -> Arc<Self> {
        Arc::new(Self {
            progress: Mutex::new(Progress { state: CommState::Joining, busy: 0 }),
            changed: Condvar::new(),
            cancelled: Arc::default(),
            blocking,
            device,
            ops: Mutex::default(),
            registered: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes it on this thread, and notes the outcome.
    pub(crate) fn make(&self, make: Make) -> Outcome {
        let _cancellation = Cancellation::of(Arc::clone(&self.cancelled));
        // flexring's communicator works with the current GPU, which may be another one than that of the communicator it is
        // made of.
        let make = || {
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
        self.lock().state = state;
        self.changed.notify_all();
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
            CommState::Joining => Err(still_joining()),
            CommState::Failed(failure) => Err(failure.clone()),
            CommState::Ended => Err(ended()),
        }
    }

    /// The communicator for questions, also after it was finalized.
    pub(crate) fn made(&self) -> Outcome<Arc<Live>> {
        match &self.lock().state {
            CommState::Ready(live) | CommState::Finalized(live) => Ok(Arc::clone(live)),
            CommState::Joining => Err(still_joining()),
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
            CommState::Joining => return Ok(ncclResult_t::ncclInProgress),
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

    /// Waits until no thread makes it.
    pub(crate) fn wait_made(&self) {
        let joining = |progress: &mut Progress| matches!(progress.state, CommState::Joining);
        drop(self.changed.wait_while(self.lock(), joining));
    }

    /// Counts a step in the background until the returned value is dropped.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.lock().busy += 1;
        Busy(Arc::clone(self))
    }

    /// Waits until no thread makes it, or works on it in the background.
    pub(crate) fn settle(&self) {
        let unsettled =
            |progress: &mut Progress| progress.busy > 0 || matches!(progress.state, CommState::Joining);
        drop(self.changed.wait_while(self.lock(), unsettled));
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

    /// Ends it, and returns flexring's communicator if it was made.
    pub(crate) fn end(&self) -> Option<Arc<Live>> {
        match std::mem::replace(&mut self.lock().state, CommState::Ended) {
            CommState::Ready(live) | CommState::Finalized(live) => Some(live),
            CommState::Joining | CommState::Failed(_) | CommState::Ended => None,
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
    make: impl FnOnce(*mut *mut flexring_comm) -> flexring::c_api::status::flexring_result,
) -> Outcome<Option<Live>> {
    let mut comm = null_mut();
    check(make(&raw mut comm))?;
    // SAFETY: the caller guarantees the handle.
    (!comm.is_null()).then(|| unsafe { Live::new(comm) }).transpose()
}
