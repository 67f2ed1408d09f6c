//! Encrypted links: what others on the network see of them, and what they can change.

use super::super::handshake::{HELLO, LinkHello, PROOF};
use super::super::socket::LinkSocket;
use super::*;
use crate::tls::TlsRole;
use std::io::{ErrorKind as Io, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread::JoinHandle;

#[test]
fn encrypted_links_exchange_messages_of_all_sizes() {
    with_timeout(|| {
        all_exchange(LOOPBACK, 2, encrypted(1));
        all_exchange(LOOPBACK, 3, encrypted(3));
    });
}

/// Forwards one connection to `far`, and returns what the connected end sent.
fn recorded(listener: &TcpListener, far: SocketAddr) -> JoinHandle<Vec<u8>> {
    let near = listener.accept().expect("a connection").0;
    let far = TcpStream::connect(far).expect("a listener");
    let [(mut near, mut far), (mut from, mut to)] =
        [(); 2].map(|()| (near.try_clone().expect("a descriptor"), far.try_clone().expect("a descriptor")));
    thread::spawn(move || std::io::copy(&mut to, &mut from));
    thread::spawn(move || {
        let mut recorded = Vec::new();
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = near.read(&mut chunk) {
            recorded.extend_from_slice(&chunk[..count]);
            if far.write_all(&chunk[..count]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Both);
        recorded
    })
}

#[test]
fn a_recorded_link_shows_no_message_if_it_is_encrypted() {
    with_timeout(|| {
        for options in [plain(1), encrypted(1)] {
            let ((zero, zero_at), (one, one_at)) = (listen(), listen());
            let tap = TcpListener::bind("127.0.0.1:0").expect("a port");
            let tapped = tap.local_addr().expect("an address");
            let ranks = connecting([(zero, one_at), (one, tapped)], options, deadline());
            let wire = recorded(&tap, zero_at);
            let [mut zero, mut one] = ranks.map(|rank| rank.join().expect("no panic").expect("a link"));
            let pattern = b"a pattern that only ranks may read".repeat(100);
            let (mut sent, mut arrived) = (pattern.clone(), vec![0; pattern.len()]);
            for (tcp, peer) in [(&mut zero, 1), (&mut one, 0)] {
                tcp.begin(1);
                tcp.announce(peer, &call(1)).expect("a link");
            }
            zero.post_recv(1, piece(&mut arrived)).expect("a link");
            let mut events = Events::new();
            zero.poll(&mut events).expect("a link");
            expect_entry(&mut one, 1);
            one.send(0, piece(&mut sent)).expect("a link");
            assert!(matches!(next(&mut one).expect("an event"), Event::SendComplete { .. }));
            while events.len() < 2 {
                zero.poll(&mut events).expect("a link");
            }
            drop((zero, one));
            let wire = wire.join().expect("no panic");
            assert!(arrived == pattern && wire.len() > pattern.len());
            let is_readable = wire.windows(34).any(|window| window == &pattern[..34]);
            assert_eq!(is_readable, !options.is_encrypted);
        }
    });
}

#[test]
fn strangers_delay_no_ranks_that_encrypt() {
    with_timeout(|| {
        let ((zero, zero_at), (one, one_at)) = (listen(), listen());
        let mut strangers = Vec::new();
        for number in 0..60 {
            let mut socket = TcpStream::connect(zero_at).expect("listening");
            let encrypted = number % 5 > 0;
            let hello = LinkHello { from: 1, to: 0, socket: 0, sockets: 1, encrypted, nonce: [0; 16] };
            socket.write_all(&hello.to_bytes()).expect("sent");
            match number % 5 {
                // The proof cannot be right, and comes without encryption.
                0 | 1 => socket.write_all(&[7; PROOF]).expect("sent"),
                // The beginning of a record, and a long one.
                2 => socket.write_all(&[22, 3, 1, 2]).expect("sent"),
                3 => socket.write_all(&[[22, 3, 1, 64, 0].as_slice(), &[0; 50_000]].concat()).expect("sent"),
                _ => {}
            }
            strangers.push(socket);
        }
        let ranks = connecting([(zero, one_at), (one, zero_at)], encrypted(2), deadline());
        for rank in ranks {
            rank.join().expect("no panic").expect("a link");
        }
    });
}

/// Forwards all bytes between two sockets, with the encryption of each removed and made again.
fn intercept(mut ends: [LinkSocket; 2]) {
    let until = Instant::now() + Duration::from_secs(5);
    let mut chunk = [0; 1000];
    while Instant::now() < until {
        for (from, to) in [(0, 1), (1, 0)] {
            if !matches!((ends[from].advance(), ends[to].advance()), (Ok(true), Ok(true))) {
                continue;
            }
            match ends[from].read(&mut chunk) {
                Ok(0) => return,
                Ok(count) => ends[to].send(&chunk[..count]).expect("room"),
                Err(cause) if cause.kind() == Io::WouldBlock => {}
                Err(_) => return,
            }
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// Connects two encrypting ranks through a process that reads rank 1's hello, and returns how both end.
fn linked_through(
    middle: impl FnOnce([u8; HELLO], TcpStream, TcpStream) + Send + 'static,
) -> [Result<Tcp>; 2] {
    let ((zero, zero_at), (one, one_at)) = (listen(), listen());
    let attacker = TcpListener::bind("127.0.0.1:0").expect("a port");
    let attacker_at = attacker.local_addr().expect("an address");
    let until = Instant::now() + Duration::from_secs(2);
    let ranks = connecting([(zero, one_at), (one, attacker_at)], encrypted(1), until);
    let (mut to_one, _) = attacker.accept().expect("rank 1");
    let mut hello = [0; HELLO];
    to_one.read_exact(&mut hello).expect("a hello");
    let to_zero = TcpStream::connect(zero_at).expect("rank 0 listens");
    for socket in [&to_one, &to_zero] {
        socket.set_nonblocking(true).expect("an option");
    }
    middle(hello, to_one, to_zero);
    // Later attempts get no answer.
    ranks.map(|rank| rank.join().expect("no panic"))
}

#[test]
fn a_process_that_intercepts_the_encryption_gets_no_link() {
    with_timeout(|| {
        let middle = |hello: [u8; HELLO], to_one: TcpStream, to_zero: TcpStream| {
            let [mut to_one, mut to_zero] = [to_one, to_zero].map(LinkSocket::new);
            to_zero.send(&hello).expect("room");
            to_one.encrypt(TlsRole::Acceptor).expect("a session");
            to_zero.encrypt(TlsRole::Initiator).expect("a session");
            intercept([to_one, to_zero]);
        };
        let [zero, one] = linked_through(middle);
        assert_eq!(zero.expect_err("no link").kind(), ErrorKind::Rendezvous);
        let error = one.expect_err("no link");
        assert!(error.message().contains("intercepts the encryption"), "{error}");
    });
}

#[test]
fn encryption_cannot_be_switched_off_on_the_way() {
    with_timeout(|| {
        let middle = |hello: [u8; HELLO], _to_one: TcpStream, mut to_zero: TcpStream| {
            let asked = LinkHello::from_bytes(&hello).expect("a hello");
            assert!(asked.encrypted);
            let asked = LinkHello { encrypted: false, ..asked };
            to_zero.write_all(&asked.to_bytes()).expect("room");
            to_zero.set_nonblocking(false).expect("an option");
            assert_eq!(to_zero.read(&mut [0; 100]).expect("an end"), 0, "rank 0 does not answer");
        };
        let outcomes = linked_through(middle);
        assert!(outcomes.iter().all(Result::is_err));
    });
}
