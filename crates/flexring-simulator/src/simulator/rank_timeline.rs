//! What each rank does when, in the form of a real run's timeline.
//!
//! Owns the spans that are over, and those of messages that are in flight. Must not know what makes a span
//! possible.

use super::event_queue::{ChannelId, VirtualTime};
use flexring_core::trace::{MessagePart, RecordedSpan, SpanActivity};
use flexring_plan::Rank;
use std::collections::VecDeque;

/// Picoseconds of a nanosecond, the unit of timelines.
const NANOSECOND: u64 = 1_000;

/// The timeline of one rank, in nanoseconds of virtual time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTimeline {
    /// What it did, in the order of the ends.
    pub spans: Vec<RecordedSpan>,
    /// When it returned.
    pub end: u64,
}

/// The messages of a channel that are in flight, oldest first: when they began, and what they carry.
#[derive(Debug, Default)]
struct OpenMessages {
    begun: VecDeque<(VirtualTime, MessagePart)>,
    /// Messages that have ended.
    ended: u64,
}

impl OpenMessages {
    fn begin(&mut self, now: VirtualTime, part: MessagePart) {
        self.begun.push_back((now, part));
    }

    /// The span of the oldest message, which ends now.
    fn end(&mut self, now: VirtualTime, activity: SpanActivity) -> Option<RecordedSpan> {
        let (start, part) = self.begun.pop_front()?;
        self.ended += 1;
        Some(span(activity, (start, now), part, self.ended - 1))
    }
}

/// The timelines of all ranks in the making.
#[derive(Debug)]
pub struct RankTimelines {
    ranks: Vec<RankTimeline>,
    /// By rank, since when it waits.
    waiting: Vec<Option<VirtualTime>>,
    /// By channel.
    sends: Vec<OpenMessages>,
    receives: Vec<OpenMessages>,
}

impl RankTimelines {
    pub fn new(ranks: usize, channels: usize) -> Self {
        let messages = || (0..channels).map(|_| OpenMessages::default()).collect();
        Self {
            ranks: vec![RankTimeline::default(); ranks],
            waiting: vec![None; ranks],
            sends: messages(),
            receives: messages(),
        }
    }

    pub fn send_begins(&mut self, channel: ChannelId, now: VirtualTime, part: MessagePart) {
        self.sends[channel as usize].begin(now, part);
    }

    pub fn send_ends(&mut self, channel: ChannelId, now: VirtualTime, (from, to): (Rank, Rank)) {
        let span = self.sends[channel as usize].end(now, SpanActivity::Send { peer: to as u32 });
        self.ranks[from].spans.extend(span);
    }

    pub fn receive_begins(&mut self, channel: ChannelId, now: VirtualTime, part: MessagePart) {
        self.receives[channel as usize].begin(now, part);
    }

    pub fn receive_ends(&mut self, channel: ChannelId, now: VirtualTime, (from, to): (Rank, Rank)) {
        let span = self.receives[channel as usize].end(now, SpanActivity::Receive { peer: from as u32 });
        self.ranks[to].spans.extend(span);
    }

    /// A rank added or copied between these times.
    pub fn job(
        &mut self,
        rank: Rank,
        times: (VirtualTime, VirtualTime),
        activity: SpanActivity,
        part: MessagePart,
    ) {
        self.ranks[rank].spans.push(span(activity, times, part, 0));
    }

    /// The rank waits from now on, unless it does already.
    pub fn idle(&mut self, rank: Rank, now: VirtualTime) {
        self.waiting[rank].get_or_insert(now);
    }

    /// The rank waits no longer.
    pub fn progressed(&mut self, rank: Rank, now: VirtualTime) {
        if let Some(since) = self.waiting[rank].take().filter(|since| *since < now) {
            let span = span(SpanActivity::Wait, (since, now), MessagePart::outside(0), 0);
            self.ranks[rank].spans.push(span);
        }
    }

    /// The rank returns.
    pub fn returns(&mut self, rank: Rank, now: VirtualTime) {
        self.ranks[rank].end = now / NANOSECOND;
    }

    pub fn into_ranks(self) -> Vec<RankTimeline> {
        self.ranks
    }
}

fn span(
    activity: SpanActivity,
    (start, end): (VirtualTime, VirtualTime),
    part: MessagePart,
    message: u64,
) -> RecordedSpan {
    let (start, end) = (start / NANOSECOND, end / NANOSECOND);
    RecordedSpan { activity, start, end, part, message, call: 1, unfinished: false }
}
