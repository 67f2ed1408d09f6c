//! Fuzz targets: what strangers send at the port of TCP links, and what a hostile rank sends on a link.

use super::frame::Frame;
use super::handshake::{self, CHALLENGE, HELLO, LinkHello, PROOF};
use super::link::Link;
use super::socket::LinkSocket;
use crate::memory::Piece;
use crate::secret::SecretKey;
use crate::transport::fixtures::{call, piece};
use crate::transport::{Event, Events};
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};
use rustix::event::epoll::EventFlags;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Messages in flight per socket and direction.
const WINDOW: u64 = 4;
/// What surrounds the destinations of messages.
const GUARD: [u8; 16] = [0xa5; 16];

/// The bytes of a frame, as they travel.
fn bytes_of(frame: &Frame) -> Vec<u8> {
    frame.unsent().map(|part| part.to_vec()).concat()
}

/// A connected pair: the end of a link, and the wire.
fn socket_pair() -> (LinkSocket, UnixStream) {
    let (near, far) = UnixStream::pair().expect("sockets");
    for end in [&near, &far] {
        end.set_nonblocking(true).expect("a socket");
    }
    (LinkSocket::new(TcpStream::from(OwnedFd::from(near))), far)
}

/// The memory of one receive, and what surrounds it.
struct Destination(Vec<u8>);

impl Destination {
    fn new(len: usize) -> Self {
        Self([&GUARD, vec![0; len].as_slice(), &GUARD].concat())
    }

    fn piece(&mut self) -> Piece {
        let end = self.0.len() - GUARD.len();
        piece(&mut self.0[GUARD.len()..end])
    }

    fn check(&self) {
        assert!(
            self.0.starts_with(&GUARD) && self.0.ends_with(&GUARD),
            "bytes were written beside a destination"
        );
    }
}

