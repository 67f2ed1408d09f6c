//! Agreements on a simulated network: random delays, deaths, stops and broken links.

mod exclusions;
use super::agreement::{Agreement, AgreementAction};
use super::message::{CallsMade, NewWorld, ShrinkMessage, ShrinkNotice, Stance};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long a rank may be silent.
const SILENCE: Duration = Duration::from_secs(1);
/// Longest delay of a message.
const DELAY: u64 = 20;
/// When all calls of shrink end, in milliseconds.
const DEADLINE: u64 = 6000;
/// How long a rank looks for a coordinator, and waits there for the other members.
const JOIN_TIMEOUT: u64 = 5000;
/// The longest time until a program notices that its join has failed, on a busy machine.
const PROGRAM_DELAY: u64 = 60;
const NO_CALLS: CallsMade = CallsMade { finished: 0, has_failed: false };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Running,
    /// Until this time. What is sent to it arrives when it continues.
    Stopped(u64),
    Dead,
}

#[derive(Clone, Debug)]
enum Delivery {
    Connected,
    Refused,
    /// The other end has died.
    Lost,
    Message(ShrinkMessage),
    Notice(ShrinkNotice),
    Call(Vec<Rank>, CallsMade),
}

struct SimulatedRank {
    agreement: Agreement,
    condition: Condition,
    outcome: Option<Result<NewWorld, Error>>,
    /// Since when it has been joining.
    joining: Option<u64>,
    /// When it connects to the coordinator of the world that it joins, if that exists then.
    connects_at: u64,
    is_connected: bool,
    /// Whether its own agreement has cancelled the world that it joins.
    is_cancelled: bool,
    /// When its program notices that the join has failed.
    fails_at: Option<u64>,
}

/// Ranks, and what is on its way to them: by time and order, the receiver, the sender and what arrives.
struct Simulation {
    start: Instant,
    now: u64,
    ranks: Vec<SimulatedRank>,
    in_flight: BTreeMap<(u64, u64), (Rank, Rank, Delivery)>,
    sent: u64,
    random: fastrand::Rng,
    /// Pairs of ranks that cannot reach each other.
    broken: BTreeSet<(Rank, Rank)>,
    /// Connections that are established.
    links: BTreeSet<(Rank, Rank)>,
    /// Ranks that have no descriptors for connections until this time.
    without_descriptors: BTreeMap<Rank, u64>,
    ids: u8,
}

fn pair(one: Rank, other: Rank) -> (Rank, Rank) {
    (one.min(other), one.max(other))
}

