//! A rank's links: its transports, and which of them reaches each peer.
//!
//! Owns routing.

use crate::call::Call;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{NeighbourSlots, Piece, Sharing};
use crate::rank::Rank;
use crate::transport::{AnyTransport, Events, InPlaceTransport};
use crate::wake::WakeFd;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The links of one rank. Transports are at most two: one within the node and one between nodes.
pub(super) struct Links {
    transports: Vec<AnyTransport>,
    /// By rank, the index of the transport that reaches it.
    routes: Vec<usize>,
}

impl Links {
    /// Most transports that a rank has.
    pub(super) const TRANSPORTS: usize = 2;

    /// The links over these transports. `routes` gives, by rank, the index of the transport that reaches it;
    /// any index for this rank itself.
    pub(super) fn new(transports: Vec<AnyTransport>, routes: Vec<usize>) -> Self {
        debug_assert!(transports.len() <= Self::TRANSPORTS);
        Self { transports, routes }
    }

    /// Events of all transports that may be waiting at once.
    pub(super) fn most_events(&self) -> usize {
        self.transports.iter().map(|transport| 2 * transport.common().window() + 2).sum::<usize>()
            * self.routes.len()
    }

    /// All transports, in the order that [`route`](Self::route) counts in.
    pub(super) fn transports(&self) -> &[AnyTransport] {
        &self.transports
    }

    /// The index of the transport that reaches `peer`.
    pub(super) fn route(&self, peer: Rank) -> usize {
        self.routes[peer]
    }

    /// The transport that reaches `peer`.
    pub(super) fn to(&self, peer: Rank) -> &AnyTransport {
        &self.transports[self.routes[peer]]
    }

    fn to_mut(&mut self, peer: Rank) -> &mut AnyTransport {
        &mut self.transports[self.routes[peer]]
    }

    /// Begins a call on all links.
    pub(super) fn begin(&mut self, call: &Call) {
        for transport in &mut self.transports {
            let transport = transport.common_mut();
            if call.awaits_all_ranks() {
                transport.begin_together(call.sequence);
            } else {
                transport.begin(call.sequence);
            }
        }
    }

    /// Begins call `sequence` on the link to `peer` only.
    pub(super) fn begin_link(&mut self, peer: Rank, sequence: u64) -> Result<()> {
        self.to_mut(peer).common_mut().begin_link(peer, sequence)
    }

    /// Whether `peer` is known to send and release nothing any more, apart from what the next poll reports.
    pub(super) fn has_left(&self, peer: Rank) -> bool {
        match self.to(peer) {
            AnyTransport::InPlace(transport) => transport.has_left(peer),
            // These transports notice a closed connection themselves.
            AnyTransport::Posted(_) => false,
        }
    }

