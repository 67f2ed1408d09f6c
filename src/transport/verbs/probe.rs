//! Properties of an RDMA device that are known only once it is open.
//!
//! Owns the queries of `flexring doctor`; a communicator queries what it needs itself. Must not judge the results.

use super::gpu::gdr_mode::{GdrUnavailable, dmabuf_support};
use super::objects::{Context, ProtectionDomain, Shim};
use crate::error::Result;

/// Properties of an open device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// By queried port: its active MTU in bytes; `None` if the query fails.
    pub mtus: Vec<Option<u32>>,
    /// Whether it registers GPU memory as DMA-BUFs.
    pub dmabufs: std::result::Result<(), GdrUnavailable>,
}

/// Opens a device, queries it and these ports, and closes it.
///
/// # Errors
/// `System` if it cannot be opened.
pub fn probe(device: &str, ports: &[u8]) -> Result<ProbeResult> {
    let context = Context::open(device, Shim::none())?;
    let mtu = |port: &u8| match context.port(*port) {
        // Verbs number MTUs: 1 is 256 bytes, 5 is 4096.
        Ok(attributes) if (1..=5).contains(&attributes.mtu) => Some(128 << attributes.mtu),
        _ => None,
    };
    let errno = ProtectionDomain::new(&context)?.probe_dmabuf();
    Ok(ProbeResult { mtus: ports.iter().map(mtu).collect(), dmabufs: dmabuf_support(device, errno) })
}
