//! How the links of a rank come to be: devices opened, queue pairs made, told, connected, and tried.
//!
//! Owns the steps up to the first message. Must not know how what ranks tell each other travels.
//!
//! Every step is one that all ranks take together, so that all of them can tell each other how it went before the
//! next: [`UnconnectedVerbs::open`] and the invitations, [`UnconnectedVerbs::connect`], and [`Verbs::greet`].

use super::control_buffer::ControlBuffer;
use super::inventory::LinkLayer;
use super::link::{Link, RECV_DEPTH, SEND_DEPTH};
use super::objects::{
    CompletionQueue, Context, Depth, Fresh, PathAttributes, PortAttributes, ProtectionDomain, QueuePair, Shim,
};
use super::peer::{ControlMemory, LinkConnectInfo, Peer};
use super::port_selection::Rail;
use super::registry::MemoryRegistry;
use super::transport::{RailDevice, Verbs};
use super::wire::{ControlLayout, MAX_RAILS};
use crate::config::{Config, GpuDirect, Registration};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use memmap2::MmapMut;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that a work request shall carry itself, if the device can: a call with a few dozen elements.
const INLINE: u32 = 188;

/// How links are made.
#[derive(Clone, Debug)]
pub(crate) struct VerbsOptions {
    pub service_level: u8,
    pub traffic_class: u8,
    pub timeout: u8,
    pub retries: u8,
    pub qps_per_rail: usize,
    pub registration: Registration,
    pub relaxed_ordering: bool,
    /// How memory of GPUs is reached.
    pub gpu_direct: GpuDirect,
    /// Bytes of a sub-chunk.
    pub subchunk: usize,
    /// How often an idle connection is tried while this rank waits.
    pub heartbeat: Duration,
    pub shim: Shim,
}

impl VerbsOptions {
    /// What the settings say.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            service_level: config.ib_sl as u8,
            traffic_class: config.ib_tc as u8,
            timeout: config.ib_timeout as u8,
            // To some drivers 7 means for ever, and a peer that is gone would never show.
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
}

/// What a rank tells the others of itself, once its queue pairs exist.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct ConnectInfo {
    /// By rail: the largest packets that its port takes, as verbs number them.
    mtus: Vec<u32>,
    peers: Vec<(Rank, LinkConnectInfo)>,
}

/// A rank whose queue pairs are not connected yet.
pub(crate) struct UnconnectedVerbs {
    peers: Vec<UnconnectedLink>,
    devices: Vec<RailDevice>,
    ports: Vec<PortAttributes>,
    rails: Vec<Rail>,
    registry: Arc<MemoryRegistry>,
    controls: Arc<ControlMemory>,
    options: VerbsOptions,
    me: Rank,
}

/// One peer, half connected.
struct UnconnectedLink {
    peer: Rank,
    /// By pair, the rail of this rank and of the peer.
    rails: Vec<(usize, usize)>,
    pairs: Vec<QueuePair<Fresh>>,
    control: ControlBuffer,
    address: u64,
}

impl UnconnectedVerbs {
    /// Opens the rails' devices and makes the queue pairs: for each peer, over each pair of rails (this rank's and the
    /// peer's) that is to connect them.
    ///
    /// # Errors
    /// `System`, naming verb, device and cause, if a device refuses.
    pub(crate) fn open(
        me: Rank,
        rails: &[Rail],
        peers: &[(Rank, Vec<(usize, usize)>)],
        options: VerbsOptions,
    ) -> Result<Self> {
        let qp_count = |rail: usize| {
            let pairs = peers.iter().flat_map(|(_, pairs)| pairs);
            pairs.filter(|(mine, _)| *mine == rail).count() * options.qps_per_rail
        };
        // One request more is for the end of a queue pair that breaks.
        let depth = Depth { sends: SEND_DEPTH as u32 + 1, receives: RECV_DEPTH as u32, inline: INLINE };
        let mut devices = Vec::new();
        let mut ports = Vec::new();
        for (number, rail) in rails.iter().enumerate().take(MAX_RAILS) {
            let context = Context::open(&rail.device, options.shim.clone())?;
            ports.push(context.port(rail.port)?);
            let pd = ProtectionDomain::new(&context)?;
            let entries = qp_count(number).max(1) * (depth.sends + depth.receives) as usize;
            let queue = CompletionQueue::new(&context, entries)?;
            devices.push(RailDevice { queue, pd, context, port: rail.port });
        }
        let pds = devices.iter().map(|device| Arc::clone(&device.pd)).collect();
        let registry =
            MemoryRegistry::new(pds, options.relaxed_ordering, options.registration, options.subchunk)?
                .with_gpu_direct(options.gpu_direct);

        let layouts =
            peers.iter().map(|(_, rails)| ControlLayout { qps: rails.len() * options.qps_per_rail });
        let half: usize = layouts.map(ControlLayout::bytes).sum::<usize>().max(4096);
        let mut memory = MmapMut::map_anon(2 * half)
            .map_err(|cause| Error::system("cannot have memory for the boards of links", cause))?;
        let start = NonNull::from(&mut memory[..]).cast();
        // SAFETY: every link holds the mapping, and nobody touches it but through the links' boards.
        let all = unsafe { Piece::new(start, 2 * half) };
        let (remote, local) = (all.narrow(0, half), all.narrow(half, half));
        let (inboxes_at, outboxes_at) =
            (registry.register_internal(remote, true)?, registry.register_internal(local, false)?);
        let controls = Arc::new(ControlMemory { remote: inboxes_at, local: outboxes_at, _memory: memory });

        let mut unconnected = Vec::new();
        let mut at = 0;
        for (peer, rails_to) in peers {
            let rails_of: Vec<_> =
                rails_to.iter().flat_map(|rails| std::iter::repeat_n(*rails, options.qps_per_rail)).collect();
            let mut pairs = Vec::new();
            for (mine, _) in &rails_of {
                let RailDevice { pd, queue, .. } = &devices[*mine];
                let psn = getrandom::u32().unwrap_or(1) & 0xff_ffff;
                let place = (rails[*mine].port, rails[*mine].pkey_index);
                pairs.push(QueuePair::new(pd, queue, depth, place, *peer, psn)?);
            }
            let layout = ControlLayout { qps: rails_of.len() };
            let control = ControlBuffer::new(
                remote.narrow(at, layout.bytes()),
                local.narrow(at, layout.bytes()),
                layout,
            );
            let address = remote.narrow(at, 1).as_ptr() as u64;
            unconnected.push(UnconnectedLink { peer: *peer, rails: rails_of, pairs, control, address });
            at += layout.bytes();
        }
        let rails = rails.to_vec();
        let registry = Arc::new(registry);
        Ok(Self { peers: unconnected, devices, ports, rails, registry, controls, options, me })
    }

