//! The threads that run asynchronous calls. All communicators of a process share them: a thread runs the
//! calls of one communicator as long as there are any, and then those of another. So there are as many
//! threads as communicators had calls in flight at the same time, however many communicators there are.
//!
//! Owns the threads.

use crate::error::{Error, Result};
use crate::process::{self, PerProcess};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// Nanoseconds by which the kernel may delay a worker's short sleeps.
const TIMER_SLACK: u64 = 1000;

/// What a thread runs.
type Job = Box<dyn FnOnce() + Send>;

/// The pool of this process.
static POOL: PerProcess<Mutex<Weak<WorkerPool>>> = PerProcess::new();

/// A handle to the threads. They end when the last one is dropped.
#[derive(Debug)]
pub(super) struct WorkerPool {
    shared: Arc<PoolShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    ending: bool,
}

impl WorkerPool {
    /// The pool of this process.
    pub(super) fn of_this_process() -> Arc<Self> {
        let mut pool = POOL.get().lock().unwrap_or_else(PoisonError::into_inner);
        pool.upgrade().unwrap_or_else(|| {
            let new = Arc::new(Self { shared: Arc::default(), threads: Mutex::default() });
            *pool = Arc::downgrade(&new);
            new
        })
    }

    /// Runs `job` on a thread that does nothing else meanwhile.
    ///
    /// # Errors
    /// `System` if no thread can be started.
    pub(super) fn run(&self, job: Job) -> Result<()> {
        let mut state = self.shared.lock();
        if state.idle > state.jobs.len() {
            state.jobs.push_back(job);
            drop(state);
            self.shared.changed.notify_one();
            return Ok(());
        }
        drop(state);
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("flexring-worker".to_owned());
        let thread = process::spawn(builder, move || shared.serve(job))
            .map_err(|cause| Error::io("cannot start a thread for asynchronous calls", cause))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of a thread.
    fn serve(&self, first: Job) {
        // Sleeps of microseconds, in which a worker waits for a GPU, would otherwise last 50 longer.
        if let Err(cause) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK)) {
            log::debug!("cannot set the timer slack: {cause}");
        }
        let mut job = first;
        loop {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                log::error!("a worker panicked");
            }
            let mut state = self.lock();
            state.idle += 1;
            let waits = |state: &mut PoolState| state.jobs.is_empty() && !state.ending;
            let waited = self.changed.wait_while(state, waits);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            let Some(next) = state.jobs.pop_front() else { return };
            job = next;
        }
    }
}

impl std::fmt::Debug for PoolShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PoolShared({} idle)", self.lock().idle)
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.changed.notify_all();
        for thread in std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    #[test]
    fn threads_are_used_again_and_as_many_as_are_needed_at_once() {
        let pool = WorkerPool { shared: Arc::default(), threads: Mutex::default() };
        let (done, ended) = channel();
        let count = |pool: &WorkerPool| pool.threads.lock().expect("no panic").len();
        for _ in 0..20 {
            let done = done.clone();
            pool.run(Box::new(move || done.send(std::thread::current().id()).expect("open")))
                .expect("a thread");
            ended.recv().expect("it runs");
            while pool.shared.lock().idle < count(&pool) {
                std::thread::yield_now();
            }
        }
        assert_eq!(count(&pool), 1);
        let barrier = Arc::new(Barrier::new(3));
        for _ in 0..3 {
            let (barrier, done) = (Arc::clone(&barrier), done.clone());
            let job = move || {
                barrier.wait();
                done.send(std::thread::current().id()).expect("open");
            };
            pool.run(Box::new(job)).expect("a thread");
        }
        let mut ids: Vec<_> = (0..3).map(|_| ended.recv().expect("all three run at once")).collect();
        ids.sort_by_key(|id| format!("{id:?}"));
        ids.dedup();
        assert_eq!((ids.len(), count(&pool)), (3, 3));
        pool.run(Box::new(|| panic!("a test wants a panic"))).expect("a thread");
        drop(pool);
        assert!(ended.try_recv().is_err());
    }
}
