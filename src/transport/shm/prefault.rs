//! Prefaulting of neighbours' buffers: when a rank allocates a buffer in its arena, its neighbours map the
//! pages for reading at once, in a thread of their own, so that the first call that reads the buffer is as
//! fast as later ones.
//!
//! Owns that thread and its wake-ups. A prefault may be late or missed: a page
//! that is not mapped yet is faulted in when it is read.

use super::arena_ref::ArenaRef;
use super::node_page::NodePage;
use crate::error::{Error, Result};
use crate::memory::PeerArena;
use crate::process;
use crate::wake::{WakeFd, sleep};
use rustix::event::{PollFd, PollFlags};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Smaller buffers are faulted in about as fast as they are announced.
const MIN_BYTES: usize = 256 << 10;

/// A process's side of prefaulting: it announces its own allocations, and its thread prefaults the
/// neighbours'.
pub(super) struct RemotePrefault {
    page: Arc<ArenaRef<NodePage>>,
    announcing: Mutex<()>,
    neighbours: Vec<Arc<WakeFd>>,
    wake: Arc<WakeFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A neighbour whose buffers are prefaulted.
pub(super) struct Prefaulted {
    pub page: Arc<ArenaRef<NodePage>>,
    pub arena: Arc<PeerArena>,
    /// Wakes its thread, if it has one.
    pub wake: Option<Arc<WakeFd>>,
}

impl RemotePrefault {
    /// Starts the thread that prefaults what the neighbours announce. It sleeps on `wake`; this process
    /// announces on `page`.
    ///
    /// # Errors
    /// `System` if no thread can be started.
    pub(super) fn new(
        page: Arc<ArenaRef<NodePage>>,
        wake: Arc<WakeFd>,
        neighbours: Vec<Prefaulted>,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let wakes = neighbours.iter().filter_map(|other| other.wake.clone()).collect();
        let followed = neighbours.into_iter().map(|other| (other.page, other.arena, 0)).collect();
        let worker = PrefaultThread { wake: Arc::clone(&wake), stop: Arc::clone(&stop), followed };
        let builder = std::thread::Builder::new().name("flexring-prefault".to_owned());
        let thread = process::spawn(builder, move || worker.run())
            .map_err(|cause| Error::io("cannot start a thread", cause))?;
        Ok(Self { page, announcing: Mutex::new(()), neighbours: wakes, wake, stop, thread: Some(thread) })
    }

    /// Announces an allocation to the neighbours: `len` bytes at `offset` in this rank's arena.
    pub(super) fn announce(&self, offset: usize, len: usize) {
        if len < MIN_BYTES {
            return;
        }
        // The page has one writer at a time.
        let announcing = self.announcing.lock().unwrap_or_else(PoisonError::into_inner);
        self.page.prefault.publish(offset, len);
        drop(announcing);
        self.neighbours.iter().for_each(|neighbour| neighbour.notify());
    }
}

impl Drop for RemotePrefault {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wake.notify();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that prefaults neighbours' buffers panicked");
        }
    }
}

/// The state of the thread.
struct PrefaultThread {
    wake: Arc<WakeFd>,
    stop: Arc<AtomicBool>,
    /// Each neighbour's node page and arena, and how many of its announcements were handled.
    followed: Vec<(Arc<ArenaRef<NodePage>>, Arc<PeerArena>, u64)>,
}

impl PrefaultThread {
    fn run(mut self) {
        while !self.stop.load(Ordering::Acquire) {
            for (page, arena, seen) in &mut self.followed {
                for (offset, len) in page.prefault.since(seen) {
                    arena.prefault(offset, len);
                }
            }
            let _ = sleep(&mut [PollFd::new(&self.wake, PollFlags::IN)], None);
            self.wake.drain();
        }
    }
}
