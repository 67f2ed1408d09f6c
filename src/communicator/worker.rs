//! The queue of a communicator's asynchronous calls.
//!
//! Owns which calls wait for a worker, and whether one works on them.

use super::runner::{CallRunner, QueuedCall};
use super::worker_pool::WorkerPool;
use crate::error::Result;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Runs the calls of one communicator, in the order in which they were submitted.
pub(super) struct Worker {
    pool: Arc<WorkerPool>,
    queue: Arc<WorkerQueue>,
}

#[derive(Default)]
struct WorkerQueue {
    state: Mutex<WorkerState>,
    changed: Condvar,
}

#[derive(Default)]
struct WorkerState {
    calls: VecDeque<QueuedCall>,
    /// Whether a thread runs them, or is about to.
    works: bool,
}

impl Worker {
    pub(super) fn new() -> Self {
        Self { pool: WorkerPool::of_this_process(), queue: Arc::default() }
    }

    /// Runs `call` on a thread of the pool, after those that were submitted before.
    ///
    /// # Errors
    /// `System` if no thread can be started.
    pub(super) fn submit(&self, runner: &Arc<CallRunner>, call: QueuedCall) -> Result<()> {
        let mut state = self.queue.lock();
        state.calls.push_back(call);
        if state.works {
            return Ok(());
        }
        state.works = true;
        drop(state);
        let turn = WorkerTurn { queue: Arc::clone(&self.queue), runner: Some(Arc::clone(runner)) };
        self.pool.run(Box::new(move || turn.run()))
    }

    /// Whether all submitted calls are over.
    pub(super) fn is_idle(&self) -> bool {
        !self.queue.lock().works
    }

    /// Waits until all submitted calls are over.
    pub(super) fn wait_idle(&self) {
        let waited = self.queue.changed.wait_while(self.queue.lock(), |state| state.works);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Leaves everything as it is, in a forked child, where the parent's threads may have held any lock.
    pub(super) fn leak(&self) {
        std::mem::forget((Arc::clone(&self.pool), Arc::clone(&self.queue)));
    }
}

impl WorkerQueue {
    fn lock(&self) -> MutexGuard<'_, WorkerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's work on a queue. Dropping it before its end, or without having run it, ends the calls that are
/// left with an error.
struct WorkerTurn {
    queue: Arc<WorkerQueue>,
    /// Released before others see that the work is over, so that the thread that waits for that has the last
    /// reference.
    runner: Option<Arc<CallRunner>>,
}

impl WorkerTurn {
    /// Runs calls until there are no more.
    fn run(mut self) {
        while let Some((call, runner)) = self.next() {
            runner.run_queued(call);
        }
    }

    /// The next call; `None` ends the work.
    fn next(&mut self) -> Option<(QueuedCall, &CallRunner)> {
        let mut state = self.queue.lock();
        let Some(call) = state.calls.pop_front() else {
            self.runner = None;
            state.works = false;
            self.queue.changed.notify_all();
            return None;
        };
        Some((call, self.runner.as_deref()?))
    }
}

impl Drop for WorkerTurn {
    fn drop(&mut self) {
        if self.runner.take().is_some() {
            let mut state = self.queue.lock();
            state.calls.clear();
            state.works = false;
            self.queue.changed.notify_all();
        }
    }
}
