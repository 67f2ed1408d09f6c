//! The link to one neighbour: which entry of the queue means what, and which events follow from it.
//!
//! Owns the format of entries and the state of one connection.

use super::arena_ref::ArenaRef;
use super::control_page::ControlPage;
use super::layout::ArenaLayout;
use super::neighbours::Neighbour;
use super::spsc_queue::{Duplex, ENTRIES, Entry, InvalidCounter, SpscQueue};
use crate::call::{Call, CallWords};
use crate::error::{Error, Result};
use crate::memory::{PeerArena, Piece};
use crate::plan::call_layout::IN_PLACE_WINDOW;
use crate::transport::{Event, Events, Rank};
use crate::wake::WakeFd;
use std::collections::VecDeque;
use std::sync::Arc;

/// Entries of a queue that messages may take; the others are for the calls that announce them. A rank is at
/// most one call ahead of a peer, so two are enough.
pub(super) const WINDOW: usize = ENTRIES - 2;
// Otherwise simulations have another window than calls.
const _: () = assert!(cfg!(loom) || WINDOW == IN_PLACE_WINDOW);

/// First words of an entry. `CALL` is followed by a call's words, the others by offset and length of a
/// message.
const CALL: u64 = 1;
/// A message in the sender's arena.
const MESSAGE: u64 = 2;

/// The link to one neighbour.
pub(super) struct Link {
    pub rank: Rank,
    /// Its index among the ranks of the node.
    pub local_rank: usize,
    pub control: ArenaRef<ControlPage>,
    arena: Arc<PeerArena>,
    layout: ArenaLayout,
    /// The neighbour's GPU memory, if this rank has it open.
    pub gpu: Option<Piece>,
    duplex: Duplex<ArenaRef<SpscQueue>>,
    wakes: Arc<[WakeFd]>,
    /// This rank's entries that are not acknowledged yet, oldest first: whether each is a message.
    unacknowledged: VecDeque<bool>,
    acknowledged: u64,
    /// Whether the peer's entry into this call was reported.
    peer_entered: bool,
    /// Sequence number of the call that this rank is in, and whether the call uses this link.
    sequence: u64,
    announced: bool,
}

impl Link {
    pub(super) fn new(
        neighbour: &Neighbour,
        duplex: Duplex<ArenaRef<SpscQueue>>,
        control: ArenaRef<ControlPage>,
    ) -> Self {
        Self {
            rank: neighbour.rank,
            local_rank: neighbour.local_rank,
            control,
            arena: Arc::clone(&neighbour.arena),
            layout: neighbour.layout,
            gpu: None,
            duplex,
            wakes: Arc::clone(&neighbour.wakes),
            unacknowledged: VecDeque::with_capacity(ENTRIES),
            acknowledged: 0,
            peer_entered: true,
            sequence: 0,
            announced: false,
        }
    }

    /// The neighbour's slots of the messages that its kernels write to the rank with this index on the node.
    /// `None` if they exceed its arena.
    ///
    /// # Errors
    /// `System` if they cannot be mapped.
    pub(super) fn relay_slots_to(&self, local_rank: usize) -> Result<Option<Piece>> {
        let pool = self.layout.relay_pool();
        let pool = self.arena.piece_for_device(pool.offset(), pool.bytes())?;
        Ok(pool.map(|pool| self.layout.relay_slots_to(local_rank, pool)))
    }

    /// What keeps the neighbour's memory mapped.
    pub(super) fn arena(&self) -> &Arc<PeerArena> {
        &self.arena
    }

    /// Begins call `sequence`: the peer's entry into it may be reported from now on.
    pub(super) fn begin(&mut self, sequence: u64) {
        (self.sequence, self.announced, self.peer_entered) = (sequence, false, false);
    }

    /// Sends this rank's call.
    pub(super) fn announce(&mut self, call: &Call) {
        let call = call.to_words();
        let mut entry = [0; 8];
        entry[0] = CALL;
        entry[1..=call.len()].copy_from_slice(&call);
        self.announced = true;
        self.write(entry, false);
    }

    /// Sends a message: a range of this rank's arena.
    pub(super) fn send(&mut self, offset: usize, len: usize) {
        self.write([MESSAGE, offset as u64, len as u64, 0, 0, 0, 0, 0], true);
    }

    fn write(&mut self, entry: Entry, is_message: bool) {
        self.duplex.write(entry);
        self.unacknowledged.push_back(is_message);
        self.wake();
    }

    /// Gives the oldest message back to the peer.
    pub(super) fn release(&mut self) {
        self.duplex.consume();
        self.wake();
    }

    /// Wakes the peer if it sleeps.
    pub(super) fn wake(&self) {
        self.control.need_wakeup.wake(&self.wakes);
    }

    /// Whether the peer's call must wait until this rank begins it too. Not so if this rank's call uses the
    /// link and the peer is in a later one: the peer will never send what this rank expects, so the later
    /// call is reported.
    fn is_ahead(&self, call: &Entry) -> bool {
        self.peer_entered || (!self.announced && call[1] > self.sequence)
    }

    /// Whether [`poll`](Self::poll) would report something.
    pub(super) fn has_news(&self) -> bool {
        let readable = match self.duplex.peek() {
            // A call that is ahead of this rank's stays in the queue.
            Ok(Some(entry)) => entry[0] != CALL || !self.is_ahead(&entry),
            Ok(None) => false,
            Err(InvalidCounter) => true,
        };
        readable || self.duplex.acknowledged() != Ok(self.acknowledged)
    }

    pub(super) fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let acknowledged = self.duplex.acknowledged().map_err(|InvalidCounter| self.invalid())?;
        while self.acknowledged < acknowledged {
            self.acknowledged += 1;
            if self.unacknowledged.pop_front() == Some(true) {
                events.push_back(Event::SendComplete { peer: self.rank });
            }
        }
        while let Some(entry) = self.duplex.peek().map_err(|InvalidCounter| self.invalid())? {
            match entry[0] {
                CALL if self.is_ahead(&entry) => break,
                CALL => {
                    let call: CallWords = std::array::from_fn(|word| entry[word + 1]);
                    let call = Call::from_words(call).ok_or_else(|| self.invalid())?;
                    self.peer_entered = true;
                    self.duplex.advance();
                    // All messages before it are consumed, because this rank is in a new call.
                    self.duplex.consume();
                    self.wake();
                    events.push_back(Event::PeerEntered { peer: self.rank, call });
                }
                MESSAGE => {
                    let view = self.arena.piece(entry[1] as usize, entry[2] as usize);
                    let view = view.map_err(|error| error.context(format_args!("rank {}", self.rank)))?;
                    let view = view.ok_or_else(|| self.invalid())?;
                    self.duplex.advance();
                    events.push_back(Event::RecvReady { peer: self.rank, view });
                }
                _ => return Err(self.invalid()),
            }
        }
        Ok(events.len() > before)
    }

    fn invalid(&self) -> Error {
        Error::disagreement(format!(
            "rank {} wrote an invalid entry to shared memory: do all ranks run the same build of flexring?",
            self.rank
        ))
    }
}
