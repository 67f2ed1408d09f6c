//! Whose turn it is: calls of a communicator run one at a time, in the order in which they were made.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The order of calls, whichever threads make them.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: u64,
    serving: u64,
    waiting: u32,
}

/// A place in the order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

impl Turns {
    /// Takes the next place.
    pub(super) fn take(&self) -> Ticket {
        let mut state = self.lock();
        state.taken += 1;
        Ticket(state.taken - 1)
    }

    /// Waits until it is this ticket's turn. The turn ends when the guard is dropped.
    pub(super) fn wait(&self, ticket: &Ticket) -> Turn<'_> {
        let mut state = self.lock();
        while state.serving != ticket.0 {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        Turn(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody's turn.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.serving += 1;
        if state.waiting > 0 {
            self.0.changed.notify_all();
        }
    }
}
