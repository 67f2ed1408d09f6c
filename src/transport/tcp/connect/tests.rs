//! Connecting: late, missing, foreign and disagreeing peers.

use super::super::Tcp;
use super::super::handshake::PROOF;
use super::super::tests::{LOOPBACK, deadline, key, listen, plain, with_timeout};
use super::acceptance::HANDSHAKE_TIMEOUT;
use super::*;
use crate::config::ListeningPorts;
use flexring_testkit::port::free_port;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};

/// A thread that connects a rank to one peer.
fn connecting(
    listener: Listener,
    me: Rank,
    peer: (Rank, SocketAddr),
    number: u64,
    sockets: usize,
    deadline: Instant,
) -> JoinHandle<Result<Tcp>> {
    thread::spawn(move || {
        let fault = Fault::new();
        Tcp::connect(listener, me, &[(peer.0, vec![peer.1])], &key(number), plain(sockets), deadline, &fault)
    })
}

/// A deadline 300 ms from now.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

/// The error that a connecting thread returns.
fn failure(rank: JoinHandle<Result<Tcp>>) -> Error {
    rank.join().expect("no panic").expect_err("no link")
}

#[test]
fn unauthenticated_connections_do_not_delay_ranks() {
    with_timeout(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let mut sockets = Vec::new();
        for number in 0..200 {
            let mut socket = TcpStream::connect(zero_at).expect("listening");
            match number % 4 {
                // No bytes.
                0 => {}
                // Bytes that are not a handshake.
                1 => socket
                    .write_all(b"GET / HTTP/1.1\r\nHost: another-service.example\r\n\r\n")
                    .expect("sent"),
                // The start of a handshake.
                2 => socket.write_all(b"flexcall").expect("sent"),
                // A handshake of another communicator.
                _ => {
                    let hello =
                        LinkHello { from: 1, to: 0, socket: 0, sockets: 2, encrypted: false, nonce: [0; 16] };
                    socket.write_all(&hello.to_bytes()).expect("sent");
                }
            }
            sockets.push(socket);
        }
        let zero = connecting(zero, 0, (1, one_at), 7, 2, deadline());
        thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        let one = connecting(one, 1, (0, zero_at), 7, 2, deadline());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
        assert!(began.elapsed() < HANDSHAKE_TIMEOUT, "waited for an unauthenticated connection");
    });
}

#[test]
fn a_listener_that_starts_late_is_reached() {
    with_timeout(|| {
        let (_, zero_at) = listen();
        let (one, one_at) = listen();
        let one = connecting(one, 1, (0, zero_at), 7, 1, deadline());
        thread::sleep(3 * RETRY_INTERVAL);
        let (socket, endpoint) = Listener::listen(zero_at).expect("the port is free again");
        let zero = Listener { sockets: vec![socket], endpoints: vec![endpoint] };
        let zero = connecting(zero, 0, (1, one_at), 7, 1, deadline());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
    });
}

#[test]
fn a_peer_missing_at_the_deadline_is_named_with_address_and_cause() {
    with_timeout(|| {
        let (_, closed) = listen();
        for (me, peer, cause) in [(3, 1, "Connection refused"), (1, 3, "it did not connect")] {
            let error = failure(connecting(listen().0, me, (peer, closed), 7, 2, soon()));
            assert_eq!(error.kind(), ErrorKind::Rendezvous);
            for expected in
                [&format!("rank {peer} "), &closed.to_string(), cause, "firewall", "FLEXRING_SOCKET_IFNAME"]
            {
                assert!(error.message().contains(expected), "{error}");
            }
        }
    });
}

#[test]
fn a_silent_listener_and_a_foreign_one_give_different_errors() {
    with_timeout(|| {
        let silent = TcpListener::bind((LOOPBACK, 0)).expect("a listener on loopback");
        let at = silent.local_addr().expect("bound");
        let error = failure(connecting(listen().0, 1, (0, at), 7, 1, soon()));
        assert!(error.message().contains("no answer"), "{error}");

        let foreign = TcpListener::bind((LOOPBACK, 0)).expect("a listener on loopback");
        let at = foreign.local_addr().expect("bound");
        let answering = thread::spawn(move || {
            let (mut socket, _) = foreign.accept().expect("a connection");
            let _ = socket.write_all(&[b'?'; 100]);
            thread::sleep(Duration::from_millis(400));
        });
        let error = failure(connecting(listen().0, 1, (0, at), 7, 1, soon()));
        assert!(error.message().contains("not a rank of this job"), "{error}");
        answering.join().expect("no panic");
    });
}

