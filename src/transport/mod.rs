//! Transports: they carry messages between ranks.
//!
//! Owns the contract of all transports. A transport owns connections to some of the peers, and delivers the
//! messages of each connection in order. Must not know schedules, spans, steps, or what a message means: both
//! ends of a link derive the same ordered list of messages from the same program, so a message needs neither
//! address nor tag.
//!
//! | module | transport |
//! |---|---|
//! | `shm` | shared memory, between ranks of one node |
//! | `local` | shared memory, between threads of one process |
//! | `tcp` | TCP sockets |
//! | `verbs` | RDMA devices (feature `verbs`) |

pub(crate) mod credentials;
#[cfg(test)]
mod fixtures;
pub(crate) mod free_port;
pub mod local;
pub mod shm;
pub mod tcp;
pub mod verbs;

pub use crate::rank::Rank;

use crate::call::Call;
use crate::error::Result;
use crate::memory::{NeighbourSlots, Piece, Sharing};
use crate::wake::WakeFd;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What a transport reports. On each link, events of one kind come in the order of the messages.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The peer has entered this call. Comes before any message of the call.
    PeerEntered {
        /// The rank that entered.
        peer: Rank,
        /// The peer's call, as the peer announced it.
        call: Call,
    },
    /// The oldest message in flight to the peer is no longer read: its bytes may change.
    SendComplete {
        /// The receiver.
        peer: Rank,
    },
    /// [`InPlaceTransport`] only: the next message can be read where the sender has it.
    RecvReady {
        /// The sender.
        peer: Rank,
        /// The message's bytes, valid until [`InPlaceTransport::release`].
        view: Piece,
    },
    /// [`PostedTransport`] only: the oldest posted receive holds its message.
    RecvComplete {
        /// The sender.
        peer: Rank,
    },
}

/// Events for the executor, oldest first. Allocated once, with room for all that can be in flight.
pub type Events = VecDeque<Event>;

/// A set of links of one kind: what all transports do. No method blocks, and none allocates once the links
/// are made.
///
/// How received messages are delivered is defined by two further traits; every transport implements one of
/// them: [`InPlaceTransport`] or [`PostedTransport`].
pub trait Transport: Send {
    /// Its name in settings, logs and messages.
    fn name(&self) -> &'static str;

    /// Whether a message can be sent directly from `piece`; otherwise it must be staged in a slot of the
    /// pool.
    fn can_send_from(&self, piece: Piece) -> bool;

    /// How many messages may be in flight on one link in each direction: in one, sends before their
    /// `SendComplete`; in the other, posted receives before their `RecvComplete`, or unreleased views.
    fn window(&self) -> usize;

    /// Begins call `sequence`: from now on one [`Event::PeerEntered`] may be reported per peer, and then its
    /// messages. Nothing that a peer sends in a later call is reported before that call begins here.
    fn begin(&mut self, sequence: u64);

    /// [`begin`](Self::begin) for calls that no peer completes before this rank begins them. A peer that left
    /// without the call is noticed when the link to it is used.
    fn begin_together(&mut self, sequence: u64) {
        self.begin(sequence);
    }

    /// [`begin`](Self::begin) on the link to `peer` only. For calls that not all ranks make: the number is
    /// equal at both ends, greater than that of the last call that all ranks made, and not greater than that
    /// of the next one.
    ///
    /// # Errors
    /// `Internal` if there is no link to `peer`.
    fn begin_link(&mut self, peer: Rank, sequence: u64) -> Result<()>;

    /// Announces this rank's call to `peer`: at once, with the next message to it, or in the next
    /// [`poll`](Self::poll). Once per call, before the first message of it.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()>;

