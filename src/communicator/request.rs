//! Calls that run while their caller does something else.

use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Buffer;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

mod sealed {
    pub trait Sealed {}
}

/// A vector that an asynchronous call can own: its elements stay where they are when the owner moves.
pub trait Owned: sealed::Sealed + Send + 'static {
    /// What it is a vector of.
    type Item: Element;
    /// Its elements.
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

/// How a call under way ends, seen by its caller and by the thread that runs it.
#[derive(Debug, Default)]
pub(crate) struct CallOutcome {
    result: Mutex<Option<Result<()>>>,
    ended: Condvar,
}

impl CallOutcome {
    /// Tells how the call ended; only the first word counts.
    pub(super) fn end(&self, result: Result<()>) {
        self.lock().get_or_insert(result);
        self.ended.notify_all();
    }

    /// Waits for the end.
    pub(crate) fn wait(&self) -> Result<()> {
        let mut result = self.lock();
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            result = self.ended.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the call has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<()>>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An all-reduce under way. It owns the vector, so nobody can touch it meanwhile; dropping the request waits
/// for the call to end.
#[derive(Debug)]
pub struct Request<B: Owned> {
    pub(super) outcome: Arc<CallOutcome>,
    pub(super) vector: Option<B>,
}

impl<B: Owned> Request<B> {
    /// Whether the call has ended, well or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome.is_over()
    }

    /// Waits for the end and gives the vector back.
    ///
    /// # Errors
    /// Whatever went wrong, as for the blocking call.
    pub fn wait(mut self) -> Result<B> {
        self.outcome.wait()?;
        self.vector.take().ok_or_else(|| Error::new(ErrorKind::Internal, "the vector of a request is gone"))
    }
}

impl<B: Owned> Drop for Request<B> {
    fn drop(&mut self) {
        // The call uses the vector until its end, so it cannot be freed before.
        let _ = self.outcome.wait();
    }
}
