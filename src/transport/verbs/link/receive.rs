//! The receiving half of a link: what an arrived write means.

use super::super::wire::{ImmData, ImmKind, parity};
use super::Link;
use crate::error::{Error, Result};

/// What is said of a peer that writes what no rank can have written at this point.
const VIOLATION: &str = "wrote something that makes no sense: is it the same build of flexring?";

impl Link {
    /// A write of the peer arrived over a queue pair, with this immediate data and `len` bytes, which is 0
    /// where the driver leaves the length out. Returns how many bytes have arrived, with those of a message
    /// that was written before, apart from the immediate data.
    ///
    /// # Errors
    /// `Disagreement` if the peer violates the protocol. The link is then unusable.
    pub(in super::super) fn received(&mut self, qp: usize, imm: u32, len: u32) -> Result<u64> {
        let ImmData { kind, epoch: low } = ImmData::unpack(imm);
        let written = kind.bytes();
        if len > 0 && written.is_some_and(|written| written != len) {
            return Err(self.protocol_violation());
        }
        let mut arrived = written.unwrap_or(len);
        match kind {
            ImmKind::Hello(tag) if tag == self.tags.theirs => self.hellos |= 1 << qp,
            ImmKind::Hello(_) => {
                return Err(self.disagree("does not belong to this job: its hello has another tag"));
            }
            ImmKind::Goodbye => self.polls_since_goodbye = self.polls_since_goodbye.or(Some(0)),
            ImmKind::Recovery(broken, generation) => {
                self.received_recovery_state(broken, generation, None)?;
            }
            ImmKind::Call
            | ImmKind::EagerCall(_)
            | ImmKind::Eager(..)
            | ImmKind::Cts(..)
            | ImmKind::Data(_) => {
                // Nothing arrives twice, and this rank left the epoch before when all of it had arrived.
                let ahead = low.wrapping_sub(self.epoch) % 4;
                let epoch = self.epoch + ahead;
                if ahead > 1 {
                    return Err(self.protocol_violation());
                }
                if let Some(bytes) = self.received_in_epoch(epoch, kind, arrived) {
                    arrived = bytes;
                } else {
                    // A CTS for a message that was sent without one may follow from another call of the peer.
                    let may_follow = matches!(kind, ImmKind::Cts(..))
                        && self.recv_states[parity(epoch)].unreported_call().is_some();
                    if !may_follow {
                        return Err(self.protocol_violation());
                    }
                    self.hold(epoch, VIOLATION.to_owned());
                }
            }
        }
        Ok(arrived.into())
    }

    /// The bytes that have arrived; `None` if the peer cannot have written this, should it make the same
    /// call.
    fn received_in_epoch(&mut self, epoch: u64, kind: ImmKind, len: u32) -> Option<u32> {
        let state = &mut self.recv_states[parity(epoch)];
        let fits = match kind {
            ImmKind::Call => state.receive_call(false),
            ImmKind::EagerCall(len) => state.receive_call(true) && self.eager_received(epoch, 0, len),
            ImmKind::Eager(message, len) => self.eager_received(epoch, message, len),
            ImmKind::Cts(to, count) => state.add_credits(to, count),
            ImmKind::Data(message) => return self.received_data(epoch, message, len),
            ImmKind::Recovery(..) | ImmKind::Hello(_) | ImmKind::Goodbye => true,
        };
        fits.then_some(len)
    }

    /// A message is at its destination: written by this write, or, if this one has no bytes, by the one
    /// before it. Returns its bytes; `None` if the peer cannot have written it.
    ///
    /// Both were posted to one queue pair, and devices execute the RDMA writes of a reliable connection in
    /// the order in which they were posted. The completion of the receive covers both (InfiniBand
    /// Architecture Specification, volume 1, 9.5 "Transaction ordering"; ibv_reg_mr(3), "Ordering semantics":
    /// a completion guarantees that the data of all prior operations is visible in memory, with relaxed
    /// ordering, too).
    fn received_data(&mut self, epoch: u64, message: u64, len: u32) -> Option<u32> {
        // Of a message that was written before, this end does not see the length. The peer has compared it
        // with that in the CTS.
        let seen = Some(len).filter(|len| *len > 0);
        let is_current = epoch == self.epoch;
        let expected = self.recv_states[parity(epoch)].receive_data(message, seen, is_current)?;
        if seen.is_some_and(|len| len as usize != expected) {
            let problem = format!("sent {len} bytes where {expected} were expected");
            self.hold_wrong_length(epoch, &problem);
        }
        Some(seen.unwrap_or(expected as u32))
    }

    fn eager_received(&mut self, epoch: u64, message: u64, len: u32) -> bool {
        let fits = len as usize <= self.control.layout.longest_eager
            && self.recv_states[parity(epoch)].receive_eager(message, len);
        if fits && epoch == self.epoch {
            self.deliver_eager(epoch, message);
        }
        fits
    }

    /// Copies an eager message to its destination, once it has arrived and its receive is posted.
    pub(super) fn deliver_eager(&mut self, epoch: u64, message: u64) {
        let state = &mut self.recv_states[parity(epoch)];
        let Some((len, destination)) = state.deliverable_eager(message) else { return };
        // A destination on a GPU gets no eager message, unless the peer makes another call.
        if len != destination.len() || !destination.is_host() {
            let expected = destination.len();
            self.hold_wrong_length(epoch, &format!("sent {len} bytes where {expected} were expected"));
        } else if state.mark_received(message) {
            self.control.read_eager(epoch, message, destination);
        }
    }

    /// Fails the link because the peer violates the protocol.
    pub(super) fn protocol_violation(&mut self) -> Error {
        self.disagree(VIOLATION)
    }
}
