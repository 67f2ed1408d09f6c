//! What comes in over a link: grants, landings, and the words that say that something was written.

use super::super::registry::RegisteredMemory;
use super::super::wire::{
    CALL_WORDS, CTS_BYTES, DeliveryReport, EAGER_MESSAGES, ImmKind, MAX_EAGER_BYTES, RECOVERY_WORDS,
    RecoveryState, WINDOW, parity, widen,
};
use super::{Link, is_eager};
use crate::error::Result;
use crate::memory::Piece;
use std::sync::Arc;

/// A landing that is open.
#[derive(Debug)]
struct PostedRecv {
    piece: Piece,
    /// Kept while the peer may write; none for a message that comes by the board.
    _region: Option<Arc<RegisteredMemory>>,
}

/// What the peer sends in one turn.
#[derive(Debug, Default)]
pub(super) struct RecvState {
    /// Whether the peer's call is there, whether it stands before the first message, and whether it was reported.
    call_received: bool,
    call_with_eager: bool,
    call_reported: bool,
    /// How many of this rank's messages are on their way, and which of those from there on have a place, by bit.
    /// Grants may come in any order, when a queue pair breaks.
    cts_base: u64,
    cts_bits: u64,
    /// Short messages that are on the board, by bit, and their lengths.
    eager: u64,
    eager_lens: [u32; EAGER_MESSAGES as usize],
    /// Whether the call that this rank is in is on a GPU.
    on_gpu: bool,
    /// Landings made, those told to the peer, and those filled and reported.
    recvs_posted: u64,
    cts_sent: u64,
    recvs_completed: u64,
    /// Which landings from `landed` on are filled, by bit.
    filled_bits: u64,
    posted_recvs: [Option<PostedRecv>; WINDOW],
}

impl RecvState {
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// This rank comes to the turn.
    pub(super) fn begin(&mut self, on_gpu: bool) {
        self.on_gpu = on_gpu;
    }

    /// Whether the next landing is for a message that comes by the board.
    pub(super) fn receives_eagerly(&self, len: usize) -> bool {
        is_eager(self.on_gpu, self.recvs_posted, len)
    }

    /// Whether this rank's next message has a place.
    pub(super) fn is_clear_to_send(&self) -> bool {
        self.cts_bits & 1 == 1
    }

    /// This rank's next message is put on its way.
    pub(super) fn consume_credit(&mut self) {
        self.cts_base += 1;
        self.cts_bits >>= 1;
    }

    /// The peer has given the last `many` messages below `to` a place. `false` if that cannot be.
    fn add_credits(&mut self, to: u64, many: u64) -> bool {
        let to = widen(to, self.cts_base);
        let Some(from) = (to - self.cts_base).checked_sub(many) else { return false };
        if many == 0 || from + many > WINDOW as u64 {
            return false;
        }
        let bits = ((1 << many) - 1) << from;
        let new = self.cts_bits & bits == 0;
        self.cts_bits |= bits;
        new
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.recvs_posted - self.recvs_completed
    }

    /// Whether something is still to come from the peer: its call, or what some landing is for.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.call_reported || self.outstanding() > self.filled_bits.count_ones().into()
    }

    /// The peer's call that is to be reported: whether it stands before a message.
    pub(super) fn unreported_call(&self) -> Option<bool> {
        (self.call_received && !self.call_reported).then_some(self.call_with_eager)
    }

    pub(super) fn mark_call_reported(&mut self) {
        self.call_reported = true;
    }

    /// Opens a landing: its message's number, and whether that comes by the board.
    pub(super) fn post_recv(&mut self, piece: Piece, region: Option<Arc<RegisteredMemory>>) -> (u64, bool) {
        let message = self.recvs_posted;
        self.posted_recvs[message as usize % WINDOW] = Some(PostedRecv { piece, _region: region });
        self.recvs_posted += 1;
        (message, is_eager(self.on_gpu, message, piece.len()))
    }

    /// The landings that the peer must be told of, as far as they lie side by side.
    pub(super) fn pending_cts(&mut self) -> Option<(u64, u64)> {
        // Places of landings that are through belong to others.
        self.cts_sent = self.cts_sent.max(self.recvs_completed);
        while self.cts_sent < self.recvs_posted {
            let landing = self.posted_recvs[self.cts_sent as usize % WINDOW].as_ref();
            let by_board =
                landing.is_none_or(|landing| is_eager(self.on_gpu, self.cts_sent, landing.piece.len()));
            if !by_board {
                break;
            }
            self.cts_sent += 1;
        }
        let ring = (self.cts_sent / WINDOW as u64 + 1) * WINDOW as u64;
        (self.cts_sent < self.recvs_posted).then(|| (self.cts_sent, self.recvs_posted.min(ring)))
    }

    pub(super) fn mark_cts_sent(&mut self, to: u64) {
        self.cts_sent = to;
    }

    /// A message is where it shall be. `false` if it was already.
    fn mark_filled(&mut self, message: u64) -> bool {
        let bit = 1 << (message - self.recvs_completed);
        let new = self.filled_bits & bit == 0;
        self.filled_bits |= bit;
        new
    }

    /// Takes the oldest landing off if it is filled. Nothing is used before the peer's call is known.
    pub(super) fn pop_completed(&mut self) -> bool {
        let filled_bits = self.call_reported && self.filled_bits & 1 == 1;
        if filled_bits {
            self.posted_recvs[self.recvs_completed as usize % WINDOW] = None;
            self.recvs_completed += 1;
            self.filled_bits >>= 1;
        }
        filled_bits
    }

    fn delivery_report(&self) -> DeliveryReport {
        let Self { call_received, cts_base, cts_bits, eager, recvs_completed, filled_bits, .. } = *self;
        DeliveryReport { call_received, cts_base, cts_bits, eager, recvs_completed, filled_bits }
    }
}

