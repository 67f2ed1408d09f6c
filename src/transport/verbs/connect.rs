//! Setting up the links of a rank: opening devices, creating queue pairs, exchanging addresses, connecting.
//!
//! Owns the steps up to the first message. Must not know how ranks exchange [`ConnectInfo`], nor which links
//! plans use.
//!
//! All ranks take each step together and compare the outcomes before the next: [`UnconnectedVerbs::open`] and
//! [`UnconnectedVerbs::connect_info`]; then [`UnconnectedVerbs::send_links`],
//! [`UnconnectedVerbs::receive_links`] and [`UnconnectedVerbs::connect`]; then [`Verbs::handshake`].

use super::connect_info::{ConnectInfo, LinkConnectInfo, LinkMessage};
use super::gpu::GpuTrials;
use super::link_batch::{LinkBatch, LinkResources, RailDevice, UnconnectedLink};
use super::link_directory::LinkDirectory;
use super::objects::{Library, PortAttributes};
use super::options::VerbsOptions;
use super::peer::Peer;
use super::port_selection::Rail;
use super::rail_counters::RailCounters;
use super::rail_faults::{RailFault, SetupFailure};
use super::registry::MemoryRegistry;
use super::shared_device::SharedDevice;
use super::transport::Verbs;
use super::wire::MAX_RAILS;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::Registrar;
use crate::rank::{Rank, RankList};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::BTreeMap;
use std::sync::{Arc, Once};
use std::time::Instant;

/// The links of a rank before its queue pairs are connected.
pub(crate) struct UnconnectedVerbs {
    links: Vec<UnconnectedLink>,
    batch: LinkBatch,
    devices: Vec<RailDevice>,
    /// By device: its rail, and its port.
    rails: Vec<(Rail, PortAttributes)>,
    registry: Arc<MemoryRegistry>,
    directory: LinkDirectory,
    options: VerbsOptions,
}

impl UnconnectedVerbs {
    /// Opens the devices of this rank's rails, and creates the queue pairs of links to these peers.
    ///
    /// # Errors
    /// The rails whose devices cannot be opened or whose ports are down; `System` if libibverbs cannot be
    /// opened, or, naming verb, device and cause, if a device refuses anything else.
    pub(crate) fn open(
        directory: LinkDirectory,
        peers: &[Rank],
        options: VerbsOptions,
    ) -> std::result::Result<Self, SetupFailure> {
        let library = Library::open(options.library.as_deref())?;
        let open = |rail: &Rail| {
            let device = SharedDevice::open(library, &rail.device, &options.shim)?;
            let port = device.context().port(rail.port)?;
            if port.active {
                return Ok((device, port));
            }
            Err(Error::system(format!("port {} of {} is down", rail.port, rail.device)))
        };
        let (mut devices, mut faults) = (Vec::new(), Vec::new());
        for (rail, at) in directory.rails[directory.me].iter().take(MAX_RAILS).zip(0..) {
            match open(rail) {
                Ok(opened) => devices.push(opened),
                Err(cause) => faults.push(RailFault { rail: at, other_end: None, cause }),
            }
        }
        if !faults.is_empty() {
            return Err(SetupFailure::Rails(faults));
        }
        Ok(Self::over(devices, directory, peers, options)?)
    }

    /// [`open`](Self::open), with the devices of this rank's rails.
    pub(super) fn over(
        shared: Vec<(Arc<SharedDevice>, PortAttributes)>,
        directory: LinkDirectory,
        peers: &[Rank],
        options: VerbsOptions,
    ) -> Result<Self> {
        let (mut devices, mut rails) = (Vec::new(), Vec::new());
        let regions = shared.iter().map(|(device, _)| Arc::clone(device.regions())).collect();
        for ((device, port), rail) in shared.into_iter().zip(&directory.rails[directory.me]) {
            let (pd, context) = (Arc::clone(device.pd()), Arc::clone(device.context()));
            let events = device.subscribe();
            devices.push(RailDevice { queues: Vec::new(), pd, context, events, port: rail.port });
            rails.push((rail.clone(), port));
        }
        let pds = devices.iter().map(|device| Arc::clone(&device.pd)).collect();
        let registry =
            MemoryRegistry::new(pds, options.relaxed_ordering, options.registration, options.subchunk)?
                .with_gpu_direct(options.gpu_direct)
                .with_trials(GpuTrials { rails: rails.clone(), options: options.clone() })
                .with_shared_regions(regions);
        let shape = options.link_shape;
        let pairs: Vec<_> = peers.iter().map(|peer| (*peer, directory.pairs(*peer))).collect();
        let needed = pairs.iter().map(|(_, pairs)| LinkResources::of_link(pairs, shape));
        let needed = needed.fold(LinkResources::default(), LinkResources::and);
        let mut batch = LinkBatch::new(&devices, &registry, needed, &[])?;
        for (device, queue) in devices.iter_mut().zip(&batch.queues) {
            device.queues.push(Arc::clone(queue));
        }
        // The control buffers are registered without it.
        let relaxed = devices.iter().find(|device| device.pd.has_relaxed_keys_only());
        if let Some(device) = relaxed.filter(|_| !options.relaxed_ordering && directory.me == 0) {
            static ONCE: Once = Once::new();
            let name = device.context.name();
            ONCE.call_once(|| {
                log::warn!(
                    "verbs: FLEXRING_IB_RELAXED_ORDERING=0 has no effect on {name}, which registers memory with relaxed ordering only \
                     (fix: unset it, or choose another mode of the firmware)"
                );
            });
        }
        let rail = |rail: usize| &rails[rail].0;
        let link = |(peer, pairs): (Rank, Vec<_>)| batch.add(&devices, rail, peer, &pairs, shape, &[]);
        let links = pairs.into_iter().map(link).collect::<Result<Vec<_>>>()?;
        let registry = Arc::new(registry);
        Ok(Self { links, batch, devices, rails, registry, directory, options })
    }

