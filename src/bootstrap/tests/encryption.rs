//! Encrypted control connections: what others on the network see of them, and what they can change.

use super::super::Abort;
use super::super::frame_decoder::Preamble;
use super::super::framed_stream::ReceivedFrames;
use super::super::protocol::{ENCRYPTED, FRAME_LIMIT, OPENING_LIMIT, ToRank, decode, encode, frame_of};
use super::strangers::{apply, claims, next_frame, refusal, secret_of, throw, world_under};
use super::*;
use crate::config::{SecretText, Switch};
use crate::tls::TlsRole;
use std::io::{Read, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const SECRET: &str = "the secret of this job: 0123456789";
/// Data that ranks exchange, and that others look for.
const PATTERN: &[u8] = b"a pattern that only ranks may read";

fn plain() -> Config {
    Config { secret: Some(SecretText::new(SECRET)), ..config() }
}

fn encrypted() -> Config {
    Config { tls: Switch(true), ..plain() }
}

/// Joins ranks 0 and 1, of which rank 1 looks for rank 0 at another port.
fn world_by_two_ways(port: u16, other: u16, config: &Config) -> Vec<TestRank> {
    thread::scope(|scope| {
        let zero = scope.spawn(|| join_ranks(0..1, 2, &address_of(port), config));
        let mut members = join_ranks(1..2, 2, &address_of(other), config);
        members.splice(0..0, zero.join().expect("joined"));
        members
    })
}

/// Lets all members exchange data that contains the pattern, `length` bytes of each.
fn exchange(members: &[TestRank], length: usize) {
    let part = |rank: Rank| {
        let mut part = PATTERN.to_vec();
        part.resize(length.max(PATTERN.len()), rank as u8);
        part
    };
    let expected: Vec<Vec<u8>> = (0..members.len()).map(part).collect();
    thread::scope(|scope| {
        for member in members {
            let expected = &expected;
            scope.spawn(move || {
                let mine = part(member.control.rank());
                assert!(member.control.all_gather("patterns", &mine).expect("all parts") == *expected);
            });
        }
    });
}

fn contains(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.windows(pattern.len()).any(|window| window == pattern)
}

#[test]
fn ranks_meet_exchange_and_fail_together_over_encrypted_connections() {
    watched(|| {
        let members = join_ranks(0..4, 4, &address_of(free_port()), &encrypted());
        for length in [0, 100, 20_000, 100_000] {
            exchange(&members, length);
        }
        members[2].control.abort(Abort::AtOnce("the test wants it"));
        for member in &members {
            let fault = member.wait_for_fault();
            assert!(fault.message().contains("the test wants it"), "{fault}");
        }
    });
}

#[test]
fn encryption_on_one_rank_only_ends_with_an_error_that_says_so_on_both() {
    watched(|| {
        let short = |config: Config| Config { connect_timeout: Duration::from_millis(1500), ..config };
        for (zero, one, is, is_not) in
            [(plain(), encrypted(), "has", "has not"), (encrypted(), plain(), "has not", "has")]
        {
            let ranks = [(0, 2, short(zero)), (1, 2, short(one))];
            let errors = join_errors(&ranks, &address_of(free_port()));
            let of_zero = format!("claims rank 1 and {is} FLEXRING_TLS=1, which rank 0 {is_not}");
            assert!(errors[0].message().contains(&of_zero), "{}", errors[0]);
            let sentence = format!(") {is} FLEXRING_TLS=1 and the coordinator at 127.0.0.1 port");
            assert!(errors[1].message().contains(&sentence), "{}", errors[1]);
            let advice = format!("{is_not}: set it alike on all ranks");
            assert!(errors[1].message().contains(&advice), "{}", errors[1]);
        }
    });
}

/// Forwards connections at a new port to `port`, and records what passes until the tap is dropped.
struct Tap {
    port: u16,
    recorded: Arc<Mutex<Vec<u8>>>,
    is_over: Arc<AtomicBool>,
}

impl Tap {
    fn new(to: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (recorded, is_over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let tap = Self { port, recorded: Arc::clone(&recorded), is_over: Arc::clone(&is_over) };
        thread::spawn(move || {
            for near in listener.incoming().map_while(std::result::Result::ok) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let far = connect_to(to);
                let copies = [near.try_clone(), far.try_clone()].map(|copy| copy.expect("a descriptor"));
                for (mut from, mut to) in [near, far].into_iter().zip(copies.into_iter().rev()) {
                    let recorded = Arc::clone(&recorded);
                    thread::spawn(move || {
                        let mut chunk = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut chunk) {
                            recorded.lock().expect("no panic").extend_from_slice(&chunk[..count]);
                            if to.write_all(&chunk[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(std::net::Shutdown::Write);
                    });
                }
            }
        });
        tap
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

#[test]
fn a_recorded_control_connection_shows_nothing_that_ranks_exchange() {
    watched(|| {
        for (config, is_readable) in [(plain(), true), (encrypted(), false)] {
            let port = free_port();
            let tap = Tap::new(port);
            let members = world_by_two_ways(port, tap.port, &config);
            exchange(&members, 10_000);
            drop(members);
            let recorded = tap.recorded.lock().expect("no panic").clone();
            assert!(recorded.len() > 20_000, "{} bytes", recorded.len());
            // Settings are part of the proof.
            for pattern in [PATTERN, b"FLEXRING_SUBCHUNK"] {
                let text = String::from_utf8_lossy(pattern);
                assert_eq!(contains(&recorded, pattern), is_readable, "{text}");
            }
        }
    });
}

/// A frame as it travels.
fn framed(frame: &[u8]) -> Arc<[u8]> {
    frame_of([[0; 4].as_slice(), frame].concat()).expect("short")
}

/// Forwards the frames of one connection, with the encryption of each end removed and made again, until one
/// end closes.
fn intercept(near: TcpStream, far: TcpStream) {
    let mut near = FramedStream::new(near, true).expect("a socket");
    let mut far = FramedStream::new(far, false).expect("a socket");
    near.require_encryption(TlsRole::Acceptor, OPENING_LIMIT);
    far.require_encryption(TlsRole::Initiator, FRAME_LIMIT);
    near.trust();
    far.trust();
    far.enqueue(Preamble::encode().as_slice().into());
    loop {
        // An end that has closed the connection cannot be sent to.
        let _ = (near.flush(), far.flush());
        let ReceivedFrames { frames, end, .. } = near.receive(FRAME_LIMIT);
        frames.iter().for_each(|frame| far.enqueue(framed(frame)));
        let received = far.receive(FRAME_LIMIT);
        for frame in &received.frames {
            near.enqueue(framed(frame));
            if matches!(decode(frame), Some(ToRank::Challenge(_))) {
                far.encrypt().expect("random bytes");
            }
        }
        if end.is_some() || received.end.is_some() {
            let _ = near.flush();
            return;
        }
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_process_that_intercepts_the_encryption_is_rejected_and_named() {
    watched(|| {
        let (port, attacker) = (free_port(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
        let attacked = attacker.local_addr().expect("an address").port();
        let is_over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_over);
        let attack = thread::spawn(move || {
            for near in attacker.incoming().map_while(std::result::Result::ok) {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // The coordinator may be gone.
                if let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                    intercept(near, far);
                }
            }
        });
        let config = Config { connect_timeout: Duration::from_millis(1500), ..encrypted() };
        let errors = thread::scope(|scope| {
            let ranks = [(0, port), (1, attacked)].map(|(rank, port)| {
                let config = &config;
                scope.spawn(move || {
                    join(rank, 2, &address_of(port), config).map(drop).expect_err("rank 1 is kept away")
                })
            });
            ranks.map(|rank| rank.join().expect("refused"))
        });
        for error in &errors {
            assert!(error.message().contains("or a process in between intercepts the encryption"), "{error}");
        }
        assert!(errors[0].message().contains("claims rank 1"), "{}", errors[0]);
        is_over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, attacked)));
        attack.join().expect("no panic");
    });
}

#[test]
fn a_rank_that_encrypts_sends_no_proof_in_plain_text() {
    watched(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let rendezvous = address_of(listener.local_addr().expect("an address").port());
        let config = Config { connect_timeout: Duration::from_millis(1500), ..encrypted() };
        let rank = thread::spawn(move || join(1, 2, &rendezvous, &config).map(drop));
        let (mut stream, _) = listener.accept().expect("rank 1");
        let mut opening = [0; 1000];
        let length = stream.read(&mut opening).expect("an opening");
        assert!(length > 16 && opening.starts_with(b"flexring"));
        stream.write_all(&encode(&ToRank::Challenge([1; 16])).expect("short")).expect("room");
        let mut next = [0; 5];
        stream.read_exact(&mut next).expect("more");
        // The mark, and the first byte of a TLS record that contains a handshake.
        assert_eq!((&next[..4], next[4]), (ENCRYPTED.as_slice(), 22));
        drop((stream, listener));
        rank.join().expect("no panic").expect_err("no coordinator");
    });
}

#[test]
fn strangers_neither_end_nor_join_nor_delay_an_encrypted_job() {
    watched(|| {
        let attack = |port| {
            let guess = Config { secret: Some(SecretText::new("guessed guessed guessed")), ..encrypted() };
            let mut streams = Vec::new();
            for header in claims() {
                let error = refusal(apply(port, &secret_of(&guess), &header));
                assert!(error.message().contains("does not know the secret of the job"), "{error}");
                let plain = Config { tls: Switch(false), ..guess.clone() };
                let error = refusal(apply(port, &secret_of(&plain), &header));
                assert!(error.message().contains("has not FLEXRING_TLS=1"), "{error}");
            }
            let (header, _) = hello_of(1, 3);
            for flood in [0, 1, 100, 200_000] {
                for byte in [0, 22, 0xff] {
                    let (_, opening) =
                        super::super::handshake::Applicant::new(&secret_of(&guess), JOB, &header)
                            .expect("random bytes");
                    let mut stream = throw(port, &opening);
                    let mut near = FramedStream::new(stream.try_clone().expect("a descriptor"), false)
                        .expect("a socket");
                    assert!(matches!(next_frame(&mut near), Some(ToRank::Challenge(_))));
                    let _ = stream.write_all(&ENCRYPTED).and_then(|()| stream.write_all(&vec![byte; flood]));
                    streams.push((stream, near));
                }
            }
        };
        world_under(attack, &encrypted());
    });
}

#[test]
fn an_impostor_that_challenges_twice_ends_no_rank() {
    watched(|| {
        for config in [plain(), encrypted()] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let rendezvous = address_of(listener.local_addr().expect("an address").port());
            listener.set_nonblocking(true).expect("a socket");
            let config = Config { connect_timeout: Duration::from_millis(1500), ..config };
            let is_encrypted = config.tls.0;
            let rank = thread::spawn(move || join(1, 2, &rendezvous, &config).map(drop));
            let challenge = encode(&ToRank::Challenge([1; 16])).expect("short");
            let mut connections = Vec::new();
            while !rank.is_finished() {
                if let Ok((stream, _)) = listener.accept() {
                    let mut stream = FramedStream::new(stream, true).expect("a socket");
                    if is_encrypted {
                        stream.require_encryption(TlsRole::Acceptor, FRAME_LIMIT);
                    }
                    stream.enqueue(challenge.clone());
                    connections.push((stream, 0));
                }
                for (stream, frames) in &mut connections {
                    let before = *frames;
                    *frames += stream.receive(FRAME_LIMIT).frames.len();
                    // The opening, and the proof.
                    if before < 2 && *frames >= 2 {
                        stream.enqueue(challenge.clone());
                    }
                    let _ = stream.flush();
                }
                thread::sleep(Duration::from_millis(1));
            }
            let error = rank.join().expect("no panic").expect_err("an impostor");
            assert!(error.message().contains("sent two challenges"), "{error}");
            assert!(connections.len() > 1, "the rank tried {} times", connections.len());
        }
    });
}
