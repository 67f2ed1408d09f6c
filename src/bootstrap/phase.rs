//! The phases of a coordinator's world: the ranks meet, they are supervised or move to rank 0's coordinator,
//! and all is over.
//!
//! Owns what the phases have in common.

use super::coordinator_worlds::Worlds;
use super::rendezvous::Rendezvous;
use super::world_status::{RankActivity, RankReport, WorldStatus};
use crate::rank::Rank;
use std::time::{Duration, Instant};

/// How much longer than their own time-outs the ranks may take to move to rank 0's coordinator.
const MOVE_GRACE: Duration = Duration::from_secs(5);

/// What a coordinator does for its world.
#[expect(clippy::large_enum_variant, reason = "one per world")]
pub(super) enum Phase {
    Rendezvous(Rendezvous),
    Monitoring(Worlds),
    /// The ranks move to the coordinator of rank 0, at the latest by `until`.
    Moving {
        rendezvous: Rendezvous,
        until: Instant,
    },
    /// The world is over; only queued frames must still be sent.
    Finished,
}

impl Phase {
    /// All ranks have joined at `now`, and move to the coordinator of rank 0.
    pub(super) fn moving(rendezvous: Rendezvous, now: Instant) -> Self {
        let until = now + rendezvous.longest_exchange() + MOVE_GRACE;
        Self::Moving { rendezvous, until }
    }

    /// The state of all ranks.
    pub(super) fn status(&self, now: Instant) -> WorldStatus {
        match self {
            Phase::Rendezvous(rendezvous) => {
                let absent = |rank| RankReport::new(rank, "", 0, RankActivity::Absent);
                let mut rows: Vec<RankReport> = (0..rendezvous.world().unwrap_or(0)).map(absent).collect();
                for (rank, process) in rendezvous.joined() {
                    rows[rank] = RankReport::new(rank, &process.host, process.pid, RankActivity::Joining);
                }
                WorldStatus::new(rows, rendezvous.root_cause().cloned())
            }
            Phase::Monitoring(worlds) => worlds.status(now),
            Phase::Moving { .. } | Phase::Finished => WorldStatus::default(),
        }
    }

    /// Handles the end of a rank's connection. `cause` is a verb phrase such as `closed`.
    pub(super) fn on_disconnect(&mut self, rank: Rank, cause: &str, now: Instant) {
        match self {
            Phase::Rendezvous(rendezvous) | Phase::Moving { rendezvous, .. } => {
                rendezvous.on_disconnect(rank, cause);
            }
            Phase::Monitoring(worlds) => worlds.on_disconnect(rank, cause, now),
            Phase::Finished => {}
        }
    }
}
