//! The kernels' image: machine code or PTX for the driver to load.
//!
//! Owns the order in which images are tried: those that `build.rs` embedded, then what `compiler` compiles
//! from the source on the user's machine. Must not know how an image is loaded, nor how kernels are launched.

mod compiler;
#[cfg(test)]
mod cubin;
mod embedded;
#[cfg(test)]
mod ptx;

use self::embedded::{COMPILER, COMPILER_MAJOR, EmbeddedImage, MACHINE_CODE, PTX, SOURCES};
use super::nvrtc::{FIX, Nvrtc};
use crate::cuda_driver::DriverError;
use crate::dtype::DType;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUresult;
use std::ffi::{CStr, c_int, c_uint};

/// A driver of this version of CUDA loads whatever NVRTC compiles.
const ANY_DRIVER: c_int = c_int::MAX;

/// Loads the kernels on a GPU of the compute capability `major.minor`: the embedded image that suits it, or
/// else what NVRTC compiles on this machine, which takes a minute the first time. `driver_version` is that of
/// `cuDriverGetVersion`, such as
/// 12040. `try_load` passes an image to the driver.
///
/// The next image is tried if the driver cannot use this one; any other error ends the attempts. The caller
/// adds the GPU's name to the error.
///
/// # Errors
/// `Unsupported` if no image can be loaded, with the driver's version, the compute capability and a fix; that
/// of `try_load` if the driver fails for another reason.
pub(crate) fn load_image<M>(
    capability: (u32, u32),
    driver_version: c_int,
    try_load: impl FnMut(&[u8]) -> std::result::Result<M, DriverError>,
) -> Result<M> {
    let compile = || compiler::from_source(SOURCES, None, compiler::cache(), capability, driver_version);
    load_first(&Attempt::all(MACHINE_CODE, PTX, capability), compile, capability, driver_version, try_load)
}

/// Whether machine code is embedded, so that no compiler is needed at run time.
#[must_use]
pub fn is_embedded() -> bool {
    !MACHINE_CODE.is_empty()
}

/// A description of where the kernels come from, and why.
#[must_use]
pub fn origin() -> String {
    if !is_embedded() {
        return origin_of_source(COMPILER);
    }
    let names = MACHINE_CODE.iter().map(|image| format!("sm_{}", image.architecture)).collect::<Vec<_>>();
    let bytes: usize = MACHINE_CODE.iter().chain(PTX).map(|image| image.bytes.len()).sum();
    format!(
        "machine code for {} and PTX for newer GPUs, {:.1} MB, by {COMPILER}, for drivers from {} on",
        names.join(", "),
        bytes as f64 / 1e6,
        oldest_driver(COMPILER_MAJOR)
    )
}

/// The description of a build without machine code, for this reason.
fn origin_of_source(reason: &str) -> String {
    let compiler = match Nvrtc::find(None, ANY_DRIVER) {
        Ok(nvrtc) => format!("NVRTC {} compiles it when it is first needed", nvrtc.version()),
        Err(why) => format!("{why}: {FIX}"),
    };
    format!("the source alone, because {reason}; {compiler}")
}

/// The oldest driver that loads machine code of this major version of CUDA.
fn oldest_driver(major: c_int) -> u32 {
    match major {
        ..=11 => 450,
        12 => 525,
        _ => 580,
    }
}

/// The name of the kernel for elements of a type.
#[must_use]
pub fn symbol(dtype: DType) -> &'static CStr {
    match dtype {
        DType::I8 => c"flexring_collective_int8",
        DType::U8 => c"flexring_collective_uint8",
        DType::I32 => c"flexring_collective_int32",
        DType::U32 => c"flexring_collective_uint32",
        DType::I64 => c"flexring_collective_int64",
        DType::U64 => c"flexring_collective_uint64",
        DType::F16 => c"flexring_collective_half",
        DType::F32 => c"flexring_collective_float",
        DType::F64 => c"flexring_collective_double",
        DType::BF16 => c"flexring_collective_bfloat16",
        DType::F8E4M3 => c"flexring_collective_float8e4m3",
        DType::F8E5M2 => c"flexring_collective_float8e5m2",
        DType::I16 => c"flexring_collective_int16",
        DType::U16 => c"flexring_collective_uint16",
        DType::Bool => c"flexring_collective_bool",
    }
}

