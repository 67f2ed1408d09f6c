//! RAII types for the driver's handles: GPU, stream, event, memory.
//!
//! Owns the order of destruction: each object holds its GPU, whose context outlives it. Drop logs errors and
//! never panics. Must not know what is computed or moved.

use super::inventory::{GpuInfo, gpu_info};
use crate::cuda_driver::{
    Address, CONTEXT_IS_DESTROYED, Driver, DriverError, DriverHandle, DriverResult, NOT_READY, driver, in_use,
};
use crate::descriptor::StandardHeld;
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags, CUstream_flags, CUstreamCaptureMode};
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Logs a failure to release a handle.
pub(super) fn log_failure(released: DriverResult) {
    if let Err(failure) = released {
        // After a sticky error of the context every call fails, and the end of the context frees everything.
        log::debug!("{failure}");
    }
}

/// A GPU and this process's context on it, the one that CUDA's runtime uses too.
pub(crate) struct Gpu {
    driver: &'static Driver,
    /// Its index among the GPUs that this process sees.
    pub ordinal: u32,
    device: c_int,
    context: DriverHandle,
    /// A number that, unlike the handle, no later context gets; `None` if the driver has none (before CUDA
    /// 12.0).
    context_id: Option<u64>,
    pub name: String,
    /// Compute capability: major and minor.
    pub capability: (u32, u32),
}

// SAFETY: a context may be used from any thread; the driver locks.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The GPU with this index.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such GPU; `System` if it cannot be used; `Unsupported` without a
    /// driver.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>> {
        let _standard = StandardHeld::hold();
        let GpuInfo { name, capability, .. } = gpu_info(ordinal as usize)?;
        let driver = driver().map_err(Error::unsupported)?;
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: the out-parameters are writable.
        unsafe {
            driver.device_get(&raw mut device, ordinal as c_int)?;
            driver.primary_retain(&raw mut context, device)?;
        }
        let context_id = context_id(driver, context)?;
        Ok(Arc::new(Self { driver, ordinal, device, context, context_id, name, capability }))
    }

    /// Whether its context still exists. `cudaDeviceReset` destroys it and everything in it, and the next
    /// context of the GPU gets the same handle.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.check_alive(), Err(DriverError { code: Some(CONTEXT_IS_DESTROYED), .. }))
    }

    /// The index of the GPU whose context is current on this thread, if there is one.
    pub(crate) fn current() -> Option<u32> {
        let driver = in_use()?;
        let (mut context, mut device) = (null_mut(), 0);
        // SAFETY: the out-parameters are writable.
        unsafe { driver.context_current(&raw mut context) }.ok().filter(|()| !context.is_null())?;
        // SAFETY: as above.
        unsafe { driver.context_device(&raw mut device) }.ok()?;
        // A device handle of the driver is its ordinal.
        u32::try_from(device).ok()
    }

    /// The PCI address of the GPU with this index, such as `0000:1b:00.0`, if the driver reports it.
    pub(crate) fn address(ordinal: u32) -> Option<String> {
        Some(gpu_info(ordinal as usize).ok()?.address)
    }

    /// Whether a coherent link connects the GPU with this index with its processor: it uses the processor's
    /// page tables.
    #[cfg(feature = "verbs")]
    pub(crate) fn is_coherent(ordinal: u32) -> bool {
        let tables = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        driver().is_ok_and(|driver| driver.attribute(ordinal as usize, tables).is_ok_and(|uses| uses != 0))
    }

    /// The NUMA node nearest to the GPU with this index, if the driver and the kernel report it.
    pub(crate) fn node(ordinal: u32) -> Option<u32> {
        let address = Self::address(ordinal)?;
        let node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
        node.trim().parse().ok()
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Fails if its context no longer exists, or is broken.
    fn check_alive(&self) -> DriverResult {
        let id = context_id(self.driver, self.context)?;
        let destroyed = DriverError { function: "cuCtxPushCurrent_v2", code: Some(CONTEXT_IS_DESTROYED) };
        if id == self.context_id { Ok(()) } else { Err(destroyed) }
    }

    /// Makes its context current on this thread until the guard is dropped. Until then this thread's calls of
    /// the driver do not break the capture of a stream by another thread. Costs nothing if that is so
    /// already, so no code of the program may run meanwhile, which could change the context.
    ///
    /// # Errors
    /// `System` if the context no longer exists: then neither do the objects in it, and there is nothing to
    /// release.
    pub(crate) fn enter(&self) -> std::result::Result<CurrentContext<'_>, DriverError> {
        if ENTERED.get() == self.context {
            return Ok(CurrentContext { gpu: self, before: None, thread: PhantomData });
        }
        self.check_alive()?;
        // SAFETY: the context lives as long as `self`.
        unsafe { self.driver.context_push(self.context)? };
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the argument is writable. Drivers without this function have no such captures.
        let exchanged = unsafe { self.driver.exchange_capture_mode(&raw mut mode) }.is_ok();
        let before = Before { mode: exchanged.then_some(mode), entered: ENTERED.replace(self.context) };
        Ok(CurrentContext { gpu: self, before: Some(before), thread: PhantomData })
    }

    /// Copies between host memory and GPU memory, and waits for the copy, but not for other work of the GPU.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    ///
    /// # Safety
    /// Both are valid, of one length, and do not overlap.
    pub(crate) unsafe fn copy_now(self: &Arc<Self>, into: Piece, from: Piece) -> Result<()> {
        let stream = Stream::new(self)?;
        let _entered = self.enter()?;
        // SAFETY: the caller guarantees the memory, and the copy completes before this returns.
        unsafe { stream.copy(into, from)? };
        Ok(stream.synchronize()?)
    }

    /// Whether a stream belongs to this GPU's context, which is current.
    ///
    /// # Safety
    /// The stream is live, or NULL.
    pub(crate) unsafe fn has_stream(&self, stream: DriverHandle) -> std::result::Result<bool, DriverError> {
        let mut context = null_mut();
        // SAFETY: the caller guarantees the stream, and the out-parameter is writable.
        unsafe { self.driver.stream_context(stream, &raw mut context)? };
        Ok(context == self.context)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Also after a reset, which destroys the context and leaves the count of its users as it is.
        // SAFETY: the context was retained once, and every object in it is gone, because each holds `self`.
        log_failure(unsafe { self.driver.primary_release(self.device) });
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal, self.name)
    }
}

