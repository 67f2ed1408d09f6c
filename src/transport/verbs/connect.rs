//! How the links of a rank come to be: devices opened, queue pairs made, told, connected, and tried.
//!
//! Owns the steps up to the first message. Must not know how what ranks tell each other travels.
//!
//! Every step is one that all ranks take together, so that all of them can tell each other how it went before the
//! next: [`Prepared::open`] and the invitations, [`Prepared::connect`], and [`Verbs::greet`].

use super::board::Board;
use super::inventory::LinkLayer;
use super::link::{Link, RECEIVES, SENDS};
use super::objects::{
    CompletionQueue, Context, Depth, Fresh, PathAttributes, PortAttributes, ProtectionDomain, QueuePair, Shim,
};
use super::peer::{Boards, Invitation, Peer};
use super::port_selection::Rail;
use super::regions::Regions;
use super::transport::{Device, Verbs};
use super::wire::{Layout, RAILS};
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
pub(crate) struct Options {
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

impl Options {
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
pub(crate) struct Invitations {
    /// By rail: the largest packets that its port takes, as verbs number them.
    mtus: Vec<u32>,
    peers: Vec<(Rank, Invitation)>,
}

/// A rank whose queue pairs are not connected yet.
pub(crate) struct Prepared {
    peers: Vec<Half>,
    devices: Vec<Device>,
    ports: Vec<PortAttributes>,
    rails: Vec<Rail>,
    regions: Arc<Regions>,
    boards: Arc<Boards>,
    options: Options,
    me: Rank,
}

/// One peer, half connected.
struct Half {
    peer: Rank,
    /// By pair, the rail of this rank and of the peer.
    rails: Vec<(usize, usize)>,
    pairs: Vec<QueuePair<Fresh>>,
    board: Board,
    address: u64,
}

impl Prepared {
    /// Opens the rails' devices and makes the queue pairs: for each peer, over each pair of rails (this rank's and the
    /// peer's) that is to connect them.
    ///
    /// # Errors
    /// `System`, naming verb, device and cause, if a device refuses.
    pub(crate) fn open(
        me: Rank,
        rails: &[Rail],
        peers: &[(Rank, Vec<(usize, usize)>)],
        options: Options,
    ) -> Result<Self> {
        let connections = |rail: usize| {
            let pairs = peers.iter().flat_map(|(_, pairs)| pairs);
            pairs.filter(|(mine, _)| *mine == rail).count() * options.qps_per_rail
        };
        // One request more is for the end of a queue pair that breaks.
        let depth = Depth { sends: SENDS as u32 + 1, receives: RECEIVES as u32, inline: INLINE };
        let mut devices = Vec::new();
        let mut ports = Vec::new();
        for (number, rail) in rails.iter().enumerate().take(RAILS) {
            let context = Context::open(&rail.device, options.shim.clone())?;
            ports.push(context.port(rail.port)?);
            let pd = ProtectionDomain::new(&context)?;
            let entries = connections(number).max(1) * (depth.sends + depth.receives) as usize;
            let queue = CompletionQueue::new(&context, entries)?;
            devices.push(Device { queue, pd, context, port: rail.port });
        }
        let pds = devices.iter().map(|device| Arc::clone(&device.pd)).collect();
        let regions = Regions::new(pds, options.relaxed_ordering, options.registration, options.subchunk)?
            .reaching_gpus(options.gpu_direct);

        let layouts = peers.iter().map(|(_, rails)| Layout { pairs: rails.len() * options.qps_per_rail });
        let half: usize = layouts.map(Layout::bytes).sum::<usize>().max(4096);
        let mut memory = MmapMut::map_anon(2 * half)
            .map_err(|cause| Error::system("cannot have memory for the boards of links", cause))?;
        let start = NonNull::from(&mut memory[..]).cast();
        // SAFETY: every link holds the mapping, and nobody touches it but through the links' boards.
        let all = unsafe { Piece::new(start, 2 * half) };
        let (inboxes, outboxes) = (all.narrow(0, half), all.narrow(half, half));
        let (inboxes_at, outboxes_at) = (regions.own(inboxes, true)?, regions.own(outboxes, false)?);
        let boards = Arc::new(Boards { inboxes: inboxes_at, outboxes: outboxes_at, _memory: memory });

        let mut halves = Vec::new();
        let mut at = 0;
        for (peer, rails_to) in peers {
            let rails_of: Vec<_> =
                rails_to.iter().flat_map(|rails| std::iter::repeat_n(*rails, options.qps_per_rail)).collect();
            let mut pairs = Vec::new();
            for (mine, _) in &rails_of {
                let Device { pd, queue, .. } = &devices[*mine];
                let psn = getrandom::u32().unwrap_or(1) & 0xff_ffff;
                let place = (rails[*mine].port, rails[*mine].pkey_index);
                pairs.push(QueuePair::new(pd, queue, depth, place, *peer, psn)?);
            }
            let layout = Layout { pairs: rails_of.len() };
            let board =
                Board::new(inboxes.narrow(at, layout.bytes()), outboxes.narrow(at, layout.bytes()), layout);
            let address = inboxes.narrow(at, 1).as_ptr() as u64;
            halves.push(Half { peer: *peer, rails: rails_of, pairs, board, address });
            at += layout.bytes();
        }
        let rails = rails.to_vec();
        let regions = Arc::new(regions);
        Ok(Self { peers: halves, devices, ports, rails, regions, boards, options, me })
    }

