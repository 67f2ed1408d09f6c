//! Processes that do not belong to the job: they neither end it, nor join it, nor delay it.

use super::super::frame_decoder::{MAGIC, Preamble};
use super::super::handshake::Applicant;
use super::super::protocol::{FRAME_LIMIT, HelloHeader, ToRank, WIRE_VERSION, decode, encode};
use super::super::secret::JobSecret;
use super::*;
use crate::config::SecretText;
use crate::tls::TlsRole;
use std::io::Write;

const SECRET: &str = "the secret of this job: 0123456789";

fn with_secret(text: &str) -> Config {
    Config { secret: Some(SecretText::new(text)), ..config() }
}

pub(super) fn secret_of(config: &Config) -> JobSecret {
    SecretSource::of_settings(config, JOB).expect("valid").secret().expect("there")
}

/// Sends bytes on a connection of its own. The coordinator may close it at any time.
pub(super) fn throw(port: u16, bytes: &[u8]) -> TcpStream {
    let mut stream = connect_to(port);
    let _ = stream.write_all(bytes);
    stream
}

/// The next frame from a coordinator; `None` if it closes the connection first.
pub(super) fn next_frame(stream: &mut FramedStream) -> Option<ToRank> {
    loop {
        // The coordinator may already have closed the connection.
        let _ = stream.flush();
        let received = stream.receive(FRAME_LIMIT);
        if let Some(frame) = received.frames.first() {
            return decode(frame);
        }
        if received.end.is_some() {
            return None;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the handshake as a stranger with `secret`, and returns the coordinator's last answer.
pub(super) fn apply(port: u16, secret: &JobSecret, header: &HelloHeader) -> Option<ToRank> {
    let (_, params) = hello_of(header.rank, header.world);
    let (mut applicant, opening) = Applicant::new(secret, JOB, header).expect("random bytes");
    let mut stream = FramedStream::new(connect_to(port), false).expect("a socket");
    stream.enqueue(opening);
    if secret.is_encrypted() {
        stream.require_encryption(TlsRole::Initiator, FRAME_LIMIT);
    }
    match next_frame(&mut stream) {
        Some(ToRank::Challenge(nonce)) => {
            let binding = binding_of(&mut stream, secret.is_encrypted());
            stream.enqueue(applicant.prove(nonce, &binding, &params).expect("short"));
            next_frame(&mut stream)
        }
        other => other,
    }
}

/// Begins to encrypt a connection if `is_encrypted`, and returns its binding.
fn binding_of(stream: &mut FramedStream, is_encrypted: bool) -> Vec<u8> {
    if is_encrypted {
        stream.encrypt().expect("random bytes");
    }
    loop {
        if let Some(binding) = stream.binding() {
            return binding.to_vec();
        }
        stream.flush().expect("a connection");
        assert_eq!(stream.receive(FRAME_LIMIT).end, None);
        thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn refusal(answer: Option<ToRank>) -> Error {
    match answer {
        Some(ToRank::Refused(error)) => error,
        other => panic!("{other:?} instead of a refusal"),
    }
}

/// Runs `attack` while ranks 0 and 1 of 3 wait, then lets rank 2 join, and checks that the world is as it
/// should be.
pub(super) fn world_under(attack: impl FnOnce(u16), config: &Config) {
    let port = free_port();
    let rendezvous = address_of(port);
    let mut members = thread::scope(|scope| {
        let first = scope.spawn(|| join_ranks(0..2, 3, &rendezvous, config));
        attack(port);
        let mut members = join_ranks(2..3, 3, &rendezvous, config);
        members.extend(first.join().expect("joined"));
        members
    });
    // After the rendezvous, too.
    for bytes in [b"flexring".as_slice(), &Preamble::encode(), b"GET / HTTP/1.1\r\n\r\n"] {
        if let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            let _ = stream.write_all(bytes);
        }
    }
    members.sort_by_key(|member| member.control.rank());
    thread::scope(|scope| {
        for member in &members {
            scope.spawn(move || {
                let mine = [member.control.rank() as u8; 3];
                let all = member.control.all_gather("numbers", &mine).expect("all parts");
                assert_eq!(all, [[0; 3], [1; 3], [2; 3]]);
            });
        }
    });
    assert!(members.iter().all(|member| member.fault.check().is_ok()));
}

/// Every claim by which a rank of the job could end the rendezvous.
pub(super) fn claims() -> Vec<HelloHeader> {
    let (header, _) = hello_of(1, 3);
    vec![
        header.clone(),
        HelloHeader { world: 9, ..header.clone() },
        HelloHeader { rank: 3, ..header.clone() },
        HelloHeader { world: usize::MAX, rank: usize::MAX, ..header.clone() },
        HelloHeader { version: "99.0".into(), ..header },
    ]
}

#[test]
fn a_stranger_without_the_secret_neither_ends_nor_joins_a_job() {
    watched(|| {
        let attack = |port| {
            for header in claims() {
                let error =
                    refusal(apply(port, &secret_of(&with_secret("guessed guessed guessed")), &header));
                assert!(error.message().contains("does not know the secret of the job"), "{error}");
                let error = refusal(apply(port, &secret_of(&config()), &header));
                assert!(error.message().contains("has no job secret"), "{error}");
            }
        };
        world_under(attack, &with_secret(SECRET));
    });
}

#[test]
fn a_stranger_before_rank_0_joins_sets_neither_world_nor_deadline() {
    watched(|| {
        let port = free_port();
        let rendezvous = address_of(port);
        thread::scope(|scope| {
            // It retries until rank 0 listens, so it is the first to call.
            let stranger = scope.spawn(|| {
                let (header, _) = hello_of(0, 70_000);
                apply(port, &secret_of(&config()), &header)
            });
            thread::sleep(Duration::from_millis(50));
            // Its port is open as long as the ranks are connected, so the stranger gets an answer.
            let ranks = join_ranks(0..2, 2, &rendezvous, &with_secret(SECRET));
            assert_eq!(ranks.len(), 2);
            assert!(!matches!(stranger.join().expect("no panic"), Some(ToRank::HelloAck(_))));
        });
    });
}

#[test]
fn a_packet_of_60_bytes_ends_nothing() {
    watched(|| {
        let attack = |port| {
            let mut streams = Vec::new();
            for len in [1usize, 8, 12, 16, 20, 60, 1000] {
                // As a hello of wire version 1 began, and as one of this version begins.
                for preamble in [MAGIC.to_vec(), Preamble::encode().to_vec()] {
                    for fill in [0, 1, 0x7f, 0xff] {
                        let mut bytes = preamble.clone();
                        bytes.extend_from_slice(&(len as u32).to_le_bytes());
                        bytes.resize(preamble.len() + 4 + len, fill);
                        streams.push(throw(port, &bytes));
                    }
                }
            }
            drop(streams);
        };
        // Without a secret, too: garbage is no claim.
        for config in [with_secret(SECRET), config()] {
            world_under(attack, &config);
        }
    });
}

#[test]
fn the_messages_of_an_earlier_job_are_refused_when_they_are_sent_again() {
    watched(|| {
        let config = with_secret(SECRET);
        let (header, params) = hello_of(1, 3);
        let secret = secret_of(&config);
        let (mut applicant, opening) = Applicant::new(&secret, JOB, &header).expect("random bytes");
        // What rank 1 once sent, recorded on the wire.
        let proof = applicant.prove([9; 16], &[], &params).expect("short");
        let attack = |port| {
            let mut stream = FramedStream::new(connect_to(port), false).expect("a socket");
            stream.enqueue(opening);
            assert!(matches!(next_frame(&mut stream), Some(ToRank::Challenge(_))));
            stream.enqueue(proof);
            let error = refusal(next_frame(&mut stream));
            assert!(error.message().contains("does not know the secret of the job"), "{error}");
        };
        world_under(attack, &config);
    });
}

#[test]
fn other_wire_versions_and_byte_orders_are_refused_by_name() {
    watched(|| {
        let little_endian = 0x0102_0304u32.to_ne_bytes();
        let big_endian = 0x0102_0304u32.swap_bytes().to_ne_bytes();
        let early = format!("speaks wire version 2, and this coordinator speaks {WIRE_VERSION}");
        let attack = |port| {
            for (mark, version, expected) in [
                (little_endian, 2, early.as_str()),
                (little_endian, u32::MAX, "speaks wire version 4294967295"),
                (big_endian, WIRE_VERSION, "-endian, and this coordinator is"),
                ([60, 0, 0, 0], 0, "speaks a wire version before 2"),
            ] {
                let stream = throw(port, &Preamble::with(mark, version));
                let error = refusal(next_frame(&mut FramedStream::new(stream, false).expect("a socket")));
                assert_eq!(error.kind(), ErrorKind::Disagreement);
                assert!(error.message().contains(expected), "{error}");
                assert!(error.message().contains("the process at 127.0.0.1"), "{error}");
            }
        };
        world_under(attack, &config());
    });
}

#[test]
fn the_ranks_that_wait_learn_who_was_refused() {
    watched(|| {
        let port = free_port();
        let config = Config { connect_timeout: Duration::from_secs(1), ..with_secret(SECRET) };
        thread::scope(|scope| {
            let waiting =
                scope.spawn(|| join_errors(&[(0, 3, config.clone()), (1, 3, config)], &address_of(port)));
            let wrong = with_secret("another secret, as by a typing error");
            let wrong = Config { connect_timeout: Duration::from_secs(1), ..wrong };
            let error = join(2, 3, &address_of(port), &wrong).map(drop).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::Rendezvous);
            assert!(error.message().starts_with("rank 2 cannot reach rank 0 at 127.0.0.1"), "{error}");
            assert!(error.message().contains("does not know the secret of the job"), "{error}");
            let errors = waiting.join().expect("refused");
            let error = all_equal(&errors);
            let expected =
                "a process at 127.0.0.1 was refused: it claims rank 2 and does not know the job's secret";
            assert!(error.message().starts_with("rank 2 of 3 did not join"), "{error}");
            assert!(error.message().contains(expected), "{error}");
        });
    });
}

#[test]
fn the_ranks_that_wait_learn_who_left_before_it_was_authenticated() {
    watched(|| {
        let port = free_port();
        let config = Config { connect_timeout: Duration::from_secs(2), ..with_secret(SECRET) };
        thread::scope(|scope| {
            let waiting = scope
                .spawn(|| join_errors(&[(0, 3, config.clone()), (1, 3, config.clone())], &address_of(port)));
            let (header, _) = hello_of(2, 3);
            let (_, opening) = Applicant::new(&secret_of(&config), JOB, &header).expect("random bytes");
            let mut stream = FramedStream::new(connect_to(port), false).expect("a socket");
            stream.enqueue(opening);
            assert!(matches!(next_frame(&mut stream), Some(ToRank::Challenge(_))));
            // It is killed.
            drop(stream);
            let errors = waiting.join().expect("no panic");
            let error = all_equal(&errors);
            assert!(error.message().starts_with("rank 2 of 3 did not join"), "{error}");
            let expected =
                "a process at 127.0.0.1 claims rank 2, but its connection closed before it proved that";
            assert!(error.message().contains(expected), "{error}");
        });
    });
}

#[test]
fn an_impostor_of_the_coordinator_is_not_believed() {
    watched(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
        let port = listener.local_addr().expect("bound").port();
        thread::scope(|scope| {
            let impostor = scope.spawn(move || {
                listener.set_nonblocking(true).expect("a socket");
                let welcome = ToRank::Welcome { host: "h".into(), ranks: vec![0] };
                let answers = [ToRank::Challenge([1; 16]), ToRank::HelloAck([2; 32]), welcome];
                let mut connections = Vec::new();
                let until = Instant::now() + Duration::from_millis(2000);
                while Instant::now() < until {
                    if let Ok((stream, _)) = listener.accept() {
                        let mut stream = FramedStream::new(stream, true).expect("a socket");
                        answers.iter().for_each(|answer| stream.enqueue(encode(answer).expect("short")));
                        stream.flush().expect("sent");
                        connections.push(stream);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let config = Config { connect_timeout: Duration::from_millis(1500), ..with_secret(SECRET) };
            let error = join(1, 2, &address_of(port), &config).map(drop).expect_err("an impostor");
            assert!(error.message().contains("does not know the job's secret"), "{error}");
            impostor.join().expect("no panic");
        });
    });
}

#[test]
fn a_refusal_by_a_process_that_holds_the_port_ends_no_rank() {
    watched(|| {
        let port = free_port();
        let config = with_secret(SECRET);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
        thread::scope(|scope| {
            let early = scope.spawn(|| join_ranks(1..2, 2, &address_of(port), &config));
            let mut stream = FramedStream::new(listener.accept().expect("rank 1").0, true).expect("a socket");
            let refused = ToRank::Refused(Error::rendezvous("no entry"));
            stream.enqueue(encode(&refused).expect("short"));
            stream.flush().expect("sent");
            thread::sleep(Duration::from_millis(20));
            drop((stream, listener));
            let zero = join_ranks(0..1, 2, &address_of(port), &config);
            assert_eq!(zero.len() + early.join().expect("joined").len(), 2);
        });
    });
}

/// Counter-example: the text was part of the rank's error as it came, with its escape sequences and lines.
#[test]
fn a_refusal_by_a_stranger_puts_one_short_line_into_the_error() {
    watched(|| {
        let port = free_port();
        let config = Config { connect_timeout: Duration::from_millis(700), ..with_secret(SECRET) };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
        thread::scope(|scope| {
            let rank = scope.spawn(|| join(1, 2, &address_of(port), &config).map(drop).expect_err("refused"));
            let text = format!("no entry\u{1b}[2J\n[ERROR] rank 0 died\u{9b}1m{}", "x".repeat(10 << 20));
            let refused = encode(&ToRank::Refused(Error::rendezvous(text))).expect("bytes");
            let mut stream = FramedStream::new(listener.accept().expect("rank 1").0, true).expect("a socket");
            stream.enqueue(refused);
            // Rank 1 closes the connection once it has all.
            while stream.flush().is_ok() && stream.receive(FRAME_LIMIT).end.is_none() {
                thread::sleep(Duration::from_millis(1));
            }
            drop((stream, listener));
            let error = rank.join().expect("no panic").to_string();
            assert!(error.contains("no entry?[2J?[ERROR] rank 0 died?1mxxx"), "{error}");
            assert!(
                !error.contains(char::is_control) && error.len() < 2000,
                "{} bytes: {error}",
                error.len()
            );
        });
    });
}

#[test]
fn the_coordinator_listens_on_one_interface() {
    watched(|| {
        let port = free_port();
        // An address of the documentation, as of a gateway that translates addresses.
        let outside = RendezvousPoint::at("192.0.2.1".to_owned(), port);
        let config = Config { socket_ifname: Some("=lo".to_owned()), ..with_secret(SECRET) };
        thread::scope(|scope| {
            let first = scope.spawn(|| join(0, 2, &outside, &config).map(drop));
            drop(connect_to(port));
            // A coordinator that listened at all addresses would listen at this one, too.
            let other = TcpStream::connect_timeout(
                &SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), port)),
                Duration::from_secs(1),
            );
            assert!(other.is_err(), "the coordinator listens at 127.0.0.2, too");
            join(1, 2, &address_of(port), &config).map(drop).expect("joined");
            first.join().expect("no panic").expect("joined");
        });
    });
}

#[test]
fn a_job_on_one_node_has_a_secret_by_itself() {
    watched(|| {
        for round in 0..3 {
            let port = free_port();
            let rendezvous = address_of(port);
            let on_one_node = |rank| Identity { one_node: true, ..identity(rank, 3, &rendezvous) };
            let config = config();
            thread::scope(|scope| {
                let members: Vec<_> = (0..2)
                    .map(|rank| {
                        scope.spawn(move || {
                            ControlConnection::join(&on_one_node(rank), &super::config(), fault())
                        })
                    })
                    .collect();
                for header in claims() {
                    let error = refusal(apply(port, &secret_of(&config), &header));
                    assert!(error.message().contains("has no job secret"), "{error}");
                }
                let last = ControlConnection::join(&on_one_node(2), &config, fault()).expect("joined");
                let mut members: Vec<ControlConnection> = members
                    .into_iter()
                    .map(|member| member.join().expect("no panic").expect("joined"))
                    .collect();
                members.push(last);
                assert!(members.iter().all(|member| member.secret().is_secret()), "round {round}");
                let codes: Vec<_> = members
                    .iter()
                    .map(|member| member.secret().derive("test", &[]).mac("test", &[]))
                    .collect();
                assert!(codes.iter().all(|code| *code == codes[0]));
                thread::scope(|scope| {
                    for member in members {
                        scope.spawn(move || member.all_gather("a barrier", &[]).expect("a barrier"));
                    }
                });
            });
        }
    });
}

#[test]
fn hundreds_of_silent_connections_delay_no_rank() {
    watched(|| {
        // All stay open while rank 2 joins.
        let mut streams: Vec<TcpStream> = Vec::new();
        world_under(
            |port| streams.extend((0..300).map(|_| throw(port, &Preamble::encode()))),
            &with_secret(SECRET),
        );
        assert_eq!(streams.len(), 300);
    });
}
