//! Interruption of waiting calls by the program, for languages with signal handlers of their own.
//!
//! A signal handler of Python, for example, runs when the interrupted thread returns to the interpreter,
//! which it does not while it waits for other ranks. So a thread may have a check function, which runs such
//! handlers. Waits of the thread call it about every 50 ms, and end if it says so.
//!
//! Owns the check functions, their interval, and the number of interrupts of each thread.

use crate::error::{Error, Result};
use std::cell::Cell;
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// A function of the program that returns another number than 0 to end the calls of the thread that calls it.
pub type InterruptCheck = extern "C" fn() -> c_int;

/// How long a thread with a check waits without calling it.
pub const INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    static CHECK: Cell<Option<InterruptCheck>> = const { Cell::new(None) };
    /// How often the check of this thread has ended a wait.
    static INTERRUPTS: Cell<u64> = const { Cell::new(0) };
}

/// Sets or removes the check of this thread.
pub fn set_check(check: Option<InterruptCheck>) {
    CHECK.set(check);
}

/// Whether this thread has a check.
pub fn has_check() -> bool {
    CHECK.get().is_some()
}

/// The longest time that this thread may sleep at once.
pub fn longest_sleep() -> Duration {
    if has_check() { INTERVAL } else { Duration::MAX }
}

/// Calls the check of this thread, if it has one.
///
/// # Errors
/// `Aborted` if the program wants the thread back.
pub fn check() -> Result<()> {
    // The check runs without a borrow, because it may set another one.
    match CHECK.get() {
        Some(check) if check() != 0 => {
            INTERRUPTS.set(INTERRUPTS.get() + 1);
            Err(interrupted())
        }
        _ => Ok(()),
    }
}

fn interrupted() -> Error {
    Error::aborted("the program interrupted this rank's call, which ends the communicator")
}

/// Detects interrupts of this thread in steps whose errors the caller ignores or repeats after. A check
/// reports each interrupt once only, so calling it again finds nothing.
#[derive(Debug)]
pub struct InterruptWatch {
    before: u64,
}

impl InterruptWatch {
    /// Starts to watch this thread.
    pub fn start() -> Self {
        Self { before: INTERRUPTS.get() }
    }

    /// Fails if a wait of this thread was interrupted since the start. Must be called by the thread that
    /// started it.
    ///
    /// # Errors
    /// `Aborted` if the program wants the thread back.
    pub fn check(&self) -> Result<()> {
        if INTERRUPTS.get() == self.before { Ok(()) } else { Err(interrupted()) }
    }
}

/// When a wait calls the check next: not in its first [`INTERVAL`], in which most waits end.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterruptTimer {
    next: Option<Instant>,
}

impl InterruptTimer {
    /// Calls the check if it is time to.
    ///
    /// # Errors
    /// As for [`check`].
    pub fn check_at(&mut self, now: Instant) -> Result<()> {
        if now < *self.next.get_or_insert(now + INTERVAL) {
            return Ok(());
        }
        self.next = Some(now + INTERVAL);
        check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    extern "C" fn goes_on() -> c_int {
        0
    }

    extern "C" fn ends() -> c_int {
        1
    }

    #[test]
    fn a_check_ends_the_waits_of_its_thread_only() {
        assert!(check().is_ok() && longest_sleep() == Duration::MAX);
        set_check(Some(goes_on));
        assert!(check().is_ok() && longest_sleep() == INTERVAL);
        set_check(Some(ends));
        assert_eq!(check().expect_err("it ends").kind(), ErrorKind::Aborted);
        std::thread::spawn(|| assert!(check().is_ok() && !has_check())).join().expect("no panic");
        set_check(None);
        assert!(check().is_ok());
    }

    #[test]
    fn a_watch_reports_an_interrupt_whose_error_was_ignored() {
        let watch = InterruptWatch::start();
        assert!(watch.check().is_ok());
        set_check(Some(ends));
        let _ = check();
        set_check(None);
        assert_eq!(watch.check().expect_err("an interrupt").kind(), ErrorKind::Aborted);
        assert!(InterruptWatch::start().check().is_ok());
    }

    #[test]
    fn a_wait_calls_the_check_after_the_first_interval() {
        set_check(Some(ends));
        let mut timer = InterruptTimer::default();
        let begin = Instant::now();
        assert!(timer.check_at(begin).is_ok());
        assert!(timer.check_at(begin + INTERVAL / 2).is_ok());
        assert!(timer.check_at(begin + INTERVAL).is_err());
        assert!(timer.check_at(begin + INTERVAL * 3 / 2).is_ok());
        assert!(timer.check_at(begin + INTERVAL * 2).is_err());
        set_check(None);
    }
}
