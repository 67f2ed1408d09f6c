//! The communicators in whose calls this thread is. More than one if a signal handler, an interrupt check or
//! a logger makes a call during another one.
//!
//! Owns this list, so that a call which would wait for the one that it interrupted is refused.

use super::call_queue::CallQueue;
use crate::error::{Error, Result};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{Ordering, compiler_fence};

/// How many calls a thread may make in each other.
const DEPTH: usize = 8;

struct ThreadCalls {
    depth: Cell<usize>,
    /// Addresses of the queues of the calls, the outermost first.
    queues: [Cell<usize>; DEPTH],
}

thread_local! {
    static CALLS: ThreadCalls = const { ThreadCalls { depth: Cell::new(0), queues: [const { Cell::new(0) }; DEPTH] } };
}

/// A call of this thread. Dropped at its end.
pub(super) struct ThreadCall {
    /// Whether there is a list: not while the thread is being torn down.
    is_listed: bool,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl ThreadCall {
    /// Begins a call that waits for its turn in `queue`.
    ///
    /// # Errors
    /// `InvalidArgument` if this thread is in a call of that queue, or in [`DEPTH`] calls.
    #[inline]
    pub(super) fn begin(queue: &CallQueue) -> Result<Self> {
        let queue = std::ptr::from_ref(queue).addr();
        let begun = CALLS.try_with(|calls| {
            let depth = calls.depth.get();
            if depth >= DEPTH {
                return Err(too_deep());
            }
            if calls.queues[..depth].iter().any(|other| other.get() == queue) {
                return Err(nested());
            }
            calls.depth.set(depth + 1);
            // A signal handler that runs between the two may use the next place only.
            compiler_fence(Ordering::SeqCst);
            calls.queues[depth].set(queue);
            Ok(())
        });
        let is_listed = begun.is_ok();
        begun.unwrap_or(Ok(())).map(|()| Self { is_listed, _thread: PhantomData })
    }

    /// Whether this thread is in a call of any communicator.
    pub(super) fn is_in_any() -> bool {
        CALLS.try_with(|calls| calls.depth.get() > 0).unwrap_or(false)
    }

    /// Whether this thread is in a call of `queue`.
    pub(super) fn is_in(queue: &CallQueue) -> bool {
        let queue = std::ptr::from_ref(queue).addr();
        let is_in = |calls: &ThreadCalls| {
            let queues = calls.queues.iter().take(calls.depth.get());
            queues.into_iter().any(|other| other.get() == queue)
        };
        CALLS.try_with(is_in).unwrap_or(false)
    }
}

impl Drop for ThreadCall {
    #[inline]
    fn drop(&mut self) {
        if self.is_listed {
            let _ = CALLS.try_with(|calls| {
                let depth = calls.depth.get() - 1;
                calls.depth.set(depth);
                // A signal handler that runs between the two ends its calls before this thread goes on.
                compiler_fence(Ordering::SeqCst);
                // Else a handler during the next `begin` would find the queue of a call that is over.
                calls.queues[depth].set(0);
            });
        }
    }
}

/// The error of a call within another one.
#[cold]
pub(super) fn nested() -> Error {
    Error::invalid_argument(
        "this thread is in a call of the same communicator: a signal handler, an interrupt check or a logger cannot make a call that waits \
         for the one that it interrupted: set a flag there, and make the call after the other one",
    )
}

/// The error of a call within too many others.
#[cold]
fn too_deep() -> Error {
    Error::invalid_argument(format!(
        "this thread is in {DEPTH} calls already, each made by a signal handler, an interrupt check or a logger during another one: set a \
         flag there, and make the call after the other ones"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_within_one_of_the_same_queue_is_refused() {
        let (first, second) = (CallQueue::default(), CallQueue::default());
        let outer = ThreadCall::begin(&first).expect("no other call");
        let inner = ThreadCall::begin(&second).expect("another queue");
        for queue in [&first, &second] {
            assert!(ThreadCall::is_in(queue));
            let refused = ThreadCall::begin(queue).map(drop).expect_err("nested");
            assert!(refused.message().contains("set a flag"), "{refused}");
        }
        std::thread::scope(|scope| {
            scope.spawn(|| ThreadCall::begin(&first).map(drop).expect("another thread"));
        });
        drop(inner);
        assert!(!ThreadCall::is_in(&second) && ThreadCall::is_in(&first));
        drop(outer);
        drop(ThreadCall::begin(&first).expect("the calls are over"));
    }

    #[test]
    fn a_call_that_is_over_leaves_no_entry() {
        let queue = CallQueue::default();
        drop(ThreadCall::begin(&queue).expect("no other call"));
        assert_eq!(CALLS.with(|calls| calls.queues.each_ref().map(Cell::get)), [0; DEPTH]);
    }

    #[test]
    fn calls_are_nested_only_so_deep() {
        let queues: [CallQueue; DEPTH + 1] = std::array::from_fn(|_| CallQueue::default());
        let calls: Vec<_> = queues.iter().map_while(|queue| ThreadCall::begin(queue).ok()).collect();
        assert_eq!(calls.len(), DEPTH);
        let refused = ThreadCall::begin(&queues[DEPTH]).map(drop).expect_err("too deep");
        assert!(refused.message().starts_with("this thread is in 8 calls already"), "{refused}");
        drop(calls);
        assert!(!ThreadCall::is_in(&queues[0]));
    }
}
