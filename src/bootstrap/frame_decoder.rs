//! Splitting the byte stream of a control connection into frames.
//!
//! Owns the preamble, the length of frames, and why a stream cannot be split.

use super::protocol::{ENCRYPTED, WIRE_VERSION};

/// The first bytes that a rank sends.
pub(super) const MAGIC: [u8; 8] = *b"flexring";

/// The bytes in front of a rank's first frame: magic word, byte-order mark, and wire version.
pub(super) struct Preamble;

impl Preamble {
    const BYTES: usize = 16;
    /// In the byte order of the sender, because vectors travel in it.
    const BYTE_ORDER_MARK: u32 = 0x0102_0304;

    /// The preamble of this build.
    pub(super) fn encode() -> [u8; Self::BYTES] {
        Self::with(Self::BYTE_ORDER_MARK.to_ne_bytes(), WIRE_VERSION)
    }

    /// The preamble of a build with this mark and wire version.
    pub(super) fn with(mark: [u8; 4], version: u32) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&mark);
        bytes[12..].copy_from_slice(&version.to_le_bytes());
        bytes
    }

    /// Checks the first bytes of a stream. `false` if there are too few.
    fn check(bytes: &[u8]) -> std::result::Result<bool, Unreadable> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(Unreadable::Malformed);
        }
        let Some([_, _, _, _, _, _, _, _, m0, m1, m2, m3, version @ ..]) =
            bytes.first_chunk::<{ Self::BYTES }>()
        else {
            return Ok(false);
        };
        let mark = u32::from_ne_bytes([*m0, *m1, *m2, *m3]);
        match u32::from_le_bytes(*version) {
            _ if mark == Self::BYTE_ORDER_MARK.swap_bytes() => Err(Unreadable::OtherByteOrder),
            _ if mark != Self::BYTE_ORDER_MARK => Err(Unreadable::NoWireVersion),
            WIRE_VERSION => Ok(true),
            other => Err(Unreadable::OtherWireVersion(other)),
        }
    }
}

/// Splits a byte stream into frames.
#[derive(Debug)]
pub(super) struct FrameDecoder {
    bytes: Vec<u8>,
    preamble: bool,
    encryption: EncryptionMark,
    /// Why the rest of the stream is discarded.
    unreadable: Option<Unreadable>,
}

/// What a decoder does with the mark [`ENCRYPTED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EncryptionMark {
    /// It is no frame.
    Refused,
    /// What follows it is encrypted.
    Accepted,
    /// The mark has arrived, and the bytes that are left are encrypted.
    Arrived,
}

/// Why a stream cannot be split into frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It does not consist of frames.
    Malformed,
    /// Its preamble has no byte-order mark, as before wire version 2.
    NoWireVersion,
    /// Its sender stores numbers in the other byte order.
    OtherByteOrder,
    /// Its sender speaks this wire version.
    OtherWireVersion(u32),
}

impl Unreadable {
    /// What the sender does, as a verb phrase; `None` if it does not speak flexring's protocol at all.
    pub(super) fn describe(self) -> Option<String> {
        match self {
            Self::Malformed => None,
            Self::NoWireVersion => {
                Some(format!("speaks a wire version before 2, and this coordinator speaks {WIRE_VERSION}"))
            }
            Self::OtherByteOrder => {
                let [ours, theirs] =
                    if cfg!(target_endian = "little") { ["little", "big"] } else { ["big", "little"] };
                Some(format!("is {theirs}-endian, and this coordinator is {ours}-endian"))
            }
            Self::OtherWireVersion(version) => {
                Some(format!("speaks wire version {version}, and this coordinator speaks {WIRE_VERSION}"))
            }
        }
    }
}

impl FrameDecoder {
    /// A decoder for a stream that begins with a preamble if `preamble`, else with a frame.
    pub(super) fn new(preamble: bool) -> Self {
        Self { bytes: Vec::new(), preamble, encryption: EncryptionMark::Refused, unreadable: None }
    }

    /// Accepts the mark in place of a frame from now on.
    pub(super) fn accept_encryption(&mut self) {
        self.encryption = EncryptionMark::Accepted;
    }

    /// Once the mark has arrived, the bytes behind it. The bytes that are appended next are decrypted ones.
    pub(super) fn take_encrypted(&mut self) -> Option<Vec<u8>> {
        if self.encryption != EncryptionMark::Arrived {
            return None;
        }
        self.encryption = EncryptionMark::Refused;
        Some(self.take_rest())
    }

    /// The bytes that are no complete frame. The bytes that are appended next begin a new frame.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Appends received bytes. Callers take all complete frames out between two appends, so at most one
    /// incomplete frame is buffered.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        if self.unreadable.is_none() {
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// The next frame, if it is complete. Frames longer than `limit` bytes are malformed. After an error
    /// every call returns it, and no bytes are kept.
    pub(super) fn next(&mut self, limit: usize) -> std::result::Result<Option<Vec<u8>>, Unreadable> {
        let next = self.unreadable.map_or_else(|| self.split(limit), Err);
        if let Err(cause) = next {
            self.unreadable = Some(cause);
            self.bytes = Vec::new();
        }
        next
    }

