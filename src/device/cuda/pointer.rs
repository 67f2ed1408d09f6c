//! Whether an address is host memory or GPU memory.
//!
//! Owns that query and the errors for memory that cannot be used. Must not know what the memory holds.

use crate::cuda_driver::{Address, DriverError, INVALID_VALUE, in_use};
use crate::error::{Error, Result};
use crate::memory::MemorySpace;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};
use std::ffi::{c_int, c_uint};

/// Where the `len` bytes at `start` are, according to the driver; `None` if it does not know the address,
/// which is then host memory or not mapped.
///
/// # Errors
/// `InvalidArgument` for managed memory, and for a range that reaches beyond its allocation; `System` if the
/// driver fails.
pub(crate) fn locate(start: *const u8, len: usize) -> Result<Option<MemorySpace>> {
    let Some(driver) = in_use() else { return Ok(None) };
    let at = start as Address;
    // SAFETY: the driver writes an enum as an unsigned integer.
    let kind = match unsafe { driver.pointer::<c_uint>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) } {
        Ok(kind) => kind,
        Err(DriverError { code: Some(INVALID_VALUE), .. }) => return Ok(None),
        Err(failure) => return Err(failure.into()),
    };
    let refuse =
        |problem: &str| Err(Error::invalid_argument(format!("the {len} bytes at {start:p} {problem}")));
    // SAFETY: the driver writes a boolean, which is not longer than this; the other bytes stay zero.
    let managed = unsafe { driver.pointer::<c_uint>(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, at)? };
    if managed != 0 {
        return refuse("are managed memory, which moves between host and GPU: use memory of cudaMalloc");
    }
    if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
        return Ok(Some(MemorySpace::Host));
    }
    // For memory that was mapped piece by piece, these describe the whole reservation, not the piece.
    // SAFETY: the driver writes an address and a length.
    let (first, size) = unsafe {
        let first = driver.pointer::<Address>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)?;
        (first, driver.pointer::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)?)
    };
    if at + len as Address > first + size as Address {
        return refuse(&format!("reach beyond their allocation, which has {size} bytes from {first:#x} on"));
    }
    // SAFETY: the driver writes a signed integer.
    let gpu = unsafe { driver.pointer::<c_int>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at)? };
    match u32::try_from(gpu) {
        Ok(gpu) => Ok(Some(MemorySpace::Gpu(gpu))),
        Err(_) => refuse("are of no GPU"),
    }
}
