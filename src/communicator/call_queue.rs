//! The order of calls: a communicator runs its calls one at a time, in the order in which they were made.
//!
//! Owns the ticket lock for that. Must not know what a call is.

use super::checked_wait::wait_until;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A ticket lock: turns come in the order of tickets, whichever thread holds them.
#[derive(Debug, Default)]
pub(super) struct CallQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Number of the next ticket.
    next: u64,
    /// Number of the ticket whose turn it is.
    serving: u64,
    /// Threads that wait for their turn.
    waiting: u32,
}

/// A position in the order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueueTicket(u64);

impl CallQueue {
    /// Takes the next position.
    pub(super) fn take_ticket(&self) -> QueueTicket {
        let mut state = self.lock();
        state.next += 1;
        QueueTicket(state.next - 1)
    }

    /// Waits for this ticket's turn, and calls `check`, if it is given, every so often meanwhile. The turn ends when the guard
    /// is dropped.
    pub(super) fn wait_turn(&self, ticket: &QueueTicket, check: Option<&dyn Fn()>) -> ActiveCall<'_> {
        let mut state = self.lock();
        state.waiting += 1;
        let is_turn = |state: &QueueState| state.serving == ticket.0;
        wait_until(&self.state, &self.changed, state, is_turn, check).waiting -= 1;
        ActiveCall(self)
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current turn. Dropping it starts the next one.
#[derive(Debug)]
pub(super) struct ActiveCall<'a>(&'a CallQueue);

impl Drop for ActiveCall<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.serving += 1;
        if state.waiting > 0 {
            self.0.changed.notify_all();
        }
    }
}
