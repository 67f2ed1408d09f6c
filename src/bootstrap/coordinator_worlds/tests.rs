//! What the coordinator does for given frames in several worlds, without a socket or a clock.

use super::super::call_state::{CallState, example_call};
use super::super::protocol::{HelloParams, MAX_SUBWORLDS, WorldId, encode_value};
use super::*;
use crate::error::{Error, ErrorKind};

const HEARTBEAT: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = Duration::from_secs(60);

/// A coordinator whose first world has four ranks.
struct Coordinator {
    worlds: Worlds,
    now: Instant,
}

impl Coordinator {
    fn new() -> Self {
        let params = HelloParams { heartbeat: HEARTBEAT, ..HelloParams::example() };
        let peer = |rank| JoinedPeer { process: Process::example(rank), params: params.clone() };
        let now = Instant::now();
        let mut worlds = Worlds::new((0..4).map(peer).collect(), Process::example(0), now);
        assert_eq!(worlds.actions().len(), 1, "the welcome");
        Self { worlds, now }
    }

    fn receive(&mut self, rank: Rank, message: &ToCoordinator) {
        assert!(self.worlds.on_frame(rank, &encode_value(message).expect("short"), self.now));
    }

    fn receive_in(&mut self, world: WorldId, rank: Rank, message: &ToCoordinator) {
        self.receive(rank, &message.in_world(world).expect("short"));
    }

    fn open(&mut self, rank: Rank, world: WorldId, members: &[Rank]) {
        self.receive(rank, &ToCoordinator::Open { world, members: members.to_vec(), timeout: TIMEOUT });
    }

    /// All members open the world.
    fn open_on_all(&mut self, world: WorldId, members: &[Rank]) {
        for rank in members {
            assert_eq!(self.messages_in(world), []);
            self.open(*rank, world, members);
        }
        let [(to, message)] = self.messages_in(world).try_into().expect("one message");
        assert!(matches!(message, ToRank::Welcome { .. }), "{message:?}");
        assert_eq!(to.len(), members.len());
    }

