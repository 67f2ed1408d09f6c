//! One queue pair of a link, as the protocol sees it: what is in flight on it, and how far its end is known.

use super::super::wire::{EAGER_MESSAGES, GENERATIONS, RecoveryState, WINDOW};
use super::request::RequestKind;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Requests that a queue pair takes. A call has at most a window of data and of CTS writes, the eager
/// messages, and the call itself; the rest is for what must be sent when another queue pair breaks.
pub(in super::super) const SEND_DEPTH: usize = 2 * WINDOW + EAGER_MESSAGES as usize + 26;

/// Work requests that the device's send queue must take. A message may be written by two, and at most a
/// window of messages is in flight on a link; one more is the drain marker of a queue pair that breaks. 127
/// altogether: drivers round up to powers of two, some after adding one.
pub(in super::super) const WORK_REQUESTS: usize = SEND_DEPTH + WINDOW + 1;

/// Writes of the peer that may arrive over one queue pair before this rank polls: all of a call, and of the
/// next.
pub(in super::super) const RECV_DEPTH: usize = 2 * SEND_DEPTH;

/// Bytes of messages that a rail must carry to count as one that works.
pub(super) const PROOF: u64 = 1 << 20;

/// A queue pair that breaks so often before it has carried [`PROOF`], each time within [`SUCCESSION`] of the
/// time before, is not connected again: its rail passes hellos, and loses what matters.
pub(super) const MOST_FAILURES: u32 = 3;

/// What breaks again later has another cause, such as a cable that was pulled. A rail that loses data breaks
/// each time that a retry time is over, which is half a minute on adapters.
const SUCCESSION: Duration = Duration::from_secs(300);

/// One queue pair of a link.
#[derive(Debug)]
pub(in super::super) struct QpState {
    /// Index of the rail of this rank that it uses.
    pub rail: usize,
    /// Index of the rail of the peer that it connects to.
    pub peer_rail: usize,
    /// What its rails carry, in Mbit/s, relative to the other queue pairs of the link.
    pub(super) rate_mbps: u64,
    /// Bytes of messages in flight.
    pub bytes: u64,
    /// Bytes of messages posted since the beginning.
    pub carried: u64,
    /// Bytes of messages acknowledged since it was connected, and bytes of those that arrived.
    acknowledged: u64,
    arrived: u64,
    /// How often in succession it broke before it had carried [`PROOF`], and when it broke last.
    pub(super) failures: u32,
    /// Whether both ends know that it is not connected again.
    pub(super) is_drop_known: bool,
    failed_at: Option<Instant>,
    /// How often it was connected again, modulo [`GENERATIONS`].
    pub(in super::super) generation: u32,
    /// Whether it is connected at this end, and not broken.
    pub(super) alive: bool,
    /// Whether it carries what the link writes. One that was connected again, or whose rail is suspected to
    /// have failed, first has to carry a hello.
    pub(super) proven: bool,
    /// Whether the whole of what was written over it is known to have arrived or was queued again.
    pub(super) recovered: bool,
    /// Whether the peer must get this rank's recovery state by another way than a queue pair, because none
    /// works.
    pub(super) state_due: bool,
    /// The peer's recovery state of the next generation, if it arrived before this end was connected.
    pub(super) early_state: Option<RecoveryState>,
    /// `carried` when it was first connected again.
    #[cfg(test)]
    carried_before: Option<u64>,
    /// The first serial of this generation.
    first_serial: u32,
    /// This rank's recovery state when the queue pair was flushed. Sent to the peer, again if it may have
    /// been lost.
    pub(super) local_state: Option<RecoveryState>,
    /// The peer's recovery state when the queue pair was flushed at its end.
    pub(super) peer_state: Option<RecoveryState>,
    serial: u32,
    in_flight: VecDeque<PostedWrite>,
    /// What was in flight when it broke, and may not have arrived.
    pub(super) lost: Vec<RequestKind>,
    /// Receives posted at the device.
    receives: usize,
}

#[derive(Debug)]
struct PostedWrite {
    serial: u32,
    kind: RequestKind,
    bytes: u64,
}

