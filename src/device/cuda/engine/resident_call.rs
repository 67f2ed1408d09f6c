//! One call, as the thread sees it that runs it while the call's kernel is resident.
//!
//! Owns the wait for the kernel's start, and its end. Calls no function of the driver, because a driver call
//! may wait for the kernel. Must not know how the kernel was launched.

use super::control::Control;
use super::kernel_kind::KernelKind;
use crate::error::{Error, Result};
use crate::fault::Fault;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The shortest and the longest sleep of a thread that waits for the stream.
const NAPS: [Duration; 2] = [Duration::from_micros(5), Duration::from_micros(50)];
/// How long a communicator that is dropped waits for its streams to reach a call.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A call whose kernel is in a stream, or will be. Dropping it before [`finish`](Self::finish) aborts all
/// kernels of the communicator.
pub(crate) struct ResidentCall {
    control: Arc<Control>,
    number: u64,
    kind: KernelKind,
    /// Whether the kernel copies the result out after the call has finished.
    staged: bool,
    finished: bool,
}

impl ResidentCall {
    pub(super) fn new(control: Arc<Control>, number: u64, kind: KernelKind, staged: bool) -> Self {
        Self { control, number, kind, staged, finished: false }
    }

    /// Waits until the stream has reached the call, and its kernel has started: spins for `spin`, then
    /// sleeps. `leaving`: the communicator is being dropped, so the wait ends 5 seconds later.
    ///
    /// # Errors
    /// The fault, if it is raised meanwhile; `Aborted` if the communicator is dropped and the stream does not
    /// reach the call.
    pub(crate) fn wait_started(&self, fault: &Fault, spin: Duration, leaving: &AtomicBool) -> Result<()> {
        let start = Instant::now();
        let mut leaving_since = None;
        let mut nap = NAPS[0];
        while !self.control.has_started(self.number) {
            fault.check()?;
            if leaving.load(Ordering::Acquire) {
                let since = *leaving_since.get_or_insert_with(Instant::now);
                if since.elapsed() > LEAVE_TIMEOUT {
                    let message = format!(
                        "the communicator was dropped, and {LEAVE_TIMEOUT:?} later the stream has not reached call {}: \
                         synchronize the stream first",
                        self.number
                    );
                    return Err(Error::aborted(message));
                }
            }
            if start.elapsed() < spin {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (nap * 2).min(NAPS[1]);
            }
        }
        self.control.set_running(Some(self.kind));
        Ok(())
    }

    /// Ends the kernel, so that the stream continues. All jobs of the call are complete.
    ///
    /// # Errors
    /// `Timeout` if the kernel of a small call has not copied the result to the caller's vector within
    /// `timeout`.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<()> {
        self.finished = true;
        self.control.finish(self.number);
        // Threads that wait for the call read its result as soon as it is over.
        if self.staged && !self.control.wait_finished(timeout) {
            return Err(Error::timeout(format!(
                "waited {timeout:?} for the GPU, whose kernel has not copied the result to the vector (fix: look at nvidia-smi and the kernel's log)"
            )));
        }
        Ok(())
    }
}

impl Drop for ResidentCall {
    fn drop(&mut self) {
        if !self.finished {
            self.control.abort();
            self.control.wait_ended();
        }
    }
}
