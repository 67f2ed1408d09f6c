//! Calls that are checked and not made. For callers in Rust that make calls of several communicators and want
//! to find mistakes before the first one; a function of the C ABI that returns success has always made its
//! call.

use flexring::Communicator;
use flexring::internal::calls::CheckedCall;
use flexring_core::error::Result;
use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`. Calls that move data, and groups, that it makes on this thread are only checked: they return
/// the error that they would return at once for their arguments, and else success, but do nothing. Requests
/// cannot be started in `body`.
pub fn only_checked<T>(body: impl FnOnce() -> T) -> T {
    /// Restores the state, also if `body` panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_ON.set(self.0);
        }
    }
    let _restore = Restore(IS_ON.replace(true));
    body()
}

/// Whether this thread's calls are only checked.
pub(super) fn is_on() -> bool {
    IS_ON.get()
}

/// Checks what a call with valid arguments needs of its communicator.
pub(super) fn check(communicator: &Communicator, call: &CheckedCall, stream: *mut c_void) -> Result<()> {
    if stream.is_null() && call.is_on_host() { Ok(()) } else { communicator.check_for_stream(call) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_made_again_after_the_body_even_if_it_panics() {
        only_checked(|| assert!(is_on()));
        assert!(!is_on());
        let panicked = std::panic::catch_unwind(|| only_checked(|| panic!("on purpose")));
        assert!(panicked.is_err() && !is_on());
    }
}
