//! Asynchronous calls as their callers see them.
//!
//! Owns the outcome of a call and the request that waits for it. Must not know what runs the call.

use super::checked_wait::wait_until;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

mod sealed {
    pub trait Sealed {}
}

/// A vector that an asynchronous call can own. Its elements keep their address when the owner moves.
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

/// The result of a call, shared by its caller and the thread that runs it.
#[derive(Default)]
pub(crate) struct CallOutcome {
    /// `None` until the call is over.
    result: Mutex<Option<Result<()>>>,
    ended: Condvar,
    /// What threads that wait do every so often.
    check: Option<Box<dyn Fn() + Send + Sync>>,
}

impl CallOutcome {
    /// The result of a call that ends only if threads that wait for it call `check` every so often: a broken GPU
    /// reports nothing.
    pub(super) fn with_check(check: impl Fn() + Send + Sync + 'static) -> Self {
        Self { check: Some(Box::new(check)), ..Self::default() }
    }

    /// Sets the result and wakes the waiters. Only the first call has an effect.
    pub(super) fn end(&self, result: Result<()>) {
        self.lock().get_or_insert(result);
        self.ended.notify_all();
    }

    /// Waits until the call is over and returns its result.
    pub(crate) fn wait(&self) -> Result<()> {
        let check = self.check.as_ref().map(|check| &**check as &dyn Fn());
        let result = wait_until(&self.result, &self.ended, self.lock(), Option::is_some, check);
        result.clone().unwrap_or_else(|| Err(Error::internal("a call is over without a result")))
    }

    /// Whether the call is over, with success or not.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_some()
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

/// An all-reduce that was started by [`all_reduce_async`](super::Communicator::all_reduce_async). It owns the
/// vector until the call is over; dropping the request waits for that.
#[derive(Debug)]
pub struct Request<B: Owned> {
    pub(super) outcome: Arc<CallOutcome>,
    pub(super) vector: Option<B>,
}

impl<B: Owned> Request<B> {
    /// Whether the call is over, with success or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome.is_over()
    }

    /// Waits until the call is over and returns the vector.
    ///
    /// # Errors
    /// As for the blocking call.
    pub fn wait(mut self) -> Result<B> {
        self.outcome.wait()?;
        self.vector.take().ok_or_else(|| Error::internal("the vector of a request is gone"))
    }
}

impl<B: Owned> Drop for Request<B> {
    fn drop(&mut self) {
        // The call uses the vector until its end, so the vector cannot be freed before.
        let _ = self.outcome.wait();
    }
}
