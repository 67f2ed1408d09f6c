//! CUDA's driver: its library, opened when the program runs, and its functions with their failures in words.
//!
//! Owns the table of functions that flexring calls, and what their codes mean. Must not know what they are called for.
//!
//! `cudarc` finds the library and names its constants. Its functions are not called: they panic where a driver is too
//! old to have them, and results that are newer than their list are undefined behaviour there.

use crate::error::{Error, ErrorKind};
use cudarc::driver::sys::{culib, is_culib_present};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::ptr::null;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// What every function of the driver returns: 0 if all is well.
type DriverCode = c_uint;

/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: DriverCode = 1;
/// `CUDA_ERROR_NOT_READY`: what was asked about is still under way.
pub(crate) const NOT_READY: DriverCode = 600;

/// What the driver calls a context, a stream, an event, a module or a function: an address that only it follows.
pub(crate) type DriverHandle = *mut c_void;

/// An address that a GPU follows.
pub(crate) type Address = c_ulonglong;

/// What another process opens an allocation by.
pub(crate) type IpcHandle = [u8; 64];

/// A handle as the driver takes it: by value, as `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcByValue(pub IpcHandle);

/// What the driver calls back on a thread of its own.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A function that failed, or that the driver lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverError {
    pub function: &'static str,
    /// None if the driver has no such function.
    pub code: Option<DriverCode>,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = self.function;
        match (self.code, driver()) {
            (Some(code), Ok(driver)) => {
                let words = driver.words(code);
                write!(f, "{function} failed: {} ({code})", words.as_deref().unwrap_or("an unknown error"))
            }
            _ => write!(f, "the CUDA driver is too old: it has no {function}"),
        }
    }
}

impl From<DriverError> for Error {
    fn from(failure: DriverError) -> Self {
        let kind = if failure.code.is_some() { ErrorKind::System } else { ErrorKind::Unsupported };
        Self::new(kind, failure.to_string())
    }
}

/// What a function of the driver told.
pub(crate) type DriverResult = Result<(), DriverError>;

