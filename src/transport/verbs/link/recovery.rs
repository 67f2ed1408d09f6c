//! What happens when a queue pair breaks while others of the link live, and when one of the ranks leaves.
//!
//! Whatever was under way on it may or may not have come. Nothing is written anew before that is known, since the
//! peer may have used the place for something else meanwhile. So each end breaks its side off, waits until the
//! device has let go of all requests and receives, after which nothing can come over it any more, and then tells
//! the other, over a pair that lives, all that has come ([`RecoveryState`]). What the peer lacks is then written again over
//! the living pairs, and nothing twice.
//!
//! What an end knows of a pair when the device has let go of it stays true, so it is told in the same words as often
//! as the pair that it is told over breaks too, and waits for nothing.

use super::super::wire::{RecoveryState, WINDOW};
use super::{Link, LinkRequest, RECV_DEPTH, RequestKind, SEND_DEPTH, parity};
use crate::error::{Error, ErrorKind, Result};
use std::collections::VecDeque;

/// One queue pair of a link, as the link sees it.
#[derive(Debug)]
pub(in super::super) struct QpState {
    /// The rail of this rank's, and of the peer's, that it connects.
    pub rail: usize,
    pub peer_rail: usize,
    /// Bytes of messages that are under way, and of all so far.
    pub bytes: u64,
    pub carried: u64,
    alive: bool,
    /// Whether its device will tell when it has let go of everything, now that it is broken.
    draining: bool,
    /// What the peer is told of it, as often as it may have been lost, since the device has let go of everything.
    pub(super) local_state: Option<RecoveryState>,
    /// What the peer has said came over it, and all else that it knew then.
    peer_state: Option<RecoveryState>,
    serial: u32,
    in_flight: VecDeque<PostedWrite>,
    /// What was under way when it broke.
    lost: Vec<RequestKind>,
    /// Receives that are posted.
    receives: usize,
}

#[derive(Debug)]
struct PostedWrite {
    serial: u32,
    kind: RequestKind,
    bytes: u64,
}

impl QpState {
    pub(super) fn new(rail: usize, peer_rail: usize) -> Self {
        Self {
            rail,
            peer_rail,
            bytes: 0,
            carried: 0,
            alive: true,
            draining: false,
            local_state: None,
            peer_state: None,
            serial: 0,
            in_flight: VecDeque::with_capacity(SEND_DEPTH),
            lost: Vec::with_capacity(SEND_DEPTH),
            receives: RECV_DEPTH,
        }
    }

    pub(in super::super) fn is_alive(&self) -> bool {
        self.alive
    }

    pub(in super::super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether it is broken and the device has let go of all requests and receives.
    pub(in super::super) fn is_flushed(&self) -> bool {
        !self.alive && self.in_flight.is_empty() && self.receives == 0
    }

    /// Whether the device has let go of it and the peer is not told yet.
    fn needs_report(&self) -> bool {
        self.local_state.is_none() && self.is_flushed()
    }

    /// Whether it lives and no completion will tell anything.
    pub(super) fn needs_probe(&self) -> bool {
        self.alive && self.has_room() && !self.in_flight.iter().any(|post| post.kind.needs_completion())
    }

    /// Whether it is known that all that was put on it has come, or will over another one.
    pub(super) fn is_resolved(&self) -> bool {
        self.in_flight.is_empty() && self.lost.is_empty() && (self.alive || self.local_state.is_some())
    }

    pub(super) fn has_room(&self) -> bool {
        self.in_flight.len() < SEND_DEPTH
    }

    /// Notes a request; its number.
    pub(super) fn record(&mut self, kind: RequestKind, bytes: u64) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.bytes += bytes;
        self.carried += bytes;
        self.in_flight.push_back(PostedWrite { serial: self.serial, kind, bytes });
        self.serial
    }

    /// Takes the oldest request off if it is not younger than this one.
    pub(super) fn pop_acknowledged(&mut self, serial: u32) -> Option<RequestKind> {
        // Numbers go round; fewer than half of all are ever under way.
        self.pop_if(|post| serial.wrapping_sub(post.serial) < u32::MAX / 2)
    }