impl Simulation {
    fn new(ranks: usize, seed: u64) -> Self {
        let start = Instant::now();
        let rank = |me| SimulatedRank {
            agreement: Agreement::new(me, ranks, SILENCE, start),
            condition: Condition::Running,
            outcome: None,
            joining: None,
            connects_at: 0,
            is_connected: false,
            is_cancelled: false,
            fails_at: None,
        };
        Self {
            start,
            now: 0,
            ranks: (0..ranks).map(rank).collect(),
            in_flight: BTreeMap::new(),
            sent: 0,
            random: fastrand::Rng::with_seed(seed),
            broken: BTreeSet::new(),
            links: BTreeSet::new(),
            without_descriptors: BTreeMap::new(),
            ids: 0,
        }
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    /// Messages between two ranks keep their order, because later ones get later numbers and equal delays.
    fn send(&mut self, from: Rank, to: Rank, delivery: Delivery, at: u64) {
        self.sent += 1;
        self.in_flight.insert((at, self.sent), (to, from, delivery));
    }

    fn delay(&mut self) -> u64 {
        self.random.u64(1..=DELAY)
    }

    fn call(&mut self, rank: Rank, exclude: &[Rank], at: u64) {
        self.call_after(0, rank, exclude, at);
    }

    /// Calls shrink on a rank that has finished so many calls.
    fn call_after(&mut self, finished: u64, rank: Rank, exclude: &[Rank], at: u64) {
        let calls = CallsMade { finished, has_failed: false };
        self.send(rank, rank, Delivery::Call(exclude.to_vec(), calls), at);
    }

    fn kill(&mut self, rank: Rank) {
        self.ranks[rank].condition = Condition::Dead;
        let peers: Vec<Rank> =
            (0..self.ranks.len()).filter(|peer| self.links.contains(&pair(rank, *peer))).collect();
        for peer in peers {
            self.links.remove(&pair(rank, peer));
            let at = self.now + DELAY + 1;
            self.send(rank, peer, Delivery::Lost, at);
        }
    }

    fn stop(&mut self, rank: Rank, until: u64) {
        self.ranks[rank].condition = Condition::Stopped(until);
    }

    /// Runs until no rank that runs waits any more.
    fn run(&mut self) {
        self.run_until(DEADLINE + 2000);
    }

    /// As [`run`](Self::run), but at most until this time.
    fn run_until(&mut self, end: u64) {
        while self.now < end && !self.is_over() {
            self.now += 1;
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].condition == Condition::Stopped(self.now) {
                    self.ranks[rank].condition = Condition::Running;
                }
            }
            self.deliver();
            let instant = self.instant();
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].condition == Condition::Running {
                    if self.now.is_multiple_of(10) {
                        self.ranks[rank].agreement.on_tick(instant);
                    }
                    self.execute(rank);
                }
            }
            self.join();
        }
    }

    /// Whether nothing will happen any more.
    fn is_over(&self) -> bool {
        let has_ended = |rank: &SimulatedRank| {
            rank.condition == Condition::Dead || (rank.outcome.is_some() && rank.joining.is_none())
        };
        let is_dead = |rank: Rank| self.ranks[rank].condition == Condition::Dead;
        self.ranks.iter().all(has_ended) && self.in_flight.values().all(|(to, ..)| is_dead(*to))
    }

    fn deliver(&mut self) {
        while let Some(entry) = self.in_flight.first_entry()
            && entry.key().0 <= self.now
        {
            let (to, from, delivery) = entry.remove();
            if let Condition::Stopped(until) = self.ranks[to].condition {
                // The kernel of its host accepts connections and data.
                self.send(from, to, delivery, until);
                continue;
            }
            if self.ranks[to].condition == Condition::Dead {
                continue;
            }
            let instant = self.instant();
            let agreement = &mut self.ranks[to].agreement;
            match delivery {
                Delivery::Connected => {
                    agreement.on_connected(from);
                    let state = agreement.state();
                    let at = self.now + 1;
                    self.send(to, from, Delivery::Message(state), at);
                }
                Delivery::Refused => agreement.on_refused(from, instant),
                Delivery::Lost => agreement.on_lost(from, instant),
                Delivery::Message(message) => agreement.on_message(from, message, instant),
                Delivery::Notice(notice) => agreement.on_notice(notice),
                Delivery::Call(exclude, calls) => {
                    let deadline = self.start + Duration::from_millis(DEADLINE);
                    agreement.call(exclude, calls, instant, deadline);
                }
            }
            self.execute(to);
        }
    }

    fn execute(&mut self, me: Rank) {
        loop {
            let actions = self.ranks[me].agreement.actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                let at = self.now + DELAY;
                match action {
                    AgreementAction::Connect(rank)
                        if self.without_descriptors.get(&me).is_some_and(|until| self.now < *until) =>
                    {
                        let instant = self.instant();
                        self.ranks[me].agreement.on_not_tried(rank, Some(instant));
                    }
                    AgreementAction::Connect(rank) if self.broken.contains(&pair(me, rank)) => {}
                    AgreementAction::Connect(rank) => {
                        let delay = self.delay();
                        let dead = self.ranks[rank].condition == Condition::Dead;
                        if !dead {
                            self.links.insert(pair(me, rank));
                        }
                        let delivery = if dead { Delivery::Refused } else { Delivery::Connected };
                        let at = self.now + delay;
                        self.send(rank, me, delivery, at);
                    }
                    AgreementAction::Send(rank, message) => {
                        self.send(me, rank, Delivery::Message(message), at)
                    }
                    AgreementAction::Notify(rank, notice) => {
                        self.send(me, rank, Delivery::Notice(notice), at)
                    }
                    AgreementAction::Decide(members) => {
                        self.ids += 1;
                        let id = vec![self.ids];
                        self.ranks[me].agreement.decided(members, Ok(id));
                    }
                    AgreementAction::Cancel(_) => {
                        self.ranks[me].is_cancelled = true;
                        self.fail_join(me);
                    }
                    AgreementAction::Finish(outcome) => {
                        let connects_at = self.now + self.delay();
                        let rank = &mut self.ranks[me];
                        rank.joining = outcome.is_ok().then_some(self.now);
                        rank.outcome = Some(outcome);
                        rank.connects_at = connects_at;
                        (rank.is_connected, rank.is_cancelled, rank.fails_at) = (false, false, None);
                    }
                }
            }
        }
    }

    /// The program of this rank notices soon that its join has failed.
    fn fail_join(&mut self, me: Rank) {
        let at = self.now + self.random.u64(1..=PROGRAM_DELAY);
        self.ranks[me].fails_at.get_or_insert(at);
    }

    /// A world comes about when all of its members are connected to its coordinator, which is the leader's.
    /// It fails on those that are when one of them ends, or the coordinator. Those that are not look for it.
    fn join(&mut self) {
        for me in 0..self.ranks.len() {
            let rank = &self.ranks[me];
            let (Some(since), Some(Ok(world))) = (rank.joining, rank.outcome.clone()) else { continue };
            if rank.condition != Condition::Running {
                continue;
            }
            let is_dead = |member: Rank| self.ranks[member].condition == Condition::Dead;
            let joins = |member: &Rank| self.ranks[*member].outcome.as_ref() == Some(&Ok(world.clone()));
            let joined = |member: &Rank| joins(member) && self.ranks[*member].joining.is_none();
            let connected = |member: &Rank| {
                let rank = &self.ranks[*member];
                joins(member) && rank.is_connected && rank.fails_at.is_none() && !is_dead(*member)
            };
            let leader = world.members[0];
            let is_served = joins(&leader) && !self.ranks[leader].is_cancelled && !is_dead(leader);
            let is_complete = world.members.iter().any(joined);
            if is_complete || is_served && world.members.iter().all(connected) {
                self.ranks[me].joining = None;
                self.ranks[me].agreement.joined();
            } else if rank.fails_at.is_some_and(|at| self.now >= at) || self.now > since + JOIN_TIMEOUT {
                // The coordinator reports it to the members that are connected.
                for member in world.members.iter().copied().filter(connected).collect::<Vec<_>>() {
                    self.fail_join(member);
                }
                self.ranks[me].joining = None;
                self.ranks[me].outcome = None;
                let instant = self.instant();
                self.ranks[me].agreement.call_again(instant);
            } else if rank.is_connected && (!is_served || world.members.iter().copied().any(is_dead)) {
                self.fail_join(me);
            } else if is_served && self.now >= rank.connects_at {
                self.ranks[me].is_connected = true;
            }
            self.execute(me);
        }
    }

    /// The world that each rank has joined.
    fn worlds(&self) -> Vec<Option<Vec<Rank>>> {
        let world = |rank: &SimulatedRank| match (&rank.outcome, rank.joining) {
            (Some(Ok(world)), None) => Some(world.members.clone()),
            _ => None,
        };
        self.ranks.iter().map(world).collect()
    }

    /// The error of a rank.
    fn error(&self, rank: Rank) -> &Error {
        match &self.ranks[rank].outcome {
            Some(Err(error)) => error,
            other => panic!("rank {rank} has {other:?} and no error"),
        }
    }
}

