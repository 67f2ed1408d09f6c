//! Several communicators of one process that share the ports at which they shrink.
//!
//! Each test has a loopback address of its own, and so ports of its own. Silence is long, so that a rank that
//! counts as silent where it must count as gone, or the other way round, shows in the time that a test takes.

use super::super::frame::ShrinkFrame;
use super::super::listener::ShrinkListener;
use super::super::message::CallsMade;
use super::super::service::{ShrinkService, ShrinkServiceParams};
use super::super::session::{Session, SessionParams};
use super::super::unidentified::OPENING_TIMEOUT;
use crate::bootstrap::protocol::decode;
use crate::config::Config;
use crate::rank::Rank;
use crate::secret::SecretKey;
use socket2::{Domain, Socket, Type};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long ranks may be silent: 50 ms for each of these.
const RANKS_PER_CORE: usize = 300;
const SILENCE: Duration = Duration::from_secs(15);

/// One communicator.
struct TestWorld {
    name: String,
    endpoints: Vec<SocketAddr>,
}

impl TestWorld {
    /// A communicator of this process, whose ranks are not served yet.
    fn join(ip: Ipv4Addr, name: &str, ranks: usize) -> (Self, Vec<ShrinkListener>) {
        let bind = |_| ShrinkListener::bind(&[ip.into()], None).expect("a port");
        let listeners: Vec<ShrinkListener> = (0..ranks).map(bind).collect();
        let endpoints = listeners.iter().map(|listener| listener.endpoints()[0]).collect();
        (Self { name: name.to_owned(), endpoints }, listeners)
    }

    /// A communicator of this process, and its ranks.
    fn start(ip: Ipv4Addr, name: &str, ranks: usize) -> (Self, Vec<ShrinkService>) {
        let (world, listeners) = Self::join(ip, name, ranks);
        let services = listeners.into_iter().enumerate().map(|(me, listener)| world.serve(me, listener));
        let services = services.collect();
        (world, services)
    }

    fn key(&self) -> SecretKey {
        SecretKey::from_parts("test", &[self.name.as_bytes()])
    }

    fn serve(&self, me: Rank, listener: ShrinkListener) -> ShrinkService {
        let config = Config { socket_ifname: Some("=lo".to_owned()), ..Config::default() };
        let endpoints = self.endpoints.iter().map(|endpoint| vec![*endpoint]).collect();
        let key = self.key();
        let params =
            ShrinkServiceParams { me, endpoints, key, listener, ranks_per_core: RANKS_PER_CORE, config };
        ShrinkService::start(params).expect("a thread")
    }

    /// A connection to a rank, which is opened and says nothing more.
    fn connect(&self, rank: Rank) -> TcpStream {
        let stream = TcpStream::connect(self.endpoints[rank]).expect("a connection");
        let from = self.endpoints.len() - 1 - rank;
        let params =
            SessionParams { key: self.key(), me: from, world: self.endpoints.len(), is_encrypted: false };
        let socket = stream.try_clone().expect("a socket");
        Session::connect(socket, &params, rank).expect("a session").flush().expect("a connection");
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
        stream
    }
}

/// The members that a rank agrees on.
fn shrink(service: &ShrinkService) -> Vec<Rank> {
    let calls = CallsMade { finished: 0, has_failed: true };
    let deadline = Instant::now() + 2 * SILENCE;
    service.shrink(Vec::new(), calls, deadline, |world| Ok(world.members.clone())).expect("ranks agree")
}

/// The first frame on a connection; `None` if it ends without one.
fn first_frame(stream: &mut TcpStream) -> Option<ShrinkFrame> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut frame = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut frame).expect("a frame");
    Some(decode(&frame).expect("a frame"))
}

