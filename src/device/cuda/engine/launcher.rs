//! The launches of a communicator's kernels in the callers' streams.
//!
//! Owns the numbers of calls, the event behind the last kernel, by which the next one is ordered behind it,
//! and the checks of a stream. Must not know what a call does.
//!
//! Only callers' threads come here. Nothing that a running kernel depends on waits for them.

use super::instance::GpuEngine;
use super::kernel_kind::KernelKind;
use super::layout::LaunchParameters;
use super::resident_call::ResidentCall;
use crate::cuda_driver::{CAPTURE_IMPLICIT, DriverError, DriverHandle, DriverResult};
use crate::device::CallerStream;
use crate::device::cuda::collective::{Blocks, CollectiveMemory, CollectiveParameters};
use crate::device::cuda::objects::{CurrentContext, StreamEvent, address};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::CUstreamCaptureStatus;
use std::ffi::{c_uint, c_ulonglong};
use std::ptr::{null, null_mut};
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

/// The streams of a call: where it takes effect, and a second one that a vector of it belongs to. Both work,
/// or both are captured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallStreams {
    stream: CallerStream,
    other: Option<CallerStream>,
    /// The graph that they are captured into.
    graph: Option<DriverHandle>,
}

// SAFETY: they are handles that only the driver dereferences, and it locks.
unsafe impl Send for CallStreams {}

impl CallStreams {
    /// Whether the call is captured into a graph.
    pub(crate) fn are_captured(&self) -> bool {
        self.graph.is_some()
    }
}

