//! The control protocol: the messages between ranks and their coordinator, and their frames.
//!
//! Owns the message types, their encoding and the limits on their length. Must not know sockets, or what a
//! message leads to.
//!
//! A frame is its length (four bytes, little-endian) and that many bytes of postcard. A rank's stream begins
//! with the magic word; its first frame is a [`Hello`]. The beginning of a hello never changes between
//! releases, so that a rank of another release still gets a readable error.

use super::call_state::CallState;
use super::process::Process;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;
use std::time::Duration;

/// The first bytes that a rank sends.
pub(super) const MAGIC: [u8; 8] = *b"flexring";
/// The release of this build. All ranks of a world must run the same one.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Maximum length of a hello, in bytes: the sender is not authenticated yet.
pub(super) const HELLO_LIMIT: usize = 64 << 10;
/// Maximum length of any later frame, in bytes.
pub(super) const FRAME_LIMIT: usize = 16 << 20;

/// An encoded frame, shared by all connections that send it.
pub(super) type Bytes = Arc<[u8]>;

/// The part of a hello that never changes between releases. Fields may only be appended to [`HelloParams`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloHeader {
    pub(super) version: String,
    pub(super) token: u128,
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) process: Process,
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
        }
    }
}

/// The first frame of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) header: HelloHeader,
    /// `None` if the sender runs another release, whose parameters cannot be decoded.
    pub(super) params: Option<HelloParams>,
}

impl Hello {
    /// Encodes the magic word and the frame.
    pub(super) fn encode(header: &HelloHeader, params: &HelloParams) -> Result<Bytes> {
        let frame = encode(&(header, params))?;
        Ok(MAGIC.iter().chain(frame.iter()).copied().collect())
    }

    /// Decodes a hello. `None` if the bytes are malformed.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (header, rest): (HelloHeader, _) = postcard::take_from_bytes(frame).ok()?;
        let params =
            if header.version == VERSION { Some(decode::<HelloParams>(rest)?.bounded()) } else { None };
        Some(Self { header, params })
    }
}

/// What a rank sends to its coordinator after the hello.
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
}

/// What a coordinator sends to a rank. The first two variants keep their positions in all releases, because
/// other releases decode them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToRank {
    /// The world failed, for this reason. It is the same on all ranks.
    RootCause(Error),
    /// The hello carried another job's token.
    WrongJob(Error),
    /// The hello was accepted; the rank must wait for the others.
    HelloAck,
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
}

/// Encodes a frame, with its length in front.
///
/// # Errors
/// `Internal` if the frame is longer than [`FRAME_LIMIT`]; senders check their input against it.
pub(super) fn encode(frame: &impl serde::Serialize) -> Result<Bytes> {
    let refuse = |why: String| Error::internal(format!("cannot encode a frame: {why}"));
    let mut bytes = postcard::to_extend(frame, vec![0; 4]).map_err(|cause| refuse(cause.to_string()))?;
    let length = bytes.len() - 4;
    if length > FRAME_LIMIT {
        return Err(refuse(format!("{length} bytes are too many")));
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
    magic: bool,
}

/// The stream does not consist of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl FrameDecoder {
    /// A decoder for a stream that begins with the magic word if `magic`, else with a frame.
    pub(super) fn new(magic: bool) -> Self {
        Self { bytes: Vec::new(), magic }
    }

    /// Appends received bytes. Callers take all complete frames out between two appends, so at most one
    /// incomplete frame is buffered.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, if it is complete. Frames longer than `limit` bytes are malformed.
    pub(super) fn next(&mut self, limit: usize) -> std::result::Result<Option<Vec<u8>>, Malformed> {
        if self.magic {
            let known = self.bytes.len().min(MAGIC.len());
            if self.bytes[..known] != MAGIC[..known] {
                return Err(Malformed);
            }
            if known < MAGIC.len() {
                return Ok(None);
            }
            self.bytes.drain(..known);
            self.magic = false;
        }
        let Some((header, rest)) = self.bytes.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > limit {
            return Err(Malformed);
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
    use super::*;
    use proptest::prelude::*;

    fn hello(version: &str) -> (HelloHeader, HelloParams) {
        let header = HelloHeader {
            version: version.to_owned(),
            token: 7,
            rank: 1,
            world: 2,
            process: Process::current(),
        };
        let params = HelloParams {
            settings: vec![("A".to_owned(), "1".to_owned())],
            join_timeout: Duration::from_secs(1),
            exchange_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(500),
        };
        (header, params)
    }

    #[test]
    fn decodes_frames_however_the_stream_is_chunked() {
        let (header, params) = hello(VERSION);
        let mut stream = Hello::encode(&header, &params).expect("short").to_vec();
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
            assert_eq!(
                Hello::decode(first),
                Some(Hello { header: header.clone(), params: Some(params.clone()) })
            );
            assert_eq!(decode::<ToCoordinator>(second), Some(beat.clone()));
        }
    }

    #[test]
    fn decodes_the_header_of_another_release() {
        let (header, _) = hello("99.0");
        let mut frame = postcard::to_stdvec(&header).expect("short");
        frame.extend_from_slice(b"parameters of that release");
        let hello = Hello::decode(&frame).expect("a valid hello");
        assert_eq!((hello.header, hello.params), (header, None));
    }

    #[test]
    fn limits_durations_from_the_wire() {
        let (header, params) = hello(VERSION);
        let forged = HelloParams { join_timeout: Duration::MAX, heartbeat: Duration::ZERO, ..params };
        let frame = postcard::to_stdvec(&(header, forged)).expect("short");
        let params = Hello::decode(&frame).and_then(|hello| hello.params).expect("params");
        assert!(params.join_timeout < Duration::MAX && params.heartbeat > Duration::ZERO);
    }

    #[test]
    fn rejects_oversized_and_foreign_input_at_once() {
        let mut cutter = FrameDecoder::new(true);
        cutter.append(b"GET / HTTP/1.1");
        assert_eq!(cutter.next(HELLO_LIMIT), Err(Malformed));
        let mut cutter = FrameDecoder::new(false);
        cutter.append(&(HELLO_LIMIT as u32 + 1).to_le_bytes());
        assert_eq!(cutter.next(HELLO_LIMIT), Err(Malformed));
        assert_eq!(cutter.next(FRAME_LIMIT), Ok(None));
        assert!(encode(&vec![0u8; FRAME_LIMIT + 1]).is_err());
    }

    proptest! {
        #[test]
        fn parsers_accept_any_bytes_without_panicking(magic: bool, pieces: Vec<Vec<u8>>, frame: Vec<u8>) {
            let mut cutter = FrameDecoder::new(magic);
            for piece in pieces {
                cutter.append(&piece);
                while let Ok(Some(frame)) = cutter.next(HELLO_LIMIT) {
                    let _ = Hello::decode(&frame);
                }
            }
            let _ = Hello::decode(&frame);
            let _ = decode::<ToCoordinator>(&frame);
            let _ = decode::<ToRank>(&frame);
        }

        #[test]
        fn parsers_accept_damaged_frames_without_panicking(at: usize, byte: u8, cut: usize) {
            let (header, params) = hello(VERSION);
            let mut frame = postcard::to_stdvec(&(header, params)).expect("short");
            let length = frame.len();
            frame[at % length] = byte;
            frame.truncate(cut % (length + 1));
            let _ = Hello::decode(&frame);
        }
    }
}
