//! What a network device changes on the way, with the checksums of TCP and IP computed again.

use super::super::handshake::{HELLO, PROOF};
use super::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

/// Bytes of a header.
const HEADER: usize = 40;
/// Bytes of a call and its header.
const CALL: usize = 2 * HEADER;

/// Forwards one connection, and changes a bit of what its initiator sends, at this offset behind the
/// handshake.
fn damage(from: TcpListener, to: SocketAddr, offset: usize, bit: u8) -> thread::JoinHandle<()> {
    let forward = move |mut from: TcpStream, mut to: TcpStream, mut target: Option<usize>| {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            if let Some(left) = target {
                target = left.checked_sub(count);
                if left < count {
                    chunk[left] ^= 1 << bit;
                }
            }
            if to.write_all(&chunk[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    };
    thread::spawn(move || {
        let near = from.accept().expect("the initiator").0;
        let far = TcpStream::connect(to).expect("the acceptor");
        let clones = (near.try_clone().expect("a descriptor"), far.try_clone().expect("a descriptor"));
        let answers = thread::spawn(move || forward(clones.1, clones.0, None));
        forward(near, far, Some(HELLO + PROOF + offset));
        answers.join().expect("no panic");
    })
}

/// Rank 1 sends a message of so many bytes in its call, and the bit is changed. Returns what rank 0 gets.
fn received_with_damage(len: usize, offset: usize, bit: u8) -> Result<Vec<u8>> {
    let ((zero, zero_at), (one, one_at)) = (listen(), listen());
    let middle = TcpListener::bind((LOOPBACK, 0)).expect("a port");
    let middle_at = middle.local_addr().expect("an address");
    let middle = damage(middle, zero_at, offset, bit);
    let [mut zero, mut one] = connecting([(zero, one_at), (one, middle_at)], plain(1), deadline())
        .map(|rank| rank.join().expect("no panic").expect("a link"));
    let (mut message, mut destination) = (vec![7; len], vec![0; len]);
    zero.begin(1);
    one.begin(1);
    enter(&mut one, 0, 1);
    one.send(0, piece(&mut message)).expect("a link");
    let outcome = zero.post_recv(1, piece(&mut destination)).and_then(|()| {
        let mut events = Events::new();
        while !events.iter().any(|event| matches!(event, Event::RecvComplete { .. })) {
            // Long messages are sent while they are received.
            one.poll(&mut Events::new())?;
            zero.poll(&mut events)?;
        }
        Ok(())
    });
    zero.abort();
    one.abort();
    middle.join().expect("no panic");
    outcome.map(|()| destination)
}

#[test]
fn what_is_changed_on_the_way_is_an_error_that_names_the_peer_and_the_cause() {
    with_timeout(|| {
        const LONG: usize = 1 << 20;
        let of_headers = (0..CALL + HEADER).step_by(7).map(|offset| (24, offset));
        let of_messages = [(24, 0), (24, 23), (LONG, 0), (LONG, LONG / 2 + 1), (LONG, LONG - 1)];
        let of_messages = of_messages.map(|(len, offset)| (len, CALL + HEADER + offset));
        for (len, offset) in of_headers.chain(of_messages) {
            let error = received_with_damage(len, offset, (offset % 8) as u8).expect_err("a wrong message");
            assert_eq!(error.kind(), ErrorKind::System, "{error}");
            for part in ["what rank 1 (127.0.0.1:", "was changed on the way", "wrong checksum", "ethtool"] {
                assert!(error.message().contains(part), "{error}");
            }
            let what = if offset < CALL { "its next call" } else { "message 0 of call 1" };
            assert!(error.message().contains(what), "byte {offset}: {error}");
        }
        assert_eq!(received_with_damage(24, usize::MAX / 2, 0), Ok(vec![7; 24]), "nothing is changed");
    });
}
