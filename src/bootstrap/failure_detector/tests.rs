//! Root causes for given events, without a socket or a clock.

use super::super::call_state::example_call;
use super::super::control_state::{AwaitedExchange, SharedState};
use super::super::protocol::{HelloParams, PART_ALLOWANCE, PARTS_LIMIT};
use super::*;
use crate::call::Call;

const HEARTBEAT: Duration = Duration::from_millis(500);

struct World {
    detector: FailureDetector,
    now: Instant,
}

impl World {
    fn of(size: usize) -> Self {
        let timeout = Duration::from_secs(60);
        let params =
            HelloParams { exchange_timeout: timeout, heartbeat: HEARTBEAT, ..HelloParams::example() };
        let peer = |rank| JoinedPeer { process: Process::example(rank), params: params.clone() };
        let peers = (0..size).map(peer).collect();
        let now = Instant::now();
        let mut detector = FailureDetector::new(peers, Process::example(0), now);
        let host = "rank 0 (pid 100 on host h)".into();
        assert_eq!(detector.actions(), [DetectorAction::Broadcast(ToRank::Welcome { host, ranks: vec![0] })]);
        Self { detector, now }
    }

    fn receive(&mut self, rank: Rank, message: ToCoordinator) {
        self.detector.on_message(rank, message, self.now);
    }

    fn set_idle(&mut self, rank: Rank, finished: u64) {
        self.receive(rank, ToCoordinator::Heartbeat(CallState::Idle { finished }));
    }

    fn set_in_call(&mut self, rank: Rank, call: Call) {
        self.receive(rank, ToCoordinator::Heartbeat(CallState::InCall(call)));
    }

    fn report(&mut self, rank: Rank, kind: ErrorKind, message: &str, suspect: Option<Rank>) {
        self.receive(
            rank,
            ToCoordinator::Report {
                error: Error::new(kind, message),
                suspect,
                state: CallState::InCall(example_call(17)),
            },
        );
    }

    fn disconnect(&mut self, rank: Rank) {
        self.detector.on_disconnect(rank, "closed", self.now);
    }

    fn leave(&mut self, rank: Rank, finished: u64) {
        self.receive(rank, ToCoordinator::Goodbye(CallState::Idle { finished }));
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
        self.detector.on_tick(self.now);
    }

    /// The root cause among the actions so far, if there is one.
    fn root_cause(&mut self) -> Option<Error> {
        let mut causes = self.detector.actions().into_iter().filter_map(|action| match action {
            DetectorAction::Broadcast(ToRank::RootCause(error)) => Some(error),
            _ => None,
        });
        let root_cause = causes.next();
        assert_eq!(causes.next(), None, "at most one root cause");
        root_cause
    }

    fn message(&mut self) -> String {
        self.root_cause().expect("a root cause").message().to_owned()
    }
}

#[test]
fn a_death_is_reported_with_the_call_state() {
    let mut world = World::of(3);
    world.set_in_call(2, example_call(17));
    world.advance(Duration::from_millis(480));
    world.disconnect(2);
    let root_cause = world.root_cause().expect("a root cause");
    assert_eq!(root_cause.kind(), ErrorKind::PeerLost);
    assert_eq!(
        root_cause.message(),
        "rank 2 (pid 102 on host h) died: its control connection closed; its last message came 0.48 s before, while it was in \
         all_reduce #17 (1024 x float, sum)"
    );
    world.disconnect(1);
    assert_eq!(world.root_cause(), None, "the first root cause stays");
}

/// Heartbeats carry the state, so that a rank may have finished calls of which no other process knows.
#[test]
fn a_death_before_the_first_heartbeat_claims_no_call_state() {
    let mut world = World::of(3);
    world.disconnect(2);
    let message = world.message();
    assert!(message.ends_with("before it had reported a call"), "{message}");
}

#[test]
fn silence_for_twenty_heartbeats_counts_as_death() {
    let mut world = World::of(2);
    for _ in 0..30 {
        world.advance(HEARTBEAT);
        world.set_idle(0, 4);
    }
    let root_cause = world.message();
    assert!(
        root_cause.starts_with(
            "rank 1 (pid 101 on host h) has been silent for 10 s: stopped, swapped out, or its machine is gone"
        ),
        "{root_cause}"
    );
}

