//! The protocol of the link to one peer: what is written next, over which queue pair, and what a completion
//! means.
//!
//! Owns the order of a link's messages and the state that both ends share. Does no I/O:
//! [`Link::next_request`] returns what to post; `write_completed`, `received` and `write_failed` take the
//! outcomes. Must not know devices, and accesses no memory but the control buffer and the destinations of
//! eager messages.
//!
//! A message takes one of two ways. The first few of a call, if short, are **eager**: written to the peer's
//! control buffer at once, the very first together with the call. All others wait for **clear-to-send**
//! (CTS), the receiver's permission with the destination, and are written there directly. CTS run ahead of
//! the messages by a window, so a CTS is a credit too: no message arrives without memory and a posted receive
//! for it. Both ends derive from number and length which way a message takes.
//!
//! | file | owns |
//! |---|---|
//! | `mod` | sending, and what the caller sees |
//! | `receive` | what an arrived write means |
//! | `recovery` | broken queue pairs, and ranks that leave |
//! | `reconnection` | broken queue pairs that are connected again |
//! | `send_state`, `recv_state` | one epoch's messages in each direction |
//! | `carried` | which queue pair carried which write |
//! | `qp_state` | one queue pair's requests in flight |
//! | `request` | the writes to be posted |

mod carried;
mod qp_state;
mod receive;
mod reconnection;
mod recovery;
mod recv_state;
mod request;
mod send_state;
#[cfg(test)]
mod tests;

pub(super) use qp_state::{RECV_DEPTH, SEND_DEPTH, WORK_REQUESTS};
pub(super) use request::{LinkRequest, Payload};

use super::control_buffer::ControlBuffer;
use super::registry::RegisteredMemory;
use super::wire::{
    ClearToSend, ImmData, ImmKind, MAX_RAILS, NUMBERS, RecoveryState, TRIAL_BYTES, WINDOW, parity,
};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::rank::Rank;
use crate::secret::SecretKey;
use crate::transport::{Event, Events};
use qp_state::{MOST_FAILURES, QpState};
use recv_state::RecvState;
use request::RequestKind;
use send_state::{OutgoingMessage, SendState};
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// The link to one peer.
#[derive(Debug)]
pub(super) struct Link {
    pub peer: Rank,
    control: ControlBuffer,
    pub qps: Vec<QpState>,
    /// Sequence number of this rank's current call.
    sequence: u64,
    /// How many calls this rank has announced on this link. A peer is at most one ahead.
    epoch: u64,
    /// Whether this rank's current call was announced on this link.
    announced: bool,
    /// By parity of the epoch.
    send_states: [SendState; 2],
    recv_states: [RecvState; 2],
    /// What must be written again, oldest first.
    retransmits: VecDeque<RequestKind>,
    /// Queue pairs over which the peer's hello arrived, by bit.
    hellos: u64,
    tags: HelloTags,
    /// Whether this rank makes no more calls.
    is_leaving: bool,
    /// Whether the goodbye of this rank must be sent.
    goodbye_due: bool,
    /// How often this rank found something missing since the peer's goodbye arrived; `None` before.
    polls_since_goodbye: Option<u32>,
    /// Whether broken queue pairs are connected again.
    reconnects: bool,
    /// How often a queue pair may break before it has carried enough.
    most_failures: u32,
    /// Why the last queue pair broke, if none works.
    isolation: Option<Error>,
    /// A disagreement with the peer in this epoch, to be reported once the caller has seen the peer's call:
    /// ranks that make different calls expect different messages, and the calls say more than the messages.
    held_disagreement: Option<(u64, String)>,
    /// Why the link is unusable.
    failure: Option<Error>,
}

/// The tags of the hellos on one link.
#[derive(Clone, Copy, Debug, Default)]
struct HelloTags {
    mine: u64,
    theirs: u64,
}

/// The tag of the hellos that rank `from` sends. An immediate has no room for more, so it finds a queue pair
/// that is connected to the wrong process, and is no protection from a fabric that is not trusted.
fn hello_tag(key: &SecretKey, from: Rank) -> u64 {
    let [a, b, c, d, ..] = key.mac("rdma link, hello", &[&(from as u64).to_le_bytes()]);
    u64::from(u32::from_le_bytes([a, b, c, d])) % NUMBERS
}

