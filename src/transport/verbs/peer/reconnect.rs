//! Broken queue pairs of a peer: destroying those that are not flushed, and connecting new ones in their
//! place.
//!
//! Owns when an attempt is made, and the steps of one.

use super::{Peer, wr_id};
use crate::error::{Error, Result};
use crate::transport::verbs::connect_info::RailMessage;
use crate::transport::verbs::objects::Destruction;
use crate::transport::verbs::wire::RecoveryState;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long a device may take to flush a broken queue pair, before the queue pair is destroyed. Devices that
/// work need milliseconds.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

/// The longest time between two looks that counts as waiting for a rail: ranks do not look between calls.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

impl Peer {
    /// Connects broken queue pairs again, and waits this long if none works. Not if the time is zero.
    pub(in super::super) fn with_reconnects(mut self, patience: Duration) -> Self {
        if !patience.is_zero() {
            self.link = self.link.with_reconnects();
        }
        self.patience = patience;
        self
    }

    /// Whether [`look`](Self::look) must be called from time to time: a queue pair is broken.
    pub(in super::super) fn needs_look(&self) -> bool {
        let must_report_failure = self.link.check().is_err() && self.owes_failure();
        !self.link.is_whole()
            && (self.link.is_draining()
                || (self.is_ready && (self.link.reconnects() || self.link.is_on_trial()))
                || must_report_failure)
    }

    /// Whether the peer must be sent a message if this end of the link fails: it may wait for rails of this
    /// rank, and has not been sent one.
    pub(in super::super) fn owes_failure(&self) -> bool {
        self.is_ready && !self.is_failure_sent && self.link.peer_may_wait()
    }

    /// Takes the next steps for broken queue pairs, and appends what the peer must hear. `works` says whether
    /// the port of a rail works. All completions must have been polled.
    pub(in super::super) fn look(
        &mut self,
        now: Instant,
        works: &dyn Fn(usize) -> bool,
        messages: &mut Vec<RailMessage>,
    ) {
        self.check_flushes(now);
        self.recover();
        while let Some((qp, generation, state)) = self.link.take_due_state() {
            messages.push(RailMessage::Broken { qp: qp as u8, generation, state: state.as_bytes().to_vec() });
        }
        while let Some(qp) = self.link.take_dropped() {
            self.forget_attempts(qp);
            messages.push(RailMessage::Dropped { qp: qp as u8 });
        }
        // A peer that has left may still wait for this rank's goodbye.
        if !(self.link.has_left() && self.link.is_drained()) {
            for qp in 0..self.qps.len() {
                if self.link.is_replaceable(qp) {
                    self.reconnect(qp, now, works, messages);
                }
            }
        }
        let passed = self.last_look.replace(now).map_or(Duration::ZERO, |last| now.duration_since(last));
        if !self.link.is_isolated() {
            self.waited = Duration::ZERO;
        } else {
            self.waited += passed.min(LONGEST_WAIT);
            if self.waited > self.patience / 2 && self.link.reconnects() {
                // Adapters report a loss later than calls wait, and shorter packets may pass.
                self.break_late_trials(true);
            }
            // Without patience, devices say when a trial is lost.
            let is_open = self.patience.is_zero() && self.link.is_on_trial();
            if self.waited > self.patience && !is_open {
                self.break_late_trials(false);
                self.link.give_up();
            }
        }
        if self.owes_failure()
            && let Err(error) = self.link.check()
        {
            self.is_failure_sent = true;
            messages.push(RailMessage::Aborted { cause: error.message().to_owned() });
        }
    }

    /// Ends the attempts to connect a queue pair again.
    fn forget_attempts(&mut self, qp: usize) {
        let attempt = &mut self.qps[qp].reconnection;
        (attempt.fresh, attempt.offered) = (None, None);
    }

    /// Destroys the queue pairs that their devices have not flushed in time.
    fn check_flushes(&mut self, now: Instant) {
        for (number, slot) in self.qps.iter_mut().enumerate() {
            if !self.link.qps[number].is_draining() {
                slot.unflushed_since = None;
                continue;
            }
            let since = *slot.unflushed_since.get_or_insert(now);
            if let Some(connected) = &slot.connected
                && now.duration_since(since) > FLUSH_DEADLINE
            {
                let ends = connected.ends();
                log::warn!("verbs: a queue pair is destroyed, as its device does not flush it; {ends}");
                slot.destroy();
            }
            if slot.destruction.as_ref().is_some_and(Destruction::is_over)
                && std::mem::replace(&mut slot.destroyed, true)
            {
                self.link.destroyed(number);
            }
        }
    }

