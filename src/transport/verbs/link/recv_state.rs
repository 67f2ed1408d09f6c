//! What this rank receives in one epoch of a link: the peer's call, its CTS entries, and its messages.

use super::super::registry::RegisteredMemory;
use super::super::wire::{DeliveryReport, EAGER_MESSAGES, WINDOW, widen};
use super::send_state::is_eager;
use crate::memory::Piece;
use std::sync::Arc;
use zerocopy::little_endian::U64;

/// A posted receive: the destination of one message.
#[derive(Debug)]
struct PostedRecv {
    destination: Piece,
    /// Keeps the memory registered while the peer may write; `None` for an eager message.
    _region: Option<Arc<RegisteredMemory>>,
}

/// What this rank receives in one epoch.
#[derive(Debug, Default)]
pub(super) struct RecvState {
    /// Whether the peer's call has arrived, whether it precedes the first message, and whether it was
    /// reported.
    call_received: bool,
    call_with_message: bool,
    call_reported: bool,
    /// Messages of this rank that have used their CTS, and which of those from there on have one, by bit. CTS
    /// entries may arrive in any order when a queue pair breaks.
    cts_base: u64,
    cts_bits: u64,
    /// Eager messages in the control buffer, by bit, and their lengths.
    eager_bits: u64,
    eager_lens: [u32; EAGER_MESSAGES as usize],
    /// Bytes of the longest eager message of this rank's call of the epoch; `None` if it has none.
    longest_eager: Option<usize>,
    /// Receives posted by this rank, those of them for which the CTS was sent, and those completed and
    /// reported.
    posted: u64,
    cts_sent: u64,
    completed: u64,
    /// Which messages from `completed` on have arrived, by bit.
    received_bits: u64,
    /// By message number modulo the window.
    recvs: [Option<PostedRecv>; WINDOW],
}

impl RecvState {
    /// Prepares for the epoch after the current one.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// This rank enters the epoch.
    pub(super) fn begin(&mut self, longest_eager: Option<usize>) {
        self.longest_eager = longest_eager;
    }

    // The peer's call.

    /// Notes that the peer's call has arrived. `false` if it had arrived before.
    pub(super) fn receive_call(&mut self, with_message: bool) -> bool {
        if self.call_received {
            return false;
        }
        (self.call_received, self.call_with_message) = (true, with_message);
        true
    }

    /// The peer's call that must be reported: whether it precedes a message.
    pub(super) fn unreported_call(&self) -> Option<bool> {
        (self.call_received && !self.call_reported).then_some(self.call_with_message)
    }

    /// Whether the peer's call was reported.
    pub(super) fn is_call_reported(&self) -> bool {
        self.call_reported
    }

    /// Notes that the peer's call was reported.
    pub(super) fn mark_call_reported(&mut self) {
        self.call_reported = true;
    }

    // Credits for this rank's messages.

    /// Whether this rank's next message has a CTS.
    pub(super) fn is_clear_to_send(&self) -> bool {
        self.cts_bits & 1 == 1
    }

    /// Uses the CTS of this rank's next message. Eager messages pass here too and have none.
    pub(super) fn consume_credit(&mut self) {
        self.cts_base += 1;
        self.cts_bits >>= 1;
    }

    /// Notes the CTS entries of the last `count` messages below `to`. `false` if the peer cannot have sent
    /// them.
    pub(super) fn add_credits(&mut self, to: u64, count: u64) -> bool {
        let to = widen(to, self.cts_base);
        let Some(from) = (to - self.cts_base).checked_sub(count) else { return false };
        if from + count > WINDOW as u64 {
            return false;
        }
        let bits = ((1 << count) - 1) << from;
        let new = self.cts_bits & bits == 0;
        self.cts_bits |= bits;
        new
    }

    // Receives.

    /// Receives that are posted and not completed.
    pub(super) fn outstanding(&self) -> u64 {
        self.posted - self.completed
    }

