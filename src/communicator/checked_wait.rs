//! Waiting on a condition variable, with a check every so often.
//!
//! Owns that loop. Must not know what is waited for, nor what is checked: a broken GPU reports nothing, so
//! threads that wait for its calls ask meanwhile.

#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How often a thread that waits for calls on a GPU checks that the GPU works.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Waits on `changed` until `is_over`, and calls `check`, if it is given, every [`CHECK_INTERVAL`] without
/// the lock.
pub(super) fn wait_until<'a, T>(
    lock: &'a Mutex<T>,
    changed: &Condvar,
    mut state: MutexGuard<'a, T>,
    is_over: impl Fn(&T) -> bool,
    check: Option<&dyn Fn()>,
) -> MutexGuard<'a, T> {
    while !is_over(&state) {
        let Some(check) = check else {
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let (woken, wait) =
            changed.wait_timeout(state, CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        if wait.timed_out() && !is_over(&state) {
            drop(state);
            check();
            state = lock.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }
    state
}
