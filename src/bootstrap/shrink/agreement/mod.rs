//! Who is left, and who decides it, as a state machine without I/O.
//!
//! Owns what this rank knows about the others; `evaluation` draws the conclusions. Callers report
//! connections, messages and the time, and carry out the returned [`AgreementAction`]s. The argument why the
//! decisions of different ranks agree is in the parent module.

use super::message::{CallsMade, NewWorld, ShrinkMessage, ShrinkNotice, Stance};
use crate::error::{Error, ErrorKind};
use crate::rank::{Rank, RankList};
use std::time::{Duration, Instant};

mod evaluation;
mod peer;

use peer::{Reach, ShrinkPeer};

/// How often ranks that shrink send their stance.
pub(super) const REPEAT: Duration = Duration::from_millis(200);
/// How long a leader reads its connections after it sent notices.
const NOTICE_WAIT: Duration = Duration::from_millis(50);

/// What must be done.
#[derive(Debug, PartialEq)]
pub(super) enum AgreementAction {
    /// Connect to a rank.
    Connect(Rank),
    Send(Rank, ShrinkMessage),
    /// Send a rank the notice that others go on without it.
    Notify(Rank, ShrinkNotice),
    /// Create a unique id for these members and report it by [`Agreement::decided`].
    Decide(Vec<Rank>),
    /// The world that is being joined cannot come about, for this reason.
    Cancel(Error),
    /// The agreement of this rank has ended: the world to join, or an error.
    Finish(Result<NewWorld, Error>),
}

/// This rank's call of shrink.
#[derive(Clone, Debug)]
struct ShrinkCall {
    exclude: Vec<Rank>,
    calls: CallsMade,
    began: Instant,
    deadline: Instant,
    /// When this rank last sent notices as the leader.
    notified_at: Option<Instant>,
    waiting_for: Vec<Rank>,
}

#[derive(Debug)]
enum ShrinkProgress {
    Idle,
    Called(ShrinkCall),
    /// `is_cancelled` once the world cannot come about, until the program has ended its join.
    Joining {
        call: ShrinkCall,
        world: NewWorld,
        leader: Rank,
        is_cancelled: bool,
    },
}

/// The agreement of one rank.
#[derive(Debug)]
pub(super) struct Agreement {
    me: Rank,
    /// How long a rank may be silent before it counts as stopped or unreachable.
    silence: Duration,
    /// By rank. The entry of this rank is not used.
    peers: Vec<ShrinkPeer>,
    progress: ShrinkProgress,
    /// Number of worlds that this rank has joined from this communicator.
    generation: u64,
    /// The members of the last one.
    went_on: Vec<Rank>,
    /// The ranks that went on without this one.
    left_out_by: Option<Vec<Rank>>,
    /// Ids of worlds that this rank has joined or tried to join, or that were cancelled before.
    tried: Vec<Vec<u8>>,
    /// Whether the id for a decision is being created.
    is_deciding: bool,
    next_repeat: Option<Instant>,
    /// When the time was last reported during a call.
    last_tick: Option<Instant>,
    actions: Vec<AgreementAction>,
}

impl Agreement {
    pub(super) fn new(me: Rank, world: usize, silence: Duration, now: Instant) -> Self {
        Self {
            me,
            silence,
            peers: vec![ShrinkPeer::new(now); world],
            progress: ShrinkProgress::Idle,
            generation: 0,
            went_on: Vec::new(),
            left_out_by: None,
            tried: Vec::new(),
            is_deciding: false,
            next_repeat: None,
            last_tick: None,
            actions: Vec::new(),
        }
    }

    /// The actions since the last call, in order.
    pub(super) fn actions(&mut self) -> Vec<AgreementAction> {
        std::mem::take(&mut self.actions)
    }

    /// Whether this rank's program has called shrink and the call is not over.
    pub(super) fn is_active(&self) -> bool {
        !matches!(self.progress, ShrinkProgress::Idle)
    }

