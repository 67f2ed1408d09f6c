//! Setting up the links of a rank: opening devices, creating queue pairs, exchanging addresses, connecting.
//!
//! Owns the steps up to the first message. Must not know how ranks exchange [`ConnectInfo`], nor which links
//! plans use.
//!
//! All ranks take each step together and compare the outcomes before the next: [`UnconnectedVerbs::open`] and
//! [`UnconnectedVerbs::connect_info`]; then [`UnconnectedVerbs::send_links`],
//! [`UnconnectedVerbs::receive_links`] and [`UnconnectedVerbs::connect`]; then [`Verbs::handshake`]. Within
//! `connect` ranks wait for lower ones, if their devices have options to agree on (`ece_agreement`).

use super::connect_info::{ConnectInfo, LinkConnectInfo, LinkMessage};
use super::ece_agreement::{self, QpEce};
use super::link_batch::{LinkBatch, LinkResources, RailDevice, UnconnectedLink};
use super::link_directory::LinkDirectory;
use super::objects::{EceOptions, Endpoint, Library, PathAttributes, PortAttributes};
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

    /// Waits for the ends of the peers.
    ///
    /// # Errors
    /// `Timeout`, naming the missing ranks, at the deadline; `Disagreement` if a rank sends something else;
    /// `PeerLost` if a peer leaves; the fault that is raised meanwhile.
    pub(crate) fn receive_links(&self, deadline: Instant, fault: &Arc<Fault>) -> Result<ReceivedLinks> {
        let mut received = ReceivedLinks::default();
        let peers: Vec<Rank> = self.links.iter().map(|link| link.peer).collect();
        let missing = |received: &ReceivedLinks| without(&peers, &received.infos);
        let what = "the queue pairs of their links";
        let outcome = received.wait(&self.directory, &peers, &missing, what, (deadline, fault));
        outcome.inspect_err(|_| accept_nothing(&self.directory, &peers)).map(|()| received)
    }

    /// Connects to all peers. `connect_info` is what the ranks published, by rank; `received` what the peers
    /// sent.
    ///
    /// # Errors
    /// The rails that cannot be connected; `Disagreement` if what a peer published does not fit this rank's
    /// links; those of [`receive_links`](Self::receive_links).
    pub(crate) fn connect(
        self,
        connect_info: &[ConnectInfo],
        mut received: ReceivedLinks,
        deadline: Instant,
        fault: &Arc<Fault>,
    ) -> std::result::Result<Verbs, SetupFailure> {
        let Self { links, batch, devices, rails, registry, directory, options } = self;
        let counter = |device: &RailDevice| RailCounters::new(device.context.name(), device.port);
        let counters: Arc<[RailCounters]> = devices.iter().map(counter).collect();
        let ranks: Vec<Rank> = links.iter().map(|link| link.peer).collect();
        let prepare = |(index, link): (usize, UnconnectedLink)| {
            let peer = link.peer;
            let published = connect_info.get(peer).zip(received.infos.remove(&peer));
            let (info, link_info) = published.ok_or_else(|| {
                Error::disagreement(format!(
                    "rank {peer} published no queue pairs: do all ranks run the same build of flexring?"
                ))
            })?;
            let paths = directory.paths(peer, &link.rails, &rails, &options, (info, &link_info))?;
            let proposals = ece_agreement::proposals(&link.link_info().ece, &link_info.ece);
            Ok(PreparedLink { index, link, info, link_info, paths, proposals })
        };
        let prepared: Result<Vec<_>> = links.into_iter().enumerate().map(prepare).collect();
        let prepared = prepared.inspect_err(|_| accept_nothing(&directory, &ranks))?;
        let connect = |prepared: PreparedLink<'_>, ece: &[Option<EceOptions>]| {
            let PreparedLink { index, link, info, link_info, mut paths, .. } = prepared;
            ece_agreement::set(&mut paths, ece);
            let peer = link.peer;
            let state = directory.link(peer, link.control, &link.rails);
            let peer = Peer::new(index, state, link.control, &link.controls, &counters);
            let mut peer = peer.with_reconnects(options.reconnect);
            match peer.connect(link.qps, &paths, (info, &link_info), &[]) {
                Ok(()) => Ok((index, peer)),
                Err((qp, cause)) => {
                    let (rail, theirs) = link.rails[qp];
                    Err(RailFault { rail, other_end: Some((link.peer, theirs)), cause })
                }
            }
        };
        // The ends that accept connect first. They wait for no rank, so no ranks wait for each other.
        let is_first = |link: &PreparedLink<'_>| {
            link.proposals.is_none() || ece_agreement::accepts(directory.me, link.link.peer)
        };
        let (first, second): (Vec<_>, Vec<_>) = prepared.into_iter().partition(is_first);
        let (mut peers, mut faults, mut accepted) = (Vec::new(), Vec::new(), Vec::new());
        for mut prepared in first {
            let (rank, proposals) = (prepared.link.peer, prepared.proposals.take());
            let connected = connect(prepared, proposals.as_deref().unwrap_or_default());
            if proposals.is_some() {
                accepted.push((rank, connected.as_ref().map(|(_, peer)| peer.ece()).unwrap_or_default()));
            }
            connected.map_or_else(|fault| faults.push(fault), |peer| peers.push(peer));
        }
        send_accepted(&directory, accepted)?;
        let proposed: Vec<Rank> = second.iter().map(|link| link.link.peer).collect();
        let missing = |received: &ReceivedLinks| without(&proposed, &received.accepted);
        let what = "the options of their queue pairs";
        received.wait(&directory, &ranks, &missing, what, (deadline, fault))?;
        for prepared in second {
            let ece = received.accepted.remove(&prepared.link.peer).unwrap_or_default();
            connect(prepared, &ece).map_or_else(|fault| faults.push(fault), |peer| peers.push(peer));
        }
        if !faults.is_empty() {
            return Err(SetupFailure::Rails(faults));
        }
        peers.sort_unstable_by_key(|(index, _)| *index);
        let mut peers: Vec<Peer> = peers.into_iter().map(|(_, peer)| peer).collect();
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

