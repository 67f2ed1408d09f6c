//! Peers that answer at once: transports for one rank alone, without threads or system calls.
//!
//! Owns the events that ideal peers would cause. A peer enters each call that is announced to it, sends a
//! message for each receive that is posted (posted delivery) or for each message that it gets (delivery in
//! place), and completes sends at once.

use crate::memory::zeros;
use flexring::Result;
use flexring::internal::memory::{NeighbourSlots, Piece, Sharing};
use flexring::internal::transport::{Event, Events, InPlaceTransport, PostedTransport, Transport};
use flexring_core::call::Call;
use flexring_core::rank::Rank;
use std::os::fd::BorrowedFd;

/// Messages in flight on a link in each direction.
const WINDOW: usize = 8;

/// Links to ideal peers. `IN_PLACE` selects the kind of delivery.
pub struct Echo<const IN_PLACE: bool> {
    events: Events,
    /// What peers send, if it is read where they have it.
    message: Piece,
}

impl<const IN_PLACE: bool> Echo<IN_PLACE> {
    /// Links for messages of at most `longest` bytes.
    pub fn new(longest: usize) -> Self {
        Self { events: Events::with_capacity(64), message: zeros(longest) }
    }
}

impl<const IN_PLACE: bool> Transport for Echo<IN_PLACE> {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn can_send_from(&self, _piece: Piece) -> bool {
        true
    }

    fn window(&self) -> usize {
        WINDOW
    }

    fn begin(&mut self, _sequence: u64) {}

    fn begin_link(&mut self, _peer: Rank, _sequence: u64) -> Result<()> {
        Ok(())
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.events.push_back(Event::PeerEntered { peer, call: *call });
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        if IN_PLACE {
            self.events.push_back(Event::RecvReady { peer, view: self.message.narrow(0, piece.len()) });
        }
        self.events.push_back(Event::SendComplete { peer });
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let moved = !self.events.is_empty();
        events.extend(self.events.drain(..));
        Ok(moved)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn set_need_wakeup(&mut self) -> bool {
        false
    }

    fn clear_need_wakeup(&mut self) {}

    fn abort(&mut self) {}
}

impl PostedTransport for Echo<false> {
    fn can_recv_into(&self, _piece: Piece) -> bool {
        true
    }

    fn stages_host_memory(&self) -> bool {
        false
    }

    fn post_recv(&mut self, peer: Rank, _piece: Piece) -> Result<()> {
        self.events.push_back(Event::RecvComplete { peer });
        Ok(())
    }
}

impl InPlaceTransport for Echo<true> {
    fn release(&mut self, _peer: Rank) {}

    fn has_left(&self, _peer: Rank) -> bool {
        false
    }

    fn check_reads(&self) -> Result<()> {
        Ok(())
    }

    fn share_gpu(&mut self, _sharing: Box<dyn Sharing>) {}

    fn open_neighbours(&mut self) {}

    fn opened_gpus(&self) -> Vec<(Rank, Piece)> {
        Vec::new()
    }

    fn relay_slots(&self) -> Vec<NeighbourSlots> {
        Vec::new()
    }
}