    /// What all peers need to connect to this rank.
    ///
    /// # Errors
    /// `System` if the control buffers cannot be registered at a device.
    pub(crate) fn connect_info(&self) -> Result<ConnectInfo> {
        self.batch.connect_info(self.rails.iter().map(|(_, port)| port))
    }

    /// Sends each peer this rank's end of the link to it.
    ///
    /// # Errors
    /// Those of sending.
    pub(crate) fn send_links(&self) -> Result<()> {
        let message =
            |link: &UnconnectedLink| Ok((link.peer, LinkMessage::Planned(link.link_info()).encode()?));
        let messages = self.links.iter().map(message).collect::<Result<Vec<_>>>()?;
        self.directory.out_of_band.send(&messages)
    }

    /// Waits for the ends of the peers. Returns them by rank.
    ///
    /// # Errors
    /// `Timeout`, naming the missing ranks, at the deadline; `Disagreement` if a rank sends something else;
    /// `PeerLost` if a peer leaves; the fault that is raised meanwhile.
    pub(crate) fn receive_links(&self, deadline: Instant, fault: &Arc<Fault>) -> Result<ReceivedLinks> {
        let messages = &self.directory.out_of_band;
        let watch = fault.watch()?;
        let mut received = ReceivedLinks::new();
        loop {
            let peers = self.links.iter().map(|link| link.peer);
            let missing: Vec<Rank> = peers.filter(|peer| !received.contains_key(peer)).collect();
            if missing.is_empty() {
                return Ok(received);
            }
            fault.check_waiting()?;
            messages.check()?;
            if Instant::now() > deadline {
                let missing = RankList::new(&missing);
                return Err(Error::timeout(format!("{missing} did not send the queue pairs of their links")));
            }
            let mut fds = [
                PollFd::from_borrowed_fd(messages.wake_fd(), PollFlags::IN),
                PollFd::new(&watch, PollFlags::IN),
            ];
            let longest = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let _ = rustix::event::poll(&mut fds, Some(&longest));
            while let Some((from, message)) = messages.receive() {
                received.insert(from, self.end_of(from, &message)?);
            }
        }
    }

    /// The end of a planned link that a rank has sent.
    fn end_of(&self, from: Rank, message: &[u8]) -> Result<LinkConnectInfo> {
        if message.is_empty() {
            let message = format!("rank {from} has left while this rank connects to it");
            return Err(Error::peer_lost(message).with_suspect(from));
        }
        match LinkMessage::decode(from, message)? {
            LinkMessage::Planned(info) if self.links.iter().any(|link| link.peer == from) => Ok(info),
            _ => Err(Error::disagreement(format!(
                "rank {from} makes a link that this rank's plans do not use; do all ranks run with the same settings?"
            ))),
        }
    }

    /// Connects to all peers. `connect_info` is what the ranks published, by rank; `received` what the peers
    /// sent.
    ///
    /// # Errors
    /// The rails that cannot be connected; `Disagreement` if what a peer published does not fit this rank's
    /// links.
    pub(crate) fn connect(
        self,
        connect_info: &[ConnectInfo],
        mut received: ReceivedLinks,
        fault: &Arc<Fault>,
    ) -> std::result::Result<Verbs, SetupFailure> {
        let Self { links, batch, devices, rails, registry, directory, options } = self;
        let counter = |device: &RailDevice| RailCounters::new(device.context.name(), device.port);
        let counters: Arc<[RailCounters]> = devices.iter().map(counter).collect();
        let (mut peers, mut faults) = (Vec::new(), Vec::new());
        for (index, link) in links.into_iter().enumerate() {
            let rank = link.peer;
            let published = connect_info.get(rank).zip(received.remove(&rank));
            let (info, link_info) = published.ok_or_else(|| {
                Error::disagreement(format!(
                    "rank {rank} published no queue pairs: do all ranks run the same build of flexring?"
                ))
            })?;
            let paths = directory.paths(rank, &link.rails, &rails, &options, (info, &link_info))?;
            let state = directory.link(rank, link.control, &link.rails);
            let peer = Peer::new(index, state, link.control, &link.controls, &counters);
            let mut peer = peer.with_reconnects(options.reconnect);
            match peer.connect(link.qps, &paths, (info, &link_info), &[]) {
                Ok(()) => peers.push(peer),
                Err((qp, cause)) => {
                    let (rail, theirs) = link.rails[qp];
                    faults.push(RailFault { rail, other_end: Some((rank, theirs)), cause });
                }
            }
        }
        if !faults.is_empty() {
            return Err(SetupFailure::Rails(faults));
        }
        // All ranks compare the outcomes of this step before any of them writes.
        peers.iter_mut().try_for_each(Peer::set_ready)?;
        let parts = (directory, batch, counters);
        Ok(Verbs::new(peers, devices, rails, registry, options, Arc::clone(fault), parts)?)
    }

    /// The registrar of the memory that devices may access.
    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::clone(&self.registry) as _
    }
}

/// The ends of planned links that the peers have sent.
pub(crate) type ReceivedLinks = BTreeMap<Rank, LinkConnectInfo>;