    /// Announces this rank's call to `peer`.
    pub(super) fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.to_mut(peer).common_mut().announce(peer, call)
    }

    /// [`announce`](Self::announce), where the call sends messages to `peer` in any case.
    pub(super) fn announce_with_message(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.to_mut(peer).common_mut().announce_with_message(peer, call)
    }

    /// Sends the next message to `peer`.
    pub(super) fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        reach(FaultPoint::MessageSent);
        self.to_mut(peer).common_mut().send(peer, piece)
    }

    /// Posts a receive for the next message of `peer`.
    pub(super) fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        reach(FaultPoint::ReceivePosted);
        match self.to_mut(peer) {
            AnyTransport::Posted(transport) => transport.post_recv(peer, piece),
            AnyTransport::InPlace(_) => Err(wrong_delivery(peer, "in place")),
        }
    }

    /// Releases the oldest view of `peer`.
    pub(super) fn release(&mut self, peer: Rank) -> Result<()> {
        reach(FaultPoint::ViewReleased);
        match self.to_mut(peer) {
            AnyTransport::InPlace(transport) => {
                transport.release(peer);
                Ok(())
            }
            AnyTransport::Posted(_) => Err(wrong_delivery(peer, "to posted memory")),
        }
    }

    /// Makes progress on all links. Whether anything moved.
    pub(super) fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let mut busy = false;
        for transport in &mut self.transports {
            busy |= transport.common_mut().poll(events)?;
        }
        Ok(busy)
    }

    /// Call this after a job that read views of peers' memory. Fails if a sender has aborted, so that what
    /// was read may be anything.
    pub(super) fn check_reads(&mut self) -> Result<()> {
        reach(FaultPoint::ReadsEnd);
        self.in_place().try_for_each(|transport| transport.check_reads())
    }

    fn in_place(&mut self) -> impl Iterator<Item = &mut Box<dyn InPlaceTransport>> {
        self.transports.iter_mut().filter_map(|transport| match transport {
            AnyTransport::InPlace(transport) => Some(transport),
            AnyTransport::Posted(_) => None,
        })
    }

    /// Shares memory of a GPU with the neighbours, if there are any.
    pub(super) fn share_gpu(&mut self, sharing: Box<dyn Sharing>) {
        if let Some(transport) = self.in_place().next() {
            transport.share_gpu(sharing);
        }
    }

    /// Opens the GPU memory that neighbours share.
    pub(super) fn open_neighbours(&mut self) {
        self.in_place().for_each(|transport| transport.open_neighbours());
    }

    /// The GPU memory of peers that is open.
    pub(super) fn opened_gpus(&self) -> Vec<(Rank, Piece)> {
        let opened = |transport: &AnyTransport| match transport {
            AnyTransport::InPlace(transport) => transport.opened_gpus(),
            AnyTransport::Posted(_) => Vec::new(),
        };
        self.transports.iter().flat_map(opened).collect()
    }

    /// Never unmaps the memory that the transports hold. Other communicators do not use their registrations
    /// from now on.
    pub(super) fn leak(&mut self) {
        self.transports.iter().for_each(|transport| transport.common().end_sharing());
        std::mem::forget(std::mem::take(&mut self.transports));
    }

    /// By peer on the node, the memory of messages that kernels write.
    pub(super) fn relay_slots(&self) -> Vec<NeighbourSlots> {
        let slots = |transport: &AnyTransport| match transport {
            AnyTransport::InPlace(transport) => transport.relay_slots(),
            AnyTransport::Posted(_) => Vec::new(),
        };
        self.transports.iter().flat_map(slots).collect()
    }

    /// Asks all peers to notify the descriptors of [`wake_fd`](Self::wake_fd). `false` if there is work
    /// already.
    pub(super) fn set_need_wakeup(&mut self) -> bool {
        let mut idle = true;
        for transport in &mut self.transports {
            // Every transport must set its flag, even if another one has work.
            idle &= transport.common_mut().set_need_wakeup();
        }
        idle
    }

    /// Peers need not notify any more.
    pub(super) fn clear_need_wakeup(&mut self) {
        self.transports.iter_mut().for_each(|transport| transport.common_mut().clear_need_wakeup());
    }

    /// The wake-up descriptor of the transport with this index, if there is such a transport and it has one.
    pub(super) fn wake_fd(&self, index: usize) -> Option<BorrowedFd<'_>> {
        self.transports.get(index).and_then(|transport| transport.common().wake_fd())
    }

    /// The eventfd of a transport that others of this process may notify, too, if one has it.
    pub(super) fn eventfd(&self) -> Option<&Arc<WakeFd>> {
        self.transports.iter().find_map(|transport| transport.common().eventfd())
    }

    /// Whether no transport ever lends an eventfd, but some sleep on other descriptors.
    pub(super) fn needs_eventfd(&self) -> bool {
        let is_posted = |transport: &AnyTransport| matches!(transport, AnyTransport::Posted(_));
        !self.transports.is_empty() && self.transports.iter().all(is_posted)
    }

    /// Whether every transport has a wake-up descriptor.
    pub(super) fn can_wake(&self) -> bool {
        self.transports.iter().all(|transport| transport.common().wake_fd().is_some())
    }

    /// Why a call waits for one of these peers, if it is the connection to it: the peer, and a sentence.
    pub(super) fn stalled(&self, peers: &[Rank]) -> Option<(Rank, String)> {
        let stalled = |peer: &Rank| Some((*peer, self.to(*peer).common().stalled(*peer)?));
        peers.iter().find_map(stalled).map(|(peer, connection)| {
            let cause = "a firewall or the network drops its packets, while the control connection works";
            (peer, format!("{connection}: {cause}"))
        })
    }

    /// Whether a transport still exchanges messages with peers over the control connections.
    pub(super) fn need_control_connection(&self) -> bool {
        self.transports.iter().any(|transport| transport.common().needs_control_connection())
    }

    /// Aborts the call on all links: see [`Transport::abort`](crate::transport::Transport::abort).
    pub(super) fn abort(&mut self) {
        self.transports.iter_mut().for_each(|transport| transport.common_mut().abort());
    }
}

fn wrong_delivery(peer: Rank, delivery: &str) -> Error {
    Error::internal(format!("messages of rank {peer} are delivered {delivery}: please report this"))
}
