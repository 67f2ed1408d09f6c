//! What a rank that shrinks knows about another rank.
//!
//! Owns the record.

use crate::bootstrap::shrink::message::{CallsMade, Stance};
use crate::rank::Rank;
use std::time::Instant;

/// What this rank knows about the connection to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Not tried since this rank called shrink, or lost at this time.
    Untried {
        since: Option<Instant>,
    },
    Connecting,
    Connected,
    /// The process is gone, or has freed its communicator.
    Gone,
    /// Connected, but it sends nothing.
    Silent,
    Unreachable,
}

#[derive(Clone, Debug)]
pub(super) struct ShrinkPeer {
    pub(super) reach: Reach,
    /// When it was last heard, or since when it is tried.
    pub(super) since: Instant,
    /// Its generation as far as known.
    pub(super) generation: u64,
    /// `None` until it is heard.
    pub(super) stance: Option<Stance>,
    /// Whether it is left out: a notice was sent to it, or a world came about without it although it was not
    /// excluded.
    pub(super) left_out: bool,
    /// If the program's last call of shrink excludes the rank: the calls of shrink of that rank that belong
    /// to it are those after at most so many calls.
    pub(super) excluded_until: Option<u64>,
    /// Whether it excludes this rank from the call of shrink that this rank has made.
    pub(super) excludes_me: bool,
}

impl ShrinkPeer {
    /// Nothing is known at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            reach: Reach::Untried { since: None },
            since: now,
            generation: 0,
            stance: None,
            left_out: false,
            excluded_until: None,
            excludes_me: false,
        }
    }

    /// Whether its own call of shrink, as far as known, excludes `me` from one that `me` makes after these
    /// calls.
    pub(super) fn has_excluded(&self, me: Rank, calls: CallsMade) -> bool {
        match &self.stance {
            Some(Stance::Called { exclude, finished, .. }) => {
                exclude.contains(&me) && calls.finished <= *finished
            }
            _ => false,
        }
    }
}