    fn pop_if(&mut self, of: impl Fn(&PostedWrite) -> bool) -> Option<RequestKind> {
        self.in_flight.front().filter(|post| of(post))?;
        let post = self.in_flight.pop_front()?;
        self.bytes -= post.bytes;
        Some(post.kind)
    }
}

impl Link {
    /// A receive was completed, well or not; `true` if another is to be posted.
    pub(in super::super) fn recv_completed(&mut self, qp: usize) -> bool {
        let qp = &mut self.qps[qp];
        if !qp.alive {
            qp.receives = qp.receives.saturating_sub(1);
        }
        qp.alive
    }

    /// A request was not carried out. Those before it were, as the ones after it are told one by one.
    pub(in super::super) fn write_failed(&mut self, qp: usize, serial: u32) {
        while let Some(kind) = self.qps[qp]
            .pop_if(|post| post.serial != serial && serial.wrapping_sub(post.serial) < u32::MAX / 2)
        {
            self.complete(kind);
        }
        let qp = &mut self.qps[qp];
        let write_failed = qp.pop_if(|post| post.serial == serial);
        qp.lost.extend(write_failed.filter(|kind| kind.must_arrive()));
    }

    /// A request was never posted, nor any after it, be it the mark of an end.
    pub(in super::super) fn unpost(&mut self, qp: usize, serial: u32) {
        let qp = &mut self.qps[qp];
        qp.draining = false;
        let young = |post: &PostedWrite| post.serial.wrapping_sub(serial) < u32::MAX / 2;
        let at = qp.in_flight.iter().position(young).unwrap_or(qp.in_flight.len());
        for post in qp.in_flight.drain(at..) {
            qp.bytes -= post.bytes;
            qp.lost.extend(Some(post.kind).filter(|kind| kind.must_arrive()));
        }
    }

    /// A write of nothing to a queue pair that was broken off, which fails after all that was written before it: what
    /// has no completion of its own by then was carried out.
    pub(in super::super) fn drain_marker(&mut self, qp: usize) -> Result<LinkRequest> {
        self.qps[qp].draining = true;
        self.request(qp, RequestKind::Probe)
    }

    /// The link is lost, for this reason.
    pub(in super::super) fn mark_unreachable(&mut self, cause: &Error) {
        self.lose(format!("cannot be reached any more: {}", cause.message()));
    }

    /// A queue pair is of no use any more, for this reason. `true` if that is news, and it must be broken off.
    pub(in super::super) fn break_qp(&mut self, qp: usize, cause: &Error) -> bool {
        if !std::mem::replace(&mut self.qps[qp].alive, false) {
            return false;
        }
        let living = self.qps.iter().filter(|qp| qp.alive).count();
        if living == 0 {
            self.mark_unreachable(cause);
        } else if self.failure.is_none() {
            log::warn!(
                "verbs: a queue pair to rank {} broke ({}); {living} of {} carry on, and what was under way goes again",
                self.peer,
                cause.message(),
                self.qps.len()
            );
        }
        true
    }

    /// The peer has told what came over a queue pair that is broken at its end.
    pub(super) fn received_recovery_state(&mut self, qp: usize) -> Result<()> {
        let known = match self.qps.get_mut(qp) {
            Some(failure) => &mut failure.peer_state,
            None => return Err(self.protocol_violation()),
        };
        known.get_or_insert_with(|| self.control.read_recovery(qp));
        Ok(())
    }

    /// A queue pair that is broken at the peer's end and not yet at this one.
    pub(in super::super) fn next_qp_to_break(&self) -> Option<usize> {
        self.qps.iter().position(|qp| qp.alive && qp.peer_state.is_some())
    }

    /// Broken queue pairs that the device has let go of, which [`settle`](Self::settle) does not know yet.
    pub(in super::super) fn newly_flushed(&self) -> impl Iterator<Item = usize> {
        self.qps.iter().enumerate().filter(|(_, qp)| qp.needs_report()).map(|(number, _)| number)
    }

    /// Whether a device may still be at work for a queue pair that has broken.
    pub(super) fn is_draining(&self) -> bool {
        self.qps.iter().any(|qp| qp.draining && qp.local_state.is_none())
    }

