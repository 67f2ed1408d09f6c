//! Settings of the links, and the path attributes that follow from them.
//!
//! Owns the translation of [`Config`] into what verbs take. Must not know links, peers or registered memory.

use super::inventory::LinkLayer;
use super::objects::{PathAttributes, Shim};
use super::port_selection::{Rail, reaches_gpu};
use crate::config::{Config, GdrLevel, GpuDirect, Registration};
use std::time::Duration;

/// How queue pairs are connected and how memory is registered.
#[derive(Clone, Debug)]
pub(crate) struct VerbsOptions {
    /// The name or path of libibverbs; `None` for the usual one.
    pub library: Option<String>,
    /// InfiniBand service level of all packets, 0 to 15.
    pub service_level: u8,
    /// Traffic class byte of the global route header.
    pub traffic_class: u8,
    /// Acknowledgement timeout as verbs encode it: 4.096 us times 2 to this power.
    pub timeout: u8,
    /// Retransmissions before a queue pair breaks, 0 to 6.
    pub retries: u8,
    /// Queue pairs for each connected pair of rails.
    pub qps_per_rail: usize,
    /// What is done with memory that the user did not register.
    pub registration: Registration,
    /// Whether devices may reorder the writes into registered memory.
    pub relaxed_ordering: bool,
    /// How devices reach GPU memory.
    pub gpu_direct: GpuDirect,
    /// Bytes of a sub-chunk.
    pub subchunk: usize,
    /// Interval at which idle queue pairs are probed while this rank waits.
    pub heartbeat: Duration,
    /// Fault injection for tests. Does nothing in other builds.
    pub shim: Shim,
}

impl VerbsOptions {
    /// The options that the settings ask for.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            library: config.ibverbs.clone(),
            service_level: config.ib_sl as u8,
            traffic_class: config.ib_tc as u8,
            timeout: config.ib_timeout as u8,
            // Some drivers take 7 as "retry without end", which would hide the loss of a peer.
            retries: config.ib_retries.min(6) as u8,
            qps_per_rail: config.ib_qps_per_rail,
            registration: config.ib_register,
            relaxed_ordering: config.ib_relaxed_ordering.0,
            gpu_direct: config.gpu_direct,
            subchunk: config.subchunk.0,
            heartbeat: config.heartbeat,
            shim: Shim::none(),
        }
    }

    /// These options for a rank whose GPU is this far from its rails. Without direct access to GPU memory if that is farther than
    /// `FLEXRING_GDR_LEVEL`, unless `FLEXRING_GPU_DIRECT` names a way.
    pub(crate) fn at_distance(mut self, rails: &[Rail], level: GdrLevel) -> Self {
        let far =
            rails.iter().filter(|rail| !reaches_gpu(rail.distance, level)).max_by_key(|rail| rail.distance);
        if let Some(Rail { device, distance, .. }) = far
            && self.gpu_direct == GpuDirect::Auto
        {
            let level = level.name();
            log::info!(
                "verbs: GPU memory is copied through host memory, as {device} is {distance} from the GPU and \
                 FLEXRING_GDR_LEVEL={level}"
            );
            self.gpu_direct = GpuDirect::Off;
        }
        self
    }

    /// Attributes of the path from a rail of this rank to one of the peer, with packets of `mtu`
    /// (as verbs number MTUs: 1 is 256 bytes, 5 is 4096).
    pub(super) fn path_attributes(&self, mine: &Rail, theirs: &Rail, mtu: u32) -> PathAttributes {
        PathAttributes {
            port: mine.port,
            gid_index: mine.gid_index,
            gid: theirs.gid,
            lid: theirs.lid,
            global: mine.layer == LinkLayer::Ethernet || mine.network != theirs.network,
            mtu,
            service_level: self.service_level,
            traffic_class: self.traffic_class,
            timeout: self.timeout,
            retries: self.retries,
        }
    }
}
