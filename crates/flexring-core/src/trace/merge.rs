//! The files of a job as one timeline, with an arrow from each send to its receive, and what each rank did
//! most.
//!
//! Owns how events of several ranks get along.

use super::events::{EventArguments, TraceEvent};
use super::file::{TIME_UNIT, TraceFile, TraceSummary, TracedRank};
use super::recording::TraceOrigin;
use crate::error::{Error, Result};
use std::collections::HashMap;

/// A message: communicator, sender, receiver, and its number on the link.
type MessageKey = (String, u32, u32, u64);

/// What a rank did, in microseconds over all calls of its file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTotals {
    /// Number of calls.
    pub calls: usize,
    /// Within calls.
    pub in_calls: f64,
    /// Waiting for other ranks or devices.
    pub waiting: f64,
    /// Copying.
    pub copying: f64,
    /// Reducing.
    pub reducing: f64,
    /// Registering memory.
    pub registering: f64,
    /// Bytes that it sent.
    pub sent_bytes: u64,
}

/// Merges the files of ranks. Each rank of each communicator becomes a process of the timeline, which begins
/// at time 0.
///
/// # Errors
/// `InvalidArgument` if there are no files, two are of the same rank, or they are of worlds of different
/// sizes.
pub fn merge(files: Vec<TraceFile>) -> Result<TraceFile> {
    let mut ranks: Vec<TracedRank> = Vec::new();
    let mut events = Vec::new();
    let mut messages: HashMap<MessageKey, TraceEvent> = HashMap::new();
    let mut arrows = Vec::new();
    for file in files {
        let [rank] = &file.other_data.ranks[..] else {
            return Err(Error::invalid_argument("a file of several ranks is merged already"));
        };
        check_same_job(&ranks, &rank.origin)?;
        let pid = ranks.len() as u32;
        for mut event in file.trace_events {
            event.pid = pid;
            if event.name == "process_sort_index" {
                event.args.sort_index = Some(pid);
            }
            if let Some(key) = key_of(&event, rank) {
                match messages.remove(&key) {
                    Some(other) => arrows.extend(arrow(&key, &event, &other)),
                    None => {
                        messages.insert(key, event.clone());
                    }
                }
            }
            events.push(event);
        }
        ranks.push(rank.clone());
    }
    if ranks.is_empty() {
        return Err(Error::invalid_argument("there are no files to merge"));
    }
    events.extend(arrows);
    start_at_zero(&mut events);
    Ok(TraceFile {
        display_time_unit: TIME_UNIT.to_owned(),
        other_data: TraceSummary { ranks },
        trace_events: events,
    })
}

/// Subtracts the time of the first event from all times. Names of tracks (phase `M`) have no time.
fn start_at_zero(events: &mut [TraceEvent]) {
    let timed = |event: &&TraceEvent| event.ph != "M";
    let first = events.iter().filter(timed).map(|event| event.ts).fold(f64::INFINITY, f64::min);
    if first.is_finite() {
        events.iter_mut().filter(|event| event.ph != "M").for_each(|event| event.ts -= first);
    }
}

/// Files of an earlier job may still lie beside those of this one.
fn check_same_job(ranks: &[TracedRank], new: &TraceOrigin) -> Result<()> {
    let members =
        ranks.iter().map(|rank| &rank.origin).filter(|other| other.communicator == new.communicator);
    for other in members {
        let difference = if other.rank == new.rank {
            format!("two files are of rank {}", new.rank)
        } else if other.world != new.world {
            let TraceOrigin { rank, world, .. } = other;
            format!("rank {} is one of {} ranks, but rank {rank} one of {world}", new.rank, new.world)
        } else {
            continue;
        };
        return Err(Error::invalid_argument(format!(
            "the files are of several jobs: {difference}; remove those of earlier jobs"
        )));
    }
    Ok(())
}

/// The message that an event sends or receives.
fn key_of(event: &TraceEvent, rank: &TracedRank) -> Option<MessageKey> {
    let (own, peer, message) = (rank.origin.rank as u32, event.args.peer?, event.args.message?);
    let (from, to) = match event.name.as_str() {
        "send" => (own, peer),
        "receive" => (peer, own),
        _ => return None,
    };
    Some((rank.origin.communicator.clone(), from, to, message))
}