#[test]
fn communicators_of_one_process_shrink_at_the_same_time() {
    let ip = Ipv4Addr::new(127, 15, 0, 1);
    // One rank of this one is alive and does not call.
    let (slow_world, mut slow) = TestWorld::start(ip, "slow", 2);
    let worlds: Vec<(TestWorld, Vec<ShrinkService>)> =
        (0..6).map(|number| TestWorld::start(ip, &format!("world {number}"), 3)).collect();
    let port = slow_world.endpoints[0];
    assert!(worlds.iter().all(|(world, _)| world.endpoints == [port; 3]), "they share a port");
    let idle = slow.pop().expect("rank 1");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| shrink(&slow[0]));
        std::thread::scope(|scope| {
            for service in worlds.iter().flat_map(|(_, services)| services) {
                scope.spawn(|| assert_eq!(shrink(service), [0, 1, 2]));
            }
        });
        assert!(!waiting.is_finished(), "a rank has not called");
        drop(idle);
        assert_eq!(waiting.join().expect("no panic"), [0]);
    });
}

#[test]
fn a_dropped_communicator_counts_as_gone_while_others_go_on() {
    let ip = Ipv4Addr::new(127, 15, 0, 2);
    let (_, mut first) = TestWorld::start(ip, "first", 3);
    let (_, second) = TestWorld::start(ip, "second", 2);
    let begun = Instant::now();
    drop(first.remove(0));
    std::thread::scope(|scope| {
        for (services, members) in [(&first, vec![1, 2]), (&second, vec![0, 1])] {
            for service in services {
                let members = members.clone();
                scope.spawn(move || assert_eq!(shrink(service), members));
            }
        }
    });
    // While this process joins a communicator, ranks that it does not have may come yet. Not those that it
    // has had.
    let joining = ShrinkListener::bind(&[ip.into()], None).expect("a port");
    drop(first.remove(0));
    assert_eq!(shrink(&first[0]), [2]);
    assert!(begun.elapsed() < SILENCE, "a rank that is gone is not waited for");
    drop(joining);
}

#[test]
fn a_rank_that_is_served_later_than_others_look_for_it_is_a_member() {
    let ip = Ipv4Addr::new(127, 15, 0, 3);
    let (world, mut listeners) = TestWorld::join(ip, "late", 2);
    let late = listeners.pop().expect("rank 1");
    let service = world.serve(0, listeners.pop().expect("rank 0"));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| shrink(&service));
        // Several attempts to connect would be made meanwhile.
        std::thread::sleep(Duration::from_millis(300));
        let late = world.serve(1, late);
        assert_eq!(shrink(&late), [0, 1]);
        assert_eq!(first.join().expect("no panic"), [0, 1]);
    });
}

#[test]
fn a_rank_that_does_not_come_is_gone_once_no_communicator_is_joined() {
    let ip = Ipv4Addr::new(127, 15, 0, 4);
    let (world, mut listeners) = TestWorld::join(ip, "never", 2);
    let failed = listeners.pop().expect("rank 1");
    let _other = TestWorld::start(ip, "other", 2);
    let mut asking = world.connect(1);
    asking.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket");
    let early = asking.read(&mut [0]).map_err(|cause| cause.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "rank 1 may come yet");
    asking.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
    drop((failed, listeners));
    let answer = first_frame(&mut asking);
    assert!(matches!(answer, Some(ShrinkFrame::Gone { .. })), "{answer:?}");
    assert_eq!(asking.read(&mut [0]).ok(), Some(0), "the connection ends");
}

#[test]
fn strangers_get_a_limited_number_of_connections_and_change_nothing() {
    let ip = Ipv4Addr::new(127, 15, 0, 5);
    let (world, services) = TestWorld::start(ip, "strangers", 2);
    // More than there may be, half of them silent, half with an opening that someone has recorded.
    let mut strangers: Vec<TcpStream> = Vec::new();
    for _ in 0..60 {
        let silent = TcpStream::connect(world.endpoints[0]).expect("a connection");
        // Less than a stranger has for its opening.
        silent.set_read_timeout(Some(OPENING_TIMEOUT / 2)).expect("a socket");
        strangers.extend([silent, world.connect(0)]);
    }
    let closed = strangers[0].read(&mut [0]);
    let is_closed = matches!(&closed, Ok(0))
        || closed.as_ref().is_err_and(|cause| cause.kind() == ErrorKind::ConnectionReset);
    assert!(is_closed, "the oldest connection stays: {closed:?}");
    let answer = first_frame(strangers.last_mut().expect("a stranger"));
    assert!(matches!(answer, Some(ShrinkFrame::Accepted { .. })), "{answer:?}");
    std::thread::scope(|scope| {
        for service in &services {
            scope.spawn(move || assert_eq!(shrink(service), [0, 1]));
        }
    });
}

