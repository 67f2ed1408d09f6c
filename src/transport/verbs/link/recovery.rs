//! The recovery half of a link: what happens when a queue pair breaks while others are alive, and when a rank
//! leaves.
//!
//! What was in flight on a broken queue pair may or may not have arrived. Nothing is written again before
//! that is known, because the peer may have reused the destination. So each end moves its side to the error
//! state and waits until the device has flushed all requests and receives; from then on nothing can arrive
//! over it. Then it sends what has arrived ([`RecoveryState`]) over a queue pair that is alive. What the peer
//! lacks is written again over the living queue pairs, and nothing is written twice.
//!
//! The recovery state that an end records when a queue pair is flushed stays true. So it is sent again,
//! unchanged, whenever the queue pair that carries it breaks too, and waits for nothing.
//!
//! A device that cannot flush a queue pair, because it has failed or was removed, destroys it. Then the
//! recovery state has what was polled by then. Writes that the peer's device acknowledged and whose
//! completions never came are missing in it, so each end knows which queue pair carried what: control entries
//! are written again, and the loss of a message, whose memory may have changed since, fails the link.

use super::super::wire::{RecoveryState, WINDOW, parity};
use super::Link;
use super::qp_state::QpState;
use super::request::{LinkRequest, RequestKind};
use crate::error::{Error, ErrorKind, Result};
use std::time::Instant;

impl Link {
    /// A receive completed, successfully or not. Returns whether another must be posted.
    pub(in super::super) fn recv_completed(&mut self, qp: usize) -> bool {
        self.qps[qp].recv_completed()
    }

    /// A request failed. All before it succeeded; those after it complete one by one. Whether it was a
    /// message in GPU memory.
    pub(in super::super) fn write_failed(&mut self, qp: usize, serial: u32) -> bool {
        while let Some(kind) = self.qps[qp].pop_before(serial) {
            self.complete(kind);
        }
        let is_of_gpu = match self.qps[qp].oldest() {
            Some(RequestKind::Data { epoch, message }) => {
                !self.send_states[parity(epoch)].message(message).piece.is_host()
            }
            _ => false,
        };
        self.qps[qp].lose(serial);
        is_of_gpu
    }

    /// A request was never posted, nor any after it. It may be a drain marker.
    pub(in super::super) fn unpost(&mut self, qp: usize, serial: u32) {
        self.qps[qp].lose_from(serial);
    }

    /// An empty write to a queue pair in the error state. It fails after all that was written before it: what
    /// has no completion of its own by then succeeded.
    pub(in super::super) fn drain_marker(&mut self, qp: usize) -> Result<LinkRequest> {
        self.request(qp, RequestKind::Probe)
    }

    /// A broken queue pair was destroyed, because its device did not flush it. No completion of it is handled
    /// any more.
    pub(in super::super) fn destroyed(&mut self, qp: usize) {
        self.qps[qp].destroyed();
    }

    /// Fails the link for this reason: the peer is lost.
    pub(in super::super) fn mark_unreachable(&mut self, cause: &Error) {
        self.lose(format!("cannot be reached any more: {}", cause.message()));
    }

    /// Fails the link because no device of this rank that it uses works any more. No other rank is to blame.
    pub(in super::super) fn fail_at_this_end(&mut self, causes: &str) {
        let peer = self.peer;
        self.abort(Error::system(format!("no rail to rank {peer} is left: {causes}")));
    }

    /// A queue pair is unusable for this reason. `true` if it was alive, so that the caller must move it to
    /// the error state.
    pub(in super::super) fn break_qp(&mut self, qp: usize, cause: &Error) -> bool {
        if !std::mem::replace(&mut self.qps[qp].alive, false) {
            return false;
        }
        let was_proven = std::mem::replace(&mut self.qps[qp].proven, false);
        let was_on_trial = self.awaits_trial(qp);
        if was_proven || was_on_trial {
            self.qps[qp].count_failure(Instant::now());
        }
        let is_last =
            !(self.reconnects || self.is_on_trial()) || (0..self.qps.len()).all(|qp| self.is_dropped(qp));
        let working = self.qps.iter().filter(|qp| qp.is_proven()).count();
        let (peer, cause_text, of) = (self.peer, cause.message(), self.qps.len());
        if working == 0 && is_last {
            self.mark_unreachable(cause);
        } else if self.failure.is_some() {
        } else if self.is_dropped(qp) {
            log::warn!(
                "verbs: a queue pair to rank {peer} broke again before it had carried 1 MiB, and is not used any more ({cause_text}); \
                 {working} of {of} remain"
            );
        } else if !was_proven || was_on_trial {
            log::debug!("verbs: a queue pair to rank {peer} does not work yet ({cause_text})");
        } else if working == 0 {
            log::warn!(
                "verbs: the last queue pair to rank {peer} broke ({cause_text}); it is connected again if its rail comes back"
            );
        } else {
            log::warn!(
                "verbs: a queue pair to rank {peer} broke ({cause_text}); {working} of {of} remain, and what was in flight is sent again"
            );
        }
        if working == 0 && (was_proven || was_on_trial) {
            self.isolation = Some(cause.clone());
        }
        true
    }

