//! One link's traffic in one call: how far each message has progressed, and which slot it holds.
//!
//! Owns the counters of both directions. Must not know what a step waits for, nor other links.

use super::action::Slot;
use super::binding::{LinkProfile, Staging};
use super::message_order::MessageOrder;
use crate::plan::Rank;
use crate::plan::program::{LinkMessages, StepId};
use std::collections::VecDeque;
use std::sync::Arc;

/// A message from when it is planned until its send completes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSend {
    pub(super) step: StepId,
    pub(super) sub: u64,
    /// Whether the bytes can be sent; false while they are being staged.
    pub(super) ready: bool,
    pub(super) slot: Option<Slot>,
}

/// A message from when its receive is posted (or it can be read in place) until it is released.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRecv {
    pub(super) slot: Option<Slot>,
    pub(super) consumed: bool,
}

/// One link's traffic in this call.
#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) profile: LinkProfile,
    pub(super) staging: Staging,
    /// Both orders are shared by pipelines of one program.
    pub(super) sends: Arc<MessageOrder>,
    pub(super) receives: Arc<MessageOrder>,
    /// By entry of `sends`, messages whose send is complete; empty if messages are in the order of entries.
    completed: Vec<u32>,
    /// Messages with a [`PendingSend`], so far in this call. This and the other counters are numbers of messages.
    pub(super) planned: u64,
    /// Messages handed to the transport.
    pub(super) send_posted: u64,
    /// Messages whose send is complete.
    pub(super) send_completed: u64,
    /// Messages with a posted receive.
    pub(super) recv_posted: u64,
    /// Messages that were received or can be read in place.
    pub(super) recv_completed: u64,
    /// Messages that this rank no longer needs.
    pub(super) released: u64,
    pub(super) send_slots_held: usize,
    pub(super) recv_slots_held: usize,
    pub(super) outgoing: WindowRing<PendingSend>,
    pub(super) incoming: WindowRing<PendingRecv>,
    pub(super) send_queued: bool,
    pub(super) recv_queued: bool,
}

impl LinkState {
    /// A link of a program whose sub-chunks are interleaved if `waves`.
    pub(super) fn new(profile: LinkProfile, messages: &LinkMessages, waves: bool) -> Self {
        let sends = Arc::new(MessageOrder::new(&messages.sends));
        let completed = vec![0; if waves { messages.sends.len() } else { 0 }];
        Self::with(profile, sends, Arc::new(MessageOrder::new(&messages.receives)), completed)
    }

    /// The state of this link for another pipeline of the program.
    pub(super) fn twin(&self) -> Self {
        let completed = vec![0; self.completed.len()];
        Self::with(self.profile, Arc::clone(&self.sends), Arc::clone(&self.receives), completed)
    }

    fn with(
        profile: LinkProfile,
        sends: Arc<MessageOrder>,
        receives: Arc<MessageOrder>,
        completed: Vec<u32>,
    ) -> Self {
        Self {
            profile,
            staging: Staging::default(),
            sends,
            receives,
            completed,
            planned: 0,
            send_posted: 0,
            send_completed: 0,
            recv_posted: 0,
            recv_completed: 0,
            released: 0,
            send_slots_held: 0,
            recv_slots_held: 0,
            outgoing: WindowRing::new(profile.window),
            incoming: WindowRing::new(profile.window),
            send_queued: false,
            recv_queued: false,
        }
    }

    /// Resets the link for a new call.
    pub(super) fn restart(&mut self, staging: Staging) {
        self.staging = staging;
        self.completed.fill(0);
        (self.planned, self.send_posted, self.send_completed) = (0, 0, 0);
        (self.recv_posted, self.recv_completed, self.released) = (0, 0, 0);
        (self.send_slots_held, self.recv_slots_held) = (0, 0);
        self.send_queued = true;
        self.recv_queued = !self.profile.reads_in_place;
    }

    /// Whether the window allows no further send.
    pub(super) fn is_full(&self) -> bool {
        self.planned - self.send_completed >= self.profile.window as u64
    }

