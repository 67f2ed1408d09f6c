//! Links that are made when a call first needs them: to peers that the plans of the communicator do not use.
//!
//! Owns the steps from the first message about such a link until both ends may write.
//!
//! Both ends take the same steps, whichever begins: a rank makes its queue pairs and sends their numbers to
//! the peer; when it has the numbers of the peer it connects them, and sends that it is **ready**; it writes
//! when the peer is ready. If devices failed meanwhile, it connects the queue pairs of the
//! others only, and if none is left, it aborts the link instead. Until then, requests stay in the link. A
//! rank that receives the numbers of a peer before it needs the link makes its end at once, so that a peer
//! that is in a call that this rank does not make is noticed as on any other link. No rank waits within these
//! steps, so ranks that make several links in different orders do not block each other.

#[cfg(test)]
pub(super) mod tests;

use super::port_states::PortStates;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::verbs::connect_info::{ConnectInfo, LinkConnectInfo, LinkMessage, RailMessage};
use crate::transport::verbs::link_batch::{LinkBatch, LinkResources, RailDevice, watch};
use crate::transport::verbs::link_directory::LinkDirectory;
use crate::transport::verbs::objects::{Fresh, PortAttributes, QueuePair};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::peer::Peer;
use crate::transport::verbs::port_selection::Rail;
use crate::transport::verbs::rail_counters::RailCounters;
use crate::transport::verbs::registry::MemoryRegistry;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Links for which a batch has room at most, if there are as many links already.
const MOST_IN_BATCH: usize = 256;

/// What making links needs, and the links that are not ready.
pub(super) struct OnDemand {
    directory: LinkDirectory,
    /// The links made with the communicator, then those made since.
    batches: Vec<LinkBatch>,
    pending: Vec<PendingLink>,
    /// This rank leaves: it makes no further links.
    is_closed: bool,
}

/// A link that is not ready.
struct PendingLink {
    /// The index of its peer.
    index: usize,
    /// By queue pair: the rail of this rank and the rail of the peer.
    rails: Vec<(usize, usize)>,
    /// `None` once they are connected.
    fresh: Option<Vec<QueuePair<Fresh>>>,
}

/// The peer's end of a link: what it has sent, and by bit the queue pairs of rails that may have failed.
type OfferedEnd = (ConnectInfo, LinkConnectInfo, u64);

impl OnDemand {
    pub(super) fn new(directory: LinkDirectory, batch: LinkBatch) -> Self {
        Self { directory, batches: vec![batch], pending: Vec::new(), is_closed: false }
    }

    /// Whether links are not ready.
    pub(super) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Makes no further links: this rank leaves. The peer's end of a link that is not ready is aborted when
    /// it hears of that.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Gives up the links that are not ready. No peer writes over their queue pairs that are not connected.
    /// The peers of the others wait for no rail of this rank.
    pub(super) fn abort(&mut self, peers: &[Peer]) {
        self.pending.clear();
        let message = |peer: &Peer| {
            let cause = peer
                .link
                .check()
                .err()
                .map_or_else(|| "it has aborted a call".to_owned(), |error| error.message().to_owned());
            let aborted = LinkMessage::Rail(RailMessage::Aborted { cause });
            (peer.rank(), aborted.encode().unwrap_or_default())
        };
        let messages: Vec<_> = peers.iter().filter(|peer| peer.owes_failure()).map(message).collect();
        if !messages.is_empty()
            && let Err(error) = self.directory.out_of_band.send(&messages)
        {
            log::debug!("verbs: {}", error.message());
        }
    }

    /// Whether ranks cannot send each other what is needed to connect queue pairs.
    pub(super) fn cannot_connect(&self) -> bool {
        self.directory.out_of_band.check().is_err()
    }

    /// Sends a peer messages about its queue pairs.
    pub(super) fn send_rail_messages(&self, peer: &mut Peer, messages: &mut Vec<RailMessage>) {
        for message in messages.drain(..) {
            if let Err(error) = self.send(peer.rank(), &LinkMessage::Rail(message)) {
                log::debug!("verbs: {}", error.message());
                peer.link.stop_reconnecting();
            }
        }
    }

    fn send(&self, peer: Rank, message: &LinkMessage) -> Result<()> {
        let cannot = |error: Error| error.context(format_args!("cannot connect to rank {peer}"));
        self.directory.out_of_band.send(&[(peer, message.encode()?)]).map_err(cannot)
    }

