//! The first failure of a communicator, shared with every thread that waits for it.
//!
//! Owns one write-once error and the descriptor that wakes sleeping threads when it is set. Must not know who
//! raises the error or how waiting threads react.

use crate::error::{Error, Result};
use crate::interrupt;
use crate::wake::WakeFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// A write-once error that is cheap to poll and that threads can sleep on.
#[derive(Debug)]
pub struct Fault {
    error: OnceLock<Error>,
    wake: WakeFd,
}

impl Fault {
    /// A fault without an error.
    ///
    /// # Errors
    /// `System` if no descriptor is available.
    pub fn new() -> Result<Self> {
        Ok(Self { error: OnceLock::new(), wake: WakeFd::new()? })
    }

    /// Raises `error` unless an error was raised before, wakes every sleeping thread, and returns the first
    /// error.
    pub fn raise(&self, error: Error) -> Error {
        let first = self.error.get_or_init(|| error).clone();
        // The descriptor is never drained, so it stays readable.
        self.wake.notify();
        first
    }

    /// The error, if one was raised.
    #[must_use]
    pub fn get(&self) -> Option<&Error> {
        self.error.get()
    }

    /// `Ok` until an error is raised.
    ///
    /// # Errors
    /// The error that was raised.
    pub fn check(&self) -> Result<()> {
        self.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// [`check`](Self::check) for loops that wait on a thread of the program: also ends the wait if the program's interrupt
    /// check says so. Such loops sleep for `interrupt::longest_sleep` at most.
    ///
    /// # Errors
    /// As for [`check`](Self::check), and `Aborted` if the program wants the thread back.
    pub(crate) fn check_waiting(&self) -> Result<()> {
        self.check()?;
        interrupt::check().map_err(|error| self.raise(error))
    }

    /// A descriptor that becomes readable when the fault is raised, and stays so.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_first_error_is_kept() {
        let fault = Fault::new().expect("an event descriptor");
        assert!(fault.check().is_ok());
        fault.raise(Error::peer_lost("rank 2 died"));
        let kept = fault.raise(Error::aborted("rank 1 aborted"));
        assert_eq!(kept.message(), "rank 2 died");
        assert_eq!(fault.check().expect_err("raised").kind(), ErrorKind::PeerLost);
    }
}