    /// What the peers must know.
    ///
    /// # Errors
    /// `System` if a key cannot be had.
    pub(crate) fn invitations(&self) -> Result<Invitations> {
        let keys = self.boards.inboxes.rkeys()?;
        let peers = self.peers.iter().map(|half| {
            let endpoints = half.pairs.iter().map(QueuePair::endpoint).collect();
            (half.peer, Invitation { endpoints, address: half.address, keys })
        });
        let mtus = self.ports.iter().map(|port| port.mtu).collect();
        Ok(Invitations { mtus, peers: peers.collect() })
    }

    /// Connects to all peers; `rails` and `invitations` are what the ranks have told, by rank.
    ///
    /// # Errors
    /// `System` if a device refuses; `Disagreement` if what a peer told does not fit.
    pub(crate) fn connect(
        self,
        rails: &[Vec<Rail>],
        invitations: &[Invitations],
        fault: &Arc<Fault>,
    ) -> Result<Verbs> {
        let Self { peers, devices, ports, rails: mine, regions, boards, options, me } = self;
        let mut links = Vec::new();
        for (place, half) in peers.into_iter().enumerate() {
            let peer = half.peer;
            let told = |what: &str| {
                Error::new(ErrorKind::Disagreement, format!("rank {peer} told nothing of its {what}"))
            };
            let theirs = &invitations[peer];
            let (_, invitation) =
                theirs.peers.iter().find(|(rank, _)| *rank == me).ok_or_else(|| told("queue pairs"))?;
            let mut fresh = Vec::new();
            for (pair, (mine_at, theirs_at)) in half.pairs.into_iter().zip(&half.rails) {
                let rail = rails[peer].get(*theirs_at).ok_or_else(|| told("rails"))?;
                let mtu = theirs.mtus.get(*theirs_at).ok_or_else(|| told("packets"))?;
                let mtu = ports[*mine_at].mtu.min(*mtu);
                fresh.push((pair, path_attributes(&mine[*mine_at], rail, mtu, &options)));
            }
            let link = Link::new(peer, half.board, &half.rails);
            links.push(Peer::connect(place, link, half.board, &boards, fresh, invitation)?);
        }
        let rails = mine.into_iter().zip(ports).collect();
        Verbs::new(links, devices, rails, regions, options, Arc::clone(fault))
    }

    /// Whoever is told of memory that devices shall reach.
    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::clone(&self.regions) as _
    }
}

/// How a peer's rail is reached from one of this rank's.
pub(super) fn path_attributes(mine: &Rail, theirs: &Rail, mtu: u32, options: &Options) -> PathAttributes {
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
