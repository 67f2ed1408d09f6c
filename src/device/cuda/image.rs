//! The kernels' image: machine code or PTX for the driver to load.
//!
//! Owns what `build.rs` embedded, machine code or only the source, and the on-disk cache of what NVRTC compiles from the
//! source. Must not know the driver, nor how kernels are launched.

use super::nvrtc::{FIX, KernelSource, Nvrtc};
use crate::device::Arithmetic;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use std::borrow::Cow;
use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

// Defines MACHINE_CODE (an Option), its ARCHITECTURES, and COMPILER: the compiler's name, or why there is no machine code.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

macro_rules! text {
    ($path:literal) => {{
        const TEXT: &str = concat!(include_str!(concat!("../../../kernels/", $path)), "\0");
        match CStr::from_bytes_with_nul(TEXT.as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("a source contains no NUL"),
        }
    }};
}

const SOURCE: KernelSource<'static> = KernelSource {
    name: c"reduce.cu",
    text: text!("reduce.cu"),
    headers: &[(c"number.h", text!("number.h")), (c"batch.h", text!("batch.h"))],
};

/// Options that give the same results as the host device.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// The image to load on a GPU of this compute capability.
///
/// Without embedded machine code this compiles the source, once per machine, which takes some seconds.
///
/// # Errors
/// `Unsupported` if the GPU is too old or there is no NVRTC; `Internal` if the source cannot be compiled.
pub fn image(major: u32, minor: u32) -> Result<Cow<'static, [u8]>> {
    match MACHINE_CODE {
        Some(code) => embedded(code, ARCHITECTURES, major, minor).map(Cow::Borrowed),
        None => from_source(major, minor).map(Cow::Owned),
    }
}

/// The image that NVRTC compiles from the source, even if machine code is embedded: for a driver that is older than the
/// toolkit that compiled the machine code and rejects it.
///
/// # Errors
/// As for [`image`].
pub fn from_source(major: u32, minor: u32) -> Result<Vec<u8>> {
    compiled(&SOURCE, None, cache().as_deref(), major, minor)
}

/// Whether machine code is embedded, so that no compiler is needed at run time.
#[must_use]
pub fn is_embedded() -> bool {
    MACHINE_CODE.is_some()
}

/// A description of where the kernels come from, and why.
#[must_use]
pub fn origin() -> String {
    match MACHINE_CODE {
        Some(code) => format!(
            "machine code for {} and PTX for all newer GPUs, {:.1} MB, by {COMPILER}",
            ARCHITECTURES.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", "),
            code.len() as f64 / 1e6
        ),
        None => {
            let compiler = match Nvrtc::find(None) {
                Ok(nvrtc) => format!("NVRTC {} compiles it when it is first needed", nvrtc.version()),
                Err(why) => format!("{why}: {FIX}"),
            };
            format!("the source alone, because {COMPILER}; {compiler}")
        }
    }
}

/// The name of the kernel for a reduction.
#[must_use]
pub fn symbol(dtype: DType, arithmetic: Arithmetic) -> &'static CStr {
    macro_rules! names {
        ($($name:literal: $dtype:ident),* $(,)?) => {
            match dtype {
                $(DType::$dtype => [
                    concat!("flexring_sum_", $name, "\0"),
                    concat!("flexring_prod_", $name, "\0"),
                    concat!("flexring_max_", $name, "\0"),
                    concat!("flexring_min_", $name, "\0"),
                ],)*
            }
        };
    }
    let names = names! {
        "int8": I8, "uint8": U8, "int32": I32, "uint32": U32, "int64": I64, "uint64": U64,
        "half": F16, "float": F32, "double": F64, "bfloat16": BF16, "float8e4m3": F8E4M3, "float8e5m2": F8E5M2,
    };
    let name = match arithmetic {
        Arithmetic::Sum => names[0],
        Arithmetic::Prod => names[1],
        Arithmetic::Max => names[2],
        Arithmetic::Min => names[3],
    };
    CStr::from_bytes_with_nul(name.as_bytes()).expect("each name ends with its only NUL")
}

/// The name of the kernel that copies bytes.
pub const COPY: &CStr = c"flexring_copy";

fn refused<T>(kind: ErrorKind, message: String) -> Result<T> {
    Err(Error::new(kind, message))
}

