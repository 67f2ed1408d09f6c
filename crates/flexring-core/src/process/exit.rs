//! What the library does when the process exits.
//!
//! Owns the handler of `exit`.

use std::sync::OnceLock;

static HANDLER: OnceLock<fn()> = OnceLock::new();

/// Lets `exit` call `handler`, before the destructors of objects that exist now. Only the first handler
/// counts. If the C library has no room for it, the process exits without.
pub fn at_exit(handler: fn()) {
    HANDLER.get_or_init(|| {
        // SAFETY: `run` is a function of this library, and the C library forgets it when this library is
        // unloaded.
        unsafe { libc::atexit(run) };
        handler
    });
}

extern "C" fn run() {
    if let Some(handler) = HANDLER.get() {
        handler();
    }
}
