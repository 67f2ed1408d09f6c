//! Compiles the kernels on the user's machine, and caches what comes out.
//!
//! Owns the choice of the target and the cache on disk. Must not know the driver.

use super::embedded::OPTIONS;
use crate::config::Size;
use crate::device::cuda::nvrtc::{self, FIX, Nvrtc};
use crate::error::{Error, ErrorKind, Result};
use crate::named_file;
use crate::process;
use std::ffi::{OsString, c_int};
use std::fs::{DirBuilder, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use twox_hash::XxHash3_128;

/// The oldest architecture that the source can be compiled for: older ones cannot order memory accesses
/// between CTAs.
const OLDEST: u32 = 70;

/// The image that NVRTC, in `folder` or where the system finds it, compiles from `files`, by name, for a GPU
/// of this compute capability and a driver of this version, such as 12040; or the one in `cache`. Compiles
/// once at a time, on a thread with the stack that NVRTC needs.
///
/// # Errors
/// `Unsupported` if the GPU is too old or there is no NVRTC that suits the driver; `Internal` if the source
/// cannot be compiled.
pub(super) fn from_source(
    files: &'static [(&'static str, &'static str)],
    folder: Option<PathBuf>,
    cache: Option<PathBuf>,
    capability: (u32, u32),
    driver_version: c_int,
) -> Result<Vec<u8>> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let compiler = std::thread::Builder::new().name("flexring-kernels".to_owned()).stack_size(nvrtc::STACK);
    let compile =
        move || compiled(files, folder.as_deref(), cache.as_deref(), capability, driver_version / 1000);
    let compiled = process::spawn(compiler, compile)
        .map_err(|cause| Error::io("cannot start a thread for the compiler of kernels", cause))?;
    compiled.join().unwrap_or_else(|_| Err(Error::internal("the compiler of kernels panicked")))
}

fn refused<T>(kind: ErrorKind, message: String) -> Result<T> {
    Err(Error::new(kind, message))
}

/// The target for NVRTC: the GPU itself, an older architecture of its generation, or PTX for the newest
/// architecture that NVRTC supports, which the driver compiles further.
pub(super) fn target(known: &[u32], (major, minor): (u32, u32)) -> Option<String> {
    let wanted = major * 10 + minor;
    let not_newer = known.iter().copied().filter(|number| *number <= wanted).max()?;
    Some(if not_newer / 10 == major { format!("sm_{not_newer}") } else { format!("compute_{not_newer}") })
}

/// The cache folder, if the user has one.
pub(super) fn cache() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    let root = named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    Some(root.or_else(|| named("HOME").map(|home| home.join(".cache")))?.join("flexring"))
}

/// The image that NVRTC of at most the major version `most` compiles, or the cached one.
pub(super) fn compiled(
    files: &[(&str, &str)],
    folder: Option<&Path>,
    cache: Option<&Path>,
    capability: (u32, u32),
    most: c_int,
) -> Result<Vec<u8>> {
    let (major, minor) = capability;
    if major * 10 + minor < OLDEST {
        let oldest = format!("{}.{}", OLDEST / 10, OLDEST % 10);
        return refused(
            ErrorKind::Unsupported,
            format!(
                "this GPU has compute capability {major}.{minor}, and flexring's kernels need {oldest} or newer: \
                 keep the data on the host"
            ),
        );
    }
    let nvrtc = Nvrtc::find(folder, most).or_else(|why| {
        refused(
            ErrorKind::Unsupported,
            format!("the kernels for GPUs cannot be compiled on this machine: {why}; {FIX}"),
        )
    })?;
    let compiler = format!("NVRTC {}", nvrtc.version());
    let Some(target) = target(nvrtc.architectures(), capability) else {
        return refused(
            ErrorKind::Unsupported,
            format!(
                "{compiler} does not compile for compute capability {major}.{minor}: install an older NVRTC, or \
                 build flexring where one is"
            ),
        );
    };
    let mut key = XxHash3_128::new();
    let words = files.iter().flat_map(|(name, text)| [*name, *text]).chain(OPTIONS.iter().copied());
    for word in words.chain([target.as_str(), &compiler]) {
        key.write(word.as_bytes());
        key.write(&[0]);
    }
    let entry = cache.map(|cache| cache.join(format!("kernels-{target}-{:032x}", key.finish_128())));
    if let Some(image) = entry.as_deref().and_then(read) {
        return Ok(image);
    }
    log::info!("compiling the GPU kernels for {target} by {compiler}");
    let compiled = nvrtc.compile(files, &target, OPTIONS).or_else(|why| {
        refused(ErrorKind::Internal, format!("{compiler} cannot compile the kernels for {target}: {why}"))
    })?;
    let image = if target.starts_with("sm_") { compiled.machine_code } else { compiled.ptx };
    if let Some(entry) = entry
        && let Err(cause) = write(&entry, &image)
    {
        log::info!("cannot cache the compiled GPU kernels as {}: {cause}", entry.display());
    }
    Ok(image)
}

/// Length of the digest at the end of a cache entry.
const DIGEST: usize = size_of::<u128>();

/// The longest image that is read from the cache.
const LONGEST_IMAGE: Size = Size(64 << 20);

/// The image in a cache entry, if the entry exists and its digest is right. An entry that another user can
/// write is not used.
pub(super) fn read(entry: &Path) -> Option<Vec<u8>> {
    let file = named_file::open(entry).ok()?;
    let facts = file.metadata().ok()?;
    if facts.uid() != rustix::process::geteuid().as_raw() || facts.mode() & 0o022 != 0 {
        log::warn!("{} belongs to another user or can be written by one, so it is not used", entry.display());
        return None;
    }
    let mut bytes = Vec::new();
    file.take(LONGEST_IMAGE.0 as u64).read_to_end(&mut bytes).ok()?;
    let len = bytes.len().checked_sub(DIGEST)?;
    let digest = bytes.split_off(len);
    let whole = digest == XxHash3_128::oneshot(&bytes).to_le_bytes();
    if !whole {
        log::info!("{} is damaged and will be replaced", entry.display());
    }
    whole.then_some(bytes)
}

/// Writes an entry atomically: other processes see no entry, an old one, or the complete new one.
pub(super) fn write(entry: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = entry.parent().unwrap_or(entry);
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unfinished = entry.with_extension(format!("{}", std::process::id()));
    let contents = [image, &XxHash3_128::oneshot(image).to_le_bytes()].concat();
    let write = || -> std::io::Result<()> {
        let mut file = named_file::create(&unfinished)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(&contents)?;
        std::fs::rename(&unfinished, entry)
    };
    let written = write();
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}
