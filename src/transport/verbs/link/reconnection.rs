//! The reconnecting half of a link: a broken queue pair is replaced by a new one, so that its rail is used
//! again.
//!
//! Each end numbers the **generations** of a queue pair: how often it was connected again. The next one
//! begins at an end when the last one has left nothing there: all of it was flushed, and both ends know what
//! the other received, so every write of it either arrived or was queued for another queue pair. Then the end
//! offers a new queue pair to the peer, and connects it to the one that the peer offers. A message says by
//! itself which it is, so the ends need not agree on the first one that the new queue pair carries: each end
//! uses it once the peer's end is connected, and a hello over it was acknowledged. What was written to the
//! old queue pair cannot arrive any more, since that one is destroyed and the new one has another number.
//!
//! If no queue pair works, recovery states are sent by another way (see
//! [`RailMessage`](super::super::connect_info::RailMessage)).

use super::super::wire::RecoveryState;
use super::Link;
use super::qp_state::QpState;
use super::request::RequestKind;
use crate::error::{Error, Result};

impl Link {
    /// Connects broken queue pairs again.
    pub(in super::super) fn with_reconnects(mut self) -> Self {
        self.reconnects = true;
        self
    }

    /// Connects no queue pair again: the peer cannot be asked. If none works, nor may prove to, the peer is
    /// lost.
    pub(in super::super) fn stop_reconnecting(&mut self) {
        self.reconnects = false;
        if !self.is_on_trial() {
            self.give_up();
        }
    }

    /// The peer's end is gone for this reason: no queue pair is connected again, and no trial succeeds.
    pub(in super::super) fn peer_ended(&mut self, cause: &str) {
        self.isolation.get_or_insert_with(|| Error::peer_lost(cause));
        self.reconnects = false;
        self.give_up();
    }

    /// Whether a queue pair may yet prove to work.
    pub(in super::super) fn is_on_trial(&self) -> bool {
        self.qps.iter().any(QpState::is_on_trial)
    }

    /// Fails the link if no queue pair works.
    pub(in super::super) fn give_up(&mut self) {
        if self.is_isolated() {
            let cause = self.isolation.take();
            self.mark_unreachable(&cause.unwrap_or_else(|| Error::peer_lost("no rail works")));
        }
    }

    /// Whether broken queue pairs are connected again.
    pub(in super::super) fn reconnects(&self) -> bool {
        self.reconnects && self.failure.is_none()
    }

    /// Whether the peer may wait for rails of this rank while no queue pair works.
    pub(in super::super) fn peer_may_wait(&self) -> bool {
        self.reconnects
    }

    /// Whether no queue pair works at present, and one may later.
    pub(in super::super) fn is_isolated(&self) -> bool {
        self.failure.is_none() && !self.qps.iter().any(QpState::is_proven)
    }

    /// Whether all queue pairs work, or never will: nothing is left to do for those that are dropped.
    pub(in super::super) fn is_whole(&self) -> bool {
        self.qps.iter().all(|qp| qp.is_proven() || (qp.is_drop_known && qp.recovered && !qp.state_due))
    }

    /// Queue pairs of rails that may have failed, by bit, first have to carry a hello. For a link that is not
    /// in use yet.
    pub(in super::super) fn suspect(&mut self, qps: u64) {
        self.qps.iter_mut().enumerate().for_each(|(number, qp)| qp.proven &= qps >> number & 1 == 0);
    }

    /// Whether a queue pair is never used again.
    pub(super) fn is_dropped(&self, qp: usize) -> bool {
        self.qps[qp].failures >= self.most_failures
    }

    /// A broken queue pair that is dropped at this end, which the peer must hear, once.
    pub(in super::super) fn take_dropped(&mut self) -> Option<usize> {
        let is_new = |qp: &usize| {
            self.is_dropped(*qp) && !self.qps[*qp].alive && !self.qps[*qp].is_drop_known && self.reconnects()
        };
        let qp = (0..self.qps.len()).find(is_new)?;
        self.qps[qp].is_drop_known = true;
        Some(qp)
    }

    /// The peer has dropped a queue pair. If it was the last, the peer is lost.
    pub(in super::super) fn drop_qp(&mut self, qp: usize) {
        (self.qps[qp].failures, self.qps[qp].is_drop_known) = (self.most_failures, true);
        if (0..self.qps.len()).all(|qp| self.is_dropped(qp)) {
            self.give_up();
        }
    }

    /// Drops a queue pair at this end.
    #[cfg(test)]
    pub(in super::super) fn drop_qp_here(&mut self, qp: usize) {
        self.qps[qp].failures = self.most_failures;
    }

    /// Drops no queue pair, however often it breaks.
    #[cfg(test)]
    pub(in super::super) fn drop_none(&mut self) {
        self.most_failures = u32::MAX;
    }

    /// Whether a new queue pair may take the place of this one: it is broken, and nothing of it is left.
    pub(in super::super) fn is_replaceable(&self, qp: usize) -> bool {
        let recovery = RequestKind::Recovery { qp };
        let state = &self.qps[qp];
        self.reconnects()
            && !state.alive
            && !self.is_dropped(qp)
            && state.recovered
            && !state.state_due
            && !self.retransmits.contains(&recovery)
            && !self.qps.iter().any(|other| other.has_recovery_of(qp))
    }

    /// This end of the next generation of a queue pair is connected.
    pub(in super::super) fn restart_qp(&mut self, qp: usize) {
        self.qps[qp].restart();
    }

    /// The peer's end of a queue pair is connected. Whether a hello and a trial must prove that it works: not
    /// if it broke since.
    pub(in super::super) fn needs_hello(&self, qp: usize, generation: u32) -> bool {
        let state = &self.qps[qp];
        state.generation == generation && state.alive && !state.proven
    }

    /// A hello over a queue pair was acknowledged, and a trial.
    pub(super) fn prove(&mut self, qp: usize) {
        let Self { qps, peer, .. } = self;
        if !qps[qp].alive || std::mem::replace(&mut qps[qp].proven, true) {
            return;
        }
        let working = qps.iter().filter(|qp| qp.is_proven()).count();
        if qps[qp].generation > 0 {
            log::warn!("verbs: a queue pair to rank {peer} works again; {working} of {} do", qps.len());
        }
        self.isolation = None;
    }

    /// Notes that the recovery states that are queued must take another way.
    pub(super) fn send_states_by_another_way(&mut self) {
        let Self { retransmits, qps, .. } = self;
        retransmits.retain(|kind| match kind {
            RequestKind::Recovery { qp } => {
                qps[*qp].state_due = true;
                false
            }
            _ => true,
        });
    }

    /// The next recovery state that must be sent by another way: its queue pair, the generation, and the
    /// state.
    pub(in super::super) fn take_due_state(&mut self) -> Option<(usize, u32, RecoveryState)> {
        let number = self.qps.iter().position(|qp| qp.state_due)?;
        let qp = &mut self.qps[number];
        qp.state_due = false;
        Some((number, qp.generation, qp.local_state?))
    }

    /// The peer's recovery state for a queue pair arrived by another way.
    ///
    /// # Errors
    /// `Disagreement` if there is no such queue pair.
    pub(in super::super) fn received_state(
        &mut self,
        qp: usize,
        generation: u32,
        state: RecoveryState,
    ) -> Result<()> {
        self.received_recovery_state(qp, generation, Some(state))
    }
}
