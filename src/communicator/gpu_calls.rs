//! Calls that take effect in a stream of a GPU.
//!
//! Owns how such a call is submitted. Must not know collectives, nor how a stream waits.

use super::{CallOutcome, CheckedCall, Communicator};
use crate::device::CallerStream;
use crate::error::{Error, Result};
use std::sync::Arc;

impl Communicator {
    /// Starts a checked call that takes effect in a stream: after the work that is in it already, and before
    /// work that is added later. If the call fails, the communicator fails and the next call returns the
    /// error; the stream continues in any case.
    ///
    /// # Errors
    /// `InvalidArgument` if memory or stream do not belong to the communicator's GPU; the failure of an
    /// earlier call.
    pub(crate) fn run_in_stream(&self, checked: CheckedCall, stream: CallerStream) -> Result<()> {
        self.submit_in_stream(checked, stream, None).map(drop)
    }

    /// [`run_in_stream`](Self::run_in_stream), but returns the call's outcome. If some of the memory belongs
    /// to a second stream, `other`, the call is ordered with the work of that stream, too.
    ///
    /// # Errors
    /// As for [`run_in_stream`](Self::run_in_stream).
    pub(crate) fn submit_in_stream(
        &self,
        checked: CheckedCall,
        stream: CallerStream,
        other: Option<CallerStream>,
    ) -> Result<Arc<CallOutcome>> {
        if checked.is_empty() {
            // An empty call has no memory, so it needs no stream.
            return self.submit(checked);
        }
        if checked.is_on_host() {
            let message = "a stream was given, but the vectors are the host's memory: give NULL, or memory of the stream's GPU";
            return Err(Error::invalid_argument(message));
        }
        let runner = &self.runner;
        runner.check_usable()?;
        [checked.input, checked.output].into_iter().try_for_each(|piece| runner.prepare_gpu(piece))?;
        if checked.scratch_bytes() > 0 {
            runner.gpu_state.reserve(checked.scratch_bytes())?;
        }
        self.submit_behind(checked, || runner.gpu_state.gate(stream, other).map(Some))
    }
}
