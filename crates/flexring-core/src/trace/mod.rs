//! The timeline of a rank: what it did when, as a file of Chrome trace events, which Perfetto shows.
//!
//! Owns the recording of spans while calls run, the clocks of ranks, and the form of the files. Recording
//! does no I/O and, once its memory exists, allocates nothing: spans go to a ring of bounded length, and the
//! file is written when the communicator ends or fails. Must not know programs or transports: steps,
//! sub-chunks and tickets are numbers here. docs/tracing.md is for users.
//!
//! | file | owns |
//! |---|---|
//! | `recorder` | the spans of one rank while it runs |
//! | `recording` | what it has recorded |
//! | `ring` | the bounded memory of that |
//! | `clock` | the clock, and its offset from that of rank 0 |
//! | `registrations` | registrations of memory, which transports report |
//! | `events` | spans as trace events: tracks, lanes and counters |
//! | `file` | the JSON file of a rank, and its name |
//! | `merge` | the files of a job as one, and what they say together |

mod clock;
mod events;
mod file;
pub mod merge;
mod recorder;
mod recording;
mod registrations;
mod ring;

pub use clock::{ClockAlignment, ClockSample, clock_name, now};
pub use events::{EventArguments, TraceEvent};
pub use file::{TraceFile, TracePath};
pub use recorder::{JobKind, Recorder};
pub use recording::{MessagePart, RecordedCall, RecordedSpan, SpanActivity, TraceOrigin};
pub use registrations::timed_registration;

/// The recorder of a rank, if it records. Without one every method is a single branch.
#[derive(Debug, Default)]
pub struct Trace(Option<Box<Recorder>>);

impl Trace {
    /// Records with `recorder`, if there is one.
    #[must_use]
    pub fn new(recorder: Option<Recorder>) -> Self {
        Self(recorder.map(Box::new))
    }

    /// The recorder, if there is one.
    #[inline]
    pub fn recorder(&mut self) -> Option<&mut Recorder> {
        self.0.as_deref_mut()
    }

    /// The rank waits from now on, unless it does already.
    #[inline]
    pub fn idle(&mut self) {
        if let Some(recorder) = self.recorder() {
            recorder.idle();
        }
    }

    /// The rank waits no longer.
    #[inline]
    pub fn progressed(&mut self) {
        if let Some(recorder) = self.recorder() {
            recorder.progressed();
        }
    }

    /// The send of the next message to `peer` begins.
    #[inline]
    pub fn send_begins(&mut self, peer: usize, part: MessagePart) {
        if let Some(recorder) = self.recorder() {
            recorder.send_begins(peer, part);
        }
    }

    /// The send of the oldest message in flight to `peer` is complete.
    #[inline]
    pub fn send_ends(&mut self, peer: usize) {
        if let Some(recorder) = self.recorder() {
            recorder.send_ends(peer);
        }
    }

    /// A receive of the next message of `peer` is posted, or it can be read in place.
    #[inline]
    pub fn receive_begins(&mut self, peer: usize, part: MessagePart) {
        if let Some(recorder) = self.recorder() {
            recorder.receive_begins(peer, part);
        }
    }

    /// The oldest receive from `peer` is complete, or this rank reads the message no longer.
    #[inline]
    pub fn receive_ends(&mut self, peer: usize) {
        if let Some(recorder) = self.recorder() {
            recorder.receive_ends(peer);
        }
    }

    /// A job of a device begins.
    #[inline]
    pub fn job_begins(&mut self, kind: JobKind, ticket: u64, part: MessagePart) {
        if let Some(recorder) = self.recorder() {
            recorder.job_begins(kind, ticket, part);
        }
    }

    /// The job with this ticket is done.
    #[inline]
    pub fn job_ends(&mut self, ticket: u64) {
        if let Some(recorder) = self.recorder() {
            recorder.job_ends(ticket);
        }
    }
}
