//! State that each process has of its own, forked children included.
//!
//! A static mutex that a thread of the parent holds during a fork is held for ever in the child. Owns a state
//! that is new in each process.

use super::CreatorProcess;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A `T` for each process that asks for it. It is never freed, because a static lives as long as its process.
pub struct PerProcess<T> {
    current: AtomicPtr<(CreatorProcess, T)>,
}

impl<T: Default + Sync> PerProcess<T> {
    /// A place without a `T` yet.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it is for statics")]
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(null_mut()) }
    }

    /// This process's `T`, made by the first that asks for it.
    pub fn get(&'static self) -> &'static T {
        loop {
            let found = self.current.load(Ordering::Acquire);
            // SAFETY: the pointer is null or comes from `Box::into_raw` below, and is freed only if it was
            // never stored.
            if let Some((creator, state)) = unsafe { found.as_ref() }
                && creator.is_current()
            {
                return state;
            }
            let new = Box::into_raw(Box::new((CreatorProcess::current(), T::default())));
            if self.current.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: it was made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_forked_child_has_its_own_state_while_the_parents_lock_is_held() {
        static STATE: PerProcess<Mutex<u32>> = PerProcess::new();
        let mut held = STATE.get().lock().expect("no panic");
        *held = 7;
        // SAFETY: the child only calls functions that neither allocate nor lock what the parent may hold, but
        // for the one allocation of its state; this thread holds no lock of the allocator.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_new = STATE.get().try_lock().is_ok_and(|state| *state == 0);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if is_new { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: `status` may be written.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((status, *held), (0, 7));
        drop(held);
        assert_eq!(*STATE.get().lock().expect("no panic"), 7);
    }
}
