//! One frame on a socket: a header of 40 bytes, and a call or a message.
//!
//! Owns the layout of frames, their checksums, and how many bytes of each have been sent or received.
//!
//! A header is `kind: u32, index: u32, sequence: u64, length: u64, content: u64, parity: u64`, little-endian.
//! A receiver only compares it with the header that it expects: nothing in it decides where bytes go or how
//! many they are. `content` is the XXH3 of what follows. It protects it from end to end: TCP's own checksum
//! has 16 bits, and devices on the way recompute it. `parity` tells a header that was changed on the way from
//! one that its sender meant.

use crate::call::{Call, CallWords};
use crate::memory::Piece;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::slice;
use twox_hash::XxHash3_64;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Bytes of a header.
const HEADER: usize = size_of::<FrameHeader>();
/// Bytes of a call.
const CALL: usize = size_of::<CallWords>();

/// The header of a frame, as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct FrameHeader {
    kind: U32,
    /// Index of a message within its call, truncated to 32 bits.
    index: U32,
    /// Sequence number of the call.
    sequence: U64,
    /// Bytes that follow the header.
    length: U64,
    /// Checksum of these bytes.
    content: U64,
    /// Exclusive or of the words before.
    parity: U64,
}

impl FrameHeader {
    const CALL: u32 = u32::from_le_bytes(*b"call");
    const DATA: u32 = u32::from_le_bytes(*b"data");

    fn call(sequence: u64) -> Self {
        Self::new(Self::CALL, 0, sequence, CALL)
    }

    fn data(sequence: u64, index: u64, length: usize) -> Self {
        Self::new(Self::DATA, index, sequence, length)
    }

    /// A header without checksums.
    fn new(kind: u32, index: u64, sequence: u64, length: usize) -> Self {
        Self {
            kind: kind.into(),
            index: (index as u32).into(),
            sequence: sequence.into(),
            length: (length as u64).into(),
            content: U64::ZERO,
            parity: U64::ZERO,
        }
    }

    /// This header, for these bytes.
    fn sealed(self, content: &[u8]) -> Self {
        let content = XxHash3_64::oneshot(content).into();
        let sealed = Self { content, ..self };
        Self { parity: sealed.parity().into(), ..sealed }
    }

    /// The exclusive or of all words, which is 0 if the header is as it was sent.
    fn parity(&self) -> u64 {
        let Self { kind, index, sequence, length, content, parity } = self;
        let first = u64::from(kind.get()) | u64::from(index.get()) << 32;
        first ^ sequence.get() ^ length.get() ^ content.get() ^ parity.get()
    }

    /// Whether both are for the same frame, apart from the content.
    fn names_the_frame_of(&self, other: &Self) -> bool {
        let Self { kind, index, sequence, length, .. } = self;
        (*kind, *index, *sequence, *length) == (other.kind, other.index, other.sequence, other.length)
    }

    /// Whether it announces a call.
    pub fn is_call(&self) -> bool {
        self.kind == Self::CALL
    }
}

impl fmt::Display for FrameHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, index, sequence, length, .. } = self;
        match kind.get() {
            Self::CALL => write!(f, "call {sequence}"),
            Self::DATA => write!(f, "message {index} of call {sequence} with {length} bytes"),
            _ => write!(f, "a frame of an unknown kind"),
        }
    }
}

/// The bytes of a frame that this module encodes: the header, and a call if the frame carries one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct Prefix {
    header: FrameHeader,
    call: [U64; CALL / 8],
}

/// How far an expected frame was received.
#[derive(Debug)]
pub(super) enum FrameProgress {
    /// Not all of it yet.
    Partial,
    /// A call; `None` if its words are invalid.
    Call(Option<Call>),
    /// The expected message, in its destination.
    Data,
}

/// Why what was received is not the expected frame.
#[derive(Debug)]
pub(super) enum FrameError {
    /// It was changed on the way. With the expected header.
    Damaged(FrameHeader),
    /// The peer has sent another one: the received header and the expected one.
    Unexpected(FrameHeader, FrameHeader),
}

/// An outgoing frame, or an expected one that is being received. Both progress from front to back.
#[derive(Debug)]
pub(super) struct Frame {
    /// The header that is sent or expected. Of an expected call the sequence number is unknown and not
    /// compared.
    header: FrameHeader,
    /// The bytes that are sent, or received so far.
    prefix: Prefix,
    /// How many bytes of `prefix` belong to this frame.
    size: usize,
    /// The message.
    piece: Piece,
    /// How many bytes, of `prefix` up to `size` and then of the message, are sent or received.
    done: usize,
}

impl Frame {
    /// A call to send.
    pub fn of_call(call: &Call) -> Self {
        let mut frame = Self::new(FrameHeader::call(call.sequence), HEADER + CALL, Piece::EMPTY);
        frame.prefix.call = call.to_words().map(U64::from);
        frame.prefix.header = frame.header.sealed(frame.content());
        frame
    }

    /// A message to send.
    pub fn of_data(sequence: u64, index: u64, piece: Piece) -> Self {
        let mut frame = Self::for_data(sequence, index, piece);
        frame.prefix.header = frame.header.sealed(frame.content());
        frame
    }

    /// Expects a call.
    pub fn for_call() -> Self {
        Self::new(FrameHeader::call(0), HEADER + CALL, Piece::EMPTY)
    }

    /// Expects a message, to be written to `piece`.
    pub fn for_data(sequence: u64, index: u64, piece: Piece) -> Self {
        Self::new(FrameHeader::data(sequence, index, piece.len()), HEADER, piece)
    }