impl Link {
    /// A link to `peer` with a queue pair for each of these rails (this rank's, the peer's).
    pub(super) fn new(peer: Rank, control: ControlBuffer, rails: &[(usize, usize)]) -> Self {
        Self {
            peer,
            control,
            qps: rails.iter().map(|(mine, theirs)| QpState::new(*mine, *theirs)).collect(),
            sequence: 0,
            epoch: 0,
            announced: false,
            send_states: Default::default(),
            recv_states: Default::default(),
            retransmits: VecDeque::with_capacity(SEND_DEPTH),
            hellos: 0,
            tags: HelloTags::default(),
            is_leaving: false,
            goodbye_due: false,
            polls_since_goodbye: None,
            reconnects: false,
            most_failures: MOST_FAILURES,
            isolation: None,
            held_disagreement: None,
            failure: None,
        }
    }

    /// Sets the rate of each queue pair, in Mbit/s: the lower one of its two rails. Without this, or if one
    /// is unknown, all are equal.
    pub(super) fn with_rates(mut self, rates: &[u64]) -> Self {
        if !rates.contains(&0) {
            self.qps.iter_mut().zip(rates).for_each(|(qp, rate)| qp.rate_mbps = *rate);
        }
        self
    }

    /// Has hellos prove that their sender knows the key of the link: those that rank `me` sends, and those of
    /// the peer.
    pub(super) fn with_key(mut self, me: Rank, key: &SecretKey) -> Self {
        self.tags = HelloTags { mine: hello_tag(key, me), theirs: hello_tag(key, self.peer) };
        self
    }

    /// Fails if the link is unusable.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Fails if the link is unusable for a call. What a peer wrote before it left has arrived, and may be all
    /// that the call needs.
    fn check_for_call(&self) -> Result<()> {
        let is_done = |error: &&Error| self.has_left() && error.kind() == ErrorKind::PeerLost;
        self.failure.as_ref().filter(|error| !is_done(error)).map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Begins a call of this rank, which may or may not use this link.
    pub(super) fn begin(&mut self, sequence: u64) {
        self.sequence = sequence;
        self.announced = false;
    }

    /// Whether this rank's current call was written to the peer, if it uses this link. A peer that has left
    /// reads it no more.
    pub(super) fn is_announced(&self) -> bool {
        !self.announced || self.send_states[parity(self.epoch)].call_posted || self.has_left()
    }

    /// Whether the next request repeats what another queue pair lost, so that it is no progress.
    pub(super) fn repeats(&self) -> bool {
        !self.retransmits.is_empty()
    }

    /// Whether messages are in flight, so that the link holds memory of the caller.
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight() != (0, 0)
    }

    /// Whether this rank's current call still waits for the peer.
    pub(super) fn needs_peer(&self) -> bool {
        self.announced && (self.in_flight().0 > 0 || self.recv_states[parity(self.epoch)].is_incomplete())
    }

    /// How many messages are in flight: to the peer, and receives posted for the peer's.
    pub(super) fn in_flight(&self) -> (u64, u64) {
        let send = &self.send_states[parity(self.epoch)];
        (send.queued - send.reported, self.recv_states[parity(self.epoch)].outstanding())
    }

    /// Announces this rank's current call to the peer.
    ///
    /// # Errors
    /// Why the link is unusable; `Disagreement` if the peer's writes did not fit the last call.
    pub(super) fn announce(&mut self, call: &Call) -> Result<()> {
        self.check_for_call()?;
        if let Some((_, problem)) = self.held_disagreement.take_if(|(epoch, _)| *epoch <= self.epoch) {
            return Err(self.disagree(&problem));
        }
        self.epoch += 1;
        self.announced = true;
        // Control buffers are host memory, so a call on a GPU has no eager messages.
        let longest_eager = (!call.on_gpu).then_some(self.control.layout.longest_eager);
        self.send_states[parity(self.epoch)].restart(*call, longest_eager);
        self.recv_states[parity(self.epoch)].begin(longest_eager);
        // Writes that arrive early from now on belong to the next epoch.
        self.recv_states[parity(self.epoch + 1)].restart();
        Ok(())
    }

    /// Whether the next message is eager at this length, so that its memory need not be registered.
    pub(super) fn sends_eagerly(&self, len: usize) -> bool {
        let send = &self.send_states[parity(self.epoch)];
        send.is_eager(send.queued, len)
    }

