//! What ranks that shrink send each other.
//!
//! Owns these types.

use crate::error::Error;
use crate::rank::{Rank, RankList};

/// How many calls of the communicator a rank has finished when it shrinks it. Calls of shrink between the
/// same two calls belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallsMade {
    /// Number of calls that have succeeded.
    pub finished: u64,
    /// Whether the communicator has failed, so that no later call succeeds.
    pub has_failed: bool,
}

impl CallsMade {
    /// The largest number of calls after which another rank's call of shrink may belong to this rank's.
    #[must_use]
    pub fn last_together(self) -> u64 {
        if self.has_failed { u64::MAX } else { self.finished }
    }
}

/// The error of a rank that calls shrink, if these ranks have left it out by name.
#[must_use]
pub fn excluded_by(ranks: &[Rank], rank: Rank) -> Error {
    let ranks = RankList::new(ranks);
    Error::rendezvous(format!(
        "rank {rank} was left out by {ranks}, whose list of ranks to leave out contains it: end this process, or give one list on \
         all ranks that call shrink"
    ))
}

/// What a rank is doing.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Stance {
    /// The program has not called shrink.
    NotCalled,
    /// The program has called shrink after `finished` calls. `waiting_for` are the ranks without which this
    /// rank does not decide.
    Called { exclude: Vec<Rank>, waiting_for: Vec<Rank>, finished: u64 },
    /// The rank joins a new world.
    Joining,
    /// The others went on without this rank.
    LeftOut,
}

/// A new world: the members by their old ranks, ascending.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct NewWorld {
    pub(super) members: Vec<Rank>,
    /// By position in `members`, the generation with which the member called shrink.
    pub(super) generations: Vec<u64>,
    /// The unique id, hidden by the key of the communicator.
    pub(super) id: Vec<u8>,
}

/// A message from one rank to another.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum ShrinkMessage {
    /// What the sender is doing, and its generation: the number of worlds that it has joined from this
    /// communicator.
    State { generation: u64, stance: Stance },
    /// From the leader to the members.
    NewWorld(NewWorld),
    /// From the leader to the members, or from a member to the leader: the world with this id cannot come
    /// about.
    Cancelled { id: Vec<u8>, error: Error },
    /// The agreement failed on all ranks that have called shrink.
    Failed(Error),
    /// The sender's program has called shrink with a list that contains the receiver. It concerns calls of
    /// shrink after at most `until` calls.
    Excluded { until: u64 },
}

/// The notice that `members` go on without the receiver.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ShrinkNotice {
    /// The generation of the receiver. A notice is void for a later one.
    pub(super) generation: u64,
    pub(super) members: Vec<Rank>,
}
