//! The word that saves wake-ups: a rank sets it before it sleeps, and neighbours notify it only while it is
//! set.
//!
//! Owns the memory ordering between the sleeper and its wakers.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Whether a rank must be woken, and by which of its process's eventfds: 0, or one more than the index of the
/// eventfd. The sleeper sets the word and then polls its queues once more; a waker publishes and then reads
/// the word. The two fences ensure that at least one of them sees the other's store.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct NeedWakeup(AtomicU32);

impl NeedWakeup {
    #[cfg(all(test, loom))]
    pub(super) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Called by the owner before it sleeps on the eventfd with this index. It must poll its queues once more
    /// between this and the sleep.
    pub(super) fn set(&self, eventfd: usize) {
        self.0.store(eventfd as u32 + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Called by the owner when it is awake.
    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The index of the eventfd by which the caller must wake the owner for what the caller has published
    /// before; `None` if the owner is awake.
    pub(super) fn eventfd(&self) -> Option<usize> {
        fence(Ordering::SeqCst);
        (self.0.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Wakes the owner, whose eventfds these are, for what the caller has published before, unless it is
    /// awake.
    #[cfg(not(loom))]
    pub(super) fn wake(&self, eventfds: &[crate::wake::WakeFd]) {
        if let Some(eventfd) = self.eventfd().and_then(|index| eventfds.get(index)) {
            eventfd.notify();
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::super::spsc_queue::tests::pair;
    use super::NeedWakeup;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn a_sleeper_sees_the_entry_or_is_woken() {
        loom::model(|| {
            let (mut producer, consumer) = pair();
            let need_wakeup = Arc::new(NeedWakeup::new());
            let sleeper = Arc::clone(&need_wakeup);
            let thread = thread::spawn(move || {
                producer.write([1; 8]);
                need_wakeup.eventfd()
            });
            sleeper.set(2);
            let seen = consumer.peek().unwrap().is_some();
            let woken = thread.join().unwrap();
            assert!(seen || woken == Some(2), "the sleeper would sleep forever");
        });
    }
}