#[test]
fn the_ranks_that_are_left_agree_whoever_died() {
    for ranks in 2..=5 {
        for dead in 0..ranks {
            let mut simulation = Simulation::new(ranks, 1);
            simulation.kill(dead);
            (0..ranks).filter(|rank| *rank != dead).for_each(|rank| simulation.call(rank, &[], 1));
            simulation.run();
            let left: Vec<Rank> = (0..ranks).filter(|rank| *rank != dead).collect();
            let worlds = simulation.worlds();
            assert!(left.iter().all(|rank| worlds[*rank].as_ref() == Some(&left)), "{dead}: {worlds:?}");
        }
    }
}

#[test]
fn ranks_that_die_one_after_the_other_during_a_shrink_delay_it_briefly() {
    for seed in 0..400 {
        let ranks = 3 + seed as usize % 4;
        let mut simulation = Simulation::new(ranks, seed);
        let mut left: Vec<Rank> = (0..ranks).collect();
        for rank in 0..ranks {
            let at = simulation.random.u64(1..60);
            simulation.call(rank, &[], at);
        }
        while left.len() > 2 {
            let until = simulation.now + simulation.random.u64(1..120);
            simulation.run_until(until);
            let dead = left.remove(simulation.random.usize(0..left.len()));
            simulation.kill(dead);
        }
        simulation.run_until(2000);
        let worlds = simulation.worlds();
        for rank in left {
            let world = worlds[rank].as_ref();
            assert!(
                world.is_some_and(|world| world.contains(&rank)),
                "seed {seed}: rank {rank} waits: {worlds:?}"
            );
        }
    }
}

