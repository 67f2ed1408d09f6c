//! The few functions of CUDA's driver that NCCL's interface needs beside flexring's: the current GPU of a
//! thread, and memory.
//!
//! The driver is opened when it is first needed. Without one, communicators work on the memory of the host.

use crate::status::{Failure, Outcome};
use crate::types::ncclResult_t;
use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A GPU with its context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub ordinal: c_int,
    /// The address of the context, which is never destroyed here.
    context: usize,
}

/// The driver's functions.
struct Driver {
    init: unsafe extern "C" fn(c_uint) -> c_uint,
    error_string: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint,
    count: unsafe extern "C" fn(*mut c_int) -> c_uint,
    current: unsafe extern "C" fn(*mut *mut c_void) -> c_uint,
    set_current: unsafe extern "C" fn(*mut c_void) -> c_uint,
    current_device: unsafe extern "C" fn(*mut c_int) -> c_uint,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_uint,
    allocate: unsafe extern "C" fn(*mut c_ulonglong, usize) -> c_uint,
    free: unsafe extern "C" fn(c_ulonglong) -> c_uint,
    devices: c_int,
}

/// The driver of this process, opened by the first call.
///
/// # Errors
/// Why there is none.
fn driver() -> Result<&'static Driver, &'static str> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(Driver::open).as_ref().map_err(String::as_str)
}

impl Driver {
    fn open() -> Result<Self, String> {
        // SAFETY: the library is CUDA's driver, which flexring opens, too; it may be opened at any time.
        let library = unsafe { Library::new("libcuda.so.1") };
        let library = library.map_err(|cause| format!("there is no CUDA driver: {cause}"))?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field that it is assigned to has the type that cuda.h declares.
                *unsafe { library.get($name) }
                    .map_err(|cause| format!("the CUDA driver is too old: {cause}"))?
            };
        }
        let mut driver = Self {
            init: function!(c"cuInit"),
            error_string: function!(c"cuGetErrorString"),
            count: function!(c"cuDeviceGetCount"),
            current: function!(c"cuCtxGetCurrent"),
            set_current: function!(c"cuCtxSetCurrent"),
            current_device: function!(c"cuCtxGetDevice"),
            retain: function!(c"cuDevicePrimaryCtxRetain"),
            allocate: function!(c"cuMemAlloc_v2"),
            free: function!(c"cuMemFree_v2"),
            devices: 0,
        };
        // The functions are used until the process ends.
        std::mem::forget(library);
        // SAFETY: the flags must be 0.
        let initialized = unsafe { (driver.init)(0) };
        driver.check(initialized, "cuInit").map_err(|failure| failure.message)?;
        // SAFETY: the number may be written.
        let counted = unsafe { (driver.count)(&raw mut driver.devices) };
        driver.check(counted, "cuDeviceGetCount").map_err(|failure| failure.message)?;
        if driver.devices == 0 { Err("the CUDA driver finds no GPU".to_owned()) } else { Ok(driver) }
    }

    fn check(&self, code: c_uint, function: &str) -> Outcome {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = null();
        // SAFETY: the pointer may be written.
        let known = unsafe { (self.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: the driver's texts are C strings that live as long as the process.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown".into() };
        let message = format!("{function} failed: {text} (CUDA error {code})");
        Err(Failure::new(ncclResult_t::ncclUnhandledCudaError, message))
    }

    /// The GPU with this number. Its primary context is retained once, and until the process ends, as CUDA's
    /// runtime does.
    fn primary(&self, ordinal: c_int) -> Outcome<Device> {
        static RETAINED: Mutex<BTreeMap<c_int, usize>> = Mutex::new(BTreeMap::new());
        if !(0..self.devices).contains(&ordinal) {
            let message = format!("there is no GPU {ordinal}: there are {}, numbered from 0", self.devices);
            return Err(Failure::argument(message));
        }
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = retained.get(&ordinal) {
            return Ok(Device { ordinal, context: *context });
        }
        let mut context = null_mut();
        // SAFETY: the pointer may be written.
        self.check(unsafe { (self.retain)(&raw mut context, ordinal) }, "cuDevicePrimaryCtxRetain")?;
        retained.insert(ordinal, context.expose_provenance());
        Ok(Device { ordinal, context: context.expose_provenance() })
    }

    /// The GPU whose context is current on this thread. If there is none, it is GPU 0, as for CUDA's runtime,
    /// and its primary context becomes current.
    fn current(&self) -> Outcome<Device> {
        let mut context = null_mut();
        // SAFETY: the pointer may be written.
        self.check(unsafe { (self.current)(&raw mut context) }, "cuCtxGetCurrent")?;
        if context.is_null() {
            let device = self.primary(0)?;
            self.make_current(device.context)?;
            return Ok(device);
        }
        let mut ordinal = 0;
        // SAFETY: the number may be written.
        self.check(unsafe { (self.current_device)(&raw mut ordinal) }, "cuCtxGetDevice")?;
        Ok(Device { ordinal, context: context.expose_provenance() })
    }

    /// Makes the context at this address current on this thread, or none.
    fn make_current(&self, context: usize) -> Outcome {
        let context = std::ptr::with_exposed_provenance_mut(context);
        // SAFETY: the context came from the driver, and is live unless the program has destroyed it, which
        // the driver reports.
        self.check(unsafe { (self.set_current)(context) }, "cuCtxSetCurrent")
    }
}

/// The GPU of this thread; `None` if there is no GPU.
pub(crate) fn current() -> Outcome<Option<Device>> {
    driver().ok().map(Driver::current).transpose()
}

/// The GPUs with these numbers.
pub(crate) fn devices(ordinals: impl Iterator<Item = c_int>) -> Outcome<Vec<Device>> {
    let driver = required()?;
    ordinals.map(|ordinal| driver.primary(ordinal)).collect()
}

/// Makes a GPU the current one of this thread until the returned value is dropped.
pub(crate) fn use_device(device: Device) -> Outcome<CurrentDevice> {
    let driver = required()?;
    let mut before = null_mut();
    // SAFETY: the pointer may be written.
    driver.check(unsafe { (driver.current)(&raw mut before) }, "cuCtxGetCurrent")?;
    driver.make_current(device.context)?;
    Ok(CurrentDevice { before: before.expose_provenance() })
}

/// The current GPU of a thread for a while.
pub(crate) struct CurrentDevice {
    /// The context before; 0 if there was none.
    before: usize,
}

impl Drop for CurrentDevice {
    fn drop(&mut self) {
        let restored = required().and_then(|driver| driver.make_current(self.before));
        // The program has destroyed the context, which its own next call reports.
        drop(restored);
    }
}

/// Allocates `bytes` bytes, at least 1, on the current GPU.
pub(crate) fn allocate(bytes: usize) -> Outcome<*mut c_void> {
    let driver = required()?;
    driver.current()?;
    let mut start = 0;
    // SAFETY: the address may be written.
    driver.check(unsafe { (driver.allocate)(&raw mut start, bytes) }, "cuMemAlloc")?;
    Ok(std::ptr::with_exposed_provenance_mut(start as usize))
}

/// Frees memory of [`allocate`].
pub(crate) fn free(start: *mut c_void) -> Outcome {
    let driver = required()?;
    driver.current()?;
    // SAFETY: the driver refuses an address that it has not allocated.
    driver.check(unsafe { (driver.free)(start.addr() as c_ulonglong) }, "cuMemFree")
}

fn required() -> Outcome<&'static Driver> {
    driver().map_err(|why| Failure::new(ncclResult_t::ncclUnhandledCudaError, why))
}
