//! Ranks that leave while other ranks are in, or enter, a call beyond their last.

use super::super::Abort;
use super::super::call_state::example_call;
use super::super::protocol::ToRank;
use super::failures::{member_of_fake_coordinator, send_all};
use super::*;
use std::process::{Command, Stdio};

/// A heartbeat interval that is too long for any test: what it finds out in time does not depend on
/// heartbeats.
fn rare_heartbeats() -> Config {
    Config { heartbeat: Duration::from_secs(60), ..config() }
}

/// A world whose ranks have all finished call #16.
fn world_after_call_16() -> Vec<TestRank> {
    let members = join_ranks(0..3, 3, &address_of(free_port()), &rare_heartbeats());
    for member in &members {
        member.control.enter_call(&example_call(16)).expect("no rank has left");
        member.control.call_state().leave();
    }
    members
}

fn assert_blames_the_leaver(error: &Error, leaver: Rank) {
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    for text in [&format!("rank {leaver} "), "left after call #16", "is in all_reduce #17"] {
        assert!(error.message().contains(text), "{error}");
    }
}

#[test]
fn leaving_ends_a_call_that_others_are_in() {
    watched(|| {
        for leaver in [2, 0] {
            let mut members = world_after_call_16();
            let last = members.remove(leaver);
            for member in &members {
                member.control.enter_call(&example_call(17)).expect("no rank has left");
            }
            let begun = Instant::now();
            last.control.leave();
            assert_blames_the_leaver(&common_fault(&members), leaver);
            assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
        }
    });
}

#[test]
fn a_call_after_a_rank_has_left_fails_at_once() {
    watched(|| {
        let mut members = world_after_call_16();
        members.remove(1).control.leave();
        // The announcement is on its way.
        thread::sleep(Duration::from_millis(200));
        let begun = Instant::now();
        let call = example_call(17);
        let error = members[0].control.enter_call(&call).expect_err("rank 1 has left");
        let root_cause = members[0].control.report(error);
        assert_blames_the_leaver(&root_cause, 1);
        assert_eq!(common_fault(&members), root_cause);
        assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
    });
}

#[test]
fn ranks_may_leave_one_after_the_other() {
    watched(|| {
        let mut members = world_after_call_16();
        let last = members.pop().expect("rank 2");
        for member in members {
            member.control.leave();
        }
        thread::sleep(Duration::from_millis(100));
        assert!(last.fault.check().is_ok(), "leaving after the last call is no failure");
    });
}

#[test]
fn a_departure_counts_even_if_the_coordinator_has_ended() {
    watched(|| {
        for is_in_call in [false, true] {
            let (member, mut coordinator) = member_of_fake_coordinator();
            if is_in_call {
                member.control.enter_call(&example_call(17)).expect("no rank has left");
            }
            send_all(&mut coordinator, &[ToRank::Left { rank: 0, finished: 16 }, ToRank::Closing]);
            // Give the rank time to answer what it has received.
            thread::sleep(Duration::from_millis(50));
            coordinator.shut_down_write();
            drop(coordinator);
            if is_in_call {
                assert_blames_the_leaver(&member.wait_for_fault(), 0);
            } else {
                thread::sleep(Duration::from_millis(100));
                assert!(member.fault.check().is_ok(), "the rank is in no call");
                let error = member.control.enter_call(&example_call(17)).expect_err("rank 0 has left");
                assert_blames_the_leaver(&error, 0);
            }
        }
    });
}

/// What the rank gets while the process runs that causes the failure, which is not itself.
#[test]
fn a_failure_shows_when_the_process_that_caused_it_has_ended() {
    watched(|| {
        for (is_departure, connection_ends) in [(false, false), (false, true), (true, true)] {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("a process");
            let cause = Process { pid: child.id(), ..Process::current() };
            let (member, mut coordinator) = member_of_fake_coordinator();
            member.control.enter_call(&example_call(17)).expect("no rank has left");
            let await_exit = ToRank::AwaitExit { process: cause, ends: !is_departure };
            let messages = if is_departure {
                [ToRank::Left { rank: 0, finished: 16 }, await_exit, ToRank::Closing]
            } else {
                let root_cause = ToRank::RootCause(Error::peer_lost("rank 0 raised an exception"));
                [ToRank::RequestState, await_exit, root_cause]
            };
            send_all(&mut coordinator, &messages);
            if connection_ends {
                // Give the rank time to answer what it has received.
                thread::sleep(Duration::from_millis(50));
                coordinator.shut_down_write();
                drop(coordinator);
            }
            thread::sleep(Duration::from_millis(500));
            assert!(member.fault.check().is_ok(), "the process still runs");
            let begun = Instant::now();
            drop(child.stdin.take());
            let text = if is_departure { "left after call #16" } else { "raised an exception" };
            // A link that broke first.
            let error = member.control.report(Error::peer_lost("the link broke").with_suspect(0));
            assert!(error.message().contains(text), "{error}");
            assert!(begun.elapsed() < Duration::from_millis(1800), "it took {:?}", begun.elapsed());
            child.wait().expect("its status");
        }
    });
}

#[test]
fn a_process_that_is_about_to_end_names_the_reason() {
    watched(|| {
        for failing in [2, 0] {
            let members = world_after_call_16();
            members[failing].control.abort(Abort::OnExit("raised ValueError: no data (train.py:20)"));
            let process = Process::current();
            let expected = format!("rank {failing} ({process}) raised ValueError: no data (train.py:20)");
            assert_eq!(common_fault(&members), Error::peer_lost(expected));
        }
    });
}

#[test]
fn a_leaving_rank_waits_for_the_coordinator_while_others_leave() {
    watched(|| {
        let (member, mut coordinator) = member_of_fake_coordinator();
        let begun = Instant::now();
        let leaving = thread::spawn(move || member.control.leave());
        send_all(&mut coordinator, &[ToRank::Left { rank: 0, finished: 0 }, ToRank::RequestState]);
        // It would wait for 800 ms.
        thread::sleep(Duration::from_millis(200));
        assert!(!leaving.is_finished(), "it left after {:?}", begun.elapsed());
        drop(coordinator);
        leaving.join().expect("left");
    });
}

#[test]
fn an_exchange_after_the_coordinator_has_left_names_the_rank_that_left() {
    watched(|| {
        let (member, mut coordinator) = member_of_fake_coordinator();
        send_all(&mut coordinator, &[ToRank::Left { rank: 0, finished: 0 }, ToRank::Closing]);
        // Give the rank time to read what it has received.
        thread::sleep(Duration::from_millis(50));
        coordinator.shut_down_write();
        drop(coordinator);
        let error = member.control.all_gather("peer info", &[]).expect_err("no rank answers");
        assert_eq!((error.kind(), error.suspect()), (ErrorKind::PeerLost, Some(0)));
        assert!(error.message().starts_with("cannot exchange peer info: rank 0 has left"), "{error}");
    });
}
