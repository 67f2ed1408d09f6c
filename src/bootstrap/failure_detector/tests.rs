//! Who is blamed for what, without a socket or a clock.

use super::super::call_state::example_call;
use super::super::protocol::HelloParams;
use super::*;

const BEAT: Duration = Duration::from_millis(500);

fn process(rank: Rank) -> Process {
    Process { pid: 100 + rank as u32, host: "h".to_owned(), instance: rank as u64 }
}

struct World {
    detector: FailureDetector,
    now: Instant,
}

impl World {
    fn of(size: usize) -> Self {
        let peers = (0..size)
            .map(|rank| JoinedPeer {
                process: process(rank),
                params: HelloParams {
                    settings: Vec::new(),
                    join_timeout: Duration::from_secs(60),
                    exchange_timeout: Duration::from_secs(60),
                    heartbeat: BEAT,
                },
            })
            .collect();
        let now = Instant::now();
        let mut detector = FailureDetector::new(peers, process(0), now);
        let host = "rank 0 (pid 100 on host h)".to_owned();
        assert_eq!(detector.actions(), [DetectorAction::Broadcast(ToRank::Welcome { host })]);
        Self { detector, now }
    }

    fn says(&mut self, rank: Rank, message: ToCoordinator) {
        self.detector.on_message(rank, message, self.now);
    }

    fn idles(&mut self, rank: Rank, finished: u64) {
        self.says(rank, ToCoordinator::Heartbeat(CallState::Idle { finished }));
    }

    fn calls(&mut self, rank: Rank, call: Call) {
        self.says(rank, ToCoordinator::Heartbeat(CallState::InCall(call)));
    }

    fn reports(&mut self, rank: Rank, kind: ErrorKind, message: &str, suspect: Option<Rank>) {
        self.says(
            rank,
            ToCoordinator::Report {
                error: Error::new(kind, message),
                suspect,
                state: CallState::InCall(example_call(17)),
            },
        );
    }

    fn passes(&mut self, time: Duration) {
        self.now += time;
        self.detector.on_tick(self.now);
    }

    /// The one verdict among the actions so far, if there is any.
    fn root_cause(&mut self) -> Option<Error> {
        let mut verdicts = self.detector.actions().into_iter().filter_map(|action| match action {
            DetectorAction::Broadcast(ToRank::RootCause(error)) => Some(error),
            _ => None,
        });
        let root_cause = verdicts.next();
        assert_eq!(verdicts.next(), None, "one root_cause at most");
        root_cause
    }

    fn sentence(&mut self) -> String {
        self.root_cause().expect("a root_cause").message().to_owned()
    }
}

#[test]
fn a_death_is_told_with_what_the_dead_was_doing() {
    let mut world = World::of(3);
    world.calls(2, example_call(17));
    world.detector.on_disconnect(2, "closed");
    let root_cause = world.root_cause().expect("a root_cause");
    assert_eq!(root_cause.kind(), ErrorKind::PeerLost);
    assert_eq!(
        root_cause.message(),
        "rank 2 (pid 102 on host h) died: its control connection closed while it was in all_reduce #17 (1024 x float, sum)"
    );
    world.detector.on_disconnect(1, "closed");
    assert_eq!(world.root_cause(), None, "the first cause is the one");
}

#[test]
fn silence_for_twenty_heartbeats_is_a_death() {
    let mut world = World::of(2);
    for _ in 0..30 {
        world.passes(BEAT);
        world.idles(0, 4);
    }
    let root_cause = world.sentence();
    assert!(
        root_cause.starts_with(
            "rank 1 (pid 101 on host h) has been silent for 10 s: stopped, swapped out, or its machine is gone"
        ),
        "{root_cause}"
    );
}

#[test]
fn calls_of_one_number_must_agree() {
    let mut world = World::of(3);
    world.calls(0, example_call(17));
    world.calls(1, Call { count: 9, ..example_call(18) });
    assert_eq!(world.root_cause(), None, "another number is another call");
    world.calls(2, Call { count: 9, ..example_call(17) });
    let root_cause = world.root_cause().expect("a root_cause");
    assert_eq!(root_cause.kind(), ErrorKind::Disagreement);
    assert_eq!(
        root_cause.message(),
        "rank 0 called all_reduce #17 (1024 x float, sum) and rank 2 called all_reduce #17 (9 x float, sum)"
    );
}

#[test]
fn a_failure_of_its_own_is_told_at_once() {
    let mut world = World::of(2);
    world.reports(1, ErrorKind::System, "out of memory", None);
    let root_cause = world.root_cause().expect("a root_cause");
    assert_eq!((root_cause.kind(), root_cause.message()), (ErrorKind::System, "rank 1: out of memory"));
}

