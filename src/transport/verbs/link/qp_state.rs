//! One queue pair of a link, as the protocol sees it: what is in flight on it, and how far its end is known.

use super::super::wire::{EAGER_MESSAGES, RecoveryState, WINDOW};
use super::request::RequestKind;
use std::collections::VecDeque;

/// Requests that a queue pair takes. A call has at most a window of data and of CTS writes, the eager messages, and
/// the call itself; the rest is for what must be sent when another queue pair breaks.
pub(in super::super) const SEND_DEPTH: usize = 2 * WINDOW + EAGER_MESSAGES as usize + 28;

/// Writes of the peer that may arrive over one queue pair before this rank polls: all of a call, and of the next.
pub(in super::super) const RECV_DEPTH: usize = 2 * SEND_DEPTH;

/// One queue pair of a link.
#[derive(Debug)]
pub(in super::super) struct QpState {
    /// Index of the rail of this rank that it uses.
    pub rail: usize,
    /// Index of the rail of the peer that it connects to.
    pub peer_rail: usize,
    /// Bytes of messages in flight.
    pub bytes: u64,
    /// Bytes of messages posted since the beginning.
    pub carried: u64,
    /// Whether it is not broken.
    pub(super) alive: bool,
    /// This rank's recovery state when the queue pair was flushed. Sent to the peer, again if it may have been lost.
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

/// Whether `serial` is `other` or a later one. Serials wrap around; fewer than half of all are ever in flight.
fn is_from(serial: u32, other: u32) -> bool {
    serial.wrapping_sub(other) < u32::MAX / 2
}

impl QpState {
    /// A connected queue pair between these rails.
    pub(super) fn new(rail: usize, peer_rail: usize) -> Self {
        Self {
            rail,
            peer_rail,
            bytes: 0,
            carried: 0,
            alive: true,
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
        for write in self.in_flight.drain(..) {
            self.bytes -= write.bytes;
            self.lost.extend(Some(write.kind).filter(|kind| kind.must_arrive()));
        }
        self.receives = 0;
    }

    /// Whether it is flushed and this rank has not recorded its recovery state yet.
    pub(super) fn needs_report(&self) -> bool {
        self.local_state.is_none() && self.is_flushed()
    }

    /// Whether it is alive and no pending completion would reveal the loss of the peer.
    pub(super) fn needs_probe(&self) -> bool {
        self.alive && self.has_room() && !self.in_flight.iter().any(|write| write.kind.needs_completion())
    }

    /// Whether everything posted on it has arrived, or will over another queue pair.
    pub(super) fn is_resolved(&self) -> bool {
        self.in_flight.is_empty() && self.lost.is_empty() && (self.alive || self.local_state.is_some())
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
        self.pop_if(|write| is_from(serial, write.serial))
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