    /// Queues the next message. Unless it is eager, `region` is the registered memory that contains it.
    ///
    /// # Errors
    /// Why the link is unusable.
    pub(super) fn send(&mut self, piece: Piece, region: Option<Arc<RegisteredMemory>>) -> Result<()> {
        self.check_for_call()?;
        let epoch = self.epoch;
        let send = &mut self.send_states[parity(epoch)];
        let number = send.queued;
        if send.is_eager(number, piece.len()) {
            self.control.write_eager(epoch, number, piece);
        }
        send.messages[number as usize % WINDOW] = Some(OutgoingMessage { piece, region, done: false });
        send.queued += 1;
        Ok(())
    }

    /// The next write to post, if there is one now.
    pub(super) fn next_request(&mut self) -> Result<Option<LinkRequest>> {
        if let Some(kind) = self.retransmits.front().copied().or_else(|| self.next_goodbye()) {
            let Some(qp) = self.qp_for(kind) else { return Ok(None) };
            if self.retransmits.pop_front().is_none() {
                self.goodbye_due = false;
            }
            return self.request(qp, kind).map(Some);
        }
        if self.is_leaving
            && let Some(qp) = self.qps.iter().position(|qp| qp.needs_probe() && !qp.is_idle())
        {
            // Nothing else says that what was written there has arrived.
            return self.request(qp, RequestKind::Probe).map(Some);
        }
        if !self.announced {
            return Ok(None);
        }
        let Some((kind, qp)) = self.next_new_request() else { return Ok(None) };
        self.request(qp, kind).map(Some)
    }

    /// What the current epoch must write next, and the queue pair for it. Counts it as posted.
    fn next_new_request(&mut self) -> Option<(RequestKind, usize)> {
        let epoch = self.epoch;
        let (send, recv) = (&mut self.send_states[parity(epoch)], &mut self.recv_states[parity(epoch)]);
        let kind = if !send.call_posted {
            match send.eager_first() {
                Some(len) => RequestKind::EagerCall { epoch, len },
                None => RequestKind::Call { epoch },
            }
        } else if let Some((from, to)) = recv.pending_cts() {
            RequestKind::Cts { epoch, from, to }
        } else if send.posted < send.queued {
            let message = send.posted;
            let len = send.message(message).piece.len();
            if send.is_eager(message, len) {
                RequestKind::Eager { epoch, message, len }
            } else if recv.is_clear_to_send() {
                let expected = self.control.read_cts(epoch, message).len.get() as usize;
                if expected != len {
                    self.hold_wrong_length(
                        epoch,
                        &format!("expects {expected} bytes where this rank sends {len}"),
                    );
                    return None;
                }
                RequestKind::Data { epoch, message }
            } else {
                return None;
            }
        } else {
            return None;
        };
        let qp = self.qp_for(kind)?;
        let (send, recv) = (&mut self.send_states[parity(epoch)], &mut self.recv_states[parity(epoch)]);
        send.call_posted |= matches!(kind, RequestKind::Call { .. } | RequestKind::EagerCall { .. });
        if let RequestKind::EagerCall { .. } | RequestKind::Eager { .. } | RequestKind::Data { .. } = kind {
            let message = send.posted;
            send.posted += 1;
            recv.consume_credit();
            if !matches!(kind, RequestKind::Data { .. }) {
                // Its bytes are in the control buffer.
                send.message(message).done = true;
            }
        } else if let RequestKind::Cts { to, .. } = kind {
            recv.mark_cts_sent(to);
        }
        Some((kind, qp))
    }

    /// Notes that a message has another length than expected.
    fn hold_wrong_length(&mut self, epoch: u64, problem: &str) {
        self.hold(epoch, format!("{problem}; do all ranks run the same version with the same settings?"));
    }

    /// Keeps a disagreement until the peer's call of the epoch is reported. `problem` follows the peer's
    /// rank.
    fn hold(&mut self, epoch: u64, problem: String) {
        self.held_disagreement.get_or_insert((epoch, problem));
    }

    /// Whether [`report`](Self::report) fails now because of a disagreement that was held.
    pub(super) fn must_disagree(&self) -> bool {
        self.is_announced()
            && matches!(self.held_disagreement, Some((epoch, _)) if self.recv_states[parity(epoch)].is_call_reported())
    }

