//! Whose turn it is: calls of a communicator run one at a time, in the order in which they were made.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The order of calls, whichever threads make them.
#[derive(Debug, Default)]
pub(super) struct CallQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    taken: u64,
    serving: u64,
    waiting: u32,
}

/// A place in the order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueueTicket(u64);

impl CallQueue {
    /// Takes the next place.
    pub(super) fn take_ticket(&self) -> QueueTicket {
        let mut state = self.lock();
        state.taken += 1;
        QueueTicket(state.taken - 1)
    }

    /// Waits until it is this ticket's turn. The turn ends when the guard is dropped.
    pub(super) fn wait_turn(&self, ticket: &QueueTicket) -> ActiveCall<'_> {
        let mut state = self.lock();
        while state.serving != ticket.0 {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        ActiveCall(self)
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody's turn.
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
