//! One link's traffic in one call: how far each message has progressed, and which slot it holds.
//!
//! Owns the counters of both directions.
//!
//! What is constant in a call is apart from what changes, and the latter is small: a simulation has a million
//! links.

use super::action::Slot;
use super::binding::{LinkProfile, Staging};
use super::message_order::{MessageCursor, MessageOrder, OrderedMessage};
use crate::Rank;
use crate::program::{LinkMessages, StepId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of a link: the index of its peer among those of the program.
pub(super) type LinkNumber = u32;

/// What is constant on a link in a call.
#[derive(Clone, Debug)]
pub(super) struct LinkTraffic {
    pub(super) profile: LinkProfile,
    pub(super) sends: MessageOrder,
    pub(super) receives: MessageOrder,
}

impl LinkTraffic {
    /// The place of a message among those within the window.
    fn place(&self, message: u32) -> usize {
        (message % self.profile.window as u32) as usize
    }
}

/// A message from when it is planned until its send completes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSend {
    pub(super) step: StepId,
    pub(super) sub: u32,
    /// Whether the bytes can be sent; false while they are being staged.
    pub(super) ready: bool,
    pub(super) slot: Option<Slot>,
}

/// One link's traffic in this call.
#[derive(Debug)]
pub(super) struct LinkState {
    /// The next message to plan. Those before it have, or had, a [`PendingSend`].
    pub(super) planned: MessageCursor,
    /// The oldest message whose send is not complete.
    send_completed: MessageCursor,
    /// The next message to post a receive for.
    pub(super) recv_posted: MessageCursor,
    /// The next message that neither was received nor can be read in place.
    pub(super) recv_completed: MessageCursor,
    /// Number of messages handed to the transport.
    send_posted: u32,
    /// Number of messages that this rank no longer needs.
    released: u32,
    pub(super) send_slots_held: u32,
    pub(super) recv_slots_held: u32,
    /// By place in the window, whether a received message is used up.
    consumed: WindowBits,
    /// By entry of the messages to the peer, those whose send is complete; empty if messages are in the order
    /// of entries.
    completed: Box<[u32]>,
    window: LinkWindow,
    pub(super) staging: Staging,
    pub(super) send_queued: bool,
    pub(super) recv_queued: bool,
}

/// The messages in flight that may hold slots, by place in the window. Empty unless calls need it.
#[derive(Debug, Default)]
struct LinkWindow {
    /// Messages to the peer, if some of them are staged.
    outgoing: Box<[PendingSend]>,
    /// The slots of posted receives.
    incoming: Box<[Option<Slot>]>,
}

impl LinkWindow {
    fn reserve_outgoing(&mut self, window: usize) {
        if self.outgoing.is_empty() {
            let none = PendingSend { step: StepId::MAX, sub: 0, ready: false, slot: None };
            self.outgoing = vec![none; window].into();
        }
    }

    fn reserve_incoming(&mut self, window: usize) {
        if self.incoming.is_empty() {
            self.incoming = vec![None; window].into();
        }
    }
}

impl LinkState {
    /// A link of a program whose sub-chunks are interleaved if `waves`. If `reserves`, no call allocates.
    fn new(traffic: &LinkTraffic, waves: bool, reserves: bool) -> Self {
        let LinkTraffic { profile, sends, .. } = traffic;
        let mut window = LinkWindow::default();
        if reserves && profile.send_slots > 0 {
            window.reserve_outgoing(profile.window);
        }
        if reserves && profile.recv_slots > 0 {
            window.reserve_incoming(profile.window);
        }
        Self {
            planned: MessageCursor::default(),
            send_completed: MessageCursor::default(),
            recv_posted: MessageCursor::default(),
            recv_completed: MessageCursor::default(),
            send_posted: 0,
            released: 0,
            send_slots_held: 0,
            recv_slots_held: 0,
            consumed: WindowBits::new(profile.window),
            completed: vec![0; if waves { sends.entries() } else { 0 }].into(),
            window,
            staging: Staging::default(),
            send_queued: false,
            recv_queued: false,
        }
    }

    /// Resets the link for a new call, whose messages are numbered.
    pub(super) fn restart(&mut self, traffic: &LinkTraffic, staging: Staging) {
        let LinkTraffic { profile, sends, receives } = traffic;
        self.staging = staging;
        self.completed.fill(0);
        (self.planned, self.send_completed) = (sends.first(), sends.first());
        (self.recv_posted, self.recv_completed) = (receives.first(), receives.first());
        (self.send_posted, self.released) = (0, 0);
        (self.send_slots_held, self.recv_slots_held) = (0, 0);
        self.send_queued = true;
        self.recv_queued = !profile.reads_in_place;
        if self.stages() {
            self.window.reserve_outgoing(profile.window);
        }
        if profile.recv_slots > 0 {
            self.window.reserve_incoming(profile.window);
        }
    }