#[test]
fn a_stopped_rank_is_left_out_and_fails_when_it_continues() {
    for stopped in 0..3 {
        let mut simulation = Simulation::new(3, 2);
        simulation.stop(stopped, 5000);
        (0..3).for_each(|rank| simulation.call(rank, &[], 1));
        simulation.run();
        let left: Vec<Rank> = (0..3).filter(|rank| *rank != stopped).collect();
        let worlds = simulation.worlds();
        assert!(left.iter().all(|rank| worlds[*rank].as_ref() == Some(&left)), "{stopped}: {worlds:?}");
        let error = simulation.error(stopped);
        assert!(error.message().contains(&format!("went on without rank {stopped}")), "{error}");
    }
}

/// Counter-example: a rank that had no descriptor for a connection took the other one for unreachable, and
/// went on without it.
#[test]
fn a_rank_without_descriptors_for_a_while_leaves_no_rank_out() {
    for lacking in 0..3 {
        let mut simulation = Simulation::new(3, 7);
        simulation.without_descriptors.insert(lacking, 400);
        // The last rank calls shrink late, so that nothing but the others' connections finds it.
        (0..3).for_each(|rank| simulation.call(rank, &[], if rank == 2 { 600 } else { 1 }));
        simulation.run();
        let worlds = simulation.worlds();
        assert!(worlds.iter().all(|world| world.as_deref() == Some(&[0, 1, 2])), "{lacking}: {worlds:?}");
    }
}

/// Counter-example: a connection that was given up with a call of shrink counted as one that is being made in
/// the next call, in which the rank was not tried and taken for unreachable.
#[test]
fn a_connection_that_a_call_gave_up_is_made_again_by_the_next_one() {
    let mut simulation = Simulation::new(3, 8);
    simulation.broken.insert(pair(0, 1));
    simulation.call(0, &[], 1);
    simulation.run_until(100);
    // The call ends, and with it the connections that are being made.
    simulation.ranks[0].agreement.gave_up();
    simulation.ranks[0].agreement.on_not_tried(1, None);
    simulation.broken.clear();
    (0..3).for_each(|rank| simulation.call(rank, &[], if rank == 1 { 1500 } else { 200 }));
    simulation.run();
    let worlds = simulation.worlds();
    assert!(worlds.iter().all(|world| world.as_deref() == Some(&[0, 1, 2])), "{worlds:?}");
}

#[test]
fn only_one_side_of_a_broken_network_goes_on() {
    for (one, winner) in [
        (vec![0], vec![1, 2, 3, 4]),
        (vec![0, 1], vec![2, 3, 4]),
        (vec![3, 4], vec![0, 1, 2]),
        (vec![1, 2, 3], vec![1, 2, 3]),
    ] {
        let mut simulation = Simulation::new(5, 3);
        let other: Vec<Rank> = (0..5).filter(|rank| !one.contains(rank)).collect();
        for a in &one {
            simulation.broken.extend(other.iter().map(|b| pair(*a, *b)));
        }
        (0..5).for_each(|rank| simulation.call(rank, &[], 1));
        simulation.run();
        for (rank, world) in simulation.worlds().into_iter().enumerate() {
            let expected = winner.contains(&rank).then(|| winner.clone());
            assert_eq!(world, expected, "rank {rank} of {one:?} and {other:?}");
        }
        let loser = (0..5).find(|rank| !winner.contains(rank)).expect("a loser");
        assert_eq!(simulation.error(loser).kind(), ErrorKind::Rendezvous);
        assert!(simulation.error(loser).message().contains("cannot be reached"));
    }
    // Of two equal sides the one with rank 0 goes on; the other one does if its program excludes the ranks.
    for exclude in [vec![], vec![0, 1]] {
        let mut simulation = Simulation::new(4, 4);
        for (one, other) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
            simulation.broken.insert((one, other));
        }
        (0..2).for_each(|rank| simulation.call(rank, &[], 1));
        (2..4).for_each(|rank| simulation.call(rank, &exclude, 1));
        simulation.run();
        let worlds = simulation.worlds();
        assert_eq!(worlds[0], Some(vec![0, 1]));
        assert_eq!(worlds[3], (!exclude.is_empty()).then(|| vec![2, 3]));
    }
}

