//! The rendezvous: how it succeeds, and the error that every rank gets when it fails.

use super::super::frame_decoder::{MAGIC, Preamble};
use super::super::handshake::Applicant;
use super::super::join_attempt::report_failure;
use super::super::protocol::{FRAME_LIMIT, ToRank, decode};
use super::super::{Coordinator, RankActivity, UniqueId, WorldStatus, create_unique_id};
use super::status::ask;
use super::*;
use crate::config::Size;
use crate::interrupt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Joins as a rank with an invented process, up to the coordinator's acknowledgement.
fn acknowledged(stream: TcpStream, rank: Rank, world: usize) -> FramedStream {
    let (header, params) = hello_of(rank, world);
    let secret = SecretSource::of_settings(&config(), JOB).expect("no secret").secret().expect("no secret");
    let (mut applicant, opening) = Applicant::new(&secret, JOB, &header).expect("random bytes");
    let mut stream = FramedStream::new(stream, false).expect("a socket");
    stream.enqueue(opening);
    loop {
        stream.flush().expect("sent");
        let received = stream.receive(FRAME_LIMIT);
        for frame in &received.frames {
            match decode::<ToRank>(frame) {
                Some(ToRank::Challenge(nonce)) => {
                    stream.enqueue(applicant.prove(nonce, &[], &params).expect("short"))
                }
                Some(ToRank::HelloAck(code)) if applicant.is_proof(&code) => return stream,
                other => panic!("{other:?} instead of an acknowledgement"),
            }
        }
        assert_eq!(received.end, None);
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn ranks_meet_and_exchange() {
    watched(|| {
        for size in [1, 2, 3, 5, 8, 16] {
            let members = world(size);
            thread::scope(|scope| {
                for member in &members {
                    scope.spawn(move || {
                        let rank = member.control.rank();
                        for round in 0..5u8 {
                            let mine = vec![round; rank * 1000];
                            let all = member.control.all_gather("peer info", &mine).expect("all cards");
                            assert_eq!(all.len(), size);
                            for (other, card) in all.iter().enumerate() {
                                assert_eq!(*card, vec![round; other * 1000]);
                            }
                        }
                        member.control.all_gather("a barrier", &[]).expect("a barrier");
                    });
                }
            });
            assert!(members.iter().all(|member| member.fault.check().is_ok()));
        }
    });
}

#[test]
fn ranks_rendezvous_by_a_unique_id() {
    watched(|| {
        for size in [1, 4] {
            let id = create_unique_id(&config()).expect("an id");
            let id = UniqueId::from_hex(&id.to_hex()).expect("the same id");
            let members = join_ranks(0..size, size, &RendezvousPoint::Id(id), &config());
            thread::scope(|scope| {
                for member in &members {
                    scope.spawn(|| member.control.all_gather("peer info", b"x").expect("all cards"));
                }
            });
        }
    });
}

#[test]
fn exchanges_are_bounded() {
    watched(|| {
        // Encoding the longest exchange without the optimiser takes longer than the heartbeats of other tests
        // allow.
        let config = Config { heartbeat: Duration::from_millis(500), ..config() };
        let members = join_ranks(0..1, 1, &address_of(free_port()), &config);
        let control = &members[0].control;
        control.all_gather("much", &vec![0; FRAME_LIMIT / 2]).expect("at the limit");
        let error = control.all_gather("much", &vec![0; FRAME_LIMIT / 2 + 1]).expect_err("too much");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    });
}

#[test]
fn garbage_and_silence_delay_no_rank() {
    watched(|| {
        let port = free_port();
        // Less than the coordinator's HANDSHAKE_TIMEOUT.
        let config = Config { connect_timeout: Duration::from_secs(4), ..config() };
        thread::scope(|scope| {
            let first = scope.spawn(|| join_ranks(0..1, 2, &address_of(port), &config));
            let mut connections = Vec::new();
            for number in 0..100 {
                let mut stream = connect_to(port);
                let preamble = Preamble::encode();
                // The coordinator may already have closed the connection.
                let _ = match number % 5 {
                    0 => Ok(()),
                    1 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                    2 => stream.write_all(&[preamble.as_slice(), &u32::MAX.to_le_bytes()].concat()),
                    3 => stream.write_all(&[preamble.as_slice(), &8u32.to_le_bytes(), &[0xff; 8]].concat()),
                    _ => stream.write_all(&[MAGIC.as_slice(), &8u32.to_le_bytes(), &[0xff; 8]].concat()),
                };
                connections.push(stream);
            }
            let second = join_ranks(1..2, 2, &address_of(port), &config);
            let first = first.join().expect("joined");
            assert!(first[0].fault.check().is_ok() && second[0].fault.check().is_ok());
            drop(connections);
        });
    });
}

#[test]
fn missing_ranks_are_named() {
    watched(|| {
        let ranks: Vec<_> = [0, 1, 3, 4].into_iter().map(|rank| (rank, 6, short_timeout())).collect();
        let errors = join_errors(&ranks, &address_of(free_port()));
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        let time = error.message().strip_prefix("ranks 2 and 5 of 6 did not join within ");
        assert!(
            time.is_some_and(|time| time.starts_with(['0', '1']) && time[1..].starts_with('.')),
            "{error}"
        );
    });
}

#[test]
fn a_duplicate_rank_fails_the_rendezvous_for_all() {
    watched(|| {
        let ranks: Vec<_> = [0, 1, 1, 2].into_iter().map(|rank| (rank, 4, config())).collect();
        let errors = join_errors(&ranks, &address_of(free_port()));
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        assert!(error.message().contains("two processes claim rank 1"), "{error}");
    });
}

#[test]
fn different_settings_or_world_sizes_fail_the_rendezvous_for_all() {
    watched(|| {
        let odd = Config { subchunk: Size(1 << 20), ..config() };
        let ranks = [(0, 3, config()), (1, 3, config()), (2, 3, odd)];
        let errors = join_errors(&ranks, &address_of(free_port()));
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("FLEXRING_SUBCHUNK="), "{error}");
        assert!(error.message().contains("1M") && error.message().contains("128K"), "{error}");

        let ranks = [(0, 3, config()), (1, 3, config()), (2, 4, config())];
        let errors = join_errors(&ranks, &address_of(free_port()));
        let error = all_equal(&errors);
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("expects a world of"), "{error}");
    });
}

