//! Frames: what ranks and their coordinator say to each other, and how it is cut out of a stream of bytes.
//!
//! Owns the control protocol's words and their bounds. Must not know sockets or what follows from a frame.
//!
//! A frame is its length (four bytes, little-endian) and that many bytes of postcard. A rank's first bytes are
//! the magic word; its first frame is a [`Hello`], whose beginning never changes between releases, so that a
//! rank of another one is refused in words.

use super::call_state::CallState;
use super::process::Process;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::sync::Arc;
use std::time::Duration;

/// The first bytes of every rank.
pub(super) const MAGIC: [u8; 8] = *b"flexring";
/// This release, as ranks compare it.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The longest first frame of somebody who is not trusted yet, in bytes.
pub(super) const HELLO_LIMIT: usize = 64 << 10;
/// The longest later frame, in bytes.
pub(super) const FRAME_LIMIT: usize = 16 << 20;

/// Encoded bytes, shared by all connections that they are sent on.
pub(super) type Bytes = Arc<[u8]>;

/// Who is at the door. Never changes between releases: fields may only be appended to [`HelloParams`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloHeader {
    pub(super) version: String,
    pub(super) token: u128,
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) process: Process,
}

/// What a caller of this release adds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloParams {
    /// The settings that must be equal everywhere, with their values.
    pub(super) settings: Vec<(String, String)>,
    /// How much longer the caller waits for its world.
    pub(super) join_timeout: Duration,
    /// How long the caller waits for any later exchange.
    pub(super) exchange_timeout: Duration,
    /// How often the caller will say that it lives.
    pub(super) heartbeat: Duration,
}

impl HelloParams {
    /// The same, with durations that can be reckoned with: the wire can carry ones that no clock can.
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

/// A rank's first frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) header: HelloHeader,
    /// `None` if the caller is of another release, whose terms cannot be read.
    pub(super) params: Option<HelloParams>,
}

impl Hello {
    /// The magic word and the frame.
    pub(super) fn encode(header: &HelloHeader, params: &HelloParams) -> Result<Bytes> {
        let frame = encode(&(header, params))?;
        Ok(MAGIC.iter().chain(frame.iter()).copied().collect())
    }

    /// `None` if these bytes are no hello.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (header, rest): (HelloHeader, _) = postcard::take_from_bytes(frame).ok()?;
        let params =
            if header.version == VERSION { Some(decode::<HelloParams>(rest)?.bounded()) } else { None };
        Some(Self { header, params })
    }
}

/// What a rank says to its coordinator after the hello.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToCoordinator {
    /// I live, and this is what I do.
    Heartbeat(CallState),
    /// My part of the `number`-th exchange.
    Gather { number: u64, label: String, part: Vec<u8> },
    /// My call failed; I suspect that it was because of somebody else.
    Report { error: Error, suspect: Option<Rank>, state: CallState },
    /// I give up.
    Abort { reason: String },
    /// I leave in peace.
    Goodbye(CallState),
}

/// What a coordinator says to a rank. The first two keep their places for ever: other releases must read them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToRank {
    /// It is over, for this reason.
    RootCause(Error),
    /// You belong to another job.
    WrongJob(Error),
    /// Your hello was read; wait for the others.
    HelloAck,
    /// All have come. The coordinator lives in this process.
    Welcome { host: String },
    /// Everybody's part of the `number`-th exchange.
    Gathered { number: u64, parts: Vec<Vec<u8>> },
    /// I heard you.
    HeartbeatAck,
    /// Say at once what you do.
    RequestState,
    /// From now on I may go away at any time; it means nothing.
    Closing,
}

/// A frame's bytes, with its length before it.
///
/// # Errors
/// `Internal` if it is too long, which its makers see to.
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

/// What a frame says. `None` if it is no such frame, or goes on after its end.
pub(super) fn decode<'a, T: serde::Deserialize<'a>>(frame: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(frame) {
        Ok((value, [])) => Some(value),
        _ => None,
    }
}

/// Cuts frames out of a stream.
#[derive(Debug)]
pub(super) struct FrameDecoder {
    bytes: Vec<u8>,
    magic: bool,
}

/// The stream is not one of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl FrameDecoder {
    /// For a stream that begins with the magic word, or with a frame.
    pub(super) fn new(magic: bool) -> Self {
        Self { bytes: Vec::new(), magic }
    }

    /// Appends what was read. Frames must be taken out between appends, so that no more than one that is
    /// incomplete is ever held.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame of at most `limit` bytes, if it is complete.
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
    fn frames_are_cut_wherever_the_stream_breaks() {
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
    fn a_caller_of_another_release_is_understood_as_far_as_its_name() {
        let (header, _) = hello("99.0");
        let mut frame = postcard::to_stdvec(&header).expect("short");
        frame.extend_from_slice(b"whatever that release says next");
        let hello = Hello::decode(&frame).expect("a hello");
        assert_eq!((hello.header, hello.params), (header, None));
    }

    #[test]
    fn durations_that_no_clock_can_count_are_cut() {
        let (header, params) = hello(VERSION);
        let forged = HelloParams { join_timeout: Duration::MAX, heartbeat: Duration::ZERO, ..params };
        let frame = postcard::to_stdvec(&(header, forged)).expect("short");
        let params = Hello::decode(&frame).and_then(|hello| hello.params).expect("params");
        assert!(params.join_timeout < Duration::MAX && params.heartbeat > Duration::ZERO);
    }

    #[test]
    fn what_is_too_long_or_not_ours_is_refused_at_once() {
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
        fn no_bytes_make_the_parsers_panic(magic: bool, pieces: Vec<Vec<u8>>, frame: Vec<u8>) {
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
        fn no_damaged_frame_makes_the_parsers_panic(at: usize, byte: u8, cut: usize) {
            let (header, params) = hello(VERSION);
            let mut frame = postcard::to_stdvec(&(header, params)).expect("short");
            let length = frame.len();
            frame[at % length] = byte;
            frame.truncate(cut % (length + 1));
            let _ = Hello::decode(&frame);
        }
    }
}
