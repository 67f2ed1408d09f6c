//! The library's own threads.
//!
//! Owns how work is given to them.

use crate::status::{Failure, Outcome};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SendError, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// Starts a thread.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Outcome<JoinHandle<T>> {
    let thread = flexring_core::process::spawn(Builder::new().name(name.to_owned()), body);
    thread.map_err(|cause| Failure::system(format!("cannot start a thread: {cause}")))
}

type Task = Box<dyn FnOnce() + Send>;

/// Threads that one thread of the program uses again and again. They end after it.
struct Workers {
    /// The process that the threads belong to. A forked child inherits this list but not the threads.
    process: u32,
    queues: Vec<Sender<Task>>,
}

thread_local! {
    static WORKERS: RefCell<Workers> = const { RefCell::new(Workers { process: 0, queues: Vec::new() }) };
}

/// Runs all tasks at the same time, the first on this thread, and returns their results in order.
pub(crate) fn run_together<T: Send + 'static>(
    tasks: Vec<Box<dyn FnOnce() -> Outcome<T> + Send>>,
) -> Outcome<Vec<Outcome<T>>> {
    let mut tasks = tasks.into_iter();
    let Some(first) = tasks.next() else { return Ok(Vec::new()) };
    let (results, finished) = channel();
    let others: Vec<_> = tasks.collect();
    let count = others.len() + 1;
    let queues = workers(others.len())?;
    for (at, (task, queue)) in others.into_iter().zip(queues).enumerate() {
        let results = results.clone();
        let task: Task = Box::new(move || {
            let _ = results.send((at + 1, task()));
        });
        give(at, &queue, task);
    }
    // The others use memory of the caller, so a panic here must not end this function before them.
    if let Ok(outcome) = catch_unwind(AssertUnwindSafe(first)) {
        let _ = results.send((0, outcome));
    }
    drop(results);
    // The result of a task that panicked is missing.
    let mut outcomes: Vec<Outcome<T>> = (0..count).map(|_| Err(Failure::panicked())).collect();
    for (at, outcome) in finished {
        outcomes[at] = outcome;
    }
    Ok(outcomes)
}

/// The queues of at least `count` workers of this thread.
fn workers(count: usize) -> Outcome<Vec<Sender<Task>>> {
    WORKERS.with_borrow_mut(|workers| {
        let process = std::process::id();
        if workers.process != process {
            std::mem::forget(std::mem::take(&mut workers.queues));
            workers.process = process;
        }
        while workers.queues.len() < count {
            workers.queues.push(new_worker()?);
        }
        Ok(workers.queues[..count].to_vec())
    })
}

/// Starts a worker. A task that panics does not end it.
fn new_worker() -> Outcome<Sender<Task>> {
    let (queue, tasks) = channel::<Task>();
    let run = |task: Task| {
        // The panic has been printed, and the task's result is missing.
        let _ = catch_unwind(AssertUnwindSafe(task));
    };
    spawn("flexring-group", move || tasks.into_iter().for_each(run))?;
    Ok(queue)
}

/// Gives a task to this thread's worker `at`, or to a new one if that has ended.
fn give(at: usize, queue: &Sender<Task>, task: Task) {
    let Err(SendError(task)) = queue.send(task) else { return };
    // If there can be no new one, the task is dropped, and its result is missing.
    let Ok(queue) = new_worker() else { return };
    let _ = queue.send(task);
    WORKERS.with_borrow_mut(|workers| workers.queues[at] = queue);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Barrier};

    #[test]
    fn tasks_run_at_the_same_time_and_again() {
        for _ in 0..3 {
            let barrier = Arc::new(Barrier::new(4));
            let task = |number: usize| -> Box<dyn FnOnce() -> Outcome<usize> + Send> {
                let barrier = Arc::clone(&barrier);
                Box::new(move || {
                    barrier.wait();
                    Ok(number)
                })
            };
            let outcomes = run_together((0..4).map(task).collect()).expect("threads");
            let numbers: Vec<usize> =
                outcomes.into_iter().map(|outcome| outcome.expect("no failure")).collect();
            assert_eq!(numbers, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn a_panic_is_the_result_of_its_task_and_ends_no_worker() {
        let run = |panics: bool| {
            let task = |_| -> Box<dyn FnOnce() -> Outcome<()> + Send> {
                Box::new(move || if panics { panic!("on purpose") } else { Ok(()) })
            };
            run_together((0..3).map(task).collect()).expect("threads")
        };
        assert!(run(false).iter().all(Result::is_ok));
        assert!(run(true).iter().all(Result::is_err));
        assert!(run(false).iter().all(Result::is_ok));
        // A worker that has ended is replaced.
        WORKERS.with_borrow_mut(|workers| workers.queues[1] = channel().0);
        assert!(run(false).iter().all(Result::is_ok) && run(false).iter().all(Result::is_ok));
    }
}
