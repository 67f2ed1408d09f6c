//! Communicators with unfinished calls at the exit of their process.
//!
//! Owns the list of the process's communicators, and how those with unfinished calls are ended. Must not know
//! what begins the exit: the C ABI or Python.

use super::runner::CallRunner;
use super::thread_calls::ThreadCall;
use crate::bootstrap::Abort;
use crate::process::PerProcess;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long calls that were aborted may take to end, before the process exits without them.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// How often it is checked whether calls are over.
const STEP: Duration = Duration::from_millis(1);

/// Ends an unfinished call.
const EXITS: Abort<'_> = Abort::BeforeExit("its process exits during a call");

/// The runners of this process, and some that are dropped.
static RUNNERS: PerProcess<Mutex<Vec<Weak<CallRunner>>>> = PerProcess::new();

fn runners() -> MutexGuard<'static, Vec<Weak<CallRunner>>> {
    RUNNERS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a communicator to the list.
pub(super) fn watch(runner: &Arc<CallRunner>) {
    let mut runners = runners();
    runners.retain(|runner| runner.strong_count() > 0);
    runners.push(Arc::downgrade(runner));
}

/// Aborts, on all ranks, the communicators of this process whose calls are not over within `patience`. They
/// are abandoned: dropping them has no effect, because threads that the exit ends may still use them.
pub fn abort_unfinished(patience: Duration) {
    let busy = || {
        let alive: Vec<_> = runners().iter().filter_map(Weak::upgrade).collect();
        alive.into_iter().filter(|runner| !runner.queue.is_idle()).collect::<Vec<_>>()
    };
    wait_until(patience, || busy().is_empty());
    let aborted = busy();
    for runner in &aborted {
        runner.abandoned.store(true, Ordering::Relaxed);
        if runner.fault.get().is_none() {
            runner.abort(EXITS);
        }
    }
    // A signal handler may exit during a call of this thread, which does not end then.
    let is_over = |runner: &Arc<CallRunner>| runner.queue.is_idle() || ThreadCall::is_in(&runner.queue);
    wait_until(ABORT_LIMIT, || aborted.iter().all(is_over));
    // The last reference must not be dropped here, while a thread ends the call.
    std::mem::forget(aborted);
}

fn wait_until(limit: Duration, is_over: impl Fn() -> bool) {
    let until = Instant::now() + limit;
    while !is_over() && Instant::now() < until {
        std::thread::sleep(STEP);
    }
}
