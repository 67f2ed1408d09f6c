//! The launches of a communicator's kernels in the callers' streams.
//!
//! Owns the numbers of calls, the event behind the last kernel, by which the next one is ordered behind it, and the checks of a
//! stream. Must not know what a call does.
//!
//! Only callers' threads come here. Nothing that a running kernel depends on waits for them.

use super::instance::GpuEngine;
use super::kernel_kind::KernelKind;
use super::layout::LaunchParameters;
use super::resident_call::ResidentCall;
use crate::cuda_driver::{CAPTURE_IMPLICIT, DriverError, DriverHandle, DriverResult};
use crate::device::CallerStream;
use crate::device::cuda::objects::{StreamEvent, address};
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::CUstreamCaptureStatus;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

/// `CU_STREAM_PER_THREAD`: the handle of every thread's own default stream.
const PER_THREAD: usize = 2;

/// Launches the kernels of one communicator.
pub(crate) struct Launcher(Arc<LaunchOrder>);

/// The order of launches.
struct LaunchOrder {
    engine: Arc<GpuEngine>,
    state: Mutex<LaunchState>,
}

struct LaunchState {
    /// Recorded behind the last kernel.
    ended: StreamEvent,
    /// Recorded in a caller's second stream.
    other: StreamEvent,
    /// Where the last kernel was launched, if any was.
    last: Option<LastStream>,
}

/// The stream of the last launch.
#[derive(Clone, Copy)]
struct LastStream {
    handle: usize,
    /// A number that, unlike the handle, no later stream gets; `None` if the driver has none.
    id: Option<u64>,
}

impl LastStream {
    /// Whether both are certainly the same stream.
    fn is_same(self, other: Self) -> bool {
        self.handle == other.handle && self.id.is_some() && self.id == other.id
    }
}

/// A call that was checked and numbered, and is not launched yet. Dropping it aborts all kernels of the communicator, because
/// calls are launched in the order of their numbers.
pub(crate) struct PreparedLaunch {
    order: Arc<LaunchOrder>,
    stream: CallerStream,
    other: Option<CallerStream>,
    identity: LastStream,
    kind: KernelKind,
    parameters: LaunchParameters,
    /// The thread whose default stream is meant, if `stream` is that of a thread.
    thread: Option<ThreadId>,
    launched: bool,
}

impl Launcher {
    /// The launcher of an engine, which has only one.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn new(engine: &Arc<GpuEngine>) -> Result<Self> {
        let state = LaunchState {
            ended: StreamEvent::new(&engine.gpu)?,
            other: StreamEvent::new(&engine.gpu)?,
            last: None,
        };
        Ok(Self(Arc::new(LaunchOrder { engine: Arc::clone(engine), state: Mutex::new(state) })))
    }

    /// Fails if the GPU's context is broken. No kernel of such a context reports anything.
    ///
    /// # Errors
    /// `System`, with the driver's reason.
    pub(crate) fn check_health(&self) -> Result<()> {
        let gpu = &self.0.engine.gpu;
        let query = gpu.enter().and_then(|_entered| self.query_last());
        query.map_err(|failure| Error::from(failure).context(format_args!("{gpu:?}")))
    }

    /// Checks the streams and the health of the context, and numbers the call. It will run after the earlier work of
    /// `stream` (NULL is the default stream) and before the later work, and likewise for `other`, a second stream that a
    /// buffer of the call belongs to. `small`: the vectors of a small message, input and output, which the kernel copies to
    /// and from the engine's staging memory.
    ///
    /// # Errors
    /// `InvalidArgument` if a stream is of another context; `Unsupported` if one is being captured; `System` if the context
    /// is broken.
    pub(crate) fn prepare(
        &self,
        stream: CallerStream,
        other: Option<CallerStream>,
        kind: KernelKind,
        small: Option<(Piece, Piece)>,
    ) -> Result<(PreparedLaunch, ResidentCall)> {
        let order = &self.0;
        let engine = &order.engine;
        let other = other.filter(|other| other.handle() != stream.handle());
        let _entered = engine.gpu.enter()?;
        for stream in [Some(stream), other].into_iter().flatten() {
            self.check(stream.handle())?;
        }
        self.query_last()
            .map_err(|failure| Error::from(failure).context(format_args!("{:?}", engine.gpu)))?;
        let control = &engine.control;
        let mut parameters = LaunchParameters {
            gpu: control.state_address(),
            host: control.host_address(),
            ..LaunchParameters::default()
        };
        if let Some((input, output)) = small {
            let (staged_input, staged_output) = engine.staging(input.len(), output.len());
            let staged = |piece| {
                let address = control.staging_address(piece);
                address.ok_or_else(|| Error::internal("staging memory lies outside of control memory"))
            };
            parameters.input = address(input);
            parameters.output = address(output);
            parameters.staged_input = staged(staged_input)?;
            parameters.staged_output = staged(staged_output)?;
            parameters.input_bytes = input.len() as u64;
            parameters.output_bytes = output.len() as u64;
        }
        let identity = LastStream { handle: stream.handle() as usize, id: self.id(stream.handle()) };
        let is_of_thread = |stream: CallerStream| stream.handle() as usize == PER_THREAD;
        let of_thread = is_of_thread(stream) || other.is_some_and(is_of_thread);
        parameters.call = control.next_call();
        let launch = PreparedLaunch {
            order: Arc::clone(order),
            stream,
            other,
            identity,
            kind,
            parameters,
            thread: of_thread.then(|| std::thread::current().id()),
            launched: false,
        };
        Ok((launch, ResidentCall::new(Arc::clone(control), parameters.call, kind, small.is_some())))
    }

    /// Queries the event behind the last kernel, which fails if the context is broken. The context is current.
    fn query_last(&self) -> DriverResult {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended.is_over().map(drop)
    }

    /// Refuses streams of other contexts, and streams that are being captured.
    fn check(&self, stream: DriverHandle) -> Result<()> {
        let gpu = &self.0.engine.gpu;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
        // First, because all else fails with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED once something has broken the capture.
        // SAFETY: the creator of a `CallerStream` promised that it is live, and the out-parameter is writable.
        let capturing = match unsafe { gpu.driver().stream_capturing(stream, &raw mut status) } {
            Ok(()) => status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint,
            // The default stream, while a stream that synchronizes with it is captured.
            Err(DriverError { code: Some(CAPTURE_IMPLICIT), .. }) => true,
            Err(failure) => return Err(failure.into()),
        };
        if capturing {
            let message = "the stream is being captured into a graph, which cannot replay a call: call outside of the capture";
            return Err(Error::unsupported(message));
        }
        // SAFETY: as above.
        if !stream.is_null() && !unsafe { gpu.has_stream(stream) }? {
            let message =
                format!("the stream is not of the primary context of {gpu:?}, where the communicator works");
            return Err(Error::invalid_argument(message));
        }
        Ok(())
    }

    /// The number that the driver gives a stream, if it does.
    fn id(&self, stream: DriverHandle) -> Option<u64> {
        let mut id: c_ulonglong = 0;
        // SAFETY: as above, and the out-parameter is writable.
        unsafe { self.0.engine.gpu.driver().stream_id(stream, &raw mut id) }.ok().map(|()| id)
    }
}