    fn new(header: FrameHeader, size: usize, piece: Piece) -> Self {
        Self { header, prefix: Prefix { header, call: [U64::ZERO; CALL / 8] }, size, piece, done: 0 }
    }

    /// What follows the header. Of an expected frame once it is received.
    fn content(&self) -> &[u8] {
        if !self.is_data() {
            return self.prefix.call.as_bytes();
        }
        // SAFETY: the caller of `send` or `post_recv` promised that the piece stays readable, and that
        // nothing but this frame writes it, until the operation is over, and this frame does not outlive
        // that: it is dropped when sent or received, or by `abort`.
        unsafe { slice::from_raw_parts(self.piece.as_ptr(), self.piece.len()) }
    }

    /// Whether it carries a message.
    pub fn is_data(&self) -> bool {
        !self.header.is_call()
    }

    /// Whether all bytes are sent or received.
    pub fn is_complete(&self) -> bool {
        self.missing() == 0
    }

    /// Whether no byte is sent or received yet.
    pub fn is_untouched(&self) -> bool {
        self.done == 0
    }

    /// The number of bytes that are not sent or received yet.
    pub fn missing(&self) -> usize {
        self.size + self.piece.len() - self.done
    }

    /// Counts up to `bytes` more bytes as sent or received. The number of bytes that belong to later frames.
    pub fn advance(&mut self, bytes: usize) -> usize {
        let mine = bytes.min(self.missing());
        self.done += mine;
        bytes - mine
    }

    /// The part of the message that is not sent or received yet.
    fn rest(&self) -> Piece {
        let from = self.done.saturating_sub(self.size);
        self.piece.narrow(from, self.piece.len() - from)
    }

    /// The bytes that are still to be sent.
    pub fn unsent(&self) -> [IoSlice<'_>; 2] {
        let rest = self.rest();
        // SAFETY: the caller of `send` promised that the piece stays readable and unwritten until the
        // operation is over, and this frame does not outlive that: it is dropped when sent, or by `abort`.
        let message = unsafe { slice::from_raw_parts(rest.as_ptr(), rest.len()) };
        let prefix = &self.prefix.as_bytes()[self.done.min(self.size)..self.size];
        [IoSlice::new(prefix), IoSlice::new(message)]
    }

    /// Where the bytes that are still missing go, with at most `limit` bytes of the message.
    pub fn unfilled(&mut self, limit: usize) -> [IoSliceMut<'_>; 2] {
        let rest = self.rest();
        // SAFETY: the caller of `post_recv` promised that the piece stays writable, and that nothing else
        // accesses it, until the operation is over, and this frame does not outlive that: it is dropped when
        // filled, or by `abort`.
        let message = unsafe { slice::from_raw_parts_mut(rest.as_ptr(), rest.len().min(limit)) };
        let prefix = &mut self.prefix.as_mut_bytes()[self.done.min(self.size)..self.size];
        [IoSliceMut::new(prefix), IoSliceMut::new(message)]
    }

    /// What was received in place of this frame.
    ///
    /// # Errors
    /// As soon as the header is received if it is not the expected one, and else once all is received.
    pub fn received(&self) -> Result<FrameProgress, FrameError> {
        if self.done < HEADER {
            return Ok(FrameProgress::Partial);
        }
        let received = self.prefix.header;
        if received.parity() != 0 {
            return Err(FrameError::Damaged(self.header));
        }
        let sequence = received.sequence.get();
        let expected = if self.is_data() { self.header } else { FrameHeader::call(sequence) };
        if !received.names_the_frame_of(&expected) {
            return Err(FrameError::Unexpected(received, self.header));
        }
        if !self.is_complete() {
            return Ok(FrameProgress::Partial);
        }
        if received.content != XxHash3_64::oneshot(self.content()) {
            return Err(FrameError::Damaged(self.header));
        }
        Ok(if self.is_data() { FrameProgress::Data } else { FrameProgress::Call(self.call(sequence)) })
    }

    fn call(&self, sequence: u64) -> Option<Call> {
        Call::from_words(self.prefix.call.map(U64::get)).filter(|call| call.sequence == sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::fixtures::{call, piece};

    /// What a frame is received as, if these bytes come for it.
    fn receive(mut expected: Frame, bytes: &[u8]) -> Result<FrameProgress, FrameError> {
        let mut rest = bytes;
        for part in &mut expected.unfilled(usize::MAX) {
            let (now, later) = rest.split_at(part.len());
            part.copy_from_slice(now);
            rest = later;
        }
        assert_eq!((rest, expected.advance(bytes.len())), ([].as_slice(), 0));
        expected.received()
    }

    #[test]
    fn a_frame_with_a_changed_bit_is_damaged() {
        for len in [1, 8, 17, 300, 5000] {
            let mut message: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let mut destination = vec![0; len];
            let destination = piece(&mut destination);
            type Expect = fn(Piece) -> Frame;
            let frames: [(Frame, Expect); 2] = [
                (Frame::of_call(&call(7)), |_| Frame::for_call()),
                (Frame::of_data(7, 3, piece(&mut message)), |into| Frame::for_data(7, 3, into)),
            ];
            for (sent, expected) in frames {
                let mut bytes = sent.unsent().map(|part| part.to_vec()).concat();
                let received = receive(expected(destination), &bytes);
                assert!(
                    matches!(received, Ok(FrameProgress::Call(Some(_)) | FrameProgress::Data)),
                    "{received:?}"
                );
                for bit in 0..8 * bytes.len() {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                    let received = receive(expected(destination), &bytes);
                    assert!(
                        matches!(received, Err(FrameError::Damaged(_))),
                        "bit {bit} of {len} bytes: {received:?}"
                    );
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }
}