#[test]
fn ranks_that_are_alive_are_waited_for_and_named() {
    let mut simulation = Simulation::new(3, 5);
    simulation.call(1, &[], 1);
    simulation.call(2, &[], 1);
    simulation.run();
    for rank in [1, 2] {
        let error = simulation.error(rank);
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().starts_with("rank 0 has not called shrink"), "{error}");
    }
    let mut simulation = Simulation::new(3, 6);
    simulation.call(0, &[], 1);
    simulation.call(1, &[], 4000);
    simulation.call(2, &[], 1);
    simulation.run();
    assert_eq!(simulation.worlds(), vec![Some(vec![0, 1, 2]); 3]);
}

#[test]
fn no_two_worlds_come_about_in_random_runs() {
    for seed in 0..150 {
        let ranks = 2 + seed as usize % 5;
        let mut simulation = Simulation::new(ranks, seed);
        let mut certain: Vec<Rank> = Vec::new();
        for rank in 0..ranks {
            match simulation.random.u8(0..8) {
                0 | 1 => simulation.kill(rank),
                2 => {
                    let until = simulation.random.u64(1..4000);
                    simulation.stop(rank, until);
                }
                3 => {
                    let other = simulation.random.usize(0..ranks);
                    simulation.broken.insert(pair(rank, other));
                }
                _ => certain.push(rank),
            }
            let at = simulation.random.u64(1..2500);
            simulation.call(rank, &[], at);
        }
        simulation.run();
        let worlds: BTreeSet<Vec<Rank>> = simulation.worlds().into_iter().flatten().collect();
        assert!(worlds.len() <= 1, "seed {seed}: {worlds:?}");
        for rank in 0..ranks {
            let SimulatedRank { condition, outcome, .. } = &simulation.ranks[rank];
            assert!(
                *condition == Condition::Dead || outcome.is_some(),
                "seed {seed}: rank {rank} waits for ever"
            );
        }
        if simulation.broken.is_empty() {
            let world = worlds.first();
            assert!(
                certain.iter().all(|rank| world.is_some_and(|world| world.contains(rank))),
                "seed {seed}: {certain:?} are alive, but {world:?} went on"
            );
        }
    }
}

#[test]
fn forged_worlds_and_messages_in_the_wrong_state_are_ignored() {
    let now = Instant::now();
    let mut agreement = Agreement::new(1, 3, SILENCE, now);
    let world = |members: &[Rank], generations: &[u64]| {
        let (members, generations) = (members.to_vec(), generations.to_vec());
        ShrinkMessage::NewWorld(NewWorld { members, generations, id: vec![1] })
    };
    agreement.on_message(0, world(&[0, 1], &[0, 0]), now);
    assert!(agreement.actions().is_empty(), "shrink was not called");
    agreement.call(Vec::new(), NO_CALLS, now, now + Duration::from_secs(1));
    agreement.actions();
    for forged in [
        world(&[1, 0], &[0, 0]),
        world(&[0, 2], &[0, 0]),
        world(&[0, 1, 7], &[0, 0, 0]),
        world(&[1, 2], &[0, 0]),
        world(&[0, 1], &[0]),
        world(&[0, 1], &[0, 4]),
        world(&[], &[]),
    ] {
        agreement.on_message(0, forged, now);
        let finished = |action: &AgreementAction| matches!(action, AgreementAction::Finish(_));
        assert!(!agreement.actions().iter().any(finished));
    }
    agreement.on_message(0, ShrinkMessage::State { generation: 0, stance: Stance::Joining }, now);
    agreement.on_message(0, world(&[0, 1], &[0, 0]), now);
    let expected =
        AgreementAction::Finish(Ok(NewWorld { members: vec![0, 1], generations: vec![0, 0], id: vec![1] }));
    assert!(agreement.actions().contains(&expected));
}

