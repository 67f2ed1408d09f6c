//! What ranks and links did when, and the chain of activities that determined the time.
//!
//! Owns the record, which is empty if nothing is recorded. Must not know what makes an activity possible.

use super::event_queue::VirtualTime;
use flexring_plan::Rank;

/// The number of an activity in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ActivityId(u32);

impl ActivityId {
    /// The start of the call, or an activity that was not recorded.
    pub const NONE: Self = Self(u32::MAX);
}

/// What took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// A message left its sender.
    Transfer {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
    /// A rank added or copied.
    Job {
        /// The rank.
        rank: Rank,
    },
}

/// One transfer or job, in picoseconds of virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedActivity {
    /// What it was.
    pub kind: ActivityKind,
    /// Its length in bytes: of the message, or of the result.
    pub bytes: u64,
    /// When it began.
    pub start: u64,
    /// When it ended; equal to `start` until then.
    pub end: u64,
    /// What made it possible last.
    cause: ActivityId,
}

/// All activities of a run, in the order of their starts.
#[derive(Debug)]
pub struct Record {
    activities: Vec<SimulatedActivity>,
    records: bool,
}

impl Record {
    pub fn new(records: bool) -> Self {
        Self { activities: Vec::new(), records }
    }

    /// Records the start of an activity that `cause` made possible.
    pub fn begin(
        &mut self,
        kind: ActivityKind,
        bytes: u64,
        start: VirtualTime,
        cause: ActivityId,
    ) -> ActivityId {
        if !self.records {
            return ActivityId::NONE;
        }
        let id = ActivityId(self.activities.len() as u32);
        self.activities.push(SimulatedActivity { kind, bytes, start, end: start, cause });
        id
    }

    pub fn end(&mut self, id: ActivityId, end: VirtualTime) {
        if id != ActivityId::NONE {
            self.activities[id.0 as usize].end = end;
        }
    }

    /// The activities that lead to `last`, each of which made the next one possible.
    pub fn path_to(&self, last: ActivityId) -> Vec<SimulatedActivity> {
        let get = |id: ActivityId| self.activities.get(id.0 as usize).copied();
        let mut path: Vec<SimulatedActivity> =
            std::iter::successors(get(last), |activity| get(activity.cause)).collect();
        path.reverse();
        path
    }

    pub fn into_activities(self) -> Vec<SimulatedActivity> {
        self.activities
    }
}

/// The time of a path by what it was spent on, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSummary {
    /// Messages left their senders.
    pub transfers: u64,
    /// Ranks added or copied.
    pub jobs: u64,
    /// Between activities: latency, and waiting for receives and notifications.
    pub latency: u64,
    /// Number of transfers.
    pub hops: usize,
}

impl PathSummary {
    /// The summary of a path from the start of the call to its end at `time`.
    #[must_use]
    pub fn of(path: &[SimulatedActivity], time: u64) -> Self {
        let mut summary = Self::default();
        let mut done = 0;
        for activity in path {
            // An activity may begin before the end of the one that its end waited for.
            let spent = activity.end.saturating_sub(activity.start.max(done));
            summary.latency += activity.start.saturating_sub(done);
            match activity.kind {
                ActivityKind::Transfer { .. } => {
                    summary.transfers += spent;
                    summary.hops += 1;
                }
                ActivityKind::Job { .. } => summary.jobs += spent,
            }
            done = done.max(activity.end);
        }
        summary.latency += time.saturating_sub(done);
        summary
    }
}
