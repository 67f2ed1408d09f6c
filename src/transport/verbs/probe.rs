//! What an RDMA device says of itself once it is open.
//!
//! Owns a few questions, for `flexring doctor`; a communicator asks what it needs when it needs it. Must not judge the
//! answers.

use super::gpu::gdr_mode::{GdrUnavailable, dmabuf_support};
use super::objects::{Context, ProtectionDomain, Shim};
use crate::error::Result;

/// What a device answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// By port asked about, the bytes that its largest packets carry now; `None` if it does not tell.
    pub mtus: Vec<Option<u32>>,
    /// Whether it takes GPU memory as DMA-BUFs.
    pub dmabufs: std::result::Result<(), GdrUnavailable>,
}

/// Opens a device, asks it about itself and these ports, and closes it.
///
/// # Errors
/// `System` if it cannot be opened.
pub fn probe(device: &str, ports: &[u8]) -> Result<ProbeResult> {
    let context = Context::open(device, Shim::none())?;
    let mtu = |port: &u8| match context.port(*port) {
        // Verbs number them: 1 is 256 bytes, 5 is 4096.
        Ok(told) if (1..=5).contains(&told.mtu) => Some(128 << told.mtu),
        _ => None,
    };
    let errno = ProtectionDomain::new(&context)?.probe_dmabuf();
    Ok(ProbeResult { mtus: ports.iter().map(mtu).collect(), dmabufs: dmabuf_support(device, errno) })
}
