//! A subworld that not all its members have opened yet.
//!
//! Owns which of them have, how long they wait, and the errors of an attempt.

use crate::bootstrap::heartbeat::seconds;
use crate::bootstrap::process::Process;
use crate::error::Error;
use crate::rank::{Rank, RankList};
use std::time::{Duration, Instant};

/// Who has opened the world.
#[derive(Debug)]
pub(super) struct SubworldOpening {
    /// How long each rank waits, for those that have opened it.
    timeouts: Vec<Option<Duration>>,
    /// The earliest deadline of these ranks, and the time-out that led to it.
    deadline: Instant,
    timeout: Duration,
}

impl SubworldOpening {
    /// None of `world` ranks has opened the world yet. The first waits for `timeout`.
    pub(super) fn new(world: usize, timeout: Duration, now: Instant) -> Self {
        Self { timeouts: vec![None; world], deadline: now + timeout, timeout }
    }

    /// Rank `own` has opened the world, and waits for `timeout`.
    pub(super) fn add(&mut self, own: Rank, timeout: Duration, now: Instant) {
        self.timeouts[own] = Some(timeout);
        if now + timeout < self.deadline {
            self.deadline = now + timeout;
            self.timeout = timeout;
        }
    }

    /// Whether all ranks have opened the world.
    pub(super) fn is_complete(&self) -> bool {
        self.timeouts.iter().all(Option::is_some)
    }

    /// How long each rank waits, in rank order, for those that have opened the world.
    pub(super) fn timeouts(&self) -> impl Iterator<Item = Duration> {
        self.timeouts.iter().copied().flatten()
    }

    /// Until when the ranks wait.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// How long the ranks wait.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The error for missing ranks. `members` are the ranks that they have in the first world.
    pub(super) fn missing(&self, members: &[Rank]) -> Error {
        let missing: Vec<Rank> =
            (0..members.len()).filter(|own| self.timeouts.get(*own).is_none_or(Option::is_none)).collect();
        let there: Vec<Rank> = missing.iter().map(|own| members[*own]).collect();
        Error::rendezvous(format!(
            "{} of {} did not open the communicator within {} ({} of the first one of these processes): all members must \
             create it",
            RankList::new(&missing),
            members.len(),
            seconds(self.timeout),
            RankList::new(&there)
        ))
    }

    /// The error for a rank that is gone before all have opened the world. `how` is a verb phrase whose
    /// subject is the rank.
    pub(super) fn lost(own: Rank, process: &Process, how: &str) -> Error {
        Error::peer_lost(format!("rank {own} ({process}) {how} before all ranks had opened the communicator"))
    }

    /// The error for a process that opens the world with other members than the ones before it, or twice.
    pub(super) fn disagreement(process: &Process, members: &[Rank], others: &[Rank]) -> Error {
        if members == others {
            return Error::disagreement(format!("{process} opens one communicator twice at the same time"));
        }
        let list = |members| RankList::new(members).to_string();
        Error::disagreement(format!(
            "{process} opens the communicator with other members than the processes before it: {}, and not {}, in this order, \
             of the first one of these processes",
            list(members),
            list(others)
        ))
    }
}
