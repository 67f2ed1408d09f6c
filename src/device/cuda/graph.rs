//! CUDA graphs of calls on users' buffers.
//!
//! Owns the capture of a buffer's stream and the graph that it makes. Must not know what is captured.

use super::objects::log_failure;
use super::stream_memory::StreamMemory;
use crate::cuda_driver::DriverHandle;
use crate::error::Result;
use cudarc::driver::sys::CUstreamCaptureMode;
use std::ffi::c_uint;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

/// The capture of a vector's stream. Dropped before its end, it discards what was captured.
pub struct GpuCapture {
    shared: Arc<StreamMemory>,
    has_ended: bool,
    /// Not `Send`: a capture ends on the thread where it began.
    thread: PhantomData<*const ()>,
}

impl GpuCapture {
    pub(super) fn begin(shared: &Arc<StreamMemory>) -> Result<Self> {
        let gpu = shared.memory.gpu();
        let _entered = gpu.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
        // SAFETY: the stream is live.
        unsafe { gpu.driver().capture_begin(shared.stream.raw(), mode)? };
        Ok(Self { shared: Arc::clone(shared), has_ended: false, thread: PhantomData })
    }

    /// Ends the capture and makes a graph of it.
    ///
    /// # Errors
    /// `System` if the capture became invalid, or the GPU fails; `Unsupported` with a driver before
    /// CUDA 11.4.
    pub fn end(mut self) -> Result<GpuGraph> {
        let graph = self.finish()?;
        let gpu = self.shared.memory.gpu();
        let _entered = gpu.enter()?;
        let mut raw = null_mut();
        // SAFETY: the graph is live until it is destroyed here, and the out-parameter is writable.
        let made = unsafe { gpu.driver().graph_instantiate(&raw mut raw, graph, 0) };
        // SAFETY: as above. What was instantiated does not need it.
        log_failure(unsafe { gpu.driver().graph_destroy(graph) });
        made?;
        Ok(GpuGraph { shared: Arc::clone(&self.shared), raw })
    }

    /// Ends the capture. Returns what was captured, which the caller destroys.
    fn finish(&mut self) -> Result<DriverHandle> {
        self.has_ended = true;
        let gpu = self.shared.memory.gpu();
        let _entered = gpu.enter()?;
        let mut graph = null_mut();
        // SAFETY: the stream is live, and the out-parameter is writable.
        unsafe { gpu.driver().capture_end(self.shared.stream.raw(), &raw mut graph)? };
        Ok(graph)
    }
}

impl Drop for GpuCapture {
    fn drop(&mut self) {
        // The capture is invalid if it does not end.
        if !self.has_ended
            && let Ok(graph) = self.finish()
            && let Ok(_entered) = self.shared.memory.gpu().enter()
        {
            // SAFETY: the graph is live, and nothing else refers to it.
            log_failure(unsafe { self.shared.memory.gpu().driver().graph_destroy(graph) });
        }
    }
}

impl std::fmt::Debug for GpuCapture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuCapture(on {:?})", self.shared.memory.gpu())
    }
}

/// A captured graph of calls on vectors of one stream, whose memory it keeps.
pub struct GpuGraph {
    shared: Arc<StreamMemory>,
    raw: DriverHandle,
}

// SAFETY: a graph is launched by one thread at a time: see `launch`. The driver locks its stream.
unsafe impl Send for GpuGraph {}

impl GpuGraph {
    /// Enqueues the captured work in the stream that was captured.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub fn launch(&self) -> Result<()> {
        let gpu = self.shared.memory.gpu();
        let _entered = gpu.enter()?;
        // SAFETY: both are live, and this object is not shared between threads. Of vectors, the graph
        // accesses those of its stream, whose memory `shared` keeps; it retains what calls of communicators
        // access. Copies from and to the host wait for the stream, which invalidates a capture.
        unsafe { Ok(gpu.driver().graph_launch(self.raw, self.shared.stream.raw())?) }
    }
}

impl Drop for GpuGraph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.memory.gpu().enter() {
            // SAFETY: it is live, and nothing else refers to it. The driver destroys it after its launches.
            log_failure(unsafe { self.shared.memory.gpu().driver().graph_executable_destroy(self.raw) });
        }
    }
}

impl std::fmt::Debug for GpuGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuGraph(on {:?})", self.shared.memory.gpu())
    }
}
