//! The ranks of a supervised world.
//!
//! Owns what the failure detector records of each rank.

use crate::bootstrap::call_state::CallState;
use crate::bootstrap::heartbeat::HeartbeatMonitor;
use crate::bootstrap::process::Process;
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Whether a rank is part of its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum RankStatus {
    Active,
    Left,
    Lost,
}

/// A rank, as its coordinator sees it.
#[derive(Debug)]
pub(in crate::bootstrap) struct Member {
    pub(in crate::bootstrap) process: Process,
    pub(in crate::bootstrap) timeout: Duration,
    pub(in crate::bootstrap) heartbeat: Duration,
    pub(in crate::bootstrap) status: RankStatus,
    pub(in crate::bootstrap) monitor: HeartbeatMonitor,
    pub(in crate::bootstrap) state: CallState,
    /// When the state was first heard of.
    pub(in crate::bootstrap) since: Instant,
    /// When its last message came.
    pub(in crate::bootstrap) heard: Instant,
    /// Whether the call state is newer than the last [`ToRank::RequestState`].
    pub(in crate::bootstrap) fresh: bool,
    /// Ranks that have sent it messages: they hear of its departure.
    pub(in crate::bootstrap) correspondents: BTreeSet<Rank>,
}
