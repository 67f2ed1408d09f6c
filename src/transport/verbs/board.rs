//! The two boards of a link: what the peer writes for this rank, and what this rank is about to write for the peer.
//!
//! Owns the copying in and out of them. Must not know what makes anybody write. The peer's device writes to the
//! inbox whenever it likes; what is read there was announced by a completion, and is checked by whoever uses it.

use super::wire::{CALL_WORDS, GRANT_WORDS, Grant, KNOWN_WORDS, Known, Layout};
use crate::call::{Call, CallWords};
use crate::memory::Piece;

/// One link's inbox and outbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct Board {
    inbox: Piece,
    outbox: Piece,
    pub layout: Layout,
}

impl Board {
    /// Boards in memory that outlives the link, both as long as the layout asks for.
    pub(super) fn new(inbox: Piece, outbox: Piece, layout: Layout) -> Self {
        assert!(
            inbox.len() >= layout.bytes() && outbox.len() >= layout.bytes(),
            "boards as long as their layout"
        );
        Self { inbox, outbox, layout }
    }

    /// A stretch of the outbox.
    pub(super) fn outgoing(&self, offset: usize, len: usize) -> Piece {
        self.outbox.narrow(offset, len)
    }

    fn put<const N: usize>(&mut self, offset: usize, words: [u64; N]) {
        let place = self.outbox.narrow(offset, N * size_of::<u64>());
        let words = words.map(u64::to_le);
        // SAFETY: the place lies within the outbox, which only this rank writes, and has room for the words. No
        // request that still reads it is under way: places are used again when the peer has moved on.
        unsafe { place.as_ptr().copy_from_nonoverlapping(words.as_ptr().cast(), place.len()) };
    }

    fn get<const N: usize>(&self, offset: usize) -> [u64; N] {
        let place = self.inbox.narrow(offset, N * size_of::<u64>());
        let mut words = [0u64; N];
        // SAFETY: the place lies within the inbox. Its completion was polled, so the peer's device is done with it;
        // a peer that breaks the rules changes numbers, which are checked, and nothing else.
        unsafe { place.as_ptr().copy_to_nonoverlapping(words.as_mut_ptr().cast(), place.len()) };
        words.map(u64::from_le)
    }

    /// Puts a call alone; where it is.
    pub(super) fn put_call(&mut self, turn: u64, call: &Call) -> (usize, usize) {
        let offset = self.layout.call(turn);
        self.put(offset, call.to_words());
        (offset, CALL_WORDS * size_of::<u64>())
    }

    /// The peer's call, as it stands alone or before its first message.
    pub(super) fn call(&self, turn: u64, with_message: bool) -> Option<Call> {
        let at = if with_message { self.layout.eager(turn, 0) } else { self.layout.call(turn) };
        let words: CallWords = self.get(at);
        Call::from_words(words)
    }

    /// Puts the call before the first message; where both are, given the message's length.
    pub(super) fn put_eager_call(&mut self, turn: u64, call: &Call, len: usize) -> (usize, usize) {
        let offset = self.layout.eager(turn, 0);
        self.put(offset, call.to_words());
        (offset, self.layout.eager_bytes(turn, 0) - offset + len)
    }

    /// Puts a short message; where it is.
    pub(super) fn put_eager(&mut self, turn: u64, message: u64, piece: Piece) -> (usize, usize) {
        let offset = self.layout.eager_bytes(turn, message);
        let place = self.outbox.narrow(offset, piece.len());
        // SAFETY: both are as long, the message is valid for the operation that it belongs to, and the outbox is
        // nobody else's memory.
        unsafe { place.as_ptr().copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        (offset, piece.len())
    }

    /// Takes a short message of the peer's that has come.
    pub(super) fn take_eager(&self, turn: u64, message: u64, into: Piece) {
        let place = self.inbox.narrow(self.layout.eager_bytes(turn, message), into.len());
        // SAFETY: both are as long, and the landing is valid and this rank's alone for the operation.
        unsafe { place.as_ptr().copy_to_nonoverlapping(into.as_ptr(), into.len()) };
    }

    pub(super) fn put_grant(&mut self, turn: u64, message: u64, grant: Grant) {
        self.put(self.layout.grant(turn, message), grant.to_words());
    }

    /// Where the grants of these messages are, which do not go round the end of their ring.
    pub(super) fn grants(&self, turn: u64, messages: std::ops::Range<u64>) -> (usize, usize) {
        let len = (messages.end - messages.start) as usize * GRANT_WORDS * size_of::<u64>();
        (self.layout.grant(turn, messages.start), len)
    }

    pub(super) fn grant(&self, turn: u64, message: u64) -> Grant {
        Grant::from_words(self.get::<GRANT_WORDS>(self.layout.grant(turn, message)))
    }

    /// Puts what this rank knows; where it is.
    pub(super) fn put_known(&mut self, pair: usize, known: Known) -> (usize, usize) {
        let offset = self.layout.known(pair);
        self.put(offset, known.to_words());
        (offset, KNOWN_WORDS * size_of::<u64>())
    }

    pub(super) fn known(&self, pair: usize) -> Known {
        Known::from_words(self.get::<KNOWN_WORDS>(self.layout.known(pair)))
    }
}
