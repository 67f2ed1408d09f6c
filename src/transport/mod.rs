//! Transports: what carries messages between ranks.
//!
//! One contract, sibling files. A transport owns its connections to some of the peers and moves messages in
//! order on each of them. Must not know schedules, spans, steps or what a message means: both ends of a link
//! derive the same ordered list of messages from the same program, so a message needs neither address nor tag.

#[cfg(test)]
mod fixtures;
pub mod local;
pub mod shm;
pub mod tcp;
pub mod verbs;

pub use crate::rank::Rank;

use crate::call::Call;
use crate::error::Result;
use crate::memory::{Piece, Sharing};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

/// How a transport hands a received message over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The bytes can be read where the sender has them: [`Event::RecvReady`] brings a view, which stays valid
    /// until [`Transport::release`].
    InPlace,
    /// The bytes are written to memory that [`Transport::post_recv`] names beforehand: [`Event::RecvComplete`].
    PostedRecv,
}

/// What a transport reports. On each link, events of one sort come in the order of the messages.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The peer has entered this call. Comes before any message of the call.
    PeerEntered {
        /// Who.
        peer: Rank,
        /// What it called, as it says.
        call: Call,
    },
    /// The oldest message that was being sent to the peer is no longer read from.
    SendComplete {
        /// To whom.
        peer: Rank,
    },
    /// `InPlace`: the next message is there.
    RecvReady {
        /// From whom.
        peer: Rank,
        /// Where its bytes are.
        view: Piece,
    },
    /// `PostedRecv`: the oldest landing is filled.
    RecvComplete {
        /// From whom.
        peer: Rank,
    },
}

/// Events on their way to the executor, oldest first. Made once, with room for all that can be under way.
pub type Events = VecDeque<Event>;

/// A set of links of one kind. Nothing here blocks, and nothing allocates once the links are made.
pub trait Transport: Send {
    /// Its name in settings, logs and messages.
    fn name(&self) -> &'static str;

    /// How messages are handed over.
    fn delivery(&self) -> Delivery;

    /// Whether a message can be sent from `piece` as it lies; if not, it must be staged in a slot of the pool.
    fn can_send_from(&self, piece: Piece) -> bool;

    /// `PostedRecv` only: whether a message can land in `piece` as it lies; if not, it must land in a slot of the pool.
    fn can_recv_into(&self, _piece: Piece) -> bool {
        true
    }

    /// `PostedRecv` only: whether there is memory that messages cannot be sent from, or land in, as it lies.
    fn needs_staging(&self) -> bool {
        false
    }

    /// How many messages may be under way on one link in one direction: sent and not yet reported as `SendComplete`,
    /// or, for `PostedRecv`, landings not yet filled; or, for `InPlace`, arrivals not yet released.
    fn window(&self) -> usize;

    /// Begins call `sequence`: from now on one [`Event::PeerEntered`] may be reported per peer, and then its messages.
    /// A peer that is ahead is not heard beyond the call that this rank is in.
    fn begin(&mut self, sequence: u64);

    /// Tells `peer` what this rank calls. Once per call, before the first message of it.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()>;

    /// Sends the bytes of `piece` as the next message to `peer`; `SendComplete` says when they may be changed again.
    /// At most [`window`](Self::window) messages may be under way.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()>;

    /// `PostedRecv` only: the next message of `peer` that has no landing yet, of exactly this length, goes to `piece`.
    ///
    /// # Errors
    /// `PeerLost` if the link is broken.
    fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()>;

    /// `InPlace` only: the oldest view of `peer` that was not released yet is no longer read.
    fn release(&mut self, peer: Rank);

    /// `InPlace` only: marks that views are about to be read, so that a sender that gives up waits until they
    /// are not, and checks that no sender has given up already.
    ///
    /// # Errors
    /// `PeerLost` if a peer has given up the call: its bytes may be anything.
    fn enter_views(&mut self) -> Result<()> {
        Ok(())
    }

    /// `InPlace` only: the reading that [`enter_views`](Self::enter_views) announced is over.
    ///
    /// # Errors
    /// `PeerLost` if a peer gave up the call meanwhile, so that what was read may be anything.
    fn leave_views(&mut self) -> Result<()> {
        Ok(())
    }

    /// `InPlace` only: checks, while views are read, that what was read so far was what its sender meant.
    ///
    /// # Errors
    /// As for [`leave_views`](Self::leave_views).
    fn check_views(&mut self) -> Result<()> {
        Ok(())
    }

    /// `InPlace` only: messages may be sent from this memory of a GPU from now on, as far as the peers reach it, and views
    /// may be memory of theirs.
    fn share_gpu(&mut self, _sharing: Box<dyn Sharing>) {}

    /// `InPlace` only: memory of peers that most views lie in, for as long as this lives.
    fn viewed(&self) -> Vec<Piece> {
        Vec::new()
    }

    /// Moves what can be moved and reports what has happened. `Ok(true)` if there was anything.
    ///
    /// # Errors
    /// `PeerLost` if a link is broken that this call still needs; `Disagreement` if a peer sent a message of
    /// another length than expected.
    fn poll(&mut self, events: &mut Events) -> Result<bool>;

    /// A descriptor that becomes readable when [`poll`](Self::poll) may have something to do, provided that
    /// [`set_need_wakeup`](Self::set_need_wakeup) said that there is nothing now.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// Asks peers to ring the bell from now on. `false` if something has come meanwhile and nobody should sleep.
    fn set_need_wakeup(&mut self) -> bool;

    /// Peers need not ring any more.
    fn clear_need_wakeup(&mut self);

    /// Gives the current call up: afterwards no peer reads this rank's memory and no link holds a piece.
    /// The links are unusable from then on.
    fn abort(&mut self);
}