    /// Whether the epoch waits for the peer: for its call, or for a message with a posted receive.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.call_reported || self.outstanding() > self.received_bits.count_ones().into()
    }

    /// Whether the next receive to post is for an eager message at this length.
    pub(super) fn next_is_eager(&self, len: usize) -> bool {
        is_eager(self.longest_eager, self.posted, len)
    }

    /// Posts a receive. Returns the number of its message, and whether that message is eager.
    pub(super) fn post_recv(
        &mut self,
        destination: Piece,
        region: Option<Arc<RegisteredMemory>>,
    ) -> (u64, bool) {
        let message = self.posted;
        self.recvs[message as usize % WINDOW] = Some(PostedRecv { destination, _region: region });
        self.posted += 1;
        (message, is_eager(self.longest_eager, message, destination.len()))
    }

    /// The next range of messages whose CTS must be sent, as far as their entries are contiguous.
    pub(super) fn pending_cts(&mut self) -> Option<(u64, u64)> {
        // The entries of completed receives belong to later messages.
        self.cts_sent = self.cts_sent.max(self.completed);
        while self.cts_sent < self.posted {
            let recv = self.recvs[self.cts_sent as usize % WINDOW].as_ref();
            let eager =
                recv.is_none_or(|recv| is_eager(self.longest_eager, self.cts_sent, recv.destination.len()));
            if !eager {
                break;
            }
            self.cts_sent += 1;
        }
        let wrap = (self.cts_sent / WINDOW as u64 + 1) * WINDOW as u64;
        (self.cts_sent < self.posted).then(|| (self.cts_sent, self.posted.min(wrap)))
    }

    /// Whether the peer may still lack the CTS entry for its message of this number.
    pub(super) fn awaits_message(&self, message: u64) -> bool {
        message >= self.completed
    }

    /// Notes that the CTS of all messages below `to` was sent.
    pub(super) fn mark_cts_sent(&mut self, to: u64) {
        self.cts_sent = to;
    }

    /// Notes that a message of this length was written to its destination, if that is the expected length;
    /// `None` if its length is not known here. Returns the expected length; `None` if the peer cannot have
    /// written the message, because no receive for it is posted here, or it has arrived before.
    pub(super) fn receive_data(&mut self, message: u64, len: Option<u32>, current: bool) -> Option<usize> {
        let message = widen(message, self.completed);
        let expected = self.recvs[message as usize % WINDOW]
            .as_ref()
            .filter(|_| message < self.posted && current)
            .map(|recv| recv.destination.len())
            .filter(|len| !is_eager(self.longest_eager, message, *len))?;
        let fits = len.is_none_or(|len| len as usize == expected);
        (!fits || self.mark_received(message)).then_some(expected)
    }

    /// Notes that an eager message is in the control buffer. `false` if the peer cannot have written it.
    pub(super) fn receive_eager(&mut self, message: u64, len: u32) -> bool {
        if message >= EAGER_MESSAGES || self.eager_bits >> message & 1 == 1 {
            return false;
        }
        self.eager_bits |= 1 << message;
        self.eager_lens[message as usize] = len;
        true
    }

    /// The length and destination of an eager message that has arrived and whose receive is posted.
    pub(super) fn deliverable_eager(&self, message: u64) -> Option<(usize, Piece)> {
        let arrived = message < EAGER_MESSAGES && self.eager_bits >> message & 1 == 1;
        if !arrived || message < self.completed || message >= self.posted {
            return None;
        }
        let recv = self.recvs[message as usize % WINDOW].as_ref()?;
        Some((self.eager_lens[message as usize] as usize, recv.destination))
    }

    /// Notes that a message is at its destination. `false` if it was already.
    pub(super) fn mark_received(&mut self, message: u64) -> bool {
        let bit = 1 << (message - self.completed);
        let new = self.received_bits & bit == 0;
        self.received_bits |= bit;
        new
    }

    /// Completes the oldest receive if its message has arrived. None completes before the peer's call is
    /// reported.
    pub(super) fn pop_completed(&mut self) -> bool {
        let received = self.call_reported && self.received_bits & 1 == 1;
        if received {
            self.recvs[self.completed as usize % WINDOW] = None;
            self.completed += 1;
            self.received_bits >>= 1;
        }
        received
    }

    /// The delivery report for the peer: which of its messages and CTS entries have arrived.
    pub(super) fn delivery_report(&self) -> DeliveryReport {
        DeliveryReport {
            call_received: U64::new(self.call_received.into()),
            cts_base: U64::new(self.cts_base),
            cts_bits: U64::new(self.cts_bits),
            eager_bits: U64::new(self.eager_bits),
            received_base: U64::new(self.completed),
            received_bits: U64::new(self.received_bits),
        }
    }
}
