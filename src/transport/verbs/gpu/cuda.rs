//! What CUDA's driver answers about memory that RDMA devices shall reach.
//!
//! Owns those questions. Must not know RDMA devices.

use super::flush::WriteOrdering;
use super::gdr_mode::GdrUnavailable;
use super::register::{AddressRange, GpuDriver};
use crate::cuda_driver::{self, DriverError, DriverHandle};
use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUmemRangeHandleType as HandleType, CUmemorytype,
    CUpointer_attribute as PointerAttribute,
};
use std::ffi::{c_int, c_uint};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

/// CUDA's driver.
pub(super) struct CudaQueries(&'static cuda_driver::Driver);

fn words(failure: DriverError) -> String {
    failure.to_string()
}

impl CudaQueries {
    /// The driver, ready for questions.
    pub(super) fn open() -> Result<Self, String> {
        cuda_driver::driver().map(Self)
    }

    /// How many GPUs this process sees.
    pub(super) fn count(&self) -> Result<usize, String> {
        self.0.count().map_err(words)
    }

    /// Calls the driver with the context current that the memory at an address was allocated in, if it has one: callers
    /// may be on any thread.
    fn within<R>(&self, address: u64, call: impl FnOnce() -> R) -> R {
        // SAFETY: the attribute is the address of a context, or zero.
        let context =
            unsafe { self.0.pointer::<usize>(PointerAttribute::CU_POINTER_ATTRIBUTE_CONTEXT, address) };
        let context = context.unwrap_or(0) as DriverHandle;
        // SAFETY: the context is that of an allocation that exists, so it does.
        let pushed = !context.is_null() && unsafe { self.0.context_push(context) }.is_ok();
        let result = call();
        if pushed {
            let mut popped = null_mut();
            // SAFETY: a context was pushed on this thread, and the call left it there.
            if let Err(failure) = unsafe { self.0.context_pop(&raw mut popped) } {
                log::debug!("{failure}");
            }
        }
        result
    }
}

impl GpuDriver for CudaQueries {
    fn gpu_of(&self, address: u64) -> Result<usize, String> {
        // SAFETY: it is an enum, written as an unsigned integer.
        let kind =
            unsafe { self.0.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) };
        let kind = kind.map_err(words)?;
        // SAFETY: it is a boolean, which is no larger than this, and what of this is not written stays zero.
        let managed =
            unsafe { self.0.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, address) };
        if managed.map_err(words)? != 0 {
            // A device would go on writing where the memory was when it was registered.
            return Err("managed memory moves between host and GPU: use memory of cudaMalloc".to_owned());
        }
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
            return Err("it is the host's".to_owned());
        }
        // SAFETY: it is a signed integer.
        let gpu = unsafe {
            self.0.pointer::<c_int>(PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        };
        usize::try_from(gpu.map_err(words)?).map_err(|_| "no GPU has it".to_owned())
    }

    fn synchronize(&self, address: u64) {
        let yes: c_uint = 1;
        let attribute = PointerAttribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as c_uint;
        let told = self.within(address, || {
            // SAFETY: the driver reads an unsigned integer; it checks the address.
            unsafe { self.0.set_pointer_attribute((&raw const yes).cast(), attribute, address) }
        });
        if let Err(failure) = told {
            // So it is with memory of cuMemMap. flexring itself waits for what the GPU does.
            log::debug!(
                "copies of GPU memory at {address:#x} may be under way when their call returns: {failure}"
            );
        }
    }

    fn exports(&self, gpu: usize) -> Result<(), GdrUnavailable> {
        if !self.0.has_memory_export() {
            let words = "the CUDA driver is too old: it has no cuMemGetHandleForAddressRange";
            return Err(GdrUnavailable::new(words).with_fix("install a driver of CUDA 11.7 or newer"));
        }
        match self.0.attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
            Ok(0) => Err(GdrUnavailable::new(format!("the driver of GPU {gpu} exports no DMA-BUF"))
                .with_fix("install the driver's open kernel modules (nvidia-open), on Linux 5.12 or newer")),
            Ok(_) => Ok(()),
            Err(failure) => Err(GdrUnavailable::new(words(failure))),
        }
    }

    fn export(&self, pages: AddressRange) -> Result<OwnedFd, String> {
        let mut dmabuf: RawFd = -1;
        let kind = HandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
        let told = self.within(pages.address, || {
            // SAFETY: the driver writes a descriptor; it checks the range.
            unsafe { self.0.memory_export((&raw mut dmabuf).cast(), pages.address, pages.len, kind, 0) }
        });
        told.map_err(words)?;
        if dmabuf < 0 {
            return Err("cuMemGetHandleForAddressRange returned no descriptor".to_owned());
        }
        // SAFETY: the descriptor is new, open, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(dmabuf) })
    }

    fn writes(&self, gpu: usize) -> Result<WriteOrdering, String> {
        let attribute = |attribute| self.0.attribute(gpu, attribute);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).map_err(words)?;
        // Drivers before CUDA 11.3 do not know it.
        let ordering = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).ok();
        let tables = attribute(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
        Ok(WriteOrdering { ordering, compute_major: major, coherent: tables.map_err(words)? != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver, or `None` with a word about it.
    fn driver() -> Option<CudaQueries> {
        match CudaQueries::open() {
            Ok(cuda) => Some(cuda),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn without_a_driver_the_answer_is_no_in_words() {
        if let Err(why) = CudaQueries::open() {
            let absent = why == "there is no CUDA driver: libcuda.so.1 is not found";
            assert!(absent || why.starts_with("cuInit failed: "), "{why}");
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
