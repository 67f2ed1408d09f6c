//! Whole jobs whose connections are encrypted: right sums, named failures, and strangers at every port.

use crate::harness::{
    Setup, World, kill_self_soon, only_failed, reduce_until_failure, spawn, spawn_processes_with, test_name,
    with_watchdog,
};
use flexring::internal::bootstrap::Coordinator;
use flexring::{Communicator, ErrorKind, Identity, ReduceOp};
use flexring_core::config::{Switch, TransportChoice};
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A world whose connections are encrypted. It meets by a unique id, which is a secret.
fn encrypted(world: World, ranks: usize) -> Setup {
    let mut setup = Setup::new(world, ranks);
    setup.config.tls = Switch(true);
    setup
}

/// Reduces vectors of all lengths from one element to many sub-chunks, and checks the sums of ranks
/// `members`.
fn sums_are_exact(comm: &Communicator, number: usize, members: &[usize]) {
    for count in [1, 3, 100, 5000, 70_000, 300_000] {
        let mut vector: Vec<i64> = (0..count).map(|at| (at * (number + 1)) as i64).collect();
        comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
        let factor: usize = members.iter().map(|member| member + 1).sum();
        assert!((0..count).all(|at| vector[at] == (at * factor) as i64), "{count} elements");
    }
}

#[test]
fn ranks_that_encrypt_sum_exactly() {
    for world in [World::Tcp, World::Mixed].into_iter().filter(|world| world.is_enabled()) {
        for sockets in [1, 3] {
            let mut setup = encrypted(world, 4);
            setup.config.sockets_per_link = sockets;
            spawn(&setup, |comm| sums_are_exact(&comm, comm.rank(), &[0, 1, 2, 3]));
        }
    }
}

#[test]
fn ranks_that_encrypt_shrink_and_split() {
    if !World::Tcp.is_enabled() {
        return;
    }
    spawn(&encrypted(World::Tcp, 4), |comm| {
        let number = comm.rank();
        if number != 1 {
            let shrunk = comm.shrink(&[1]).expect("three ranks agree");
            sums_are_exact(&shrunk, number, &[0, 2, 3]);
        }
        let members = [[0, 2], [1, 3]][number % 2];
        let part = comm.split(number as i32 % 2, 0).expect("a part").expect("a color");
        sums_are_exact(&part, number, &members);
    });
}

#[test]
fn processes_that_encrypt_sum_exactly_and_name_a_killed_rank() {
    if !World::Tcp.is_enabled() {
        return;
    }
    let name = test_name(module_path!(), "processes_that_encrypt_sum_exactly_and_name_a_killed_rank");
    let variables = [("FLEXRING_TLS", "1")];
    let outputs = spawn_processes_with(&name, &encrypted(World::Tcp, 3), &variables, |comm| {
        sums_are_exact(&comm, comm.rank(), &[0, 1, 2]);
        if comm.rank() == 1 {
            kill_self_soon();
        }
        let error = reduce_until_failure(&comm);
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().contains("rank 1 (pid"), "{error}");
    });
    only_failed(1, World::Tcp, &outputs);
}

/// The ports at which this process listens for IPv4 connections.
fn listening_ports() -> BTreeSet<u16> {
    let folder = std::fs::read_dir("/proc/self/fd").expect("descriptors");
    let sockets: BTreeSet<String> = folder
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("sockets");
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_own = *fields.get(3)? == "0A" && sockets.contains(*fields.get(9)?);
        u16::from_str_radix(fields[1].split_once(':')?.1, 16).ok().filter(|_| is_own)
    };
    table.lines().filter_map(port).collect()
}

#[test]
fn random_bytes_at_every_port_of_an_encrypted_job_end_nothing() {
    if !World::Tcp.is_enabled() {
        return;
    }
    let is_over = AtomicBool::new(false);
    spawn(&encrypted(World::Tcp, 3), |comm| {
        std::thread::scope(|scope| {
            if comm.rank() == 0 {
                scope.spawn(|| {
                    let ports = listening_ports();
                    assert!(ports.len() >= 2, "of the coordinator, and for ranks that shrink: {ports:?}");
                    let mut random = fastrand::Rng::with_seed(5);
                    let mut streams = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        for port in &ports {
                            let bytes: Vec<u8> = (0..random.usize(..3000)).map(|_| random.u8(..)).collect();
                            let start =
                                [[].as_slice(), &[22, 3, 1], b"flexring", &[255; 4]][random.usize(..4)];
                            if let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, *port)) {
                                let _ = stream.write_all(start).and_then(|()| stream.write_all(&bytes));
                                streams.push(stream);
                            }
                        }
                        if streams.len() > 100 {
                            streams.clear();
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            for _ in 0..5 {
                sums_are_exact(&comm, comm.rank(), &[0, 1, 2]);
            }
            // Shrinking uses the ports that the strangers have called.
            let shrunk = comm.shrink(&[]).expect("all ranks agree");
            sums_are_exact(&shrunk, comm.rank(), &[0, 1, 2]);
            is_over.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn encryption_and_rdma_exclude_each_other() {
    with_watchdog(Duration::from_secs(20), || {
        let mut config = encrypted(World::Tcp, 2).config;
        let (_coordinator, id) = Coordinator::create(&config).expect("a coordinator");
        config.transport = TransportChoice::Verbs;
        let identity = Identity::from_unique_id(2, &id, 1).expect("an identity");
        let error = Communicator::with_config(&config, &identity).map(drop).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidSetting);
        let message = error.message();
        assert!(
            message.contains("FLEXRING_TLS=1 cannot encrypt what FLEXRING_TRANSPORT=verbs sends"),
            "{error}"
        );
        assert!(message.contains("FLEXRING_TRANSPORT=tcp"), "{error}");
    });
}
