//! The control protocol: the messages between ranks and their coordinator, and their frames.
//!
//! Owns the message types, their encoding and the limits on their length. Must not know sockets, or what a
//! message leads to.
//!
//! A rank's stream begins with a [`Preamble`]; then come frames in both directions. A frame is its length (four bytes,
//! little-endian) and that many bytes of postcard. The first two frames of a rank are its [`Opening`] and its proof, see
//! `handshake`. If the job is encrypted, the mark [`ENCRYPTED`] follows the opening, and then TLS records that contain the
//! frames; the coordinator's records follow its challenge without a mark. The preamble and [`ToRank::Refused`] never change, so that a rank of another wire version gets a readable
//! error.

use super::call_state::CallState;
use super::process::Process;
use super::world_status::WorldStatus;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::AuthenticationCode;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The first bytes that a rank sends.
pub(super) const MAGIC: [u8; 8] = *b"flexring";
/// Version of the control protocol. Raise it with every change of what travels on a control connection. It is apart from the
/// release: two releases with one wire version understand each other's errors.
pub(super) const WIRE_VERSION: u32 = 3;
/// The release of this build. All ranks of a world must run the same one, because their plans must be equal.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Maximum length of an opening, in bytes: the sender is not authenticated yet.
pub(super) const OPENING_LIMIT: usize = 1 << 10;
/// Maximum length of a proof with the parameters in it, in bytes: its sender is not authenticated either.
pub(super) const PROOF_LIMIT: usize = 64 << 10;
/// Maximum length of any later frame, in bytes.
pub(super) const FRAME_LIMIT: usize = 16 << 20;

/// Stands in place of a frame's length where the end that connected begins to encrypt.
pub(super) const ENCRYPTED: [u8; 4] = u32::MAX.to_le_bytes();

/// A random number that is used once.
pub(super) type Nonce = [u8; 16];

/// An encoded frame, shared by all connections that send it.
pub(super) type Bytes = Arc<[u8]>;

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

/// What a rank says about itself. All releases with this wire version can decode it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloHeader {
    pub(super) version: String,
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) process: Process,
    pub(super) purpose: Purpose,
}

/// What a connection to a coordinator is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Purpose {
    /// To be this rank.
    Join,
    /// To read the state of the world once. Rank and world of the hello do not matter.
    Status,
}

/// The first frame of a rank. Nothing in it is secret, and nothing in it is proved yet.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Opening {
    /// The public number of the job.
    pub(super) job: u128,
    /// Whether the rank knows a secret of the job.
    pub(super) has_secret: bool,
    /// Whether the rank encrypts what follows the coordinator's challenge. Both ends must.
    pub(super) is_encrypted: bool,
    pub(super) nonce: Nonce,
    pub(super) header: HelloHeader,
}

/// The part of a hello that depends on the release.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloParams {
    /// Settings that must be equal on all ranks, with their values.
    pub(super) settings: Vec<(String, String)>,
    /// Time that is left until the rank gives up the rendezvous.
    pub(super) join_timeout: Duration,
    /// How long the rank waits for each later exchange.
    pub(super) exchange_timeout: Duration,
    /// Interval between the rank's heartbeats.
    pub(super) heartbeat: Duration,
    /// Where this rank's process runs a coordinator that can take the world over; empty if it runs none.
    pub(super) successor: Vec<SocketAddr>,
}

impl HelloParams {
    /// Limits the durations: the wire can carry values that overflow an `Instant`.
    fn bounded(self) -> Self {
        const LONGEST: Duration = Duration::from_secs(1 << 32);
        Self {
            settings: self.settings,
            join_timeout: self.join_timeout.min(LONGEST),
            exchange_timeout: self.exchange_timeout.min(LONGEST),
            heartbeat: self.heartbeat.clamp(Duration::from_millis(1), LONGEST),
            successor: self.successor,
        }
    }
}

impl HelloParams {
    /// Decodes the parameters in the proof of a rank of this release. `None` if they are malformed.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        Some(decode::<Self>(bytes)?.bounded())
    }
}

/// What a rank that has proved that it belongs to the job says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) header: HelloHeader,
    /// `None` if the sender runs another release, whose parameters cannot be decoded.
    pub(super) params: Option<HelloParams>,
}

/// What a rank sends to its coordinator after the handshake.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToCoordinator {
    /// Periodic sign of life, with the rank's call state.
    Heartbeat(CallState),
    /// The rank's part of exchange `number`, counted from 1. `label` names the exchange in messages.
    Gather { number: u64, label: String, part: Vec<u8> },
    /// The rank's call failed, possibly because `suspect` failed.
    Report { error: Error, suspect: Option<Rank>, state: CallState },
    /// The rank aborts the communicator.
    Abort { reason: String },
    /// The rank leaves without an error.
    Goodbye(CallState),
    /// The rank leaves because it heard nothing from the coordinator for this time.
    GaveUp { silent: Duration },
}

/// What a coordinator sends to a rank. The first variant keeps its position in all wire versions, because ranks of
/// other ones decode it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToRank {
    /// The rank is not admitted, for this reason. It concerns this rank alone.
    Refused(Error),
    /// The rank must prove that it belongs to the job, with this number.
    Challenge(Nonce),
    /// The rank belongs to the job, and so does the coordinator, as this code proves. The rank must wait for the others.
    HelloAck(AuthenticationCode),
    /// The world failed, for this reason. It is the same on all ranks.
    RootCause(Error),
    /// All ranks have joined. `host` describes the process that the coordinator runs in.
    Welcome { host: String },
    /// All ranks' parts of exchange `number`, in rank order.
    Gathered { number: u64, parts: Vec<Vec<u8>> },
    /// Answers a heartbeat.
    HeartbeatAck,
    /// Requests a heartbeat at once.
    RequestState,
    /// From now on the coordinator may close the connection at any time, which is not a failure.
    Closing,
    /// Number of the attempt at a rendezvous that this coordinator serves. Precedes its other answers to a rank.
    Attempt(u64),
    /// Join at one of these addresses instead, with the same secret: rank 0 takes the world over.
    Moved(Vec<SocketAddr>),
    /// No rendezvous is in progress here, for this reason; one may begin later.
    TryAgain(String),
    /// A rank has left after it had finished `finished` calls, fewer than each rank that left before it.
    Left { rank: Rank, finished: u64 },
    /// Answers a hello whose purpose is [`Purpose::Status`].
    Status(WorldStatus),
}

