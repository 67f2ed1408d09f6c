//! The ports at which coordinators of this process listen.
//!
//! Owns what a coordinator's thread shares with the rest of its process, and the process-wide table by which
//! a rendezvous takes the listeners of an earlier one at the same address over: the earlier coordinator may
//! still answer late ranks or `flexring status`.

use crate::error::{Error, Result};
use crate::process::PerProcess;
use crate::wake::WakeFd;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// How long a coordinator's thread may take to hand its listeners over.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// What a coordinator's thread shares with the rest of its process.
#[derive(Debug)]
pub(super) struct CoordinatorControl {
    wake: WakeFd,
    abandoned: AtomicBool,
    /// Why the rendezvous must fail, if the process knows.
    failure: OnceLock<Error>,
    requests: Mutex<Requests>,
}

/// Requests for the listeners of a coordinator.
#[derive(Debug, Default)]
struct Requests {
    /// The request that the thread has not answered.
    pending: Option<Sender<Vec<TcpListener>>>,
    /// Whether the thread has ended.
    ended: bool,
}

impl CoordinatorControl {
    /// The shared state of a new coordinator.
    pub(super) fn new() -> Result<Arc<Self>> {
        let (abandoned, failure, requests) = (AtomicBool::new(false), OnceLock::new(), Mutex::default());
        Ok(Arc::new(Self { wake: WakeFd::new()?, abandoned, failure, requests }))
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) -> &WakeFd {
        &self.wake
    }

    /// Lets the thread cancel its rendezvous, unless the rendezvous is complete.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.wake.notify();
    }

    /// Whether the rendezvous must be cancelled.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Lets the thread fail its rendezvous for this reason, unless the rendezvous is complete.
    pub(super) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
        self.wake.notify();
    }

    /// Why the rendezvous must fail, if it must.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// The request for the listeners, if there is one. Dropping it refuses it.
    pub(super) fn take_request(&self) -> Option<Sender<Vec<TcpListener>>> {
        self.requests().pending.take()
    }

    /// Refuses requests from now on: the thread ends.
    pub(super) fn end_requests(&self) {
        *self.requests() = Requests { pending: None, ended: true };
    }

    /// Whether the thread has ended, or does not serve its rendezvous any more.
    pub(super) fn has_ended(&self) -> bool {
        self.requests().ended
    }

    /// Asks the thread for its listeners. `None` if it still needs them, or has ended.
    fn request_listeners(&self) -> Option<Vec<TcpListener>> {
        let (answer, listeners) = channel();
        {
            let mut requests = self.requests();
            if requests.ended {
                return None;
            }
            requests.pending = Some(answer);
        }
        self.wake.notify();
        listeners.recv_timeout(TAKEOVER_TIMEOUT).ok().filter(|listeners| !listeners.is_empty())
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A coordinator that listens at the rendezvous address of its ranks.
struct OpenPort {
    host: String,
    port: u16,
    control: Weak<CoordinatorControl>,
}

fn table() -> MutexGuard<'static, Vec<OpenPort>> {
    // A forked child does not have the threads that listen.
    static TABLE: PerProcess<Mutex<Vec<OpenPort>>> = PerProcess::new();
    TABLE.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records the coordinator that listens for ranks that look for it at `host` and `port`.
pub(super) fn register(host: &str, port: u16, control: &Arc<CoordinatorControl>) {
    let mut table = table();
    table.retain(|open| open.control.strong_count() > 0 && (&*open.host, open.port) != (host, port));
    table.push(OpenPort { host: host.to_owned(), port, control: Arc::downgrade(control) });
}

/// The listeners of an earlier coordinator of this process at the same address, which stops listening. `None`
/// if there is none, or if its rendezvous is still in progress.
pub(super) fn take_over(host: &str, port: u16) -> Option<Vec<TcpListener>> {
    let control = table()
        .iter()
        .find(|open| (&*open.host, open.port) == (host, port))
        .and_then(|open| open.control.upgrade())?;
    control.request_listeners()
}
