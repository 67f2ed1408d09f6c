//! Setting up the links of a rank: opening devices, creating queue pairs, exchanging addresses, connecting.
//!
//! Owns the steps up to the first message. Must not know how ranks exchange [`ConnectInfo`].
//!
//! All ranks take each step together and compare the outcomes before the next: [`UnconnectedVerbs::open`] and
//! [`UnconnectedVerbs::connect_info`], then [`UnconnectedVerbs::connect`], then [`Verbs::handshake`].

use super::control_buffer::ControlBuffer;
use super::link::{Link, RECV_DEPTH, SEND_DEPTH};
use super::objects::{
    CompletionQueue, Context, Depth, Fresh, Library, PortAttributes, ProtectionDomain, QueuePair,
};
use super::options::VerbsOptions;
use super::peer::{ControlMemory, LinkConnectInfo, Peer};
use super::port_selection::Rail;
use super::registry::MemoryRegistry;
use super::transport::{RailDevice, Verbs};
use super::wire::{ControlLayout, MAX_RAILS};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Registrar, map_unforked};
use crate::rank::Rank;
use crate::secret::SecretKey;
use std::ptr::NonNull;
use std::sync::Arc;

/// Inline data requested for each queue pair, in bytes: enough for a call with a few dozen elements.
const INLINE: u32 = 188;

/// What a rank publishes once its queue pairs exist: everything that its peers need to connect to them.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct ConnectInfo {
    /// By rail: the active MTU of its port, as verbs number MTUs.
    mtus: Vec<u32>,
    /// By peer: the part for the link to that peer.
    links: Vec<(Rank, LinkConnectInfo)>,
}

/// The links of a rank before its queue pairs are connected.
pub(crate) struct UnconnectedVerbs {
    links: Vec<UnconnectedLink>,
    devices: Vec<RailDevice>,
    ports: Vec<PortAttributes>,
    rails: Vec<Rail>,
    registry: Arc<MemoryRegistry>,
    controls: Arc<ControlMemory>,
    options: VerbsOptions,
    me: Rank,
}

/// One link before its queue pairs are connected.
struct UnconnectedLink {
    peer: Rank,
    /// By queue pair: the rail of this rank and the rail of the peer.
    rails: Vec<(usize, usize)>,
    qps: Vec<QueuePair<Fresh>>,
    control: ControlBuffer,
    /// Address of the remote side of the control buffer, to which the peer writes.
    address: u64,
}

impl UnconnectedVerbs {
    /// Opens the devices of `rails` and creates the queue pairs. `peers` lists, for each peer, the pairs of rails
    /// (this rank's, the peer's) to connect.
    ///
    /// # Errors
    /// `System` if libibverbs cannot be opened, or, naming verb, device and cause, if a device refuses.
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
        // One extra request: the drain marker of a queue pair that breaks.
        let depth = Depth { sends: SEND_DEPTH as u32 + 1, receives: RECV_DEPTH as u32, inline: INLINE };
        let library = Library::open(options.library.as_deref())?;
        let mut devices = Vec::new();
        let mut ports = Vec::new();
        for (number, rail) in rails.iter().enumerate().take(MAX_RAILS) {
            let context = Context::open(library, &rail.device, options.shim.clone())?;
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
        let side_len: usize = layouts.map(ControlLayout::bytes).sum::<usize>().max(4096);
        let mut memory = map_unforked(2 * side_len)?;
        let start = NonNull::from(&mut memory[..]).cast();
        // SAFETY: `ControlMemory` keeps the mapping until every link is gone, and only control buffers access it.
        let whole = unsafe { Piece::new(start, 2 * side_len) };
        let (remote, local) = (whole.narrow(0, side_len), whole.narrow(side_len, side_len));
        let controls = Arc::new(ControlMemory {
            remote: registry.register_internal(remote, true)?,
            local: registry.register_internal(local, false)?,
            _memory: memory,
        });

        let mut links = Vec::new();
        let mut offset = 0;
        for (peer, pairs) in peers {
            let rails_by_qp: Vec<_> =
                pairs.iter().flat_map(|pair| std::iter::repeat_n(*pair, options.qps_per_rail)).collect();
            let mut qps = Vec::new();
            for (mine, _) in &rails_by_qp {
                let RailDevice { pd, queue, .. } = &devices[*mine];
                let psn = getrandom::u32().unwrap_or(1) & 0xff_ffff;
                let port = (rails[*mine].port, rails[*mine].pkey_index);
                qps.push(QueuePair::new(pd, queue, depth, port, *peer, psn)?);
            }
            let layout = ControlLayout { qps: rails_by_qp.len() };
            let remote = remote.narrow(offset, layout.bytes());
            let local = local.narrow(offset, layout.bytes());
            let control = ControlBuffer::new(remote, local, layout);
            let address = remote.as_ptr() as u64;
            links.push(UnconnectedLink { peer: *peer, rails: rails_by_qp, qps, control, address });
            offset += layout.bytes();
        }
        let rails = rails.to_vec();
        let registry = Arc::new(registry);
        Ok(Self { links, devices, ports, rails, registry, controls, options, me })
    }