#[test]
fn a_rank_of_another_communicator_is_rejected() {
    with_timeout(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let zero = connecting(zero, 0, (1, one_at), 7, 1, soon());
        let one = connecting(one, 1, (0, zero_at), 8, 1, soon());
        for rank in [zero, one] {
            assert_eq!(failure(rank).kind(), ErrorKind::Rendezvous);
        }
    });
}

#[test]
fn both_ends_report_different_numbers_of_sockets_per_link() {
    with_timeout(|| {
        for (sockets_of_zero, sockets_of_one) in [(1, 2), (2, 1)] {
            let (zero, zero_at) = listen();
            let (one, one_at) = listen();
            let zero = connecting(zero, 0, (1, one_at), 7, sockets_of_zero, deadline());
            let one = connecting(one, 1, (0, zero_at), 7, sockets_of_one, deadline());
            for rank in [zero, one] {
                let error = failure(rank);
                assert_eq!(error.kind(), ErrorKind::Disagreement);
                assert!(error.message().contains("FLEXRING_SOCKETS_PER_LINK"), "{error}");
            }
        }
    });
}

/// As a rank whose best addresses are those of a bridge that is on both nodes, of a service there, and of no
/// machine.
#[test]
fn addresses_that_do_not_lead_to_the_peer_are_passed_over() {
    with_timeout(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let (_, closed) = listen();
        let foreign = TcpListener::bind((LOOPBACK, 0)).expect("a listener on loopback");
        let foreign_at = foreign.local_addr().expect("bound");
        let silent = TcpListener::bind((LOOPBACK, 0)).expect("a listener on loopback");
        let silent_at = silent.local_addr().expect("bound");
        let answering = thread::spawn(move || {
            let (mut socket, _) = foreign.accept().expect("a connection");
            let _ = socket.write_all(&[b'?'; 100]);
        });
        let unroutable: SocketAddr = "[2001:db8::1]:9".parse().expect("an address");
        let addresses = vec![closed, foreign_at, unroutable, silent_at, zero_at];
        let zero = connecting(zero, 0, (1, one_at), 7, 2, deadline());
        let one = thread::spawn(move || {
            let fault = Fault::new();
            Tcp::connect(one, 1, &[(0, addresses)], &key(7), plain(2), deadline(), &fault)
        });
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
        answering.join().expect("no panic");
    });
}

/// Its listener accepts long before it takes part.
#[test]
fn a_late_peer_with_several_addresses_is_waited_for_at_the_first() {
    with_timeout(|| {
        let zero = Listener::bind(&[LOOPBACK; 3], None).expect("listeners on loopback");
        let addresses = zero.endpoints();
        let (one, one_at) = listen();
        let options = LinkOptions { connect_timeout: Duration::from_secs(60), ..plain(1) };
        let one = thread::spawn(move || {
            let fault = Fault::new();
            Tcp::connect(one, 1, &[(0, addresses)], &key(7), options, deadline(), &fault)
        });
        thread::sleep(FIRST_ATTEMPT * 3 / 2);
        let cause = zero.sockets[1].accept().expect_err("the first one has accepted");
        assert_eq!(cause.kind(), io::ErrorKind::WouldBlock);
        let zero = connecting(zero, 0, (1, one_at), 7, 1, deadline());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
    });
}

/// The acceptor may count the connection as established already.
#[test]
fn a_connection_to_a_proved_peer_is_kept_however_long_it_takes() {
    with_timeout(|| {
        let [zero, other] = [(); 2].map(|()| TcpListener::bind((LOOPBACK, 0)).expect("a listener"));
        let addresses = [&zero, &other].map(|listener| listener.local_addr().expect("bound")).to_vec();
        let limit = 2 * FIRST_ATTEMPT;
        let options = LinkOptions { connect_timeout: 4 * limit, ..plain(1) };
        let one = thread::spawn(move || {
            let fault = Fault::new();
            Tcp::connect(listen().0, 1, &[(0, addresses)], &key(7), options, deadline(), &fault)
        });
        let (mut socket, _) = zero.accept().expect("a connection");
        let (mut hello, mut proof) = ([0; HELLO], [0; PROOF]);
        socket.read_exact(&mut hello).expect("a hello");
        let challenge = handshake::challenge(&key(7)(1), &hello, 1, [0; 16], &[]);
        socket.write_all(&challenge).expect("sent");
        socket.read_exact(&mut proof).expect("a proof");
        thread::sleep(limit + FIRST_ATTEMPT / 2);
        socket.write_all(&handshake::ACCEPTED).expect("sent");
        one.join().expect("no panic").expect("linked by the first connection");
    });
}

