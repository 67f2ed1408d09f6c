//! What ranks that have met learn of each other's ends.

use super::super::Standing;
use super::super::frame::{ToHub, ToRank, encode};
use super::super::status::example;
use super::*;
use crate::call::Call;

fn say(connection: &mut Connection, said: &ToHub) {
    connection.post(encode(said).expect("short"));
    connection.flush().expect("sent");
}

#[test]
fn a_dead_member_is_named_to_all() {
    watched(|| {
        let (members, mut puppet) = world_with_a_puppet(4);
        say(&mut puppet, &ToHub::Beat(Standing::Within(example(17))));
        drop(puppet);
        let fate = fates(&members);
        assert_eq!(fate.kind(), ErrorKind::PeerLost);
        assert!(
            fate.message().starts_with("rank 3 (pid 4242 on host elsewhere) died: its control connection"),
            "{fate}"
        );
        assert!(fate.message().contains("while it was in all_reduce #17"), "{fate}");
    });
}

#[test]
fn a_silent_member_is_named_to_all() {
    watched(|| {
        let (members, puppet) = world_with_a_puppet(3);
        let fate = fates(&members);
        assert_eq!(fate.kind(), ErrorKind::PeerLost);
        assert!(fate.message().contains("rank 2 (pid 4242 on host elsewhere) has been silent for"));
        drop(puppet);
    });
}

#[test]
fn a_member_that_talks_nonsense_counts_as_dead() {
    watched(|| {
        let (members, mut puppet) = world_with_a_puppet(2);
        puppet.post([2, 0, 0, 0, 0xff, 0xff].as_slice().into());
        puppet.flush().expect("sent");
        assert!(fates(&members).message().contains("makes no sense"));
    });
}

#[test]
fn calls_that_differ_end_the_world() {
    watched(|| {
        let members = world(3);
        for (member, count) in members.iter().zip([1024, 1024, 9]) {
            member.lifeline.status().enter(&Call { count, ..example(1) });
        }
        let fate = fates(&members);
        assert_eq!(fate.kind(), ErrorKind::Disagreement);
        assert!(fate.message().contains("rank 2 called all_reduce #1 (9 x float, sum)"), "{fate}");
    });
}

#[test]
fn an_abort_from_any_rank_reaches_all() {
    watched(|| {
        for rank in 0..3 {
            let (members, others) = (world(3), world(2));
            members[rank].lifeline.abort("the user has had enough");
            assert!(members[rank].fault.get().is_some(), "its own fault is raised at once");
            let fate = fates(&members);
            assert_eq!(fate.kind(), ErrorKind::Aborted);
            assert_eq!(fate.message(), format!("rank {rank}: the user has had enough"));
            for other in &others {
                other.lifeline.status().enter(&example(1));
                assert!(other.fault.check().is_ok(), "another world does not care");
            }
        }
    });
}

#[test]
fn a_report_becomes_one_verdict_for_all() {
    watched(|| {
        let members = world(3);
        let error = Error::new(ErrorKind::System, "out of memory");
        let verdict = members[1].lifeline.report(error, None);
        assert_eq!(verdict.message(), "rank 1: out of memory");
        assert_eq!(fates(&members), verdict);
        let late = members[2].lifeline.report(Error::new(ErrorKind::PeerLost, "a consequence"), Some(1));
        assert_eq!(late, verdict, "later reports get the same verdict");
        assert_eq!(members[0].lifeline.all_gather("cards", &[]).expect_err("the world has failed"), verdict);
    });
}

#[test]
fn a_suspicion_is_confirmed_by_the_suspects_death() {
    watched(|| {
        let (members, puppet) = world_with_a_puppet(3);
        thread::scope(|scope| {
            let verdict = scope.spawn(|| {
                let error = Error::new(ErrorKind::PeerLost, "the link to rank 2 broke");
                members[0].lifeline.report(error, Some(2))
            });
            thread::sleep(Duration::from_millis(50));
            drop(puppet);
            let verdict = verdict.join().expect("a verdict");
            assert!(verdict.message().starts_with("rank 2 (pid 4242 on host elsewhere) died"), "{verdict}");
            assert_eq!(fates(&members), verdict);
        });
    });
}

#[test]
fn a_suspicion_that_stays_one_is_told_as_it_is() {
    watched(|| {
        let members = world(2);
        let error = Error::new(ErrorKind::PeerLost, "the link to rank 1 broke");
        let verdict = members[0].lifeline.report(error, Some(1));
        assert_eq!(verdict.message(), "rank 0: the link to rank 1 broke");
        assert_eq!(fates(&members), verdict);
    });
}

