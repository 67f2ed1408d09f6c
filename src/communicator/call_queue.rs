//! The order of calls: a communicator runs its calls one at a time, in the order in which they were made.
//!
//! Owns the ticket lock for that. Must not know what a call is.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

    /// Waits for this ticket's turn. The turn ends when the guard is dropped.
    pub(super) fn wait_turn(&self, ticket: &QueueTicket) -> ActiveCall<'_> {
        let mut state = self.lock();
        while state.serving != ticket.0 {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        ActiveCall(self)
    }

    /// [`wait_turn`](Self::wait_turn), and calls `check` every so often meanwhile.
    pub(super) fn wait_turn_checking(
        &self,
        ticket: &QueueTicket,
        interval: Duration,
        mut check: impl FnMut(),
    ) -> ActiveCall<'_> {
        let mut state = self.lock();
        while state.serving != ticket.0 {
            state.waiting += 1;
            let (woken, wait) =
                self.changed.wait_timeout(state, interval).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.waiting -= 1;
            if wait.timed_out() && state.serving != ticket.0 {
                drop(state);
                check();
                state = self.lock();
            }
        }
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