#[test]
fn another_release_fails_the_rendezvous_for_all() {
    watched(|| {
        let port = free_port();
        thread::scope(|scope| {
            let ours = scope.spawn(|| join_errors(&[(0, 3, config()), (1, 3, config())], &address_of(port)));
            let (mut header, params) = hello_of(2, 3);
            header.version = "99.1.0".into();
            let error = join_as(&header, &params, &address_of(port)).map(drop).expect_err("another release");
            assert_eq!(error.kind(), ErrorKind::Disagreement);
            assert!(
                error.message().contains("rank 2 (pid 4242 on host elsewhere) runs flexring 99.1.0"),
                "{error}"
            );
            assert_eq!(*all_equal(&ours.join().expect("refused")), error);
        });
    });
}

#[test]
fn only_the_rank_of_another_job_is_rejected() {
    watched(|| {
        let rendezvous = address_of(free_port());
        thread::scope(|scope| {
            let first = scope.spawn(|| join_ranks(0..1, 2, &rendezvous, &config()));
            let other_job = Identity { token: 8, ..identity(1, 2, &rendezvous) };
            // It waits for its own rank 0, which may come to this port.
            let config = Config { connect_timeout: Duration::from_secs(1), ..config() };
            let error = ControlConnection::join(&other_job, &config, fault()).expect_err("another job");
            let config = super::config();
            assert_eq!(error.kind(), ErrorKind::Rendezvous);
            assert!(error.message().contains("another job"), "{error}");
            let second = join_ranks(1..2, 2, &rendezvous, &config);
            assert_eq!(first.join().expect("joined").len() + second.len(), 2);
        });
    });
}

