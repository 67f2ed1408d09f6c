//! The worlds of one coordinator: the one that its ranks joined, and those that they have opened over its
//! connections.
//!
//! Owns which world a frame concerns, and when a rank's connection is closed: once the rank has left all its
//! worlds, or is lost. A rank that is lost is lost in all its worlds, and in no other one; apart from that,
//! worlds do not affect each other. Does no I/O: it returns [`WorldsAction`]s.

use super::failure_detector::{DetectorAction, FailureDetector};
use super::process::Process;
use super::protocol::{ToCoordinator, ToRank, decode};
use super::rendezvous::JoinedPeer;
use super::subworlds::{RankLoss, SubworldAction, Subworlds};
use super::world_status::WorldStatus;
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What the coordinator must do. Ranks are those of the first world.
#[derive(Debug, PartialEq)]
pub(super) enum WorldsAction {
    /// Send a message to every rank that is connected.
    Broadcast(ToRank),
    /// Send a message to these ranks, as far as they are connected.
    Send(Vec<Rank>, ToRank),
    /// Close a rank's connection once its queued messages are sent.
    Close(Rank),
}

/// The first world and all further ones.
#[derive(Debug)]
pub(super) struct Worlds {
    first: FailureDetector,
    hosted: Subworlds,
    /// The ranks whose connections are in use.
    connected: BTreeSet<Rank>,
    /// The time of the last event.
    now: Instant,
    actions: Vec<WorldsAction>,
}

impl Worlds {
    /// Starts to supervise `peers`, given in rank order. `host_process` runs the coordinator.
    pub(super) fn new(peers: Vec<JoinedPeer>, host_process: Process, now: Instant) -> Self {
        let hosted = Subworlds::new(&peers, host_process.clone(), now);
        let connected = (0..peers.len()).collect();
        let first = FailureDetector::new(peers, host_process, now);
        Self { first, hosted, connected, now, actions: Vec::new() }
    }

    /// Whether no rank is in any world.
    pub(super) fn is_over(&self) -> bool {
        self.first.is_over() && self.hosted.is_over()
    }

    /// The next time to call [`on_tick`](Self::on_tick).
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.first.deadline().into_iter().chain(self.hosted.deadline()).min()
    }

    /// The state of all ranks, in all worlds.
    pub(super) fn status(&self, now: Instant) -> WorldStatus {
        self.first.status(now).with_further(self.hosted.statuses(now))
    }

    /// Handles a frame of a rank. Whether it is valid.
    pub(super) fn on_frame(&mut self, rank: Rank, frame: &[u8], now: Instant) -> bool {
        let Some(message) = decode::<ToCoordinator>(frame) else {
            return false;
        };
        if !self.connected.contains(&rank) {
            return true;
        }
        self.now = now;
        self.first.on_sign_of_life(rank, now);
        self.hosted.on_sign_of_life(rank, now);
        match message {
            ToCoordinator::Open { world, members, timeout } => {
                self.hosted.on_open(rank, world, members, timeout, &self.connected);
            }
            ToCoordinator::InWorld { world, message } => {
                return self.hosted.on_message(rank, world, &message, now);
            }
            ToCoordinator::Alive => self.actions.push(WorldsAction::Send(vec![rank], ToRank::HeartbeatAck)),
            ToCoordinator::GaveUp { silent } => {
                self.hosted.on_lost(rank, RankLoss::GaveUp(silent), now);
                self.first.on_message(rank, ToCoordinator::GaveUp { silent }, now);
            }
            message => self.first.on_message(rank, message, now),
        }
        true
    }

    /// Handles the end of a rank's connection. `cause` is a verb phrase such as `closed`.
    pub(super) fn on_disconnect(&mut self, rank: Rank, cause: &str, now: Instant) {
        self.now = now;
        if self.connected.remove(&rank) {
            self.first.on_disconnect(rank, cause, now);
            self.hosted.on_lost(rank, RankLoss::Disconnected(cause), now);
        }
    }

    /// Records that the coordinator's process was paused until `now`.
    pub(super) fn on_pause(&mut self, pause: Duration, now: Instant) {
        self.first.on_pause(pause, now);
        self.hosted.on_pause(pause, now);
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        self.now = now;
        self.first.on_tick(now);
        self.hosted.on_tick(now);
    }

    /// The actions since the last call, in order.
    pub(super) fn actions(&mut self) -> Vec<WorldsAction> {
        let mut closing = Vec::new();
        loop {
            let (first, hosted) = (self.first.actions(), self.hosted.actions());
            if first.is_empty() && hosted.is_empty() {
                break;
            }
            for action in first {
                match action {
                    DetectorAction::Broadcast(message) => self.actions.push(WorldsAction::Broadcast(message)),
                    DetectorAction::Send(rank, message) => {
                        self.actions.push(WorldsAction::Send(vec![rank], message));
                    }
                    DetectorAction::Close(rank) if self.hosted.serves(rank) => {
                        self.actions.push(WorldsAction::Send(vec![rank], ToRank::LeaveAck));
                    }
                    DetectorAction::Close(rank) => closing.push((rank, RankLoss::Left)),
                    DetectorAction::GiveUp(rank, silent) => closing.push((rank, RankLoss::Silent(silent))),
                }
            }
            for action in hosted {
                match action {
                    SubworldAction::Send { world, to, message } => match message.in_world(world) {
                        Ok(message) => self.actions.push(WorldsAction::Send(to, message)),
                        Err(error) => log::error!("the coordinator cannot encode a message: {error}"),
                    },
                    SubworldAction::Left(rank) if self.first.is_active(rank) || self.hosted.serves(rank) => {}
                    SubworldAction::Left(rank) => closing.push((rank, RankLoss::Left)),
                    SubworldAction::GiveUp(rank, silent) => closing.push((rank, RankLoss::Silent(silent))),
                }
            }
            let silent = |(rank, loss): &(Rank, RankLoss<'_>)| match loss {
                RankLoss::Silent(time) if self.connected.contains(rank) => Some((*rank, *time)),
                _ => None,
            };
            let silent: Vec<(Rank, Duration)> = closing.iter().filter_map(silent).collect();
            self.first.on_silent(&silent);
            self.hosted.on_silent(&silent);
            // What follows from the loss of a rank is sent to that rank, too.
            for (rank, loss) in &closing {
                if self.connected.remove(rank) {
                    self.hosted.on_lost(*rank, *loss, self.now);
                }
            }
        }
        let mut actions = std::mem::take(&mut self.actions);
        let mut closed = BTreeSet::new();
        for (rank, _) in closing {
            if closed.insert(rank) {
                actions.push(WorldsAction::Close(rank));
            }
        }
        actions
    }
}

#[cfg(test)]
mod tests;
