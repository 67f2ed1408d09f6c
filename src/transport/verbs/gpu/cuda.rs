//! The CUDA driver's answers about memory that RDMA devices access.
//!
//! Owns these queries.

use super::driver::{AddressRange, GpuDriver};
use super::gdr_mode::GdrUnavailable;
use super::write_ordering::WriteOrdering;
use crate::cuda_driver::{self, DriverError, DriverHandle};
use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUmemRangeHandleType as HandleType, CUmemorytype,
    CUpointer_attribute as PointerAttribute, CUstreamCaptureMode,
};
use std::ffi::{c_int, c_uint};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

/// The CUDA driver as a [`GpuDriver`].
pub(super) struct CudaQueries(&'static cuda_driver::Driver);

fn message(failure: DriverError) -> String {
    failure.to_string()
}

impl CudaQueries {
    /// Loads and initializes the driver.
    pub(super) fn open() -> Result<Self, String> {
        cuda_driver::driver().map(Self)
    }

    /// The number of GPUs that this process sees.
    pub(super) fn count(&self) -> Result<usize, String> {
        self.0.count().map_err(message)
    }

    /// Makes the context in which the memory at `address` was allocated current during `call`, if there is
    /// one. `call` does not break the capture of a stream by another thread. Callers may be on any thread.
    fn within<R>(&self, address: u64, call: impl FnOnce() -> R) -> R {
        // SAFETY: the attribute is the address of a context, or zero.
        let context =
            unsafe { self.0.pointer::<usize>(PointerAttribute::CU_POINTER_ATTRIBUTE_CONTEXT, address) };
        let context = context.unwrap_or(0) as DriverHandle;
        // SAFETY: the context is that of an existing allocation, so it exists.
        let pushed = !context.is_null() && unsafe { self.0.context_push(context) }.is_ok();
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the argument is writable. Drivers without this function have no such captures.
        let exchanged = unsafe { self.0.exchange_capture_mode(&raw mut mode) }.is_ok();
        let result = call();
        if exchanged {
            // SAFETY: as above.
            let restored = unsafe { self.0.exchange_capture_mode(&raw mut mode) };
            if let Err(failure) = restored {
                log::debug!("{failure}");
            }
        }
        if pushed {
            let mut popped = null_mut();
            // SAFETY: a context was pushed on this thread, and `call` did not pop it.
            if let Err(failure) = unsafe { self.0.context_pop(&raw mut popped) } {
                log::debug!("{failure}");
            }
        }
        result
    }
}

impl GpuDriver for CudaQueries {
    fn gpu_of(&self, address: u64) -> Result<usize, String> {
        // SAFETY: the attribute is an enum, written as an unsigned integer.
        let kind =
            unsafe { self.0.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) };
        let kind = kind.map_err(message)?;
        // SAFETY: the attribute is a boolean, which is not larger than this; bytes that are not written stay
        // zero.
        let managed =
            unsafe { self.0.pointer::<c_uint>(PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, address) };
        if managed.map_err(message)? != 0 {
            // An RDMA device would continue to write to where the memory was when it was registered.
            return Err("managed memory moves between host and GPU: use memory from cudaMalloc".to_owned());
        }
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
            return Err("it is host memory".to_owned());
        }
        // SAFETY: the attribute is a signed integer.
        let gpu = unsafe {
            self.0.pointer::<c_int>(PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        };
        usize::try_from(gpu.map_err(message)?).map_err(|_| "it belongs to no GPU".to_owned())
    }

    fn synchronize(&self, address: u64) {
        let yes: c_uint = 1;
        let attribute = PointerAttribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as c_uint;
        let result = self.within(address, || {
            // SAFETY: the driver reads an unsigned integer; it checks the address.
            unsafe { self.0.set_pointer_attribute((&raw const yes).cast(), attribute, address) }
        });
        if let Err(failure) = result {
            // Memory from cuMemMap has no such attribute. flexring itself waits for its GPU work, so this is
            // not an error.
            log::debug!(
                "copies of GPU memory at {address:#x} may continue after their call returns: {failure}"
            );
        }
    }

    fn exports_dmabuf(&self, gpu: usize) -> Result<(), GdrUnavailable> {
        if !self.0.has_memory_export() {
            let message = "the CUDA driver is too old: it has no cuMemGetHandleForAddressRange";
            return Err(GdrUnavailable::new(message).with_fix("install a driver for CUDA 11.7 or newer"));
        }
        match self.0.attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
            Ok(0) => Err(GdrUnavailable::new(format!("the driver of GPU {gpu} does not export DMA-BUFs"))
                .with_fix("install the driver's open kernel modules (nvidia-open), on Linux 5.12 or newer")),
            Ok(_) => Ok(()),
            Err(failure) => Err(GdrUnavailable::new(message(failure))),
        }
    }

    fn export(&self, address: u64, pages: AddressRange, over_pci: bool) -> Result<OwnedFd, String> {
        // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE. Drivers before CUDA 12.8 refuse it.
        let flags = u64::from(over_pci);
        let mut dmabuf: RawFd = -1;
        let kind = HandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
        // There may be no memory where the first page begins, and so no context.
        let result = self.within(address, || {
            // SAFETY: the driver writes a descriptor; it checks the range.
            unsafe { self.0.memory_export((&raw mut dmabuf).cast(), pages.address, pages.len, kind, flags) }
        });
        result.map_err(message)?;
        if dmabuf < 0 {
            return Err("cuMemGetHandleForAddressRange returned no descriptor".to_owned());
        }
        // SAFETY: the descriptor is new and open, and has no other owner.
        let dmabuf = unsafe { OwnedFd::from_raw_fd(dmabuf) };
        crate::descriptor::above_standard(dmabuf).map_err(|cause| cause.to_string())
    }

    fn allocate_beside(&self, address: u64, len: usize) -> Result<u64, String> {
        let mut allocated = 0;
        // SAFETY: the driver writes an address.
        let result = self.within(address, || unsafe { self.0.memory_allocate(&raw mut allocated, len) });
        result.map_err(message)?;
        Ok(allocated)
    }

    fn free(&self, address: u64) {
        // SAFETY: the memory was allocated above, and its owner frees it once.
        let result = self.within(address, || unsafe { self.0.memory_free(address) });
        if let Err(failure) = result {
            // At the exit of the process the driver may be gone, and the memory with it.
            log::debug!("memory for flushes is not freed: {failure}");
        }
    }

    fn writes(&self, gpu: usize) -> Result<WriteOrdering, String> {
        let attribute = |attribute| self.0.attribute(gpu, attribute);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).map_err(message)?;
        // Drivers before CUDA 11.3 do not have this attribute.
        let ordering = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).ok();
        let tables = attribute(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
        Ok(WriteOrdering { ordering, compute_major: major, coherent: tables.map_err(message)? != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver, or `None` after printing why the test is skipped.
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
    fn a_missing_driver_is_described() {
        if let Err(why) = CudaQueries::open() {
            let absent = why == "there is no CUDA driver: libcuda.so.1 is not found";
            assert!(absent || why.starts_with("cuInit failed: "), "{why}");
        }
    }

    #[test]
    fn every_gpu_reports_dmabuf_export_and_write_ordering() {
        let Some(cuda) = driver() else { return };
        for gpu in 0..cuda.count().expect("the driver has a count") {
            let writes = cuda.writes(gpu).expect("the GPU exists");
            println!("GPU {gpu}: exports {:?}, {writes:?}", cuda.exports_dmabuf(gpu));
        }
        assert!(cuda.writes(1 << 20).expect_err("there is no such GPU").starts_with("cuDeviceGet failed: "));
    }

    #[test]
    fn host_memory_is_not_gpu_memory() {
        let Some(cuda) = driver() else { return };
        let bytes = [0u8; 64];
        cuda.gpu_of(bytes.as_ptr() as u64).expect_err("the stack is host memory");
    }
}
