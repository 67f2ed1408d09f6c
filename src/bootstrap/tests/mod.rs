//! Tests of the whole bootstrap: every rank is a thread, over loopback sockets.

mod departures;
mod encryption;
mod failures;
mod floods;
mod peer_messages;
mod rendezvous;
mod retries;
mod shared_connections;
mod status;
mod strangers;
mod subworlds;
mod unique_ids;

use super::connect::{Joined, Joiner};
use super::coordinator_target::CoordinatorTarget;
use super::framed_stream::FramedStream;
use super::process::Process;
use super::protocol::{HelloHeader, HelloParams, Purpose, VERSION};
use super::secret::SecretSource;
use super::{ControlConnection, Identity, RendezvousPoint};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::rank::Rank;
use flexring_testkit::port::free_port;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Fails a test that takes longer than 30 seconds.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if ended.recv_timeout(Duration::from_secs(30)) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the test timed out");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// A connection to a coordinator that may not listen yet.
fn connect_to(port: u16) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            // Without a listener a socket may connect to itself.
            && stream.local_addr().ok() != stream.peer_addr().ok()
        {
            return stream;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The public number of the job of these tests.
const JOB: u128 = 7;

fn address_of(port: u16) -> RendezvousPoint {
    RendezvousPoint::at("127.0.0.1".to_owned(), port)
}

fn identity(rank: Rank, world: usize, rendezvous: &RendezvousPoint) -> Identity {
    Identity {
        rank,
        world,
        rendezvous: rendezvous.clone(),
        token: if let RendezvousPoint::Id(id) = rendezvous { id.job() } else { JOB },
        one_node: false,
        launcher: "a test",
    }
}

fn config() -> Config {
    Config {
        connect_timeout: Duration::from_secs(10),
        heartbeat: Duration::from_millis(50),
        ..Config::default()
    }
}

fn short_timeout() -> Config {
    Config { connect_timeout: Duration::from_millis(1500), ..config() }
}

fn fault() -> Arc<Fault> {
    Arc::new(Fault::new())
}

fn join(
    rank: Rank,
    world: usize,
    rendezvous: &RendezvousPoint,
    config: &Config,
) -> Result<ControlConnection> {
    ControlConnection::join(&identity(rank, world, rendezvous), config, fault())
}

/// A joined rank and its fault.
struct TestRank {
    control: ControlConnection,
    fault: Arc<Fault>,
}

impl TestRank {
    /// Waits for the world to fail and returns the error.
    fn wait_for_fault(&self) -> Error {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if let Some(error) = self.fault.get() {
                return error.clone();
            }
            thread::sleep(Duration::from_millis(2));
        }
        panic!("no fault was raised on rank {}", self.control.rank());
    }
}

/// Joins `ranks` to a world of `size`, each on its own thread.
fn join_ranks(
    ranks: impl Iterator<Item = Rank>,
    size: usize,
    rendezvous: &RendezvousPoint,
    config: &Config,
) -> Vec<TestRank> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .map(|rank| {
                scope.spawn(move || {
                    let fault = fault();
                    let control =
                        ControlConnection::join(&identity(rank, size, rendezvous), config, fault.clone())
                            .unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                    TestRank { control, fault }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("joined")).collect()
    })
}

fn world(size: usize) -> Vec<TestRank> {
    join_ranks(0..size, size, &address_of(free_port()), &config())
}

/// Joins ranks that must all fail, and returns their errors in order.
fn join_errors(ranks: &[(Rank, usize, Config)], rendezvous: &RendezvousPoint) -> Vec<Error> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .map(|(rank, size, config)| {
                scope.spawn(move || join(*rank, *size, rendezvous, config).map(drop).expect_err("refused"))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("refused")).collect()
    })
}

fn all_equal(errors: &[Error]) -> &Error {
    assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{errors:#?}");
    &errors[0]
}

fn common_fault(members: &[TestRank]) -> Error {
    let faults: Vec<Error> = members.iter().map(TestRank::wait_for_fault).collect();
    all_equal(&faults).clone()
}

fn hello_of(rank: Rank, world: usize) -> (HelloHeader, HelloParams) {
    let header = HelloHeader {
        version: VERSION.into(),
        rank,
        world,
        process: Process { pid: 4242, host: "elsewhere".into(), ..Process::example(4242) },
        purpose: Purpose::Join,
    };
    let params = HelloParams {
        settings: config().shared(),
        join_timeout: Duration::from_secs(10),
        exchange_timeout: Duration::from_secs(10),
        heartbeat: config().heartbeat,
        successor: Vec::new(),
        failure: None,
    };
    (header, params)
}

/// Joins as a rank with this hello, which may differ from what a rank of this build would send.
fn join_as(header: &HelloHeader, params: &HelloParams, rendezvous: &RendezvousPoint) -> Result<Joined> {
    let joiner = Joiner {
        target: &CoordinatorTarget::Remote(rendezvous),
        source: &SecretSource::of_settings(&config(), JOB).expect("no secret"),
        header,
        params,
        deadline: Instant::now() + params.join_timeout,
        fault: &fault(),
    };
    joiner.join(None)
}

/// A world of `size` whose last rank is a bare control connection with an invented process.
fn world_with_fake_peer(size: usize) -> (Vec<TestRank>, FramedStream) {
    world_with_heartbeat(size, config().heartbeat)
}

/// [`world_with_fake_peer`] with another interval between heartbeats.
fn world_with_heartbeat(size: usize, heartbeat: Duration) -> (Vec<TestRank>, FramedStream) {
    let rendezvous = address_of(free_port());
    thread::scope(|scope| {
        let fake_peer = scope.spawn(|| {
            let (header, params) = hello_of(size - 1, size);
            let params = HelloParams { heartbeat, ..params };
            join_as(&header, &params, &rendezvous).expect("welcome").stream
        });
        let members = join_ranks(0..size - 1, size, &rendezvous, &Config { heartbeat, ..config() });
        (members, fake_peer.join().expect("welcome"))
    })
}