    /// Makes this rank's end of a link to a peer that it has no link to, and sends its numbers to the peer.
    /// Returns the index of the peer.
    pub(super) fn open(&mut self, links: &mut LinkSet<'_>, peer: Rank) -> Result<usize> {
        let pairs = self.directory.pairs(peer);
        if pairs.is_empty() {
            return Err(Error::internal(format!("no rail of this rank reaches rank {peer}")));
        }
        let shape = links.options.link_shape;
        let needed = LinkResources::of_link(&pairs, shape);
        if !self.batches.last().is_some_and(|batch| batch.has_room(&needed)) {
            let further = links.peers.len().min(needed.most_links(links.devices)).clamp(1, MOST_IN_BATCH);
            self.batches.push(links.add_batch(needed.times(further))?);
        }
        let rails = links.rails;
        let batch = self.batches.last_mut().expect("there is a batch");
        let failures = &links.ports.failures()[..rails.len()];
        let link = batch.add(links.devices, |rail| &rails[rail].0, peer, &pairs, shape, failures)?;
        let info = batch.connect_info(rails.iter().map(|(_, port)| port))?;
        let suspects = links.suspects(&link.rails);
        self.send(peer, &LinkMessage::OnDemand(info, link.link_info(), suspects))?;
        let index = links.peers.len();
        let mut state = self.directory.link(peer, link.control, &link.rails);
        state.begin(links.sequence);
        state.suspect(suspects);
        let peer_state = Peer::new(index, state, link.control, &link.controls, links.counters);
        links.peers.push(peer_state.with_reconnects(links.options.reconnect));
        self.pending.push(PendingLink { index, rails: link.rails, fresh: Some(link.qps) });
        links.index_of_rank[peer] = Some(index);
        log::debug!("verbs: rank {} connects to rank {peer}, which its plans do not use", self.directory.me);
        Ok(index)
    }

    /// Takes the messages of ranks that make links, and does what follows from them.
    pub(super) fn advance(&mut self, links: &mut LinkSet<'_>) -> Result<()> {
        while let Some((from, message)) = self.directory.out_of_band.receive() {
            self.on_message(links, from, &message)?;
        }
        // A rank that leaves does not wait for links.
        if self.pending.is_empty() || self.is_closed { Ok(()) } else { self.directory.out_of_band.check() }
    }

    fn on_message(&mut self, links: &mut LinkSet<'_>, from: Rank, message: &[u8]) -> Result<()> {
        if message.is_empty() {
            self.on_departure(links, from);
            return Ok(());
        }
        let unexpected = || {
            let message = "sent a message about its link that this rank does not expect; do all ranks run the same version?";
            Error::disagreement(format!("rank {from} {message}")).with_suspect(from)
        };
        match LinkMessage::decode(from, message)? {
            LinkMessage::OnDemand(info, link_info, suspects) => {
                let index = match links.index_of_rank.get(from) {
                    Some(Some(index)) => *index,
                    Some(None) if self.is_closed => return Ok(()),
                    Some(None) if !self.directory.pairs(from).is_empty() && from != self.directory.me => {
                        self.open(links, from)?
                    }
                    _ => return Err(unexpected()),
                };
                let link = self.pending.iter_mut().find(|link| link.index == index).ok_or_else(unexpected)?;
                let fresh = link.fresh.take().ok_or_else(unexpected)?;
                self.connect(links, index, fresh, (info, link_info, suspects))?;
            }
            LinkMessage::Ready => {
                let index = links.index_of_rank.get(from).copied().flatten().ok_or_else(unexpected)?;
                let link = self.pending.iter().find(|link| link.index == index).ok_or_else(unexpected)?;
                if link.fresh.is_some() {
                    return Err(unexpected());
                }
                self.forget_pending(index);
                let peer = &mut links.peers[index];
                peer.set_ready()?;
                peer.schedule(links.run_queue);
            }
            LinkMessage::Rail(message) => {
                let index = links.index_of_rank.get(from).copied().flatten().ok_or_else(unexpected)?;
                if let RailMessage::Aborted { cause } = &message
                    && self.forget_pending(index)
                {
                    let error =
                        Error::peer_lost(format!("rank {from} has no rail left to this rank: {cause}"));
                    links.peers[index].link.abort(error.with_suspect(from));
                }
                let (peer, ports) = (&mut links.peers[index], &mut *links.ports);
                let now = Instant::now();
                ports.refresh(links.devices, now);
                let mut answers = Vec::new();
                peer.on_rail_message(message, now, &|rail| ports.works(rail), &mut answers)?;
                self.send_rail_messages(peer, &mut answers);
                peer.schedule(links.run_queue);
            }
            LinkMessage::Planned(_) => return Err(unexpected()),
        }
        Ok(())
    }