#[test]
fn further_communicators_cost_no_thread_and_no_descriptor() {
    // Threads and descriptors of other tests must not count, so the test runs in its own process.
    const ALONE: &str = "TEST_RUNS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = format!("{}::further_communicators_cost_no_thread_and_no_descriptor", module_path!());
        let name = name.split_once("::").expect("the crate's name").1;
        let mut alone = std::process::Command::new(std::env::current_exe().expect("this binary"));
        let output = alone.args([name, "--exact"]).env(ALONE, "1").output().expect("this binary runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let count = |folder: &str| std::fs::read_dir(folder).expect("the kernel lists them").count();
    let resources = || (count("/proc/self/task"), count("/proc/self/fd"));
    let ip = Ipv4Addr::new(127, 15, 0, 6);
    // Opens what a process opens once.
    drop(TestWorld::start(ip, "first", 2));
    // A thread that has been joined may be listed for a moment.
    let settled = |expected: (usize, usize)| {
        let until = Instant::now() + Duration::from_secs(10);
        while resources() != expected && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(resources(), expected);
    };
    let mut without = resources();
    loop {
        std::thread::sleep(Duration::from_millis(50));
        if resources() == without {
            break;
        }
        without = resources();
    }
    let (_, first) = TestWorld::start(ip, "first", 2);
    // A thread, its socket and its wake-up.
    let with_one = (without.0 + 1, without.1 + 2);
    settled(with_one);
    let others: Vec<(TestWorld, Vec<ShrinkService>)> =
        (0..100).map(|number| TestWorld::start(ip, &format!("world {number}"), 2)).collect();
    settled(with_one);
    drop(others);
    settled(with_one);
    drop(first);
    settled(without);
}

/// An address at which connections are neither made nor refused, for as long as the sockets are there.
fn silent_endpoint() -> (SocketAddr, Vec<Socket>) {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let listener = socket();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    // Room for one connection, which nothing accepts.
    listener.listen(0).expect("a port");
    let address = listener.local_addr().expect("bound");
    let waiting = [(); 3].map(|()| {
        let waiting = socket();
        waiting.set_nonblocking(true).expect("a socket");
        // Those after the first are not answered.
        let _ = waiting.connect(&address);
        waiting
    });
    (address.as_socket().expect("IPv4"), waiting.into_iter().chain([listener]).collect())
}

#[test]
fn a_rank_is_asked_at_its_other_addresses_if_the_first_one_does_not_answer() {
    let ip = Ipv4Addr::new(127, 15, 0, 9);
    let (silent, _sockets) = silent_endpoint();
    // The kernel refuses to connect to this one.
    for first in [silent, SocketAddr::from((Ipv4Addr::BROADCAST, 1))] {
        let (world, listeners) = TestWorld::join(ip, "two addresses", 2);
        let begun = Instant::now();
        let services: Vec<ShrinkService> = listeners
            .into_iter()
            .enumerate()
            .map(|(me, listener)| {
                let config = Config { socket_ifname: Some("=lo".to_owned()), ..Config::default() };
                let endpoints = world.endpoints.iter().map(|endpoint| vec![first, *endpoint]).collect();
                let params = ShrinkServiceParams {
                    me,
                    endpoints,
                    key: world.key(),
                    listener,
                    ranks_per_core: 0,
                    config,
                };
                ShrinkService::start(params).expect("a thread")
            })
            .collect();
        std::thread::scope(|scope| {
            for service in &services {
                scope.spawn(|| assert_eq!(shrink(service), [0, 1], "{first}"));
            }
        });
        assert!(begun.elapsed() < SILENCE);
    }
}
