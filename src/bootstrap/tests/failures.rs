//! Failures after the rendezvous, as all ranks see them.

use super::super::Abort;
use super::super::CallState;
use super::super::call_state::example_call;
use super::super::handshake::{Admission, AdmissionStep, Gate};
use super::super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, decode, encode};
use super::*;
use crate::call::Call;

pub(super) fn send(connection: &mut FramedStream, message: &ToCoordinator) {
    connection.enqueue(encode(message).expect("short"));
    connection.flush().expect("sent");
}

#[test]
fn all_ranks_name_a_dead_rank() {
    watched(|| {
        let (members, mut fake_peer) = world_with_fake_peer(4);
        send(&mut fake_peer, &ToCoordinator::Heartbeat(CallState::InCall(example_call(17))));
        drop(fake_peer);
        let error = common_fault(&members);
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(
            error.message().starts_with("rank 3 (pid 4242 on host elsewhere) died: its control connection"),
            "{error}"
        );
        assert!(error.message().contains("while it was in all_reduce #17"), "{error}");
    });
}

#[test]
fn all_ranks_name_a_silent_rank() {
    watched(|| {
        let (members, fake_peer) = world_with_fake_peer(3);
        let error = common_fault(&members);
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("rank 2 (pid 4242 on host elsewhere) has been silent for"));
        drop(fake_peer);
    });
}

#[test]
fn a_rank_that_sends_an_invalid_frame_counts_as_dead() {
    watched(|| {
        let (members, mut fake_peer) = world_with_fake_peer(2);
        fake_peer.enqueue([2, 0, 0, 0, 0xff, 0xff].as_slice().into());
        fake_peer.flush().expect("sent");
        assert!(common_fault(&members).message().contains("invalid frame"));
    });
}

