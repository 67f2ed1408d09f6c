//! The control protocol: the messages between ranks and their coordinator, and their frames.
//!
//! Owns the message types, their encoding and the limits on their length.
//!
//! A rank's stream begins with a preamble (`frame_decoder`); then come frames in both directions. A frame is
//! its length (four bytes, little-endian) and that many bytes of postcard. The first two frames of a rank are
//! its [`Opening`] and its proof, see `handshake`. If the job is encrypted, the mark [`ENCRYPTED`] follows
//! the opening, and then TLS records that contain the frames; the coordinator's records follow its challenge
//! without a mark. The preamble and [`ToRank::Refused`] never change, so that a rank of another wire version
//! gets a readable error.

use super::call_state::CallState;
use super::process::Process;
use super::world_status::WorldStatus;
use crate::config::LONGEST_TIME;
use crate::error::{Error, Result};
use crate::peer_text::PeerText;
use crate::rank::Rank;
use crate::secret::AuthenticationCode;
use serde::de::{SeqAccess, Visitor};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Version of the control protocol. Raise it with every change of what travels on a control connection. It is
/// apart from the release: two releases with one wire version understand each other's errors.
pub(super) const WIRE_VERSION: u32 = 9;
/// The release of this build. All ranks of a world must run the same one, because their plans must be equal.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Maximum length of an opening, in bytes: the sender is not authenticated yet.
pub(super) const OPENING_LIMIT: usize = 1 << 10;
/// Maximum length of a proof with the parameters in it, in bytes: its sender is not authenticated either.
pub(super) const PROOF_LIMIT: usize = 64 << 10;
/// Maximum length of any later frame, in bytes.
pub(super) const FRAME_LIMIT: usize = 16 << 20;
/// Maximum length of the parts of an exchange in one frame, in bytes. The rest of the frame is more than
/// enough for their framing.
pub(super) const PARTS_LIMIT: usize = FRAME_LIMIT / 2;
/// Length of a rank's part of an exchange that is never too long, in bytes, however many ranks there are.
pub(super) const PART_ALLOWANCE: usize = 64 << 10;
/// Maximum length of a rank's part of an exchange in a world of this size, in bytes.
pub(super) fn part_limit(world: usize) -> usize {
    (PARTS_LIMIT / world).max(PART_ALLOWANCE)
}

/// Maximum length of a message from one rank to another, in bytes.
pub(super) const PEER_MESSAGE_LIMIT: usize = 4 << 10;

/// Maximum number of messages to other ranks in one frame, so that a frame of the longest ones fits its
/// limit.
pub(super) const MOST_PEER_MESSAGES: usize = FRAME_LIMIT / 2 / PEER_MESSAGE_LIMIT;
/// Maximum world size. It limits what one hello can make the coordinator count up to.
pub(super) const MAX_WORLD: usize = 1 << 16;

/// Stands in place of a frame's length where the end that connected begins to encrypt.
pub(super) const ENCRYPTED: [u8; 4] = u32::MAX.to_le_bytes();

/// Maximum number of worlds that a rank can open over one connection, besides the one that it has joined.
pub(super) const MAX_SUBWORLDS: usize = 1 << 16;

/// Identifies a world that ranks open over the control connections of another one. Random.
pub(super) type WorldId = u128;

/// A random number that is used once.
pub(super) type Nonce = [u8; 16];

/// An encoded frame, shared by all connections that send it.
pub(super) type Bytes = Arc<[u8]>;

/// What a rank says about itself. All releases with this wire version can decode it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct HelloHeader {
    pub(super) version: PeerText,
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) process: Process,
    pub(super) purpose: Purpose,
}

impl HelloHeader {
    /// That of this process when it connects for this purpose, and not to be a rank.
    pub(super) fn of_no_rank(purpose: Purpose) -> Self {
        Self { version: VERSION.into(), rank: 0, world: 0, process: Process::current(), purpose }
    }

