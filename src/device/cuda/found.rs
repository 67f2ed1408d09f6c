//! Which GPUs this process sees.
//!
//! Owns what is told of them without using any: no context is made. Must not know what they are for.

use crate::cuda_driver::driver;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use serde::Serialize;
use std::ffi::{CStr, c_int};

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuFacts {
    /// Its number among those that this process sees.
    pub number: usize,
    /// What it is called.
    pub name: String,
    /// The numbers of its compute capability.
    pub capability: (u32, u32),
    /// Its PCI address, such as `0000:1b:00.0`.
    pub address: String,
    /// Bytes of memory.
    pub memory: u64,
}

/// How many GPUs this process sees.
///
/// # Errors
/// `Unsupported` without a driver.
pub fn gpus() -> Result<usize> {
    let driver = driver().map_err(|why| Error::unsupported(why))?;
    Ok(driver.count()?)
}

/// What there is to tell of the GPU with this number.
///
/// # Errors
/// `Unsupported` without a driver; `InvalidArgument` if there is no such GPU; `System` if it cannot be asked.
pub fn gpu_facts(number: usize) -> Result<GpuFacts> {
    let driver = driver().map_err(|why| Error::unsupported(why))?;
    let count = driver.count()?;
    if number >= count {
        let words = format!("there is no GPU {number}: this process sees {count}");
        return Err(Error::invalid_argument(words));
    }
    let ask = |attribute| driver.attribute(number, attribute).map(i32::unsigned_abs);
    let (mut device, mut name, mut memory) = (0, [0; 128], 0);
    // SAFETY: the places may be written and are as long as is said.
    unsafe {
        driver.device_get(&raw mut device, number as c_int)?;
        driver.device_name(name.as_mut_ptr(), name.len() as c_int - 1, device)?;
        driver.device_memory(&raw mut memory, device)?;
    }
    // SAFETY: the driver wrote a text, and the last byte is zero whatever it wrote.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(GpuFacts {
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
