//! One frame on a socket: a head of 24 bytes, and what follows it.
//!
//! Owns the layout of frames and how far each has come. Must not know sockets, nor which frame comes when.
//!
//! A head is `kind: u32, index: u32, sequence: u64, length: u64`, little endian. It tells a receiver nothing
//! that it does not know already: its only use is to be compared with the head that was expected.

use crate::call::{Call, CallWords};
use crate::memory::Piece;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::slice;

/// Bytes of a head.
const HEAD: usize = 24;
/// Bytes of a call.
const CALL: usize = size_of::<CallWords>();

/// What a frame says about itself. An index is of 32 bits and may wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    kind: u32,
    index: u32,
    sequence: u64,
    length: u64,
}

impl Head {
    const CALL: u32 = u32::from_le_bytes(*b"call");
    const DATA: u32 = u32::from_le_bytes(*b"data");

    fn call(sequence: u64) -> Self {
        Self { kind: Self::CALL, index: 0, sequence, length: CALL as u64 }
    }

    fn data(sequence: u64, index: u64, length: usize) -> Self {
        Self { kind: Self::DATA, index: index as u32, sequence, length: length as u64 }
    }

    /// Whether it announces a call.
    pub fn is_call(&self) -> bool {
        self.kind == Self::CALL
    }

    fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEAD + CALL]) -> Self {
        Self {
            kind: u32_at(bytes, 0),
            index: u32_at(bytes, 4),
            sequence: u64_at(bytes, 8),
            length: u64_at(bytes, 16),
        }
    }
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, index, sequence, length } = self;
        match *kind {
            Self::CALL => write!(f, "call {sequence}"),
            Self::DATA => write!(f, "message {index} of call {sequence} with {length} bytes"),
            _ => write!(f, "something that is no frame of flexring"),
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// What an expected frame turned out to be.
#[derive(Debug)]
pub(super) enum Content {
    /// Not all of it is there yet.
    Partial,
    /// A call, or words that are none.
    Call(Option<Call>),
    /// The message that was expected, in its landing.
    Data,
}

/// A frame on its way out, or one that is expected and on its way in. Both are filled from front to back, and
/// nothing of an incoming frame decides where its bytes go or how many they are.
#[derive(Debug)]
pub(super) struct Frame {
    /// What is sent, or expected; the sequence of a call is not expected to be anything in particular.
    head: Head,
    /// The head, and the words of a call, as they are on the wire.
    bytes: [u8; HEAD + CALL],
    /// How many of `bytes` belong to this frame.
    size: usize,
    /// The message.
    piece: Piece,
    /// How many bytes, of `bytes[..size]` and then of the message, are through.
    done: usize,
}

impl Frame {
    /// A call to be sent.
    pub fn of_call(call: &Call) -> Self {
        let mut frame = Self::new(Head::call(call.sequence), HEAD + CALL, Piece::EMPTY);
        for (place, word) in frame.bytes[HEAD..].chunks_exact_mut(8).zip(call.to_words()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        frame
    }

    /// A message to be sent.
    pub fn of_data(sequence: u64, index: u64, piece: Piece) -> Self {
        Self::new(Head::data(sequence, index, piece.len()), HEAD, piece)
    }

    /// Room for a call that may come.
    pub fn for_call() -> Self {
        Self::new(Head::call(0), HEAD + CALL, Piece::EMPTY)
    }

    /// Room for the message that must come next.
    pub fn for_data(sequence: u64, index: u64, piece: Piece) -> Self {
        Self::of_data(sequence, index, piece)
    }

    fn new(head: Head, size: usize, piece: Piece) -> Self {
        let mut bytes = [0; HEAD + CALL];
        bytes[..HEAD].copy_from_slice(&head.to_bytes());
        Self { head, bytes, size, piece, done: 0 }
    }

    /// Whether it carries a message.
    pub fn is_data(&self) -> bool {
        !self.head.is_call()
    }

    /// Whether nothing is missing.
    pub fn is_whole(&self) -> bool {
        self.missing() == 0
    }

    /// Whether nothing has come or gone yet.
    pub fn is_untouched(&self) -> bool {
        self.done == 0
    }

    /// How many bytes have not come or gone yet.
    pub fn missing(&self) -> usize {
        self.size + self.piece.len() - self.done
    }

    /// Counts up to `bytes` more bytes as come or gone, and returns how many are left for the next frame.
    pub fn advance(&mut self, bytes: usize) -> usize {
        let mine = bytes.min(self.missing());
        self.done += mine;
        bytes - mine
    }

    /// The part of the message that is not through.
    fn rest(&self) -> Piece {
        let from = self.done.saturating_sub(self.size);
        self.piece.narrow(from, self.piece.len() - from)
    }

    /// What is still to be sent.
    pub fn unsent(&self) -> [IoSlice<'_>; 2] {
        let rest = self.rest();
        // SAFETY: whoever handed the piece to `send` promised that it stays readable and unwritten until the
        // operation is over, and this frame does not outlive that: it is dropped when sent, or by `abort`.
        let message = unsafe { slice::from_raw_parts(rest.as_ptr(), rest.len()) };
        [IoSlice::new(&self.bytes[self.done.min(self.size)..self.size]), IoSlice::new(message)]
    }

    /// Where what is still to come goes, with at most `limit` bytes of the message.
    pub fn unfilled(&mut self, limit: usize) -> [IoSliceMut<'_>; 2] {
        let rest = self.rest();
        // SAFETY: whoever handed the piece to `post_recv` promised that it stays writable and is touched by nobody
        // else until the operation is over, and this frame does not outlive that: it is dropped when filled,
        // or by `abort`.
        let landing = unsafe { slice::from_raw_parts_mut(rest.as_ptr(), rest.len().min(limit)) };
        [IoSliceMut::new(&mut self.bytes[self.done.min(self.size)..self.size]), IoSliceMut::new(landing)]
    }

    /// What has come in place of this frame.
    ///
    /// # Errors
    /// The head that came and the head that was expected, as soon as it is known that they differ.
    pub fn content(&self) -> Result<Content, (Head, Head)> {
        if self.done < HEAD {
            return Ok(Content::Partial);
        }
        let came = Head::from_bytes(&self.bytes);
        let expected = if self.is_data() { self.head } else { Head::call(came.sequence) };
        if came != expected {
            return Err((came, self.head));
        }
        if !self.is_whole() {
            return Ok(Content::Partial);
        }
        Ok(if self.is_data() { Content::Data } else { Content::Call(self.words(came.sequence)) })
    }

    fn words(&self, sequence: u64) -> Option<Call> {
        let words = std::array::from_fn(|word| u64_at(&self.bytes, HEAD + 8 * word));
        Call::from_words(words).filter(|call| call.sequence == sequence)
    }
}