/// The error for a GPU that is older than every supported architecture.
fn too_old<T>(major: u32, minor: u32, oldest: u32, compiler: &str) -> Result<T> {
    let oldest = format!("{}.{}", oldest / 10, oldest % 10);
    refused(
        ErrorKind::Unsupported,
        format!(
            "this GPU has compute capability {major}.{minor}, and {compiler} compiles kernels for {oldest} and newer: \
             build flexring with an older CUDA toolkit, or keep the data on the host"
        ),
    )
}

/// The embedded machine code, if a GPU of this compute capability can run it.
fn embedded(code: &'static [u8], architectures: &[u32], major: u32, minor: u32) -> Result<&'static [u8]> {
    match architectures.first() {
        // Architectures without machine code run the embedded PTX.
        Some(oldest) if *oldest <= major * 10 + minor => Ok(code),
        oldest => too_old(major, minor, oldest.copied().unwrap_or_default(), COMPILER),
    }
}

/// The target for NVRTC: the GPU itself, an older architecture of its generation, or PTX for the newest architecture that
/// NVRTC supports, which the driver compiles further.
fn target(known: &[u32], major: u32, minor: u32) -> Option<String> {
    let wanted = major * 10 + minor;
    let not_newer = known.iter().copied().filter(|number| *number <= wanted).max()?;
    Some(if not_newer / 10 == major { format!("sm_{not_newer}") } else { format!("compute_{not_newer}") })
}

/// The cache folder, if the user has one.
fn cache() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    let root = named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    Some(root.or_else(|| named("HOME").map(|home| home.join(".cache")))?.join("flexring"))
}

/// The image that NVRTC compiles, or the cached one.
fn compiled(
    source: &KernelSource<'_>,
    folder: Option<&Path>,
    cache: Option<&Path>,
    major: u32,
    minor: u32,
) -> Result<Vec<u8>> {
    let nvrtc = Nvrtc::find(folder).or_else(|why| {
        refused(ErrorKind::Unsupported, format!("the kernels for GPUs cannot be compiled: {why}; {FIX}"))
    })?;
    let compiler = format!("NVRTC {}", nvrtc.version());
    let known = nvrtc.architectures();
    let Some(target) = target(known, major, minor) else {
        return too_old(major, minor, known.first().copied().unwrap_or_default(), &compiler);
    };
    let mut key = Xxh3Default::new();
    for text in [source.text].into_iter().chain(source.headers.iter().map(|(_, text)| *text)) {
        key.update(text.to_bytes_with_nul());
    }
    for word in OPTIONS.iter().copied().chain([target.as_str(), &compiler]) {
        key.update(word.as_bytes());
        key.update(&[0]);
    }
    let entry = cache.map(|cache| cache.join(format!("kernels-{target}-{:032x}", key.digest128())));
    if let Some(image) = entry.as_deref().and_then(read) {
        return Ok(image);
    }
    log::info!("compiling the GPU kernels for {target} by {compiler}");
    let image = nvrtc.compile(source, &target, &OPTIONS).or_else(|why| {
        refused(ErrorKind::Internal, format!("{compiler} cannot compile the kernels for {target}: {why}"))
    })?;
    if let Some(entry) = entry
        && let Err(cause) = write(&entry, &image)
    {
        log::info!("cannot cache the compiled GPU kernels as {}: {cause}", entry.display());
    }
    Ok(image)
}

/// Length of the digest at the end of a cache entry.
const DIGEST: usize = size_of::<u128>();

/// The image in a cache entry, if the entry exists and its digest is right.
fn read(entry: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(entry).ok()?;
    let len = bytes.len().checked_sub(DIGEST)?;
    let digest = bytes.split_off(len);
    let whole = digest == xxh3_128(&bytes).to_le_bytes();
    if !whole {
        log::info!("{} is damaged and will be replaced", entry.display());
    }
    whole.then_some(bytes)
}

/// Writes an entry atomically: other processes see no entry, an old one, or the complete new one.
fn write(entry: &Path, image: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(entry.parent().unwrap_or(entry))?;
    let unfinished = entry.with_extension(format!("{}", std::process::id()));
    let written = std::fs::write(&unfinished, [image, &xxh3_128(image).to_le_bytes()].concat())
        .and_then(|()| std::fs::rename(&unfinished, entry));
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}

#[cfg(test)]
mod tests;
