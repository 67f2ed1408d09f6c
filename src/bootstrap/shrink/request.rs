//! What the program's thread and the service's thread exchange.
//!
//! Owns these types.

use super::message::CallsMade;
use crate::bootstrap::unique_id::UniqueId;
use crate::error::Result;
use crate::fault::Fault;
use crate::rank::Rank;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A world that the ranks have agreed on, and that its members must now join.
#[derive(Debug)]
pub struct AgreedWorld {
    /// The members by their old ranks, ascending. The new ranks are the positions.
    pub members: Vec<Rank>,
    /// Identifies the new world.
    pub id: UniqueId,
    /// Raised if the world cannot come about, until [`ShrinkService::shrink`](super::ShrinkService::shrink)
    /// returns.
    pub fault: Arc<Fault>,
}

/// What the handle of a rank and the thread share.
#[derive(Debug, Default)]
pub(super) struct ServiceShared {
    pub(super) state: Mutex<ServiceState>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct ServiceState {
    pub(super) requests: Vec<ServiceRequest>,
    /// The number of a call, and what came of it.
    pub(super) outcome: Option<(u64, Result<AgreedWorld>)>,
    pub(super) leaving: bool,
    /// Whether the thread serves the rank.
    pub(super) served: bool,
}

impl ServiceState {
    /// Whether the call with this number has an outcome.
    pub(super) fn has_outcome(&self, number: u64) -> bool {
        self.outcome.as_ref().is_some_and(|(of, _)| *of == number)
    }
}

/// What the program's thread asks of the service's thread. Calls are numbered, so that the outcome of one
/// that was given up is not taken for that of the next.
#[derive(Debug)]
pub(super) enum ServiceRequest {
    Call { number: u64, exclude: Vec<Rank>, calls: CallsMade, deadline: Instant },
    CallAgain { number: u64 },
    Joined,
    GaveUp,
}

impl ServiceShared {
    pub(super) fn lock(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Exists while the thread serves a rank.
#[derive(Debug)]
pub(super) struct ServedState(Arc<ServiceShared>);

impl ServedState {
    pub(super) fn new(shared: &Arc<ServiceShared>) -> Self {
        shared.lock().served = true;
        Self(Arc::clone(shared))
    }
}

impl Drop for ServedState {
    fn drop(&mut self) {
        self.0.lock().served = false;
        self.0.changed.notify_all();
    }
}