    /// What the peers need to connect to this rank.
    ///
    /// # Errors
    /// `System` if the control buffers cannot be registered at a device.
    pub(crate) fn connect_info(&self) -> Result<ConnectInfo> {
        let keys = self.controls.remote.rkeys()?;
        let links = self.links.iter().map(|link| {
            let endpoints = link.qps.iter().map(QueuePair::endpoint).collect();
            (link.peer, LinkConnectInfo { endpoints, address: link.address, keys })
        });
        let mtus = self.ports.iter().map(|port| port.mtu).collect();
        Ok(ConnectInfo { mtus, links: links.collect() })
    }

    /// Connects to all peers. `rails` and `connect_info` are what the ranks published, by rank; `key` gives the key of the link to a
    /// peer.
    ///
    /// # Errors
    /// `System` if a device refuses; `Disagreement` if what a peer published does not fit this rank's links.
    pub(crate) fn connect(
        self,
        rails: &[Vec<Rail>],
        connect_info: &[ConnectInfo],
        key: &dyn Fn(Rank) -> SecretKey,
        fault: &Arc<Fault>,
    ) -> Result<Verbs> {
        let Self { links, devices, ports, rails: mine, registry, controls, options, me } = self;
        let mut peers = Vec::new();
        for (index, link) in links.into_iter().enumerate() {
            let peer = link.peer;
            let missing = |what: &str| {
                let message = format!("rank {peer} published no {what}; do all ranks run the same version?");
                Error::disagreement(message)
            };
            let theirs = &connect_info[peer];
            let (_, link_info) =
                theirs.links.iter().find(|(rank, _)| *rank == me).ok_or_else(|| missing("queue pairs"))?;
            let mut fresh = Vec::new();
            for (qp, (mine_at, theirs_at)) in link.qps.into_iter().zip(&link.rails) {
                let rail = rails[peer].get(*theirs_at).ok_or_else(|| missing("matching rail"))?;
                let mtu = theirs.mtus.get(*theirs_at).ok_or_else(|| missing("MTU of its rail"))?;
                let mtu = ports[*mine_at].mtu.min(*mtu);
                fresh.push((qp, options.path_attributes((&mine[*mine_at], &ports[*mine_at]), rail, mtu)));
            }
            let state = Link::new(peer, link.control, &link.rails).with_key(me, &key(peer));
            peers.push(Peer::connect(index, state, link.control, &controls, fresh, link_info)?);
        }
        let rails = mine.into_iter().zip(ports).collect();
        Verbs::new(peers, devices, rails, registry, options, Arc::clone(fault))
    }

    /// The registrar of the memory that devices may access.
    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::clone(&self.registry) as _
    }
}