    /// Names the sender in messages.
    pub(super) fn sender(&self) -> String {
        let Self { rank, process, .. } = self;
        match self.purpose {
            Purpose::Join => format!("rank {rank} ({process})"),
            Purpose::Status => format!("the request for the status ({process})"),
            Purpose::WhoListens => format!("rank 0 of a job without a port ({process})"),
        }
    }

    /// What the sender claims, as a verb phrase, before it is authenticated. Contains no text of the sender,
    /// because others see it.
    pub(super) fn claim(&self) -> String {
        match self.purpose {
            Purpose::Join => format!("claims rank {}", self.rank),
            Purpose::Status => "asks for the status".to_owned(),
            Purpose::WhoListens => "needs this port as rank 0 of a job".to_owned(),
        }
    }
}

/// What a connection to a coordinator is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Purpose {
    /// To be this rank.
    Join,
    /// To read the state of the world once. Rank and world of the hello do not matter.
    Status,
    /// To learn which process listens, because rank 0 of a job cannot listen there. Answered by a refusal
    /// that names it, on one node only.
    WhoListens,
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
    /// Why this rank cannot take part, if it cannot: the rendezvous fails for this reason.
    pub(super) failure: Option<Error>,
}

impl HelloParams {
    /// Those of a process that is no rank, and waits so long for an answer.
    pub(super) fn of_no_rank(timeout: Duration, heartbeat: Duration) -> Self {
        Self::of_member(timeout, heartbeat)
    }

    /// Those of a rank of a subworld, whose settings have been compared, and which waits so long for each
    /// exchange.
    pub(super) fn of_member(timeout: Duration, heartbeat: Duration) -> Self {
        Self {
            settings: Vec::new(),
            join_timeout: timeout,
            exchange_timeout: timeout,
            heartbeat,
            successor: Vec::new(),
            failure: None,
        }
    }