/// Their names lead to one port.
#[test]
fn two_jobs_at_one_port_find_another_one() {
    watched(|| {
        let [port, further] = [(); 2].map(|()| free_port());
        let host = "127.0.0.1".to_owned();
        let rendezvous = RendezvousPoint::Address { host, port, further_ports: vec![further] };
        let of_job = |token, rank| Identity { token, ..identity(rank, 2, &rendezvous) };
        let join = |token, rank| ControlConnection::join(&of_job(token, rank), &config(), fault());
        thread::scope(|scope| {
            let jobs = [7, 8].map(|token| [1, 0].map(|rank| scope.spawn(move || join(token, rank))));
            let joined = jobs.map(|job| job.map(|rank| rank.join().expect("no panic").expect("joined")));
            // A second rank 0 of one of the jobs does not become a job of its own.
            let second = scope.spawn(move || {
                let config = Config { connect_timeout: Duration::from_secs(1), ..config() };
                let mut identity = of_job(7, 0);
                // As in another process, which does not know the listeners of this one.
                if let RendezvousPoint::Address { host, .. } = &mut identity.rendezvous {
                    *host = "localhost".to_owned();
                }
                ControlConnection::join(&identity, &config, fault()).map(drop)
            });
            let error = second.join().expect("no panic").expect_err("there is a rank 0");
            assert!(error.message().contains("the port is in use: a flexring coordinator (pid "), "{error}");
            thread::scope(|scope| {
                for connection in joined.into_iter().flatten() {
                    scope.spawn(move || connection.leave());
                }
            });
        });
    });
}

/// Rank 0 begins to listen while a rank waits for one of them. They are silent for longer than the deadline.
#[test]
fn silent_processes_at_further_ports_do_not_hide_rank_0() {
    watched(|| {
        let port = free_port();
        let silent = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));
        let further_ports = silent.iter().map(|silent| silent.local_addr().expect("bound").port()).collect();
        let rendezvous = RendezvousPoint::Address { host: "127.0.0.1".to_owned(), port, further_ports };
        let config = Config { connect_timeout: Duration::from_secs(8), ..config() };
        thread::scope(|scope| {
            let other = scope.spawn(|| join_ranks(1..2, 2, &rendezvous, &config));
            let _silent_connection = silent[0].accept().expect("rank 1 tries the further ports");
            let _rank_0 = join_ranks(0..1, 2, &rendezvous, &config);
            other.join().expect("joined");
        });
    });
}

#[test]
fn an_unreachable_coordinator_is_named_with_its_port() {
    watched(|| {
        let port = free_port();
        let error = join(1, 2, &address_of(port), &short_timeout()).map(drop).expect_err("no listener");
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        for text in [&format!("127.0.0.1 port {port}"), "refused", "FLEXRING_MASTER_ADDR"] {
            assert!(error.message().contains(text), "{error}");
        }
    });
}

#[test]
fn a_port_in_use_is_reported() {
    watched(|| {
        let port = free_port();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
        let error = join(0, 2, &address_of(port), &config()).map(drop).expect_err("in use");
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        for text in [&port.to_string(), "in use", "FLEXRING_MASTER_PORT"] {
            assert!(error.message().contains(text), "{error}");
        }
    });
}