/// A link whose queue pairs can be connected once the ends agree on ECE options.
struct PreparedLink<'a> {
    /// Its place among the links of this rank.
    index: usize,
    link: UnconnectedLink,
    /// What the peer published.
    info: &'a ConnectInfo,
    link_info: LinkConnectInfo,
    paths: Vec<(Endpoint, PathAttributes)>,
    /// The options that the accepting end sets.
    proposals: Option<QpEce>,
}

/// What the peers of planned links have sent.
#[derive(Debug, Default)]
pub(crate) struct ReceivedLinks {
    /// Their ends.
    infos: BTreeMap<Rank, LinkConnectInfo>,
    /// The ECE options that they have accepted.
    accepted: BTreeMap<Rank, QpEce>,
}

impl ReceivedLinks {
    /// Takes messages of these peers until none is missing. `what` names what is missing.
    fn wait(
        &mut self,
        directory: &LinkDirectory,
        peers: &[Rank],
        missing: &dyn Fn(&Self) -> Vec<Rank>,
        what: &str,
        (deadline, fault): (Instant, &Arc<Fault>),
    ) -> Result<()> {
        if missing(self).is_empty() {
            return Ok(());
        }
        let messages = &directory.out_of_band;
        let watch = fault.watch()?;
        while !missing(self).is_empty() {
            while let Some((from, message)) = messages.receive() {
                self.take(peers, from, &message)?;
            }
            fault.check_waiting()?;
            messages.check()?;
            let missing = missing(self);
            if Instant::now() > deadline {
                let missing = RankList::new(&missing);
                return Err(Error::timeout(format!("{missing} did not send {what}")));
            }
            let mut fds = [
                PollFd::from_borrowed_fd(messages.wake_fd(), PollFlags::IN),
                PollFd::new(&watch, PollFlags::IN),
            ];
            let longest = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            if !missing.is_empty() {
                let _ = rustix::event::poll(&mut fds, Some(&longest));
            }
        }
        Ok(())
    }

    fn take(&mut self, peers: &[Rank], from: Rank, message: &[u8]) -> Result<()> {
        if message.is_empty() {
            let message = format!("rank {from} has left while this rank connects to it");
            return Err(Error::peer_lost(message).with_suspect(from));
        }
        match LinkMessage::decode(from, message)? {
            LinkMessage::Planned(info) if peers.contains(&from) => {
                self.infos.insert(from, info);
            }
            LinkMessage::Accepted(ece) if peers.contains(&from) => {
                self.accepted.insert(from, ece);
            }
            _ => {
                return Err(Error::disagreement(format!(
                    "rank {from} makes a link that this rank's plans do not use; do all ranks run with the same settings?"
                )));
            }
        }
        Ok(())
    }
}

/// Those of these ranks that have no entry.
fn without<T>(ranks: &[Rank], entries: &BTreeMap<Rank, T>) -> Vec<Rank> {
    ranks.iter().copied().filter(|rank| !entries.contains_key(rank)).collect()
}

/// Sends peers the ECE options that this rank has accepted.
fn send_accepted(directory: &LinkDirectory, accepted: Vec<(Rank, QpEce)>) -> Result<()> {
    let encode = |(rank, ece)| Ok((rank, LinkMessage::Accepted(ece).encode()?));
    let messages = accepted.into_iter().map(encode).collect::<Result<Vec<_>>>()?;
    if messages.is_empty() { Ok(()) } else { directory.out_of_band.send(&messages) }
}

/// Has no peer wait for ECE options of this rank, which does not get as far as connecting.
fn accept_nothing(directory: &LinkDirectory, peers: &[Rank]) {
    let waiting = peers.iter().filter(|peer| ece_agreement::accepts(directory.me, **peer));
    if let Err(error) = send_accepted(directory, waiting.map(|peer| (*peer, QpEce::new())).collect()) {
        log::debug!("verbs: {}", error.message());
    }
}
