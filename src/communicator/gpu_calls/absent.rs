//! The interface of `kernel_calls.rs` in builds without the feature `cuda`.

use crate::communicator::Communicator;
use crate::communicator::checked_call::CheckedCall;
use crate::communicator::gpu_state::{KernelOffer, RelayedCall};
use crate::communicator::request::CallOutcome;
use crate::communicator::runner::CallRunner;
use crate::device::CallerStream;
use crate::error::Result;
use crate::memory::Piece;
use std::sync::Arc;

#[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "the interface of kernel_calls.rs")]
impl CallRunner {
    pub(in crate::communicator) fn offer_kernels(&self) -> Option<KernelOffer> {
        None
    }

    pub(in crate::communicator) fn are_kernels_connected(&self) -> bool {
        true
    }

    pub(in crate::communicator) fn connect_kernels(self: &Arc<Self>) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn await_kernels(&self) {}

    pub(in crate::communicator) fn run_relayed(&self, relayed: RelayedCall, _kernels: u64) -> Result<()> {
        match relayed {}
    }

    pub(in crate::communicator) fn notice_kernel_failure(&self) {}

    pub(in crate::communicator) fn finish_kernel_calls(&self) {}

    pub(in crate::communicator) fn offer_to_kernels(&self, _piece: Piece) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn take_from_kernels(&self, _piece: Piece) -> Result<()> {
        Ok(())
    }
}

#[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "the interface of kernel_calls.rs")]
impl Communicator {
    pub(in crate::communicator) fn run_by_kernel(
        &self,
        _checked: &CheckedCall,
        _stream: CallerStream,
        _other: Option<CallerStream>,
        _awaited: bool,
    ) -> Result<Option<Arc<CallOutcome>>> {
        Ok(None)
    }
}