    fn leave(&mut self, rank: Rank) {
        self.receive(rank, &ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    }

    fn leave_in(&mut self, world: WorldId, rank: Rank) {
        self.receive_in(world, rank, &ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
        self.worlds.on_tick(self.now);
    }

    /// The messages of this world among the actions so far, with the ranks that get them. Drops all other
    /// actions.
    fn messages_in(&mut self, world: WorldId) -> Vec<(Vec<Rank>, ToRank)> {
        let of_world = |action| match action {
            WorldsAction::Send(to, ToRank::InWorld { world: of, message }) if of == world => {
                Some((to, decode(&message).expect("a message")))
            }
            _ => None,
        };
        self.worlds.actions().into_iter().filter_map(of_world).collect()
    }

    /// The error that this world has failed with, and the ranks that get it.
    fn failure_of(actions: &[WorldsAction], world: WorldId) -> (Vec<Rank>, Error) {
        let failure = actions.iter().find_map(|action| match action {
            WorldsAction::Send(to, ToRank::InWorld { world: of, message }) if *of == world => {
                match decode(message) {
                    Some(ToRank::RootCause(error)) => Some((to.clone(), error)),
                    _ => None,
                }
            }
            _ => None,
        });
        failure.expect("the world has failed")
    }

    fn closed(actions: &[WorldsAction]) -> Vec<Rank> {
        let closed = |action: &WorldsAction| match action {
            WorldsAction::Close(rank) => Some(*rank),
            _ => None,
        };
        actions.iter().filter_map(closed).collect()
    }
}

#[test]
fn idle_worlds_cost_one_wake_up_per_interval() {
    let mut coordinator = Coordinator::new();
    for world in 0..100 {
        coordinator.open_on_all(world, &[0, 1, 2]);
        coordinator.now += Duration::from_millis(3);
    }
    coordinator.advance(HEARTBEAT);
    let mut wakes = 0;
    let until = coordinator.now + 10 * HEARTBEAT;
    while coordinator.now < until {
        for rank in 0..4 {
            coordinator.receive(rank, &ToCoordinator::Heartbeat(CallState::Idle { finished: 0 }));
        }
        let next = coordinator.worlds.deadline().expect("ranks are supervised");
        coordinator.advance(next - coordinator.now);
        assert_eq!(coordinator.messages_in(1), []);
        wakes += 1;
    }
    assert!(wakes <= 22, "{wakes} in 10 intervals, for the first world and all others");
}

#[test]
fn any_frame_is_a_sign_of_life_in_all_worlds() {
    let mut coordinator = Coordinator::new();
    coordinator.open_on_all(1, &[0, 1, 2]);
    coordinator.open_on_all(2, &[0, 3]);
    // Ranks 1 and 2 are in the subworld only.
    coordinator.leave(1);
    coordinator.leave(2);
    coordinator.worlds.actions();
    let idle = ToCoordinator::Heartbeat(CallState::Idle { finished: 0 });
    let mut actions = Vec::new();
    for _ in 0..30 {
        coordinator.receive(0, &idle);
        coordinator.receive(1, &ToCoordinator::Alive);
        coordinator.receive_in(2, 3, &idle);
        coordinator.advance(HEARTBEAT);
        actions.extend(coordinator.worlds.actions());
    }
    let (to, error) = Coordinator::failure_of(&actions, 1);
    assert_eq!(to, [0, 1, 2]);
    assert!(error.message().starts_with("rank 2 (pid 102 on host h) has been silent for 10 s"), "{error}");
    assert_eq!(Coordinator::closed(&actions), [2]);
    let broadcasts = actions.iter().any(|action| matches!(action, WorldsAction::Broadcast(_)));
    assert!(!broadcasts, "rank 2 had left the first world");
    let in_other =
        |action: &WorldsAction| matches!(action, WorldsAction::Send(_, ToRank::InWorld { world: 2, .. }));
    assert!(!actions.iter().any(in_other), "the other world goes on");
}

#[test]
fn the_answer_to_a_sign_of_life_is_the_same_in_all_worlds() {
    let mut coordinator = Coordinator::new();
    coordinator.open_on_all(1, &[0, 1]);
    coordinator.receive(1, &ToCoordinator::Alive);
    assert_eq!(coordinator.worlds.actions(), [WorldsAction::Send(vec![1], ToRank::HeartbeatAck)]);
    coordinator.receive_in(1, 1, &ToCoordinator::Heartbeat(CallState::InCall(example_call(1))));
    assert_eq!(coordinator.worlds.actions(), [], "the connection has a heartbeat of its own");
}

#[test]
fn a_connection_is_closed_after_the_last_goodbye() {
    let mut coordinator = Coordinator::new();
    coordinator.open_on_all(1, &[0, 1]);
    coordinator.open_on_all(2, &[0, 1]);
    coordinator.leave(1);
    let actions = coordinator.worlds.actions();
    assert!(actions.contains(&WorldsAction::Send(vec![1], ToRank::LeaveAck)), "{actions:?}");
    assert!(Coordinator::closed(&actions).is_empty());
    coordinator.leave_in(2, 1);
    let answers = coordinator.messages_in(2);
    assert_eq!(answers.last(), Some(&(vec![1], ToRank::LeaveAck)));
    coordinator.leave_in(1, 1);
    assert_eq!(Coordinator::closed(&coordinator.worlds.actions()), [1]);
    for rank in [3, 2, 0] {
        coordinator.leave(rank);
    }
    assert_eq!(Coordinator::closed(&coordinator.worlds.actions()), [3, 2]);
    assert!(!coordinator.worlds.is_over(), "rank 0 is in both subworlds");
    coordinator.leave_in(2, 0);
    coordinator.leave_in(1, 0);
    assert_eq!(Coordinator::closed(&coordinator.worlds.actions()), [0]);
    assert!(coordinator.worlds.is_over());
}

#[test]
fn a_rank_that_leaves_all_worlds_ends_the_attempts_that_need_it() {
    let mut coordinator = Coordinator::new();
    coordinator.open(0, 1, &[0, 2]);
    coordinator.leave(2);
    let (to, error) = Coordinator::failure_of(&coordinator.worlds.actions(), 1);
    assert_eq!(to, [0]);
    assert_eq!(
        error.message(),
        "rank 1 (pid 102 on host h) has left before all ranks had opened the communicator"
    );
    // It is gone when the next attempt begins.
    coordinator.open(0, 2, &[0, 2]);
    let (_, error) = Coordinator::failure_of(&coordinator.worlds.actions(), 2);
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().contains("rank 1 (pid 102 on host h) has left or died"), "{error}");
}

#[test]
fn a_rank_that_gives_the_coordinator_up_does_so_in_all_worlds() {
    let mut coordinator = Coordinator::new();
    coordinator.open_on_all(1, &[0, 1]);
    coordinator.open_on_all(2, &[0, 2]);
    coordinator.receive(1, &ToCoordinator::GaveUp { silent: Duration::from_secs(10) });
    let actions = coordinator.worlds.actions();
    let (_, error) = Coordinator::failure_of(&actions, 1);
    assert_eq!(
        error.message(),
        "rank 0 (pid 100 on host h) was silent for 10 s: stopped, swapped out, or cut off from the network; rank 1 gave it up"
    );
    assert_eq!(Coordinator::closed(&actions), [1]);
    coordinator.worlds.on_pause(Duration::from_secs(12), coordinator.now);
    coordinator.worlds.on_disconnect(2, "closed", coordinator.now);
    let (to, error) = Coordinator::failure_of(&coordinator.worlds.actions(), 2);
    assert_eq!(to, [0], "rank 2 cannot get it");
    assert!(error.message().starts_with("rank 0 (pid 100 on host h) was paused for 12 s"), "{error}");
}

#[test]
fn the_last_message_of_a_dead_rank_counts_in_whichever_world_it_was() {
    let mut coordinator = Coordinator::new();
    coordinator.open_on_all(1, &[0, 2]);
    coordinator.advance(3 * HEARTBEAT);
    coordinator.receive(2, &ToCoordinator::Heartbeat(CallState::Idle { finished: 0 }));
    coordinator.now += Duration::from_millis(480);
    coordinator.worlds.on_disconnect(2, "closed", coordinator.now);
    let (_, error) = Coordinator::failure_of(&coordinator.worlds.actions(), 1);
    assert!(error.message().contains("rank 1 (pid 102 on host h) died"), "{error}");
    assert!(error.message().contains("its last message came 0.48 s before"), "{error}");
}

#[test]
fn the_number_of_worlds_is_bounded_and_ids_can_be_used_again() {
    let mut coordinator = Coordinator::new();
    let count = MAX_SUBWORLDS as WorldId;
    for world in 0..count {
        coordinator.open(0, world, &[0]);
    }
    coordinator.worlds.actions();
    coordinator.open(0, count, &[0]);
    let (to, error) = Coordinator::failure_of(&coordinator.worlds.actions(), count);
    assert_eq!((to, error.kind()), (vec![0], ErrorKind::System));
    coordinator.leave_in(5, 0);
    coordinator.worlds.actions();
    coordinator.open_on_all(5, &[0]);
}

#[test]
fn a_failed_attempt_is_remembered_for_those_that_come_late() {
    let mut coordinator = Coordinator::new();
    coordinator.open(0, 1, &[0, 1, 2]);
    coordinator.advance(TIMEOUT);
    let (to, error) = Coordinator::failure_of(&coordinator.worlds.actions(), 1);
    assert_eq!((to, error.kind()), (vec![0], ErrorKind::Rendezvous));
    assert_eq!(
        error.message(),
        "ranks 1 and 2 of 3 did not open the communicator within 60 s (ranks 1 and 2 of the first one of these processes): all \
         members must create it"
    );
    coordinator.open(2, 1, &[0, 1, 2]);
    let (to, again) = Coordinator::failure_of(&coordinator.worlds.actions(), 1);
    assert_eq!((to, &again), (vec![2], &error));
    // Others hear from these ranks meanwhile.
    for _ in 0..120 {
        for rank in 0..4 {
            coordinator.receive(rank, &ToCoordinator::Alive);
        }
        coordinator.advance(HEARTBEAT);
    }
    coordinator.open_on_all(1, &[0, 1, 2]);
}
