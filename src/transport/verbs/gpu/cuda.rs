//! What CUDA's driver answers.
//!
//! Owns its library, opened when the program runs: where there is none every answer is no, in words. Must not know RDMA
//! devices.
//!
//! `cudarc` finds the library and names its constants. Its functions are not called: they panic where a driver is too
//! old to have them, and results that are newer than their list are undefined behaviour there.

use super::flush::Writes;
use super::ladder::Reason;
use super::register::{Driver, Span};
use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUmemRangeHandleType as HandleType, CUmemorytype,
    CUpointer_attribute as PointerAttribute, culib, is_culib_present,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

/// What every function of the driver returns: 0 if all is well.
type Code = c_uint;

/// CUDA's driver.
pub(super) struct Cuda {
    device_count: unsafe extern "C" fn(*mut c_int) -> Code,
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    device_attribute: unsafe extern "C" fn(*mut c_int, c_uint, c_int) -> Code,
    pointer_attribute: unsafe extern "C" fn(*mut c_void, c_uint, u64) -> Code,
    set_pointer_attribute: unsafe extern "C" fn(*const c_void, c_uint, u64) -> Code,
    push_context: unsafe extern "C" fn(*mut c_void) -> Code,
    pop_context: unsafe extern "C" fn(*mut *mut c_void) -> Code,
    error_string: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    /// Since CUDA 11.7.
    export: Result<unsafe extern "C" fn(*mut c_void, u64, usize, c_uint, c_ulonglong) -> Code, String>,
}

/// A function of the driver. The library must be there, and the function must have this type.
///
/// # Safety
/// `F` is the type of a function pointer, and what the driver calls `name` is such a function.
unsafe fn function<F: Copy>(name: &str) -> Result<F, String> {
    // SAFETY: the library is there, as `open` has made sure, so this does not panic; it stays open for ever.
    let library = unsafe { culib() };
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("the CUDA driver is too old: it has no {name}"))
}

impl Cuda {
    /// The driver, ready for questions.
    pub(super) fn open() -> Result<Self, String> {
        // SAFETY: opening the driver's library runs its initialisers, which any program may do at any time.
        if !unsafe { is_culib_present() } {
            return Err("there is no CUDA driver: libcuda.so.1 is not found".to_owned());
        }
        // SAFETY: the types are those of cuda.h, with enums as the integers that they are.
        let (cuda, init) = unsafe {
            let init: unsafe extern "C" fn(c_uint) -> Code = function("cuInit")?;
            let cuda = Self {
                device_count: function("cuDeviceGetCount")?,
                device_get: function("cuDeviceGet")?,
                device_attribute: function("cuDeviceGetAttribute")?,
                pointer_attribute: function("cuPointerGetAttribute")?,
                set_pointer_attribute: function("cuPointerSetAttribute")?,
                push_context: function("cuCtxPushCurrent_v2")?,
                pop_context: function("cuCtxPopCurrent_v2")?,
                error_string: function("cuGetErrorString")?,
                export: function("cuMemGetHandleForAddressRange"),
            };
            (cuda, init)
        };
        // SAFETY: the driver may be initialised at any time, and more than once.
        cuda.told("cuInit", unsafe { init(0) })?;
        Ok(cuda)
    }

    /// How many GPUs this process sees.
    pub(super) fn count(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: the driver is initialised, and the number may be written.
        self.told("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or_default())
    }

    /// How this GPU sees what other devices write to it.
    #[cfg_attr(not(test), allow(dead_code, reason = "asked by the device that runs on the GPU"))]
    pub(super) fn writes(&self, gpu: usize) -> Result<Writes, String> {
        let major = self.attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        // Drivers before CUDA 11.3 do not know it.
        let ordering =
            self.attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).ok();
        let tables = Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        Ok(Writes { ordering, generation: major, coherent: self.attribute(gpu, tables)? != 0 })
    }

    fn attribute(&self, gpu: usize, attribute: Attribute) -> Result<i32, String> {
        let (mut device, mut value) = (0, 0);
        let gpu = c_int::try_from(gpu).map_err(|_| format!("there is no GPU {gpu}"))?;
        // SAFETY: the driver is initialised, and the number may be written.
        self.told("cuDeviceGet", unsafe { (self.device_get)(&raw mut device, gpu) })?;
        // SAFETY: as above.
        let code = unsafe { (self.device_attribute)(&raw mut value, attribute as c_uint, device) };
        self.told("cuDeviceGetAttribute", code).map(|()| value)
    }

    /// An attribute of the memory at an address, of the type that the driver writes for it.
    ///
    /// # Safety
    /// `T` is what cuda.h says of the attribute, and zeros are valid for it.
    unsafe fn pointer<T: Default>(&self, attribute: PointerAttribute, address: u64) -> Result<T, String> {
        let mut value = T::default();
        // SAFETY: the driver is initialised and writes a `T`, as the caller vouches. The address is only looked up.
        let code = unsafe { (self.pointer_attribute)((&raw mut value).cast(), attribute as c_uint, address) };
        self.told("cuPointerGetAttribute", code).map(|()| value)
    }