    /// Limits the durations.
    fn bounded(self) -> Self {
        Self {
            join_timeout: self.join_timeout.min(LONGEST_TIME),
            exchange_timeout: self.exchange_timeout.min(LONGEST_TIME),
            heartbeat: self.heartbeat.clamp(Duration::from_millis(1), LONGEST_TIME),
            ..self
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
    Gather { number: u64, label: PeerText, part: Vec<u8> },
    /// Messages to other ranks of the world, which the coordinator passes on in their order.
    ToPeers(#[serde(deserialize_with = "at_most::<MOST_PEER_MESSAGES, _, _>")] Vec<(Rank, Vec<u8>)>),
    /// The rank's call failed, possibly because `suspect` failed.
    Report { error: Error, suspect: Option<Rank>, state: CallState },
    /// The rank aborts the communicator.
    Abort { reason: PeerText },
    /// The rank's process is about to end, for this reason: a verb phrase such as `raised an exception`.
    Exit { cause: PeerText },
    /// The rank leaves without an error.
    Goodbye(CallState),
    /// The rank leaves because it heard nothing from the coordinator for this time.
    GaveUp { silent: Duration },
    /// The rank has joined at the coordinator of rank 0, to which the world has moved.
    Moved,
    /// The rank opens this subworld over its connection. `members` are its ranks, as ranks of the world that
    /// the connection was made for. The rank waits so long for the others, and for each later exchange.
    Open {
        world: WorldId,
        #[serde(deserialize_with = "at_most::<MAX_WORLD, _, _>")]
        members: Vec<Rank>,
        timeout: Duration,
    },
    /// A message of a subworld: an encoded [`ToCoordinator`]. It is not a value of that type, so that a
    /// sender cannot nest it.
    InWorld { world: WorldId, message: Vec<u8> },
    /// Periodic sign of life of a rank that has left the world that its connection was made for, and is in
    /// further ones.
    Alive,
}

impl ToCoordinator {
    /// This message, as one of a subworld.
    ///
    /// # Errors
    /// `Internal` if it cannot be encoded.
    pub(super) fn in_world(&self, world: WorldId) -> Result<Self> {
        Ok(Self::InWorld { world, message: encode_value(self)? })
    }
}

/// What a coordinator sends to a rank. The first variant keeps its position in all wire versions, because
/// ranks of other ones decode it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ToRank {
    /// The rank is not admitted, for this reason. It concerns this rank alone.
    Refused(#[serde(deserialize_with = "refusal")] Error),
    /// The rank must prove that it belongs to the job, with this number.
    Challenge(Nonce),
    /// The rank belongs to the job, and so does the coordinator, as this code proves. The rank must wait for
    /// the others.
    HelloAck(AuthenticationCode),
    /// The world failed, for this reason. It is the same on all ranks.
    RootCause(Error),
    /// All ranks have joined. `host` describes the process that the coordinator runs in; `ranks` are those of
    /// that process.
    Welcome { host: PeerText, ranks: Vec<Rank> },
    /// The next parts of exchange `number`, in rank order. The parts of all ranks may take several messages.
    Gathered {
        number: u64,
        #[serde(deserialize_with = "at_most::<MAX_WORLD, _, _>")]
        parts: Vec<Vec<u8>>,
    },
    /// Answers a heartbeat or [`ToCoordinator::Alive`].
    HeartbeatAck,
    /// Requests a heartbeat at once.
    RequestState,
    /// This process causes the failure that the next message names or, before [`ToRank::Closing`], the one
    /// that the end of the coordinator may become. Ranks of its machine wait for its end before they show the
    /// failure: longer if it has said that it ends.
    AwaitExit { process: Process, ends: bool },
    /// From now on the coordinator may close the connection at any time, which is not a failure.
    Closing,
    /// Number of the attempt at a rendezvous that this coordinator serves. Precedes its other answers to a
    /// rank.
    Attempt(u64),
    /// Join at one of these addresses instead, with the same secret: rank 0 takes the world over.
    Moved(Vec<SocketAddr>),
    /// No rendezvous is in progress here, for this reason; one may begin later.
    TryAgain(PeerText),
    /// A rank has left after it had finished `finished` calls, fewer than each rank that left before it.
    Left { rank: Rank, finished: u64 },
    /// Answers a hello whose purpose is [`Purpose::Status`].
    Status(WorldStatus),
    /// A message of a subworld: an encoded [`ToRank`]. It is not a value of that type, so that a sender
    /// cannot nest it.
    InWorld { world: WorldId, message: Vec<u8> },
    /// Answers the goodbye of a rank whose connection stays open for its other worlds. All ranks concerned
    /// are notified.
    LeaveAck,
    /// A message of rank `from`.
    FromPeer { from: Rank, message: Vec<u8> },
    /// What the rank logs while it waits for others: which ones, or who was refused.
    Notice(PeerText),
}

impl ToRank {
    /// This message, as one of a subworld.
    ///
    /// # Errors
    /// `Internal` if it cannot be encoded.
    pub(super) fn in_world(&self, world: WorldId) -> Result<Self> {
        Ok(Self::InWorld { world, message: encode_value(self)? })
    }
}

/// Decodes a list of at most `MOST` elements. Short elements take more memory than bytes in a frame.
fn at_most<'de, const MOST: usize, T, D>(deserializer: D) -> std::result::Result<Vec<T>, D::Error>
where
    T: serde::Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    struct ListVisitor<const MOST: usize, T>(PhantomData<T>);

    impl<'de, const MOST: usize, T: serde::Deserialize<'de>> Visitor<'de> for ListVisitor<MOST, T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {MOST} elements")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> std::result::Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(element) = elements.next_element()? {
                if list.len() == MOST {
                    return Err(serde::de::Error::invalid_length(MOST + 1, &self));
                }
                list.push(element);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(ListVisitor::<MOST, T>(PhantomData))
}

/// Decodes the error of a refusal, whose sender is not authenticated.
fn refusal<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Error, D::Error> {
    serde::Deserialize::deserialize(deserializer).map(Error::in_one_line)
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

#[cfg(test)]
impl Opening {
    /// An opening for tests.
    pub(super) fn example() -> Self {
        let header = HelloHeader { rank: 1, world: 2, ..HelloHeader::of_no_rank(Purpose::Join) };
        Self { job: 7, has_secret: true, is_encrypted: false, nonce: [5; 16], header }
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
            failure: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::world_status::{RankActivity, RankReport};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn limits_durations_from_the_wire() {
        let forged =
            HelloParams { join_timeout: Duration::MAX, heartbeat: Duration::ZERO, ..HelloParams::example() };
        let params = HelloParams::decode(&encode_value(&forged).expect("short")).expect("params");
        assert!(params.join_timeout < Duration::MAX && params.heartbeat > Duration::ZERO);
    }

    /// The message with `marker` in its texts, decoded after an escape sequence has taken its place.
    fn with_escapes<T>(message: &T, marker: &str) -> T
    where
        T: serde::Serialize + for<'a> serde::Deserialize<'a>,
    {
        const ESCAPE: &[u8] = b"\x1b[2J\n\r\0x";
        let mut bytes = encode_value(message).expect("short");
        let places: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(marker.as_bytes())).collect();
        assert!(!places.is_empty());
        for at in places {
            bytes[at..at + ESCAPE.len()].copy_from_slice(ESCAPE);
        }
        decode(&bytes).expect("still a message")
    }

    #[test]
    fn no_text_of_a_message_keeps_escape_sequences() {
        const MARKER: &str = "MMMMMMMM";
        let error = || Error::aborted(MARKER);
        let row =
            RankReport { call: Some(MARKER.to_owned()), ..RankReport::new(1, MARKER, 7, RankActivity::Idle) };
        let status = WorldStatus::new(vec![row.clone()], Some(error()))
            .with_further([WorldStatus::new(vec![row], Some(error()))].into_iter());
        let safe = |bytes: Vec<u8>| {
            assert!(!bytes.contains(&0x1b) && !bytes.windows(8).any(|part| part == MARKER.as_bytes()));
            bytes.windows(3).any(|part| part == b"?[2")
        };
        for message in [
            ToRank::Refused(error()),
            ToRank::RootCause(error()),
            ToRank::TryAgain(MARKER.into()),
            ToRank::Welcome { host: MARKER.into(), ranks: vec![0] },
            ToRank::Status(status),
        ] {
            assert!(safe(encode_value(&with_escapes(&message, MARKER)).expect("short")), "{message:?}");
        }
        let state = CallState::Idle { finished: 0 };
        for message in [
            ToCoordinator::Gather { number: 1, label: MARKER.into(), part: Vec::new() },
            ToCoordinator::Report { error: error(), suspect: None, state },
            ToCoordinator::Abort { reason: MARKER.into() },
        ] {
            assert!(safe(encode_value(&with_escapes(&message, MARKER)).expect("short")), "{message:?}");
        }
        let mut opening = Opening::example();
        opening.header.version = MARKER.into();
        opening.header.process.host = MARKER.into();
        assert!(safe(encode_value(&with_escapes(&opening, MARKER)).expect("short")));
    }

    #[test]
    fn an_opening_fits_its_limit() {
        let mut opening = Opening::example();
        // The longest host name of Linux.
        opening.header.process.host = (&*"h".repeat(64)).into();
        opening.header.version = (&*"1".repeat(100)).into();
        assert!(encode_value(&opening).expect("short").len() <= OPENING_LIMIT / 2);
    }

    proptest! {
        #[test]
        fn parsers_accept_damaged_frames_without_panicking(at: usize, byte: u8, cut: usize) {
            for mut frame in [encode_value(&Opening::example()).expect("short"), encode_value(&HelloParams::example()).expect("short")] {
                let length = frame.len();
                frame[at % length] = byte;
                frame.truncate(cut % (length + 1));
                let _ = decode::<Opening>(&frame);
                let _ = HelloParams::decode(&frame);
            }
        }
    }
}
