//! Links that are made when a call first needs them: to peers that the plans of the communicator do not use.
//!
//! Owns the steps from the first message about such a link until both ends may write. Must not know which calls need which links.
//!
//! Both ends take the same steps, whichever begins: a rank makes its queue pairs and sends their numbers to the peer; when it has the
//! numbers of the peer it connects them, and sends that it is **ready**; it writes when the peer is ready. Until then, requests stay in the
//! link. A rank that receives the numbers of a peer before it needs the link makes its end at once, so that a peer that is in a call
//! that this rank does not make is noticed as on any other link. No rank waits within these steps, so ranks that make several links in
//! different orders do not block each other.

#[cfg(test)]
mod tests;

use super::{Verbs, watch};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::verbs::connect_info::{LinkConnectInfo, LinkMessage};
use crate::transport::verbs::link::Link;
use crate::transport::verbs::link_batch::{LinkBatch, LinkResources};
use crate::transport::verbs::link_directory::LinkDirectory;
use crate::transport::verbs::objects::{Fresh, QueuePair};
use crate::transport::verbs::peer::Peer;
use std::sync::Arc;

/// Links for which a batch has room at most, if there are as many links already.
const MOST_IN_BATCH: usize = 256;

/// What making links needs, and the links that are not ready.
pub(super) struct OnDemand {
    directory: LinkDirectory,
    /// The links made with the communicator, then those made since.
    batches: Vec<LinkBatch>,
    pending: Vec<PendingLink>,
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

impl OnDemand {
    pub(super) fn new(directory: LinkDirectory, batch: LinkBatch) -> Self {
        Self { directory, batches: vec![batch], pending: Vec::new() }
    }

    /// Gives up the links that are not ready. No peer writes over their queue pairs that are not connected.
    pub(super) fn abort(&mut self) {
        self.pending.clear();
    }

    fn send(&self, peer: Rank, message: &LinkMessage) -> Result<()> {
        let cannot = |error: Error| error.context(format_args!("cannot connect to rank {peer}"));
        self.directory.out_of_band.send(&[(peer, message.encode()?)]).map_err(cannot)
    }
}

impl Verbs {
    /// The index of a peer in `peers`. If there is no link to it, begins to make one.
    pub(super) fn index_or_connect(&mut self, peer: Rank) -> Result<usize> {
        match self.index_of_rank.get(peer) {
            Some(None) if !self.aborted => self.open_link(peer),
            _ => self.index(peer),
        }
    }

    /// Makes this rank's end of a link, and sends its numbers to the peer.
    fn open_link(&mut self, peer: Rank) -> Result<usize> {
        let pairs = self.on_demand.directory.pairs(peer);
        if pairs.is_empty() {
            return Err(Error::internal(format!("no rail of this rank reaches rank {peer}")));
        }
        let qps_per_rail = self.options.qps_per_rail;
        let needed = LinkResources::of_link(&pairs, qps_per_rail);
        if !self.on_demand.batches.last().is_some_and(|batch| batch.has_room(&needed)) {
            self.add_batch(needed.times(self.peers.len().clamp(1, MOST_IN_BATCH)))?;
        }
        let (rails, on_demand) = (&self.rails, &mut self.on_demand);
        let batch = on_demand.batches.last_mut().expect("there is a batch");
        let link = batch.add(&self.devices, |rail| &rails[rail].0, peer, &pairs, qps_per_rail)?;
        let info = batch.connect_info(rails.iter().map(|(_, port)| port))?;
        let endpoints = link.qps.iter().map(QueuePair::endpoint).collect();
        let link_info = LinkConnectInfo { endpoints, offset: link.offset };
        on_demand.send(peer, &LinkMessage::OnDemand(info, link_info))?;
        let index = self.peers.len();
        let directory = &on_demand.directory;
        let mut state =
            Link::new(peer, link.control, &link.rails).with_key(directory.me, &(directory.key)(peer));
        state.begin(self.sequence);
        self.peers.push(Peer::new(index, state, link.control, &link.controls));
        on_demand.pending.push(PendingLink { index, rails: link.rails, fresh: Some(link.qps) });
        self.index_of_rank[peer] = Some(index);
        log::debug!("verbs: rank {} connects to rank {peer}, which its plans do not use", directory.me);
        Ok(index)
    }

    /// Makes room for further links.
    fn add_batch(&mut self, room: LinkResources) -> Result<()> {
        let batch = LinkBatch::new(&self.devices, &self.registry, room)?;
        for (device, queue) in self.devices.iter_mut().zip(&batch.queues) {
            if let Some(fd) = queue.event_fd() {
                watch(&self.epoll, fd)
                    .map_err(|cause| Error::io("cannot watch devices with epoll", cause))?;
            }
            device.queues.push(Arc::clone(queue));
        }
        self.armed = false;
        self.on_demand.batches.push(batch);
        Ok(())
    }

    /// Takes the messages of ranks that make links, and does what follows from them.
    pub(super) fn advance_on_demand(&mut self) -> Result<()> {
        while let Some((from, message)) = self.on_demand.directory.out_of_band.receive() {
            self.on_link_message(from, &message)?;
        }
        if self.on_demand.pending.is_empty() { Ok(()) } else { self.on_demand.directory.out_of_band.check() }
    }

    fn on_link_message(&mut self, from: Rank, message: &[u8]) -> Result<()> {
        if message.is_empty() {
            self.on_departure(from);
            return Ok(());
        }
        let unexpected = || {
            let message = "sent a message about its link that this rank does not expect; do all ranks run the same version?";
            Error::disagreement(format!("rank {from} {message}")).with_suspect(from)
        };
        match LinkMessage::decode(from, message)? {
            LinkMessage::OnDemand(info, link_info) => {
                let is_new = self.index_of_rank.get(from).ok_or_else(unexpected)?.is_none();
                if is_new && self.on_demand.directory.pairs(from).is_empty() {
                    return Err(unexpected());
                }
                let index = self.index_or_connect(from)?;
                let on_demand = &mut self.on_demand;
                let Some(link) = on_demand.pending.iter_mut().find(|link| link.index == index) else {
                    return Err(unexpected());
                };
                let fresh = link.fresh.take().ok_or_else(unexpected)?;
                let published = (&info, &link_info);
                let paths =
                    on_demand.directory.paths(from, &link.rails, &self.rails, &self.options, published)?;
                self.peers[index].connect(fresh, &paths, published)?;
                on_demand.send(from, &LinkMessage::Ready)?;
            }
            LinkMessage::Ready => {
                let index = self.index_of_rank.get(from).copied().flatten();
                let is_connected = |link: &PendingLink| Some(link.index) == index && link.fresh.is_none();
                let link = self.on_demand.pending.iter().position(is_connected).ok_or_else(unexpected)?;
                let index = self.on_demand.pending.swap_remove(link).index;
                self.peers[index].set_ready();
                self.schedule(index);
            }
            LinkMessage::Planned(_) => return Err(unexpected()),
        }
        Ok(())
    }

    /// A rank has left. If the link to it is not ready, it never will be.
    fn on_departure(&mut self, rank: Rank) {
        let Some(index) = self.index_of_rank.get(rank).copied().flatten() else { return };
        if let Some(link) = self.on_demand.pending.iter().position(|link| link.index == index) {
            self.on_demand.pending.swap_remove(link);
            let error = Error::peer_lost(format!("rank {rank} closed its communicator"));
            self.peers[index].link.abort(error.with_suspect(rank));
            self.schedule(index);
        }
    }
}
