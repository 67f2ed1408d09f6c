//! The order of calls: a communicator runs its calls one at a time, in the order in which they were made.
//!
//! Owns the ticket lock for that, and its memory orders.

use super::checked_wait::wait_until;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::ops::Deref;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, PoisonError};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// A ticket lock: turns come in the order of tickets, whichever thread holds them.
///
/// A turn that begins at once takes no mutex, and it ends without one if no thread waits and no later ticket
/// was dropped. A thread that waits, or drops a ticket before its turn, increments `pending` and then reads
/// `serving`; the end of a turn changes `serving` and then reads `pending`. The fences between ensure that at
/// least one of the two sees the change of the other.
#[derive(Debug, Default)]
pub(super) struct CallQueue {
    /// Number of the next ticket.
    next: AtomicU64,
    /// Number of the ticket whose turn it is.
    serving: AtomicU64,
    /// Threads that wait for their turn, and tickets in `dropped`. Changed under the mutex only.
    pending: AtomicU64,
    /// Tickets that were dropped before their turn, and are not skipped yet.
    dropped: Mutex<BTreeSet<u64>>,
    changed: Condvar,
    /// Collectives that were made and take a turn.
    collectives: AtomicU64,
    /// Collectives that were made and kernels run by themselves, which take no turn.
    kernels: AtomicU64,
}

/// A position in the order. Dropping it ends its turn, or if that has not come yet, skips it when it comes.
/// `Q` is a reference to the queue, or owns it where the ticket changes threads.
#[derive(Debug)]
pub(super) struct QueueTicket<Q: Deref<Target = CallQueue> = Arc<CallQueue>> {
    number: u64,
    /// Collectives that were made before and kernels run.
    kernels: u64,
    queue: Q,
}

impl CallQueue {
    /// Whether all calls are over.
    pub(super) fn is_idle(&self) -> bool {
        self.serves(self.next.load(Ordering::Relaxed))
    }

    /// Counts a collective that takes a turn. Returns its number among all collectives.
    pub(super) fn count_collective(&self) -> u64 {
        let collectives = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        collectives + self.kernels.load(Ordering::Relaxed)
    }

    /// Counts a collective that kernels run by themselves. Returns its number among all collectives.
    #[allow(dead_code, reason = "builds without GPUs do not ask for it")]
    pub(super) fn count_kernel(&self) -> u64 {
        let kernels = self.kernels.fetch_add(1, Ordering::Relaxed) + 1;
        self.collectives.load(Ordering::Relaxed) + kernels
    }

    /// Whether it is the turn of the ticket `number`. What was written in earlier turns is visible then.
    fn serves(&self, number: u64) -> bool {
        self.serving.load(Ordering::Acquire) == number
    }

    /// Ends the turn of the ticket `number`, or if it has not come yet, skips it when it comes.
    #[inline]
    fn end_turn(&self, number: u64) {
        if self.serves(number) {
            self.serving.store(number + 1, Ordering::Release);
            fence(Ordering::SeqCst);
            if self.pending.load(Ordering::Relaxed) > 0 {
                self.skip_dropped(&mut self.lock());
            }
        } else {
            let mut dropped = self.lock();
            dropped.insert(number);
            self.add_pending();
            self.skip_dropped(&mut dropped);
        }
    }

    /// Skips tickets that were dropped and whose turn has come, and wakes those who wait.
    fn skip_dropped(&self, dropped: &mut BTreeSet<u64>) {
        while let Some(number) = dropped.first().copied().filter(|number| self.serves(*number)) {
            dropped.pop_first();
            self.pending.fetch_sub(1, Ordering::Relaxed);
            // Only this thread changes it now: the ticket whose turn it is was dropped.
            self.serving.store(number + 1, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Increments `pending`. The caller holds the mutex, and must read `serving` afterwards.
    fn add_pending(&self) {
        self.pending.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Q: Deref<Target = CallQueue>> QueueTicket<Q> {
    /// Takes the next position.
    pub(super) fn take(queue: Q) -> Self {
        let number = queue.next.fetch_add(1, Ordering::Relaxed);
        Self { number, kernels: queue.kernels.load(Ordering::Relaxed), queue }
    }

    /// Collectives that were made before this ticket was taken and kernels run.
    pub(super) fn kernels(&self) -> u64 {
        self.kernels
    }

    /// Waits for this ticket's turn, and calls `check`, if it is given, every so often meanwhile. The turn
    /// ends when the ticket is dropped.
    #[inline]
    pub(super) fn wait_turn(&self, check: Option<&dyn Fn()>) {
        let CallQueue { pending, dropped, changed, .. } = &*self.queue;
        if self.queue.serves(self.number) {
            return;
        }
        let waiting = self.queue.lock();
        self.queue.add_pending();
        let _waited = wait_until(dropped, changed, waiting, |_| self.queue.serves(self.number), check);
        pending.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<Q: Deref<Target = CallQueue>> Drop for QueueTicket<Q> {
    fn drop(&mut self) {
        self.queue.end_turn(self.number);
    }
}

#[cfg(all(test, not(loom)))]
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
        assert!(queue.lock().is_empty());
        assert_eq!(queue.pending.load(Ordering::SeqCst), 0);
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Tickets that are taken in order and used by threads of their own: `waits` says which of them wait for
    /// their turn before they are dropped. This thread waits for the turn after them.
    fn use_tickets<const N: usize>(waits: [bool; N]) {
        let mut model = loom::model::Builder::new();
        // All interleavings of three threads take minutes.
        model.preemption_bound = (N > 1).then_some(2);
        model.check(move || {
            let queue = Arc::new(CallQueue::default());
            let tickets = waits.map(|waits| (waits, QueueTicket::take(Arc::clone(&queue))));
            let threads = tickets.map(|(waits, ticket)| {
                thread::spawn(move || {
                    if waits {
                        ticket.wait_turn(None);
                    }
                })
            });
            QueueTicket::take(&*queue).wait_turn(None);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(queue.pending.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn a_waiter_sees_the_end_of_the_turn_or_is_woken() {
        use_tickets([true]);
        use_tickets([false]);
        use_tickets([true, true]);
    }

    #[test]
    fn a_dropped_ticket_is_skipped_by_itself_or_by_the_turn_before() {
        use_tickets([true, false]);
        use_tickets([false, true]);
        use_tickets([false, false]);
        use_tickets([true, false, true]);
    }

    #[test]
    fn a_turn_sees_what_the_one_before_has_written() {
        loom::model(|| {
            let queue = Arc::new(CallQueue::default());
            let written = Arc::new(loom::cell::UnsafeCell::new(0));
            let first = QueueTicket::take(Arc::clone(&queue));
            let (second, reader) = (QueueTicket::take(Arc::clone(&queue)), Arc::clone(&written));
            let thread = thread::spawn(move || {
                second.wait_turn(None);
                // Loom checks that the accesses are ordered.
                reader.with(|_| ());
            });
            first.wait_turn(None);
            written.with_mut(|_| ());
            drop(first);
            thread.join().unwrap();
        });
    }
}