/// The number of a context; `None` if the driver does not number contexts. Fails if the context has been
/// destroyed.
fn context_id(driver: &Driver, context: DriverHandle) -> std::result::Result<Option<u64>, DriverError> {
    let mut id: c_ulonglong = 0;
    // SAFETY: the handle is that of a primary context, which the driver never frees; the out-parameter is
    // writable.
    match unsafe { driver.context_id(context, &raw mut id) } {
        Ok(()) => Ok(Some(id)),
        Err(DriverError { code: None, .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

thread_local! {
    /// The context that this thread has entered last and not left; null if there is none.
    static ENTERED: Cell<DriverHandle> = const { Cell::new(null_mut()) };
}

/// A thread on which a GPU's context is current.
pub(crate) struct CurrentContext<'a> {
    gpu: &'a Gpu,
    /// `None` if it was current already.
    before: Option<Before>,
    /// Not `Send`: the context must be popped on the thread that pushed it.
    thread: PhantomData<*const ()>,
}

/// A thread before it entered a context.
struct Before {
    /// Its mode of stream capture, if it was changed.
    mode: Option<c_uint>,
    entered: DriverHandle,
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        let Some(before) = self.before.take() else { return };
        ENTERED.set(before.entered);
        if let Some(mut mode) = before.mode {
            // SAFETY: the argument is writable, and the driver returned the mode.
            log_failure(unsafe { self.gpu.driver.exchange_capture_mode(&raw mut mode) });
        }
        let mut context = null_mut();
        // SAFETY: the out-parameter is writable; what was pushed on this thread is popped from it.
        log_failure(unsafe { self.gpu.driver.context_pop(&raw mut context) });
    }
}

/// A stream that does not synchronize with the default stream.
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    raw: DriverHandle,
}

// SAFETY: a stream may be used from any thread; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of default priority.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _entered = gpu.enter()?;
        let mut raw = null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the out-parameter is writable.
        unsafe { gpu.driver.stream_create(&raw mut raw, flags, 0)? };
        Ok(Self { gpu: Arc::clone(gpu), raw })
    }

    pub(crate) fn raw(&self) -> DriverHandle {
        self.raw
    }

    /// Copies between any two places, on the host or a GPU, after the earlier work of the stream.
    ///
    /// # Safety
    /// Both are valid and do not overlap until the copy completes.
    pub(crate) unsafe fn copy(&self, into: Piece, from: Piece) -> DriverResult {
        let (into, from, len) = (address(into), address(from), into.len().min(from.len()));
        // SAFETY: the caller guarantees the memory; the stream is live.
        unsafe { self.gpu.driver.memory_copy(into, from, len, self.raw) }
    }

    /// Waits until all work in the stream completes.
    pub(crate) fn synchronize(&self) -> DriverResult {
        // SAFETY: the stream is live.
        unsafe { self.gpu.driver.stream_synchronize(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the stream is live, and nothing uses it any more. The driver completes the work in it.
            log_failure(unsafe { self.gpu.driver.stream_destroy(self.raw) });
        }
    }
}

