//! What follows from what a rank knows about the others: which rank leads, and what the leader decides.
//!
//! Owns these conclusions.

use super::{
    Agreement, AgreementAction, NOTICE_WAIT, Reach, ShrinkCall, ShrinkNotice, ShrinkProgress, Stance,
};
use crate::bootstrap::shrink::message::excluded_by;
use crate::error::{Error, ErrorKind};
use crate::rank::{Rank, RankList};
use std::time::{Duration, Instant};

/// How long a rank waits for one candidate before it also tries the next one.
const STAGGER: Duration = Duration::from_millis(30);
/// How long a connection that was lost is not tried again.
const RECONNECT: Duration = Duration::from_millis(20);

/// Whether a rank can be a member.
enum Standing {
    Alive,
    /// It is not known yet. Being tried since this time; `None` if it is not tried.
    Pending(Option<Instant>),
    Absent,
}

impl Agreement {
    fn standing(&self, rank: Rank) -> Standing {
        let peer = &self.peers[rank];
        match peer.reach {
            _ if peer.left_out => Standing::Absent,
            Reach::Gone | Reach::Silent | Reach::Unreachable => Standing::Absent,
            Reach::Untried { .. } => Standing::Pending(None),
            Reach::Connecting => Standing::Pending(Some(peer.since)),
            Reach::Connected => match &peer.stance {
                Some(Stance::LeftOut) => Standing::Absent,
                Some(_) => Standing::Alive,
                None => Standing::Pending(Some(peer.since)),
            },
        }
    }

    fn connect(&mut self, rank: Rank, now: Instant) {
        if let Reach::Untried { since } = self.peers[rank].reach
            && since.is_none_or(|since| now >= since + RECONNECT)
        {
            self.peers[rank].reach = Reach::Connecting;
            self.peers[rank].since = now;
            self.actions.push(AgreementAction::Connect(rank));
        }
    }

    /// Looks for ranks, and decides if this rank is the leader and all others are accounted for.
    pub(super) fn evaluate(&mut self, mut call: ShrinkCall, now: Instant) {
        for peer in &mut self.peers {
            if now.saturating_duration_since(peer.since) >= self.silence {
                peer.reach = match peer.reach {
                    Reach::Connecting => Reach::Unreachable,
                    Reach::Connected => Reach::Silent,
                    other => other,
                };
            }
        }
        let is_excluded = |rank: Rank| call.exclude.binary_search(&rank).is_ok();
        // Finds the lowest rank that answers. Tries the next one already before this one counts as silent.
        let (mut is_leader, mut may_lead) = (true, true);
        for rank in (0..self.me).filter(|rank| !is_excluded(*rank)) {
            match self.standing(rank) {
                Standing::Absent => continue,
                Standing::Pending(Some(since)) if now.saturating_duration_since(since) >= STAGGER => {
                    is_leader = false;
                    continue;
                }
                Standing::Pending(None) => self.connect(rank, now),
                Standing::Alive if self.peers[rank].excludes_me => {
                    self.fail(excluded_by(&[rank], self.me));
                    return;
                }
                Standing::Pending(Some(_)) | Standing::Alive => {}
            }
            (is_leader, may_lead) = (false, false);
            break;
        }
        if may_lead {
            (self.me + 1..self.peers.len())
                .filter(|rank| !is_excluded(*rank))
                .for_each(|rank| self.connect(rank, now));
        }
        let others: Vec<Rank> =
            (0..self.peers.len()).filter(|rank| *rank != self.me && !is_excluded(*rank)).collect();
        let (mut members, mut excluding) = (vec![self.me], Vec::new());
        call.waiting_for.clear();
        for rank in others.iter().copied().filter(|rank| *rank > self.me) {
            match self.standing(rank) {
                Standing::Absent => {}
                Standing::Alive if self.peers[rank].excludes_me => excluding.push(rank),
                Standing::Alive if self.has_called(rank) => members.push(rank),
                Standing::Alive | Standing::Pending(_) => call.waiting_for.push(rank),
            }
        }
        if is_leader && call.waiting_for.is_empty() && !excluding.is_empty() {
            if members.len() == 1 {
                self.fail(excluded_by(&excluding, self.me));
            } else {
                let error = Error::disagreement(format!(
                    "{} excluded rank {} from the new communicator, but {} did not: all ranks must give one list of ranks to leave out",
                    RankList::new(&excluding),
                    self.me,
                    RankList::new(&members[1..])
                ));
                self.fail_all(error);
            }
            return;
        }
        if is_leader && call.waiting_for.is_empty() {
            self.decide(call, members, &others, now);
            return;
        }
        if now >= call.deadline {
            let error = self.timed_out(&call, is_leader, now);
            self.fail_all(error);
            return;
        }
        self.progress = ShrinkProgress::Called(call);
    }

