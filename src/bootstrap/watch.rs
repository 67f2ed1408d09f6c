//! The watch: over a world that has met, until its last rank has left.
//!
//! Owns the decision who is to blame: it hears heartbeats, reports and goodbyes, and comes to at most one
//! verdict, the same sentence for every rank. Does no I/O: it is told what comes and what time it is, and
//! gives orders.

use super::assembly::Guest;
use super::frame::{ToHub, ToRank};
use super::roster::{Process, ranks};
use super::silence::{Silence, seconds};
use super::status::{Standing, short};
use crate::call::Call;
use crate::error::{Error, ErrorKind};
use crate::transport::Rank;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a report waits for a better cause than its reporter's.
const CONSIDERATION: Duration = Duration::from_millis(300);

/// What the hub must do.
#[derive(Debug, PartialEq)]
pub(super) enum Order {
    /// Tell every rank that is there.
    All(ToRank),
    /// Tell one.
    One(Rank, ToRank),
    /// Close a rank's connection once it has been told everything.
    Part(Rank),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Here,
    Left,
    Lost,
}

#[derive(Debug)]
struct Member {
    process: Process,
    timeout: Duration,
    heartbeat: Duration,
    presence: Presence,
    silence: Silence,
    standing: Standing,
    /// Whether the standing is newer than the last time everybody was asked.
    fresh: bool,
}

/// An exchange under way.
#[derive(Debug)]
struct Gathering {
    what: String,
    parts: BTreeMap<Rank, Vec<u8>>,
    due: Instant,
    patience: Duration,
}

/// A failure whose cause is being looked for.
#[derive(Debug)]
struct Case {
    reporter: Rank,
    error: Error,
    suspect: Option<Rank>,
    due: Instant,
    /// Who has been believed already, so that two that accuse each other go round only once.
    heard: Vec<Rank>,
}

/// A world under watch.
#[derive(Debug)]
pub(super) struct Watch {
    members: Vec<Member>,
    keeper: Process,
    gathering: Option<Gathering>,
    gathered: u64,
    case: Option<Case>,
    verdict: Option<Error>,
    closing: bool,
    last_tick: Instant,
    orders: Vec<Order>,
}

impl Watch {
    /// Begins to watch over `guests`, in the order of their ranks, from within the process `keeper`.
    pub(super) fn new(guests: Vec<Guest>, keeper: Process, now: Instant) -> Self {
        let members: Vec<Member> = guests
            .into_iter()
            .map(|guest| Member {
                process: guest.process,
                timeout: guest.terms.timeout,
                heartbeat: guest.terms.heartbeat,
                presence: Presence::Here,
                silence: Silence::new(guest.terms.heartbeat),
                standing: Standing::Idle { finished: 0 },
                fresh: false,
            })
            .collect();
        let described = match members.iter().position(|member| member.process == keeper) {
            Some(rank) => format!("rank {rank} ({keeper})"),
            None => format!("the process that made the unique id ({keeper})"),
        };
        Self {
            members,
            keeper,
            gathering: None,
            gathered: 0,
            case: None,
            verdict: None,
            closing: false,
            last_tick: now,
            orders: vec![Order::All(ToRank::Welcome { keeper: described })],
        }
    }

    /// What is to be done since the last time.
    pub(super) fn orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// Whether nobody is left.
    pub(super) fn is_over(&self) -> bool {
        self.members.iter().all(|member| member.presence != Presence::Here)
    }