/// An embedded image that a GPU may run.
#[derive(Debug)]
struct Attempt {
    name: String,
    image: &'static [u8],
}

impl Attempt {
    /// The images for a GPU, in order of preference: machine code of its generation, then PTX. A driver that
    /// supports the GPU may still reject PTX, if it is older than the compiler; GPUs of embedded boards
    /// reject the machine code.
    fn all(code: &[EmbeddedImage], ptx: &[EmbeddedImage], (major, minor): (u32, u32)) -> Vec<Self> {
        let wanted = major * 10 + minor;
        let newest = |images: &[EmbeddedImage], oldest: u32| {
            let images = images.iter().filter(|image| (oldest..=wanted).contains(&image.architecture));
            images.max_by_key(|image| image.architecture).copied()
        };
        let code = newest(code, major * 10).map(|image| ("sm", image));
        let ptx = newest(ptx, 0).map(|image| ("compute", image));
        let attempt = |(kind, image): (&str, EmbeddedImage)| Self {
            name: format!("{kind}_{}", image.architecture),
            image: image.bytes,
        };
        code.into_iter().chain(ptx).map(attempt).collect()
    }
}

/// Loads the first image that the driver accepts: one of `attempts`, or else the one that `compile` returns.
fn load_first<M>(
    attempts: &[Attempt],
    compile: impl FnOnce() -> Result<Vec<u8>>,
    (major, minor): (u32, u32),
    driver_version: c_int,
    mut try_load: impl FnMut(&[u8]) -> std::result::Result<M, DriverError>,
) -> Result<M> {
    let mut rejected = Vec::new();
    let mut rejects = |name: &str, image: &[u8]| match try_load(image) {
        Err(failure) if is_rejection(failure) => {
            log::info!("the driver cannot load the kernels for {name}: {failure}");
            rejected.push(format!("{name}: {failure}"));
            Ok(None)
        }
        loaded => loaded.map(Some).map_err(Error::from),
    };
    for attempt in attempts {
        if let Some(loaded) = rejects(&attempt.name, attempt.image)? {
            return Ok(loaded);
        }
    }
    let why = match compile() {
        Ok(image) => match rejects("what NVRTC compiled on this machine", &image)? {
            Some(loaded) => return Ok(loaded),
            None => "or keep the data on the host".to_owned(),
        },
        Err(error) => error.message().to_owned(),
    };
    let driver = driver_name(driver_version);
    let mut message =
        format!("the kernels cannot be loaded by {driver} on a GPU of compute capability {major}.{minor}: ");
    if !rejected.is_empty() {
        let (rejected, oldest) = (rejected.join("; "), oldest_driver(COMPILER_MAJOR));
        message += &format!("it rejects {rejected}: update it to {oldest} or newer; ");
    }
    Err(Error::unsupported(message + &why))
}

/// Whether the driver can load no image like this one, while it may load another.
fn is_rejection(failure: DriverError) -> bool {
    const REJECTIONS: [CUresult; 7] = [
        CUresult::CUDA_ERROR_INVALID_IMAGE,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
        CUresult::CUDA_ERROR_INVALID_SOURCE,
    ];
    failure.code.is_some_and(|code| REJECTIONS.iter().any(|rejection| *rejection as c_uint == code))
}

/// The driver with its own version, where the kernel module reports it, and the version of CUDA that it
/// supports.
fn driver_name(version: c_int) -> String {
    let own = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let own = if own.is_empty() { String::new() } else { format!(" {}", own.trim()) };
    format!("driver{own} with CUDA {}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests;