/// A call that was checked and numbered, and is not launched yet. Dropping it aborts all kernels of the
/// communicator, because calls are launched in the order of their numbers.
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

    /// Makes the GPU's context current on this thread, for the calls of a launch.
    ///
    /// # Errors
    /// `System` if the context no longer exists.
    pub(crate) fn enter(&self) -> Result<CurrentContext<'_>> {
        Ok(self.0.engine.gpu.enter()?)
    }

    /// Checks the streams of a call.
    ///
    /// # Errors
    /// `InvalidArgument` if a stream is of another context; `Unsupported` if only one of two is being
    /// captured; `System` if the GPU fails.
    pub(crate) fn check_streams(
        &self,
        stream: CallerStream,
        other: Option<CallerStream>,
    ) -> Result<CallStreams> {
        let gpu = &self.0.engine.gpu;
        let other = other.filter(|other| other.handle() != stream.handle());
        let _entered = gpu.enter()?;
        let graph = self.check(stream.handle())?;
        if let Some(other) = other
            && self.check(other.handle())? != graph
        {
            return Err(Error::unsupported(
                "only one of the two streams of the vectors is being captured, or they are captured into two graphs: use one stream",
            ));
        }
        Ok(CallStreams { stream, other, graph })
    }

    /// Prepares the launch of a collective of `input` and `output`, which runs by itself. With `reports`,
    /// [`CollectiveMemory::completed`] gets to the number of the launch after it.
    pub(crate) fn prepare_collective(
        &self,
        streams: CallStreams,
        memory: &Arc<CollectiveMemory>,
        blocks: &Blocks,
        (input, output): (Piece, Piece),
        reports: bool,
    ) -> PreparedCollective {
        let mut parameters = blocks.parameters;
        [parameters.state, parameters.status] = memory.addresses();
        parameters.launch = memory.next_launch(streams.are_captured());
        parameters.input = address(input);
        parameters.output = address(output);
        let reports = reports || parameters.reports != 0;
        parameters.reports = u32::from(reports && !streams.are_captured());
        PreparedCollective {
            order: Arc::clone(&self.0),
            streams,
            memory: Arc::clone(memory),
            dtype: blocks.dtype,
            size: [blocks.ctas, blocks.threads],
            parameters,
            copied: None,
            identity: None,
        }
    }

    /// Whether all kernels that were launched have ended. Replays of graphs do not count.
    ///
    /// # Errors
    /// `System` if the context is broken.
    pub(crate) fn has_ended(&self) -> Result<bool> {
        let gpu = &self.0.engine.gpu;
        let _entered = gpu.enter()?;
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.ended.is_over()?)
    }

    /// Checks the streams and the health of the context, and numbers the call. It will run after the earlier
    /// work of `stream` (NULL is the default stream) and before the later work, and likewise for `other`, a
    /// second stream that a buffer of the call belongs to. `small`: the vectors of a small message, input and
    /// output, which the kernel copies to and from the engine's staging memory.
    ///
    /// # Errors
    /// `InvalidArgument` if a stream is of another context; `Unsupported` if one is being captured; `System`
    /// if the context is broken.
    pub(crate) fn prepare(
        &self,
        stream: CallerStream,
        other: Option<CallerStream>,
        kind: KernelKind,
        small: Option<(Piece, Piece)>,
    ) -> Result<(PreparedLaunch, ResidentCall)> {
        let order = &self.0;
        let engine = &order.engine;
        let streams = self.check_streams(stream, other)?;
        if streams.are_captured() {
            return Err(Error::unsupported(
                "the stream is being captured into a graph, which can replay only calls that kernels run: set FLEXRING_GPU for the \
                 processes of one node, and not FLEXRING_GPU_ENGINE=host, or call outside of the capture",
            ));
        }
        let CallStreams { stream, other, .. } = streams;
        let _entered = engine.gpu.enter()?;
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
        let identity = self.0.identity(stream);
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

    /// Queries the event behind the last kernel, which fails if the context is broken. The context is
    /// current.
    fn query_last(&self) -> DriverResult {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended.is_over().map(drop)
    }

    /// Refuses streams of other contexts. Returns the graph that the stream is being captured into, if it is.
    fn check(&self, stream: DriverHandle) -> Result<Option<DriverHandle>> {
        let gpu = &self.0.engine.gpu;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
        // First, because all else fails with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED once something has broken
        // the capture. SAFETY: the creator of a `CallerStream` promised that it is live, and the
        // out-parameter is writable.
        match unsafe { gpu.driver().stream_capturing(stream, &raw mut status) } {
            Ok(()) => {}
            Err(DriverError { code: Some(CAPTURE_IMPLICIT), .. }) => {
                let message = "a stream that the default stream waits for is being captured into a graph: call in another stream";
                return Err(Error::unsupported(message));
            }
            Err(failure) => return Err(failure.into()),
        }
        if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as c_uint {
            let message = "the stream is being captured into a graph, and the capture has failed already: end it, and capture again";
            return Err(Error::unsupported(message));
        }
        // SAFETY: as above.
        if !stream.is_null() && !unsafe { gpu.has_stream(stream) }? {
            let message =
                format!("the stream is not of the primary context of {gpu:?}, where the communicator works");
            return Err(Error::invalid_argument(message));
        }
        if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint {
            return Ok(None);
        }
        let (mut id, mut graph, mut dependencies, mut count) = (0, null_mut(), null(), 0);
        // SAFETY: as above.
        let info = unsafe {
            gpu.driver().stream_capture_info(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut dependencies,
                &raw mut count,
            )
        };
        info?;
        Ok(Some(graph))
    }
}

impl LaunchOrder {
    fn identity(&self, stream: CallerStream) -> LastStream {
        let mut id: c_ulonglong = 0;
        // SAFETY: the creator of a `CallerStream` promised that it is live, and the out-parameter is
        // writable.
        let known = unsafe { self.engine.gpu.driver().stream_id(stream.handle(), &raw mut id) };
        LastStream { handle: stream.handle() as usize, id: known.ok().map(|()| id) }
    }
}