/// Whether `serial` is `other` or a later one. Serials wrap around; fewer than half of all are ever in
/// flight.
fn is_from(serial: u32, other: u32) -> bool {
    serial.wrapping_sub(other) < u32::MAX / 2
}

impl QpState {
    /// A connected queue pair between these rails.
    pub(super) fn new(rail: usize, peer_rail: usize) -> Self {
        Self {
            rail,
            peer_rail,
            rate_mbps: 1,
            bytes: 0,
            carried: 0,
            acknowledged: 0,
            arrived: 0,
            failures: 0,
            is_drop_known: false,
            failed_at: None,
            generation: 0,
            alive: true,
            proven: true,
            recovered: false,
            state_due: false,
            early_state: None,
            #[cfg(test)]
            carried_before: None,
            first_serial: 0,
            local_state: None,
            peer_state: None,
            serial: 0,
            in_flight: VecDeque::with_capacity(SEND_DEPTH),
            lost: Vec::with_capacity(SEND_DEPTH),
            receives: RECV_DEPTH,
        }
    }

    /// Whether it is not broken.
    pub(in super::super) fn is_alive(&self) -> bool {
        self.alive
    }

    /// Whether it carries what the link writes.
    pub(in super::super) fn is_proven(&self) -> bool {
        self.alive && self.proven
    }

    /// Whether it may yet prove to work: it was never used, or its hello or trial is under way.
    pub(in super::super) fn is_on_trial(&self) -> bool {
        self.alive && !self.proven && (self.generation == 0 || !self.is_idle())
    }

    /// Whether a request of this serial was posted since it was connected last.
    pub(in super::super) fn is_current(&self, serial: u32) -> bool {
        is_from(serial, self.first_serial)
    }

    /// The generation after the current one.
    pub(in super::super) fn next_generation(&self) -> u32 {
        (self.generation + 1) % GENERATIONS
    }

    /// Bytes of messages posted since it was connected again.
    #[cfg(test)]
    pub(in super::super) fn carried_again(&self) -> u64 {
        self.carried - self.carried_before.unwrap_or(self.carried)
    }

    /// It is connected again at this end.
    pub(super) fn restart(&mut self) {
        self.generation = self.next_generation();
        (self.alive, self.proven, self.recovered) = (true, false, false);
        (self.local_state, self.peer_state) = (None, self.early_state.take());
        self.first_serial = self.serial.wrapping_add(1);
        self.receives = RECV_DEPTH;
        (self.acknowledged, self.arrived) = (0, 0);
        #[cfg(test)]
        self.carried_before.get_or_insert(self.carried);
    }

    /// Whether it has carried so much since it was connected that its rail works. What arrives counts where
    /// this end sends nothing.
    pub(in super::super) fn is_reliable(&self) -> bool {
        self.acknowledged >= PROOF || (self.bytes == 0 && self.arrived >= PROOF)
    }

    /// Bytes of a message have arrived over it.
    pub(in super::super) fn count_arrived(&mut self, bytes: u64) {
        self.arrived += bytes;
    }

    /// It broke `now`, while it carried what the link writes.
    pub(super) fn count_failure(&mut self, now: Instant) {
        let is_late = self.failed_at.is_some_and(|before| now.saturating_duration_since(before) > SUCCESSION);
        let before = if is_late { 0 } else { self.failures };
        self.failures = if self.is_reliable() { 0 } else { before + 1 };
        self.failed_at = Some(now);
    }

    /// The oldest request in flight.
    pub(super) fn oldest(&self) -> Option<RequestKind> {
        self.in_flight.front().map(|write| write.kind)
    }

    /// Whether the recovery state of this queue pair is in flight on this one, or was.
    pub(super) fn has_recovery_of(&self, qp: usize) -> bool {
        let kind = RequestKind::Recovery { qp };
        self.lost.contains(&kind) || self.in_flight.iter().any(|write| write.kind == kind)
    }