#[test]
fn a_pause_of_this_process_is_no_silence_of_the_others() {
    let now = Instant::now();
    let mut agreement = Agreement::new(0, 2, SILENCE, now);
    agreement.call(Vec::new(), NO_CALLS, now, now + Duration::from_secs(60));
    agreement.on_connected(1);
    let decides = |agreement: &mut Agreement| {
        let actions = agreement.actions();
        actions
            .iter()
            .any(|action| matches!(action, AgreementAction::Decide(_) | AgreementAction::Notify(..)))
    };
    // Nothing runs for a minute, and then the first message of rank 1 is about to be read.
    agreement.on_tick(now + Duration::from_secs(50));
    assert!(!decides(&mut agreement), "rank 1 had no time to answer");
    let later = now + Duration::from_secs(50);
    for step in 1..=15 {
        agreement.on_tick(later + Duration::from_millis(100 * step));
    }
    assert!(decides(&mut agreement), "rank 1 is silent while this process runs");
}

#[test]
fn a_member_that_died_since_the_decision_is_left_out() {
    let now = Instant::now();
    let mut agreement = Agreement::new(0, 3, SILENCE, now);
    agreement.call(Vec::new(), NO_CALLS, now, now + Duration::from_secs(60));
    agreement.actions();
    let called = Stance::Called { exclude: Vec::new(), waiting_for: Vec::new(), finished: 0 };
    for rank in [1, 2] {
        agreement.on_connected(rank);
        agreement.on_message(rank, ShrinkMessage::State { generation: 0, stance: called.clone() }, now);
    }
    // The end of the connection is read together with the last call, before the decision is carried out.
    agreement.on_lost(2, now);
    assert!(agreement.actions().contains(&AgreementAction::Decide(vec![0, 1, 2])));
    assert!(!agreement.decided(vec![0, 1, 2], Ok(vec![1])), "rank 2 has died");
    assert!(agreement.actions().is_empty(), "no rank hears of the world");
    let later = now + Duration::from_millis(100);
    agreement.on_tick(later);
    assert!(agreement.actions().contains(&AgreementAction::Connect(2)));
    agreement.on_refused(2, later);
    assert!(agreement.actions().contains(&AgreementAction::Decide(vec![0, 1])));
    assert!(agreement.decided(vec![0, 1], Ok(vec![2])));
    let world = NewWorld { members: vec![0, 1], generations: vec![0, 0], id: vec![2] };
    assert!(agreement.actions().contains(&AgreementAction::Finish(Ok(world))));
}

/// Rank `me` of three, after all have called shrink.
fn all_have_called(me: Rank, now: Instant) -> Agreement {
    let mut agreement = Agreement::new(me, 3, SILENCE, now);
    agreement.call(Vec::new(), NO_CALLS, now, now + Duration::from_secs(60));
    for rank in (0..3).filter(|rank| *rank != me) {
        agreement.on_connected(rank);
        agreement.on_message(rank, called(), now);
    }
    agreement.actions();
    agreement
}

fn called() -> ShrinkMessage {
    let stance = Stance::Called { exclude: Vec::new(), waiting_for: Vec::new(), finished: 0 };
    ShrinkMessage::State { generation: 0, stance }
}

fn world_of_all(id: u8) -> NewWorld {
    NewWorld { members: vec![0, 1, 2], generations: vec![0; 3], id: vec![id] }
}

