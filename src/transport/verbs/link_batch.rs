//! What links that are made together share: memory for control buffers, and completion queues.
//!
//! Also the devices of the rails. Owns its size and how links divide it.

use super::connect_info::{ConnectInfo, LinkConnectInfo};
use super::control_buffer::ControlBuffer;
use super::link::{RECV_DEPTH, WORK_REQUESTS};
use super::objects::{CompletionQueue, Context, Depth, Fresh, PortAttributes, ProtectionDomain, QueuePair};
use super::peer::ControlMemory;
use super::port_selection::Rail;
use super::registry::MemoryRegistry;
use super::shared_device::DeviceEvents;
use super::wire::{LinkShape, MAX_RAILS};
use crate::error::{Error, Result};
use crate::memory::{Piece, map_unforked};
use crate::rank::Rank;
use rustix::event::epoll;
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Inline data requested for each queue pair, in bytes: enough for a call with a few dozen elements.
const INLINE: u32 = 188;

/// The depth of each queue pair.
const DEPTH: Depth = Depth { sends: WORK_REQUESTS as u32, receives: RECV_DEPTH as u32, inline: INLINE };

/// The open device of one rail.
pub(super) struct RailDevice {
    /// One for each batch of links.
    pub queues: Vec<Arc<CompletionQueue>>,
    pub pd: Arc<ProtectionDomain>,
    pub context: Arc<Context>,
    pub events: DeviceEvents,
    /// Number of the port, from 1.
    pub port: u8,
}

/// What one or more links need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkResources {
    /// By rail of this rank: queue pairs.
    pub qps: [usize; MAX_RAILS],
    /// Bytes of one side of the control buffers. There are two sides.
    pub control_bytes: usize,
}

impl LinkResources {
    /// Those of a link over these pairs of rails (this rank's, the peer's).
    pub(crate) fn of_link(pairs: &[(usize, usize)], shape: LinkShape) -> Self {
        let control_bytes = shape.control_layout(pairs.len()).bytes();
        let mut new = Self { qps: [0; MAX_RAILS], control_bytes };
        pairs.iter().for_each(|(mine, _)| new.qps[*mine] += shape.qps_per_rail);
        new
    }

    /// Those of both.
    pub(super) fn and(self, other: Self) -> Self {
        let qps = std::array::from_fn(|rail| self.qps[rail] + other.qps[rail]);
        Self { qps, control_bytes: self.control_bytes + other.control_bytes }
    }

    /// Those of this many links.
    pub(crate) fn times(self, links: usize) -> Self {
        Self { qps: self.qps.map(|qps| qps * links), control_bytes: self.control_bytes * links }
    }

    /// Whether these include those of `other`.
    fn includes(&self, other: &Self) -> bool {
        self.control_bytes >= other.control_bytes
            && self.qps.iter().zip(&other.qps).all(|(mine, theirs)| mine >= theirs)
    }

    /// For how many links that need so much the devices' completion queues have room.
    pub(super) fn most_links(&self, devices: &[RailDevice]) -> usize {
        let most = |(rail, device): (usize, &RailDevice)| {
            device.context.limits().map_or(usize::MAX, |limits| limits.completions / self.completions(rail))
        };
        devices.iter().enumerate().map(most).min().unwrap_or(usize::MAX)
    }

    /// Entries of the completion queue of a rail.
    pub(super) fn completions(&self, rail: usize) -> usize {
        self.qps[rail].max(1) * (DEPTH.sends + DEPTH.receives) as usize
    }
}

/// A link whose queue pairs are not connected.
pub(super) struct UnconnectedLink {
    pub peer: Rank,
    /// By queue pair: the rail of this rank and the rail of the peer.
    pub rails: Vec<(usize, usize)>,
    pub qps: Vec<QueuePair<Fresh>>,
    pub control: ControlBuffer,
    pub controls: Arc<ControlMemory>,
    /// Where the remote side of the control buffer begins in that of the batch, in bytes.
    pub offset: u64,
}

impl UnconnectedLink {
    /// What the peer needs to connect to this end.
    pub(super) fn link_info(&self) -> LinkConnectInfo {
        let endpoints = self.qps.iter().map(QueuePair::endpoint).collect();
        LinkConnectInfo { endpoints, offset: self.offset }
    }
}

/// What links that are made together share.
pub(super) struct LinkBatch {
    controls: Arc<ControlMemory>,
    remote: Piece,
    local: Piece,
    /// Bytes of each side that links use.
    used: usize,
    /// By rail.
    pub queues: Vec<Arc<CompletionQueue>>,
    /// What further links may use.
    room: LinkResources,
}

