//! The subworlds that ranks open over the control connections of their first one.
//!
//! Owns, for each of them, who must still open it, then its [`FailureDetector`], and which rank of the first
//! world is which of its ranks. Does no I/O: callers report messages, lost ranks and the time, and carry
//! [`SubworldAction`]s out. All ranks in its interface are those of the first world; those in messages of a
//! subworld are that world's own.
//!
//! **Signs of life.** A connection is alive or not for all its worlds together. A rank sends the call state
//! of a subworld only after it has changed, so a world in which nothing happens costs no message. Everything
//! that rests on heartbeats holds nevertheless:
//! - Silence. Any frame of a rank counts for all its worlds: [`heard`](ConnectedRank::heard) is passed to
//!   each failure detector before its next tick. The rank sends at least one frame per heartbeat interval,
//!   that of the first world or [`ToCoordinator::Alive`]. All worlds of a rank have the heartbeat interval
//!   that it joined with.
//! - Call states. The last one that was sent is the current one, or at most one interval old, as with
//!   periodic heartbeats. A failure detector that needs states newer than a report requests them, and a rank
//!   answers each request.
//! - Departures. After [`ToRank::Left`] a rank answers at once, and then sends changed states every 250 ms.

mod subworld_opening;

use super::failure_detector::{DetectorAction, FailureDetector};
use super::heartbeat::seconds;
use super::process::Process;
use super::protocol::{
    FRAME_LIMIT, HelloParams, MAX_SUBWORLDS, PART_ALLOWANCE, ToCoordinator, ToRank, WorldId, decode,
};
use super::rendezvous::JoinedPeer;
use super::world_status::WorldStatus;
use crate::config::LONGEST_TIME;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use subworld_opening::SubworldOpening;

/// Members of all worlds at most that one rank has opened and that wait for others, so that it cannot fill
/// the coordinator's memory.
const MAX_PENDING_MEMBERS: usize = 1 << 20;
/// Bytes at most that a rank has given to exchanges that wait for others.
const MAX_HELD: usize = 4 * FRAME_LIMIT;

/// What the coordinator must do. Ranks are those of the first world.
#[derive(Debug, PartialEq)]
pub(super) enum SubworldAction {
    /// Send a message of this world to these ranks.
    Send { world: WorldId, to: Vec<Rank>, message: ToRank },
    /// The rank has left a world. Close its connection if it is in no other.
    Left(Rank),
    /// The rank has been silent for this time, so it counts as dead.
    GiveUp(Rank, Duration),
}

/// How a rank was lost.
#[derive(Clone, Copy, Debug)]
pub(super) enum RankLoss<'a> {
    /// Its connection ended. A verb phrase whose subject is the connection, such as `closed`.
    Disconnected(&'a str),
    /// It has been silent for this time.
    Silent(Duration),
    /// It has given the coordinator up, after this time of silence.
    GaveUp(Duration),
    /// It has left all its worlds.
    Left,
}

impl RankLoss<'_> {
    /// Completes a sentence about the rank: `died: its control connection closed`.
    fn describe(self) -> String {
        match self {
            Self::Disconnected(cause) => format!("died or gave up: its control connection {cause}"),
            Self::Silent(silent) => format!("has been silent for {}", seconds(silent)),
            Self::GaveUp(silent) => {
                format!("gave the coordinator up, from which it heard nothing for {}", seconds(silent))
            }
            Self::Left => "has left".to_owned(),
        }
    }
}

/// A rank of the first world, and its connection.
#[derive(Debug)]
struct ConnectedRank {
    process: Process,
    heartbeat: Duration,
    /// When its last frame came.
    heard: Instant,
    /// The worlds that it has opened and not left, and those that could not be opened and are not forgotten
    /// yet.
    worlds: BTreeSet<WorldId>,
    /// Members of the worlds that this rank was the first to open, and that the others have not opened yet or
    /// could not.
    pending: usize,
}

#[derive(Debug)]
enum SubworldPhase {
    Opening(SubworldOpening),
    Supervised(Box<FailureDetector>),
    /// It could not be opened for this reason. Members that come later get it, until this time.
    Failed(Error, Instant),
}

