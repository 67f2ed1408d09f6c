//! Two ends of a session over loopback.

use super::*;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const ALLOWANCE: usize = 64 << 10;

/// Two connected sockets that do not block.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let far = listener.accept().expect("a connection").0;
    for socket in [&near, &far] {
        socket.set_nonblocking(true).expect("an option");
    }
    (near, far)
}

struct End {
    session: TlsSession,
    socket: TcpStream,
}

impl End {
    fn new(role: TlsRole, socket: TcpStream) -> Self {
        let session = TlsSession::new(role, 16 << 10, ALLOWANCE).expect("a session");
        Self { session, socket }
    }

    fn advance(&mut self) -> bool {
        self.session.advance_handshake(&self.socket).expect("a handshake")
    }
}

/// Both ends after the handshake.
fn session() -> (End, End) {
    let (near, far) = sockets();
    let mut ends = (End::new(TlsRole::Initiator, near), End::new(TlsRole::Acceptor, far));
    let began = Instant::now();
    while !(ends.0.advance() & ends.1.advance()) {
        assert!(began.elapsed() < Duration::from_secs(20), "the handshake takes too long");
    }
    ends
}

#[test]
fn both_ends_have_one_binding_and_no_other_session_has_it() {
    let ((one, other), (third, _)) = (session(), session());
    let binding = one.session.binding().expect("complete");
    assert_eq!(other.session.binding(), Some(binding));
    assert_ne!(third.session.binding(), Some(binding));
    let (near, _far) = sockets();
    assert_eq!(End::new(TlsRole::Initiator, near).session.binding(), None);
}

#[test]
fn long_transfers_arrive_whole_and_encrypted_bytes_are_bounded() {
    let (mut from, mut to) = session();
    from.session.lift_allowance();
    to.session.lift_allowance();
    let sent: Vec<u8> = (0..4usize << 20).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    let (mut done, mut reported, mut received) = (0, 0, Vec::new());
    let mut chunk = vec![0; 100_000];
    let began = Instant::now();
    while received.len() < sent.len() {
        assert!(began.elapsed() < Duration::from_secs(20), "{} bytes arrived", received.len());
        if !from.session.wants_send() && done < sent.len() {
            let (first, second) = sent[done..].split_at((sent.len() - done) / 3);
            let mut parts = [IoSlice::new(first), IoSlice::new(second)];
            let count = from.session.encrypt(&mut parts).expect("a session");
            assert!(count > 0 && count <= 272 << 10, "{count} bytes");
            done += count;
        }
        reported += from.session.send(&from.socket).expect("a connection");
        assert!(reported <= done);
        let (head, tail) = chunk.split_at_mut(7);
        match to.session.read(&to.socket, &mut [IoSliceMut::new(head), IoSliceMut::new(tail)]) {
            Ok(count) => received.extend_from_slice(&chunk[..count]),
            Err(cause) => assert_eq!(cause.kind(), ErrorKind::WouldBlock, "{cause}"),
        }
    }
    assert!(received == sent && reported == sent.len());
    assert!(!to.session.has_buffered());
    drop(from);
    let mut rest = [0];
    let end = to.session.read(&to.socket, &mut [IoSliceMut::new(&mut rest)]);
    assert_eq!(end.expect("an end"), 0);
}

#[test]
fn bytes_that_are_not_tls_or_were_changed_are_errors() {
    let (near, far) = sockets();
    let mut end = End::new(TlsRole::Acceptor, far);
    (&near).write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
    let cause = loop {
        if let Err(cause) = end.session.advance_handshake(&end.socket) {
            break cause;
        }
    };
    assert_eq!(cause.kind(), ErrorKind::InvalidData, "{cause}");

    let (mut from, mut to) = session();
    from.session.encrypt(&mut [IoSlice::new(b"a message")]).expect("a session");
    let (wire, mut tap) = sockets();
    from.session.send(&wire).expect("sent");
    tap.set_nonblocking(false).expect("an option");
    let mut record = vec![0; 1000];
    let length = tap.read(&mut record).expect("a record");
    record[length - 1] ^= 1;
    to.session.feed(&record[..length]).expect("short");
    let mut room = [0; 16];
    let outcome = to.session.read(&to.socket, &mut [IoSliceMut::new(&mut room)]);
    assert_eq!(outcome.expect_err("a changed byte").kind(), ErrorKind::InvalidData);
}

#[test]
fn an_end_that_is_not_authenticated_can_send_only_so_many_bytes() {
    let (mut from, mut to) = session();
    let mut sent = 0;
    let refused = loop {
        assert!(sent <= ALLOWANCE + (16 << 10), "{sent} bytes were accepted");
        sent += from.session.encrypt(&mut [IoSlice::new(&[7; 8 << 10])]).expect("a session");
        from.session.send(&from.socket).expect("room in the socket");
        let mut chunk = [0; 16 << 10];
        match to.session.read(&to.socket, &mut [IoSliceMut::new(&mut chunk)]) {
            Err(cause) if cause.kind() != ErrorKind::WouldBlock => break cause,
            _ => {}
        }
    };
    assert!(refused.to_string().contains("before it was authenticated"), "{refused}");
}

/// A message may need the one before it to be sent, and nothing behind it.
#[test]
fn bytes_count_as_sent_although_later_ones_are_not() {
    let (mut from, to) = session();
    rustix::net::sockopt::set_socket_send_buffer_size(&from.socket, 32 << 10).expect("an option");
    rustix::net::sockopt::set_socket_recv_buffer_size(&to.socket, 32 << 10).expect("an option");
    let (mut count, mut sent) = (0, 0);
    // More than the kernel holds, whatever its buffers were before.
    while !from.session.wants_send() {
        assert!(count < 64 << 20, "the kernel takes everything");
        count += from.session.encrypt(&mut [IoSlice::new(&vec![7; 1 << 20])]).expect("a session");
        sent += from.session.send(&from.socket).expect("a connection");
    }
    assert!(sent > 0 && sent < count, "{sent} of {count} bytes");
}
