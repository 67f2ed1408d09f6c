//! An exchange of data among the ranks of a supervised world.
//!
//! Owns the parts that have arrived, and why the exchange fails.

use super::member::{Member, RankStatus};
use crate::bootstrap::heartbeat::seconds;
use crate::bootstrap::protocol::PARTS_LIMIT;
use crate::bootstrap::rendezvous::FIRST_REPORT;
use crate::error::{Error, Result};
use crate::peer_text::PeerText;
use crate::rank::{Rank, RankList};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// An exchange that is not complete yet.
#[derive(Debug)]
pub(in crate::bootstrap) struct PendingGather {
    number: u64,
    label: PeerText,
    parts: BTreeMap<Rank, Vec<u8>>,
    deadline: Instant,
    timeout: Duration,
    /// When ranks say next for which others they wait, and the time since they have said it before.
    report: (Instant, Duration),
}

impl PendingGather {
    /// Begins exchange `number`, for a rank that waits for `timeout`.
    pub(super) fn new(number: u64, label: PeerText, timeout: Duration, now: Instant) -> Self {
        let report = (now + FIRST_REPORT, FIRST_REPORT);
        Self { number, label, parts: BTreeMap::new(), deadline: now + timeout, timeout, report }
    }

    /// What ranks are to log because they have waited for long, if they have: one of each node that has given
    /// its part.
    pub(super) fn report(&mut self, members: &[Member], now: Instant) -> Option<(Vec<Rank>, String)> {
        let (at, since) = self.report;
        if now < at {
            return None;
        }
        self.report = (now + 2 * since, 2 * since);
        let missing: Vec<Rank> = (0..members.len()).filter(|rank| !self.parts.contains_key(rank)).collect();
        let (who, label, given, world) =
            (RankList::new(&missing), &self.label, self.parts.len(), members.len());
        let hosts: BTreeMap<&str, Rank> =
            self.parts.keys().rev().map(|rank| (&*members[*rank].process.host, *rank)).collect();
        let text = format!("waiting for {who} to exchange {label} ({given} of {world} have)");
        Some((hosts.into_values().collect(), text))
    }

    /// Adds a rank's part. The rank waits for `timeout`.
    ///
    /// # Errors
    /// `Disagreement` if the rank means another exchange, or has given its part before.
    pub(super) fn add(
        &mut self,
        rank: Rank,
        (number, label): (u64, &PeerText),
        part: Vec<u8>,
        timeout: Duration,
        now: Instant,
    ) -> Result<()> {
        if number != self.number || *label != self.label || self.parts.contains_key(&rank) {
            return Err(Error::disagreement(format!(
                "rank {rank} exchanges {label} (exchange #{number}) while other ranks exchange {} (#{})",
                self.label, self.number
            )));
        }
        if now + timeout < self.deadline {
            self.deadline = now + timeout;
            self.timeout = timeout;
        }
        self.parts.insert(rank, part);
        Ok(())
    }

    /// Bytes of a rank's part, if it has arrived.
    pub(super) fn bytes_of(&self, rank: Rank) -> usize {
        self.parts.get(&rank).map_or(0, Vec::len)
    }

    /// When it fails.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether all parts of a world of this size have arrived.
    pub(super) fn is_complete(&self, world: usize) -> bool {
        self.parts.len() == world
    }

    /// The number of the exchange, and its parts in rank order, in groups that each fit a frame.
    pub(super) fn into_parts(self) -> (u64, Vec<Vec<Vec<u8>>>) {
        let mut groups = vec![Vec::new()];
        let mut bytes = 0;
        for part in self.parts.into_values() {
            bytes += part.len();
            if bytes > PARTS_LIMIT {
                bytes = part.len();
                groups.push(Vec::new());
            }
            groups.last_mut().expect("there is one").push(part);
        }
        (self.number, groups)
    }

    /// A rank that is missing from it and gone, if there is one, and the failure of the exchange.
    pub(super) fn departure(&self, members: &[Member]) -> Option<(Rank, Error)> {
        let (rank, member) = members
            .iter()
            .enumerate()
            .find(|(rank, member)| member.status != RankStatus::Active && !self.parts.contains_key(rank))?;
        let message =
            format!("rank {rank} ({}) has left while other ranks exchange {}", member.process, self.label);
        Some((rank, Error::peer_lost(message)))
    }

    /// Why it fails if its time is over in a world of this size.
    pub(super) fn timeout(&self, world: usize) -> Error {
        let missing: Vec<Rank> = (0..world).filter(|rank| !self.parts.contains_key(rank)).collect();
        Error::timeout(format!(
            "{} of {world} did not take part in the exchange of {} within {}",
            RankList::new(&missing),
            self.label,
            seconds(self.timeout)
        ))
    }
}