/// Ranks whose machine stops have sent their last heartbeats at different times within an interval.
#[test]
fn ranks_that_go_silent_together_are_named_together_with_their_node() {
    for (late, expected) in [
        (
            None,
            "ranks 2 and 3 on host b have been silent for 9.5 s, since the same moment: the machine is gone",
        ),
        (Some(3), "rank 2 (pid 102 on host b) has been silent for 10 s"),
    ] {
        let mut world = World::of(4);
        for rank in [2, 3] {
            world.detector.members[rank].process.host = "b".into();
        }
        world.set_idle(2, 4);
        world.advance(HEARTBEAT);
        world.set_idle(3, 4);
        for beat in 0..35 {
            world.advance(HEARTBEAT);
            world.set_idle(0, 4);
            world.set_idle(1, 4);
            if let Some(rank) = late.filter(|_| beat == 10) {
                world.set_idle(rank, 4);
            }
        }
        let lost: Vec<Rank> = world
            .detector
            .members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.status == RankStatus::Lost)
            .map(|(rank, _)| rank)
            .collect();
        assert_eq!(lost, [2, 3]);
        let root_cause = world.message();
        assert!(root_cause.starts_with(expected), "{root_cause}");
    }
}

#[test]
fn one_rank_of_each_node_says_for_whose_part_of_an_exchange_it_waits() {
    let mut world = World::of(4);
    world.detector.members[3].process.host = "z".into();
    for rank in [3, 2, 1] {
        world.receive(rank, ToCoordinator::Gather { number: 1, label: "addresses".into(), part: Vec::new() });
    }
    let text = "waiting for rank 0 to exchange addresses (3 of 4 have)".to_owned();
    for (time, expected) in [(4, vec![]), (1, vec![1, 3]), (4, vec![]), (6, vec![1, 3])] {
        world.advance(Duration::from_secs(time));
        let notices: Vec<Rank> = world
            .detector
            .actions()
            .into_iter()
            .map(|action| match action {
                DetectorAction::Send(rank, ToRank::Notice(said)) if *said == *text => rank,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(notices, expected);
    }
}

#[test]
fn a_report_names_its_rank_once() {
    for (message, expected) in [
        (
            "rank 1 called all_reduce #2 and rank 0 called barrier #2",
            "rank 1 called all_reduce #2 and rank 0 called barrier #2",
        ),
        ("rank 0 closed its connection", "rank 1: rank 0 closed its connection"),
    ] {
        let mut world = World::of(2);
        world.report(1, ErrorKind::Disagreement, message, None);
        assert_eq!(world.message(), expected);
        let mut world = World::of(2);
        world.receive(1, ToCoordinator::Abort { reason: message.into() });
        assert_eq!(world.message(), expected);
    }
}

#[test]
fn calls_with_one_sequence_number_must_agree() {
    let mut world = World::of(3);
    world.set_in_call(0, example_call(17));
    world.set_in_call(1, Call { count: 9, ..example_call(18) });
    assert_eq!(world.root_cause(), None, "different sequence numbers are different calls");
    world.set_in_call(2, Call { count: 9, ..example_call(17) });
    let root_cause = world.root_cause().expect("a root cause");
    assert_eq!(root_cause.kind(), ErrorKind::Disagreement);
    assert_eq!(
        root_cause.message(),
        "rank 0 called all_reduce #17 (1024 x float, sum) and rank 2 called all_reduce #17 (9 x float, sum)"
    );
}

#[test]
fn a_failure_without_suspect_is_settled_at_once() {
    let mut world = World::of(2);
    world.report(1, ErrorKind::System, "out of memory", None);
    let root_cause = world.root_cause().expect("a root cause");
    assert_eq!((root_cause.kind(), root_cause.message()), (ErrorKind::System, "rank 1: out of memory"));
}

#[test]
fn a_suspicion_waits_for_the_suspects_death_or_report() {
    let mut world = World::of(3);
    world.report(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    assert_eq!(world.root_cause(), None);
    world.disconnect(1);
    assert!(world.message().starts_with("rank 1 (pid 101 on host h) died"));

    let mut world = World::of(3);
    world.report(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    world.report(1, ErrorKind::PeerLost, "the link to rank 2 broke", Some(2));
    assert_eq!(world.root_cause(), None);
    world.report(2, ErrorKind::System, "out of memory", None);
    assert_eq!(world.message(), "rank 2: out of memory");
}

#[test]
fn an_unconfirmed_suspicion_is_reported_as_it_is() {
    let mut world = World::of(2);
    world.report(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    world.report(1, ErrorKind::PeerLost, "the link to rank 0 broke", Some(0));
    world.advance(ROOT_CAUSE_WINDOW - Duration::from_millis(1));
    assert_eq!(world.root_cause(), None);
    world.advance(Duration::from_millis(1));
    assert_eq!(world.message(), "rank 1: the link to rank 0 broke");
}

#[test]
fn a_timeout_names_absent_ranks() {
    let mut world = World::of(6);
    world.report(0, ErrorKind::Timeout, "all_reduce #17 took longer than 300 s", Some(3));
    world.set_in_call(1, example_call(17));
    world.set_idle(2, 17);
    world.set_idle(3, 16);
    world.set_idle(4, 16);
    world.set_in_call(5, example_call(12));
    world.advance(ROOT_CAUSE_WINDOW);
    let root_cause = world.root_cause().expect("a root cause");
    assert_eq!(root_cause.kind(), ErrorKind::Timeout);
    let (first, table) = root_cause.message().split_once('\n').expect("a table");
    assert_eq!(
        first,
        "rank 0: all_reduce #17 took longer than 300 s (rank 2 has finished all_reduce #17; ranks 3 and 4 have not \
         called all_reduce #17: they finished #16; rank 5 is in all_reduce #12 (1024 x float, sum))"
    );
    assert_eq!(table.lines().count(), 1 + 6, "{table}");
    assert!(table.lines().nth(1).is_some_and(|row| row.ends_with("ranks 3, 4 and 5")), "{table}");
}

#[test]
fn a_timeout_is_settled_once_all_ranks_answered() {
    let mut world = World::of(2);
    world.set_idle(1, 3);
    world.detector.actions();
    world.report(0, ErrorKind::Timeout, "too slow", None);
    assert_eq!(world.detector.actions(), [DetectorAction::Broadcast(ToRank::RequestState)]);
    world.set_in_call(1, example_call(17));
    let message = world.message();
    assert!(message.starts_with("rank 0: too slow (every rank is in all_reduce #17)\nrank "), "{message}");
}

#[test]
fn a_rank_that_left_without_a_call_ends_it_at_once() {
    let expected = "rank 2 (pid 102 on host h) left after call #16, and rank 0 is in all_reduce #17 (1024 x float, sum): \
                    every rank must make the same calls before it leaves";
    // The call was entered before the goodbye.
    let mut world = World::of(3);
    world.set_in_call(0, example_call(17));
    world.leave(2, 16);
    let root_cause = world.root_cause().expect("a root cause");
    assert_eq!((root_cause.kind(), root_cause.message()), (ErrorKind::PeerLost, expected));
    // The call was entered afterwards.
    let mut world = World::of(3);
    world.leave(2, 16);
    assert_eq!(
        world.detector.actions(),
        [DetectorAction::Broadcast(ToRank::Left { rank: 2, finished: 16 }), DetectorAction::Close(2)]
    );
    world.set_in_call(0, example_call(17));
    assert_eq!(world.message(), expected);
    // A link noticed first.
    let mut world = World::of(3);
    world.report(0, ErrorKind::PeerLost, "rank 2 closed its link", Some(2));
    assert_eq!(world.root_cause(), None);
    world.leave(2, 16);
    assert_eq!(world.message(), expected);
}

#[test]
fn ranks_await_the_end_of_a_process_that_leaves_or_fails_but_not_of_one_that_died() {
    let leaves = |world: &mut World| world.leave(2, 16);
    let fails =
        |world: &mut World| world.receive(2, ToCoordinator::Exit { cause: "raised an exception".into() });
    let dies = |world: &mut World| world.disconnect(2);
    let events: [fn(&mut World); 3] = [leaves, fails, dies];
    // Whether it is awaited, and then whether it has said that it ends.
    for (event, ends) in events.into_iter().zip([Some(false), Some(true), None]) {
        let mut world = World::of(3);
        world.set_in_call(0, example_call(17));
        world.detector.actions();
        event(&mut world);
        let actions = world.detector.actions();
        let is_root_cause =
            |action: &DetectorAction| matches!(action, DetectorAction::Broadcast(ToRank::RootCause(_)));
        let at = actions.iter().position(is_root_cause).expect("a root cause");
        let awaited = match at.checked_sub(1).map(|before| &actions[before]) {
            Some(DetectorAction::Broadcast(ToRank::AwaitExit { process, ends })) => {
                assert_eq!(*process, Process::example(2));
                Some(*ends)
            }
            _ => None,
        };
        assert_eq!(awaited, ends, "{actions:?}");
    }
}

#[test]
fn a_rank_may_leave_after_the_call_that_others_are_in() {
    let mut world = World::of(3);
    world.leave(2, 17);
    world.set_in_call(0, example_call(17));
    world.set_in_call(1, example_call(17));
    assert_eq!(world.root_cause(), None);
    world.leave(1, 17);
    let announced =
        |action: &DetectorAction| matches!(action, DetectorAction::Broadcast(ToRank::Left { .. }));
    assert!(!world.detector.actions().iter().any(announced), "the number of calls is the same");
    world.set_idle(0, 17);
    assert_eq!(world.root_cause(), None);
}

#[test]
fn a_suspect_that_left_after_the_call_is_named() {
    let mut world = World::of(3);
    world.leave(2, 17);
    world.report(0, ErrorKind::PeerLost, "rank 2 closed its link", Some(2));
    assert_eq!(world.message(), "rank 0: rank 2 closed its link (rank 2 has left after call #17)");
}

#[test]
fn the_own_pause_of_the_coordinator_is_not_blamed_on_others() {
    let mut world = World::of(3);
    world.receive(1, ToCoordinator::GaveUp { silent: Duration::from_secs(10) });
    assert_eq!(
        world.message(),
        "rank 0 (pid 100 on host h) was silent for 10 s: stopped, swapped out, or cut off from the network; rank 1 gave it up"
    );

    let mut world = World::of(3);
    world.detector.on_pause(Duration::from_secs(12), world.now);
    world.disconnect(1);
    assert_eq!(
        world.message(),
        "rank 0 (pid 100 on host h) was paused for 12 s (stopped, or its machine was), and the control connection of rank 1 \
         (pid 101 on host h) closed meanwhile"
    );

    let mut world = World::of(3);
    world.detector.on_pause(Duration::from_secs(12), world.now);
    world.advance(HEARTBEAT);
    assert_eq!(world.root_cause(), None, "ranks that were paused as well go on");
    world.advance(PAUSE_CONSEQUENCES);
    world.disconnect(1);
    assert!(world.message().starts_with("rank 1 (pid 101 on host h) died"), "a later death is a death");
}

#[test]
fn the_status_says_what_each_rank_does_and_since_when() {
    let mut world = World::of(4);
    world.set_in_call(0, example_call(17));
    world.set_idle(1, 16);
    world.leave(3, 17);
    world.advance(HEARTBEAT);
    world.set_in_call(0, example_call(17));
    let status = world.detector.status(world.now);
    let row = |rank: Rank| &status.ranks[rank];
    assert_eq!((row(0).activity, row(0).since), (RankActivity::InCall, Some(HEARTBEAT)));
    assert_eq!(row(0).waits_for, [1, 2]);
    assert_eq!((row(1).activity, row(1).sequence), (RankActivity::Idle, 16));
    assert_eq!((row(2).pid, row(2).sequence), (102, 0));
    assert_eq!((row(3).activity, row(3).sequence), (RankActivity::Left, 17));
    assert_eq!(status.root_cause, None);
}

#[test]
fn the_host_process_announces_that_it_may_end() {
    let mut world = World::of(2);
    world.receive(0, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert_eq!(
        world.detector.actions(),
        [
            DetectorAction::Broadcast(ToRank::Left { rank: 0, finished: 0 }),
            DetectorAction::Broadcast(ToRank::AwaitExit { process: Process::example(0), ends: false }),
            DetectorAction::Broadcast(ToRank::Closing),
            DetectorAction::Close(0)
        ]
    );
    assert!(!world.detector.is_over());
    world.receive(1, ToCoordinator::Abort { reason: "why".into() });
    assert_eq!(world.message(), "rank 1: why");
    world.receive(1, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert!(world.detector.is_over());
}

fn part(number: u64, label: &str) -> ToCoordinator {
    ToCoordinator::Gather { number, label: label.into(), part: vec![number as u8] }
}

#[test]
fn an_exchange_completes_with_the_last_part() {
    let mut world = World::of(2);
    for number in 1..=3 {
        world.receive(1, part(number, "peer info"));
        assert_eq!(world.detector.actions(), []);
        world.receive(0, part(number, "peer info"));
        let parts = vec![vec![number as u8]; 2];
        assert_eq!(world.detector.actions(), [DetectorAction::Broadcast(ToRank::Gathered { number, parts })]);
    }
}

#[test]
fn an_exchange_that_cannot_complete_names_the_missing_ranks() {
    let mut world = World::of(4);
    world.receive(1, part(1, "peer info"));
    world.receive(3, part(1, "peer info"));
    for _ in 0..120 {
        for rank in 0..4 {
            world.set_idle(rank, 0);
        }
        world.advance(HEARTBEAT);
    }
    assert_eq!(
        world.message(),
        "ranks 0 and 2 of 4 did not take part in the exchange of peer info within 60 s"
    );

    let mut world = World::of(2);
    world.receive(0, part(1, "peer info"));
    world.receive(1, part(1, "keys"));
    assert!(world.message().contains("exchanges keys"));

    let mut world = World::of(2);
    world.receive(0, part(1, "peer info"));
    world.receive(1, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert!(world.message().contains("rank 1 (pid 101 on host h) has left"));
}

#[test]
fn the_parts_of_a_large_exchange_take_several_messages() {
    const RANKS: usize = 200;
    let mut world = World::of(RANKS);
    let large = |rank: usize| vec![rank as u8; PART_ALLOWANCE];
    for rank in 0..RANKS {
        let label = "peer info".into();
        world.receive(rank, ToCoordinator::Gather { number: 1, label, part: large(rank) });
    }
    let mut state = SharedState {
        gathering: Some(AwaitedExchange { number: 1, world: RANKS, parts: Vec::new() }),
        ..SharedState::default()
    };
    let actions = world.detector.actions();
    assert_eq!(actions.len(), 2, "8 MiB in a message");
    for action in actions {
        assert_eq!(state.take_gathered(), None);
        let DetectorAction::Broadcast(ToRank::Gathered { number, parts }) = action else { unreachable!() };
        state.add_gathered(number, parts).expect("parts");
    }
    state.add_gathered(2, vec![Vec::new()]).expect("another exchange changes nothing");
    assert!(state.take_gathered() == Some((0..RANKS).map(large).collect()));
}

#[test]
fn nothing_longer_than_the_parts_of_all_ranks_is_kept() {
    let mut world = World::of(2);
    let part = vec![0; PARTS_LIMIT / 2 + 1];
    world.receive(1, ToCoordinator::Gather { number: 1, label: "peer info".into(), part: part.clone() });
    assert!(world.message().contains("rank 1 gives 4194305 bytes to the exchange of peer info"));
    for parts in [vec![Vec::new(); 3], vec![part]] {
        let gathering = Some(AwaitedExchange { number: 1, world: 2, parts: Vec::new() });
        let error = SharedState { gathering, ..SharedState::default() }.add_gathered(1, parts);
        assert!(error.expect_err("too much").message().contains("exchange #1"));
    }
}

#[test]
fn messages_between_ranks_are_passed_on_in_their_order() {
    let mut world = World::of(3);
    world.receive(2, ToCoordinator::ToPeers(vec![(0, vec![1]), (1, vec![2]), (0, vec![3])]));
    let sent = |to, message| DetectorAction::Send(to, ToRank::FromPeer { from: 2, message });
    assert_eq!(world.detector.actions(), [sent(0, vec![1]), sent(1, vec![2]), sent(0, vec![3])]);
    world.receive(0, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    let departed = || DetectorAction::Send(2, ToRank::FromPeer { from: 0, message: Vec::new() });
    assert!(world.detector.actions().contains(&departed()), "rank 2 may wait for an answer");
    world.receive(2, ToCoordinator::ToPeers(vec![(0, vec![4])]));
    assert_eq!(world.detector.actions(), [departed()]);
    world.receive(1, ToCoordinator::ToPeers(vec![(3, vec![1])]));
    assert!(world.message().contains("rank 1 sends 1 bytes to rank 3 of 3"));

    let mut world = World::of(2);
    world.receive(0, ToCoordinator::ToPeers(vec![(1, vec![0; PEER_MESSAGE_LIMIT + 1])]));
    assert!(world.message().contains("rank 0 sends 4097 bytes"));
}