/// A subworld.
#[derive(Debug)]
struct Subworld {
    /// By its own ranks.
    members: Vec<Rank>,
    /// The rank that opened it first, until it is supervised.
    opener: Option<Rank>,
    /// The members that have opened it and have not left, with their ranks in it.
    present: BTreeMap<Rank, Rank>,
    phase: SubworldPhase,
}

impl Subworld {
    fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            SubworldPhase::Opening(opening) => Some(opening.deadline()),
            SubworldPhase::Supervised(detector) => detector.deadline(),
            SubworldPhase::Failed(_, until) => Some(*until),
        }
    }
}

/// All subworlds of one coordinator.
#[derive(Debug)]
pub(super) struct Subworlds {
    ranks: Vec<ConnectedRank>,
    host_process: Process,
    worlds: BTreeMap<WorldId, Subworld>,
    /// When the worlds have their next tick. All at once, so that many worlds do not wake the coordinator one
    /// by one.
    next_tick: Option<Instant>,
    /// The time of the last event.
    now: Instant,
    actions: Vec<SubworldAction>,
}

impl Subworlds {
    /// No subworld yet over the connections of `peers`, given in rank order. `host_process` runs the
    /// coordinator.
    pub(super) fn new(peers: &[JoinedPeer], host_process: Process, now: Instant) -> Self {
        let connected = |peer: &JoinedPeer| ConnectedRank {
            process: peer.process.clone(),
            heartbeat: peer.params.heartbeat,
            heard: now,
            worlds: BTreeSet::new(),
            pending: 0,
        };
        Self {
            ranks: peers.iter().map(connected).collect(),
            host_process,
            worlds: BTreeMap::new(),
            next_tick: None,
            now,
            actions: Vec::new(),
        }
    }

    /// The actions since the last call, in order.
    pub(super) fn actions(&mut self) -> Vec<SubworldAction> {
        std::mem::take(&mut self.actions)
    }