impl LinkBatch {
    /// Room for links that need so much together. `failures`: why the devices of rails have failed, by rail.
    ///
    /// # Errors
    /// `System` if there is too little memory, or a device refuses.
    pub(super) fn new(
        devices: &[RailDevice],
        registry: &MemoryRegistry,
        room: LinkResources,
        failures: &[Option<Error>],
    ) -> Result<Self> {
        let queue = |rail: usize| {
            CompletionQueue::new(&devices[stand_in(rail, failures)].context, room.completions(rail))
        };
        let queues = (0..devices.len()).map(queue).collect::<Result<Vec<_>>>()?;
        let side_len = room.control_bytes.max(4096);
        let mut memory = map_unforked(2 * side_len)?;
        let start = NonNull::from(&mut memory[..]).cast();
        // SAFETY: `ControlMemory` keeps the mapping until every link is gone, and only control buffers access
        // it.
        let whole = unsafe { Piece::new(start, 2 * side_len) };
        let (remote, local) = (whole.narrow(0, side_len), whole.narrow(side_len, side_len));
        let controls = Arc::new(ControlMemory {
            remote: registry.register_internal(remote, true)?,
            local: registry.register_internal(local, false)?,
            _memory: memory,
        });
        Ok(Self { controls, remote, local, used: 0, queues, room })
    }

    /// Whether there is room for links that need so much.
    pub(super) fn has_room(&self, needed: &LinkResources) -> bool {
        self.room.includes(needed)
    }

    /// What the peers of all links of this batch need. `ports` are those of the rails.
    ///
    /// # Errors
    /// `System` if the control buffers cannot be registered at a device.
    pub(super) fn connect_info<'a>(
        &self,
        ports: impl Iterator<Item = &'a PortAttributes>,
    ) -> Result<ConnectInfo> {
        let address = self.remote.as_ptr() as u64;
        Ok(ConnectInfo {
            mtus: ports.map(|port| port.mtu).collect(),
            address,
            keys: self.controls.remote.rkeys()?,
        })
    }

    /// Makes the queue pairs of a link over these pairs of rails. There must be room. Those of rails whose
    /// devices have failed, by `failures`, are made at another device, and are destroyed instead of being
    /// connected ([`Peer::connect`](super::peer::Peer::connect)): peers number the queue pairs.
    ///
    /// # Errors
    /// `System` if a device refuses.
    pub(super) fn add<'a>(
        &mut self,
        devices: &[RailDevice],
        rail: impl Fn(usize) -> &'a Rail,
        peer: Rank,
        pairs: &[(usize, usize)],
        shape: LinkShape,
        failures: &[Option<Error>],
    ) -> Result<UnconnectedLink> {
        let needed = LinkResources::of_link(pairs, shape);
        assert!(self.has_room(&needed), "room for a link");
        let repeated = pairs.iter().flat_map(|pair| std::iter::repeat_n(*pair, shape.qps_per_rail));
        let rails: Vec<_> = repeated.collect();
        let mut qps = Vec::with_capacity(rails.len());
        for (mine, _) in &rails {
            let at = stand_in(*mine, failures);
            let psn = getrandom::u32().unwrap_or(1) & 0xff_ffff;
            let port = (rail(at).port, rail(at).pkey_index);
            qps.push(QueuePair::new(&devices[at].pd, &self.queues[at], DEPTH, port, peer, psn)?);
        }
        let layout = shape.control_layout(pairs.len());
        let remote = self.remote.narrow(self.used, layout.bytes());
        let local = self.local.narrow(self.used, layout.bytes());
        let offset = self.used as u64;
        self.used += needed.control_bytes;
        self.room.control_bytes -= needed.control_bytes;
        self.room.qps.iter_mut().zip(needed.qps).for_each(|(room, needed)| *room -= needed);
        let (control, controls) = (ControlBuffer::new(remote, local, layout), Arc::clone(&self.controls));
        Ok(UnconnectedLink { peer, rails, qps, control, controls, offset })
    }
}

/// The rail at whose device objects of this rail are made: itself, or one that works if its device has
/// failed.
fn stand_in(rail: usize, failures: &[Option<Error>]) -> usize {
    let has_failed = failures.get(rail).is_some_and(Option::is_some);
    let other = failures.iter().position(Option::is_none);
    if has_failed { other.unwrap_or(rail) } else { rail }
}

/// Adds a descriptor whose events wake the thread that sleeps on `epoll`, unless that was done: two ports of
/// a device share its events.
pub(super) fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
    match epoll::add(epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
        Err(Errno::EXIST) => Ok(()),
        added => added,
    }
}
