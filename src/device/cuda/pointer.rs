//! Whose memory an address is.
//!
//! Owns that question and the words for memory that cannot be used. Must not know what the memory holds.

use crate::cuda_driver::{Address, Failure, INVALID_VALUE, in_use};
use crate::error::{Error, Result};
use crate::memory::Memory;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};
use std::ffi::{c_int, c_uint};

/// Whose memory the `len` bytes at `start` are, as the driver says. Memory that it does not know is the host's, or
/// nobody's.
///
/// # Errors
/// `InvalidArgument` for managed memory, and for a range that reaches beyond its allocation; `System` if the driver
/// fails.
pub(crate) fn locate(start: *const u8, len: usize) -> Result<Option<Memory>> {
    let Some(driver) = in_use() else { return Ok(None) };
    let at = start as Address;
    // SAFETY: it is an enum, written as an unsigned integer.
    let kind = match unsafe { driver.pointer::<c_uint>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) } {
        Ok(kind) => kind,
        Err(Failure { code: Some(INVALID_VALUE), .. }) => return Ok(None),
        Err(failure) => return Err(failure.into()),
    };
    let refuse = |words: &str| Err(Error::invalid_argument(format!("the {len} bytes at {start:p} {words}")));
    // SAFETY: it is a boolean, which is no longer than this, and what of this is not written stays zero.
    let managed = unsafe { driver.pointer::<c_uint>(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, at)? };
    if managed != 0 {
        return refuse("are managed memory, which moves between host and GPU: use memory of cudaMalloc");
    }
    if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
        return Ok(Some(Memory::Host));
    }
    // Of memory that was mapped piece by piece these tell all that was reserved for it, not the piece.
    // SAFETY: they are an address and a length.
    let (first, size) = unsafe {
        let first = driver.pointer::<Address>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)?;
        (first, driver.pointer::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)?)
    };
    if at + len as Address > first + size as Address {
        return refuse(&format!("reach beyond their allocation, which has {size} bytes from {first:#x} on"));
    }
    // SAFETY: it is a signed integer.
    let gpu = unsafe { driver.pointer::<c_int>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at)? };
    match u32::try_from(gpu) {
        Ok(gpu) => Ok(Some(Memory::Gpu(gpu))),
        Err(_) => refuse("are of no GPU"),
    }
}