/// Counter-example: each rank had an internal error that named no rank.
#[test]
fn a_rank_that_sends_what_others_cannot_read_is_named_on_all() {
    watched(|| {
        let (members, mut fake_peer) = world_with_fake_peer(3);
        for (number, part) in [(1, vec![0xff; 11]), (2, Vec::new()), (3, vec![0; 100])] {
            send(&mut fake_peer, &ToCoordinator::Gather { number, label: "regions".into(), part });
            let gather = |member: &TestRank| member.control.gather_values("regions", &(7u64, "a".to_owned()));
            let errors: Vec<Error> = thread::scope(|scope| {
                let threads: Vec<_> = members
                    .iter()
                    .map(|member| scope.spawn(move || gather(member).expect_err("garbage")))
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            let error = all_equal(&errors);
            assert_eq!(error.kind(), ErrorKind::Disagreement);
            assert!(
                error.message().starts_with("rank 2 sent regions that the other ranks cannot read"),
                "{error}"
            );
        }
    });
}

#[test]
fn different_calls_fail_the_world() {
    watched(|| {
        let members = world(3);
        for (member, count) in members.iter().zip([1024, 1024, 9]) {
            member.control.call_state().enter(&Call { count, ..example_call(1) });
        }
        let error = common_fault(&members);
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("rank 2 called all_reduce #1 (9 x float, sum)"), "{error}");
    });
}

#[test]
fn an_abort_from_any_rank_reaches_all() {
    watched(|| {
        for rank in 0..3 {
            let (members, others) = (world(3), world(2));
            members[rank].control.abort(Abort::AtOnce("the user gave up"));
            assert!(members[rank].fault.get().is_some(), "the own fault is raised at once");
            let error = common_fault(&members);
            assert_eq!(error.kind(), ErrorKind::Aborted);
            assert_eq!(error.message(), format!("rank {rank}: the user gave up"));
            for other in &others {
                other.control.call_state().enter(&example_call(1));
                assert!(other.fault.check().is_ok(), "other worlds are not affected");
            }
        }
    });
}

#[test]
fn a_report_becomes_one_root_cause_for_all() {
    watched(|| {
        let members = world(3);
        let error = Error::system("out of memory");
        let root_cause = members[1].control.report(error);
        assert_eq!(root_cause.message(), "rank 1: out of memory");
        assert_eq!(common_fault(&members), root_cause);
        let late = members[2].control.report(Error::peer_lost("a consequence").with_suspect(1));
        assert_eq!(late, root_cause, "later reports get the same root cause");
        assert_eq!(
            members[0].control.all_gather("peer info", &[]).expect_err("the world has failed"),
            root_cause
        );
    });
}

#[test]
fn the_death_of_a_suspect_becomes_the_root_cause() {
    watched(|| {
        let (members, fake_peer) = world_with_fake_peer(3);
        thread::scope(|scope| {
            let root_cause = scope.spawn(|| {
                let error = Error::peer_lost("the link to rank 2 broke");
                members[0].control.report(error.with_suspect(2))
            });
            drop(fake_peer);
            let root_cause = root_cause.join().expect("a root cause");
            assert!(
                root_cause.message().starts_with("rank 2 (pid 4242 on host elsewhere) died"),
                "{root_cause}"
            );
            assert_eq!(common_fault(&members), root_cause);
        });
    });
}

#[test]
fn an_unconfirmed_suspicion_is_reported_as_it_is() {
    watched(|| {
        let members = world(2);
        let error = Error::peer_lost("the link to rank 1 broke");
        let root_cause = members[0].control.report(error.with_suspect(1));
        assert_eq!(root_cause.message(), "rank 0: the link to rank 1 broke");
        assert_eq!(common_fault(&members), root_cause);
    });
}

#[test]
fn a_timeout_names_ranks_that_have_not_called_or_have_left() {
    watched(|| {
        let mut members = world(4);
        for member in &members {
            member.control.call_state().enter(&example_call(16));
            member.control.call_state().leave();
        }
        let last = members.pop().expect("rank 3");
        for member in members[..2].iter().chain([&last]) {
            member.control.call_state().enter(&example_call(17));
        }
        // A rank may leave after a call that others are still in.
        last.control.call_state().leave();
        last.control.leave();
        let error = Error::timeout("all_reduce #17 took longer than 300 s");
        let root_cause = members[0].control.report(error.with_suspect(1));
        assert_eq!(root_cause.kind(), ErrorKind::Timeout);
        let mut lines = root_cause.message().lines();
        assert_eq!(
            lines.next(),
            Some(
                "rank 0: all_reduce #17 took longer than 300 s (rank 2 has not called all_reduce #17: it finished #16; \
                 rank 3 has left after call #17)"
            )
        );
        let rows: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows.len(), 1 + 4, "{root_cause}");
        assert!(rows[1].ends_with(&["rank", "2"]), "rank 0 waits for rank 2: {root_cause}");
        assert!(rows[3].contains(&"#16") && rows[3].contains(&"idle"), "{root_cause}");
        assert!(rows[4].contains(&"left"), "{root_cause}");
        assert_eq!(common_fault(&members), root_cause);
    });
}

#[test]
fn the_coordinator_outlives_its_own_rank() {
    watched(|| {
        let mut members = world(3);
        members.remove(0).control.leave();
        members[1].control.abort(Abort::AtOnce("late"));
        assert_eq!(common_fault(&members).message(), "rank 2: late");
    });
}

#[test]
fn an_incomplete_exchange_names_the_missing_rank() {
    watched(|| {
        let config = Config { connect_timeout: Duration::from_secs(1), ..config() };
        let members = join_ranks(0..3, 3, &address_of(free_port()), &config);
        thread::scope(|scope| {
            for member in &members[..2] {
                scope.spawn(|| {
                    let error = member.control.all_gather("peer info", &[]).expect_err("incomplete");
                    assert_eq!(error.kind(), ErrorKind::Timeout);
                    assert_eq!(
                        error.message(),
                        "rank 2 of 3 did not take part in the exchange of peer info within 1 s"
                    );
                });
            }
        });
    });
}