#[test]
fn one_port_serves_consecutive_communicators() {
    watched(|| {
        let port = free_port();
        thread::scope(|scope| {
            for rank in 0..4 {
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for round in 0..20 {
                        let control =
                            join(rank, 4, &address_of(port), &config()).expect("another communicator");
                        // Every other communicator stays open beside the next one.
                        if round % 2 == 0 {
                            kept.push(control);
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_cancelled_rendezvous_fails_for_all() {
    watched(|| {
        let (coordinator, id) = Coordinator::create(&config()).expect("a coordinator");
        let rendezvous = RendezvousPoint::Id(id);
        thread::scope(|scope| {
            let first = scope.spawn(|| join_errors(&[(0, 2, config())], &rendezvous));
            thread::sleep(Duration::from_millis(200));
            drop(coordinator);
            let errors = first.join().expect("refused");
            assert!(errors[0].message().contains("was cancelled"), "{}", errors[0]);
        });
    });
}

#[test]
fn a_rank_that_dies_during_the_rendezvous_fails_it_for_all() {
    watched(|| {
        let port = free_port();
        thread::scope(|scope| {
            let ours = scope.spawn(|| join_errors(&[(0, 4, config()), (1, 4, config())], &address_of(port)));
            let stream = acknowledged(connect_to(port), 2, 4);
            drop(stream);
            let errors = ours.join().expect("refused");
            let error = all_equal(&errors);
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert!(
                error.message().contains("rank 2 (pid 4242 on host elsewhere) died or gave up"),
                "{error}"
            );
        });
    });
}

#[test]
fn raising_the_fault_ends_a_waiting_join() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let fault = fault();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                ControlConnection::join(&identity(1, 2, &rendezvous), &config(), fault.clone()).map(drop)
            });
            thread::sleep(Duration::from_millis(50));
            fault.raise(Error::aborted("aborted by the test"));
            let error = waiting.join().expect("woken").expect_err("aborted");
            assert_eq!(error.message(), "aborted by the test");
        });
    });
}

/// A rank that a program stops, and one that learned of a failure elsewhere: the coordinator passes on what
/// they say, and does not call them dead.
#[test]
fn a_rank_that_gives_up_the_rendezvous_tells_the_others_why() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let interrupted = fault();
        thread::scope(|scope| {
            let first = scope.spawn(|| join(0, 3, &rendezvous, &config()).map(drop).expect_err("it fails"));
            let last = scope.spawn(|| {
                ControlConnection::join(&identity(1, 3, &rendezvous), &config(), interrupted.clone())
                    .map(drop)
            });
            let until = Instant::now() + Duration::from_secs(20);
            let is_joining = |status: WorldStatus| {
                status.ranks.get(1).is_some_and(|row| row.activity == RankActivity::Joining)
            };
            while !ask(&rendezvous).is_ok_and(is_joining) {
                assert!(Instant::now() < until);
            }
            interrupted.raise(Error::aborted("stopped by the test"));
            let own = last.join().expect("no panic").expect_err("it was stopped");
            assert_eq!(own.message(), "stopped by the test");
            let error = first.join().expect("no panic");
            assert_eq!((error.kind(), error.message()), (ErrorKind::Aborted, "rank 1: stopped by the test"));
        });
        let port = free_port();
        thread::scope(|scope| {
            let ours = scope.spawn(|| join_errors(&[(0, 3, config())], &address_of(port)));
            let mut stream = acknowledged(connect_to(port), 1, 3);
            report_failure(&mut stream, &Error::peer_lost("rank 2 died elsewhere"));
            drop(stream);
            let errors = ours.join().expect("no panic");
            assert_eq!(errors[0].message(), "rank 2 died elsewhere");
        });
    });
}

/// An address at which connecting takes long: the queue of its listener is full. The sockets keep it so.
fn address_that_does_not_answer() -> (SocketAddr, Vec<socket2::Socket>) {
    use socket2::{Domain, Socket, Type};
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    listener.listen(0).expect("a queue");
    let address = listener.local_addr().expect("bound");
    let mut sockets = vec![listener];
    for _ in 0..4 {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
        let _ = socket.connect(&address);
        sockets.push(socket);
    }
    (address.as_socket().expect("an address"), sockets)
}

#[test]
fn a_rank_that_connects_can_be_interrupted_at_once() {
    static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);
    extern "C" fn is_interrupted() -> std::ffi::c_int {
        IS_INTERRUPTED.load(Ordering::Relaxed).into()
    }
    watched(|| {
        let (address, _queue) = address_that_does_not_answer();
        for by_program in [false, true] {
            let (fault, rendezvous) = (fault(), address_of(address.port()));
            let raised = Arc::clone(&fault);
            let rank = thread::spawn(move || {
                interrupt::set_check(by_program.then_some(is_interrupted));
                let joined = ControlConnection::join(&identity(1, 2, &rendezvous), &config(), fault);
                joined.map(drop).expect_err("nothing answers")
            });
            thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            if by_program {
                IS_INTERRUPTED.store(true, Ordering::Relaxed);
            } else {
                raised.raise(Error::aborted("the test wants it"));
            }
            let error = rank.join().expect("no panic");
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(begun.elapsed() < Duration::from_millis(2000), "it took {:?}", begun.elapsed());
        }
    });
}
