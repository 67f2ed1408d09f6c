//! The wait of a thread for the stream to reach a call.
//!
//! Owns how long it spins and sleeps. Calls no function of the driver, because a driver call may wait for the
//! kernel. Must not know what says that a kernel has started.

use crate::error::{Error, Result};
use crate::fault::Fault;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The shortest and the longest sleep.
const NAPS: [Duration; 2] = [Duration::from_micros(5), Duration::from_micros(50)];
/// How long a communicator that is dropped waits for its streams to reach a call.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until the kernel of a call `has_started`: spins for `spin`, then sleeps. `leaving`: the communicator
/// is being dropped, so the wait ends 5 seconds later.
///
/// # Errors
/// The fault, if it is raised meanwhile; `Aborted` if the communicator is dropped and the stream does not
/// reach the call.
pub(crate) fn wait_started(
    has_started: impl Fn() -> bool,
    fault: &Fault,
    spin: Duration,
    leaving: &AtomicBool,
) -> Result<()> {
    let start = Instant::now();
    let mut leaving_since = None;
    let mut nap = NAPS[0];
    while !has_started() {
        fault.check()?;
        if leaving.load(Ordering::Acquire) {
            let since = *leaving_since.get_or_insert_with(Instant::now);
            if since.elapsed() > LEAVE_TIMEOUT {
                return Err(Error::aborted(format!(
                    "the communicator was dropped, and {LEAVE_TIMEOUT:?} later the stream has not reached a call: \
                     synchronize the stream first"
                )));
            }
        }
        if start.elapsed() < spin {
            std::thread::yield_now();
        } else {
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAPS[1]);
        }
    }
    Ok(())
}
