//! The eventfds of a process by which neighbours wake its executors.
//!
//! Owns which executor sleeps on which of them. All communicators of the process share them, so a further
//! communicator needs no descriptor.

use crate::error::Result;
use crate::wake::WakeFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many executors of a process can sleep at once until they are woken, on nodes of few ranks. Further
/// ones sleep briefly and check again.
const LANES: usize = 4;

/// The eventfds, and which of them are in use.
#[derive(Debug)]
pub struct WakeLanes {
    eventfds: Vec<Arc<WakeFd>>,
    /// One bit for each eventfd on which an executor sleeps.
    taken: AtomicU32,
}

impl WakeLanes {
    /// New eventfds: several, or one if `is_single`.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub(super) fn new(is_single: bool) -> Result<Self> {
        let count = if is_single { 1 } else { LANES };
        let eventfds = (0..count).map(|_| WakeFd::new().map(Arc::new)).collect::<Result<_>>()?;
        Ok(Self { eventfds, taken: AtomicU32::new(0) })
    }

    /// All eventfds, by index.
    pub(super) fn eventfds(&self) -> &[Arc<WakeFd>] {
        &self.eventfds
    }

    /// Takes an eventfd that no other executor sleeps on, if there is one. A late notification of its last
    /// user may wake the caller too early.
    pub(super) fn take(self: &Arc<Self>) -> Option<WakeLane> {
        for index in 0..self.eventfds.len() {
            if self.taken.fetch_or(1 << index, Ordering::Acquire) & 1 << index == 0 {
                return Some(WakeLane { lanes: Arc::clone(self), index });
            }
        }
        None
    }
}

/// An eventfd that one executor sleeps on.
#[derive(Debug)]
pub(super) struct WakeLane {
    lanes: Arc<WakeLanes>,
    index: usize,
}

impl WakeLane {
    /// By what neighbours identify it.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn eventfd(&self) -> &Arc<WakeFd> {
        &self.lanes.eventfds[self.index]
    }
}

impl Drop for WakeLane {
    fn drop(&mut self) {
        self.eventfd().drain();
        self.lanes.taken.fetch_and(!(1 << self.index), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eventfd_has_one_user_at_a_time() {
        let lanes = Arc::new(WakeLanes::new(false).expect("descriptors"));
        let mut taken: Vec<WakeLane> = std::iter::from_fn(|| lanes.take()).collect();
        assert_eq!(taken.len(), LANES);
        let last = taken.pop().expect("a lane");
        let index = last.index();
        last.eventfd().notify();
        drop(last);
        let again = lanes.take().expect("it is free again");
        assert_eq!(again.index(), index);
        assert!(!again.eventfd().drain(), "notifications of its last user are gone");
        assert!(lanes.take().is_none());
    }
}