impl Link {
    /// All that this rank knows of what the peer has written.
    pub(super) fn known(&self) -> RecoveryState {
        RecoveryState {
            epoch: self.epoch,
            reports: [self.incoming[0].delivery_report(), self.incoming[1].delivery_report()],
        }
    }

    /// The peer has written something and said so by `word`; `len` bytes of it.
    pub(in super::super) fn received(&mut self, qp: usize, imm: u32, len: u32) -> Result<()> {
        let (imm, low) = ImmKind::unpack(imm);
        match imm {
            ImmKind::Hello => self.hellos |= 1 << qp,
            ImmKind::Bye => self.polls_since_bye = self.polls_since_bye.or(Some(0)),
            ImmKind::Recovery(failure) if len as usize == size_of::<[u64; RECOVERY_WORDS]>() => {
                return self.received_recovery_state(failure);
            }
            ImmKind::Recovery(_) => return Err(self.protocol_violation()),
            ImmKind::Call | ImmKind::EagerCall | ImmKind::Eager(_) | ImmKind::Cts(_) | ImmKind::Data(_) => {
                // Nothing is told twice, and this rank left the turn before when it had all of it.
                let ahead = low.wrapping_sub(self.epoch) % 4;
                return if ahead > 1 {
                    Err(self.protocol_violation())
                } else {
                    self.received_in_epoch(self.epoch + ahead, imm, len)
                };
            }
        }
        Ok(())
    }

    fn received_in_epoch(&mut self, epoch: u64, imm: ImmKind, len: u32) -> Result<()> {
        let incoming = &mut self.incoming[parity(epoch)];
        match imm {
            ImmKind::Call | ImmKind::EagerCall if incoming.call_received => {
                return Err(self.protocol_violation());
            }
            ImmKind::Call if len as usize != size_of::<[u64; CALL_WORDS]>() => {
                return Err(self.protocol_violation());
            }
            ImmKind::Call => incoming.call_received = true,
            ImmKind::EagerCall => {
                (incoming.call_received, incoming.call_with_eager) = (true, true);
                let head = self.control.layout.eager_bytes(epoch, 0) - self.control.layout.eager(epoch, 0);
                let Some(len) = (len as usize).checked_sub(head) else {
                    return Err(self.protocol_violation());
                };
                return self.eager_received(epoch, 0, len as u32);
            }
            ImmKind::Eager(message) => return self.eager_received(epoch, message, len),
            ImmKind::Cts(to) => {
                let (many, rest) = (len as usize / CTS_BYTES, len as usize % CTS_BYTES);
                if rest != 0 || !incoming.add_credits(to, many as u64) {
                    return Err(self.protocol_violation());
                }
            }
            ImmKind::Data(message) => {
                let message = widen(message, incoming.recvs_completed);
                let expected = incoming.posted_recvs[message as usize % WINDOW]
                    .as_ref()
                    .filter(|_| message < incoming.recvs_posted && epoch == self.epoch)
                    .map(|landing| landing.piece.len())
                    .filter(|len| !is_eager(incoming.on_gpu, message, *len));
                if expected != Some(len as usize) || !incoming.mark_filled(message) {
                    return Err(self.disagree(&format!(
                        "sent {len} bytes where {expected:?} were expected; do all ranks run the same version with the same settings?"
                    )));
                }
            }
            ImmKind::Recovery(_) | ImmKind::Hello | ImmKind::Bye => {}
        }
        Ok(())
    }

    fn eager_received(&mut self, epoch: u64, message: u64, len: u32) -> Result<()> {
        let incoming = &mut self.incoming[parity(epoch)];
        let known = message >= EAGER_MESSAGES || incoming.eager >> message & 1 == 1;
        if known || len as usize > MAX_EAGER_BYTES {
            return Err(self.protocol_violation());
        }
        incoming.eager |= 1 << message;
        incoming.eager_lens[message as usize] = len;
        if epoch == self.epoch { self.deliver_eager(epoch, message) } else { Ok(()) }
    }

    /// Copies a short message to its landing, once both are there.
    pub(super) fn deliver_eager(&mut self, epoch: u64, message: u64) -> Result<()> {
        let incoming = &mut self.incoming[parity(epoch)];
        let there = message < EAGER_MESSAGES && incoming.eager >> message & 1 == 1;
        if !there || message < incoming.recvs_completed || message >= incoming.recvs_posted {
            return Ok(());
        }
        let Some(landing) = &incoming.posted_recvs[message as usize % WINDOW] else { return Ok(()) };
        let (received, piece) = (incoming.eager_lens[message as usize] as usize, landing.piece);
        // To a GPU nothing comes this way, unless the peer makes another call.
        if received != piece.len() || !piece.is_host() {
            return Err(self.disagree(&format!(
                "sent {received} bytes where {} were expected; do all ranks run the same version with the same settings?",
                piece.len()
            )));
        }
        if incoming.mark_filled(message) {
            self.control.read_eager(epoch, message, piece);
        }
        Ok(())
    }

    pub(super) fn protocol_violation(&mut self) -> crate::error::Error {
        self.disagree("wrote something that makes no sense: is it the same build of flexring?")
    }
}
