//! The spans of one rank while it runs its calls.
//!
//! Owns what is open (messages in flight, jobs, a wait), and adds what is over to the recording. A thread
//! runs one call at a time, so spans need no lock.

use super::clock::{ClockAlignment, now};
use super::file::{TraceFile, TracePath};
use super::recording::{MessagePart, RecordedCall, RecordedSpan, Recording, SpanActivity, TraceOrigin};
use super::registrations::{self, TimedRegistration};
use crate::call::Call;
use crate::error::Result;
use std::collections::VecDeque;
use std::fs::File;

/// What a device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// It copies one operand.
    Copy,
    /// It adds several operands, or divides.
    Reduce,
}

impl JobKind {
    /// A job with this many operands.
    #[must_use]
    pub fn of(operands: usize, divides: bool) -> Self {
        if operands > 1 || divides { Self::Reduce } else { Self::Copy }
    }
}

/// A message or a job that is not complete.
#[derive(Clone, Copy, Debug)]
struct OpenSpan {
    start: u64,
    part: MessagePart,
    /// The message's number, or the job's ticket.
    number: u64,
    activity: SpanActivity,
}

/// The messages in flight between this rank and one peer, oldest first, and how many there were so far.
#[derive(Debug, Default)]
struct LinkRecord {
    sends: VecDeque<OpenSpan>,
    receives: VecDeque<OpenSpan>,
    sent: u64,
    received: u64,
}

/// Records the spans of one rank.
#[derive(Debug)]
pub struct Recorder {
    recording: Recording,
    path: TracePath,
    /// `None` once it was written.
    file: Option<File>,
    links: Vec<LinkRecord>,
    jobs: Vec<OpenSpan>,
    running: Option<(Call, u64)>,
    waiting_since: Option<u64>,
    /// Memory for the registrations of one call.
    registrations: Vec<TimedRegistration>,
}

impl Recorder {
    /// A recorder of at most `bound` spans, whose file will be at `path`. Creates the file, so that an
    /// unusable path is known before the first call.
    ///
    /// # Errors
    /// `InvalidSetting` if the file cannot be created.
    pub fn new(path: TracePath, origin: TraceOrigin, bound: usize) -> Result<Self> {
        let file = path.create()?;
        Ok(Self {
            path,
            file: Some(file),
            links: (0..origin.world).map(|_| LinkRecord::default()).collect(),
            jobs: Vec::new(),
            running: None,
            waiting_since: None,
            registrations: Vec::new(),
            recording: Recording::new(origin, bound),
        })
    }

    /// Forgets all that was recorded so far, and shows all further times by the clock of rank 0.
    pub fn align(&mut self, alignment: ClockAlignment) {
        self.recording.alignment = alignment;
        self.recording.spans.clear();
        self.recording.calls.clear();
    }

    /// A call begins.
    pub fn call_begins(&mut self, call: &Call) {
        registrations::begin(std::mem::take(&mut self.registrations));
        self.running = Some((*call, now()));
    }

    /// The call is over. What it has left open will never be complete.
    pub fn call_ends(&mut self, failed: bool) {
        let end = now();
        self.progressed();
        self.take_registrations();
        self.registrations = registrations::end();
        if failed {
            let links = self.links.iter_mut();
            let messages = links.flat_map(|link| link.sends.drain(..).chain(link.receives.drain(..)));
            let open: Vec<OpenSpan> = messages.chain(self.jobs.drain(..)).collect();
            open.into_iter().for_each(|span| self.close(span, end, true));
        }
        if let Some((call, start)) = self.running.take() {
            self.recording.calls.push(RecordedCall { call, start, end, failed });
        }
    }

    /// The rank waits from now on, unless it does already.
    pub fn idle(&mut self) {
        if self.waiting_since.is_none() {
            self.take_registrations();
            self.waiting_since = Some(now());
        }
    }

    /// The rank waits no longer.
    pub fn progressed(&mut self) {
        if let Some(start) = self.waiting_since.take() {
            self.push(SpanActivity::Wait, start, now(), MessagePart::outside(0));
        }
    }

    /// The send of the next message to `peer` begins.
    pub fn send_begins(&mut self, peer: usize, part: MessagePart) {
        let Some(link) = self.links.get_mut(peer) else { return };
        let activity = SpanActivity::Send { peer: peer as u32 };
        link.sends.push_back(OpenSpan { start: now(), part, number: link.sent, activity });
        link.sent += 1;
    }

    /// The send of the oldest message in flight to `peer` is complete.
    pub fn send_ends(&mut self, peer: usize) {
        if let Some(span) = self.links.get_mut(peer).and_then(|link| link.sends.pop_front()) {
            self.close(span, now(), false);
        }
    }

    /// A receive of the next message of `peer` is posted, or it can be read in place.
    pub fn receive_begins(&mut self, peer: usize, part: MessagePart) {
        let Some(link) = self.links.get_mut(peer) else { return };
        let activity = SpanActivity::Receive { peer: peer as u32 };
        link.receives.push_back(OpenSpan { start: now(), part, number: link.received, activity });
        link.received += 1;
    }

    /// The oldest receive from `peer` is complete, or this rank reads the message no longer.
    pub fn receive_ends(&mut self, peer: usize) {
        if let Some(span) = self.links.get_mut(peer).and_then(|link| link.receives.pop_front()) {
            self.close(span, now(), false);
        }
    }

    /// A job of a device begins.
    pub fn job_begins(&mut self, kind: JobKind, ticket: u64, part: MessagePart) {
        let activity = match kind {
            JobKind::Copy => SpanActivity::Copy,
            JobKind::Reduce => SpanActivity::Reduce,
        };
        self.jobs.push(OpenSpan { start: now(), part, number: ticket, activity });
    }

    /// The job with this ticket is done.
    pub fn job_ends(&mut self, ticket: u64) {
        // Mostly the last one, as devices of the host are done at once.
        if let Some(index) = self.jobs.iter().rposition(|job| job.number == ticket) {
            let span = self.jobs.swap_remove(index);
            self.close(span, now(), false);
        }
    }

    /// Writes the file, once.
    pub fn write(&mut self) {
        let Some(file) = self.file.take() else { return };
        if let Err(cause) = TraceFile::write(&file, &self.recording) {
            log::error!("cannot write the trace {}: {cause}", self.path);
        }
    }

    fn take_registrations(&mut self) {
        registrations::drain(|(start, end, bytes)| {
            self.push(SpanActivity::Register, start, end, MessagePart::outside(bytes));
        });
    }

    fn close(&mut self, span: OpenSpan, end: u64, unfinished: bool) {
        let OpenSpan { start, part, number, activity } = span;
        let message = match activity {
            SpanActivity::Send { .. } | SpanActivity::Receive { .. } => number,
            _ => 0,
        };
        let call = self.sequence();
        self.recording.spans.push(RecordedSpan { activity, start, end, part, message, call, unfinished });
    }

    fn push(&mut self, activity: SpanActivity, start: u64, end: u64, part: MessagePart) {
        let call = self.sequence();
        self.recording.spans.push(RecordedSpan {
            activity,
            start,
            end,
            part,
            message: 0,
            call,
            unfinished: false,
        });
    }

    fn sequence(&self) -> u64 {
        self.running.map_or(0, |(call, _)| call.sequence)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.write();
    }
}