#[test]
fn each_address_is_tried_before_joining_fails() {
    with_timeout(|| {
        let ((zero, zero_at), (one, one_at)) = (listen(), listen());
        // Its queue is full, so that the kernel does not answer.
        let full =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        full.bind(&SocketAddr::new(LOOPBACK, 0).into()).expect("a port");
        full.listen(0).expect("listening");
        let full_at = full.local_addr().expect("bound").as_socket().expect("an address");
        let _waiting = TcpStream::connect(full_at).expect("the queue has one place");
        // The quarter of the time-out is shorter than the attempt at the first address.
        let options = LinkOptions { connect_timeout: FIRST_ATTEMPT, ..plain(1) };
        let zero = connecting(zero, 0, (1, one_at), 7, 1, deadline());
        let one = thread::spawn(move || {
            let fault = Fault::new();
            Tcp::connect(one, 1, &[(0, vec![full_at, zero_at])], &key(7), options, deadline(), &fault)
        });
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
    });
}

#[test]
fn a_peer_that_no_address_leads_to_is_named_before_the_deadline() {
    with_timeout(|| {
        let ((_, closed), (_, other)) = (listen(), listen());
        let one = thread::spawn(move || {
            let until = Instant::now() + Duration::from_secs(12);
            let fault = Fault::new();
            let listener = listen().0;
            let linked =
                Tcp::connect(listener, 1, &[(0, vec![closed, other])], &key(7), plain(1), until, &fault);
            (linked.map(drop).expect_err("no link"), Instant::now() < until)
        });
        let (error, is_early) = one.join().expect("no panic");
        let expected = format!("rank 0 listens at {closed} or {other}, but rank 1 gets no answer from there");
        assert!(error.message().starts_with(&expected) && error.message().contains("refused"), "{error}");
        assert!(is_early, "waited for the deadline: {error}");
    });
}

#[test]
fn a_raised_fault_ends_connecting() {
    with_timeout(|| {
        let (zero, _) = listen();
        let (_, closed) = listen();
        let fault = std::sync::Arc::new(Fault::new());
        let raising = std::sync::Arc::clone(&fault);
        let raiser = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            raising.raise(Error::aborted("called off"));
        });
        let began = Instant::now();
        let error = Tcp::connect(zero, 0, &[(1, vec![closed])], &key(7), plain(1), deadline(), &fault)
            .expect_err("aborted");
        assert_eq!(error.message(), "called off");
        assert!(began.elapsed() < Duration::from_secs(10));
        raiser.join().expect("no panic");
    });
}

