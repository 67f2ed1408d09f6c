//! What ranks that shrink send each other.
//!
//! Owns these types. Must not know how they are authenticated, nor what follows from them.

use crate::error::Error;
use crate::rank::Rank;

/// What a rank is doing.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Stance {
    /// The program has not called shrink.
    NotCalled,
    /// The program has called shrink. `waiting_for` are the ranks without which this rank does not decide.
    Called { exclude: Vec<Rank>, waiting_for: Vec<Rank> },
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
    /// What the sender is doing, and its generation: the number of worlds that it has joined from this communicator.
    State { generation: u64, stance: Stance },
    /// From the leader to the members.
    NewWorld(NewWorld),
    /// From the leader: the world with this id cannot come about, because a member was lost.
    Cancelled { id: Vec<u8>, error: Error },
    /// The agreement failed on all ranks that have called shrink.
    Failed(Error),
}

/// The notice that `members` go on without the receiver.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ShrinkNotice {
    /// The generation of the receiver. A notice is void for a later one.
    pub(super) generation: u64,
    pub(super) members: Vec<Rank>,
}