    /// Takes the next step of an attempt to connect a queue pair that is broken and flushed.
    fn reconnect(
        &mut self,
        qp: usize,
        now: Instant,
        works: &dyn Fn(usize) -> bool,
        messages: &mut Vec<RailMessage>,
    ) {
        let (rail, generation) = (self.link.qps[qp].rail, self.link.qps[qp].next_generation());
        let attempt = &mut self.qps[qp].reconnection;
        if attempt.fresh.is_none() && attempt.is_due(now) && works(rail) {
            (attempt.attempts, attempt.due) = (attempt.attempts + 1, None);
            let psn = getrandom::u32().unwrap_or(1) & 0xff_ffff;
            match attempt.spec.create(psn) {
                Ok(fresh) => {
                    let (end, mtu) = (fresh.endpoint(), attempt.path.mtu as u8);
                    messages.push(RailMessage::Offer { qp: qp as u8, generation, end, mtu });
                    attempt.fresh = Some(fresh);
                }
                Err(error) => log::debug!("verbs: {}", error.message()),
            }
        }
        if attempt.fresh.is_none() || attempt.offered.is_none() {
            return;
        }
        let (Some(fresh), Some(end)) = (attempt.fresh.take(), attempt.offered.take()) else { return };
        let connected = fresh.connect(wr_id(self.index, qp, true, generation), end, &attempt.path);
        self.link.restart_qp(qp);
        self.unsignalled[qp] = 0;
        let slot = &mut self.qps[qp];
        slot.destroy();
        (slot.destruction, slot.destroyed) = (None, false);
        match connected {
            Ok(connected) => {
                slot.connected = Some(connected);
                // The peer's offer made this attempt due; the next one waits.
                slot.reconnection.due = None;
                messages.push(RailMessage::Connected { qp: qp as u8, generation });
            }
            Err(error) => {
                // The peer hears that this generation is broken here.
                self.link.break_qp(qp, &error);
                self.link.destroyed(qp);
            }
        }
    }

    /// The peer has sent a message about a queue pair. Appends what it must hear.
    ///
    /// # Errors
    /// `Disagreement` if the message makes no sense.
    pub(in super::super) fn on_rail_message(
        &mut self,
        message: RailMessage,
        now: Instant,
        works: &dyn Fn(usize) -> bool,
        messages: &mut Vec<RailMessage>,
    ) -> Result<()> {
        if let RailMessage::Aborted { cause } = &message {
            self.link.peer_ended(&format!("its end has failed ({cause})"));
            return Ok(());
        }
        let (RailMessage::Offer { qp, .. }
        | RailMessage::Connected { qp, .. }
        | RailMessage::Broken { qp, .. }
        | RailMessage::Dropped { qp }) = message
        else {
            return Ok(());
        };
        let qp = usize::from(qp);
        if qp >= self.qps.len() {
            let message =
                format!("rank {} sent a message about a queue pair that it does not have", self.rank());
            return Err(Error::disagreement(message).with_suspect(self.rank()));
        }
        match message {
            RailMessage::Offer { generation, end, mtu, .. } => {
                if generation == self.link.qps[qp].next_generation() {
                    let attempt = &mut self.qps[qp].reconnection;
                    (attempt.offered, attempt.due) = (Some(end), Some(now));
                    // Both ends use the shorter packets.
                    attempt.path.mtu = attempt.path.mtu.min(u32::from(mtu)).max(1);
                    if self.link.is_replaceable(qp) {
                        self.reconnect(qp, now, works, messages);
                    }
                }
            }
            RailMessage::Connected { generation, .. } => {
                if self.link.needs_hello(qp, generation) {
                    self.greet(qp)?;
                }
            }
            RailMessage::Broken { generation, state, .. } => {
                let state = RecoveryState::read_from_bytes(&state).map_err(|_| {
                    let message = format!("rank {} sent a recovery state of another version", self.rank());
                    Error::disagreement(message).with_suspect(self.rank())
                })?;
                self.link.received_state(qp, generation, state)?;
            }
            RailMessage::Dropped { .. } => {
                self.break_qp(qp, &Error::peer_lost("the peer does not use it any more"));
                self.link.drop_qp(qp);
                self.forget_attempts(qp);
            }
            RailMessage::Aborted { .. } => {}
        }
        Ok(())
    }
}
