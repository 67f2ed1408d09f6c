//! The first failure of a communicator, shared with every thread that waits for it.
//!
//! Owns one write-once error, and which eventfds are notified when it is set.

use crate::error::{Error, Result};
use crate::interrupt;
use crate::wake::WakeFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// Eventfds that a fault has room for in advance: those of a process's executors, and a few that joining
/// watches it with.
const SLEEPERS: usize = 16;

/// The longest sleep of a thread that has no descriptor to [`watch`](Fault::watch) a fault, which then does
/// not end the sleep.
pub const UNWATCHED_SLEEP: Duration = Duration::from_millis(100);

/// A write-once error that is cheap to poll and that threads can sleep on. It takes no descriptor while none
/// does.
#[derive(Debug)]
pub struct Fault {
    error: OnceLock<Error>,
    sleepers: Mutex<Vec<Weak<WakeFd>>>,
}

impl Fault {
    /// A fault without an error.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "a fault is made where a communicator is")]
    pub fn new() -> Self {
        // Room for all that sleep on it, because calls do not allocate.
        Self { error: OnceLock::new(), sleepers: Mutex::new(Vec::with_capacity(SLEEPERS)) }
    }

    /// Raises `error` unless an error was raised before, wakes every sleeping thread, and returns the first
    /// error.
    pub fn raise(&self, error: Error) -> Error {
        let first = self.error.get_or_init(|| error).clone();
        self.sleepers().iter().filter_map(Weak::upgrade).for_each(|eventfd| eventfd.notify());
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

    /// [`check`](Self::check) for loops that wait on a thread of the program: also ends the wait if the
    /// program's interrupt check says so. Such loops sleep for `interrupt::longest_sleep` at most.
    ///
    /// # Errors
    /// As for [`check`](Self::check), and `Aborted` if the program wants the thread back.
    pub fn check_waiting(&self) -> Result<()> {
        self.check()?;
        interrupt::check().map_err(|error| self.raise(error))
    }

    /// Notifies `eventfd` when the fault is raised, or now if it was raised before. Its user may sleep on it
    /// for other reasons, too, and must not mind a notification of an earlier one: this lasts as long as
    /// `eventfd` lives.
    pub fn notify(&self, eventfd: &Arc<WakeFd>) {
        let mut sleepers = self.sleepers();
        let eventfd = Arc::downgrade(eventfd);
        if !sleepers.iter().any(|known| known.ptr_eq(&eventfd)) {
            sleepers.retain(|known| known.strong_count() > 0);
            sleepers.push(eventfd.clone());
        }
        drop(sleepers);
        if self.get().is_some() {
            eventfd.upgrade().iter().for_each(|eventfd| eventfd.notify());
        }
    }

    /// A descriptor that becomes readable when the fault is raised, and stays so.
    ///
    /// # Errors
    /// `System` if no descriptor is available.
    pub fn watch(&self) -> Result<FaultWatch> {
        let eventfd = Arc::new(WakeFd::new()?);
        self.notify(&eventfd);
        Ok(FaultWatch(eventfd))
    }

    fn sleepers(&self) -> MutexGuard<'_, Vec<Weak<WakeFd>>> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A descriptor that becomes readable when a fault is raised.
#[derive(Debug)]
pub struct FaultWatch(Arc<WakeFd>);

impl AsFd for FaultWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_first_error_is_kept() {
        let fault = Fault::new();
        assert!(fault.check().is_ok());
        fault.raise(Error::peer_lost("rank 2 died"));
        let kept = fault.raise(Error::aborted("rank 1 aborted"));
        assert_eq!(kept.message(), "rank 2 died");
        assert_eq!(fault.check().expect_err("raised").kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn everything_that_sleeps_on_it_is_notified() {
        let fault = Fault::new();
        let eventfd = Arc::new(WakeFd::new().expect("an event descriptor"));
        let gone = fault.watch().expect("an event descriptor");
        drop(gone);
        let watch = fault.watch().expect("an event descriptor");
        for _ in 0..3 {
            fault.notify(&eventfd);
        }
        assert_eq!(fault.sleepers().len(), 2, "each once, without those that are gone");
        assert!(!eventfd.drain() && !watch.0.drain());
        fault.raise(Error::aborted("rank 1 aborted"));
        assert!(eventfd.drain() && watch.0.drain());
        fault.notify(&eventfd);
        assert!(eventfd.drain(), "raised before");
    }
}
