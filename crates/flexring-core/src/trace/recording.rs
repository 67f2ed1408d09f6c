//! What a rank has recorded: spans and calls that are over, and where they come from.
//!
//! Owns the form in which they are kept while calls run.

use super::clock::ClockAlignment;
use super::ring::NewestEntries;
use crate::call::Call;

/// Where a rank's timeline comes from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TraceOrigin {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
    /// The host.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// Distinguishes the communicators of a job; empty for the first one.
    pub communicator: String,
}

/// The part of a call that a message or a job is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagePart {
    /// The step of the program, or [`OUTSIDE`](Self::OUTSIDE).
    pub step: u32,
    /// The sub-chunk within the step.
    pub sub: u64,
    /// Its length in bytes.
    pub bytes: usize,
}

impl MessagePart {
    /// The step of what belongs to no step of a program: headers, and copies around a call.
    pub const OUTSIDE: u32 = u32::MAX;

    /// A part that belongs to no step, of this length.
    #[must_use]
    pub fn outside(bytes: usize) -> Self {
        Self { step: Self::OUTSIDE, sub: 0, bytes }
    }
}

/// What a rank does during a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanActivity {
    /// A message to a peer is in flight.
    Send {
        /// The receiver.
        peer: u32,
    },
    /// A message of a peer is awaited or used.
    Receive {
        /// The sender.
        peer: u32,
    },
    /// It copies one operand.
    Copy,
    /// It adds operands.
    Reduce,
    /// It has nothing to do.
    Wait,
    /// It registers memory.
    Register,
}

/// A span that is over. Times are nanoseconds of this rank's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedSpan {
    /// What the rank does.
    pub activity: SpanActivity,
    /// When it begins.
    pub start: u64,
    /// When it ends.
    pub end: u64,
    /// What it is about.
    pub part: MessagePart,
    /// Sends and receives: number of the message on its link and direction, from 0. The same at both ends.
    pub message: u64,
    /// Sequence number of the call.
    pub call: u64,
    /// Whether it ended because the call failed.
    pub unfinished: bool,
}

/// A call that is over.
#[derive(Clone, Copy, Debug)]
pub struct RecordedCall {
    /// What was called.
    pub call: Call,
    /// When it began.
    pub start: u64,
    /// When it returned.
    pub end: u64,
    /// Whether it returned an error.
    pub failed: bool,
}

/// Spans for each call of which the ring keeps one.
const SPANS_PER_CALL: usize = 8;

/// The newest spans and calls of one rank.
#[derive(Debug)]
pub(super) struct Recording {
    pub origin: TraceOrigin,
    pub alignment: ClockAlignment,
    pub spans: NewestEntries<RecordedSpan>,
    pub calls: NewestEntries<RecordedCall>,
}

impl Recording {
    /// A recording of at most `bound` spans.
    pub(super) fn new(origin: TraceOrigin, bound: usize) -> Self {
        let (spans, calls) = (NewestEntries::new(bound), NewestEntries::new(bound / SPANS_PER_CALL));
        Self { origin, alignment: ClockAlignment::default(), spans, calls }
    }
}
