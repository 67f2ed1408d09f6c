//! The failure detector of one world, from the rendezvous until the last rank has left.
//!
//! Owns the decision about the root cause of a failure. Callers report heartbeats, failure reports, goodbyes,
//! disconnects and the time; the detector settles on at most one root cause, the same message for every rank.
//! Does no I/O: it returns [`DetectorAction`]s.

mod absence;
mod exchange;
mod member;

use super::call_state::{CallState, departed_before_call};
use super::heartbeat::{HeartbeatMonitor, seconds};
use super::process::Process;
use super::protocol::{PEER_MESSAGE_LIMIT, ToCoordinator, ToRank, part_limit};
use super::rendezvous::JoinedPeer;
use super::world_status::{ROWS_IN_ERROR, RankActivity, RankReport, WorldStatus};
use crate::error::{Error, ErrorKind};
use crate::fault_point::{FaultPoint, reach};
use crate::peer_text::PeerText;
use crate::rank::Rank;
use absence::{describe_absence, describe_absent, describe_silence};
use exchange::PendingGather;
use member::{Member, RankStatus};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a report waits for a better root cause than its own error.
const ROOT_CAUSE_WINDOW: Duration = Duration::from_millis(300);
/// How long after a pause of the coordinator's process a lost connection is put down to the pause.
const PAUSE_CONSEQUENCES: Duration = Duration::from_secs(2);

/// What the coordinator must do.
#[derive(Debug, PartialEq)]
pub(super) enum DetectorAction {
    /// Send a message to every active rank.
    Broadcast(ToRank),
    /// Send a message to one rank.
    Send(Rank, ToRank),
    /// The rank is no part of this world any more. Close its connection once its queued messages are sent.
    Close(Rank),
    /// Close the connection of a rank that has been silent for this time.
    GiveUp(Rank, Duration),
}

/// A reported failure whose root cause is not settled.
#[derive(Debug)]
struct FailureReport {
    reporter: Rank,
    error: Error,
    suspect: Option<Rank>,
    deadline: Instant,
    /// Ranks whose reports have been adopted. Each counts once, so that two ranks that blame each other do
    /// not alternate forever.
    adopted: Vec<Rank>,
}

/// The state of one world.
#[derive(Debug)]
pub(super) struct FailureDetector {
    members: Vec<Member>,
    host_process: Process,
    /// Description of the host process.
    host: String,
    /// The last pause of the host process, and until when it explains a lost connection.
    pause: Option<(Duration, Instant)>,
    /// The smallest number of finished calls that was announced in a [`ToRank::Left`].
    announced: Option<u64>,
    gather: Option<PendingGather>,
    gathered: u64,
    report: Option<FailureReport>,
    root_cause: Option<Error>,
    closing: bool,
    last_tick: Instant,
    actions: Vec<DetectorAction>,
}

impl FailureDetector {
    /// Starts to supervise `peers`, given in rank order. `host_process` runs the coordinator.
    pub(super) fn new(peers: Vec<JoinedPeer>, host_process: Process, now: Instant) -> Self {
        let members: Vec<Member> = peers
            .into_iter()
            .map(|peer| Member {
                process: peer.process,
                timeout: peer.params.exchange_timeout,
                heartbeat: peer.params.heartbeat,
                status: RankStatus::Active,
                monitor: HeartbeatMonitor::new(peer.params.heartbeat),
                state: CallState::Idle { finished: 0 },
                since: now,
                heard: now,
                fresh: false,
                correspondents: BTreeSet::new(),
            })
            .collect();
        let is_host = |(rank, member): (Rank, &Member)| (member.process == host_process).then_some(rank);
        let ranks: Vec<Rank> = members.iter().enumerate().filter_map(is_host).collect();
        let described = match ranks.first() {
            Some(rank) => format!("rank {rank} ({host_process})"),
            None => format!("the process that created the unique id ({host_process})"),
        };
        let host = described.as_str().into();
        Self {
            members,
            host_process,
            host: described,
            pause: None,
            announced: None,
            gather: None,
            gathered: 0,
            report: None,
            root_cause: None,
            closing: false,
            last_tick: now,
            actions: vec![DetectorAction::Broadcast(ToRank::Welcome { host, ranks })],
        }
    }