impl PreparedLaunch {
    /// Launches the kernel, in the order of the calls' numbers. May be called by any thread, unless the
    /// stream is that of a thread. May wait until the stream has room, or, with `CUDA_LAUNCH_BLOCKING`, until
    /// the call has ended, so the call must be queued before.
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
        // SAFETY: the creators of the streams promised that they are live. The parameters name control
        // memory, which is never freed, and the caller's vectors, which are valid until the stream has passed
        // the call.
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

    /// Orders later work behind the kernel that was launched: later calls, and the work of the second stream.
    /// Not together with the launch, because streams may share a hardware queue: there this waits for the
    /// kernel, and everything that is launched later waits for this. So kernels that wait for each other must
    /// be launched before.
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

/// A collective that was checked and numbered, and is not launched yet.
pub(crate) struct PreparedCollective {
    order: Arc<LaunchOrder>,
    streams: CallStreams,
    memory: Arc<CollectiveMemory>,
    dtype: DType,
    /// CTAs at most, and threads of each.
    size: [u32; 2],
    parameters: CollectiveParameters,
    /// What is copied before, and where to.
    copied: Option<[Piece; 2]>,
    /// The stream, once it is launched there and not captured.
    identity: Option<LastStream>,
}

impl PreparedCollective {
    /// The number of the launch.
    pub(crate) fn number(&self) -> u64 {
        self.parameters.launch
    }

    /// Has `from` copied to `into`, which is as long, before the kernel runs.
    pub(crate) fn copy_first(&mut self, from: Piece, into: Piece) {
        self.copied = Some([from, into]);
    }

    /// Launches the kernel, or has the graph capture it, behind the earlier work of the streams and the
    /// earlier kernels that were launched.
    ///
    /// # Errors
    /// `System` if the GPU fails; `Unsupported` if the driver is too old for captures.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let Self { order, streams, memory, dtype, size: [ctas, threads], parameters, copied, identity } = self;
        let engine = &order.engine;
        let CallStreams { stream, other, graph } = *streams;
        let state = order.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = engine.gpu.enter()?;
        let ctas = engine.kernels.ctas(KernelKind::Collective(*dtype), *ctas);
        // SAFETY: the creators of the streams promised that they are live, and a graph is while it captures.
        // The memory of collectives lives until the graphs that keep it are gone; the vectors are valid until
        // the stream has passed the call.
        unsafe {
            if let Some(graph) = graph {
                memory.keep_for(graph)?;
            }
            if let Some(other) = other {
                state.other.record_in(other.handle())?;
                state.other.wait_in(stream.handle())?;
            }
            // A capture cannot wait for events of the work outside: there the order is the user's to keep.
            // And a stream that is asked for its number ends its capture.
            if graph.is_none() {
                let now = *identity.insert(order.identity(stream));
                if state.last.is_some_and(|last| !last.is_same(now)) {
                    state.ended.wait_in(stream.handle())?;
                }
            }
            if let Some([from, into]) = *copied {
                let driver = engine.gpu.driver();
                driver.memory_copy(address(into), address(from), from.len(), stream.handle())?;
            }
            engine.kernels.launch_collective(*dtype, [ctas, *threads], stream.handle(), parameters)?;
        }
        Ok(())
    }

    /// Orders later work behind the kernel: see [`PreparedLaunch::record`].
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn record(self) -> Result<()> {
        let CallStreams { stream, other, graph } = self.streams;
        let mut state = self.order.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = self.order.engine.gpu.enter()?;
        let behind = if graph.is_some() { &state.other } else { &state.ended };
        // SAFETY: as above.
        unsafe {
            if graph.is_none() || other.is_some() {
                behind.record_in(stream.handle())?;
            }
            if let Some(other) = other {
                behind.wait_in(other.handle())?;
            }
        }
        if graph.is_none() {
            state.last = self.identity;
        }
        Ok(())
    }
}

impl Drop for PreparedLaunch {
    fn drop(&mut self) {
        if !self.launched {
            self.order.engine.control.abort();
        }
    }
}
