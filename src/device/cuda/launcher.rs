//! The launches of a communicator's kernels in the callers' streams.
//!
//! Owns what is refused before anything is launched, the event behind the last kernel, by which the next one
//! is ordered behind it, and the checks of a stream. Must not know what a call does.
//!
//! Only callers' threads come here. Nothing that a running kernel depends on waits for them.

use super::kernels::GpuKernels;
use crate::cuda_driver::{CAPTURE_IMPLICIT, DriverError, DriverHandle, DriverResult};
use crate::device::CallerStream;
use crate::device::cuda::collective::{Blocks, CollectiveMemory, CollectiveParameters};
use crate::device::cuda::objects::{CurrentContext, Gpu, StreamEvent, address};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUstreamCaptureStatus};
use std::ffi::{c_uint, c_ulonglong};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

/// `CU_STREAM_PER_THREAD`: the handle of every thread's own default stream.
const PER_THREAD: usize = 2;

/// Launches the kernels of one communicator.
pub(crate) struct Launcher(Arc<LaunchOrder>);

/// The order of launches.
struct LaunchOrder {
    gpu: Arc<Gpu>,
    kernels: Arc<GpuKernels>,
    state: Mutex<LaunchState>,
}

impl Drop for LaunchOrder {
    fn drop(&mut self) {
        self.kernels.remove_user();
    }
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

impl Launcher {
    /// The launcher of a communicator. The first one of a process loads the kernels. Calls the driver, which
    /// may wait for running kernels, so no kernel may depend on the thread.
    ///
    /// # Errors
    /// `Unsupported` if the GPU or the system cannot run the kernels; `System` if the GPU fails.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        check_system(
            std::fs::read_to_string("/proc/version").ok().as_deref(),
            Path::new("/dev/dxg").exists(),
        )?;
        let limited = Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT;
        if gpu.driver().attribute(gpu.ordinal as usize, limited)? != 0 {
            log::warn!(
                "{gpu:?} has a time limit for kernels, because it drives a display: a call that waits longer for other ranks fails; \
                 use a GPU without a display"
            );
        }
        let (ended, other) = (StreamEvent::new(gpu)?, StreamEvent::new(gpu)?);
        let state = Mutex::new(LaunchState { ended, other, last: None });
        let kernels = GpuKernels::of(gpu)?;
        kernels.add_user();
        Ok(Self(Arc::new(LaunchOrder { gpu: Arc::clone(gpu), kernels, state })))
    }

    /// CTAs of any kernel that the GPU holds at a time.
    pub(crate) fn resident(&self) -> u32 {
        self.0.kernels.resident()
    }

    /// Fails if the GPU's context is broken. No kernel of such a context reports anything.
    ///
    /// # Errors
    /// `System`, with the driver's reason.
    pub(crate) fn check_health(&self) -> Result<()> {
        let gpu = &self.0.gpu;
        let query = gpu.enter().and_then(|_entered| self.query_last());
        query.map_err(|failure| Error::from(failure).context(format_args!("{gpu:?}")))
    }

    /// Makes the GPU's context current on this thread, for the calls of a launch.
    ///
    /// # Errors
    /// `System` if the context no longer exists.
    pub(crate) fn enter(&self) -> Result<CurrentContext<'_>> {
        Ok(self.0.gpu.enter()?)
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
        let gpu = &self.0.gpu;
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
        let is_of_thread = |stream: CallerStream| stream.handle() as usize == PER_THREAD;
        let of_thread = is_of_thread(streams.stream) || streams.other.is_some_and(is_of_thread);
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
            thread: of_thread.then(|| std::thread::current().id()),
        }
    }

    /// Whether all kernels that were launched have ended. Replays of graphs do not count.
    ///
    /// # Errors
    /// `System` if the context is broken.
    pub(crate) fn has_ended(&self) -> Result<bool> {
        let gpu = &self.0.gpu;
        let _entered = gpu.enter()?;
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.ended.is_over()?)
    }

    /// Queries the event behind the last kernel, which fails if the context is broken. The context is
    /// current.
    fn query_last(&self) -> DriverResult {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended.is_over().map(drop)
    }

    /// Refuses streams of other contexts. Returns the graph that the stream is being captured into, if it is.
    fn check(&self, stream: DriverHandle) -> Result<Option<DriverHandle>> {
        let gpu = &self.0.gpu;
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
        let known = unsafe { self.gpu.driver().stream_id(stream.handle(), &raw mut id) };
        LastStream { handle: stream.handle() as usize, id: known.ok().map(|()| id) }
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
    /// The thread whose default stream is meant, if one of the streams is that of a thread.
    thread: Option<ThreadId>,
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
    /// `System` if the GPU fails; `Unsupported` if the driver is too old for captures, and for the stream of
    /// another thread.
    pub(crate) fn launch(&mut self) -> Result<()> {
        if self.thread.is_some_and(|thread| thread != std::thread::current().id()) {
            let message = "calls of several ranks in one process cannot use the default stream of a thread: use another stream";
            return Err(Error::unsupported(message));
        }
        let Self {
            order, streams, memory, dtype, size: [ctas, threads], parameters, copied, identity, ..
        } = self;
        let CallStreams { stream, other, graph } = *streams;
        let state = order.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = order.gpu.enter()?;
        let ctas = order.kernels.ctas(*dtype, *ctas);
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
                let driver = order.gpu.driver();
                driver.memory_copy(address(into), address(from), from.len(), stream.handle())?;
            }
            order.kernels.launch(*dtype, [ctas, *threads], stream.handle(), parameters)?;
        }
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
        let CallStreams { stream, other, graph } = self.streams;
        let mut state = self.order.state.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = self.order.gpu.enter()?;
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

/// Refuses systems where a kernel need not start without further calls of the driver.
fn check_system(version: Option<&str>, has_dxg: bool) -> Result<()> {
    let is_wsl = has_dxg || version.is_some_and(|version| version.to_ascii_lowercase().contains("microsoft"));
    if is_wsl {
        let message = "WSL2 cannot run calls on GPU memory: its driver launches kernels in batches, so a kernel may never start; \
                       use Linux, or keep the data on the host";
        return Err(Error::unsupported(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wsl_is_refused() {
        assert!(check_system(Some("Linux version 6.8.0-45-generic (buildd@lcy02)"), false).is_ok());
        assert!(check_system(None, false).is_ok());
        assert!(check_system(Some("Linux version 5.15.153.1-microsoft-standard-WSL2"), false).is_err());
        let error = check_system(None, true).expect_err("the device of WSL2");
        assert!(error.message().contains("WSL2"), "{error:?}");
    }
}
