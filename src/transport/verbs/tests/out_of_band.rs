//! Messages between the ranks of a test, in memory.

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::verbs::OutOfBand;
use crate::wake::WakeFd;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The unread messages of one rank.
struct Inbox {
    messages: Mutex<VecDeque<(Rank, Vec<u8>)>>,
    wake: WakeFd,
}

/// One rank's end.
#[derive(Clone)]
pub(in crate::transport::verbs) struct MemoryMessages {
    me: Rank,
    inboxes: Arc<[Inbox]>,
    is_closed: Arc<AtomicBool>,
}

impl MemoryMessages {
    /// The ends of all ranks.
    pub(in crate::transport::verbs) fn world(ranks: usize) -> Vec<Self> {
        let inbox = |_| Inbox { messages: Mutex::default(), wake: WakeFd::new().expect("a descriptor") };
        let inboxes: Arc<[Inbox]> = (0..ranks).map(inbox).collect();
        let is_closed = Arc::new(AtomicBool::new(false));
        let end = |me| Self { me, inboxes: Arc::clone(&inboxes), is_closed: Arc::clone(&is_closed) };
        (0..ranks).map(end).collect()
    }

    /// Carries no message any more, as without the coordinator's process.
    pub(in crate::transport::verbs) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Passes a message on, as if `from` had sent it.
    pub(in crate::transport::verbs) fn deliver(&self, from: Rank, to: Rank, message: Vec<u8>) {
        let Inbox { messages, wake } = &self.inboxes[to];
        messages.lock().expect("no test panics while holding the lock").push_back((from, message));
        wake.notify();
    }
}

impl OutOfBand for MemoryMessages {
    fn send(&self, messages: &[(Rank, Vec<u8>)]) -> Result<()> {
        messages.iter().for_each(|(to, message)| self.deliver(self.me, *to, message.clone()));
        Ok(())
    }

    fn receive(&self) -> Option<(Rank, Vec<u8>)> {
        let Inbox { messages, wake } = &self.inboxes[self.me];
        let mut messages = messages.lock().expect("no test panics while holding the lock");
        let message = messages.pop_front();
        if messages.is_empty() {
            wake.drain();
        }
        message
    }

    fn check(&self) -> Result<()> {
        let is_closed = self.is_closed.load(Ordering::Relaxed);
        if is_closed { Err(Error::peer_lost("the coordinator's process has left")) } else { Ok(()) }
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inboxes[self.me].wake.as_fd()
    }
}
