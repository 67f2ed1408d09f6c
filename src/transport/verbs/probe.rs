//! Properties of libibverbs, and of an RDMA device that are known only once it is open.
//!
//! Owns the queries of `flexring doctor`, and whether the library can be used at all; a communicator queries
//! devices itself. Must not judge the results.

use super::gpu::gdr_mode::{GdrUnavailable, dmabuf_support};
use super::objects::{Context, Library, ProtectionDomain, Shim};
use crate::error::Result;
use std::path::PathBuf;

/// An open libibverbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryProperties {
    /// The file, without symbolic links, if the loader reports it.
    pub file: Option<PathBuf>,
    /// The version in the file's name, such as `1.14.44.0`: the ABI 1.14 of rdma-core 44.0.
    pub version: Option<String>,
    /// Optional functions that it lacks, with their versions.
    pub missing: Vec<&'static str>,
}

/// Properties of an open device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// By queried port: its active MTU in bytes; `None` if the query fails.
    pub mtus: Vec<Option<u32>>,
    /// Whether it registers GPU memory as DMA-BUFs.
    pub dmabufs: std::result::Result<(), GdrUnavailable>,
}

/// Opens libibverbs by this name or path, or by its usual name. It stays open.
///
/// # Errors
/// `System`, with cause and fix, if it cannot be opened or lacks functions.
pub fn library(name: Option<&str>) -> Result<LibraryProperties> {
    let library = Library::open(name)?;
    Ok(LibraryProperties {
        file: library.file().map(ToOwned::to_owned),
        version: library.version().map(str::to_owned),
        missing: library.missing(),
    })
}

/// Opens a device with the libibverbs of this name, queries it and these ports, and closes it.
///
/// # Errors
/// `System` if the library or the device cannot be opened.
pub fn probe(library: Option<&str>, device: &str, ports: &[u8]) -> Result<ProbeResult> {
    let library = Library::open(library)?;
    let context = Context::open(library, device, Shim::none())?;
    let mtu = |port: &u8| match context.port(*port) {
        // Verbs number MTUs: 1 is 256 bytes, 5 is 4096.
        Ok(attributes) if (1..=5).contains(&attributes.mtu) => Some(128 << attributes.mtu),
        _ => None,
    };
    let dmabufs = if library.imports_dmabufs() {
        dmabuf_support(device, ProtectionDomain::new(&context)?.probe_dmabuf())
    } else {
        Err(GdrUnavailable::new("this libibverbs does not register DMA-BUFs")
            .with_fix("install rdma-core 34 or newer"))
    };
    Ok(ProbeResult { mtus: ports.iter().map(mtu).collect(), dmabufs })
}
