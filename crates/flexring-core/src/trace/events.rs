//! Spans as trace events: complete events on tracks, counters, and the names of tracks.
//!
//! Owns which track shows a span. Spans of one track follow each other or nest, as the viewers require:
//! messages in flight at the same time are on lanes of their own.

use super::recording::{MessagePart, RecordedCall, RecordedSpan, Recording, SpanActivity};
use std::collections::BTreeMap;

/// One event, as the trace event format defines it. Times are microseconds of rank 0's CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TraceEvent {
    /// What happens, the name of a counter, or the kind of a name.
    pub name: String,
    /// `X`: a span. `C`: a counter. `M`: the name of a rank or track. `s` and `f`: begin and end of an arrow.
    pub ph: String,
    /// The rank; in merged files the number of the rank among all communicators.
    pub pid: u32,
    /// The track.
    pub tid: u32,
    /// When it begins.
    #[serde(default)]
    pub ts: f64,
    /// How long a span takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dur: Option<f64>,
    /// The category of an arrow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cat: Option<String>,
    /// Connects the begin and the end of an arrow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `e`: an arrow ends at the span around it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bp: Option<String>,
    /// What the event is about.
    #[serde(default, skip_serializing_if = "EventArguments::is_empty")]
    pub args: EventArguments,
}

/// What an event is about. Fields without a meaning for the event are absent.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct EventArguments {
    /// Sequence number of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<u64>,
    /// The step of the rank's program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The sub-chunk of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sub: Option<u64>,
    /// The rank at the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
    /// Number of the message on its link and direction, the same at both ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<u64>,
    /// Length in bytes, or the value of a counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Number of elements of the call's vector.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Element type of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Whether the call failed before the span was complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<bool>,
    /// The name of a rank or track.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The place of a track among the rank's tracks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sort_index: Option<u32>,
}

impl EventArguments {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A group of lanes, in the order in which they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TrackKind {
    /// Calls, and in them waits and registrations.
    Calls,
    Jobs,
    Send {
        peer: u32,
    },
    Receive {
        peer: u32,
    },
}

impl TrackKind {
    fn of(activity: SpanActivity) -> Self {
        match activity {
            SpanActivity::Send { peer } => Self::Send { peer },
            SpanActivity::Receive { peer } => Self::Receive { peer },
            SpanActivity::Copy | SpanActivity::Reduce => Self::Jobs,
            SpanActivity::Wait | SpanActivity::Register => Self::Calls,
        }
    }

    fn name(self, lane: usize) -> String {
        let name = match self {
            Self::Calls => return "calls".to_owned(),
            Self::Jobs => "copy and reduce".to_owned(),
            Self::Send { peer } => format!("send to rank {peer}"),
            Self::Receive { peer } => format!("receive from rank {peer}"),
        };
        if lane == 0 { name } else { format!("{name} ({})", lane + 1) }
    }
}

/// Lanes of all tracks: by track, the time at which each lane is free.
#[derive(Default)]
struct TrackLanes(BTreeMap<TrackKind, Vec<u64>>);

impl TrackLanes {
    /// The lane for a span. Spans come in the order of their starts.
    fn place(&mut self, kind: TrackKind, start: u64, end: u64) -> usize {
        let lanes = self.0.entry(kind).or_default();
        // Calls contain their waits, so all of them have one lane.
        let free = lanes.iter().position(|free_at| kind == TrackKind::Calls || *free_at <= start);
        let lane = free.unwrap_or_else(|| {
            lanes.push(0);
            lanes.len() - 1
        });
        lanes[lane] = lanes[lane].max(end);
        lane
    }
}

/// The events of a recording: names first, then calls, spans and counters, each in the order of time.
pub(super) fn events_of(recording: &Recording) -> impl Iterator<Item = TraceEvent> {
    let mut spans: Vec<RecordedSpan> = recording.spans.iter().copied().collect();
    spans.sort_by_key(|span| span.start);
    let mut lanes = TrackLanes::default();
    lanes.place(TrackKind::Calls, 0, 0);
    let placed: Vec<(TrackKind, usize)> = spans
        .iter()
        .map(|span| {
            let kind = TrackKind::of(span.activity);
            (kind, lanes.place(kind, span.start, span.end))
        })
        .collect();
    let tracks = lanes.0.iter().flat_map(|(kind, lanes)| (0..lanes.len()).map(|lane| (*kind, lane)));
    let tids: BTreeMap<(TrackKind, usize), u32> = tracks.zip(0..).collect();
    let shared = EventContext { rank: recording.origin.rank as u32, recording };
    let names: Vec<TraceEvent> = shared.names(&tids).collect();
    let calls: Vec<TraceEvent> = recording.calls.iter().map(|call| shared.call(call)).collect();
    let counters = shared.counters(&spans);
    let spans = spans.into_iter().zip(placed).map(move |(span, place)| shared.span(&span, tids[&place]));
    names.into_iter().chain(calls).chain(spans).chain(counters)
}

/// What all events of a rank have in common.
#[derive(Clone, Copy)]
struct EventContext<'a> {
    rank: u32,
    recording: &'a Recording,
}