    /// The next time to call [`on_tick`](Self::on_tick).
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.next_tick
    }

    /// Whether the rank is in a subworld, or opens one.
    pub(super) fn serves(&self, rank: Rank) -> bool {
        let is_present =
            |id: &WorldId| self.worlds.get(id).is_some_and(|hosted| hosted.present.contains_key(&rank));
        self.ranks.get(rank).is_some_and(|connected| connected.worlds.iter().any(is_present))
    }

    /// Whether no rank is in a subworld, or opens one.
    pub(super) fn is_over(&self) -> bool {
        self.worlds.values().all(|hosted| hosted.present.is_empty())
    }

    /// The state of each world that is open.
    pub(super) fn statuses(&self, now: Instant) -> impl Iterator<Item = WorldStatus> {
        self.worlds.values().filter_map(move |hosted| match &hosted.phase {
            SubworldPhase::Supervised(detector) => Some(detector.status(now)),
            SubworldPhase::Opening(_) | SubworldPhase::Failed(..) => None,
        })
    }

    /// Records that anything came from this rank.
    pub(super) fn on_sign_of_life(&mut self, rank: Rank, now: Instant) {
        self.now = now;
        if let Some(connected) = self.ranks.get_mut(rank) {
            connected.heard = now;
        }
    }

    /// Handles that a rank opens a world with these `members`, of which `connected` must contain all. The
    /// rank waits for the others for `timeout`.
    pub(super) fn on_open(
        &mut self,
        rank: Rank,
        world: WorldId,
        members: Vec<Rank>,
        timeout: Duration,
        connected: &BTreeSet<Rank>,
    ) {
        let timeout = timeout.min(LONGEST_TIME);
        let own = match self.rank_in(rank, &members) {
            Ok(own) => own,
            Err(error) => return self.refuse(rank, world, error),
        };
        let now = self.now;
        if !self.worlds.contains_key(&world) {
            let pending = self.ranks[rank].pending + members.len();
            if pending > MAX_PENDING_MEMBERS {
                let message = "cannot open a communicator: too many that this process has opened wait for other members";
                return self.refuse(rank, world, Error::system(message));
            }
            self.ranks[rank].pending = pending;
        }
        let hosted = self.worlds.entry(world).or_insert_with(|| Subworld {
            members: members.clone(),
            opener: Some(rank),
            present: BTreeMap::new(),
            phase: SubworldPhase::Opening(SubworldOpening::new(members.len(), timeout, now)),
        });
        let opening = match &mut hosted.phase {
            SubworldPhase::Opening(opening) => opening,
            SubworldPhase::Failed(error, _) => {
                let error = error.clone();
                return self.refuse(rank, world, error);
            }
            SubworldPhase::Supervised(_) => {
                let message = "cannot open a communicator twice: all its ranks have opened it already";
                return self.refuse(rank, world, Error::disagreement(message));
            }
        };
        if hosted.members != members || hosted.present.contains_key(&rank) {
            let error = SubworldOpening::disagreement(&self.ranks[rank].process, &members, &hosted.members);
            if !hosted.present.contains_key(&rank) {
                self.refuse(rank, world, error.clone());
            }
            return self.fail_opening(world, error);
        }
        opening.add(own, timeout, now);
        hosted.present.insert(rank, own);
        self.ranks[rank].worlds.insert(world);
        let gone = members.iter().enumerate().find(|(_, member)| !connected.contains(member));
        if let Some((own, member)) = gone {
            let error = SubworldOpening::lost(own, &self.ranks[*member].process, "has left or died");
            self.fail_opening(world, error);
        } else if opening.is_complete() {
            self.supervise(world);
        }
        self.advance(world);
    }

    /// The rank that `rank` has in a world of these members, if it may open that.
    fn rank_in(&self, rank: Rank, members: &[Rank]) -> Result<Rank> {
        let members = if members.len() <= self.ranks.len() { members } else { &[] };
        let own = members.iter().position(|member| *member == rank);
        let distinct: BTreeSet<Rank> = members.iter().copied().collect();
        let is_valid = distinct.len() == members.len()
            && distinct.last().is_none_or(|highest| *highest < self.ranks.len());
        let (Some(own), true) = (own, is_valid) else {
            return Err(Error::invalid_argument(
                "cannot open a communicator: its members must be ranks of these processes' first one, each once, with the \
                 calling one",
            ));
        };
        if self.ranks[members[0]].process != self.host_process {
            return Err(Error::unsupported(
                "cannot open a communicator over this connection: its rank 0 must be in the process that runs the coordinator",
            ));
        }
        if self.ranks[rank].worlds.len() >= MAX_SUBWORLDS {
            return Err(Error::system(format!(
                "this process has opened {MAX_SUBWORLDS} communicators over one control connection, which is the maximum: \
                 free some of them"
            )));
        }
        Ok(own)
    }

    /// Answers an attempt to open a world. Concerns this rank alone.
    fn refuse(&mut self, rank: Rank, world: WorldId, error: Error) {
        let message = ToRank::RootCause(error);
        self.actions.push(SubworldAction::Send { world, to: vec![rank], message });
    }

    /// Starts to supervise a world that all its members have opened.
    fn supervise(&mut self, world: WorldId) {
        let Some(hosted) = self.worlds.get_mut(&world) else { return };
        let SubworldPhase::Opening(opening) = &hosted.phase else { return };
        let peers = hosted.members.iter().zip(opening.timeouts()).map(|(member, timeout)| {
            let ConnectedRank { process, heartbeat, .. } = &self.ranks[*member];
            let params = HelloParams::of_member(timeout, *heartbeat);
            JoinedPeer { process: process.clone(), params }
        });
        let detector = FailureDetector::new(peers.collect(), self.host_process.clone(), self.now);
        hosted.phase = SubworldPhase::Supervised(Box::new(detector));
        if let Some(opener) = hosted.opener.take() {
            self.ranks[opener].pending -= hosted.members.len();
        }
    }

    /// Fails an attempt to open a world, with one error for all that have opened it or will.
    fn fail_opening(&mut self, world: WorldId, error: Error) {
        let Some(hosted) = self.worlds.get_mut(&world) else { return };
        let SubworldPhase::Opening(opening) = &hosted.phase else { return };
        let until = self.now + opening.timeout();
        let to: Vec<Rank> = std::mem::take(&mut hosted.present).into_keys().collect();
        hosted.phase = SubworldPhase::Failed(error.clone(), until);
        self.actions.push(SubworldAction::Send { world, to, message: ToRank::RootCause(error) });
        self.schedule(world);
    }

    /// Handles an encoded message of a rank in a world. Whether it is one. A rank that has left the world, or
    /// is no rank of it, changes nothing: the world may have ended while the message was on its way.
    pub(super) fn on_message(&mut self, rank: Rank, world: WorldId, message: &[u8], now: Instant) -> bool {
        self.now = now;
        let message = match decode::<ToCoordinator>(message) {
            Some(
                ToCoordinator::GaveUp { .. }
                | ToCoordinator::Moved
                | ToCoordinator::Open { .. }
                | ToCoordinator::InWorld { .. }
                | ToCoordinator::Alive,
            )
            | None => return false,
            Some(message) => message,
        };
        if let ToCoordinator::Gather { part, .. } = &message
            && part.len() > PART_ALLOWANCE
            && self.held_by(rank) + part.len() > MAX_HELD
        {
            return false;
        }
        let Some(hosted) = self.worlds.get_mut(&world) else { return true };
        let Some(own) = hosted.present.get(&rank).copied() else { return true };
        match (&mut hosted.phase, message) {
            (SubworldPhase::Supervised(detector), message) => detector.on_message(own, message, now),
            (SubworldPhase::Opening(_), ToCoordinator::Abort { reason }) => {
                self.fail_opening(world, Error::aborted(reason).of_rank(own));
            }
            (SubworldPhase::Opening(_), ToCoordinator::Exit { cause }) => {
                let error = SubworldOpening::lost(own, &self.ranks[rank].process, &cause);
                self.fail_opening(world, error);
            }
            (SubworldPhase::Opening(_), ToCoordinator::Goodbye(_)) => {
                let error = SubworldOpening::lost(own, &self.ranks[rank].process, "gave up");
                self.fail_opening(world, error);
            }
            (SubworldPhase::Opening(_) | SubworldPhase::Failed(..), _) => {}
        }
        self.advance(world);
        true
    }

    /// Bytes that a rank has given to exchanges that wait for others.
    fn held_by(&self, rank: Rank) -> usize {
        let held = |id: &WorldId| {
            let Subworld { present, phase, .. } = self.worlds.get(id)?;
            match phase {
                SubworldPhase::Supervised(detector) => Some(detector.held_by(*present.get(&rank)?)),
                SubworldPhase::Opening(_) | SubworldPhase::Failed(..) => None,
            }
        };
        self.ranks.get(rank).map_or(0, |connected| connected.worlds.iter().filter_map(held).sum())
    }

    /// Handles the loss of a rank, in all worlds that contain it.
    pub(super) fn on_lost(&mut self, rank: Rank, loss: RankLoss<'_>, now: Instant) {
        self.now = now;
        let Some(ConnectedRank { process, heard, .. }) = self.ranks.get(rank) else { return };
        let (process, heard) = (process.clone(), *heard);
        let member_of = |(id, hosted): (&WorldId, &Subworld)| {
            Some((*id, hosted.members.iter().position(|member| *member == rank)?))
        };
        let worlds: Vec<(WorldId, Rank)> = self.worlds.iter().filter_map(member_of).collect();
        for (world, own) in worlds {
            let Some(hosted) = self.worlds.get_mut(&world) else { continue };
            match &mut hosted.phase {
                SubworldPhase::Supervised(detector) => {
                    detector.on_sign_of_life(own, heard);
                    match loss {
                        RankLoss::Disconnected(cause) => detector.on_disconnect(own, cause, now),
                        RankLoss::Silent(silent) => detector.on_silent(&[(own, silent)]),
                        RankLoss::GaveUp(silent) => {
                            detector.on_message(own, ToCoordinator::GaveUp { silent }, now);
                        }
                        RankLoss::Left => {}
                    }
                }
                SubworldPhase::Opening(_) => {
                    let error = SubworldOpening::lost(own, &process, &loss.describe());
                    self.fail_opening(world, error);
                }
                SubworldPhase::Failed(..) => {}
            }
            if let RankLoss::Disconnected(_) = loss {
                self.detach(rank, world);
            }
            self.advance(world);
            self.detach(rank, world);
        }
    }

    /// Handles that ranks have been silent for so long, and since the same moment, that they count as dead.
    /// Each of them is then [lost](Self::on_lost).
    pub(super) fn on_silent(&mut self, silent: &[(Rank, Duration)]) {
        for Subworld { members, phase, .. } in self.worlds.values_mut() {
            if let SubworldPhase::Supervised(detector) = phase {
                let own = |(rank, time): &(Rank, Duration)| {
                    Some((members.iter().position(|member| member == rank)?, *time))
                };
                detector.on_silent(&silent.iter().filter_map(own).collect::<Vec<_>>());
            }
        }
    }

    /// Records that the coordinator's process was paused until `now`.
    pub(super) fn on_pause(&mut self, pause: Duration, now: Instant) {
        self.now = now;
        for hosted in self.worlds.values_mut() {
            if let SubworldPhase::Supervised(detector) = &mut hosted.phase {
                detector.on_pause(pause, now);
            }
        }
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        self.now = now;
        if self.next_tick.is_none_or(|at| now < at) {
            return;
        }
        let worlds: Vec<WorldId> = self.worlds.keys().copied().collect();
        for world in worlds {
            let Some(hosted) = self.worlds.get_mut(&world) else { continue };
            match &mut hosted.phase {
                SubworldPhase::Supervised(detector) => {
                    for (rank, own) in &hosted.present {
                        detector.on_sign_of_life(*own, self.ranks[*rank].heard);
                    }
                    detector.on_tick(now);
                }
                SubworldPhase::Opening(opening) if now >= opening.deadline() => {
                    let error = opening.missing(&hosted.members);
                    self.fail_opening(world, error);
                }
                SubworldPhase::Failed(_, until) if now >= *until => self.forget(world),
                SubworldPhase::Opening(_) | SubworldPhase::Failed(..) => {}
            }
            self.advance(world);
        }
        self.next_tick = self.worlds.values().filter_map(Subworld::deadline).min();
    }

    /// Translates what a world's failure detector has decided, and forgets the world if it is over.
    fn advance(&mut self, world: WorldId) {
        let Some(Subworld { members, present, phase, .. }) = self.worlds.get_mut(&world) else { return };
        let SubworldPhase::Supervised(detector) = phase else { return self.schedule(world) };
        for action in detector.actions() {
            match action {
                DetectorAction::Broadcast(message) => {
                    let to = present.keys().copied().collect();
                    self.actions.push(SubworldAction::Send { world, to, message });
                }
                // The connection has heartbeats and answers of its own.
                DetectorAction::Send(_, ToRank::HeartbeatAck) => {}
                DetectorAction::Send(own, message) => {
                    self.actions.push(SubworldAction::Send { world, to: vec![members[own]], message });
                }
                DetectorAction::Close(own) => {
                    let rank = members[own];
                    if present.remove(&rank).is_some() {
                        self.ranks[rank].worlds.remove(&world);
                        let to = vec![rank];
                        self.actions.push(SubworldAction::Send { world, to, message: ToRank::LeaveAck });
                        self.actions.push(SubworldAction::Left(rank));
                    }
                }
                DetectorAction::GiveUp(own, silent) => {
                    self.actions.push(SubworldAction::GiveUp(members[own], silent));
                }
            }
        }
        if detector.is_over() {
            self.forget(world);
        } else {
            self.schedule(world);
        }
    }

    /// Lets the next tick come in time for this world.
    fn schedule(&mut self, world: WorldId) {
        let deadline = self.worlds.get(&world).and_then(Subworld::deadline);
        self.next_tick = self.next_tick.into_iter().chain(deadline).min();
    }

    /// The rank is no part of this world any more.
    fn detach(&mut self, rank: Rank, world: WorldId) {
        self.ranks[rank].worlds.remove(&world);
        if let Some(hosted) = self.worlds.get_mut(&world) {
            hosted.present.remove(&rank);
        }
    }

    fn forget(&mut self, world: WorldId) {
        if let Some(hosted) = self.worlds.remove(&world) {
            if let Some(opener) = hosted.opener {
                self.ranks[opener].pending -= hosted.members.len();
            }
            for member in hosted.members {
                self.ranks[member].worlds.remove(&world);
            }
        }
    }
}
