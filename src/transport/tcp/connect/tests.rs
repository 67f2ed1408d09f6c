//! How ranks find each other, and what becomes of those who are none.

use super::super::Tcp;
use super::super::tests::{LOOPBACK, soon, watched};
use super::*;
use std::thread::{self, JoinHandle};

fn listen() -> (Listener, SocketAddr) {
    let listener = Listener::bind(&[LOOPBACK]).expect("loopback can be listened at");
    let endpoint = listener.endpoints()[0];
    (listener, endpoint)
}

/// A rank that wants to be linked to one peer.
fn joining(
    listener: Listener,
    me: Rank,
    peer: (Rank, SocketAddr),
    token: u64,
    sockets: usize,
    deadline: Instant,
) -> JoinHandle<Result<Tcp>> {
    thread::spawn(move || {
        let fault = Fault::new()?;
        Tcp::connect(listener, me, &[peer], token, sockets, deadline, &fault)
    })
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

fn failure(rank: JoinHandle<Result<Tcp>>) -> Error {
    rank.join().expect("no panic").expect_err("no link")
}

#[test]
fn strangers_at_the_listener_hold_nobody_up() {
    watched(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let mut strangers = Vec::new();
        for stranger in 0..200 {
            let mut socket = TcpStream::connect(zero_at).expect("listening");
            match stranger % 4 {
                // Silent.
                0 => {}
                // Something that is no greeting.
                1 => {
                    socket.write_all(b"GET / HTTP/1.1\r\nHost: the-wrong-door.example\r\n\r\n").expect("sent")
                }
                // Half of something.
                2 => socket.write_all(b"flexcall").expect("sent"),
                // A greeting of another communicator.
                _ => {
                    let greeting = Greeting { token: 8, from: 1, to: 0, socket: 0, sockets: 2 };
                    socket.write_all(&greeting.to_bytes(Role::Caller)).expect("sent");
                }
            }
            strangers.push(socket);
        }
        let zero = joining(zero, 0, (1, one_at), 7, 2, soon());
        thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        let one = joining(one, 1, (0, zero_at), 7, 2, soon());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
        assert!(began.elapsed() < PATIENCE, "a stranger was waited for");
    });
}

#[test]
fn a_listener_that_comes_late_is_found() {
    watched(|| {
        let (_, zero_at) = listen();
        let (one, one_at) = listen();
        let one = joining(one, 1, (0, zero_at), 7, 1, soon());
        thread::sleep(3 * PAUSE);
        let (socket, endpoint) = Listener::listen(zero_at).expect("the port is free again");
        let zero = Listener { sockets: vec![socket], endpoints: vec![endpoint] };
        let zero = joining(zero, 0, (1, one_at), 7, 1, soon());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
    });
}

#[test]
fn whoever_is_missing_at_the_deadline_is_named_with_address_and_cause() {
    watched(|| {
        let (_, nobody) = listen();
        for (me, peer, cause) in [(3, 1, "Connection refused"), (1, 3, "it did not call")] {
            let error = failure(joining(listen().0, me, (peer, nobody), 7, 2, shortly()));
            assert_eq!(error.kind(), ErrorKind::Rendezvous);
            for words in [&format!("rank {peer} at {nobody}"), cause, "firewall", "FLEXRING_SOCKET_IFNAME"] {
                assert!(error.message().contains(words), "{error}");
            }
        }
    });
}

#[test]
fn a_silent_listener_and_a_strange_one_are_told_apart() {
    watched(|| {
        let silent = TcpListener::bind((LOOPBACK, 0)).expect("loopback can be listened at");
        let at = silent.local_addr().expect("bound");
        let error = failure(joining(listen().0, 1, (0, at), 7, 1, shortly()));
        assert!(error.message().contains("no answer"), "{error}");

        let strange = TcpListener::bind((LOOPBACK, 0)).expect("loopback can be listened at");
        let at = strange.local_addr().expect("bound");
        let answering = thread::spawn(move || {
            let (mut socket, _) = strange.accept().expect("called");
            let _ = socket.write_all(&[b'?'; 100]);
            thread::sleep(Duration::from_millis(400));
        });
        let error = failure(joining(listen().0, 1, (0, at), 7, 1, shortly()));
        assert!(error.message().contains("something else answers"), "{error}");
        answering.join().expect("no panic");
    });
}

#[test]
fn another_communicators_rank_is_not_taken_for_a_peer() {
    watched(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let zero = joining(zero, 0, (1, one_at), 7, 1, shortly());
        let one = joining(one, 1, (0, zero_at), 8, 1, shortly());
        for rank in [zero, one] {
            assert_eq!(failure(rank).kind(), ErrorKind::Rendezvous);
        }
    });
}

#[test]
fn both_ends_learn_that_their_numbers_of_sockets_differ() {
    watched(|| {
        for (zeros, ones) in [(1, 2), (2, 1)] {
            let (zero, zero_at) = listen();
            let (one, one_at) = listen();
            let zero = joining(zero, 0, (1, one_at), 7, zeros, soon());
            let one = joining(one, 1, (0, zero_at), 7, ones, soon());
            for rank in [zero, one] {
                let error = failure(rank);
                assert_eq!(error.kind(), ErrorKind::Disagreement);
                assert!(error.message().contains("FLEXRING_SOCKETS_PER_LINK"), "{error}");
            }
        }
    });
}

#[test]
fn a_fault_ends_the_waiting() {
    watched(|| {
        let (zero, _) = listen();
        let (_, nobody) = listen();
        let fault = std::sync::Arc::new(Fault::new().expect("an event descriptor"));
        let raising = std::sync::Arc::clone(&fault);
        let raiser = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            raising.raise(Error::aborted("never mind"));
        });
        let began = Instant::now();
        let error = Tcp::connect(zero, 0, &[(1, nobody)], 7, 1, soon(), &fault).expect_err("called off");
        assert_eq!(error.message(), "never mind");
        assert!(began.elapsed() < Duration::from_secs(10));
        raiser.join().expect("no panic");
    });
}

#[test]
fn an_address_that_cannot_be_listened_at_is_named() {
    let error = Listener::bind(&["192.0.2.1".parse().expect("an address")]).expect_err("not this machine's");
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.message().contains("192.0.2.1"), "{error}");
    assert_eq!(Listener::bind(&[]).expect_err("nothing").kind(), ErrorKind::InvalidArgument);
}