    /// Counts the oldest send that is not complete.
    pub(super) fn count_completed(&mut self) {
        if !self.completed.is_empty()
            && let Some((entry, _)) = self.sends.entry_of(self.send_completed)
        {
            self.completed[entry] += 1;
        }
        self.send_completed += 1;
    }

    /// How many messages of an entry of `sends` are complete.
    pub(super) fn completed(&self, entry: u32) -> u32 {
        let counted = self.completed.get(entry as usize);
        counted.copied().unwrap_or_else(|| self.sends.among_first(entry, self.send_completed))
    }

    pub(super) fn plan_send(&mut self, outgoing: PendingSend) {
        self.outgoing.set(self.planned, outgoing);
        self.planned += 1;
    }

    /// Releases consumed messages, oldest first. Adds the peer to `releases` once for each.
    pub(super) fn release_consumed(&mut self, peer: usize, mut releases: Option<&mut VecDeque<usize>>) {
        while self.released < self.recv_completed && self.incoming.get(self.released).consumed {
            self.released += 1;
            if let Some(releases) = releases.as_deref_mut() {
                releases.push_back(peer);
            }
        }
    }
}

/// The links of a rank. Memory depends on their number, not on that of all ranks.
#[derive(Debug, Default)]
pub(super) struct LinkTable {
    /// Peers in rising order.
    peers: Vec<Rank>,
    states: Vec<LinkState>,
}

impl LinkTable {
    /// Adds a link to a peer above all others.
    pub(super) fn push(&mut self, peer: Rank, state: LinkState) {
        debug_assert!(self.peers.last().is_none_or(|last| *last < peer));
        self.peers.push(peer);
        self.states.push(state);
    }

    /// The links of another pipeline of the program.
    pub(super) fn twin(&self) -> Self {
        let states = self.states.iter().map(LinkState::twin).collect();
        Self { peers: self.peers.clone(), states }
    }

    /// The link to `peer`; `None` if the program sends and receives nothing there.
    pub(super) fn get(&self, peer: Rank) -> Option<&LinkState> {
        Some(&self.states[self.peers.binary_search(&peer).ok()?])
    }

    pub(super) fn get_mut(&mut self, peer: Rank) -> Option<&mut LinkState> {
        Some(&mut self.states[self.peers.binary_search(&peer).ok()?])
    }

    /// All links are added: gives back the memory for more.
    pub(super) fn shrink_to_fit(&mut self) {
        self.peers.shrink_to_fit();
        self.states.shrink_to_fit();
    }

    /// Adds the peer to `queue`, unless it is queued: its next message may have become possible.
    pub(super) fn queue_send(&mut self, peer: Rank, queue: &mut VecDeque<Rank>) {
        let link = self.get_mut(peer).expect("the link exists");
        if !std::mem::replace(&mut link.send_queued, true) {
            queue.push_back(peer);
        }
    }

    /// Adds the peer to `queue`, unless it is queued: the receive of its next message may have become possible.
    pub(super) fn queue_recv(&mut self, peer: Rank, queue: &mut VecDeque<Rank>) {
        let link = self.get_mut(peer).expect("the link exists");
        if !link.profile.reads_in_place && !std::mem::replace(&mut link.recv_queued, true) {
            queue.push_back(peer);
        }
    }
}

/// Entries by message number, for as many messages as the window allows.
#[derive(Debug)]
pub(super) struct WindowRing<T>(Vec<Option<T>>);

impl<T: Copy> WindowRing<T> {
    fn new(window: usize) -> Self {
        Self(vec![None; window])
    }
    pub(super) fn set(&mut self, message: u64, entry: T) {
        let at = self.index(message);
        self.0[at] = Some(entry);
    }
    pub(super) fn get(&mut self, message: u64) -> &mut T {
        let at = self.index(message);
        self.0[at].as_mut().expect("the message is within the window")
    }
    pub(super) fn peek(&self, message: u64) -> Option<T> {
        self.0[self.index(message)]
    }
    fn index(&self, message: u64) -> usize {
        (message % self.0.len() as u64) as usize
    }
}
