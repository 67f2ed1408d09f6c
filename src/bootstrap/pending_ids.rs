//! Unique ids of this process that no rank has used yet.
//!
//! Owns the one thread that listens for all of them, and their expiry. The first connection to an id starts
//! its coordinator.

use super::coordinator_ports::CoordinatorControl;
use crate::error::{Error, Result};
use crate::process::{ClosedInChild, PerProcess, spawn};
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// How many ids a process recognises as its own. If it forgets one, its rank 0 starts a coordinator that
/// stays unused.
const REMEMBERED: usize = 1024;

/// Starts the coordinator of an id at its listeners.
pub(super) type StartCoordinator = Box<dyn FnOnce(Vec<TcpListener>) + Send>;

/// An id that no rank has used.
struct PendingId {
    control: Arc<CoordinatorControl>,
    closed_in_child: Vec<ClosedInChild>,
    listeners: Arc<Vec<TcpListener>>,
    expires: Instant,
    start: StartCoordinator,
}

/// The ids of one process.
#[derive(Default)]
struct PendingIds {
    ids: Vec<PendingId>,
    /// Wakes the thread. `None` if it does not run.
    wake: Option<Arc<WakeFd>>,
    /// The job numbers of the ids that this process has created, and their coordinators, the newest last.
    created: VecDeque<(u128, Weak<CoordinatorControl>)>,
}

/// A forked child has neither the ids nor the thread of its parent, which may hold the lock during the fork.
static IDS: PerProcess<Mutex<PendingIds>> = PerProcess::new();

fn lock() -> MutexGuard<'static, PendingIds> {
    IDS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens for the ranks of the id with this job number until `expires`, and calls `start` for the first
/// connection.
///
/// # Errors
/// `System` if a thread or descriptor is unavailable.
pub(super) fn keep(
    job: u128,
    control: Arc<CoordinatorControl>,
    listeners: Vec<TcpListener>,
    expires: Instant,
    start: StartCoordinator,
) -> Result<()> {
    let mut state = lock();
    if state.created.len() == REMEMBERED {
        state.created.pop_front();
    }
    state.created.push_back((job, Arc::downgrade(&control)));
    let closed_in_child = listeners.iter().map(|listener| ClosedInChild::new(listener.as_fd())).collect();
    state.ids.push(PendingId { control, closed_in_child, listeners: Arc::new(listeners), expires, start });
    if let Some(wake) = &state.wake {
        wake.notify();
        return Ok(());
    }
    let started = WakeFd::new().map(Arc::new).and_then(|wake| {
        let thread = Arc::clone(&wake);
        let builder = std::thread::Builder::new().name("flexring-ids".to_owned());
        spawn(builder, move || run(&thread)).map_err(|cause| {
            Error::io("cannot start the thread that listens for unused unique ids", cause)
        })?;
        Ok(wake)
    });
    match started {
        Ok(wake) => {
            state.wake = Some(wake);
            Ok(())
        }
        Err(error) => {
            state.ids.pop();
            Err(error)
        }
    }
}

/// The coordinator of the id with this job number, if this process created it. It may have ended.
pub(super) fn created_here(job: u128) -> Option<Weak<CoordinatorControl>> {
    lock().created.iter().find(|(known, _)| *known == job).map(|(_, control)| Weak::clone(control))
}

/// The body of the thread. It ends when there is no unused id.
fn run(wake: &WakeFd) {
    loop {
        let used = {
            // Poll without the lock, on descriptors that this thread keeps open.
            let state = lock();
            let waiting: Vec<(Arc<CoordinatorControl>, Arc<Vec<TcpListener>>)> =
                state.ids.iter().map(|id| (Arc::clone(&id.control), Arc::clone(&id.listeners))).collect();
            let expires = state.ids.iter().map(|id| id.expires).min();
            drop(state);
            sleep(wake, &waiting, expires)
        };
        let mut state = lock();
        let now = Instant::now();
        let mut start = Vec::new();
        for id in std::mem::take(&mut state.ids) {
            if id.control.is_abandoned() || now >= id.expires {
                log::debug!("a unique id that no rank has used was dropped");
            } else if used.iter().any(|control| Arc::ptr_eq(control, &id.control)) {
                start.push(id);
            } else {
                state.ids.push(id);
            }
        }
        let is_over = state.ids.is_empty();
        if is_over {
            state.wake = None;
        }
        drop(state);
        for PendingId { listeners, start, closed_in_child, .. } in start {
            drop(closed_in_child);
            if let Some(listeners) = Arc::into_inner(listeners) {
                start(listeners);
            }
        }
        if is_over {
            return;
        }
    }
}

/// Sleeps until an event. Returns the ids to which there is a connection.
fn sleep(
    wake: &WakeFd,
    waiting: &[(Arc<CoordinatorControl>, Arc<Vec<TcpListener>>)],
    expires: Option<Instant>,
) -> Vec<Arc<CoordinatorControl>> {
    let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
    fds.extend(waiting.iter().map(|(control, _)| PollFd::new(control.wake(), PollFlags::IN)));
    let controls = fds.len();
    for (_, listeners) in waiting {
        fds.extend(listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
    }
    let timeout =
        expires.and_then(|at| Timespec::try_from(at.saturating_duration_since(Instant::now())).ok());
    // An interrupted wait ends early, and the next one makes up for it.
    if poll(&mut fds, timeout.as_ref()).is_err() {
        return Vec::new();
    }
    wake.drain();
    let mut events = fds[controls..].iter();
    let mut used = Vec::new();
    for (control, listeners) in waiting {
        let ready = events.by_ref().take(listeners.len()).filter(|fd| !fd.revents().is_empty()).count();
        if ready > 0 {
            used.push(Arc::clone(control));
        }
    }
    used
}