    /// The queue pair for a request, if it has room. A message uses the queue pair that is expected to finish
    /// it first, by the rates of the rails and what is in flight on each, so that slow rails do not hold the
    /// last messages of a call; messages alternate between equals. Everything else uses the first that works,
    /// so that it stays in order.
    fn qp_for(&self, kind: RequestKind) -> Option<usize> {
        let mut alive = self.qps.iter().enumerate().filter(|(_, qp)| qp.is_proven());
        let chosen = match kind {
            RequestKind::Data { epoch, message } => {
                let len = self.send_states[parity(epoch)].message_len(message);
                alive.min_by_key(|(_, qp)| qp.time_to_carry(len as u64))
            }
            _ => alive.next(),
        };
        chosen.filter(|(_, qp)| qp.has_room()).map(|(number, _)| number)
    }

    /// Makes a request and records it as in flight.
    fn request(&mut self, qp: usize, kind: RequestKind) -> Result<LinkRequest> {
        let (imm, epoch, payload) = match kind {
            RequestKind::Call { epoch } => {
                let call = self.send_states[parity(epoch)].call.expect("an epoch has a call");
                (Some(ImmKind::Call), epoch, Payload::Control(self.control.write_call(epoch, &call)))
            }
            RequestKind::EagerCall { epoch, len } => {
                let call = self.send_states[parity(epoch)].call.expect("an epoch has a call");
                let range = self.control.write_eager_call(epoch, &call, len);
                (Some(ImmKind::EagerCall(len as u32)), epoch, Payload::Control(range))
            }
            RequestKind::Eager { epoch, message, len } => {
                let offset = self.control.layout.eager_bytes(epoch, message);
                (Some(ImmKind::Eager(message, len as u32)), epoch, Payload::Control((offset, len)))
            }
            RequestKind::Cts { epoch, from, to } => {
                let range = self.control.cts_range(epoch, from..to);
                (Some(ImmKind::Cts(to, to - from)), epoch, Payload::Control(range))
            }
            RequestKind::Data { epoch, message } => {
                let ClearToSend { address, keys, .. } = self.control.read_cts(epoch, message);
                let key = keys[self.qps[qp].peer_rail].get();
                let OutgoingMessage { piece, region, .. } = self.send_states[parity(epoch)].message(message);
                let region = region.clone().expect("a message that is not eager has a region");
                let payload = Payload::Message { piece: *piece, region, address: address.get(), key };
                (Some(ImmKind::Data(message)), epoch, payload)
            }
            RequestKind::Recovery { qp } => {
                let state = self.qps[qp].local_state.expect("a recovery state is sent once it is recorded");
                let range = self.control.write_recovery(qp, state);
                (Some(ImmKind::Recovery(qp, self.qps[qp].generation)), 0, Payload::Control(range))
            }
            RequestKind::Hello => (Some(ImmKind::Hello(self.tags.mine)), 0, Payload::Empty),
            RequestKind::Trial => (None, 0, Payload::Control((self.control.layout.trial(), TRIAL_BYTES))),
            RequestKind::Goodbye => (Some(ImmKind::Goodbye), 0, Payload::Empty),
            RequestKind::Probe => (None, 0, Payload::Empty),
        };
        let bytes = match &payload {
            Payload::Message { piece, .. } => piece.len(),
            _ => 0,
        };
        if let Some(epoch) = kind.epoch() {
            self.send_states[parity(epoch)].carried.set(kind, qp);
        }
        let serial = self.qps[qp].record(kind, bytes as u64);
        let imm = imm.map(|kind| ImmData { kind, epoch }.pack());
        Ok(LinkRequest { qp, serial, imm, payload, needs_completion: kind.needs_completion() })
    }

    /// A hello over one queue pair.
    pub(super) fn hello(&mut self, qp: usize) -> Result<LinkRequest> {
        self.request(qp, RequestKind::Hello)
    }

    /// What follows a hello: a write of long packets.
    pub(super) fn trial(&mut self, qp: usize) -> Result<LinkRequest> {
        self.request(qp, RequestKind::Trial)
    }

    /// Whether the oldest request of a queue pair in flight is a trial: a hello has passed, long packets have
    /// not yet.
    pub(super) fn awaits_trial(&self, qp: usize) -> bool {
        self.qps[qp].oldest() == Some(RequestKind::Trial)
    }

