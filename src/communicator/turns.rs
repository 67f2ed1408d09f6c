//! Waiting for a call: for its turn, and for its end.
//!
//! Owns what a thread does meanwhile.

use super::PANICKED;
use super::call_queue::{CallQueue, QueueTicket};
use super::request::WaitCheck;
use super::runner::CallRunner;
use super::thread_calls::{ThreadCall, nested};
use crate::error::Result;
use crate::interrupt;

impl WaitCheck for CallRunner {
    fn is_needed(&self) -> bool {
        self.has_checks()
    }

    fn check(&self) {
        self.check_waiting();
    }

    fn abandon(&self) {
        self.abort(PANICKED);
    }

    fn check_not_nested(&self) -> Result<()> {
        if ThreadCall::is_in(&self.queue) { Err(nested()) } else { Ok(()) }
    }
}

impl CallRunner {
    /// Waits for a call's turn on a thread that is not the worker.
    pub(super) fn wait_turn(&self, ticket: &QueueTicket<&CallQueue>) {
        let check = || self.check_waiting();
        ticket.wait_turn(self.has_checks().then_some(&check));
    }

    /// Whether a thread that waits for a call must call [`check_waiting`](Self::check_waiting) every so
    /// often.
    pub(super) fn has_checks(&self) -> bool {
        self.gpu_state.is_open() || interrupt::has_check()
    }

    /// What a thread that waits for a call does every so often: it ends the communicator if the GPU is
    /// broken, or if the program wants this thread back.
    pub(super) fn check_waiting(&self) {
        self.check_gpu();
        if self.fault.get().is_none()
            && let Err(error) = interrupt::check()
        {
            self.fail(error);
        }
    }
}