    /// What this rank tells the others.
    pub(super) fn state(&self) -> ShrinkMessage {
        let stance = match &self.progress {
            _ if self.left_out_by.is_some() => Stance::LeftOut,
            ShrinkProgress::Idle => Stance::NotCalled,
            ShrinkProgress::Called(call) => {
                let (exclude, waiting_for) = (call.exclude.clone(), call.waiting_for.clone());
                Stance::Called { exclude, waiting_for, finished: call.calls.finished }
            }
            ShrinkProgress::Joining { .. } => Stance::Joining,
        };
        ShrinkMessage::State { generation: self.generation, stance }
    }

    /// The program calls shrink after these calls, without the ranks in `exclude`, which are ascending.
    pub(super) fn call(&mut self, exclude: Vec<Rank>, calls: CallsMade, now: Instant, deadline: Instant) {
        if let Some(members) = self.left_out_by.clone() {
            let error = self.left_out(&members);
            self.actions.push(AgreementAction::Finish(Err(error)));
            return;
        }
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let is_excluded = exclude.binary_search(&rank).is_ok();
            peer.excluded_until = is_excluded.then_some(calls.last_together());
        }
        let waiting_for = Vec::new();
        self.begin(ShrinkCall { exclude, calls, began: now, deadline, notified_at: None, waiting_for }, now);
    }

    /// The world could not be joined: looks for the ranks that are left now.
    pub(super) fn call_again(&mut self, now: Instant) {
        self.notify_cancelled(&self.not_joined());
        if let ShrinkProgress::Joining { call, .. } = &self.progress {
            let call = ShrinkCall { notified_at: None, waiting_for: Vec::new(), ..call.clone() };
            self.begin(call, now);
        }
    }

    fn begin(&mut self, call: ShrinkCall, now: Instant) {
        for peer in &mut self.peers {
            peer.since = now;
            peer.excludes_me = peer.has_excluded(self.me, call.calls);
            match peer.reach {
                // A refused connection is final. A rank that is left out must not come back.
                Reach::Gone => {}
                Reach::Silent if peer.left_out => {}
                Reach::Connected | Reach::Connecting => {}
                _ => peer.reach = Reach::Untried { since: None },
            }
        }
        self.progress = ShrinkProgress::Called(call);
        self.next_repeat = Some(now);
        self.last_tick = None;
        self.on_tick(now);
    }

    /// The world has been joined.
    pub(super) fn joined(&mut self) {
        let ShrinkProgress::Joining { call, world, .. } =
            std::mem::replace(&mut self.progress, ShrinkProgress::Idle)
        else {
            return;
        };
        self.generation += 1;
        for (member, generation) in world.members.iter().zip(&world.generations) {
            let peer = &mut self.peers[*member];
            if peer.generation <= *generation {
                // What it sent last belongs to the call that is over.
                peer.generation = generation.saturating_add(1);
                peer.stance = None;
            }
        }
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let is_expected = world.members.contains(&rank) || call.exclude.binary_search(&rank).is_ok();
            peer.left_out |= !is_expected;
        }
        self.went_on = world.members;
        self.broadcast_state();
    }

    /// The program gives up.
    pub(super) fn gave_up(&mut self) {
        self.progress = ShrinkProgress::Idle;
        self.broadcast_state();
    }

    /// The id that the leader, this rank, has created for the members; or why it could not. Whether the id is
    /// used: if a member was lost meanwhile, it is not, and the next tick decides again.
    pub(super) fn decided(&mut self, members: Vec<Rank>, id: Result<Vec<u8>, Error>) -> bool {
        self.is_deciding = false;
        let ShrinkProgress::Called(call) = &self.progress else {
            return false;
        };
        let is_left = |rank: &Rank| {
            *rank == self.me || (self.peers[*rank].reach == Reach::Connected && self.has_called(*rank))
        };
        match id {
            Ok(_) if !members.iter().all(is_left) => false,
            Ok(id) => {
                let generation = |rank: &Rank| {
                    if *rank == self.me { self.generation } else { self.peers[*rank].generation }
                };
                let generations = members.iter().map(generation).collect();
                let world = NewWorld { members, generations, id };
                let others: Vec<Rank> =
                    world.members.iter().copied().filter(|rank| *rank != self.me).collect();
                for rank in others {
                    self.actions.push(AgreementAction::Send(rank, ShrinkMessage::NewWorld(world.clone())));
                }
                self.tried.push(world.id.clone());
                self.progress = ShrinkProgress::Joining {
                    call: call.clone(),
                    world: world.clone(),
                    leader: self.me,
                    is_cancelled: false,
                };
                self.actions.push(AgreementAction::Finish(Ok(world)));
                true
            }
            Err(error) => {
                self.fail_all(error);
                false
            }
        }
    }

    /// Notices were not sent yet at `now`. The decision must be made again, after the connections were read
    /// once more.
    pub(super) fn decide_later(&mut self, now: Instant) {
        self.is_deciding = false;
        if let ShrinkProgress::Called(call) = &mut self.progress {
            call.notified_at = Some(now);
        }
    }

    /// A connection to the rank is made. It has not sent anything yet.
    pub(super) fn on_connected(&mut self, rank: Rank) {
        let peer = &mut self.peers[rank];
        if peer.reach == Reach::Connecting {
            peer.reach = Reach::Connected;
        }
    }

    /// No process listens where the rank did.
    pub(super) fn on_refused(&mut self, rank: Rank, now: Instant) {
        self.peers[rank].reach = Reach::Gone;
        self.on_member_lost(rank);
        self.on_tick(now);
    }

    /// The rank cannot be reached.
    pub(super) fn on_unreachable(&mut self, rank: Rank, now: Instant) {
        if self.peers[rank].reach == Reach::Connecting {
            self.peers[rank].reach = Reach::Unreachable;
            self.on_tick(now);
        }
    }

    /// The attempt to connect ended for a reason that says nothing about the rank. It is tried again: at
    /// once, or a pause after `since`.
    pub(super) fn on_not_tried(&mut self, rank: Rank, since: Option<Instant>) {
        let peer = &mut self.peers[rank];
        if peer.reach == Reach::Connecting {
            peer.reach = Reach::Untried { since };
        }
    }

    /// The last connection with the rank has ended. Whether its process is gone shows when it is tried again.
    pub(super) fn on_lost(&mut self, rank: Rank, now: Instant) {
        let peer = &mut self.peers[rank];
        if !matches!(peer.reach, Reach::Connected | Reach::Silent) || peer.left_out {
            return;
        }
        peer.reach = Reach::Untried { since: Some(now) };
        peer.since = now;
        peer.stance = None;
        self.on_member_lost(rank);
        self.on_tick(now);
    }

    /// Cancels the world that is being joined if the rank leads it, or is a member and this rank leads.
    fn on_member_lost(&mut self, rank: Rank) {
        let generation = self.peers[rank].generation;
        if let ShrinkProgress::Joining { world, leader, .. } = &self.progress
            && (rank == *leader || *leader == self.me)
            // A rank that has joined needs the connection no more.
            && generation_in(world, rank) == Some(generation)
        {
            // It has no suspect: in the new world the rank has another number.
            self.cancel(Error::peer_lost(format!("rank {rank} died during the shrink")));
        }
    }

    /// The world that is being joined cannot come about.
    fn cancel(&mut self, error: Error) {
        self.notify_cancelled(&error);
        if let ShrinkProgress::Joining { is_cancelled, .. } = &mut self.progress
            && !std::mem::replace(is_cancelled, true)
        {
            self.actions.push(AgreementAction::Cancel(error));
        }
    }

    /// As the leader, sends the other members that the world is cancelled, unless they were sent it before.
    /// Those that are not connected to its coordinator yet would look for it until their time-out.
    fn notify_cancelled(&mut self, error: &Error) {
        if let ShrinkProgress::Joining { world, leader, is_cancelled: false, .. } = &self.progress
            && *leader == self.me
        {
            for member in world.members.iter().filter(|member| **member != self.me) {
                let message = ShrinkMessage::Cancelled { id: world.id.clone(), error: error.clone() };
                self.actions.push(AgreementAction::Send(*member, message));
            }
        }
    }

    /// Handles a message of a rank.
    pub(super) fn on_message(&mut self, rank: Rank, message: ShrinkMessage, now: Instant) {
        let is_active = self.is_active();
        let peer = &mut self.peers[rank];
        peer.reach = Reach::Connected;
        peer.since = now;
        match message {
            ShrinkMessage::State { generation, stance } => {
                // A state from before the last world says nothing about this call.
                if generation < peer.generation {
                    return;
                }
                let repeated = peer.stance.as_ref() == Some(&stance) && peer.generation == generation;
                let called_after = match stance {
                    Stance::Called { finished, .. } => Some(finished),
                    _ => None,
                };
                let is_called = called_after.is_some();
                peer.generation = generation;
                peer.stance = Some(stance);
                if let ShrinkProgress::Called(call) = &self.progress {
                    peer.excludes_me |= peer.has_excluded(self.me, call.calls);
                }
                if let Some(finished) = called_after {
                    self.answer_call(rank, generation, finished);
                }
                // Only new calls are answered, so that two ranks do not answer each other for ever.
                if is_called && (!is_active || !repeated) {
                    self.actions.push(AgreementAction::Send(rank, self.state()));
                }
                if !repeated {
                    self.on_tick(now);
                }
            }
            ShrinkMessage::NewWorld(world) => self.on_new_world(rank, world),
            ShrinkMessage::Cancelled { id, error } => {
                let ends_join = matches!(&self.progress, ShrinkProgress::Joining { world, leader, .. }
                    if world.id == id && (*leader == rank || *leader == self.me && world.members.contains(&rank)));
                if ends_join {
                    self.cancel(error);
                } else if !self.tried.contains(&id) {
                    // It may overtake the world on another connection, or precede the world's repetition.
                    self.tried.push(id);
                }
            }
            ShrinkMessage::Excluded { until } => {
                if matches!(&self.progress, ShrinkProgress::Called(call) if call.calls.finished <= until) {
                    peer.excludes_me = true;
                    self.on_tick(now);
                }
            }
            ShrinkMessage::Failed(error) => {
                if matches!(self.progress, ShrinkProgress::Called(_)) {
                    self.fail(error);
                }
            }
        }
    }

    /// Handles the notice that others go on without this rank.
    pub(super) fn on_notice(&mut self, notice: ShrinkNotice) {
        let ShrinkNotice { generation, members } = notice;
        if members.contains(&self.me) || generation != self.generation || self.left_out_by.is_some() {
            return;
        }
        match &self.progress {
            ShrinkProgress::Idle => {}
            ShrinkProgress::Called(_) => {
                let error = self.left_out(&members);
                self.progress = ShrinkProgress::Idle;
                self.actions.push(AgreementAction::Finish(Err(error)));
            }
            // The world that this rank joins excludes the sender's, or fails.
            ShrinkProgress::Joining { .. } => return,
        }
        self.left_out_by = Some(members);
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        self.discount_pause(now);
        if self.is_active() && self.next_repeat.is_none_or(|at| now >= at) {
            self.next_repeat = Some(now + REPEAT);
            self.broadcast_state();
        }
        if let ShrinkProgress::Called(call) = &self.progress {
            let call = call.clone();
            self.evaluate(call, now);
        }
    }

    /// If this process did not run for a while, it heard nothing, which says nothing about the other ranks.
    fn discount_pause(&mut self, now: Instant) {
        if let Some(last) = self.last_tick.replace(now)
            && let Some(pause) = now.saturating_duration_since(last).checked_sub(REPEAT)
        {
            for peer in &mut self.peers {
                peer.since = (peer.since + pause).min(now);
            }
        }
    }

    /// The next time to call [`on_tick`](Self::on_tick), if no event comes before.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        if !self.is_active() {
            return None;
        }
        // Short times are due only while a rank is being tried.
        let is_tried = |peer: &ShrinkPeer| match peer.reach {
            Reach::Untried { since } => since.is_some(),
            Reach::Connecting => true,
            Reach::Connected => peer.stance.is_none(),
            _ => false,
        };
        let was_notified =
            matches!(&self.progress, ShrinkProgress::Called(call) if call.notified_at.is_some());
        let is_searching = was_notified || self.peers.iter().any(is_tried);
        Some(now + if is_searching { NOTICE_WAIT / 5 } else { REPEAT / 2 })
    }

    /// Answers a rank that has called shrink after `finished` calls, if this rank has decided already, or
    /// excludes it.
    fn answer_call(&mut self, rank: Rank, generation: u64, finished: u64) {
        let world = match &self.progress {
            ShrinkProgress::Joining { world, leader, is_cancelled: false, .. } if *leader == self.me => {
                Some(world)
            }
            _ => None,
        };
        if let Some(world) = world
            && generation_in(world, rank) == Some(generation)
        {
            self.actions.push(AgreementAction::Send(rank, ShrinkMessage::NewWorld(world.clone())));
        } else if self.peers[rank].left_out {
            let members = world.map_or(&self.went_on, |world| &world.members).clone();
            self.actions.push(AgreementAction::Notify(rank, ShrinkNotice { generation, members }));
        } else if let Some(until) = self.peers[rank].excluded_until
            && finished <= until
        {
            self.actions.push(AgreementAction::Send(rank, ShrinkMessage::Excluded { until }));
        }
    }

    fn on_new_world(&mut self, leader: Rank, world: NewWorld) {
        let is_tried = self.tried.contains(&world.id);
        let call = match (&self.progress, generation_in(&world, self.me)) {
            (ShrinkProgress::Joining { .. }, _) => return,
            (ShrinkProgress::Called(call), Some(generation))
                if generation == self.generation && !is_tried =>
            {
                call
            }
            // This rank gave it up, or went on in another world. The leader would wait for it until the
            // time-out.
            (ShrinkProgress::Called(_), Some(generation)) if generation == self.generation => {
                return self.decline(leader, world.id);
            }
            (_, Some(generation)) if generation < self.generation && !is_tried => {
                return self.decline(leader, world.id);
            }
            _ => return,
        };
        let ascending = world.members.windows(2).all(|pair| pair[0] < pair[1]);
        let known = world.members.iter().all(|rank| *rank < self.peers.len());
        if !ascending
            || !known
            || world.generations.len() != world.members.len()
            || !world.members.contains(&leader)
        {
            return;
        }
        self.tried.push(world.id.clone());
        self.progress =
            ShrinkProgress::Joining { call: call.clone(), world: world.clone(), leader, is_cancelled: false };
        self.actions.push(AgreementAction::Finish(Ok(world)));
    }

    fn decline(&mut self, leader: Rank, id: Vec<u8>) {
        let message = ShrinkMessage::Cancelled { id, error: self.not_joined() };
        self.actions.push(AgreementAction::Send(leader, message));
    }

    fn not_joined(&self) -> Error {
        Error::rendezvous(format!("rank {} could not join the new world", self.me))
    }

    fn broadcast_state(&mut self) {
        let state = self.state();
        for rank in 0..self.peers.len() {
            if rank != self.me && self.peers[rank].reach == Reach::Connected {
                self.actions.push(AgreementAction::Send(rank, state.clone()));
            }
        }
    }

    fn left_out(&self, members: &[Rank]) -> Error {
        Error::rendezvous(format!(
            "{} went on without rank {}, which did not answer (it was stopped, or its network was down): end this \
             process, or start it again as a part of a new job",
            RankList::new(members),
            self.me
        ))
    }

    /// Ends the agreement with an error on all ranks that have called. Ranks that exclude this one go on,
    /// unless they must not.
    fn fail_all(&mut self, error: Error) {
        for (rank, peer) in self.peers.iter().enumerate() {
            let called = matches!(peer.stance, Some(Stance::Called { .. }));
            let is_concerned = !peer.excludes_me || error.kind() == ErrorKind::Disagreement;
            if rank != self.me && called && is_concerned && peer.reach == Reach::Connected {
                self.actions.push(AgreementAction::Send(rank, ShrinkMessage::Failed(error.clone())));
            }
        }
        self.fail(error);
    }

    /// Ends the agreement with an error on this rank. No ranks went on without those that it excluded.
    fn fail(&mut self, error: Error) {
        self.progress = ShrinkProgress::Idle;
        self.peers.iter_mut().for_each(|peer| peer.excluded_until = None);
        self.actions.push(AgreementAction::Finish(Err(error)));
    }
}

/// The generation with which a member of the world called shrink.
fn generation_in(world: &NewWorld, rank: Rank) -> Option<u64> {
    let position = world.members.iter().position(|member| *member == rank)?;
    world.generations.get(position).copied()
}
