//! One call, as the thread sees it that runs it while the call's kernel is resident.
//!
//! Owns whether the kernel has started, and its end. Calls no function of the driver, because a driver call
//! may wait for the kernel. Must not know how the kernel was launched.

use super::control::Control;
use super::kernel_kind::KernelKind;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

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

    /// Whether the stream has reached the call, and its kernel has started.
    pub(crate) fn has_started(&self) -> bool {
        let started = self.control.has_started(self.number);
        if started {
            self.control.set_running(Some(self.kind));
        }
        started
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
