//! Calls that take effect in a stream of a GPU.
//!
//! Owns how such a call is submitted, and what the caller's threads do for a GPU because the worker must not
//! call its driver.
//!
//! A call is one kernel in the caller's stream. If the worker carries messages for it (of other nodes, or of
//! ranks whose GPU memory is out of reach), it gets them before the kernel is launched: a launch may block
//! until the kernel ends, and the kernel ends when these messages have arrived.

use crate::call::Collective;
use crate::communicator::call_queue::QueueTicket;
use crate::communicator::checked_wait::CHECK_INTERVAL;
use crate::communicator::launch_group::{Launch, ReadyLaunch};
use crate::communicator::registration_gate::LaunchPermit;
use crate::communicator::runner::CallRunner;
use crate::communicator::{CallOutcome, CheckedCall, Communicator};
use crate::device::CallerStream;
use crate::error::{Error, Result};
use crate::memory::MemorySpace;
use crate::process::DefaultFloatEnvironment;
use crate::rank::Rank;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

impl Communicator {
    /// Checks that a call whose arguments are valid can be made in a stream, as far as that is known without
    /// the GPU.
    ///
    /// # Errors
    /// `InvalidArgument` for the host's memory, `Unsupported` for a peer in this process; the failure of an
    /// earlier call.
    #[doc(hidden)]
    pub fn check_for_stream(&self, checked: &CheckedCall) -> Result<()> {
        self.check_process()?;
        if checked.is_empty() {
            return Ok(());
        }
        if checked.is_on_host() {
            let message = "a stream was given, but the vectors are the host's memory: give NULL, or memory of the stream's GPU";
            return Err(Error::invalid_argument(message));
        }
        let runner = &self.runner;
        runner.check_usable()?;
        let shares_process = |peer: Rank| {
            peer != runner.rank && runner.launch_member.as_ref().is_some_and(|member| member.has_rank(peer))
        };
        // Its kernel and that of the peer wait for each other. Launching both together is not enough if
        // another rank of the process takes no part: a blocking CUDA call of its thread between the two
        // launches waits for the first kernel, and holds the driver's lock, which the second launch needs. In
        // a collective all these threads wait for the launches.
        let Some(peer) = checked.peers().find(|peer| shares_process(*peer)) else { return Ok(()) };
        let message = format!(
            "rank {peer} is a thread of this process, and vectors on GPUs are sent between processes only: run each rank in a \
             process of its own, or use all_to_all_v"
        );
        Err(Error::unsupported(message))
    }

    /// Starts a checked call that takes effect in a stream: after the work that is in it already, and before
    /// work that is added later. If the call fails, the communicator fails and the next call returns the
    /// error; the stream continues in any case.
    ///
    /// # Errors
    /// `InvalidArgument` if memory or stream do not belong to the communicator's GPU; the failure of an
    /// earlier call.
    #[doc(hidden)]
    pub fn run_in_stream(&self, checked: CheckedCall, stream: CallerStream) -> Result<()> {
        self.submit_in_stream(checked, stream, None, false).map(drop)
    }

    /// [`run_in_stream`](Self::run_in_stream), but returns the call's outcome. If some of the memory belongs
    /// to a second stream, `other`, the call is ordered with the work of that stream, too. Only if it is
    /// `awaited`, the outcome is certainly that of the call; else it may be that of the launch.
    ///
    /// # Errors
    /// As for [`run_in_stream`](Self::run_in_stream).
    #[doc(hidden)]
    pub fn submit_in_stream(
        &self,
        checked: CheckedCall,
        stream: CallerStream,
        other: Option<CallerStream>,
        awaited: bool,
    ) -> Result<Arc<CallOutcome>> {
        let _default = DefaultFloatEnvironment::enter();
        self.check_for_stream(&checked)?;
        let runner = &self.runner;
        checked.pieces().try_for_each(|piece| runner.open_gpu(piece.memory()))?;
        // Where only two ranks know the length of a message, all of them run kernels: also those without
        // elements.
        let is_known_to_two = matches!(checked.collective, Collective::AllToAllV | Collective::SendRecv);
        if is_known_to_two && let Some(memory) = runner.gpu_state.known_memory() {
            runner.open_gpu(memory)?;
        }
        if let Some(outcome) = self.run_by_kernel(&checked, stream, other, awaited)? {
            return Ok(outcome);
        }
        if !checked.is_empty() {
            return Err(Error::internal("no kernel runs this call: please report this"));
        }
        // A barrier, or a call without elements, has no memory, so it needs no stream.
        self.submit(checked)
    }
}

impl CallRunner {
    /// Launches a kernel, together with those of the other ranks of this process.
    pub(in crate::communicator) fn launch(
        &self,
        mut prepared: impl Launch + 'static,
        collective: Collective,
        permit: LaunchPermit,
    ) -> Result<()> {
        // The other ranks of this process do not make the call of a group.
        let member = self.launch_member.as_ref().filter(|_| collective != Collective::SendRecv);
        let Some(member) = member else {
            permit.begin();
            prepared.launch()?;
            return Box::new(prepared).record();
        };
        let ready = ReadyLaunch { permit, launch: Box::new(prepared) };
        member.launch(ready, collective, &self.fault, self.timeout)
    }

    /// Makes sure that kernels can use this memory, before a call on it is queued.
    pub(in crate::communicator) fn open_gpu(self: &Arc<Self>, memory: MemorySpace) -> Result<()> {
        if memory == MemorySpace::Host || self.gpu_state.serves(memory)? && self.are_kernels_connected() {
            return Ok(());
        }
        // In turn, so that no earlier call waits for the executor while the driver waits for kernels of other
        // communicators.
        let ticket = QueueTicket::take(&*self.queue);
        self.wait_turn(&ticket);
        self.gpu_state.open_late(memory, &mut self.lock_state().executor)?;
        // If it fails, the next call tries again.
        self.connect_kernels()
    }

    /// Ends the communicator if the GPU's context is broken: its kernels then report nothing, and the worker
    /// must not call the driver to find out.
    pub(in crate::communicator) fn check_gpu(&self) {
        if self.gpu_state.is_open()
            && self.fault.get().is_none()
            && let Err(error) = self.gpu_state.check()
        {
            self.fail(error);
        }
    }

    /// Checks the GPU until `is_over`.
    pub(in crate::communicator) fn watch_gpu(&self, is_over: impl Fn() -> bool) {
        let mut nap = Duration::from_micros(50);
        while self.gpu_state.is_open() && !is_over() {
            std::thread::sleep(nap);
            nap = (2 * nap).min(CHECK_INTERVAL);
            self.check_gpu();
        }
    }

    /// Waits for the end of all kernels, before what they access is freed.
    pub(in crate::communicator) fn end_gpu(&self) {
        let ended = self.gpu_state.end(&self.fault);
        self.finish_kernel_calls();
        if !ended {
            self.lock_state().executor.leak();
            // A kernel may still access this region and, through it, those of neighbours, so none of them is
            // used again.
            std::mem::forget(self.region.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}