macro_rules! functions {
    ($($function:ident = $symbol:literal ($($argument:ident: $ty:ty),*);)*) => {
        /// CUDA's driver.
        #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "RDMA asks for some"))]
        pub(crate) struct Driver {
            $($function: Option<unsafe extern "C" fn($($ty),*) -> DriverCode>,)*
        }

        #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "RDMA asks for some"))]
        impl Driver {
            /// Looks every function up. Drivers may be too old to have all of them.
            ///
            /// # Safety
            /// The driver's library is there.
            unsafe fn find() -> Self {
                // SAFETY: the library is there, so this does not panic; it stays open for ever.
                let library = unsafe { culib() };
                // SAFETY: the types are those of cuda.h, with enums as the integers that they are.
                unsafe { Self { $($function: library.get($symbol.as_bytes()).ok().map(|symbol| *symbol),)* } }
            }

            $(
                #[doc = concat!("`", $symbol, "`, as cuda.h documents it.")]
                ///
                /// # Safety
                /// Handles are live, places may be written, and memory is as long as is said.
                #[allow(clippy::too_many_arguments, reason = "they are the driver's")]
                pub(crate) unsafe fn $function(&self, $($argument: $ty),*) -> DriverResult {
                    let Some(function) = self.$function else {
                        return Err(DriverError { function: $symbol, code: None });
                    };
                    // SAFETY: the caller vouches for the arguments.
                    match unsafe { function($($argument),*) } {
                        0 => Ok(()),
                        code => Err(DriverError { function: $symbol, code: Some(code) }),
                    }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit" (flags: c_uint);
    error_string = "cuGetErrorString" (code: DriverCode, words: *mut *const c_char);
    device_count = "cuDeviceGetCount" (count: *mut c_int);
    device_get = "cuDeviceGet" (device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    device_attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_uint, device: c_int);
    device_memory = "cuDeviceTotalMem_v2" (bytes: *mut usize, device: c_int);
    primary_retain = "cuDevicePrimaryCtxRetain" (context: *mut DriverHandle, device: c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    context_push = "cuCtxPushCurrent_v2" (context: DriverHandle);
    context_pop = "cuCtxPopCurrent_v2" (context: *mut DriverHandle);
    context_current = "cuCtxGetCurrent" (context: *mut DriverHandle);
    context_device = "cuCtxGetDevice" (device: *mut c_int);
    context_priorities = "cuCtxGetStreamPriorityRange" (least: *mut c_int, greatest: *mut c_int);
    stream_create = "cuStreamCreateWithPriority" (stream: *mut DriverHandle, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2" (stream: DriverHandle);
    stream_synchronize = "cuStreamSynchronize" (stream: DriverHandle);
    stream_context = "cuStreamGetCtx" (stream: DriverHandle, context: *mut DriverHandle);
    stream_capturing = "cuStreamIsCapturing" (stream: DriverHandle, status: *mut c_uint);
    stream_wait_event = "cuStreamWaitEvent" (stream: DriverHandle, event: DriverHandle, flags: c_uint);
    stream_write_value = "cuStreamWriteValue32_v2" (stream: DriverHandle, at: Address, value: u32, flags: c_uint);
    stream_wait_value = "cuStreamWaitValue32_v2" (stream: DriverHandle, at: Address, value: u32, flags: c_uint);
    launch_host_function = "cuLaunchHostFunc" (stream: DriverHandle, function: HostFunction, argument: *mut c_void);
    event_create = "cuEventCreate" (event: *mut DriverHandle, flags: c_uint);
    event_record = "cuEventRecord" (event: DriverHandle, stream: DriverHandle);
    event_query = "cuEventQuery" (event: DriverHandle);
    event_destroy = "cuEventDestroy_v2" (event: DriverHandle);
    memory_allocate = "cuMemAlloc_v2" (address: *mut Address, bytes: usize);
    memory_free = "cuMemFree_v2" (address: Address);
    memory_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    memory_copy = "cuMemcpyAsync" (into: Address, from: Address, bytes: usize, stream: DriverHandle);
    memory_export = "cuMemGetHandleForAddressRange" (handle: *mut c_void, at: Address, len: usize, kind: c_uint, flags: c_ulonglong);
    host_allocate = "cuMemHostAlloc" (start: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free = "cuMemFreeHost" (start: *mut c_void);
    host_register = "cuMemHostRegister_v2" (start: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister" (start: *mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (address: *mut Address, start: *mut c_void, flags: c_uint);
    pointer_attribute = "cuPointerGetAttribute" (value: *mut c_void, attribute: c_uint, address: Address);
    set_pointer_attribute = "cuPointerSetAttribute" (value: *const c_void, attribute: c_uint, address: Address);
    ipc_export = "cuIpcGetMemHandle" (handle: *mut IpcByValue, address: Address);
    ipc_open = "cuIpcOpenMemHandle_v2" (address: *mut Address, handle: IpcByValue, flags: c_uint);
    ipc_close = "cuIpcCloseMemHandle" (address: Address);
    module_load = "cuModuleLoadData" (module: *mut DriverHandle, image: *const c_void);
    module_unload = "cuModuleUnload" (module: DriverHandle);
    module_function = "cuModuleGetFunction" (function: *mut DriverHandle, module: DriverHandle, name: *const c_char);
    occupancy = "cuOccupancyMaxPotentialBlockSize" (
        grid: *mut c_int, block: *mut c_int, function: DriverHandle, dynamic_memory: *const c_void, memory: usize, limit: c_int
    );
    launch = "cuLaunchKernel" (
        function: DriverHandle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, memory: c_uint, stream: DriverHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Driver {
    /// What a code means, if the driver knows it.
    fn words(&self, code: DriverCode) -> Option<String> {
        let mut words: *const c_char = null();
        // SAFETY: the place may be written.
        unsafe { self.error_string(code, &raw mut words) }.ok()?;
        // SAFETY: what the driver wrote is null or the address of a text of its own, which lives for ever.
        (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
    }

    /// Whether it exports memory for other devices, as drivers do since CUDA 11.7.
    #[cfg(feature = "verbs")]
    pub(crate) fn has_memory_export(&self) -> bool {
        self.memory_export.is_some()
    }

    /// How many GPUs this process sees.
    pub(crate) fn count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the place may be written.
        unsafe { self.device_count(&raw mut count)? };
        Ok(usize::try_from(count).unwrap_or_default())
    }

    /// An attribute of a GPU, by cudarc's name for it.
    pub(crate) fn attribute(
        &self,
        gpu: usize,
        attribute: cudarc::driver::sys::CUdevice_attribute,
    ) -> Result<i32, DriverError> {
        let (mut device, mut value) = (0, 0);
        // SAFETY: the places may be written. A number that no GPU has is refused by the driver.
        unsafe {
            self.device_get(&raw mut device, c_int::try_from(gpu).unwrap_or(c_int::MAX))?;
            self.device_attribute(&raw mut value, attribute as c_uint, device)?;
        }
        Ok(value)
    }

    /// An attribute of the memory at an address, of the type that the driver writes for it.
    ///
    /// # Safety
    /// `T` is what cuda.h says of the attribute, or longer, and all bits are valid for it.
    pub(crate) unsafe fn pointer<T: Default>(
        &self,
        attribute: cudarc::driver::sys::CUpointer_attribute,
        address: Address,
    ) -> Result<T, DriverError> {
        let mut value = T::default();
        // SAFETY: the driver writes a `T`, as the caller vouches. The address is only looked up.
        unsafe { self.pointer_attribute((&raw mut value).cast(), attribute as c_uint, address)? };
        Ok(value)
    }
}

static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();

/// The driver, if this process uses it already: else there is nothing of a GPU in it. Opens nothing, which takes long where
/// there are GPUs that nobody asked for.
pub(crate) fn in_use() -> Option<&'static Driver> {
    if let Some(opened) = DRIVER.get() {
        return opened.as_ref().ok();
    }
    // Every call on the host's memory asks this, and looking for a library takes 11 microseconds, and this 0.01.
    static LOOKED: AtomicU64 = AtomicU64::new(0);
    let added = libraries_added();
    if LOOKED.load(Ordering::Relaxed) == added {
        return None;
    }
    // SAFETY: nothing is loaded by this; what is there already is counted once more, and given back.
    let loaded = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        !library.is_null() && libc::dlclose(library) == 0
    };
    if loaded {
        return driver().ok();
    }
    LOOKED.store(added, Ordering::Relaxed);
    None
}

/// How often a library was loaded into this process so far.
fn libraries_added() -> u64 {
    extern "C" fn first(library: *mut libc::dl_phdr_info, _len: usize, added: *mut c_void) -> c_int {
        // SAFETY: both are what `dl_iterate_phdr` hands over: a library, which knows the number, and the place below.
        unsafe { *added.cast::<u64>() = (*library).dlpi_adds };
        1
    }
    let mut added = 0u64;
    // SAFETY: the function takes what it is handed, and the place may be written.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut added).cast()) };
    added
}

/// The driver, initialised, or why there is none.
pub(crate) fn driver() -> Result<&'static Driver, String> {
    let open = || {
        // SAFETY: opening the driver's library runs its initialisers, which any program may do at any time.
        if !unsafe { is_culib_present() } {
            return Err("there is no CUDA driver: libcuda.so.1 is not found".to_owned());
        }
        // SAFETY: the library is there.
        let driver = unsafe { Driver::find() };
        // SAFETY: the driver may be initialised at any time, and more than once.
        match unsafe { driver.init(0) } {
            Ok(()) => Ok(driver),
            Err(DriverError { function, code: Some(code) }) => {
                let words = driver.words(code).unwrap_or_else(|| "an unknown error".to_owned());
                Err(format!("{function} failed: {words} ({code})"))
            }
            Err(DriverError { function, code: None }) => Err(format!("libcuda.so.1 has no {function}")),
        }
    };
    DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
}