    /// The peer's recovery state for a queue pair that is broken at its end has arrived.
    /// `state` is what the peer sent by another way; otherwise it is in the control buffer.
    pub(super) fn received_recovery_state(
        &mut self,
        qp: usize,
        generation: u32,
        state: Option<RecoveryState>,
    ) -> Result<()> {
        let Some(broken) = self.qps.get_mut(qp) else { return Err(self.protocol_violation()) };
        let place = if generation == broken.generation {
            &mut broken.peer_state
        } else if generation == broken.next_generation() {
            &mut broken.early_state
        } else {
            // It was sent again, because the queue pair that carried it broke after it had arrived.
            return Ok(());
        };
        place.get_or_insert_with(|| state.unwrap_or_else(|| self.control.read_recovery(qp)));
        Ok(())
    }

    /// A queue pair that is broken at the peer's end and alive at this one.
    pub(in super::super) fn next_qp_to_break(&self) -> Option<usize> {
        self.qps.iter().position(|qp| qp.alive && qp.peer_state.is_some())
    }

    /// Broken queue pairs that the device has flushed since the last [`recover`](Self::recover).
    pub(in super::super) fn newly_flushed(&self) -> impl Iterator<Item = usize> {
        self.qps.iter().enumerate().filter(|(_, qp)| qp.needs_report()).map(|(number, _)| number)
    }

    /// Whether a device may still access memory for a queue pair that has broken.
    pub(in super::super) fn is_draining(&self) -> bool {
        self.qps.iter().any(QpState::is_draining)
    }

    /// Continues the recovery of broken queue pairs: queues recovery states and what the peer lacks.
    pub(in super::super) fn recover(&mut self) {
        for number in 0..self.qps.len() {
            let qp = &mut self.qps[number];
            if qp.alive {
                continue;
            }
            // Recovery states do not wait for the peer's: if each end waited for the other's, neither would
            // proceed.
            let is_recovery = |kind: &mut RequestKind| matches!(kind, RequestKind::Recovery { .. });
            self.retransmits.extend(qp.lost.extract_if(.., is_recovery));
            if qp.needs_report() {
                self.qps[number].local_state = Some(self.recovery_state());
                self.retransmits.push_back(RequestKind::Recovery { qp: number });
            }
            if let QpState { local_state: Some(_), peer_state: Some(state), recovered: false, .. } =
                self.qps[number]
            {
                self.qps[number].recovered = true;
                self.repeat_recovery_states(number);
                self.recover_completed(number, &state);
                for kind in std::mem::take(&mut self.qps[number].lost) {
                    // Sent after everything else that was lost.
                    self.goodbye_due |= kind == RequestKind::Goodbye;
                    if is_missing(&state, kind) {
                        self.retransmits.push_back(kind);
                    } else {
                        self.complete(kind);
                    }
                }
            }
        }
        if self.is_isolated() {
            self.send_states_by_another_way();
        }
    }

    /// Sends the recovery states of other broken queue pairs again: if the peer's device acknowledged them
    /// over this one, they may be lost with it. The peer ignores those that it has.
    fn repeat_recovery_states(&mut self, recovered: usize) {
        for qp in (0..self.qps.len()).filter(|qp| *qp != recovered) {
            let recovery = RequestKind::Recovery { qp };
            if self.qps[qp].is_settled() && !self.retransmits.contains(&recovery) {
                self.retransmits.push_back(recovery);
            }
        }
    }

