//! The receiving half of a link: what an arrived write means.

use super::super::wire::{CALL_BYTES, CTS_BYTES, ImmData, ImmKind, MAX_EAGER_BYTES, RECOVERY_BYTES, parity};
use super::Link;
use crate::error::{Error, Result};

impl Link {
    /// A write of the peer arrived over a queue pair, with this immediate data and `len` bytes.
    ///
    /// # Errors
    /// `Disagreement` if the peer violates the protocol. The link is then unusable.
    pub(in super::super) fn received(&mut self, qp: usize, imm: u32, len: u32) -> Result<()> {
        let ImmData { kind, epoch: low } = ImmData::unpack(imm);
        match kind {
            ImmKind::Hello(tag) if tag == self.tags.theirs => self.hellos |= 1 << qp,
            ImmKind::Hello(_) => {
                return Err(self.disagree("does not belong to this job: its hello has another tag"));
            }
            ImmKind::Goodbye => self.polls_since_goodbye = self.polls_since_goodbye.or(Some(0)),
            ImmKind::Recovery(broken, generation) if len as usize == RECOVERY_BYTES => {
                return self.received_recovery_state(broken, generation, None);
            }
            ImmKind::Recovery(..) => return Err(self.protocol_violation()),
            ImmKind::Call | ImmKind::EagerCall | ImmKind::Eager(_) | ImmKind::Cts(_) | ImmKind::Data(_) => {
                // Nothing arrives twice, and this rank left the epoch before when all of it had arrived.
                let ahead = low.wrapping_sub(self.epoch) % 4;
                return if ahead > 1 {
                    Err(self.protocol_violation())
                } else {
                    self.received_in_epoch(self.epoch + ahead, kind, len)
                };
            }
        }
        Ok(())
    }

    fn received_in_epoch(&mut self, epoch: u64, kind: ImmKind, len: u32) -> Result<()> {
        let state = &mut self.recv_states[parity(epoch)];
        let valid = match kind {
            ImmKind::Call => len as usize == CALL_BYTES && state.receive_call(false),
            ImmKind::EagerCall => {
                let head = self.control.layout.eager_bytes(epoch, 0) - self.control.layout.eager(epoch, 0);
                match (state.receive_call(true), (len as usize).checked_sub(head)) {
                    (true, Some(len)) => return self.eager_received(epoch, 0, len as u32),
                    _ => false,
                }
            }
            ImmKind::Eager(message) => return self.eager_received(epoch, message, len),
            ImmKind::Cts(to) => {
                let (count, rest) = (len as usize / CTS_BYTES, len as usize % CTS_BYTES);
                rest == 0 && state.add_credits(to, count as u64)
            }
            ImmKind::Data(message) => {
                if let Err(expected) = state.receive_data(message, len, epoch == self.epoch) {
                    return Err(self.disagree(&format!(
                        "sent {len} bytes where {expected:?} were expected; do all ranks run the same version with the same settings?"
                    )));
                }
                true
            }
            ImmKind::Recovery(..) | ImmKind::Hello(_) | ImmKind::Goodbye => true,
        };
        if valid { Ok(()) } else { Err(self.protocol_violation()) }
    }

    fn eager_received(&mut self, epoch: u64, message: u64, len: u32) -> Result<()> {
        if len as usize > MAX_EAGER_BYTES || !self.recv_states[parity(epoch)].receive_eager(message, len) {
            return Err(self.protocol_violation());
        }
        if epoch == self.epoch { self.deliver_eager(epoch, message) } else { Ok(()) }
    }

    /// Copies an eager message to its destination, once it has arrived and its receive is posted.
    pub(super) fn deliver_eager(&mut self, epoch: u64, message: u64) -> Result<()> {
        let state = &mut self.recv_states[parity(epoch)];
        let Some((len, destination)) = state.deliverable_eager(message) else { return Ok(()) };
        // A destination on a GPU gets no eager message, unless the peer makes another call.
        if len != destination.len() || !destination.is_host() {
            return Err(self.disagree(&format!(
                "sent {len} bytes where {} were expected; do all ranks run the same version with the same settings?",
                destination.len()
            )));
        }
        if state.mark_received(message) {
            self.control.read_eager(epoch, message, destination);
        }
        Ok(())
    }

    /// Fails the link because the peer violates the protocol.
    pub(super) fn protocol_violation(&mut self) -> Error {
        self.disagree("wrote something that makes no sense: is it the same build of flexring?")
    }
}
