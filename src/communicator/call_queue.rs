//! The order of calls: a communicator runs its calls one at a time, in the order in which they were made.
//!
//! Owns the ticket lock for that. Must not know what a call is.

use super::checked_wait::wait_until;
use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

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
    /// Tickets after the current one that were dropped before their turn.
    dropped: BTreeSet<u64>,
}

/// A position in the order. Dropping it ends its turn, or if that has not come yet, skips it when it comes. `Q` is a
/// reference to the queue, or owns it where the ticket changes threads.
#[derive(Debug)]
pub(super) struct QueueTicket<Q: Deref<Target = CallQueue> = Arc<CallQueue>> {
    number: u64,
    queue: Q,
}

impl CallQueue {
    /// Ends the turn of the ticket `number`, or if it has not come yet, skips it when it comes.
    fn end_turn(&self, number: u64) {
        let mut state = self.lock();
        if number > state.serving {
            state.dropped.insert(number);
            return;
        }
        state.serving += 1;
        while state.dropped.first() == Some(&state.serving) {
            state.dropped.pop_first();
            state.serving += 1;
        }
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Q: Deref<Target = CallQueue>> QueueTicket<Q> {
    /// Takes the next position.
    pub(super) fn take(queue: Q) -> Self {
        let mut state = queue.lock();
        state.next += 1;
        let number = state.next - 1;
        drop(state);
        Self { number, queue }
    }

    /// Waits for this ticket's turn, and calls `check`, if it is given, every so often meanwhile. The turn ends when the
    /// ticket is dropped.
    pub(super) fn wait_turn(&self, check: Option<&dyn Fn()>) {
        let CallQueue { state, changed } = &*self.queue;
        let mut waiting = self.queue.lock();
        waiting.waiting += 1;
        let is_turn = |state: &QueueState| state.serving == self.number;
        wait_until(state, changed, waiting, is_turn, check).waiting -= 1;
    }
}

impl<Q: Deref<Target = CallQueue>> Drop for QueueTicket<Q> {
    fn drop(&mut self) {
        self.queue.end_turn(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_ticket_passes_its_turn_on() {
        let queue = Arc::new(CallQueue::default());
        let [first, second, third, fourth] = std::array::from_fn(|_| QueueTicket::take(Arc::clone(&queue)));
        first.wait_turn(None);
        drop(third);
        drop(second);
        let waiter = std::thread::spawn(move || fourth.wait_turn(None));
        drop(first);
        waiter.join().expect("no panic");
        QueueTicket::take(&*queue).wait_turn(None);
        assert!(queue.lock().dropped.is_empty());
    }
}
