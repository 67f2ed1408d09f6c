//! Connections that end: when that is an error, and which messages still arrive.

use super::*;

fn assert_lost(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().starts_with("rank 1 (127.0.0.1:"), "{error}");
}

#[test]
fn a_closed_connection_is_an_error_only_once_it_is_needed() {
    with_timeout(|| {
        for operation in 0..3 {
            let (mut here, there) = pair(2);
            here.begin(1);
            drop(there);
            expect_no_event(&mut here);
            let mut bytes = [0; 8];
            let error = match operation {
                0 => here.announce(1, &call(1)),
                1 => here.send(1, piece(&mut bytes)),
                _ => here.post_recv(1, piece(&mut bytes)),
            };
            let error = error.expect_err("the peer has closed");
            assert_lost(&error);
            assert!(error.message().contains("closed its connection"), "{error}");
        }
    });
}

#[test]
fn a_peer_that_left_after_the_last_call_is_detected_when_the_next_begins() {
    with_timeout(|| {
        let (mut here, there) = pair(1);
        drop(there);
        here.begin(1);
        assert_lost(&here.announce(1, &call(1)).expect_err("the peer has closed"));
    });
}

#[test]
fn a_peer_that_left_before_a_call_that_needs_all_ranks_is_lost() {
    with_timeout(|| {
        let (mut here, there) = pair(1);
        drop(there);
        here.begin_together(1);
        let (mut sent, mut received) = ([1; 8], [0; 8]);
        let outcome = here
            .announce_with_message(1, &call(1))
            .and_then(|()| here.send(1, piece(&mut sent)))
            .and_then(|()| here.post_recv(1, piece(&mut received)))
            .and_then(|()| next(&mut here).map(drop))
            .and_then(|()| next(&mut here).map(drop));
        assert_lost(&outcome.expect_err("the peer has closed"));
    });
}

#[test]
fn a_peer_that_closes_before_its_message_is_lost() {
    with_timeout(|| {
        for sockets in 1..=2 {
            let (mut here, mut there) = pair(sockets);
            let mut destinations = [[0; 8]; 2];
            there.begin(1);
            enter(&mut there, 0, 1);
            here.begin(1);
            expect_entry(&mut here, 1);
            for destination in &mut destinations {
                here.post_recv(1, piece(destination)).expect("linked");
            }
            there.abort();
            assert_lost(&next(&mut here).expect_err("the message is lost"));
        }
    });
}

#[test]
fn a_peer_that_closes_in_the_middle_of_a_message_is_lost() {
    with_timeout(|| {
        let (mut here, mut there) = pair(1);
        let mut message = vec![1; 32 << 20];
        let mut destination = vec![0; 32 << 20];
        there.begin(1);
        there.announce(0, &call(1)).expect("linked");
        there.send(0, piece(&mut message)).expect("linked");
        here.begin(1);
        expect_entry(&mut here, 1);
        here.post_recv(1, piece(&mut destination)).expect("linked");
        there.abort();
        let error = next(&mut here).expect_err("the rest is lost");
        assert_lost(&error);
        assert!(error.message().contains("in the middle of a message"), "{error}");
    });
}

#[test]
fn a_peer_that_closes_before_it_read_everything_is_lost() {
    with_timeout(|| {
        let (mut here, there) = pair(1);
        let mut message = vec![1; 32 << 20];
        here.begin(1);
        here.announce(1, &call(1)).expect("linked");
        here.send(1, piece(&mut message)).expect("linked");
        drop(there);
        assert_lost(&next(&mut here).expect_err("the rest is not read"));
    });
}

#[test]
fn messages_sent_before_the_peer_closed_are_still_received() {
    with_timeout(|| {
        let (mut here, mut there) = pair(2);
        let mut messages = [[5; 3000], [6; 3000], [7; 3000]];
        there.begin(1);
        there.announce(0, &call(1)).expect("linked");
        for message in &mut messages {
            there.send(0, piece(message)).expect("linked");
        }
        drop(there);
        here.begin(1);
        expect_entry(&mut here, 1);
        for message in messages {
            let mut destination = [0; 3000];
            here.post_recv(1, piece(&mut destination)).expect("one more message");
            assert!(matches!(next(&mut here), Ok(Event::RecvComplete { peer: 1 })));
            assert_eq!(destination, message);
        }
        let mut destination = [0; 1];
        here.post_recv(1, piece(&mut destination)).expect("the loss is not detected yet");
        assert_lost(&next(&mut here).expect_err("no more messages"));
    });
}

#[test]
fn aborted_links_return_errors() {
    with_timeout(|| {
        let (mut here, _there) = pair(1);
        let mut message = vec![1; 32 << 20];
        here.begin(1);
        here.send(1, piece(&mut message)).expect("linked");
        here.abort();
        drop(message);
        assert_eq!(here.poll(&mut Events::new()).expect_err("aborted").kind(), ErrorKind::PeerLost);
        let error = here.announce(1, &call(1)).expect_err("aborted");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("aborted"), "{error}");
        here.begin(2);
        here.abort();
    });
}
