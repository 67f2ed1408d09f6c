//! The CUDA driver: its library, loaded at run time, its functions, and the text of their errors.
//!
//! Owns the table of functions that flexring calls, the meaning of their error codes, and the threads that
//! must not call them.
//!
//! `cudarc` declares the constants. Its functions are not used: they panic where a driver is too old to have
//! them, and error codes newer than its enum are undefined behaviour there. It also loads `libcuda.so` first,
//! which may be the stub that CUDA's toolkit has for linkers.

use crate::descriptor::StandardHeld;
use crate::error::{Error, ErrorKind};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{NonNull, null};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The return value of every driver function: `CUresult`, 0 for success.
type DriverCode = c_uint;

/// The driver's library, by the name that no stub has in a folder of libraries.
const LIBRARY: &CStr = c"libcuda.so.1";

/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: DriverCode = 1;
/// `CUDA_ERROR_NOT_READY`: the queried work is still running.
pub(crate) const NOT_READY: DriverCode = 600;
/// The code of a call in a context that `cudaDeviceReset` has destroyed.
pub(crate) const CONTEXT_IS_DESTROYED: DriverCode = 709;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: DriverCode = 801;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the default stream, while a stream that synchronizes with it is
/// captured.
pub(crate) const CAPTURE_IMPLICIT: DriverCode = 906;

/// A context, stream, event, module or function: an opaque pointer that only the driver dereferences.
pub(crate) type DriverHandle = *mut c_void;

/// An address in the memory of a GPU: `CUdeviceptr`.
pub(crate) type Address = c_ulonglong;

/// A physical allocation: `CUmemGenericAllocationHandle`.
pub(crate) type PhysicalHandle = c_ulonglong;

/// What a physical allocation is, with the layout of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AllocationProperties {
    kind: c_uint,
    /// A set of `CUmemAllocationHandleType`: how it can be exported.
    pub handle_types: c_uint,
    location: MemoryLocation,
    security: usize,
    flags: [u8; 8],
}

/// A GPU, with the layout of `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// Who may access memory, with the layout of `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryAccess {
    pub location: MemoryLocation,
    pub flags: c_uint,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<MemoryAccess>() == 12);

/// The handle by which another process opens an allocation: the bytes of `CUipcMemHandle`.
pub(crate) type IpcHandle = [u8; 64];

/// An IPC handle with the layout of `CUipcMemHandle`, which the driver takes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcByValue(pub IpcHandle);

/// An attribute of a launch, with the layout of `CUlaunchAttribute`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    /// A union, of which only integers are used.
    value: [c_int; 16],
}

impl LaunchAttribute {
    /// The attribute with this number, of a type that begins with an integer.
    pub(crate) fn new(id: c_uint, value: c_int) -> Self {
        let mut values = [0; 16];
        values[0] = value;
        Self { id, padding: 0, value: values }
    }
}

/// The dimensions, stream and attributes of a launch, with the layout of `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_memory: c_uint,
    pub stream: DriverHandle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

const _: () = assert!(size_of::<LaunchAttribute>() == 72 && size_of::<LaunchConfig>() == 56);

thread_local! {
    /// The number of `ForbidCalls` on this thread.
    static FORBIDDEN: Cell<u32> = const { Cell::new(0) };
}

/// A thread that must not call the driver. See [`forbid_calls`].
#[derive(Debug)]
pub(crate) struct ForbidCalls {
    /// Not `Send`: it counts on the thread that made it.
    thread: PhantomData<*const ()>,
}

/// Forbids this thread to call the driver until the guard is dropped, because a running kernel depends on the
/// thread: a driver call may wait for that kernel. In builds with debug assertions such a call panics.
#[must_use]
pub(crate) fn forbid_calls() -> ForbidCalls {
    FORBIDDEN.set(FORBIDDEN.get() + 1);
    ForbidCalls { thread: PhantomData }
}

impl Drop for ForbidCalls {
    fn drop(&mut self) {
        FORBIDDEN.set(FORBIDDEN.get() - 1);
    }
}

fn assert_allowed(function: &str) {
    // Any thread may look up the text of an error: that takes no lock.
    let allowed = function == "cuGetErrorString";
    debug_assert!(
        allowed || FORBIDDEN.get() == 0,
        "{function} is called on a thread that a running kernel depends on"
    );
}