    /// [`announce`](Self::announce), where this call sends messages to `peer` in any case: the announcement
    /// may go with the first one. It goes before this rank sleeps, so that each peer of a rank that waits
    /// long knows its call.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn announce_with_message(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.announce(peer, call)
    }

    /// Sends the bytes of `piece` as the next message to `peer`. They must not change before the
    /// `SendComplete`. At most [`window`](Self::window) messages may be in flight.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()>;

    /// Makes progress and reports events. `Ok(true)` if anything moved.
    ///
    /// # Errors
    /// `PeerLost` if a link is broken that this call still needs; `Disagreement` if a peer sent a message of
    /// another length than expected.
    fn poll(&mut self, events: &mut Events) -> Result<bool>;

    /// A descriptor that becomes readable when [`poll`](Self::poll) may have something to do, provided that
    /// [`set_need_wakeup`](Self::set_need_wakeup) returned `true`. `None` if there is none at the moment: the
    /// caller sleeps briefly and checks again.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// What [`wake_fd`](Self::wake_fd) belongs to, if others of this process may notify it, too.
    fn eventfd(&self) -> Option<&Arc<WakeFd>> {
        None
    }

    /// Asks peers to notify [`wake_fd`](Self::wake_fd) from now on. `false` if there is work already, so that
    /// the caller must not sleep.
    fn set_need_wakeup(&mut self) -> bool;

    /// Peers need not notify any more. Also drains the descriptor.
    fn clear_need_wakeup(&mut self);

    /// Describes the connection to `peer` if it carries nothing although this rank sends. `None` if it works,
    /// or if the transport cannot tell.
    fn stalled(&self, _peer: Rank) -> Option<String> {
        None
    }

    /// Whether the transport still exchanges messages with peers over the control connections, because
    /// connections are broken or not made yet.
    fn needs_control_connection(&self) -> bool {
        false
    }

    /// Ends the sharing of registrations with other communicators, as this one ends although its links stay.
    fn end_sharing(&self) {}

    /// Aborts the current call: afterwards no peer or device writes to this rank's memory, no result has
    /// bytes that a peer reads there from then on, and no link holds a piece. The links are unusable from
    /// then on. Unlike the other methods it may block, on verbs without a limit, so the failure is reported
    /// to the other ranks before.
    fn abort(&mut self);
}

/// A transport whose messages are read where the sender has them, as views: [`Event::RecvReady`].
pub trait InPlaceTransport: Transport {
    /// Releases the oldest view of `peer` that was not released yet: it is no longer read.
    fn release(&mut self, peer: Rank);

    /// Whether `peer` has closed its links. What it sent before is still reported by the next
    /// [`poll`](Transport::poll).
    fn has_left(&self, peer: Rank) -> bool;

    /// Checks that views which were read so far had the bytes that their senders sent. Call it before the
    /// result is used.
    ///
    /// # Errors
    /// `PeerLost` if a peer has aborted the call, so that what was read may be anything.
    fn check_reads(&self) -> Result<()>;

    /// Publishes this rank's GPU memory to the peers. The first of two steps before the first call: then
    /// [`open_neighbours`](Self::open_neighbours), after all ranks have done this.
    fn share_gpu(&mut self, sharing: Box<dyn Sharing>);

    /// Opens the GPU memory that peers have published. No peer publishes any later.
    fn open_neighbours(&mut self);

    /// The GPU memory of peers that is open, with their ranks.
    fn opened_gpus(&self) -> Vec<(Rank, Piece)>;

    /// By peer, the memory of messages that kernels write.
    fn relay_slots(&self) -> Vec<NeighbourSlots>;
}

/// A transport that writes received messages to memory that was posted beforehand: [`Event::RecvComplete`].
pub trait PostedTransport: Transport {
    /// Whether a message can be received directly into `piece`; otherwise it must be received into a slot of
    /// the pool.
    fn can_recv_into(&self, piece: Piece) -> bool;

    /// Whether [`can_send_from`](Transport::can_send_from) and [`can_recv_into`](Self::can_recv_into) may be
    /// false for host memory.
    fn stages_host_memory(&self) -> bool;

    /// Posts `piece` for the next message of `peer` that has no posted receive yet. The message must have
    /// exactly this length.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()>;
}

/// A transport of either kind of delivery.
pub enum AnyTransport {
    /// Received messages are views of the sender's memory.
    InPlace(Box<dyn InPlaceTransport>),
    /// Received messages are written to posted memory.
    Posted(Box<dyn PostedTransport>),
}

impl AnyTransport {
    /// The transport as one of any kind.
    #[must_use]
    pub fn common(&self) -> &dyn Transport {
        match self {
            Self::InPlace(transport) => transport.as_ref(),
            Self::Posted(transport) => transport.as_ref(),
        }
    }

    /// The transport as one of any kind.
    pub fn common_mut(&mut self) -> &mut dyn Transport {
        match self {
            Self::InPlace(transport) => transport.as_mut(),
            Self::Posted(transport) => transport.as_mut(),
        }
    }
}