#[test]
fn a_cancelled_world_is_not_offered_again() {
    let now = Instant::now();
    let mut leader = all_have_called(0, now);
    assert!(leader.decided(vec![0, 1, 2], Ok(vec![1])));
    leader.actions();
    leader.on_lost(2, now);
    let to_1 = |actions: Vec<AgreementAction>| {
        let is_to_1 = |action: &AgreementAction| matches!(action, AgreementAction::Send(1, _));
        actions.into_iter().filter(is_to_1).collect::<Vec<_>>()
    };
    let sent = to_1(leader.actions());
    assert!(
        matches!(&sent[..], [AgreementAction::Send(1, ShrinkMessage::Cancelled { id, .. })] if *id == [1]),
        "{sent:?}"
    );
    // Rank 1 calls again before the leader's program has noticed.
    leader.on_message(1, called(), now);
    let sent = to_1(leader.actions());
    assert!(!sent.contains(&AgreementAction::Send(1, ShrinkMessage::NewWorld(world_of_all(1)))), "{sent:?}");
}

#[test]
fn a_world_that_was_cancelled_before_it_arrives_is_not_joined() {
    let now = Instant::now();
    let mut member = all_have_called(1, now);
    let error = Error::peer_lost("rank 2 died");
    member.on_message(0, ShrinkMessage::Cancelled { id: vec![1], error }, now);
    member.on_message(0, ShrinkMessage::NewWorld(world_of_all(1)), now);
    let is_finished = |action: &AgreementAction| matches!(action, AgreementAction::Finish(_));
    assert!(!member.actions().iter().any(is_finished));
    member.on_message(0, ShrinkMessage::NewWorld(world_of_all(2)), now);
    assert!(member.actions().contains(&AgreementAction::Finish(Ok(world_of_all(2)))));
}

#[test]
fn a_leader_that_gives_a_world_up_cancels_it_at_its_members() {
    let now = Instant::now();
    let mut leader = all_have_called(0, now);
    assert!(leader.decided(vec![0, 1, 2], Ok(vec![1])));
    leader.actions();
    leader.call_again(now);
    let cancelled = |actions: &[AgreementAction], rank: Rank| {
        actions.iter().any(|action| {
            matches!(action, AgreementAction::Send(to, ShrinkMessage::Cancelled { id, .. })
                if *to == rank && *id == [1])
        })
    };
    let actions = leader.actions();
    assert!(cancelled(&actions, 1) && cancelled(&actions, 2), "{actions:?}");
}

#[test]
fn a_member_that_gave_a_world_up_cancels_it_at_the_leader() {
    let now = Instant::now();
    let mut member = all_have_called(1, now);
    member.on_message(0, ShrinkMessage::NewWorld(world_of_all(1)), now);
    member.call_again(now);
    member.actions();
    member.on_message(0, ShrinkMessage::NewWorld(world_of_all(1)), now);
    let sent = member.actions().into_iter().find_map(|action| match action {
        AgreementAction::Send(0, message @ ShrinkMessage::Cancelled { .. }) => Some(message),
        _ => None,
    });
    let mut leader = all_have_called(0, now);
    assert!(leader.decided(vec![0, 1, 2], Ok(vec![1])));
    leader.actions();
    leader.on_message(1, sent.expect("the leader is sent that the world is cancelled"), now);
    let is_cancel = |action: &AgreementAction| matches!(action, AgreementAction::Cancel(_));
    assert!(leader.actions().iter().any(is_cancel));
}

#[test]
fn a_leader_that_is_gone_cancels_its_world() {
    let now = Instant::now();
    let mut member = all_have_called(1, now);
    member.on_message(0, ShrinkMessage::NewWorld(world_of_all(1)), now);
    member.actions();
    // A second connection is refused before the first one ends.
    member.on_refused(0, now);
    let is_cancel = |action: &AgreementAction| matches!(action, AgreementAction::Cancel(_));
    assert!(member.actions().iter().any(is_cancel));
}

#[test]
fn the_largest_generation_of_a_member_is_no_overflow() {
    let now = Instant::now();
    let mut agreement = Agreement::new(1, 2, SILENCE, now);
    agreement.call(vec![], NO_CALLS, now, now + SILENCE);
    let world = NewWorld { members: vec![0, 1], generations: vec![u64::MAX, 0], id: vec![7] };
    agreement.on_message(0, ShrinkMessage::NewWorld(world.clone()), now);
    assert!(agreement.actions().contains(&AgreementAction::Finish(Ok(world))));
    agreement.joined();
}