    /// What the peers must know.
    ///
    /// # Errors
    /// `System` if a key cannot be had.
    pub(crate) fn connect_info(&self) -> Result<ConnectInfo> {
        let keys = self.controls.remote.rkeys()?;
        let peers = self.peers.iter().map(|half| {
            let endpoints = half.pairs.iter().map(QueuePair::endpoint).collect();
            (half.peer, LinkConnectInfo { endpoints, address: half.address, keys })
        });
        let mtus = self.ports.iter().map(|port| port.mtu).collect();
        Ok(ConnectInfo { mtus, peers: peers.collect() })
    }

    /// Connects to all peers; `rails` and `invitations` are what the ranks have told, by rank.
    ///
    /// # Errors
    /// `System` if a device refuses; `Disagreement` if what a peer told does not fit.
    pub(crate) fn connect(
        self,
        rails: &[Vec<Rail>],
        connect_info: &[ConnectInfo],
        fault: &Arc<Fault>,
    ) -> Result<Verbs> {
        let Self { peers, devices, ports, rails: mine, registry, controls, options, me } = self;
        let mut links = Vec::new();
        for (place, half) in peers.into_iter().enumerate() {
            let peer = half.peer;
            let missing = |what: &str| {
                Error::new(ErrorKind::Disagreement, format!("rank {peer} told nothing of its {what}"))
            };
            let theirs = &connect_info[peer];
            let (_, connect_info) =
                theirs.peers.iter().find(|(rank, _)| *rank == me).ok_or_else(|| missing("queue pairs"))?;
            let mut fresh = Vec::new();
            for (pair, (mine_at, theirs_at)) in half.pairs.into_iter().zip(&half.rails) {
                let rail = rails[peer].get(*theirs_at).ok_or_else(|| missing("rails"))?;
                let mtu = theirs.mtus.get(*theirs_at).ok_or_else(|| missing("packets"))?;
                let mtu = ports[*mine_at].mtu.min(*mtu);
                fresh.push((pair, path_attributes(&mine[*mine_at], rail, mtu, &options)));
            }
            let link = Link::new(peer, half.control, &half.rails);
            links.push(Peer::connect(place, link, half.control, &controls, fresh, connect_info)?);
        }
        let rails = mine.into_iter().zip(ports).collect();
        Verbs::new(links, devices, rails, registry, options, Arc::clone(fault))
    }

    /// Whoever is told of memory that devices shall reach.
    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::clone(&self.registry) as _
    }
}

/// How a peer's rail is reached from one of this rank's.
pub(super) fn path_attributes(
    mine: &Rail,
    theirs: &Rail,
    mtu: u32,
    options: &VerbsOptions,
) -> PathAttributes {
    PathAttributes {
        port: mine.port,
        gid_index: mine.gid_index,
        gid: theirs.gid,
        lid: theirs.lid,
        global: mine.layer == LinkLayer::Ethernet || mine.network != theirs.network,
        mtu,
        service_level: options.service_level,
        traffic_class: options.traffic_class,
        timeout: options.timeout,
        retries: options.retries,
    }
}