    pub(super) fn has_called(&self, rank: Rank) -> bool {
        matches!(self.peers[rank].stance, Some(Stance::Called { .. }))
    }

    /// Decides as the leader: all ranks in `others` are members, or absent.
    fn decide(&mut self, mut call: ShrinkCall, members: Vec<Rank>, others: &[Rank], now: Instant) {
        let exclude_of = |rank: Rank| match &self.peers[rank].stance {
            Some(Stance::Called { exclude, .. }) => Some(exclude),
            _ => None,
        };
        let differing = members[1..].iter().find(|rank| exclude_of(**rank) != Some(&call.exclude));
        if let Some(rank) = differing.copied() {
            let theirs = exclude_of(rank).map(Vec::as_slice).unwrap_or_default();
            let error = Error::disagreement(format!(
                "rank {} excludes {} from the new communicator, but rank {rank} excludes {}",
                self.me,
                RankList::new(&call.exclude),
                RankList::new(theirs)
            ));
            self.fail_all(error);
            return;
        }
        let is_silent = |rank: &Rank| self.peers[*rank].reach == Reach::Silent;
        let unreachable: Vec<Rank> =
            others.iter().copied().filter(|rank| self.peers[*rank].reach == Reach::Unreachable).collect();
        let uncertain: Vec<Rank> = if unreachable.is_empty() {
            Vec::new()
        } else {
            others.iter().copied().filter(|rank| unreachable.contains(rank) || is_silent(rank)).collect()
        };
        let has_quorum = match members.len().cmp(&uncertain.len()) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => members[0] < uncertain[0],
            std::cmp::Ordering::Less => false,
        };
        if !has_quorum {
            let error = Error::rendezvous(format!(
                "{} cannot be reached and may have gone on without {}: if the processes are gone, name these ranks in \
                 the list of ranks to leave out",
                RankList::new(&uncertain),
                RankList::new(&members)
            ));
            self.fail_all(error);
            return;
        }
        let silent: Vec<Rank> =
            others.iter().copied().filter(|rank| is_silent(rank) && !self.peers[*rank].left_out).collect();
        if !silent.is_empty() {
            for rank in silent {
                self.peers[rank].left_out = true;
                let generation = self.peers[rank].generation;
                let notice = ShrinkNotice { generation, members: members.clone() };
                self.actions.push(AgreementAction::Notify(rank, notice));
            }
            call.notified_at = Some(now);
        }
        let is_settled = call.notified_at.is_none_or(|at| now >= at + NOTICE_WAIT);
        self.progress = ShrinkProgress::Called(call);
        if is_settled && !self.is_deciding {
            self.is_deciding = true;
            self.actions.push(AgreementAction::Decide(members));
        }
    }

    fn timed_out(&self, call: &ShrinkCall, is_leader: bool, now: Instant) -> Error {
        let waited = now.saturating_duration_since(call.began).as_secs_f64();
        let mut missing: Vec<Rank> = call.waiting_for.clone();
        if !is_leader {
            // The leader knows which ranks have not called. If it has not called itself, it is the one.
            let is_candidate = |rank: &Rank| call.exclude.binary_search(rank).is_err();
            let leader = (0..self.me)
                .filter(is_candidate)
                .find(|rank| !matches!(self.standing(*rank), Standing::Absent));
            missing = match leader.map(|rank| (rank, &self.peers[rank].stance)) {
                Some((_, Some(Stance::Called { waiting_for, .. }))) => waiting_for.clone(),
                Some((rank, _)) => vec![rank],
                None => missing,
            };
        }
        let missing = RankList::new(&missing);
        let have = missing.have();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{missing} {have} not called shrink within {waited:.1} s: all ranks that are alive must call it, or be named in \
                 the list of ranks to leave out"
            ),
        )
    }
}