/// Encodes a frame, with its length in front.
///
/// # Errors
/// `Internal` if the frame is longer than [`FRAME_LIMIT`]; senders check their input against it.
pub(super) fn encode(frame: &impl serde::Serialize) -> Result<Bytes> {
    frame_of(encode_to(frame, vec![0; 4])?)
}

/// Encodes a value without its length.
///
/// # Errors
/// `Internal` if it cannot be encoded.
pub(super) fn encode_value(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    encode_to(value, Vec::new())
}

fn encode_to(value: &impl serde::Serialize, bytes: Vec<u8>) -> Result<Vec<u8>> {
    postcard::to_extend(value, bytes)
        .map_err(|cause| Error::internal(format!("cannot encode a frame: {cause}")))
}

/// Makes a frame of bytes that begin with room for its length, 4 bytes.
///
/// # Errors
/// `Internal` if the frame is longer than [`FRAME_LIMIT`].
pub(super) fn frame_of(mut bytes: Vec<u8>) -> Result<Bytes> {
    let length = bytes.len() - 4;
    if length > FRAME_LIMIT {
        return Err(Error::internal(format!("cannot encode a frame: {length} bytes are too many")));
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes.into())
}

/// Decodes a frame. `None` if it is malformed or has trailing bytes.
pub(super) fn decode<'a, T: serde::Deserialize<'a>>(frame: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(frame) {
        Ok((value, [])) => Some(value),
        _ => None,
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

    /// The next frame, if it is complete. Frames longer than `limit` bytes are malformed. After an error every call returns
    /// it, and no bytes are kept.
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
impl HelloParams {
    /// Parameters for tests.
    pub(super) fn example() -> Self {
        Self {
            settings: vec![("A".to_owned(), "1".to_owned())],
            join_timeout: Duration::from_secs(1),
            exchange_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(500),
            successor: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn opening() -> Opening {
        let header = HelloHeader {
            version: VERSION.to_owned(),
            rank: 1,
            world: 2,
            process: Process::current(),
            purpose: Purpose::Join,
        };
        Opening { job: 7, has_secret: true, is_encrypted: false, nonce: [5; 16], header }
    }

    #[test]
    fn decodes_frames_however_the_stream_is_chunked() {
        let mut stream = Preamble::encode().to_vec();
        stream.extend_from_slice(&encode(&opening()).expect("short"));
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
            assert_eq!(decode::<Opening>(first), Some(opening()));
            assert_eq!(decode::<ToCoordinator>(second), Some(beat.clone()));
        }
    }

    #[test]
    fn other_wire_versions_and_byte_orders_are_named() {
        let native = Preamble::BYTE_ORDER_MARK.to_ne_bytes();
        let swapped = Preamble::BYTE_ORDER_MARK.swap_bytes().to_ne_bytes();
        let theirs = if cfg!(target_endian = "little") { "is big-endian" } else { "is little-endian" };
        for (mark, version, expected) in [
            (native, 2, Some("speaks wire version 2, and this coordinator speaks 3")),
            (native, 2 << 24, Some("speaks wire version 33554432, and this coordinator speaks 3")),
            // The version of a big-endian build is little-endian, too; its mark is not.
            (swapped, 3, Some(theirs)),
            // The first frame of a release before wire version 2.
            ([96, 0, 0, 0], 5, Some("speaks a wire version before 2, and this coordinator speaks 3")),
        ] {
            let mut decoder = FrameDecoder::new(true);
            decoder.append(&Preamble::with(mark, version));
            let text = decoder.next(OPENING_LIMIT).expect_err("refused").describe();
            match (&text, expected) {
                (Some(text), Some(expected)) => assert!(text.starts_with(expected), "{text}"),
                _ => panic!("{text:?} instead of {expected:?}"),
            }
        }
    }

    #[test]
    fn limits_durations_from_the_wire() {
        let forged =
            HelloParams { join_timeout: Duration::MAX, heartbeat: Duration::ZERO, ..HelloParams::example() };
        let params = HelloParams::decode(&encode_value(&forged).expect("short")).expect("params");
        assert!(params.join_timeout < Duration::MAX && params.heartbeat > Duration::ZERO);
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

    #[test]
    fn an_opening_fits_its_limit() {
        let mut opening = opening();
        // The longest host name of Linux.
        opening.header.process.host = "h".repeat(64);
        opening.header.version = "1".repeat(100);
        assert!(encode_value(&opening).expect("short").len() <= OPENING_LIMIT / 2);
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

        #[test]
        fn parsers_accept_damaged_frames_without_panicking(at: usize, byte: u8, cut: usize) {
            for mut frame in [encode_value(&opening()).expect("short"), encode_value(&HelloParams::example()).expect("short")] {
                let length = frame.len();
                frame[at % length] = byte;
                frame.truncate(cut % (length + 1));
                let _ = decode::<Opening>(&frame);
                let _ = HelloParams::decode(&frame);
            }
        }
    }
}
