//! What the thread that answers ranks that shrink shares with the handles of its process.
//!
//! Owns this state, and how the thread learns of its changes.

use super::served_rank::ServedRank;
use crate::error::{Error, Result};
use crate::process::ClosedInChild;
use crate::wake::WakeFd;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A socket that listens. A forked child closes it.
#[derive(Debug)]
pub(super) struct ShrinkSocket {
    _closed_in_child: ClosedInChild,
    pub(super) socket: TcpListener,
}

impl From<TcpListener> for ShrinkSocket {
    fn from(socket: TcpListener) -> Self {
        Self { _closed_in_child: ClosedInChild::new(socket.as_fd()), socket }
    }
}

/// The shared state.
#[derive(Debug)]
pub(super) struct PortsShared {
    pub(super) wake: WakeFd,
    state: Mutex<PortsState>,
}

#[derive(Debug, Default)]
struct PortsState {
    /// Number of ranks that others may look for before they are served.
    joining: usize,
    /// Ranks to serve from now on.
    arrived: Vec<ServedRank>,
    leaving: bool,
    /// Whether the thread has ended.
    ended: bool,
}

/// What has changed for the thread.
#[derive(Debug)]
pub(super) struct PortsUpdate {
    pub(super) arrived: Vec<ServedRank>,
    /// Whether others may look for ranks that are not served yet.
    pub(super) are_joining: bool,
    /// Whether there are no handles any more.
    pub(super) leaving: bool,
}

impl PortsShared {
    /// No rank is served or joins.
    ///
    /// # Errors
    /// `System` if no descriptor is available.
    pub(super) fn new() -> Result<Self> {
        Ok(Self { wake: WakeFd::new()?, state: Mutex::default() })
    }

    /// From now on others may look for one more rank that is not served yet.
    pub(super) fn begin_join(&self) {
        self.lock().joining += 1;
        // Before anybody can know of the rank.
        self.wake.notify();
    }

    /// That rank is served, or will not be.
    pub(super) fn end_join(&self) {
        self.lock().joining -= 1;
        self.wake.notify();
    }

    /// Has the thread serve `rank`.
    ///
    /// # Errors
    /// `Internal` if the thread has ended.
    pub(super) fn serve(&self, rank: ServedRank) -> Result<()> {
        let mut state = self.lock();
        if state.ended {
            return Err(Error::internal("the thread that answers ranks that shrink has ended"));
        }
        state.arrived.push(rank);
        drop(state);
        self.wake.notify();
        Ok(())
    }

    /// Has the thread end.
    pub(super) fn leave(&self) {
        self.lock().leaving = true;
        self.wake.notify();
    }

    /// What has changed since the last call. For the thread.
    pub(super) fn update(&self) -> PortsUpdate {
        let mut state = self.lock();
        PortsUpdate {
            arrived: std::mem::take(&mut state.arrived),
            are_joining: state.joining > 0,
            leaving: state.leaving,
        }
    }

    /// The thread ends. Ranks that it does not serve yet are dropped.
    pub(super) fn end(&self) {
        let arrived = {
            let mut state = self.lock();
            state.ended = true;
            std::mem::take(&mut state.arrived)
        };
        drop(arrived);
    }

    /// Whether the thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    fn lock(&self) -> MutexGuard<'_, PortsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