impl PreparedLaunch {
    /// Launches the kernel, in the order of the calls' numbers. May be called by any thread, unless the stream is that of a
    /// thread. May wait until the stream has room, or, with `CUDA_LAUNCH_BLOCKING`, until the call has ended, so the call must
    /// be queued before.
    ///
    /// # Errors
    /// `System` if the GPU fails; `Unsupported` for the stream of another thread.
    pub(crate) fn launch(&mut self) -> Result<()> {
        if self.thread.is_some_and(|thread| thread != std::thread::current().id()) {
            let message = "calls of several ranks in one process cannot use the default stream of a thread: use another stream";
            return Err(Error::unsupported(message));
        }
        let engine = &self.order.engine;
        let gpu = &engine.gpu;
        let mut state = self.order.state.lock().unwrap_or_else(PoisonError::into_inner);
        let entered = gpu.enter()?;
        let stream = self.stream.handle();
        // SAFETY: the creators of the streams promised that they are live. The parameters name control memory, which is never
        // freed, and the caller's vectors, which are valid until the stream has passed the call.
        let launched = unsafe {
            (|| {
                if let Some(other) = self.other {
                    state.other.record_in(other.handle())?;
                    state.other.wait_in(stream)?;
                }
                if state.last.is_some_and(|last| !last.is_same(self.identity)) {
                    state.ended.wait_in(stream)?;
                }
                // Before the launch: who frees memory meanwhile waits for the kernel.
                let last = engine.control.set_launched(self.parameters.call);
                let ctas = engine.ctas(self.kind);
                let launched = engine.kernels.launch(self.kind, ctas, stream, &self.parameters);
                launched.inspect_err(|_| engine.control.undo_launched(last))
            })()
        };
        drop(entered);
        state.last = Some(self.identity);
        drop(state);
        launched.map_err(|failure| self.failed(failure))?;
        self.launched = true;
        Ok(())
    }

    /// Orders later work behind the kernel that was launched: later calls, and the work of the second stream. Not together
    /// with the launch, because streams may share a hardware queue: there this waits for the kernel, and everything that is
    /// launched later waits for this. So kernels that wait for each other must be launched before.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn record(self) -> Result<()> {
        let gpu = &self.order.engine.gpu;
        let state = self.order.state.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the creators of the streams promised that they are live.
        let recorded = unsafe {
            gpu.enter().and_then(|_entered| {
                state.ended.record_in(self.stream.handle())?;
                self.other.map_or(Ok(()), |other| state.ended.wait_in(other.handle()))
            })
        };
        recorded.map_err(|failure| self.failed(failure))
    }

    fn failed(&self, failure: DriverError) -> Error {
        let gpu = &self.order.engine.gpu;
        Error::from(failure).context(format_args!("call {} on {gpu:?}", self.parameters.call))
    }
}

impl Drop for PreparedLaunch {
    fn drop(&mut self) {
        if !self.launched {
            self.order.engine.control.abort();
        }
    }
}