    /// When to look at the clock again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let beat = self.here().map(|(_, member)| member.heartbeat).min().map(|beat| self.last_tick + beat);
        let gathering = self.gathering.as_ref().map(|gathering| gathering.due);
        let case = self.case.as_ref().map(|case| case.due);
        beat.into_iter().chain(gathering).chain(case).min()
    }

    /// A rank says something.
    pub(super) fn hear(&mut self, rank: Rank, said: ToHub, now: Instant) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.presence != Presence::Here {
            return;
        }
        member.silence.broken();
        match said {
            ToHub::Beat(standing) => {
                self.orders.push(Order::One(rank, ToRank::Pulse));
                self.stands(rank, standing);
                self.consider(now);
            }
            ToHub::Gather { number, what, part } => self.gather(rank, number, what, part, now),
            ToHub::Report { error, suspect, standing } => {
                self.stands(rank, standing);
                self.report(rank, error, suspect, now);
            }
            ToHub::Abort { reason } => {
                self.condemn(Error::new(ErrorKind::Aborted, format!("rank {rank}: {reason}")));
            }
            ToHub::Goodbye(standing) => {
                self.stands(rank, standing);
                self.leave(rank, now);
            }
        }
    }

    /// A rank's connection ended without a goodbye; `cause` says how, as in "closed".
    pub(super) fn lose(&mut self, rank: Rank, cause: &str) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        if member.presence != Presence::Here {
            return;
        }
        member.presence = Presence::Lost;
        let message = format!(
            "rank {rank} ({}) died: its control connection {cause} {}",
            member.process, member.standing
        );
        self.condemn(Error::new(ErrorKind::PeerLost, message));
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        let lapse = now.saturating_duration_since(self.last_tick);
        self.last_tick = now;
        for rank in 0..self.members.len() {
            let member = &mut self.members[rank];
            member.silence.lasts(lapse);
            let Some(silent) = member.silence.fatal() else {
                continue;
            };
            if member.presence != Presence::Here {
                continue;
            }
            member.presence = Presence::Lost;
            let message = format!(
                "rank {rank} ({}) has been silent for {}: stopped, swapped out, or its machine is gone; it was last heard {}",
                member.process,
                seconds(silent),
                member.standing
            );
            self.condemn(Error::new(ErrorKind::PeerLost, message));
            self.orders.push(Order::Part(rank));
        }
        if let Some(gathering) = self.gathering.take_if(|gathering| now >= gathering.due) {
            let missing: Vec<Rank> =
                (0..self.members.len()).filter(|rank| !gathering.parts.contains_key(rank)).collect();
            self.condemn(Error::new(
                ErrorKind::Timeout,
                format!(
                    "{} of {} did not come to exchange {} within {}",
                    ranks(&missing),
                    self.members.len(),
                    gathering.what,
                    seconds(gathering.patience)
                ),
            ));
        }
        self.consider(now);
    }

    fn here(&self) -> impl Iterator<Item = (Rank, &Member)> {
        self.members.iter().enumerate().filter(|(_, member)| member.presence == Presence::Here)
    }

    /// The verdict falls, unless it has fallen before.
    fn condemn(&mut self, error: Error) {
        if self.verdict.is_some() {
            return;
        }
        self.verdict = Some(error.clone());
        self.case = None;
        self.gathering = None;
        self.orders.push(Order::All(ToRank::Verdict(error)));
    }

    /// Notes where a rank stands, and compares its call with what the others call.
    fn stands(&mut self, rank: Rank, standing: Standing) {
        let Some(member) = self.members.get_mut(rank) else {
            return;
        };
        member.standing = standing;
        member.fresh = true;
        let Standing::Within(call) = standing else {
            return;
        };
        let other = self.members.iter().enumerate().find_map(|(them, member)| {
            let theirs = member.standing.call()?;
            (theirs.sequence == call.sequence && !theirs.agrees_with(&call)).then_some((them, *theirs))
        });
        if let Some((them, theirs)) = other {
            let difference = if rank < them {
                call.difference(rank, &theirs, them)
            } else {
                theirs.difference(them, &call, rank)
            };
            self.condemn(Error::new(ErrorKind::Disagreement, difference));
        }
    }

    fn gather(&mut self, rank: Rank, number: u64, what: String, part: Vec<u8>, now: Instant) {
        if self.verdict.is_some() {
            return;
        }
        let patience = self.members[rank].timeout;
        let gathering = self.gathering.get_or_insert_with(|| Gathering {
            what: what.clone(),
            parts: BTreeMap::new(),
            due: now + patience,
            patience,
        });
        if number != self.gathered + 1 || what != gathering.what || gathering.parts.contains_key(&rank) {
            let message = format!(
                "rank {rank} exchanges {what} (exchange #{number}) while others exchange {} (#{})",
                gathering.what,
                self.gathered + 1
            );
            self.condemn(Error::new(ErrorKind::Disagreement, message));
            return;
        }
        if now + patience < gathering.due {
            gathering.due = now + patience;
            gathering.patience = patience;
        }
        gathering.parts.insert(rank, part);
        if gathering.parts.len() == self.members.len() {
            self.gathered = number;
            let parts = self
                .gathering
                .take()
                .map(|gathering| gathering.parts.into_values().collect())
                .unwrap_or_default();
            self.orders.push(Order::All(ToRank::Gathered { number, parts }));
        } else {
            self.check_for_leavers();
        }
    }

    /// An exchange that somebody has left for good will never be complete.
    fn check_for_leavers(&mut self) {
        let Some(gathering) = &self.gathering else {
            return;
        };
        let leaver =
            self.members.iter().enumerate().find(|(rank, member)| {
                member.presence != Presence::Here && !gathering.parts.contains_key(rank)
            });
        if let Some((rank, member)) = leaver {
            let message =
                format!("rank {rank} ({}) has left while others exchange {}", member.process, gathering.what);
            self.condemn(Error::new(ErrorKind::PeerLost, message));
        }
    }

    fn leave(&mut self, rank: Rank, now: Instant) {
        self.members[rank].presence = Presence::Left;
        let at_home = |member: &Member| member.process == self.keeper;
        // The process that the hub lives in may end as soon as its last rank has left, and the hub with it.
        if !self.closing && at_home(&self.members[rank]) && !self.here().any(|(_, member)| at_home(member)) {
            self.closing = true;
            self.orders.push(Order::All(ToRank::Closing));
        }
        self.orders.push(Order::Part(rank));
        self.check_for_leavers();
        self.consider(now);
    }

    fn report(&mut self, reporter: Rank, error: Error, suspect: Option<Rank>, now: Instant) {
        if self.verdict.is_some() {
            return;
        }
        let suspect = suspect.filter(|suspect| *suspect != reporter && *suspect < self.members.len());
        let own_fault = suspect.is_none() && error.kind() != ErrorKind::Timeout;
        match &mut self.case {
            None => {
                self.case =
                    Some(Case { reporter, error, suspect, due: now + CONSIDERATION, heard: vec![reporter] });
                for member in &mut self.members {
                    member.fresh = false;
                }
                self.members[reporter].fresh = true;
                self.orders.push(Order::All(ToRank::Ask));
            }
            // Whoever the first accused knows better; so does a rank that blames nobody else.
            Some(case)
                if own_fault || (case.suspect == Some(reporter) && !case.heard.contains(&reporter)) =>
            {
                case.reporter = reporter;
                case.error = error;
                case.suspect = suspect;
                case.heard.push(reporter);
            }
            Some(_) => {}
        }
        self.consider(now);
    }

    /// Closes the case if nothing better can be hoped for.
    fn consider(&mut self, now: Instant) {
        let Some(case) = &self.case else {
            return;
        };
        let hopeless = match case.suspect {
            Some(suspect) => self.members[suspect].presence != Presence::Here,
            // A rank's own failure needs no further cause; a timeout wants to know where the others are.
            None => case.error.kind() != ErrorKind::Timeout || self.here().all(|(_, member)| member.fresh),
        };
        if !hopeless && now < case.due {
            return;
        }
        let mut message = format!("rank {}: {}", case.reporter, case.error.message());
        if let Some(call) = self.members[case.reporter].standing.call() {
            if case.error.kind() == ErrorKind::Timeout {
                message = format!("{message} ({})", self.whereabouts(call));
            } else if let Some(suspect) = case.suspect
                && self.members[suspect].presence == Presence::Left
            {
                message = format!("{message} ({})", absence(&self.members[suspect], call, &[suspect]));
            }
        }
        let error = Error::new(case.error.kind(), message);
        self.condemn(error);
    }

    /// Says which ranks are not in `call`, and where they are instead.
    fn whereabouts(&self, call: &Call) -> String {
        // Ranks that are missing in the same way are named together.
        let mut absent: Vec<(&Member, Vec<Rank>)> = Vec::new();
        for (rank, member) in self.members.iter().enumerate() {
            if member.presence == Presence::Here
                && member.standing.call().map(|c| c.sequence) == Some(call.sequence)
            {
                continue;
            }
            match absent
                .iter_mut()
                .find(|(other, _)| other.presence == member.presence && other.standing == member.standing)
            {
                Some((_, together)) => together.push(rank),
                None => absent.push((member, vec![rank])),
            }
        }
        if absent.is_empty() {
            return format!("every rank is in {}", short(call));
        }
        let sentences: Vec<String> =
            absent.iter().map(|(member, together)| absence(member, call, together)).collect();
        sentences.join("; ")
    }
}

/// Says where ranks that stand alike are instead of in `call`.
fn absence(member: &Member, call: &Call, together: &[Rank]) -> String {
    let who = ranks(together);
    let (has, it, is) = if together.len() == 1 { ("has", "it", "is") } else { ("have", "they", "are") };
    let call_name = short(call);
    if member.presence == Presence::Left {
        return match member.standing {
            Standing::Idle { finished } if finished > 0 => format!("{who} {has} left after call #{finished}"),
            _ => format!("{who} {has} left {}", member.standing),
        };
    }
    match member.standing {
        Standing::Idle { finished: 0 } => {
            format!("{who} {has} not called {call_name}: {it} {has} called nothing yet")
        }
        Standing::Idle { finished } if finished < call.sequence => {
            format!("{who} {has} not called {call_name}: {it} finished #{finished}")
        }
        Standing::Idle { .. } => format!("{who} {has} finished {call_name}"),
        Standing::Within(other) => format!("{who} {is} in {other}"),
    }
}

#[cfg(test)]
mod tests;