/// A driver call that failed, or a function that the driver lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverError {
    pub function: &'static str,
    /// The error code; `None` if the driver has no such function.
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
        let advice = match failure.code {
            Some(CONTEXT_IS_DESTROYED) => "; after cudaDeviceReset, create the communicator again",
            _ => "",
        };
        Self::new(kind, format!("{failure}{advice}"))
    }
}

/// The result of a driver function.
pub(crate) type DriverResult = Result<(), DriverError>;

macro_rules! functions {
    ($($function:ident = $symbol:literal ($($argument:ident: $ty:ty),*);)*) => {
        /// The functions of the CUDA driver.
        pub(crate) struct Driver {
            $($function: Option<unsafe extern "C" fn($($ty),*) -> DriverCode>,)*
        }

        impl Driver {
            /// Looks up all functions; one that this driver lacks is `None`.
            ///
            /// # Safety
            /// `library` is a handle of the driver's library, which is never closed.
            unsafe fn find(library: NonNull<c_void>) -> Self {
                Self { $($function: {
                    let symbol = concat!($symbol, "\0").as_ptr().cast();
                    // SAFETY: the handle is live, and the name ends with NUL. The types are those of cuda.h,
                    // with enums as integers; a null pointer becomes `None`.
                    unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($ty),*) -> DriverCode>>(
                        libc::dlsym(library.as_ptr(), symbol)
                    ) }
                },)* }
            }

            $(
                #[doc = concat!("`", $symbol, "`, as cuda.h documents it.")]
                ///
                /// # Safety
                /// Handles are live, output pointers are valid for writes, and memory has the stated length.
                #[allow(clippy::too_many_arguments, reason = "they are the driver's")]
                pub(crate) unsafe fn $function(&self, $($argument: $ty),*) -> DriverResult {
                    assert_allowed($symbol);
                    let Some(function) = self.$function else {
                        return Err(DriverError { function: $symbol, code: None });
                    };
                    // SAFETY: the caller guarantees valid arguments.
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
    driver_version = "cuDriverGetVersion" (version: *mut c_int);
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
    context_id = "cuCtxGetId" (context: DriverHandle, id: *mut c_ulonglong);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut c_uint);
    context_priorities = "cuCtxGetStreamPriorityRange" (least: *mut c_int, greatest: *mut c_int);
    stream_create = "cuStreamCreateWithPriority" (stream: *mut DriverHandle, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2" (stream: DriverHandle);
    stream_synchronize = "cuStreamSynchronize" (stream: DriverHandle);
    stream_context = "cuStreamGetCtx" (stream: DriverHandle, context: *mut DriverHandle);
    stream_id = "cuStreamGetId" (stream: DriverHandle, id: *mut c_ulonglong);
    capture_begin = "cuStreamBeginCapture_v2" (stream: DriverHandle, mode: c_uint);
    capture_end = "cuStreamEndCapture" (stream: DriverHandle, graph: *mut DriverHandle);
    stream_capturing = "cuStreamIsCapturing" (stream: DriverHandle, status: *mut c_uint);
    stream_capture_info = "cuStreamGetCaptureInfo_v2" (
        stream: DriverHandle, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut DriverHandle,
        dependencies: *mut *const DriverHandle, count: *mut usize
    );
    user_object_create = "cuUserObjectCreate" (
        object: *mut DriverHandle, value: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), references: c_uint,
        flags: c_uint
    );
    user_object_release = "cuUserObjectRelease" (object: DriverHandle, count: c_uint);
    graph_retain_user_object = "cuGraphRetainUserObject" (
        graph: DriverHandle, object: DriverHandle, count: c_uint, flags: c_uint
    );
    graph_instantiate = "cuGraphInstantiateWithFlags" (
        executable: *mut DriverHandle, graph: DriverHandle, flags: c_ulonglong
    );
    graph_destroy = "cuGraphDestroy" (graph: DriverHandle);
    graph_launch = "cuGraphLaunch" (executable: DriverHandle, stream: DriverHandle);
    graph_executable_destroy = "cuGraphExecDestroy" (executable: DriverHandle);
    stream_wait_event = "cuStreamWaitEvent" (stream: DriverHandle, event: DriverHandle, flags: c_uint);
    event_create = "cuEventCreate" (event: *mut DriverHandle, flags: c_uint);
    event_record = "cuEventRecord" (event: DriverHandle, stream: DriverHandle);
    event_query = "cuEventQuery" (event: DriverHandle);
    event_destroy = "cuEventDestroy_v2" (event: DriverHandle);
    memory_allocate = "cuMemAlloc_v2" (address: *mut Address, bytes: usize);
    memory_free = "cuMemFree_v2" (address: Address);
    memory_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    memory_copy = "cuMemcpyAsync" (into: Address, from: Address, bytes: usize, stream: DriverHandle);
    memory_export = "cuMemGetHandleForAddressRange" (handle: *mut c_void, at: Address, len: usize, kind: c_uint, flags: c_ulonglong);
    memory_range = "cuMemGetAddressRange_v2" (start: *mut Address, bytes: *mut usize, at: Address);
    addresses_reserve = "cuMemAddressReserve" (
        start: *mut Address, bytes: usize, alignment: usize, hint: Address, flags: c_ulonglong
    );
    addresses_free = "cuMemAddressFree" (start: Address, bytes: usize);
    memory_map = "cuMemMap" (start: Address, bytes: usize, offset: usize, memory: PhysicalHandle, flags: c_ulonglong);
    memory_unmap = "cuMemUnmap" (start: Address, bytes: usize);
    memory_access = "cuMemSetAccess" (start: Address, bytes: usize, accesses: *const MemoryAccess, count: usize);
    physical_retain = "cuMemRetainAllocationHandle" (memory: *mut PhysicalHandle, at: *mut c_void);
    physical_release = "cuMemRelease" (memory: PhysicalHandle);
    physical_properties = "cuMemGetAllocationPropertiesFromHandle" (
        properties: *mut AllocationProperties, memory: PhysicalHandle
    );
    physical_export = "cuMemExportToShareableHandle" (
        descriptor: *mut c_void, memory: PhysicalHandle, kind: c_uint, flags: c_ulonglong
    );
    physical_import = "cuMemImportFromShareableHandle" (
        memory: *mut PhysicalHandle, descriptor: *mut c_void, kind: c_uint
    );
    host_register = "cuMemHostRegister_v2" (start: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister" (start: *mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (address: *mut Address, start: *mut c_void, flags: c_uint);
    pointer_attribute = "cuPointerGetAttribute" (value: *mut c_void, attribute: c_uint, address: Address);
    set_pointer_attribute = "cuPointerSetAttribute" (value: *const c_void, attribute: c_uint, address: Address);
    ipc_export = "cuIpcGetMemHandle" (handle: *mut IpcByValue, address: Address);
    ipc_open = "cuIpcOpenMemHandle_v2" (address: *mut Address, handle: IpcByValue, flags: c_uint);
    ipc_close = "cuIpcCloseMemHandle" (address: Address);
    module_load = "cuModuleLoadData" (module: *mut DriverHandle, image: *const c_void);
    module_function = "cuModuleGetFunction" (function: *mut DriverHandle, module: DriverHandle, name: *const c_char);
    function_attribute = "cuFuncGetAttribute" (value: *mut c_int, attribute: c_uint, function: DriverHandle);
    resident_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (
        blocks: *mut c_int, function: DriverHandle, threads: c_int, dynamic_memory: usize
    );
    launch = "cuLaunchKernel" (
        function: DriverHandle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, memory: c_uint, stream: DriverHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    launch_extended = "cuLaunchKernelEx" (
        config: *const LaunchConfig, function: DriverHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Driver {
    /// The driver's text for an error code; `None` if the driver does not define the code.
    fn words(&self, code: DriverCode) -> Option<String> {
        let mut words: *const c_char = null();
        // SAFETY: the output pointer is valid for writes.
        unsafe { self.error_string(code, &raw mut words) }.ok()?;
        // SAFETY: the driver wrote null, or the address of a static string.
        (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
    }

    /// The newest version of CUDA that the driver supports, 1000 times the major version plus 10 times the
    /// minor one.
    pub(crate) fn version(&self) -> Result<u32, DriverError> {
        let mut version = 0;
        // SAFETY: the output pointer is valid for writes.
        unsafe { self.driver_version(&raw mut version)? };
        Ok(version.unsigned_abs())
    }

    /// Whether the driver exports memory to other devices, as drivers do since CUDA 11.7.
    #[cfg(feature = "verbs")]
    pub(crate) fn has_memory_export(&self) -> bool {
        self.memory_export.is_some()
    }

    /// The number of GPUs that this process sees.
    pub(crate) fn count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the output pointer is valid for writes.
        unsafe { self.device_count(&raw mut count)? };
        Ok(usize::try_from(count).unwrap_or_default())
    }

    /// An attribute of a GPU.
    pub(crate) fn attribute(
        &self,
        gpu: usize,
        attribute: cudarc::driver::sys::CUdevice_attribute,
    ) -> Result<i32, DriverError> {
        let (mut device, mut value) = (0, 0);
        // SAFETY: the output pointers are valid for writes. The driver rejects numbers of GPUs that do not
        // exist.
        unsafe {
            self.device_get(&raw mut device, c_int::try_from(gpu).unwrap_or(c_int::MAX))?;
            self.device_attribute(&raw mut value, attribute as c_uint, device)?;
        }
        Ok(value)
    }

    /// An attribute of the memory at an address, as the type that the driver writes.
    ///
    /// # Safety
    /// `T` must be at least as long as the type that cuda.h documents for the attribute, and valid for all
    /// bit patterns.
    pub(crate) unsafe fn pointer<T: Default>(
        &self,
        attribute: cudarc::driver::sys::CUpointer_attribute,
        address: Address,
    ) -> Result<T, DriverError> {
        let mut value = T::default();
        // SAFETY: the caller guarantees that `T` has room for what the driver writes. The address is only
        // looked up.
        unsafe { self.pointer_attribute((&raw mut value).cast(), attribute as c_uint, address)? };
        Ok(value)
    }
}

static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();

/// The driver, if its library is loaded already; otherwise the process has no GPU memory. Loads nothing,
/// because initialising the driver takes long on machines with GPUs, even if the process does not use them.
pub(crate) fn in_use() -> Option<&'static Driver> {
    if let Some(opened) = DRIVER.get() {
        return opened.as_ref().ok();
    }
    // Every call on host memory asks this. Searching for the library takes 11 microseconds, comparing the
    // count 0.01.
    static LOOKED: AtomicU64 = AtomicU64::new(0);
    let added = libraries_added();
    if LOOKED.load(Ordering::Relaxed) == added {
        return None;
    }
    // SAFETY: RTLD_NOLOAD loads nothing. A library that is loaded gets one more reference, which is dropped
    // here.
    let loaded = unsafe {
        let library = libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        !library.is_null() && libc::dlclose(library) == 0
    };
    if loaded {
        return driver().ok();
    }
    LOOKED.store(added, Ordering::Relaxed);
    None
}

/// Whether GPUs may be used in this process. The driver is not initialised for that: a process that forks
/// first would lose it.
pub(crate) fn may_have_gpus() -> bool {
    // The driver's devices on a usual machine, on Jetson and in WSL.
    const DEVICES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvmap", "/dev/dxg"];
    let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let is_in = |folder: std::path::PathBuf| folder.join("libcuda.so.1").exists();
    in_use().is_some()
        || DEVICES.iter().any(|path| std::path::Path::new(path).exists())
        || std::env::split_paths(&paths).any(is_in)
}

/// How many libraries this process has loaded so far, including those that it closed.
fn libraries_added() -> u64 {
    extern "C" fn first(library: *mut libc::dl_phdr_info, _len: usize, added: *mut c_void) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes a library's description, which has the count, and the pointer
        // given below.
        unsafe { *added.cast::<u64>() = (*library).dlpi_adds };
        1
    }
    let mut added = 0u64;
    // SAFETY: the callback accepts the arguments, and the pointer is valid for writes.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut added).cast()) };
    added
}

/// The driver, initialised. The error says why it cannot be used.
pub(crate) fn driver() -> Result<&'static Driver, String> {
    let open = || {
        let _standard = StandardHeld::hold();
        // SAFETY: loading the library runs its initialisers, which may run at any time. It is never closed.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY) };
        let Some(library) = NonNull::new(library) else {
            return Err("there is no CUDA driver: libcuda.so.1 is not found".to_owned());
        };
        // SAFETY: it is the driver's library, and never closed.
        let driver = unsafe { Driver::find(library) };
        // SAFETY: cuInit may be called at any time, and more than once.
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
