//! Asynchronous calls as their callers see them.
//!
//! Owns the outcome of a call and the request that waits for it.

use super::checked_wait::wait_until;
use super::thread_calls::ThreadCall;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::process::CreatorProcess;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

mod sealed {
    pub trait Sealed {}
}

/// A vector that an asynchronous call can own: a `Vec`, or a [`Buffer`], which has an example. Its elements
/// keep their address when the owner moves.
pub trait Owned: sealed::Sealed + Send + 'static {
    /// The element type.
    type Item: Element;
    /// Borrows the elements.
    fn elements(&mut self) -> &mut [Self::Item];
}

impl<T: Element> sealed::Sealed for Vec<T> {}
impl<T: Element> Owned for Vec<T> {
    type Item = T;
    fn elements(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> sealed::Sealed for Buffer<T> {}
impl<T: Element> Owned for Buffer<T> {
    type Item = T;
    fn elements(&mut self) -> &mut [T] {
        self
    }
}

/// What threads that wait for a call do every so often.
pub(super) trait WaitCheck: Send + Sync {
    /// Whether this thread must do it.
    fn is_needed(&self) -> bool;

    /// Ends the call if it cannot end by itself, or if the program wants the thread back.
    fn check(&self);

    /// Ends all calls, because the thread panics.
    fn abandon(&self);

    /// Fails if this thread is in a call, for which it would wait.
    fn check_not_nested(&self) -> Result<()>;
}

/// The result of a call, shared by its caller and the thread that runs it.
pub struct CallOutcome {
    /// `None` until the call is over.
    result: Mutex<Option<Result<()>>>,
    ended: Condvar,
    check: Weak<dyn WaitCheck>,
    creator: CreatorProcess,
}

impl CallOutcome {
    /// The result of a call that is not over. Threads that wait for it call `check`.
    pub(super) fn new(check: Weak<dyn WaitCheck>, creator: CreatorProcess) -> Self {
        Self { result: Mutex::default(), ended: Condvar::new(), check, creator }
    }

    /// Sets the result and wakes the waiters. Only the first call has an effect.
    pub(super) fn end(&self, result: Result<()>) {
        self.lock().get_or_insert(result);
        self.ended.notify_all();
    }

    /// Waits until the call is over and returns its result. In a forked child it is never over, so it returns
    /// an error.
    pub fn wait(&self) -> Result<()> {
        self.check_process()?;
        let is_needed = self.check.upgrade().is_some_and(|check| check.is_needed());
        let check = || {
            if let Some(check) = self.check.upgrade() {
                check.check();
            }
        };
        let check = is_needed.then_some(&check as &dyn Fn());
        let result = wait_until(&self.result, &self.ended, self.lock(), Option::is_some, check);
        result.clone().unwrap_or_else(|| Err(Error::internal("a call is over without a result")))
    }

    /// Whether the call is over, with success or not.
    pub fn is_over(&self) -> bool {
        !self.creator.is_current() || self.lock().is_some()
    }

    /// Checks that a wait of this thread can end: the call is over, or does not wait for one that this thread
    /// is in.
    ///
    /// # Errors
    /// `InvalidArgument` if it cannot.
    pub fn check_not_nested(&self) -> Result<()> {
        if !ThreadCall::is_in_any() || self.is_over() {
            return Ok(());
        }
        self.check.upgrade().map_or(Ok(()), |check| check.check_not_nested())
    }

    /// Checks that this process has started the call.
    ///
    /// # Errors
    /// `InvalidArgument` in a forked child.
    pub fn check_process(&self) -> Result<()> {
        self.creator.check("this request")
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<()>>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for CallOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CallOutcome").field(&*self.lock()).finish()
    }
}

/// A call that was started by [`all_reduce_async`](super::Communicator::all_reduce_async) or another method
/// of that kind. It owns the call's vectors until the call is over; dropping the request waits for that.
/// While the thread panics it aborts the communicator first.
///
/// ```
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::local(1)?.remove(0);
/// let request = comm.all_reduce_async(vec![1.0f32; 8], ReduceOp::Sum)?;
/// // Other work.
/// let sums = request.wait()?;
/// assert_eq!(sums, [1.0; 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Request<B> {
    pub(super) outcome: Arc<CallOutcome>,
    pub(super) vector: Option<B>,
}

impl<B> Request<B> {
    /// Whether the call is over, with success or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome.is_over()
    }

    /// Waits until the call is over and returns the vector, or the vectors: `send` and `receive`.
    ///
    /// # Errors
    /// As for the blocking call.
    pub fn wait(mut self) -> Result<B> {
        self.outcome.wait()?;
        self.vector.take().ok_or_else(|| Error::internal("the vector of a request is gone"))
    }
}

impl<B> Drop for Request<B> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && !self.outcome.is_over()
            && let Some(check) = self.outcome.check.upgrade()
        {
            check.abandon();
        }
        // The call uses the vector until its end, so the vector cannot be freed before.
        let _ = self.outcome.wait();
    }
}