    /// Whether some messages to the peer are staged.
    fn stages(&self) -> bool {
        self.staging.input || self.staging.output
    }

    /// Whether the window allows no further send.
    pub(super) fn is_full(&self, traffic: &LinkTraffic) -> bool {
        (self.planned.number() - self.send_completed.number()) as usize >= traffic.profile.window
    }

    /// Whether the window allows no further received message than those before `next`.
    pub(super) fn is_full_of_received(&self, traffic: &LinkTraffic, next: MessageCursor) -> bool {
        (next.number() - self.released) as usize >= traffic.profile.window
    }

    /// Plans the next message.
    pub(super) fn plan_send(&mut self, traffic: &LinkTraffic, pending: PendingSend) {
        if self.stages() {
            self.window.outgoing[traffic.place(self.planned.number())] = pending;
        }
        traffic.sends.advance(&mut self.planned);
    }

    /// A planned message can be sent from now on.
    pub(super) fn set_ready(&mut self, traffic: &LinkTraffic, message: u32) {
        self.window.outgoing[traffic.place(message)].ready = true;
    }

    /// Counts the oldest planned message as sent, and returns it, if it is ready.
    pub(super) fn post_planned(&mut self, traffic: &LinkTraffic) -> Option<PendingSend> {
        if self.send_posted >= self.planned.number() {
            return None;
        }
        // Links that stage nothing send each message when it is planned.
        let pending = self.window.outgoing[traffic.place(self.send_posted)];
        pending.ready.then(|| {
            self.send_posted += 1;
            pending
        })
    }

    /// Plans the next message, which is not staged, and counts it as sent if no planned message precedes it.
    /// Whether it does not.
    pub(super) fn send_unstaged(&mut self, traffic: &LinkTraffic, step: StepId, sub: u32) -> bool {
        let is_first = self.send_posted == self.planned.number();
        self.plan_send(traffic, PendingSend { step, sub, ready: true, slot: None });
        self.send_posted += u32::from(is_first);
        is_first
    }

    /// Counts the oldest send in flight as complete. Returns the message and its slot; `None` if no message
    /// is in flight.
    #[inline]
    pub(super) fn complete_send(&mut self, traffic: &LinkTraffic) -> Option<(OrderedMessage, Option<Slot>)> {
        let number = self.send_completed.number();
        let message = traffic.sends.get(self.send_completed).filter(|_| number < self.send_posted)?;
        let slot = if self.stages() { self.window.outgoing[traffic.place(number)].slot } else { None };
        if let Some(completed) = self.completed.get_mut(message.entry as usize) {
            *completed += 1;
        }
        traffic.sends.advance(&mut self.send_completed);
        self.send_slots_held -= u32::from(slot.is_some());
        Some((message, slot))
    }

    /// How many messages to the peer of an entry are complete.
    pub(super) fn completed(&self, traffic: &LinkTraffic, entry: u32) -> u32 {
        let counted = self.completed.get(entry as usize);
        counted.copied().unwrap_or_else(|| traffic.sends.among_first(entry, self.send_completed.number()))
    }

    /// Counts the next receive as posted.
    pub(super) fn post_recv(&mut self, traffic: &LinkTraffic, slot: Option<Slot>) {
        let place = traffic.place(self.recv_posted.number());
        if let Some(incoming) = self.window.incoming.get_mut(place) {
            *incoming = slot;
        }
        self.recv_slots_held += u32::from(slot.is_some());
        self.consumed.set(place, false);
        traffic.receives.advance(&mut self.recv_posted);
    }

    /// Counts the next message as one that can be read in place.
    pub(super) fn announce(&mut self, traffic: &LinkTraffic) {
        self.consumed.set(traffic.place(self.recv_completed.number()), false);
        traffic.receives.advance(&mut self.recv_completed);
    }

    /// The slot of a posted receive whose message is not used up.
    pub(super) fn incoming_slot(&self, traffic: &LinkTraffic, message: u32) -> Option<Slot> {
        self.window.incoming.get(traffic.place(message)).copied().flatten()
    }

    /// Marks a received message as used up. Returns its slot.
    pub(super) fn consume(&mut self, traffic: &LinkTraffic, message: u32) -> Option<Slot> {
        let place = traffic.place(message);
        self.consumed.set(place, true);
        let slot = self.window.incoming.get_mut(place).and_then(Option::take);
        self.recv_slots_held -= u32::from(slot.is_some());
        slot
    }

    /// Releases messages that are used up, oldest first. Returns their number.
    pub(super) fn release_consumed(&mut self, traffic: &LinkTraffic) -> u32 {
        let before = self.released;
        while self.released < self.recv_completed.number() && self.consumed.get(traffic.place(self.released))
        {
            self.released += 1;
        }
        self.released - before
    }
}