#[test]
fn a_timeout_names_who_has_not_called_and_who_has_left() {
    watched(|| {
        let mut members = world(4);
        for member in &members {
            member.lifeline.status().enter(&example(16));
            member.lifeline.status().leave();
        }
        members.pop().expect("rank 3").lifeline.leave();
        for member in &members[..2] {
            member.lifeline.status().enter(&example(17));
        }
        let error = Error::new(ErrorKind::Timeout, "all_reduce #17 took longer than 300 s");
        let verdict = members[0].lifeline.report(error, Some(1));
        assert_eq!(verdict.kind(), ErrorKind::Timeout);
        assert_eq!(
            verdict.message(),
            "rank 0: all_reduce #17 took longer than 300 s (rank 2 has not called all_reduce #17: it finished #16; \
             rank 3 has left after call #16)"
        );
        assert_eq!(fates(&members), verdict);
    });
}

#[test]
fn the_hub_serves_on_when_its_rank_has_left() {
    watched(|| {
        let mut members = world(3);
        members.remove(0).lifeline.leave();
        members[1].lifeline.abort("late");
        assert_eq!(fates(&members).message(), "rank 2: late");
    });
}

#[test]
fn an_exchange_names_who_did_not_come() {
    watched(|| {
        let config = Config { connect_timeout: Duration::from_secs(1), ..config() };
        let members = members(0..3, 3, &at(free_port()), &config);
        thread::scope(|scope| {
            for member in &members[..2] {
                scope.spawn(|| {
                    let error = member.lifeline.all_gather("cards", &[]).expect_err("incomplete");
                    assert_eq!(error.kind(), ErrorKind::Timeout);
                    assert_eq!(error.message(), "rank 2 of 3 did not come to exchange cards within 1 s");
                });
            }
        });
    });
}

/// A rank 1 whose hub is played by the test, which has the other end of its connection.
fn member_of_a_puppet_hub() -> (Member, Connection) {
    let port = free_port();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
    thread::scope(|scope| {
        let member = scope.spawn(move || members(1..2, 2, &at(port), &config()));
        let (stream, _) = listener.accept().expect("rank 1");
        let mut hub = Connection::new(stream, true).expect("a connection");
        let keeper = "rank 0 (pid 1 on host a)".to_owned();
        hub.post(encode(&ToRank::Heard).expect("short"));
        hub.post(encode(&ToRank::Welcome { keeper }).expect("short"));
        hub.flush().expect("sent");
        let member = member.join().expect("joined").pop().expect("rank 1");
        (member, hub)
    })
}

#[test]
fn a_hub_that_is_lost_is_a_fault() {
    watched(|| {
        let (member, hub) = member_of_a_puppet_hub();
        member.lifeline.status().enter(&example(3));
        drop(hub);
        let fate = member.fate();
        assert_eq!(fate.kind(), ErrorKind::PeerLost);
        assert!(
            fate.message().starts_with("rank 0 (pid 1 on host a) is gone: the control connection to it "),
            "{fate}"
        );
        assert!(fate.message().contains("while this rank was in all_reduce #3"), "{fate}");
    });
}

#[test]
fn a_hub_that_is_silent_is_a_fault() {
    watched(|| {
        let (member, hub) = member_of_a_puppet_hub();
        assert!(member.fate().message().contains("has been silent for"));
        drop(hub);
    });
}

#[test]
fn a_hub_that_said_it_may_go_is_not_missed() {
    watched(|| {
        let (member, mut hub) = member_of_a_puppet_hub();
        hub.post(encode(&ToRank::Closing).expect("short"));
        hub.flush().expect("sent");
        // Whatever was heard before is answered before the hub is gone.
        thread::sleep(Duration::from_millis(50));
        hub.finish();
        drop(hub);
        thread::sleep(Duration::from_millis(100));
        assert!(member.fault.check().is_ok());
        let error = Error::new(ErrorKind::PeerLost, "the link broke");
        assert_eq!(member.lifeline.report(error.clone(), Some(0)), error);
    });
}

#[test]
fn a_goodbye_to_a_mute_hub_is_bounded() {
    watched(|| {
        let (member, hub) = member_of_a_puppet_hub();
        member.lifeline.leave();
        drop(hub);
    });
}