/// An arrow from the begin of a send to the end of its receive.
fn arrow(key: &MessageKey, one: &TraceEvent, other: &TraceEvent) -> [TraceEvent; 2] {
    let (send, receive) = if one.name == "send" { (one, other) } else { (other, one) };
    let (communicator, from, to, message) = key;
    let id = format!("{communicator}/{from}/{to}/{message}");
    let end = |ph: &str, event: &TraceEvent, ts: f64, bp: Option<&str>| TraceEvent {
        name: "message".to_owned(),
        ph: ph.to_owned(),
        cat: Some("message".to_owned()),
        id: Some(id.clone()),
        bp: bp.map(str::to_owned),
        ts,
        dur: None,
        args: EventArguments::default(),
        ..event.clone()
    };
    let received = receive.ts + receive.dur.unwrap_or_default();
    [end("s", send, send.ts, None), end("f", receive, received, Some("e"))]
}

/// What each rank did, in the order of the file's ranks.
#[must_use]
pub fn totals(merged: &TraceFile) -> Vec<RankTotals> {
    let mut all = vec![RankTotals::default(); merged.other_data.ranks.len()];
    for event in &merged.trace_events {
        let (Some(totals), Some(duration)) = (all.get_mut(event.pid as usize), event.dur) else { continue };
        match event.name.as_str() {
            // A call of reduce has the name of a job; only calls have a count.
            _ if event.args.count.is_some() => {
                totals.calls += 1;
                totals.in_calls += duration;
            }
            "wait" => totals.waiting += duration,
            "copy" => totals.copying += duration,
            "reduce" => totals.reducing += duration,
            "register" => totals.registering += duration,
            "send" => totals.sent_bytes += event.args.bytes.unwrap_or(0),
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::ClockAlignment;
    use super::*;

    fn event(name: &str, ts: f64, dur: f64, peer: u32) -> TraceEvent {
        let args = EventArguments {
            peer: Some(peer),
            message: Some(0),
            bytes: Some(8),
            ..EventArguments::default()
        };
        TraceEvent {
            name: name.to_owned(),
            ph: "X".to_owned(),
            pid: 0,
            tid: 1,
            ts,
            dur: Some(dur),
            cat: None,
            id: None,
            bp: None,
            args,
        }
    }

    fn file(rank: usize, events: Vec<TraceEvent>) -> TraceFile {
        let origin =
            TraceOrigin { rank, world: 2, host: "here".to_owned(), pid: 1, communicator: String::new() };
        let clock = ClockAlignment::default();
        let rank = TracedRank { origin, clock, dropped_spans: 0, dropped_calls: 0 };
        TraceFile {
            display_time_unit: "ns".to_owned(),
            other_data: TraceSummary { ranks: vec![rank] },
            trace_events: events,
        }
    }

    #[test]
    fn a_message_has_an_arrow_from_its_send_to_its_receive() {
        let files = vec![
            file(1, vec![event("receive", 1e9 + 3.0, 2.0, 0), event("wait", 1e9, 3.0, 0)]),
            file(0, vec![event("send", 1e9 + 1.0, 6.0, 1)]),
        ];
        let merged = merge(files).expect("two ranks");
        let arrows: Vec<(&str, u32, f64)> = merged
            .trace_events
            .iter()
            .filter(|event| event.name == "message")
            .map(|event| (event.ph.as_str(), event.pid, event.ts))
            .collect();
        assert_eq!(arrows, [("s", 1, 1.0), ("f", 0, 5.0)]);
        let totals = totals(&merged);
        assert_eq!((totals[0].waiting, totals[1].sent_bytes), (3.0, 8));
    }

    #[test]
    fn a_call_of_reduce_is_no_reduction() {
        let call = TraceEvent {
            args: EventArguments { count: Some(4), ..EventArguments::default() },
            ..event("reduce", 0.0, 5.0, 0)
        };
        let merged = merge(vec![file(0, vec![call, event("reduce", 1.0, 2.0, 0)]), file(1, vec![])]);
        let totals = totals(&merged.expect("two ranks"));
        assert_eq!((totals[0].calls, totals[0].in_calls, totals[0].reducing), (1, 5.0, 2.0));
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused() {
        let error = merge(vec![file(1, vec![]), file(1, vec![])]).expect_err("one rank twice");
        assert!(error.message().contains("two files are of rank 1"), "{error}");
        assert!(merge(Vec::new()).is_err());
        let mut of_four_ranks = file(3, vec![]);
        of_four_ranks.other_data.ranks[0].origin.world = 4;
        let error = merge(vec![file(0, vec![]), of_four_ranks]).expect_err("worlds of 2 and 4 ranks");
        assert!(error.message().contains("rank 3 is one of 4 ranks, but rank 0 one of 2"), "{error}");
        let merged = merge(vec![file(0, vec![]), file(1, vec![])]).expect("two ranks");
        assert!(merge(vec![merged]).is_err());
    }
}