/// A point in a stream.
pub(crate) struct StreamEvent {
    gpu: Arc<Gpu>,
    raw: DriverHandle,
}

// SAFETY: an event may be used from any thread; the driver locks.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _entered = gpu.enter()?;
        let mut raw = null_mut();
        // SAFETY: the out-parameter is writable.
        unsafe { gpu.driver.event_create(&raw mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)? };
        Ok(Self { gpu: Arc::clone(gpu), raw })
    }

    /// Records the current work of a caller's stream, in place of what was recorded before.
    ///
    /// # Safety
    /// The stream is live, or NULL.
    pub(crate) unsafe fn record_in(&self, stream: DriverHandle) -> DriverResult {
        // SAFETY: the caller guarantees the stream; the event is live.
        unsafe { self.gpu.driver.event_record(self.raw, stream) }
    }

    /// Has later work of a caller's stream wait for the recorded work.
    ///
    /// # Safety
    /// The stream is live, or NULL.
    pub(crate) unsafe fn wait_in(&self, stream: DriverHandle) -> DriverResult {
        // SAFETY: the caller guarantees the stream; the event is live.
        unsafe { self.gpu.driver.stream_wait_event(stream, self.raw, 0) }
    }

    /// Whether all recorded work has completed.
    pub(crate) fn is_over(&self) -> std::result::Result<bool, DriverError> {
        // SAFETY: the event is live.
        match unsafe { self.gpu.driver.event_query(self.raw) } {
            Ok(()) => Ok(true),
            Err(DriverError { code: Some(NOT_READY), .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the event is live, and nothing uses it any more.
            log_failure(unsafe { self.gpu.driver.event_destroy(self.raw) });
        }
    }
}

/// Memory of a GPU.
pub(crate) struct GpuMemory {
    gpu: Arc<Gpu>,
    piece: Piece,
}

// SAFETY: it is an address and a length; nothing is read or written through them here.
unsafe impl Sync for GpuMemory {}

impl GpuMemory {
    /// Allocates `bytes` bytes, uninitialized.
    ///
    /// # Errors
    /// `System` if the GPU has too little memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self { gpu: Arc::clone(gpu), piece: Piece::EMPTY });
        }
        let _entered = gpu.enter()?;
        let mut start = 0;
        // SAFETY: the out-parameter is writable.
        let result = unsafe { gpu.driver.memory_allocate(&raw mut start, bytes) };
        result.map_err(|failure| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the out-parameters are writable.
            let known = unsafe { gpu.driver.memory_info(&raw mut free, &raw mut total) }.is_ok();
            let left = if known { format!("; {free} of {total} are free") } else { String::new() };
            Error::from(failure).context(format_args!("{bytes} bytes on {gpu:?}{left}"))
        })?;
        let start = NonNull::new(start as *mut u8)
            .ok_or_else(|| Error::internal("cuMemAlloc_v2 returned nothing"))?;
        // SAFETY: the allocation has this length and lives as long as `self`, which all users hold.
        Ok(Self { gpu: Arc::clone(gpu), piece: unsafe { Piece::on_gpu(start, bytes, gpu.ordinal) } })
    }

    /// The whole allocation. The piece must not outlive this object.
    pub(crate) fn piece(&self) -> Piece {
        self.piece
    }

    /// The GPU that it is on.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if self.piece.is_empty() {
            return;
        }
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the memory was allocated by `memory_allocate`. Freeing it waits for the GPU.
            log_failure(unsafe { self.gpu.driver.memory_free(address(self.piece)) });
        }
    }
}

/// The address of a piece of GPU memory, or of host memory for a copy. Kernels need other addresses of host
/// memory: see `pinned`.
pub(crate) fn address(piece: Piece) -> Address {
    piece.as_ptr() as Address
}