    /// Calls the driver with the context current that the memory at an address was allocated in, if it has one: callers
    /// may be on any thread.
    fn within<R>(&self, address: u64, call: impl FnOnce() -> R) -> R {
        // SAFETY: the attribute is the address of a context, or zero.
        let context =
            unsafe { self.pointer::<usize>(PointerAttribute::CU_POINTER_ATTRIBUTE_CONTEXT, address) };
        let context = context.unwrap_or(0) as *mut c_void;
        // SAFETY: the context is that of an allocation that exists, so it does.
        let pushed = !context.is_null() && unsafe { (self.push_context)(context) } == 0;
        let result = call();
        if pushed {
            let mut popped = null_mut();
            // SAFETY: a context was pushed on this thread, and the call left it there.
            unsafe { (self.pop_context)(&raw mut popped) };
        }
        result
    }

    /// What a function returned, in words if it failed.
    fn told(&self, function: &str, code: Code) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut words: *const c_char = std::ptr::null();
        // SAFETY: the place may be written.
        let known = unsafe { (self.error_string)(code, &raw mut words) } == 0 && !words.is_null();
        // SAFETY: the driver wrote the address of a text of its own, which lives for ever.
        let words = known.then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned());
        Err(format!("{function} failed: {} ({code})", words.as_deref().unwrap_or("an unknown error")))
    }
}

impl Driver for Cuda {
    fn gpu_of(&self, address: u64) -> Result<usize, String> {
        // SAFETY: it is an enum, written as an unsigned integer.
        let kind =
            unsafe { self.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)? };
        // SAFETY: it is a boolean, which is no larger than this, and what of this is not written stays zero.
        let managed =
            unsafe { self.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, address)? };
        if managed != 0 {
            // A device would go on writing where the memory was when it was registered.
            return Err("managed memory moves between host and GPU: use memory of cudaMalloc".to_owned());
        }
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
            return Err("it is the host's".to_owned());
        }
        // SAFETY: it is a signed integer.
        let gpu =
            unsafe { self.pointer::<c_int>(PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)? };
        usize::try_from(gpu).map_err(|_| "no GPU has it".to_owned())
    }

    fn synchronize(&self, address: u64) {
        let yes: c_uint = 1;
        let attribute = PointerAttribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as c_uint;
        let code = self.within(address, || {
            // SAFETY: the driver is initialised and reads an unsigned integer; it checks the address.
            unsafe { (self.set_pointer_attribute)((&raw const yes).cast(), attribute, address) }
        });
        if let Err(words) = self.told("cuPointerSetAttribute of SYNC_MEMOPS", code) {
            // So it is with memory of cuMemMap. flexring itself waits for what the GPU does.
            log::debug!(
                "copies of GPU memory at {address:#x} may be under way when their call returns: {words}"
            );
        }
    }

    fn exports(&self, gpu: usize) -> Result<(), Reason> {
        if let Err(words) = &self.export {
            return Err(Reason::of(words).mended("install a driver of CUDA 11.7 or newer"));
        }
        match self.attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
            Ok(0) => Err(Reason::of(format!("the driver of GPU {gpu} exports no DMA-BUF"))
                .mended("install the driver's open kernel modules (nvidia-open), on Linux 5.12 or newer")),
            Ok(_) => Ok(()),
            Err(words) => Err(Reason::of(words)),
        }
    }

    fn export(&self, pages: Span) -> Result<OwnedFd, String> {
        let export = self.export.clone()?;
        let mut dmabuf: RawFd = -1;
        let kind = HandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
        let code = self.within(pages.address, || {
            // SAFETY: the driver is initialised and writes a descriptor; it checks the range.
            unsafe { export((&raw mut dmabuf).cast(), pages.address, pages.len, kind, 0) }
        });
        self.told("cuMemGetHandleForAddressRange", code)?;
        if dmabuf < 0 {
            return Err("cuMemGetHandleForAddressRange returned no descriptor".to_owned());
        }
        // SAFETY: the descriptor is new, open, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(dmabuf) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver, or `None` with a word about it.
    fn driver() -> Option<Cuda> {
        match Cuda::open() {
            Ok(cuda) => Some(cuda),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn without_a_driver_the_answer_is_no_in_words() {
        // SAFETY: as in `open`.
        let present = unsafe { is_culib_present() };
        match Cuda::open() {
            Ok(_) => assert!(present),
            Err(why) if present => assert!(why.starts_with("cuInit failed: "), "{why}"),
            Err(why) => assert_eq!(why, "there is no CUDA driver: libcuda.so.1 is not found"),
        }
    }

    #[test]
    fn every_gpu_says_what_it_exports_and_how_it_sees_writes() {
        let Some(cuda) = driver() else { return };
        for gpu in 0..cuda.count().expect("the driver counts") {
            let writes = cuda.writes(gpu).expect("the driver knows its GPUs");
            println!("GPU {gpu}: exports {:?}, {writes:?}", cuda.exports(gpu));
        }
        assert!(cuda.writes(1 << 20).expect_err("nobody has so many").starts_with("cuDeviceGet failed: "));
    }

    #[test]
    fn memory_of_the_host_is_told_apart() {
        let Some(cuda) = driver() else { return };
        let bytes = [0u8; 64];
        cuda.gpu_of(bytes.as_ptr() as u64).expect_err("it is on the stack");
    }
}