    fn split(&mut self, limit: usize) -> std::result::Result<Option<Vec<u8>>, Unreadable> {
        if self.preamble {
            if !Preamble::check(&self.bytes)? {
                return Ok(None);
            }
            self.bytes.drain(..Preamble::BYTES);
            self.preamble = false;
        }
        if self.encryption == EncryptionMark::Arrived {
            return Ok(None);
        }
        let Some((header, rest)) = self.bytes.split_first_chunk::<4>() else {
            return Ok(None);
        };
        if self.encryption == EncryptionMark::Accepted && *header == ENCRYPTED {
            self.bytes.drain(..4);
            self.encryption = EncryptionMark::Arrived;
            return Ok(None);
        }
        let length = u32::from_le_bytes(*header) as usize;
        if length > limit {
            return Err(Unreadable::Malformed);
        }
        if rest.len() < length {
            return Ok(None);
        }
        let frame = rest[..length].to_vec();
        self.bytes.drain(..4 + length);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::super::call_state::CallState;
    use super::super::protocol::{
        FRAME_LIMIT, HelloParams, OPENING_LIMIT, Opening, PROOF_LIMIT, ToCoordinator, ToRank, decode, encode,
    };
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn decodes_frames_however_the_stream_is_chunked() {
        let mut stream = Preamble::encode().to_vec();
        stream.extend_from_slice(&encode(&Opening::example()).expect("short"));
        let beat = ToCoordinator::Heartbeat(CallState::Idle { finished: 3 });
        stream.extend_from_slice(&encode(&beat).expect("short"));
        for step in 1..stream.len() {
            let mut cutter = FrameDecoder::new(true);
            let mut frames = Vec::new();
            for bytes in stream.chunks(step) {
                cutter.append(bytes);
                while let Some(frame) = cutter.next(FRAME_LIMIT).expect("well formed") {
                    frames.push(frame);
                }
            }
            let [first, second] = frames.as_slice() else {
                panic!("{} frames", frames.len());
            };
            assert_eq!(decode::<Opening>(first), Some(Opening::example()));
            assert_eq!(decode::<ToCoordinator>(second), Some(beat.clone()));
        }
    }

    #[test]
    fn other_wire_versions_and_byte_orders_are_named() {
        let native = Preamble::BYTE_ORDER_MARK.to_ne_bytes();
        let swapped = Preamble::BYTE_ORDER_MARK.swap_bytes().to_ne_bytes();
        let theirs = if cfg!(target_endian = "little") { "is big-endian" } else { "is little-endian" };
        let ours = format!(", and this coordinator speaks {WIRE_VERSION}");
        for (mark, version, expected) in [
            (native, 2, format!("speaks wire version 2{ours}")),
            (native, 2 << 24, format!("speaks wire version 33554432{ours}")),
            // The version of a big-endian build is little-endian, too; its mark is not.
            (swapped, WIRE_VERSION, theirs.to_owned()),
            // The first frame of a release before wire version 2.
            ([96, 0, 0, 0], 5, format!("speaks a wire version before 2{ours}")),
        ] {
            let mut decoder = FrameDecoder::new(true);
            decoder.append(&Preamble::with(mark, version));
            let text = decoder.next(OPENING_LIMIT).expect_err("refused").describe();
            assert!(text.as_ref().is_some_and(|text| text.starts_with(&expected)), "{text:?}");
        }
    }

    #[test]
    fn rejects_oversized_and_foreign_input_at_once() {
        let mut cutter = FrameDecoder::new(true);
        cutter.append(b"GET / HTTP/1.1");
        assert_eq!(cutter.next(OPENING_LIMIT), Err(Unreadable::Malformed));
        let mut cutter = FrameDecoder::new(false);
        cutter.append(&(OPENING_LIMIT as u32 + 1).to_le_bytes());
        assert_eq!(cutter.next(FRAME_LIMIT), Ok(None));
        assert_eq!(cutter.next(OPENING_LIMIT), Err(Unreadable::Malformed));
        cutter.append(&[0; 1000]);
        assert_eq!(cutter.next(FRAME_LIMIT), Err(Unreadable::Malformed), "the rest is discarded");
        assert!(cutter.bytes.is_empty());
        assert!(encode(&vec![0u8; FRAME_LIMIT + 1]).is_err());
    }

    #[test]
    fn encrypted_bytes_begin_behind_a_mark_that_is_expected() {
        let beat = encode(&ToCoordinator::Heartbeat(CallState::Idle { finished: 3 })).expect("short");
        let stream = [&beat[..], &ENCRYPTED, b"encrypted"].concat();
        let mut cutter = FrameDecoder::new(false);
        cutter.append(&stream);
        assert!(matches!(cutter.next(FRAME_LIMIT), Ok(Some(_))));
        assert_eq!(cutter.next(FRAME_LIMIT), Err(Unreadable::Malformed), "no encryption is expected");
        let mut cutter = FrameDecoder::new(false);
        cutter.accept_encryption();
        cutter.append(&stream);
        assert!(matches!(cutter.next(FRAME_LIMIT), Ok(Some(_))));
        assert_eq!((cutter.take_encrypted(), cutter.next(FRAME_LIMIT)), (None, Ok(None)));
        assert_eq!(cutter.take_encrypted().as_deref(), Some(b"encrypted".as_slice()));
        cutter.append(&beat);
        assert!(matches!(cutter.next(FRAME_LIMIT), Ok(Some(_))));
    }

    proptest! {
        #[test]
        fn parsers_accept_any_bytes_without_panicking(preamble: bool, pieces: Vec<Vec<u8>>, frame: Vec<u8>) {
            let mut cutter = FrameDecoder::new(preamble);
            for piece in pieces {
                cutter.append(&piece);
                while let Ok(Some(frame)) = cutter.next(PROOF_LIMIT) {
                    let _ = decode::<Opening>(&frame);
                }
            }
            let _ = decode::<Opening>(&frame);
            let _ = HelloParams::decode(&frame);
            let _ = decode::<ToCoordinator>(&frame);
            let _ = decode::<ToRank>(&frame);
        }
    }
}