#[test]
fn frames_of_a_hostile_rank() {
    let mut message = [7u8; 40];
    let call_bytes = bytes_of(&Frame::of_call(&call(1)));
    let later = bytes_of(&Frame::of_call(&call(2)));
    let data = |index, len: usize, message: &mut [u8]| {
        bytes_of(&Frame::of_data(1, index, piece(&mut message[..len])))
    };
    let first = data(0, 40, &mut message);
    let second = data(1, 8, &mut message);
    let seeds = [
        // Two sockets; begin; post; the call and the messages; drive; begin.
        [
            &[1, 1, 2, 40, 2, 8, 0, 0],
            block(&[call_bytes.as_slice(), &first].concat()).as_slice(),
            &[0, 1],
            &block(&second),
            &[5, 1, 5],
        ]
        .concat(),
        [&[0, 1, 4, 3, 9, 0, 0], block(&[call_bytes.as_slice(), &later].concat()).as_slice(), &[5, 1, 5]]
            .concat(),
        [&[0, 1, 2, 40, 0, 0], block(&later).as_slice(), &[5, 6, 0, 5]].concat(),
        [&[0, 1, 0, 0], block(&call_bytes[..30]).as_slice(), &[5, 6, 0, 5, 1, 2, 3]].concat(),
    ];
    let address: SocketAddr = "127.0.0.1:1".parse().expect("an address");
    let target = FuzzTarget { name: "tcp_frames", longest: 2048, memory: 256 << 10 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let sockets = 1 + reader.below(3);
        let (near, mut wire): (Vec<_>, Vec<_>) = (0..sockets).map(|_| socket_pair()).unzip();
        let mut link = Link::new(1, address, near, WINDOW as usize);
        let window = WINDOW * sockets as u64;
        let (mut sequence, mut entries, mut completed) = (0, 0, 0);
        let (mut destinations, mut sources) = (Vec::<Destination>::new(), Vec::<Vec<u8>>::new());
        let mut posted = 0;
        let (mut announced, mut failed) = (false, false);
        while !reader.is_empty() && !failed {
            match reader.byte() % 7 {
                0 => {
                    let at = reader.below(sockets);
                    // A wire that is closed or full takes no bytes.
                    let _ = wire[at].write(reader.block());
                }
                1 if link.is_busy() => break,
                1 => {
                    sequence += 1;
                    link.begin(sequence);
                    (posted, completed, entries, announced) = (0, 0, 0, false);
                }
                2 if sequence > 0 && link.in_flight().1 < window => {
                    let mut destination = Destination::new(usize::from(reader.byte()) + 1);
                    failed |= link.post_recv(destination.piece()).is_err();
                    posted += u64::from(!failed);
                    destinations.push(destination);
                }
                3 if sequence > 0 && link.in_flight().0 < window => {
                    let mut source = vec![1; usize::from(reader.byte()) + 1];
                    failed |= link.send(piece(&mut source)).is_err();
                    sources.push(source);
                }
                // Once for each call, as the executor does.
                4 if sequence > 0 && !announced => {
                    announced = true;
                    failed |= link.announce(&call(sequence)).is_err();
                }
                5 => {
                    let mut events = Events::new();
                    for at in (0..sockets).cycle().take(4 * sockets) {
                        link.streams[at].update_readiness(EventFlags::IN | EventFlags::OUT);
                        failed |= link.drive(at, &mut events).is_err();
                        if failed {
                            break;
                        }
                    }
                    for event in events {
                        match event {
                            Event::PeerEntered { peer, .. } => {
                                assert_eq!(peer, 1);
                                entries += 1;
                            }
                            Event::RecvComplete { .. } => completed += 1,
                            Event::SendComplete { .. } => {}
                            Event::RecvReady { .. } => panic!("tcp delivers to destinations"),
                        }
                    }
                    assert!(
                        completed <= posted && entries <= 1,
                        "{completed} of {posted}, {entries} entries"
                    );
                }
                6 => {
                    let at = reader.below(sockets);
                    let _ = wire[at].shutdown(std::net::Shutdown::Both);
                }
                _ => {}
            }
        }
        if failed {
            assert!(link.check().is_err(), "an error is final");
        }
        link.shut();
        destinations.iter().for_each(Destination::check);
    });
}

#[test]
fn handshakes_of_strangers_at_links() {
    let key = SecretKey::from_parts("test", &[b"key"]);
    let hello = LinkHello { from: 3, to: 1, socket: 2, sockets: 4, encrypted: false, nonce: [7; 16] };
    let sent = hello.to_bytes();
    let challenge = handshake::challenge(&key, &sent, 4, [9; 16], &[]);
    let wrong = SecretKey::from_parts("test", &[b"Key"]);
    let forged = handshake::challenge(&wrong, &sent, 4, [9; 16], &[]);
    let seeds = [challenge, forged].map(|challenge| [sent.as_slice(), &challenge, &[1; PROOF]].concat());
    let target = FuzzTarget { name: "tcp_handshake", longest: HELLO + CHALLENGE + PROOF, memory: 1 << 12 };
    target.run(&seeds, |input| {
        let mut bytes = [0; HELLO + CHALLENGE + PROOF];
        bytes[..input.len().min(HELLO + CHALLENGE + PROOF)].copy_from_slice(input);
        let (hello, rest) = bytes.split_first_chunk::<HELLO>().expect("as long");
        let (challenge, rest) = rest.split_first_chunk::<CHALLENGE>().expect("as long");
        let proof = rest.first_chunk::<PROOF>().expect("as long");
        if let Some(read) = LinkHello::from_bytes(hello) {
            assert_eq!(read.to_bytes(), *hello);
        }
        // Only the one recorded challenge has a code of this key.
        if handshake::verify_challenge(&key, hello, challenge, &[]).is_some() {
            assert_eq!((hello, challenge), (&sent, &handshake::challenge(&key, &sent, 4, [9; 16], &[])));
        }
        assert!(!handshake::verify_proof(&key, hello, challenge, &[], proof), "a forged proof");
    });
}
