//! The first thing that went wrong with a communicator, shared with every thread that waits for it.
//!
//! Owns one write-once error and the descriptor that wakes sleepers when it is set. Must not know who raises
//! it or what a waiter does about it.

use crate::error::{Error, Result};
use crate::wake::WakeFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// A write-once error that can be polled cheaply and slept on.
#[derive(Debug)]
pub struct Fault {
    error: OnceLock<Error>,
    wake: WakeFd,
}

impl Fault {
    /// A fault that has not happened.
    ///
    /// # Errors
    /// `System` if no event descriptor can be had.
    pub fn new() -> Result<Self> {
        Ok(Self { error: OnceLock::new(), wake: WakeFd::new()? })
    }

    /// Raises `error` unless one was raised before, wakes every sleeper, and returns the one that counts.
    pub fn raise(&self, error: Error) -> Error {
        let first = self.error.get_or_init(|| error).clone();
        // Never drained, so it stays readable.
        self.wake.notify();
        first
    }

    /// The error, if one was raised.
    #[must_use]
    pub fn get(&self) -> Option<&Error> {
        self.error.get()
    }

    /// An error if one was raised.
    ///
    /// # Errors
    /// The error that was raised.
    pub fn check(&self) -> Result<()> {
        self.get().map_or(Ok(()), |error| Err(error.clone()))
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
    fn the_first_error_counts() {
        let fault = Fault::new().expect("an event descriptor");
        assert!(fault.check().is_ok());
        fault.raise(Error::peer_lost("rank 2 died"));
        let kept = fault.raise(Error::aborted("somebody else gave up"));
        assert_eq!(kept.message(), "rank 2 died");
        assert_eq!(fault.check().expect_err("raised").kind(), ErrorKind::PeerLost);
    }
}