#[test]
fn a_suspicion_waits_for_the_suspects_death_or_word() {
    let mut world = World::of(3);
    world.reports(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    assert_eq!(world.root_cause(), None);
    world.detector.on_disconnect(1, "closed");
    assert!(world.sentence().starts_with("rank 1 (pid 101 on host h) died"));

    let mut world = World::of(3);
    world.reports(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    world.reports(1, ErrorKind::PeerLost, "the link to rank 2 broke", Some(2));
    assert_eq!(world.root_cause(), None);
    world.reports(2, ErrorKind::System, "out of memory", None);
    assert_eq!(world.sentence(), "rank 2: out of memory");
}

#[test]
fn a_suspicion_that_nothing_confirms_is_told_as_it_is() {
    let mut world = World::of(2);
    world.reports(0, ErrorKind::PeerLost, "the link to rank 1 broke", Some(1));
    world.reports(1, ErrorKind::PeerLost, "the link to rank 0 broke", Some(0));
    world.passes(ROOT_CAUSE_WINDOW - Duration::from_millis(1));
    assert_eq!(world.root_cause(), None);
    world.passes(Duration::from_millis(1));
    assert_eq!(world.sentence(), "rank 1: the link to rank 0 broke");
}

#[test]
fn a_timeout_names_who_has_not_called() {
    let mut world = World::of(6);
    world.reports(0, ErrorKind::Timeout, "all_reduce #17 took longer than 300 s", Some(3));
    world.calls(1, example_call(17));
    world.idles(2, 17);
    world.idles(3, 16);
    world.idles(4, 16);
    world.calls(5, example_call(12));
    world.passes(ROOT_CAUSE_WINDOW);
    let root_cause = world.root_cause().expect("a root_cause");
    assert_eq!(root_cause.kind(), ErrorKind::Timeout);
    assert_eq!(
        root_cause.message(),
        "rank 0: all_reduce #17 took longer than 300 s (rank 2 has finished all_reduce #17; ranks 3 and 4 have not \
         called all_reduce #17: they finished #16; rank 5 is in all_reduce #12 (1024 x float, sum))"
    );
}

#[test]
fn a_timeout_is_told_as_soon_as_everybody_has_answered() {
    let mut world = World::of(2);
    world.idles(1, 3);
    world.detector.actions();
    world.reports(0, ErrorKind::Timeout, "too slow", None);
    assert_eq!(world.detector.actions(), [DetectorAction::Broadcast(ToRank::RequestState)]);
    world.calls(1, example_call(17));
    assert_eq!(world.sentence(), "rank 0: too slow (every rank is in all_reduce #17)");
}

#[test]
fn whoever_has_left_is_named_as_having_left() {
    let mut world = World::of(3);
    world.says(2, ToCoordinator::Goodbye(CallState::Idle { finished: 16 }));
    assert_eq!(world.detector.actions(), [DetectorAction::Close(2)]);
    world.reports(0, ErrorKind::PeerLost, "rank 2 closed its link", Some(2));
    assert_eq!(world.sentence(), "rank 0: rank 2 closed its link (rank 2 has left after call #16)");
}

#[test]
fn the_hubs_process_says_when_it_may_end() {
    let mut world = World::of(2);
    world.says(0, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert_eq!(
        world.detector.actions(),
        [DetectorAction::Broadcast(ToRank::Closing), DetectorAction::Close(0)]
    );
    assert!(!world.detector.is_over());
    world.says(1, ToCoordinator::Abort { reason: "why".to_owned() });
    assert_eq!(world.sentence(), "rank 1: why");
    world.says(1, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert!(world.detector.is_over());
}

fn part(number: u64, label: &str) -> ToCoordinator {
    ToCoordinator::Gather { number, label: label.to_owned(), part: vec![number as u8] }
}

#[test]
fn an_exchange_ends_when_all_have_come() {
    let mut world = World::of(2);
    for number in 1..=3 {
        world.says(1, part(number, "peer info"));
        assert_eq!(world.detector.actions(), []);
        world.says(0, part(number, "peer info"));
        let parts = vec![vec![number as u8]; 2];
        assert_eq!(world.detector.actions(), [DetectorAction::Broadcast(ToRank::Gathered { number, parts })]);
    }
}

#[test]
fn an_exchange_that_cannot_end_names_who_is_missing() {
    let mut world = World::of(4);
    world.says(1, part(1, "peer info"));
    world.says(3, part(1, "peer info"));
    for _ in 0..120 {
        for rank in 0..4 {
            world.idles(rank, 0);
        }
        world.passes(BEAT);
    }
    assert_eq!(
        world.sentence(),
        "ranks 0 and 2 of 4 did not take part in the exchange of peer info within 60 s"
    );

    let mut world = World::of(2);
    world.says(0, part(1, "peer info"));
    world.says(1, part(1, "keys"));
    assert!(world.sentence().contains("exchanges keys"));

    let mut world = World::of(2);
    world.says(0, part(1, "peer info"));
    world.says(1, ToCoordinator::Goodbye(CallState::Idle { finished: 0 }));
    assert!(world.sentence().contains("rank 1 (pid 101 on host h) has left"));
}