    /// A request succeeded, and with it all before it on its queue pair.
    pub(super) fn write_completed(&mut self, qp: usize, serial: u32) {
        while let Some(kind) = self.qps[qp].pop_completed(serial) {
            self.complete(kind);
            if kind == RequestKind::Trial {
                self.prove(qp);
            }
        }
    }

    /// What a request wrote has arrived.
    fn complete(&mut self, kind: RequestKind) {
        if let RequestKind::Data { epoch, message } = kind
            && epoch == self.epoch
        {
            let message = self.send_states[parity(epoch)].message(message);
            message.done = true;
            message.region = None;
        }
    }

    /// Posts a receive for the peer's next message. Unless the message is eager, `region` is the registered
    /// memory that contains the destination, with its remote keys by rail.
    ///
    /// # Errors
    /// Why the link is unusable.
    pub(super) fn post_recv(
        &mut self,
        destination: Piece,
        region: Option<Arc<RegisteredMemory>>,
        keys: [u32; MAX_RAILS],
    ) -> Result<()> {
        self.check_for_call()?;
        let epoch = self.epoch;
        let (message, eager) = self.recv_states[parity(epoch)].post_recv(destination, region);
        if !eager {
            let cts = ClearToSend::new(destination.as_ptr() as u64, destination.len() as u32, keys);
            self.control.write_cts(epoch, message, cts);
        }
        self.deliver_eager(epoch, message);
        Ok(())
    }

    /// Whether the next receive is for an eager message at this length, so that its memory need not be
    /// registered.
    pub(super) fn receives_eagerly(&self, len: usize) -> bool {
        self.recv_states[parity(self.epoch)].next_is_eager(len)
    }

    /// Reports the peer's call and the completed messages, in their order.
    ///
    /// # Errors
    /// `Disagreement` if the peer's call is invalid, or the peer's writes don't fit the call that was
    /// reported before; `PeerLost` if the peer has left and is needed.
    pub(super) fn report(&mut self, events: &mut Events) -> Result<()> {
        let peer = self.peer;
        if self.must_disagree()
            && let Some((_, problem)) = self.held_disagreement.take()
        {
            return Err(self.disagree(&problem));
        }
        // If this rank's current call does not use the link, writes that arrive belong to the next epoch. If
        // the peer is not in a later call, it runs another program.
        let epoch = if self.announced { self.epoch } else { self.epoch + 1 };
        if let Some(with_message) = self.recv_states[parity(epoch)].unreported_call() {
            let Some(call) = self.control.read_call(epoch, with_message) else {
                return Err(self.disagree("made a call that this version does not know"));
            };
            if self.announced || call.sequence <= self.sequence {
                self.recv_states[parity(epoch)].mark_call_reported();
                events.push_back(Event::PeerEntered { peer, call });
            }
        }
        if !self.announced {
            return Ok(());
        }
        let send = &mut self.send_states[parity(self.epoch)];
        while send.reported < send.posted && send.message(send.reported).done {
            send.reported += 1;
            events.push_back(Event::SendComplete { peer });
        }
        // The device of a broken queue pair may still write to what arrived over it, until everything is
        // flushed.
        while !self.is_draining() && self.recv_states[parity(self.epoch)].pop_completed() {
            events.push_back(Event::RecvComplete { peer });
        }
        self.check_left()
    }

    /// Whether the peer's hello arrived over a queue pair.
    pub(super) fn hello_received(&self, qp: usize) -> bool {
        self.hellos >> qp & 1 == 1
    }

    /// This rank's recovery state: which of the peer's writes have arrived.
    fn recovery_state(&self) -> RecoveryState {
        let [even, odd] = &self.recv_states;
        RecoveryState {
            epoch: U64::new(self.epoch),
            reports: [even.delivery_report(), odd.delivery_report()],
        }
    }

    fn disagree(&mut self, problem: &str) -> Error {
        self.fail(ErrorKind::Disagreement, problem)
    }

    fn lose(&mut self, problem: String) -> Error {
        self.fail(ErrorKind::PeerLost, &problem)
    }

    /// Makes the link unusable. The first reason stays.
    fn fail(&mut self, kind: ErrorKind, problem: &str) -> Error {
        let error = Error::new(kind, format!("rank {} {problem}", self.peer)).with_suspect(self.peer);
        self.failure.get_or_insert(error).clone()
    }

    /// Makes the link unusable for a reason of this rank.
    pub(super) fn abort(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }
}