impl EventContext<'_> {
    fn event(self, name: &str, ph: &str, tid: u32, args: EventArguments) -> TraceEvent {
        let (name, ph, pid) = (name.to_owned(), ph.to_owned(), self.rank);
        TraceEvent { name, ph, pid, tid, ts: 0.0, dur: None, cat: None, id: None, bp: None, args }
    }

    fn at(self, time: u64) -> f64 {
        self.recording.alignment.apply(time) as f64 / 1e3
    }

    fn names(self, tids: &BTreeMap<(TrackKind, usize), u32>) -> impl Iterator<Item = TraceEvent> {
        let origin = &self.recording.origin;
        let mut name = format!("rank {} of {} on {}", origin.rank, origin.world, origin.host);
        if !origin.communicator.is_empty() {
            name += &format!(", communicator {}", origin.communicator);
        }
        let named = |name: String| EventArguments { name: Some(name), ..EventArguments::default() };
        let placed = |index: u32| EventArguments { sort_index: Some(index), ..EventArguments::default() };
        let rank = [
            self.event("process_name", "M", 0, named(name)),
            self.event("process_sort_index", "M", 0, placed(self.rank)),
        ];
        let tracks = tids.iter().flat_map(move |((kind, lane), tid)| {
            [
                self.event("thread_name", "M", *tid, named(kind.name(*lane))),
                self.event("thread_sort_index", "M", *tid, placed(*tid)),
            ]
        });
        rank.into_iter().chain(tracks)
    }

    fn call(self, recorded: &RecordedCall) -> TraceEvent {
        let RecordedCall { call, start, end, failed } = recorded;
        let args = EventArguments {
            call: Some(call.sequence),
            count: Some(call.count),
            dtype: Some(call.dtype.name().to_owned()),
            bytes: Some(call.count.saturating_mul(call.dtype.size() as u64)),
            unfinished: failed.then_some(true),
            ..EventArguments::default()
        };
        let event = self.event(call.collective.name(), "X", 0, args);
        TraceEvent { ts: self.at(*start), dur: Some((end - start) as f64 / 1e3), ..event }
    }

    fn span(self, span: &RecordedSpan, tid: u32) -> TraceEvent {
        let (name, peer) = match span.activity {
            SpanActivity::Send { peer } => ("send", Some(peer)),
            SpanActivity::Receive { peer } => ("receive", Some(peer)),
            SpanActivity::Copy => ("copy", None),
            SpanActivity::Reduce => ("reduce", None),
            SpanActivity::Wait => ("wait", None),
            SpanActivity::Register => ("register", None),
        };
        let in_step = (span.part.step != MessagePart::OUTSIDE).then_some(span.part);
        let args = EventArguments {
            call: Some(span.call),
            step: in_step.map(|part| part.step),
            sub: in_step.map(|part| part.sub),
            peer,
            message: peer.map(|_| span.message),
            bytes: (span.activity != SpanActivity::Wait).then_some(span.part.bytes as u64),
            unfinished: span.unfinished.then_some(true),
            ..EventArguments::default()
        };
        let event = self.event(name, "X", tid, args);
        TraceEvent { ts: self.at(span.start), dur: Some((span.end - span.start) as f64 / 1e3), ..event }
    }

    /// Bytes in flight to each peer, whenever they change.
    fn counters(self, spans: &[RecordedSpan]) -> Vec<TraceEvent> {
        let mut changes: BTreeMap<(u32, u64), i64> = BTreeMap::new();
        for span in spans {
            if let SpanActivity::Send { peer } = span.activity {
                let bytes = span.part.bytes as i64;
                *changes.entry((peer, span.start)).or_default() += bytes;
                *changes.entry((peer, span.end)).or_default() -= bytes;
            }
        }
        let mut current: (Option<u32>, i64) = (None, 0);
        let counter = move |((peer, time), change): ((u32, u64), i64)| {
            let before = if current.0 == Some(peer) { current.1 } else { 0 };
            current = (Some(peer), before + change);
            let args = EventArguments { bytes: Some(current.1.max(0) as u64), ..EventArguments::default() };
            let event = self.event(&format!("bytes in flight to rank {peer}"), "C", 0, args);
            TraceEvent { ts: self.at(time), ..event }
        };
        changes.into_iter().map(counter).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_overlap_have_lanes_of_their_own_and_lanes_are_used_again() {
        let mut lanes = TrackLanes::default();
        let send = TrackKind::Send { peer: 1 };
        let placed: Vec<usize> = [(0, 10), (2, 4), (4, 9), (5, 6), (10, 12)]
            .map(|(start, end)| lanes.place(send, start, end))
            .to_vec();
        assert_eq!(placed, [0, 1, 1, 2, 0]);
        assert_eq!(lanes.place(TrackKind::Send { peer: 2 }, 3, 4), 0);
        assert_eq!(lanes.place(TrackKind::Calls, 0, 9), 0);
        assert_eq!(lanes.place(TrackKind::Calls, 1, 2), 0, "a wait is within its call");
    }
}