/// The links of a rank. Memory depends on their number, not on that of all ranks.
#[derive(Debug)]
pub(super) struct LinkTable {
    /// Peers in rising order.
    peers: Arc<[Rank]>,
    /// By link number. Shared by pipelines of one program.
    traffic: Arc<Vec<LinkTraffic>>,
    states: Box<[LinkState]>,
}

impl LinkTable {
    /// The links to these peers, in rising order, of a program whose sub-chunks are interleaved if `waves`.
    pub(super) fn new<'a>(
        links: impl Iterator<Item = (Rank, LinkProfile, &'a LinkMessages)>,
        waves: bool,
    ) -> Self {
        let traffic = |profile: LinkProfile, messages: &LinkMessages| LinkTraffic {
            profile,
            sends: MessageOrder::new(&messages.sends),
            receives: MessageOrder::new(&messages.receives),
        };
        let (peers, traffic): (Vec<Rank>, Vec<LinkTraffic>) =
            links.map(|(peer, profile, messages)| (peer, traffic(profile, messages))).unzip();
        debug_assert!(peers.is_sorted());
        let states = traffic.iter().map(|traffic| LinkState::new(traffic, waves, true)).collect();
        Self { peers: peers.into(), traffic: Arc::new(traffic), states }
    }

    /// The links of another pipeline of the program.
    pub(super) fn twin(&self) -> Self {
        let state = |(traffic, state): (&LinkTraffic, &LinkState)| {
            LinkState::new(traffic, !state.completed.is_empty(), false)
        };
        let states = self.traffic.iter().zip(&self.states).map(state).collect();
        Self { peers: Arc::clone(&self.peers), traffic: Arc::clone(&self.traffic), states }
    }

    /// The peers in rising order, by link number.
    pub(super) fn peers(&self) -> &Arc<[Rank]> {
        &self.peers
    }

    /// What is constant on the links, to be changed at the start of a call.
    pub(super) fn traffic_mut(&mut self) -> &mut [LinkTraffic] {
        Arc::<Vec<LinkTraffic>>::make_mut(&mut self.traffic)
    }

    /// Number of the link to `peer`; `None` if the program sends and receives nothing there.
    #[inline]
    pub(super) fn number_of(&self, peer: Rank) -> Option<LinkNumber> {
        Some(self.peers.binary_search(&peer).ok()? as LinkNumber)
    }

    pub(super) fn peer(&self, number: LinkNumber) -> Rank {
        self.peers[number as usize]
    }

    pub(super) fn get(&self, number: LinkNumber) -> (&LinkTraffic, &LinkState) {
        (&self.traffic[number as usize], &self.states[number as usize])
    }

    pub(super) fn get_mut(&mut self, number: LinkNumber) -> (&LinkTraffic, &mut LinkState) {
        (&self.traffic[number as usize], &mut self.states[number as usize])
    }

    /// Adds the link to `queue`, unless it is queued: its next message may have become possible.
    pub(super) fn queue_send(&mut self, number: LinkNumber, queue: &mut VecDeque<LinkNumber>) {
        let (_, link) = self.get_mut(number);
        if !std::mem::replace(&mut link.send_queued, true) {
            queue.push_back(number);
        }
    }

    /// Adds the link to `queue`, unless it is queued: the receive of its next message may have become
    /// possible.
    pub(super) fn queue_recv(&mut self, number: LinkNumber, queue: &mut VecDeque<LinkNumber>) {
        let (traffic, link) = self.get_mut(number);
        if !traffic.profile.reads_in_place && !std::mem::replace(&mut link.recv_queued, true) {
            queue.push_back(number);
        }
    }
}

/// A bit for each place in a window.
#[derive(Debug)]
struct WindowBits {
    first: u64,
    /// Beyond the first 64.
    more: Box<[u64]>,
}

impl WindowBits {
    fn new(window: usize) -> Self {
        Self { first: 0, more: vec![0; window.div_ceil(64).saturating_sub(1)].into() }
    }

    fn get(&self, place: usize) -> bool {
        let word = if place < 64 { self.first } else { self.more[place / 64 - 1] };
        word >> (place % 64) & 1 == 1
    }

    fn set(&mut self, place: usize, value: bool) {
        let word = if place < 64 { &mut self.first } else { &mut self.more[place / 64 - 1] };
        *word = *word & !(1 << (place % 64)) | u64::from(value) << (place % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_of_a_window_has_a_bit_of_its_own() {
        for window in [1, 64, 65, 200] {
            let mut bits = WindowBits::new(window);
            (0..window).step_by(3).for_each(|place| bits.set(place, true));
            (0..window).step_by(6).for_each(|place| bits.set(place, false));
            assert!((0..window).all(|place| bits.get(place) == (place % 6 == 3)));
        }
    }
}