    /// The actions since the last call, in order.
    pub(super) fn actions(&mut self) -> Vec<DetectorAction> {
        std::mem::take(&mut self.actions)
    }

    /// Whether no rank is active any more.
    pub(super) fn is_over(&self) -> bool {
        self.members.iter().all(|member| member.status != RankStatus::Active)
    }

    /// The next time to call [`on_tick`](Self::on_tick).
    pub(super) fn deadline(&self) -> Option<Instant> {
        let next_heartbeat =
            self.active().map(|(_, member)| member.heartbeat).min().map(|interval| self.last_tick + interval);
        let gather = self.gather.as_ref().map(PendingGather::deadline);
        let report = self.report.as_ref().map(|report| report.deadline);
        next_heartbeat.into_iter().chain(gather).chain(report).min()
    }

    /// Handles a message of a rank.
    pub(super) fn on_message(&mut self, rank: Rank, message: ToCoordinator, now: Instant) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.status != RankStatus::Active {
            return;
        }
        member.monitor.reset();
        member.heard = now;
        match message {
            ToCoordinator::Heartbeat(state) => {
                reach(FaultPoint::CoordinatorReceivedHeartbeat);
                self.actions.push(DetectorAction::Send(rank, ToRank::HeartbeatAck));
                self.update_state(rank, state, now);
                self.settle(now);
            }
            ToCoordinator::Gather { number, label, part } => self.on_gather(rank, number, label, part, now),
            ToCoordinator::ToPeers(messages) => self.on_peer_messages(rank, messages),
            ToCoordinator::Report { error, suspect, state } => {
                self.update_state(rank, state, now);
                self.on_report(rank, error, suspect, now);
            }
            ToCoordinator::Abort { reason } => {
                self.fail(Error::aborted(reason).of_rank(rank));
            }
            ToCoordinator::Exit { cause } => {
                let message = format!("rank {rank} ({}) {cause}", member.process);
                self.fail_after_exit(rank, Error::peer_lost(message));
            }
            ToCoordinator::Goodbye(state) => {
                reach(FaultPoint::CoordinatorReceivedGoodbye);
                self.update_state(rank, state, now);
                self.on_goodbye(rank, now);
            }
            ToCoordinator::GaveUp { silent } => self.on_gave_up(rank, silent),
            // These concern no world, or another one.
            ToCoordinator::Moved
            | ToCoordinator::Open { .. }
            | ToCoordinator::InWorld { .. }
            | ToCoordinator::Alive => {}
        }
    }

    /// Whether the rank is part of this world: it has neither left nor died.
    pub(super) fn is_active(&self, rank: Rank) -> bool {
        self.members.get(rank).is_some_and(|member| member.status == RankStatus::Active)
    }

    /// Records that anything came from a rank at this time, possibly a message of another world.
    pub(super) fn on_sign_of_life(&mut self, rank: Rank, at: Instant) {
        if let Some(member) = self.members.get_mut(rank).filter(|member| at > member.heard) {
            member.monitor.reset();
            member.heard = at;
        }
    }

    /// Handles the end of a rank's connection without a goodbye. `cause` is a verb phrase such as `closed`.
    pub(super) fn on_disconnect(&mut self, rank: Rank, cause: &str, now: Instant) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.status != RankStatus::Active {
            return;
        }
        member.status = RankStatus::Lost;
        let (process, state) = (&member.process, member.state);
        let ago = seconds(now.saturating_duration_since(member.heard));
        let message = match self.pause {
            Some((pause, until)) if now < until => format!(
                "{} was paused for {} (stopped, or its machine was), and the control connection of rank {rank} ({process}) \
                 {cause} meanwhile",
                self.host,
                seconds(pause)
            ),
            _ => format!(
                "rank {rank} ({process}) died: its control connection {cause}; its last message came {ago} before, {state}"
            ),
        };
        self.fail(Error::peer_lost(message));
    }

    /// Records that the coordinator's process was paused until `now`.
    pub(super) fn on_pause(&mut self, pause: Duration, now: Instant) {
        self.pause = Some((pause, now + PAUSE_CONSEQUENCES));
    }

    /// The rank was alive but heard nothing from the coordinator, which is therefore to blame.
    fn on_gave_up(&mut self, rank: Rank, silent: Duration) {
        self.members[rank].status = RankStatus::Lost;
        let message = format!(
            "{} was silent for {}: stopped, swapped out, or cut off from the network; rank {rank} gave it up",
            self.host,
            seconds(silent)
        );
        self.fail(Error::peer_lost(message));
        self.actions.push(DetectorAction::Close(rank));
    }

    /// The state of all ranks.
    pub(super) fn status(&self, now: Instant) -> WorldStatus {
        let row = |(rank, member): (Rank, &Member)| {
            let activity = match member.status {
                RankStatus::Active => RankActivity::Idle,
                RankStatus::Left => RankActivity::Left,
                RankStatus::Lost => RankActivity::Lost,
            };
            let Process { host, pid, .. } = &member.process;
            let row = RankReport::new(rank, host, *pid, activity).with_state(&member.state);
            RankReport { since: Some(now.saturating_duration_since(member.since)), ..row }
        };
        WorldStatus::new(self.members.iter().enumerate().map(row).collect(), self.root_cause.clone())
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.last_tick);
        self.last_tick = now;
        self.members.iter_mut().for_each(|member| member.monitor.advance(elapsed));
        if self.active().any(|(_, member)| member.monitor.expired().is_some()) {
            let silent: Vec<(Rank, Duration)> = self
                .active()
                .filter_map(|(rank, member)| Some((rank, member.monitor.expires_with_another()?)))
                .collect();
            self.on_silent(&silent);
            self.actions.extend(silent.into_iter().map(|(rank, time)| DetectorAction::GiveUp(rank, time)));
        }
        if let Some((ranks, text)) = self.gather.as_mut().and_then(|gather| gather.report(&self.members, now))
        {
            let notice = |rank| DetectorAction::Send(rank, ToRank::Notice(text.as_str().into()));
            self.actions.extend(ranks.into_iter().map(notice));
        }
        if let Some(gather) = self.gather.take_if(|gather| now >= gather.deadline()) {
            self.fail(gather.timeout(self.members.len()));
        }
        self.settle(now);
    }

    /// Handles that ranks have been silent for so long, and since the same moment, that they count as dead.
    pub(super) fn on_silent(&mut self, silent: &[(Rank, Duration)]) {
        let ranks: Vec<Rank> =
            silent.iter().map(|(rank, _)| *rank).filter(|rank| self.is_active(*rank)).collect();
        let Some(time) = silent.iter().map(|(_, time)| *time).min().filter(|_| !ranks.is_empty()) else {
            return;
        };
        let message = describe_silence(&self.members, &ranks, time);
        ranks.iter().for_each(|rank| self.members[*rank].status = RankStatus::Lost);
        self.fail(Error::peer_lost(message));
    }

    fn active(&self) -> impl Iterator<Item = (Rank, &Member)> {
        self.members.iter().enumerate().filter(|(_, member)| member.status == RankStatus::Active)
    }

    /// Settles on the root cause, unless there is one already.
    fn fail(&mut self, error: Error) {
        if self.root_cause.is_some() {
            return;
        }
        self.root_cause = Some(error.clone());
        self.report = None;
        self.gather = None;
        reach(FaultPoint::CoordinatorDecidedRootCause);
        self.actions.push(DetectorAction::Broadcast(ToRank::RootCause(error)));
    }

    /// Settles on the root cause, unless there is one already: that of a rank whose process ends, or may end
    /// because it has left. It ends before those of its machine that fail with it, so that a launcher sees
    /// which process failed first.
    fn fail_after_exit(&mut self, rank: Rank, error: Error) {
        if self.root_cause.is_none() {
            self.actions.push(self.await_exit(rank));
            self.fail(error);
        }
    }

    fn await_exit(&self, rank: Rank) -> DetectorAction {
        let Member { process, status, .. } = &self.members[rank];
        let ends = *status != RankStatus::Left;
        DetectorAction::Broadcast(ToRank::AwaitExit { process: process.clone(), ends })
    }

    /// Records a rank's call state, and compares its call with those of the other ranks.
    fn update_state(&mut self, rank: Rank, state: CallState, now: Instant) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.state != state {
            member.state = state;
            member.since = now;
        }
        member.fresh = true;
        let CallState::InCall(call) = state else {
            return;
        };
        let other = self.members.iter().enumerate().find_map(|(them, member)| {
            let theirs = member.state.call()?;
            theirs.contradicts(&call).then_some((them, *theirs))
        });
        if let Some((them, theirs)) = other {
            let difference = if rank < them {
                call.difference(rank, &theirs, them)
            } else {
                theirs.difference(them, &call, rank)
            };
            self.fail(Error::disagreement(difference));
        }
        self.check_departures();
    }

    /// Fails the world if an active rank is in a call that a rank has left without.
    fn check_departures(&mut self) {
        let departed =
            self.members.iter().enumerate().filter(|(_, member)| member.status == RankStatus::Left);
        let Some((leaver, left)) = departed.min_by_key(|(_, member)| member.state.finished()) else {
            return;
        };
        let finished = left.state.finished();
        let beyond = self.active().find_map(|(rank, member)| {
            let call = member.state.call().filter(|call| call.last_collective() > finished)?;
            Some(departed_before_call(&format!("rank {leaver} ({})", left.process), finished, rank, call))
        });
        if let Some(message) = beyond {
            self.fail_after_exit(leaver, Error::peer_lost(message));
        }
    }

    fn on_gather(&mut self, rank: Rank, number: u64, label: PeerText, part: Vec<u8>, now: Instant) {
        if self.root_cause.is_some() {
            return;
        }
        let (timeout, limit) = (self.members[rank].timeout, part_limit(self.members.len()));
        if part.len() > limit {
            self.fail(Error::disagreement(format!(
                "rank {rank} gives {} bytes to the exchange of {label}, and each rank may give {limit}; do all ranks run the same \
                 version?",
                part.len()
            )));
            return;
        }
        let gather = self
            .gather
            .get_or_insert_with(|| PendingGather::new(self.gathered + 1, label.clone(), timeout, now));
        if let Err(error) = gather.add(rank, (number, &label), part, timeout, now) {
            self.fail(error);
            return;
        }
        match self.gather.take_if(|gather| gather.is_complete(self.members.len())) {
            Some(gather) => {
                let (number, groups) = gather.into_parts();
                self.gathered = number;
                reach(FaultPoint::CoordinatorCompletedExchange);
                let messages = groups.into_iter().map(|parts| ToRank::Gathered { number, parts });
                self.actions.extend(messages.map(DetectorAction::Broadcast));
            }
            None => self.check_exchange(),
        }
    }

    /// Bytes that a rank has given to the exchange that waits for others.
    pub(super) fn held_by(&self, rank: Rank) -> usize {
        self.gather.as_ref().map_or(0, |gather| gather.bytes_of(rank))
    }

    /// Passes messages of a rank to other ranks.
    fn on_peer_messages(&mut self, from: Rank, messages: Vec<(Rank, Vec<u8>)>) {
        if self.root_cause.is_some() {
            return;
        }
        let world = self.members.len();
        for (to, message) in messages {
            if to >= world || message.len() > PEER_MESSAGE_LIMIT {
                let len = message.len();
                self.fail(Error::disagreement(format!(
                    "rank {from} sends {len} bytes to rank {to} of {world} over its control connection, which no release of \
                     flexring does; do all ranks run the same version?"
                )));
                return;
            }
            if self.members[to].status == RankStatus::Active {
                self.members[to].correspondents.insert(from);
                self.actions.push(DetectorAction::Send(to, ToRank::FromPeer { from, message }));
            } else {
                self.actions.push(DetectorAction::Send(from, departed(to)));
            }
        }
    }

    /// Fails the exchange if a rank that is missing from it has left.
    fn check_exchange(&mut self) {
        let departure = self.gather.as_ref().and_then(|gather| gather.departure(&self.members));
        if let Some((rank, error)) = departure {
            self.fail_after_exit(rank, error);
        }
    }

    fn on_goodbye(&mut self, rank: Rank, now: Instant) {
        self.members[rank].status = RankStatus::Left;
        self.members[rank].since = now;
        self.check_departures();
        // A rank that enters a call beyond this number from now on must not wait for the leaver.
        let finished = self.members[rank].state.finished();
        if self.announced.is_none_or(|announced| finished < announced) {
            self.announced = Some(finished);
            self.actions.push(DetectorAction::Broadcast(ToRank::Left { rank, finished }));
        }
        for correspondent in std::mem::take(&mut self.members[rank].correspondents) {
            if self.is_active(correspondent) {
                self.actions.push(DetectorAction::Send(correspondent, departed(rank)));
            }
        }
        let in_host_process = |member: &Member| member.process == self.host_process;
        // The host process may end as soon as its last rank has left, and the coordinator with it.
        if !self.closing
            && in_host_process(&self.members[rank])
            && !self.active().any(|(_, member)| in_host_process(member))
        {
            self.closing = true;
            self.actions.push(self.await_exit(rank));
            self.actions.push(DetectorAction::Broadcast(ToRank::Closing));
        }
        self.actions.push(DetectorAction::Close(rank));
        self.check_exchange();
        self.settle(now);
    }

    fn on_report(&mut self, reporter: Rank, error: Error, suspect: Option<Rank>, now: Instant) {
        if self.root_cause.is_some() {
            return;
        }
        let suspect = suspect.filter(|suspect| *suspect != reporter && *suspect < self.members.len());
        // A disagreement names both ranks. What the other one reports is a consequence.
        let suspect = suspect.filter(|_| error.kind() != ErrorKind::Disagreement);
        let is_root_cause = suspect.is_none() && error.kind() != ErrorKind::Timeout;
        match &mut self.report {
            None => {
                self.report = Some(FailureReport {
                    reporter,
                    error,
                    suspect,
                    deadline: now + ROOT_CAUSE_WINDOW,
                    adopted: vec![reporter],
                });
                for member in &mut self.members {
                    member.fresh = false;
                }
                self.members[reporter].fresh = true;
                self.actions.push(DetectorAction::Broadcast(ToRank::RequestState));
            }
            // The report of the suspected rank is closer to the root cause; so is one that blames no other
            // rank.
            Some(report)
                if is_root_cause
                    || (report.suspect == Some(reporter) && !report.adopted.contains(&reporter)) =>
            {
                report.reporter = reporter;
                report.error = error;
                report.suspect = suspect;
                report.adopted.push(reporter);
            }
            Some(_) => {}
        }
        self.settle(now);
    }

    /// Settles on the reported error if no better root cause can be expected.
    fn settle(&mut self, now: Instant) {
        let Some(report) = &self.report else {
            return;
        };
        let is_final = match report.suspect {
            Some(suspect) => self.members[suspect].status != RankStatus::Active,
            // A rank's own failure needs no further cause. A timeout needs the call states of the other
            // ranks.
            None => {
                report.error.kind() != ErrorKind::Timeout || self.active().all(|(_, member)| member.fresh)
            }
        };
        if !is_final && now < report.deadline {
            return;
        }
        let timed_out = report.error.kind() == ErrorKind::Timeout;
        let mut message = report.error.clone().of_rank(report.reporter).message().to_owned();
        if let Some(call) = self.members[report.reporter].state.call() {
            if timed_out && call.is_collective() {
                message = format!("{message} ({})", describe_absent(&self.members, call));
            } else if let Some(suspect) = report.suspect
                && (timed_out || self.members[suspect].status == RankStatus::Left)
            {
                message =
                    format!("{message} ({})", describe_absence(&self.members[suspect], call, &[suspect]));
            }
        }
        if timed_out {
            message = format!("{message}\n{}", self.status(now).table(ROWS_IN_ERROR).trim_end());
        }
        let error = Error::new(report.error.kind(), message);
        match report.suspect.filter(|suspect| self.members[*suspect].status == RankStatus::Left) {
            Some(suspect) => self.fail_after_exit(suspect, error),
            None => self.fail(error),
        }
    }
}

/// Tells a rank that this one, which it has sent messages to, has left.
fn departed(rank: Rank) -> ToRank {
    ToRank::FromPeer { from: rank, message: Vec::new() }
}

#[cfg(test)]
mod tests;
