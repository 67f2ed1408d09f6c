//! The GPUs that this process sees.
//!
//! Owns the queries that need no context. Must not know what the GPUs are used for.

use crate::cuda_driver::driver;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use serde::Serialize;
use std::ffi::{CStr, c_int};

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GpuInfo {
    /// Its index among the GPUs that this process sees.
    pub number: usize,
    /// Product name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability: major and minor.
    pub capability: (u32, u32),
    /// Its PCI address, such as `0000:1b:00.0`.
    pub address: String,
    /// Size of its memory in bytes.
    pub memory: u64,
}

/// The number of GPUs that this process sees.
///
/// # Errors
/// `Unsupported` without a driver.
pub fn gpu_count() -> Result<usize> {
    let driver = driver().map_err(Error::unsupported)?;
    Ok(driver.count()?)
}

/// The properties of the GPU with this index.
///
/// # Errors
/// `Unsupported` without a driver; `InvalidArgument` if there is no such GPU; `System` if a query fails.
pub fn gpu_info(number: usize) -> Result<GpuInfo> {
    let driver = driver().map_err(Error::unsupported)?;
    let count = driver.count()?;
    if number >= count {
        let message = format!("there is no GPU {number}: this process sees {count}");
        return Err(Error::invalid_argument(message));
    }
    let ask = |attribute| driver.attribute(number, attribute).map(i32::unsigned_abs);
    let (mut device, mut name, mut memory) = (0, [0; 128], 0);
    // SAFETY: the out-parameters are writable and as long as the arguments say.
    unsafe {
        driver.device_get(&raw mut device, number as c_int)?;
        driver.device_name(name.as_mut_ptr(), name.len() as c_int - 1, device)?;
        driver.device_memory(&raw mut memory, device)?;
    }
    // SAFETY: the driver writes at most 127 bytes, so the last byte is zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(GpuInfo {
        number,
        name,
        capability: (
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        address: format!(
            "{:04x}:{:02x}:{:02x}.0",
            ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
        ),
        memory: memory as u64,
    })
}
