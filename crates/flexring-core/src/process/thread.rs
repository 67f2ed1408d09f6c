//! The library's own threads.
//!
//! Owns how they are started: with signals blocked, so that the kernel delivers a signal of the process to a
//! thread of the program, and in the default floating-point environment.

use super::DefaultFloatEnvironment;
use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

/// Signals that are not blocked: a thread causes them itself, and a program's handler for crashes wants to
/// see them.
const SYNCHRONOUS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT];

/// Starts a thread of the library, in which signals are blocked and the floating-point environment is the
/// default one.
///
/// # Errors
/// Those of [`Builder::spawn`]. If a limit may be the reason, the text says how to raise it.
#[allow(clippy::disallowed_methods, reason = "this is the function that all threads are started by")]
pub fn spawn<T: Send + 'static>(
    builder: Builder,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A new thread inherits the mask and the floating-point environment of the thread that starts it.
    let _blocked = BlockedSignals::new();
    let body = || {
        let _default = DefaultFloatEnvironment::enter();
        body()
    };
    builder.spawn(body).map_err(|cause| match cause.kind() {
        // The kernel gives the same number for each of its reasons.
        io::ErrorKind::WouldBlock => io::Error::other(format!(
            "{cause} (fix: raise the limit of processes and threads, `ulimit -u` or pids.max of the control group; or that of \
             address space, `ulimit -v`, if there is one)"
        )),
        _ => cause,
    })
}

/// Blocks signals in this thread until it is dropped.
struct BlockedSignals {
    /// The mask before; `None` if it could not be changed.
    before: Option<libc::sigset_t>,
}

impl BlockedSignals {
    fn new() -> Self {
        let mut before = MaybeUninit::uninit();
        let mut blocked = MaybeUninit::uninit();
        // SAFETY: sigfillset initializes `blocked` before it is read, and pthread_sigmask writes `before` if
        // it succeeds.
        unsafe {
            libc::sigfillset(blocked.as_mut_ptr());
            for signal in SYNCHRONOUS {
                libc::sigdelset(blocked.as_mut_ptr(), signal);
            }
            let status = libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr());
            Self { before: (status == 0).then(|| before.assume_init()) }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: `before` is a mask that the C library has written; the old mask is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mask of blocked signals of this thread: bit n is signal n + 1.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("the kernel shows it");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
        u64::from_str_radix(mask.trim(), 16).expect("hexadecimal digits")
    }

    #[test]
    fn threads_of_the_library_block_signals_and_those_of_the_program_do_not() {
        let before = blocked();
        let thread = spawn(Builder::new(), blocked).expect("a thread");
        let mask = thread.join().expect("no panic");
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGALRM, libc::SIGUSR1] {
            assert_eq!(mask >> (signal - 1) & 1, 1, "signal {signal} is not blocked: {mask:x}");
        }
        for signal in SYNCHRONOUS {
            assert_eq!(mask >> (signal - 1) & 1, 0, "signal {signal} is blocked: {mask:x}");
        }
        assert_eq!(blocked(), before);
    }
}
