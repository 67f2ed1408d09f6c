//! RemotePrefault: when a rank allocates a buffer in its arena, its neighbours make the pages ready for reading at
//! once, in a thread of their own, so that the first call that reads the buffer is as fast as the hundredth.
//!
//! All of this may come late or not at all: a page that is not ready is faulted in when it is read.

use super::{ArenaRef, ControlPage, Neighbours};
use crate::error::{Error, Result};
use crate::memory::{Arena, PeerArena};
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Ranges that the control remembers; whoever is further behind has missed some, which costs page faults only.
const RANGES: usize = 16;

/// Smaller buffers are faulted in about as fast as they are announced.
const MIN_BYTES: usize = 256 << 10;

/// The part of a control on which a rank announces what it has allocated.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Prefault {
    count: AtomicU64,
    /// Offset and length.
    ranges: [[AtomicU64; 2]; RANGES],
}

impl Prefault {
    fn add(&self, offset: usize, len: usize) {
        let count = self.count.load(Ordering::Relaxed);
        let [at, size] = &self.ranges[count as usize % RANGES];
        at.store(offset as u64, Ordering::Relaxed);
        size.store(len as u64, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Release);
    }

    /// The ranges announced since `seen`, which is brought up to date. A range that is overwritten while it
    /// is read comes out wrong, which the arena's bounds make harmless.
    fn since(&self, seen: &mut u64) -> impl Iterator<Item = (usize, usize)> {
        let count = self.count.load(Ordering::Acquire);
        let from = (*seen).clamp(count.saturating_sub(RANGES as u64), count);
        *seen = count;
        (from..count).map(|number| {
            let [at, size] = &self.ranges[number as usize % RANGES];
            (at.load(Ordering::Relaxed) as usize, size.load(Ordering::Relaxed) as usize)
        })
    }
}

/// A rank's side of both: it announces what it allocates, and a thread follows what its neighbours announce.
pub struct RemotePrefault {
    control: ArenaRef<ControlPage>,
    neighbours: Vec<WakeFd>,
    wake: WakeFd,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RemotePrefault {
    /// Starts to follow the neighbours.
    ///
    /// # Errors
    /// `System` if there is no thread or descriptor to be had.
    pub fn new(arena: &Arc<Arena>, neighbours: &Neighbours) -> Result<Self> {
        let wake = neighbours.prefault.try_clone()?;
        let over = Arc::new(AtomicBool::new(false));
        let mut followed = Vec::new();
        for other in &neighbours.others {
            let control =
                ArenaRef::new(other.arena.piece(0, size_of::<ControlPage>()), Arc::clone(&other.arena) as _)?;
            followed.push((control, Arc::clone(&other.arena), 0));
        }
        let follower = Follower { wake: wake.try_clone()?, over: Arc::clone(&over), followed };
        let thread = std::thread::Builder::new()
            .name("flexring-prefault".to_owned())
            .spawn(move || follower.run())
            .map_err(|cause| Error::system("cannot start a thread", cause))?;
        Ok(Self {
            control: ArenaRef::new(arena.piece(0, size_of::<ControlPage>()), Arc::clone(arena) as _)?,
            neighbours: neighbours
                .others
                .iter()
                .map(|other| other.prefault.try_clone())
                .collect::<Result<_>>()?,
            wake,
            over,
            thread: Some(thread),
        })
    }

    /// Tells the neighbours of `len` bytes at `offset` in this rank's arena.
    pub fn announce(&self, offset: usize, len: usize) {
        if len < MIN_BYTES {
            return;
        }
        self.control.prefault.add(offset, len);
        self.neighbours.iter().for_each(WakeFd::notify);
    }
}

impl Drop for RemotePrefault {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.wake.notify();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that follows the neighbours' allocations panicked");
        }
    }
}

/// What the thread has.
struct Follower {
    wake: WakeFd,
    over: Arc<AtomicBool>,
    /// Each neighbour's control and arena, and how many prefault were seen.
    followed: Vec<(ArenaRef<ControlPage>, Arc<PeerArena>, u64)>,
}

impl Follower {
    fn run(mut self) {
        while !self.over.load(Ordering::Acquire) {
            for (control, arena, seen) in &mut self.followed {
                for (offset, len) in control.prefault.since(seen) {
                    arena.make_ready(offset, len);
                }
            }
            let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
            // Whatever ends the wait, everything is looked at again.
            let _ = poll(&mut fds, None);
            self.wake.drain();
        }
    }
}
