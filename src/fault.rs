//! The fault of a communicator: its first error, which ends every wait.
//!
//! Owns one write-once error, and the descriptor that wakes sleeping threads when it is set. Must not know who raises it
//! or what a waiting thread does about it.

use crate::error::{Error, Result};
use crate::wake::WakeFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// A write-once error. Checking it is cheap, and threads can sleep until it is raised.
#[derive(Debug)]
pub struct Fault {
    error: OnceLock<Error>,
    wake: WakeFd,
}

impl Fault {
    /// A fault that is not raised.
    ///
    /// # Errors
    /// `System` if the process or the system has no descriptor left.
    pub fn new() -> Result<Self> {
        Ok(Self { error: OnceLock::new(), wake: WakeFd::new()? })
    }

    /// Raises the fault with `error` unless it is raised already, wakes all sleeping threads, and returns the first error.
    pub fn raise(&self, error: Error) -> Error {
        let first = self.error.get_or_init(|| error).clone();
        // Never drained, so it stays readable.
        self.wake.notify();
        first
    }

    /// The error, if the fault is raised.
    #[must_use]
    pub fn get(&self) -> Option<&Error> {
        self.error.get()
    }

    /// Fails if the fault is raised.
    ///
    /// # Errors
    /// The error that it was raised with.
    pub fn check(&self) -> Result<()> {
        self.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// A descriptor that becomes readable when the fault is raised, and stays readable.
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