/// Runs the coordinator's side of the handshake.
fn admit(connection: &mut FramedStream) {
    let secret = SecretSource::of_settings(&config(), JOB).expect("no secret").secret().expect("no secret");
    let gate = Gate { job: JOB, secret, location: "here".to_owned() };
    let mut admission = Admission::AwaitOpening;
    loop {
        for frame in connection.receive(FRAME_LIMIT).frames {
            match admission.on_frame(&gate, frame, Some(&[])) {
                AdmissionStep::Continue(next, answer) => {
                    connection.enqueue(encode(&answer).expect("short"));
                    admission = next;
                }
                AdmissionStep::Admitted(_, answer) => {
                    return connection.enqueue(encode(&answer).expect("short"));
                }
                other => panic!("{other:?}"),
            }
            connection.flush().expect("sent");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 1, and the other end of its control connection: the test plays its coordinator.
pub(super) fn member_of_fake_coordinator() -> (TestRank, FramedStream) {
    let port = free_port();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
    thread::scope(|scope| {
        let member = scope.spawn(move || join_ranks(1..2, 2, &address_of(port), &config()));
        let (stream, _) = listener.accept().expect("rank 1");
        let mut coordinator = FramedStream::new(stream, true).expect("a connection");
        let host = "rank 0 (pid 1 on host a)".into();
        admit(&mut coordinator);
        send_all(&mut coordinator, &[ToRank::Welcome { host, ranks: vec![0] }]);
        let member = member.join().expect("joined").pop().expect("rank 1");
        (member, coordinator)
    })
}

/// Sends messages from the fake coordinator.
pub(super) fn send_all(coordinator: &mut FramedStream, messages: &[ToRank]) {
    for message in messages {
        coordinator.enqueue(encode(message).expect("short"));
    }
    coordinator.flush().expect("sent");
}

#[test]
fn a_lost_coordinator_is_a_fault() {
    watched(|| {
        let (member, coordinator) = member_of_fake_coordinator();
        member.control.call_state().enter(&example_call(3));
        drop(coordinator);
        let error = member.wait_for_fault();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(
            error.message().starts_with("rank 0 (pid 1 on host a) is gone: the control connection to it "),
            "{error}"
        );
        assert!(error.message().contains("while this rank was in all_reduce #3"), "{error}");
    });
}

#[test]
fn a_silent_coordinator_is_a_fault() {
    watched(|| {
        let (member, coordinator) = member_of_fake_coordinator();
        assert!(member.wait_for_fault().message().contains("has been silent for"));
        drop(coordinator);
    });
}

#[test]
fn a_closing_coordinator_is_not_a_fault() {
    watched(|| {
        let (member, mut coordinator) = member_of_fake_coordinator();
        send_all(&mut coordinator, &[ToRank::Closing]);
        // Give the rank time to answer what it has received.
        thread::sleep(Duration::from_millis(50));
        coordinator.shut_down_write();
        drop(coordinator);
        thread::sleep(Duration::from_millis(100));
        assert!(member.fault.check().is_ok());
        let error = Error::peer_lost("the link broke").with_suspect(0);
        assert_eq!(member.control.report(error.clone()), error.context("rank 1"));
    });
}

#[test]
fn leaving_a_mute_coordinator_takes_bounded_time() {
    watched(|| {
        let (member, coordinator) = member_of_fake_coordinator();
        member.control.leave();
        drop(coordinator);
    });
}

#[test]
fn a_coordinator_that_was_stopped_takes_the_blame() {
    watched(|| {
        let (members, mut fake_peer) = world_with_fake_peer(3);
        send(&mut fake_peer, &ToCoordinator::GaveUp { silent: Duration::from_secs(10) });
        let error = common_fault(&members);
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        let own_process = std::process::id();
        assert!(error.message().starts_with(&format!("rank 0 (pid {own_process} on host ")), "{error}");
        assert!(error.message().contains("was silent for 10 s"), "{error}");
        assert!(error.message().contains("rank 2 gave it up"), "{error}");
    });
}

#[test]
fn a_rank_that_gives_the_coordinator_up_says_so() {
    watched(|| {
        let (member, mut coordinator) = member_of_fake_coordinator();
        let error = member.wait_for_fault();
        assert!(error.message().contains("has been silent for"), "{error}");
        let mut last = None;
        loop {
            let received = coordinator.receive(FRAME_LIMIT);
            last = received.frames.last().cloned().or(last);
            if received.end.is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        let last = last.and_then(|frame| decode::<ToCoordinator>(&frame));
        assert!(matches!(last, Some(ToCoordinator::GaveUp { .. })), "{last:?}");
    });
}