    /// Whether no request is in flight.
    pub(in super::super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether it is broken and the device has flushed all requests and receives.
    pub(in super::super) fn is_flushed(&self) -> bool {
        !self.alive && self.in_flight.is_empty() && self.receives == 0
    }

    /// Whether it is broken and its device may still access memory for it.
    pub(in super::super) fn is_draining(&self) -> bool {
        !self.alive && self.local_state.is_none()
    }

    /// Whether it is broken and no completion of it is handled any more.
    pub(in super::super) fn is_settled(&self) -> bool {
        !self.alive && self.local_state.is_some()
    }

    /// The queue pair was destroyed. What has no completion by now never gets one.
    pub(super) fn destroyed(&mut self) {
        self.lose_after(0);
        self.receives = 0;
    }

    /// Whether it is flushed and this rank has not recorded its recovery state yet.
    pub(super) fn needs_report(&self) -> bool {
        self.local_state.is_none() && self.is_flushed()
    }

    /// Whether it is alive and no pending completion would reveal the loss of the peer.
    pub(super) fn needs_probe(&self) -> bool {
        self.is_proven()
            && self.has_room()
            && !self.in_flight.iter().any(|write| write.kind.needs_completion())
    }

    /// Whether everything posted on it has arrived, or will over another queue pair.
    pub(super) fn is_resolved(&self) -> bool {
        self.in_flight.is_empty() && self.lost.is_empty() && (self.alive || self.local_state.is_some())
    }

    /// How long it takes until a further message of `len` bytes is carried, and, to choose between equals,
    /// what it carried before; in units that are the same for all queue pairs of the link.
    pub(super) fn time_to_carry(&self, len: u64) -> (u64, u64) {
        let time = |bytes: u64| bytes.saturating_mul(8_000) / self.rate_mbps;
        (time(self.bytes + len), time(self.carried))
    }

    /// Whether it takes another request.
    pub(super) fn has_room(&self) -> bool {
        self.in_flight.len() < SEND_DEPTH
    }

    /// Records a request that is about to be posted, with its bytes of message. Returns its serial.
    pub(super) fn record(&mut self, kind: RequestKind, bytes: u64) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.bytes += bytes;
        self.carried += bytes;
        self.in_flight.push_back(PostedWrite { serial: self.serial, kind, bytes });
        self.serial
    }

    /// Removes the oldest request if its serial is `serial` or an earlier one.
    pub(super) fn pop_completed(&mut self, serial: u32) -> Option<RequestKind> {
        let before = self.bytes;
        let popped = self.pop_if(|write| is_from(serial, write.serial));
        self.acknowledged += before - self.bytes;
        popped
    }

    /// Removes the oldest request if its serial is earlier than `serial`.
    pub(super) fn pop_before(&mut self, serial: u32) -> Option<RequestKind> {
        self.pop_if(|write| write.serial != serial && is_from(serial, write.serial))
    }

    /// Removes the oldest request if it has this serial, and notes it as lost.
    pub(super) fn lose(&mut self, serial: u32) {
        let failed = self.pop_if(|write| write.serial == serial);
        self.lost.extend(failed.filter(|kind| kind.must_arrive()));
    }

    /// Removes the request with this serial and all later ones, and notes them as lost.
    pub(super) fn lose_from(&mut self, serial: u32) {
        let late = |write: &PostedWrite| is_from(write.serial, serial);
        let at = self.in_flight.iter().position(late).unwrap_or(self.in_flight.len());
        self.lose_after(at);
    }

    /// Removes all requests in flight but the `at` oldest ones, and notes them as lost.
    fn lose_after(&mut self, at: usize) {
        for write in self.in_flight.drain(at..) {
            self.bytes -= write.bytes;
            self.lost.extend(Some(write.kind).filter(|kind| kind.must_arrive()));
        }
    }

    fn pop_if(&mut self, condition: impl Fn(&PostedWrite) -> bool) -> Option<RequestKind> {
        self.in_flight.front().filter(|write| condition(write))?;
        let write = self.in_flight.pop_front()?;
        self.bytes -= write.bytes;
        Some(write.kind)
    }

    /// A receive completed, successfully or not. Returns whether another must be posted.
    pub(super) fn recv_completed(&mut self) -> bool {
        if !self.alive {
            self.receives = self.receives.saturating_sub(1);
        }
        self.alive
    }
}