#[test]
fn an_address_that_cannot_be_listened_on_is_named() {
    let error = Listener::bind(&["192.0.2.1".parse().expect("an address")], None)
        .expect_err("not an address of this machine");
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.message().contains("192.0.2.1"), "{error}");
    assert_eq!(Listener::bind(&[], None).expect_err("no address").kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_port_of_the_range_is_used_in_spite_of_links_that_a_listener_accepted_there() {
    let port = free_port();
    let range = Some(ListeningPorts { first: port, last: port });
    let bind = || Listener::bind(&[LOOPBACK], range).expect("the port is free");
    let listener = bind();
    let [socket] = &listener.sockets[..] else { panic!("one address") };
    socket.set_nonblocking(false).expect("an option");
    let link = || {
        let initiator = TcpStream::connect(listener.endpoints[0]).expect("listening");
        (socket.accept().expect("a connection").0, initiator)
    };
    // The end that is closed first keeps its port for a minute.
    let (closed, live) = (link(), link());
    drop(closed.0);
    drop(closed.1);
    drop(listener);
    bind();
    drop(live);
}

/// The strangers know everything that is public about the job: which rank connects to which, and the
/// settings.
#[test]
fn a_stranger_never_fails_or_takes_a_link() {
    with_timeout(|| {
        let (zero, zero_at) = listen();
        let (one, one_at) = listen();
        let mut strangers = Vec::new();
        for (number, sockets) in [(0, 1), (1, 1), (2, 9), (3, 1)] {
            let mut socket = TcpStream::connect(zero_at).expect("listening");
            let hello =
                LinkHello { from: 1, to: 0, socket: 0, sockets, encrypted: false, nonce: [number; 16] }
                    .to_bytes();
            socket.write_all(&hello).expect("sent");
            strangers.push((number, hello, socket));
        }
        let zero = connecting(zero, 0, (1, one_at), 7, 1, deadline());
        for (number, hello, socket) in &mut strangers {
            let mut challenge = [0; CHALLENGE];
            socket.read_exact(&mut challenge).expect("a challenge");
            let guessed = SecretKey::from_parts("test", &[b"guessed"]);
            // With a proof by another key, an echo, silence, and a closed connection.
            let _ = match number {
                0 | 2 => socket.write_all(&handshake::proof(&guessed, hello, &challenge, &[])),
                1 => socket.write_all(challenge.last_chunk::<PROOF>().expect("a code")),
                _ => socket.shutdown(std::net::Shutdown::Both),
            };
        }
        let one = connecting(one, 1, (0, zero_at), 7, 1, deadline());
        for rank in [zero, one] {
            rank.join().expect("no panic").expect("linked");
        }
    });
}

#[test]
fn the_messages_of_an_earlier_link_are_refused_when_they_are_sent_again() {
    with_timeout(|| {
        let record = |listener: Listener,
                      at: SocketAddr,
                      peer_at: SocketAddr,
                      recorded: Option<(Vec<u8>, Vec<u8>)>| {
            let until = if recorded.is_some() { soon() } else { deadline() };
            let zero = connecting(listener, 0, (1, peer_at), 7, 1, until);
            let mut socket = TcpStream::connect(at).expect("listening");
            let mut challenge = [0; CHALLENGE];
            let (hello, proof) = match recorded {
                Some((hello, proof)) => {
                    socket.write_all(&hello).expect("sent");
                    socket.read_exact(&mut challenge).expect("a challenge");
                    (hello, proof)
                }
                None => {
                    let hello =
                        LinkHello { from: 1, to: 0, socket: 0, sockets: 1, encrypted: false, nonce: [3; 16] }
                            .to_bytes();
                    socket.write_all(&hello).expect("sent");
                    socket.read_exact(&mut challenge).expect("a challenge");
                    (hello.to_vec(), handshake::proof(&key(7)(0), &hello, &challenge, &[]).to_vec())
                }
            };
            socket.write_all(&proof).expect("sent");
            (zero.join().expect("no panic"), (hello, proof))
        };
        let ((zero, zero_at), (_, one_at)) = (listen(), listen());
        let (linked, recorded) = record(zero, zero_at, one_at, None);
        linked.expect("linked");
        let (zero, zero_at) = listen();
        let (refused, _) = record(zero, zero_at, one_at, Some(recorded));
        assert_eq!(refused.expect_err("refused").kind(), ErrorKind::Rendezvous);
    });
}

/// The acceptor may give a connection up although the initiator has sent everything.
#[test]
fn a_connection_that_is_lost_after_the_proof_is_made_again() {
    with_timeout(|| {
        let zero = TcpListener::bind((LOOPBACK, 0)).expect("a listener on loopback");
        let one = connecting(listen().0, 1, (0, zero.local_addr().expect("bound")), 7, 1, deadline());
        for attempt in 0..3 {
            let (mut socket, _) = zero.accept().expect("a connection");
            let mut hello = [0; HELLO];
            socket.read_exact(&mut hello).expect("a hello");
            let challenge = handshake::challenge(&key(7)(1), &hello, 1, [attempt; 16], &[]);
            socket.write_all(&challenge).expect("sent");
            let mut proof = [0; PROOF];
            socket.read_exact(&mut proof).expect("a proof");
            if attempt == 2 {
                socket.write_all(&handshake::ACCEPTED).expect("sent");
            }
        }
        one.join().expect("no panic").expect("linked");
    });
}

#[test]
fn a_socket_that_has_connected_to_itself_was_refused() {
    let own = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    own.bind(&SocketAddr::new(LOOPBACK, 0).into()).expect("a port");
    own.connect(&own.local_addr().expect("an address")).expect("the kernel allows it");
    let cause = check_connected(&own.into()).expect_err("no process listens");
    assert_eq!(cause.kind(), io::ErrorKind::ConnectionRefused);
    let (listener, endpoint) = listen();
    let other = TcpStream::connect(endpoint).expect("a connection");
    check_connected(&other).expect("another socket listens");
    drop(listener);
}

#[test]
fn bbr_stays_within_a_machine() {
    let listener = TcpListener::bind(SocketAddr::new(LOOPBACK, 0)).expect("a listener");
    let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    if SockRef::from(&stream).set_tcp_congestion(b"bbr").is_err() {
        eprintln!("skipped: bbr is not available");
        return;
    }
    let socket = set_options(LinkSocket::new(stream)).expect("options");
    let name = SockRef::from(socket.get()).tcp_congestion().expect("an option");
    assert!(name.starts_with(b"bbr"), "{}", String::from_utf8_lossy(&name));
}

#[test]
fn equal_and_loopback_addresses_are_within_a_machine() {
    let address = |text: &str| text.parse::<std::net::IpAddr>().expect("an address");
    for (own, peer, is_within) in [
        ("10.0.0.1", "10.0.0.1", true),
        ("127.0.0.1", "127.0.0.2", true),
        ("::1", "::1", true),
        ("10.0.0.1", "10.0.0.2", false),
        ("fe80::1", "fe80::2", false),
    ] {
        assert_eq!(is_within_machine(address(own), address(peer)), is_within, "{own} and {peer}");
    }
}