    /// Writes again what the peer lacks although its device acknowledged it over this broken queue pair.
    fn recover_completed(&mut self, qp: usize, state: &RecoveryState) {
        // The peer may not have left the epoch before.
        for epoch in [self.epoch.saturating_sub(1), self.epoch] {
            for kind in self.send_states[parity(epoch)].carried.take(qp) {
                let is_over = match kind {
                    // The receives of earlier epochs are completed.
                    RequestKind::Cts { from, .. } => {
                        epoch < self.epoch || !self.recv_states[parity(epoch)].awaits_message(from)
                    }
                    _ => false,
                };
                let is_lost = self.qps[qp].lost.iter().any(|lost| lost.includes(kind));
                if kind.epoch() != Some(epoch) || is_over || is_lost || !is_missing(state, kind) {
                    continue;
                }
                if let RequestKind::Data { .. } = kind {
                    self.lose("cannot be reached any more: a message that its device had received was lost with a queue pair".to_owned());
                } else {
                    self.retransmits.push_back(kind);
                }
            }
        }
    }

    /// Fails if the peer violated the protocol, or if the link is unusable and this rank's current call needs
    /// it.
    pub(in super::super) fn check_if_needed(&self) -> Result<()> {
        match &self.failure {
            Some(error) if error.kind() == ErrorKind::Disagreement || self.needs_peer() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Whether the peer makes no more calls.
    pub(in super::super) fn has_left(&self) -> bool {
        self.polls_since_goodbye.is_some()
    }

    /// Fails if the peer has left while this rank needs something that it has not written. What it wrote
    /// before it left may be in another rail's completion queue, so all of them are polled once more first. A
    /// write without acknowledgement does not count: the peer may have received it.
    pub(super) fn check_left(&mut self) -> Result<()> {
        let (send, recv) = (&self.send_states[parity(self.epoch)], &self.recv_states[parity(self.epoch)]);
        let is_incomplete = send.posted < send.queued || recv.is_incomplete();
        match &mut self.polls_since_goodbye {
            Some(polls) if is_incomplete => {
                *polls += 1;
                if *polls > 2 { Err(self.lose("closed its communicator".to_owned())) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// This rank makes no more calls. The peer is notified once it has received, or will receive, everything
    /// before.
    pub(in super::super) fn goodbye(&mut self) {
        (self.is_leaving, self.goodbye_due) = (true, true);
    }

    /// The goodbye, if it can be sent now: everything before has arrived, or goes over the same queue pair.
    /// The goodbye must not overtake what another one carries, as the first one that works may have begun to
    /// work a moment ago.
    pub(super) fn next_goodbye(&self) -> Option<RequestKind> {
        if !self.goodbye_due {
            return None;
        }
        let goodbye_qp = self.qp_for(RequestKind::Goodbye);
        let is_before =
            |(number, qp): (usize, &QpState)| qp.is_resolved() || (qp.alive && Some(number) == goodbye_qp);
        let resolved = self.qps.iter().enumerate().all(is_before);
        resolved.then_some(RequestKind::Goodbye)
    }

    /// An empty write over a queue pair without a pending completion: it fails if the peer is unreachable. A
    /// peer that has left is not probed, unless this rank still needs something from it.
    pub(in super::super) fn probe(&mut self, qp: usize) -> Result<Option<LinkRequest>> {
        let due = (self.polls_since_goodbye.is_none() || self.needs_peer()) && self.qps[qp].needs_probe();
        if due { self.request(qp, RequestKind::Probe).map(Some) } else { Ok(None) }
    }

    /// Whether all writes are acknowledged and none is waiting, or the link is unusable.
    pub(in super::super) fn is_drained(&self) -> bool {
        let nothing_due = !self.goodbye_due && self.retransmits.is_empty();
        self.failure.is_some() || (nothing_due && self.qps.iter().all(QpState::is_resolved))
    }
}

/// Whether the peer, whose recovery state this is, has to get a write again.
fn is_missing(state: &RecoveryState, kind: RequestKind) -> bool {
    let Some(report) = kind.epoch().and_then(|epoch| state.report(epoch)) else { return false };
    match kind {
        RequestKind::Call { .. } | RequestKind::EagerCall { .. } => !report.has_call(),
        RequestKind::Eager { message, .. } => !report.has_eager(message),
        RequestKind::Cts { from, .. } => !report.has_cts(from),
        RequestKind::Data { message, .. } => !report.has_message(message),
        RequestKind::Recovery { .. }
        | RequestKind::Hello
        | RequestKind::Trial
        | RequestKind::Goodbye
        | RequestKind::Probe => false,
    }
}

// The bits of a `u64` stand for the messages of a window.
const _: () = assert!(WINDOW <= 64);