    /// Connects this rank's end of a link, whose queue pairs are `fresh`, to the peer's, and sends the peer
    /// that it is ready.
    fn connect(
        &mut self,
        links: &mut LinkSet<'_>,
        index: usize,
        fresh: Vec<QueuePair<Fresh>>,
        (info, link_info, suspects): OfferedEnd,
    ) -> Result<()> {
        let peer = &mut links.peers[index];
        let Some(link) = self.pending.iter().find(|link| link.index == index) else { return Ok(()) };
        let (rank, published) = (peer.rank(), (&info, &link_info));
        let paths = self.directory.paths(rank, &link.rails, links.rails, links.options, published)?;
        peer.link.suspect(suspects);
        peer.connect(fresh, &paths, published, links.ports.failures()).map_err(|(_, error)| error)?;
        // Its way may lead through switches that no planned link uses.
        peer.link.suspect(u64::MAX);
        let message = match peer.link.check() {
            Ok(()) => LinkMessage::Ready,
            Err(error) => LinkMessage::Rail(RailMessage::Aborted { cause: error.message().to_owned() }),
        };
        self.send(rank, &message)
    }

    /// Makes the link to this peer no further, because the peer never will be ready. Whether it was not
    /// ready.
    fn forget_pending(&mut self, index: usize) -> bool {
        let link = self.pending.iter().position(|link| link.index == index);
        link.map(|link| self.pending.swap_remove(link)).is_some()
    }

    /// A rank has left. If the link to it is not ready, it never will be.
    fn on_departure(&mut self, links: &mut LinkSet<'_>, rank: Rank) {
        let Some(index) = links.index_of_rank.get(rank).copied().flatten() else { return };
        if self.forget_pending(index) {
            let error = Error::peer_lost(format!("rank {rank} closed its communicator"));
            links.peers[index].link.abort(error.with_suspect(rank));
        } else {
            links.peers[index].link.peer_ended("it has closed its communicator");
        }
        links.peers[index].schedule(links.run_queue);
    }
}

/// The parts of a transport that a further link changes, and those that making it needs.
pub(super) struct LinkSet<'a> {
    pub peers: &'a mut Vec<Peer>,
    /// By rank: its index in `peers`.
    pub index_of_rank: &'a mut [Option<usize>],
    /// Peers that the next poll visits.
    pub run_queue: &'a mut VecDeque<usize>,
    pub devices: &'a mut [RailDevice],
    /// By device: its rail, and its port.
    pub rails: &'a [(Rail, PortAttributes)],
    /// By device.
    pub counters: &'a Arc<[RailCounters]>,
    pub registry: &'a MemoryRegistry,
    pub options: &'a VerbsOptions,
    pub epoll: &'a OwnedFd,
    /// Whether all completion queues are armed.
    pub armed: &'a mut bool,
    /// Sequence number of the current call.
    pub sequence: u64,
    /// Which ports of the rails work.
    pub ports: &'a mut PortStates,
}

impl LinkSet<'_> {
    /// By queue pair of a link over these rails (this rank's, the peer's), by bit: whether its rail may have
    /// failed, as its port is down or a queue pair to another peer does not work.
    fn suspects(&self, rails: &[(usize, usize)]) -> u64 {
        let is_suspect = |rail: usize| {
            let mut qps = self.peers.iter().flat_map(|peer| &peer.link.qps);
            !self.ports.works(rail) || qps.any(|qp| qp.rail == rail && !qp.is_proven() && !qp.is_on_trial())
        };
        let bit = |(number, (rail, _)): (usize, &(usize, usize))| u64::from(is_suspect(*rail)) << number;
        rails.iter().enumerate().map(bit).sum()
    }

    /// Makes room for further links.
    fn add_batch(&mut self, room: LinkResources) -> Result<LinkBatch> {
        let batch =
            LinkBatch::new(self.devices, self.registry, room, &self.ports.failures()[..self.devices.len()])?;
        for (device, queue) in self.devices.iter_mut().zip(&batch.queues) {
            if let Some(fd) = queue.event_fd() {
                watch(self.epoll, fd).map_err(|cause| Error::io("cannot watch devices with epoll", cause))?;
            }
            device.queues.push(Arc::clone(queue));
        }
        *self.armed = false;
        Ok(batch)
    }
}
