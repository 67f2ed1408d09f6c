//! Prefaulting of neighbours' buffers: when a rank allocates a buffer in its arena, its neighbours map the pages for
//! reading at once, in a thread of their own, so that the first call that reads the buffer is as fast as later ones.
//!
//! Owns that thread and its wake-ups. Must not know what the buffers are for. A prefault may be late or missed: a page
//! that is not mapped yet is faulted in when it is read.

use super::arena_ref::ArenaRef;
use super::control_page::ControlPage;
use super::neighbours::Neighbours;
use crate::error::{Error, Result};
use crate::memory::{Arena, PeerArena};
use crate::process;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Smaller buffers are faulted in about as fast as they are announced.
const MIN_BYTES: usize = 256 << 10;

/// A rank's side of prefaulting: it announces its own allocations, and its thread prefaults the neighbours'.
pub struct RemotePrefault {
    control: ArenaRef<ControlPage>,
    neighbours: Vec<Arc<WakeFd>>,
    wake: Arc<WakeFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RemotePrefault {
    /// Starts the thread that prefaults what the neighbours announce. `None` on nodes of so many ranks that their page tables
    /// would take more memory than their buffers.
    ///
    /// # Errors
    /// `System` if no thread can be started.
    pub fn new(arena: &Arc<Arena>, neighbours: &Neighbours) -> Result<Option<Self>> {
        let Some(wake) = &neighbours.prefault else { return Ok(None) };
        let stop = Arc::new(AtomicBool::new(false));
        let mut followed = Vec::new();
        for other in &neighbours.others {
            let page = other.arena.piece(0, size_of::<ControlPage>())?;
            let control = ArenaRef::new(page, Arc::clone(&other.arena) as _)?;
            followed.push((control, Arc::clone(&other.arena), 0));
        }
        let worker = PrefaultThread { wake: Arc::clone(wake), stop: Arc::clone(&stop), followed };
        let builder = std::thread::Builder::new().name("flexring-prefault".to_owned());
        let thread = process::spawn(builder, move || worker.run())
            .map_err(|cause| Error::io("cannot start a thread", cause))?;
        Ok(Some(Self {
            control: ArenaRef::new(arena.piece(0, size_of::<ControlPage>()), Arc::clone(arena) as _)?,
            neighbours: neighbours.others.iter().filter_map(|other| other.prefault.clone()).collect(),
            wake: Arc::clone(wake),
            stop,
            thread: Some(thread),
        }))
    }

    /// Announces an allocation to the neighbours: `len` bytes at `offset` in this rank's arena.
    pub fn announce(&self, offset: usize, len: usize) {
        if len < MIN_BYTES {
            return;
        }
        self.control.prefault.publish(offset, len);
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
    /// Each neighbour's control page and arena, and how many of its announcements were handled.
    followed: Vec<(ArenaRef<ControlPage>, Arc<PeerArena>, u64)>,
}

impl PrefaultThread {
    fn run(mut self) {
        while !self.stop.load(Ordering::Acquire) {
            for (control, arena, seen) in &mut self.followed {
                for (offset, len) in control.prefault.since(seen) {
                    arena.prefault(offset, len);
                }
            }
            let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
            // The loop checks everything again, whatever ended the wait.
            let _ = poll(&mut fds, None);
            self.wake.drain();
        }
    }
}
