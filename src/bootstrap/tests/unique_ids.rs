//! Unique ids: who serves the world, and ids that no rank uses.

use super::super::handshake::Applicant;
use super::super::protocol::{FRAME_LIMIT, ToRank, decode};
use super::super::{Coordinator, UniqueId, create_unique_id};
use super::*;

/// How many threads of this process have this name.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a list of threads").flatten();
    tasks
        .filter(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        })
        .count()
}

fn is_reachable(id: &UniqueId) -> bool {
    TcpStream::connect(id.addresses()[0]).is_ok()
}

/// Waits until `done` returns true.
pub(super) fn eventually(done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < until, "it did not happen");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn unused_ids_share_one_thread() {
    watched(|| {
        let before = threads_named("flexring-coord");
        let ids: Vec<UniqueId> = (0..100).map(|_| create_unique_id(&config()).expect("an id")).collect();
        // A new thread has its name once it runs.
        eventually(|| threads_named("flexring-ids") == 1);
        // Other tests of this process may start a few.
        assert!(threads_named("flexring-coord") < before + 50);
        // Each id still works.
        for id in [&ids[99], &ids[0]] {
            assert_eq!(join_ranks(0..2, 2, &RendezvousPoint::Id(*id), &config()).len(), 2);
        }
    });
}

#[test]
fn unused_ids_expire() {
    watched(|| {
        let config = Config { connect_timeout: Duration::from_millis(50), ..config() };
        let (kept, used) =
            (create_unique_id(&config).expect("an id"), create_unique_id(&config).expect("an id"));
        // A connection that is no rank does not prolong the life of its id.
        let stranger = TcpStream::connect(used.addresses()[0]).expect("a connection");
        eventually(|| !is_reachable(&kept) && !is_reachable(&used));
        drop(stranger);
    });
}

#[test]
fn a_dropped_coordinator_of_an_unused_id_stops_listening() {
    watched(|| {
        let (coordinator, id) = Coordinator::create(&config()).expect("a coordinator");
        drop(coordinator);
        eventually(|| !is_reachable(&id));
    });
}

#[test]
fn rank_0_takes_a_world_over_from_another_process() {
    watched(|| {
        // The test plays rank 0 of another process, which offers the coordinator of this id.
        let id = create_unique_id(&config()).expect("an id");
        let successor = create_unique_id(&config()).expect("an id").addresses();
        let rendezvous = RendezvousPoint::Id(id);
        let (header, mut params) = hello_of(0, 2);
        params.successor.clone_from(&successor);
        thread::scope(|scope| {
            let (rendezvous, header) = (&rendezvous, &header);
            let apply = move |rank, params: HelloParams| {
                let joiner = Joiner {
                    target: &CoordinatorTarget::Remote(rendezvous),
                    source: &SecretSource::of_id(&config(), id.job(), id.token()).expect("a secret"),
                    header: &HelloHeader { rank, ..header.clone() },
                    params: &params,
                    deadline: Instant::now() + Duration::from_secs(1),
                    fault: &fault(),
                };
                joiner.join(None).map(drop).expect_err("this successor serves another world")
            };
            let other = scope.spawn(move || apply(1, hello_of(1, 2).1));
            let own = apply(0, params.clone());
            let errors = [own, other.join().expect("no panic")];
            let successor = successor[0].to_string();
            let is_from_successor = |error: &Error| error.message().contains(&successor);
            assert!(errors.iter().any(is_from_successor), "{errors:?}");
            for error in errors.iter().filter(|error| !is_from_successor(error)) {
                // The one that failed first has given up, which the other one may learn first.
                assert!(error.message().contains("died or gave up before all ranks joined"), "{error}");
            }
            eventually(|| !is_reachable(&id));
        });
    });
}

#[test]
fn the_death_of_a_rank_that_takes_the_world_over_is_named() {
    watched(|| {
        let id = create_unique_id(&config()).expect("an id");
        let rendezvous = RendezvousPoint::Id(id);
        let closed = address_of_closed_port();
        thread::scope(|scope| {
            let rendezvous = &rendezvous;
            let apply = move |rank, successor: Vec<SocketAddr>| {
                let (header, params) = hello_of(rank, 2);
                let joiner = Joiner {
                    target: &CoordinatorTarget::Remote(rendezvous),
                    source: &SecretSource::of_id(&config(), id.job(), id.token()).expect("a secret"),
                    header: &header,
                    params: &HelloParams { successor, ..params },
                    deadline: Instant::now() + Duration::from_secs(if rank == 0 { 1 } else { 20 }),
                    fault: &fault(),
                };
                joiner.join(None).map(drop).expect_err("rank 0 does not listen")
            };
            let other = scope.spawn(move || apply(1, Vec::new()));
            apply(0, vec![closed]);
            let error = other.join().expect("no panic");
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(error.message().starts_with("rank 0 died"), "{error}");
        });
    });
}

/// Runs the handshake of a rank until the world moves, and returns its connection.
fn until_moved(id: &UniqueId, rank: Rank, world: usize) -> FramedStream {
    let secret =
        SecretSource::of_id(&config(), id.job(), id.token()).expect("valid").secret().expect("there");
    let (header, params) = hello_of(rank, world);
    let (mut applicant, opening) = Applicant::new(&secret, id.job(), &header).expect("random bytes");
    let stream = TcpStream::connect(id.addresses()[0]).expect("a connection");
    let mut stream = FramedStream::new(stream, false).expect("a socket");
    stream.enqueue(opening);
    loop {
        stream.flush().expect("a connection");
        for frame in stream.receive(FRAME_LIMIT).frames {
            match decode(&frame) {
                Some(ToRank::Challenge(nonce)) => {
                    stream.enqueue(applicant.prove(nonce, &[], &params).expect("short"));
                }
                Some(ToRank::Moved(_)) => return stream,
                _ => {}
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_dies_while_the_world_moves_is_named_at_once() {
    watched(|| {
        for arrives_first in [false, true] {
            let id = create_unique_id(&config()).expect("an id");
            let rendezvous = RendezvousPoint::Id(id);
            let source = SecretSource::of_id(&config(), id.job(), id.token()).expect("a secret");
            let successor = Coordinator::successor(&source, &config()).expect("a coordinator");
            let (rendezvous, source, successor) = (&rendezvous, &source, &successor);
            let apply = move |rank| {
                let (header, mut params) = hello_of(rank, 3);
                if rank == 0 {
                    params.successor = successor.addresses().to_vec();
                }
                let joiner = Joiner {
                    target: &CoordinatorTarget::Remote(rendezvous),
                    source,
                    header: &header,
                    params: &params,
                    deadline: Instant::now() + Duration::from_secs(20),
                    fault: &fault(),
                };
                let own = (rank == 0).then(|| &**successor.control());
                joiner.join(own).map(drop).expect_err("rank 2 has died")
            };
            let errors = thread::scope(|scope| {
                let others = [0, 1].map(|rank| scope.spawn(move || apply(rank)));
                let victim = until_moved(&id, 2, 3);
                if arrives_first {
                    thread::sleep(Duration::from_millis(200));
                }
                let begun = Instant::now();
                drop(victim);
                let errors = others.map(|other| other.join().expect("no panic"));
                assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
                errors
            });
            let error = all_equal(&errors);
            let expected = "rank 2 (pid 4242 on host elsewhere) died or gave up before all ranks joined";
            assert!(error.kind() == ErrorKind::PeerLost && error.message().starts_with(expected), "{error}");
        }
    });
}

fn address_of_closed_port() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address")
}