    /// Goes on with what broken queue pairs need: telling what came, and writing again what did not.
    pub(in super::super) fn recover(&mut self) {
        for number in 0..self.qps.len() {
            let qp = &mut self.qps[number];
            if qp.alive {
                continue;
            }
            // If each end waited here for what the other knows, both might wait for ever.
            let known = |kind: &mut RequestKind| matches!(kind, RequestKind::Recovery { .. });
            self.retransmits.extend(qp.lost.extract_if(.., known));
            if qp.needs_report() {
                self.qps[number].local_state = Some(self.known());
                self.retransmits.push_back(RequestKind::Recovery { qp: number });
            }
            if let QpState { local_state: Some(_), peer_state: Some(known), .. } = self.qps[number] {
                for index in 0..self.qps[number].lost.len() {
                    let kind = self.qps[number].lost[index];
                    let lacking = match kind {
                        RequestKind::Call { epoch } | RequestKind::EagerCall { epoch, .. } => {
                            known.of(epoch).is_some_and(|report| !report.call_received)
                        }
                        RequestKind::Eager { epoch, message, .. } => {
                            known.of(epoch).is_some_and(|report| report.eager >> message & 1 == 0)
                        }
                        RequestKind::Cts { epoch, from, .. } => {
                            known.of(epoch).is_some_and(|report| !report.has_cts(from))
                        }
                        RequestKind::Data { epoch, message } => {
                            known.of(epoch).is_some_and(|report| !report.has(message))
                        }
                        RequestKind::Recovery { .. } => true,
                        RequestKind::Bye => {
                            // After all else that was lost.
                            self.bye_due = true;
                            false
                        }
                        RequestKind::Hello | RequestKind::Probe => false,
                    };
                    if lacking {
                        self.retransmits.push_back(kind);
                    } else {
                        self.complete(kind);
                    }
                }
                self.qps[number].lost.clear();
            }
        }
    }

    /// An error if the link cannot be used any more and the call that this rank is in needs it.
    pub(in super::super) fn check_if_needed(&self) -> Result<()> {
        match &self.failure {
            Some(error) if error.kind() != ErrorKind::PeerLost || self.needs_peer() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Whether the peer said that it makes no more calls.
    pub(in super::super) fn has_left(&self) -> bool {
        self.polls_since_bye.is_some()
    }

    /// An error if the peer has left while this rank needs something that it has not written. What it wrote before it
    /// left may lie in another rail's completion queue, so all of them are looked at once more first. What it has not
    /// acknowledged it may have got.
    pub(super) fn check_left(&mut self) -> Result<()> {
        let (outgoing, incoming) = (&self.outgoing[parity(self.epoch)], &self.incoming[parity(self.epoch)]);
        let is_incomplete = outgoing.next < outgoing.posted || incoming.is_incomplete();
        match &mut self.polls_since_bye {
            Some(looks) if is_incomplete => {
                *looks += 1;
                if *looks > 2 { Err(self.lose("closed its communicator".to_owned())) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Says that this rank makes no more calls, once the peer has or gets all that was told before.
    pub(in super::super) fn bye(&mut self) {
        self.bye_due = true;
    }

    /// Whether it is time for that.
    pub(super) fn due_bye(&self) -> Option<RequestKind> {
        let all = self.qps.iter().all(|qp| qp.alive || qp.is_resolved());
        (self.bye_due && all).then_some(RequestKind::Bye)
    }

    /// A write of nothing over a queue pair that is silent: if the peer cannot be reached any more, that shows. One
    /// that has left is let go, unless something is still to be heard of it.
    pub(in super::super) fn probe(&mut self, qp: usize) -> Result<Option<LinkRequest>> {
        let silent = (self.polls_since_bye.is_none() || self.needs_peer()) && self.qps[qp].needs_probe();
        if silent { self.request(qp, RequestKind::Probe).map(Some) } else { Ok(None) }
    }

    /// Whether all that was written has been acknowledged, and nothing is waiting to be written, or can be.
    pub(in super::super) fn is_drained(&self) -> bool {
        let said = !self.bye_due && self.retransmits.is_empty();
        self.failure.is_some() || (said && self.qps.iter().all(QpState::is_resolved))
    }
}

// Bits of a word stand for the messages of a window.
const _: () = assert!(WINDOW <= 64);
