//! The bootstrap as a whole: worlds of threads over real loopback sockets.

mod failures;
mod rendezvous;

use super::connect::{self, CoordinatorTarget};
use super::framed_stream::FramedStream;
use super::process::Process;
use super::protocol::{Caller, Terms, VERSION};
use super::{ControlConnection, Identity, RendezvousPoint};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::rank::Rank;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
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
        panic!("the test hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// A port that nobody uses, from those that the system does not hand out by itself.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) + (std::process::id() as u16 % 97) * 100;
        let port = 10_000 + offset % 9_700;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

fn at(port: u16) -> RendezvousPoint {
    RendezvousPoint::Address { host: "127.0.0.1".to_owned(), port }
}

fn who(rank: Rank, world: usize, rendezvous: &RendezvousPoint) -> Identity {
    Identity {
        rank,
        world,
        rendezvous: rendezvous.clone(),
        token: if let RendezvousPoint::Id(id) = rendezvous { id.token() } else { 7 },
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

fn impatient() -> Config {
    Config { connect_timeout: Duration::from_millis(400), ..config() }
}

fn fault() -> Arc<Fault> {
    Arc::new(Fault::new().expect("an event descriptor"))
}

fn join(
    rank: Rank,
    world: usize,
    rendezvous: &RendezvousPoint,
    config: &Config,
) -> Result<ControlConnection> {
    ControlConnection::join(&who(rank, world, rendezvous), config, fault())
}

/// A member of a world and the fault that its failure raises.
struct Member {
    control: ControlConnection,
    fault: Arc<Fault>,
}

impl Member {
    /// Waits for the world to fail, and says how.
    fn fate(&self) -> Error {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if let Some(error) = self.fault.get() {
                return error.clone();
            }
            thread::sleep(Duration::from_millis(2));
        }
        panic!("rank {} was never told", self.control.rank());
    }
}

/// Lets `ranks` join a world of `size`, each in a thread of its own.
fn members(
    ranks: impl Iterator<Item = Rank>,
    size: usize,
    rendezvous: &RendezvousPoint,
    config: &Config,
) -> Vec<Member> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .map(|rank| {
                scope.spawn(move || {
                    let fault = fault();
                    let control =
                        ControlConnection::join(&who(rank, size, rendezvous), config, fault.clone())
                            .unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                    Member { control, fault }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("joined")).collect()
    })
}

fn world(size: usize) -> Vec<Member> {
    members(0..size, size, &at(free_port()), &config())
}

/// Lets ranks join that will not succeed, and returns why, in their order.
fn refused(ranks: &[(Rank, usize, Config)], rendezvous: &RendezvousPoint) -> Vec<Error> {
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

fn fates(members: &[Member]) -> Error {
    let fates: Vec<Error> = members.iter().map(Member::fate).collect();
    all_equal(&fates).clone()
}

fn stranger(rank: Rank, world: usize) -> (Caller, Terms) {
    let caller = Caller {
        version: VERSION.to_owned(),
        token: 7,
        rank,
        world,
        process: Process { pid: 4242, host: "elsewhere".to_owned(), instance: 4242 },
    };
    let terms = Terms {
        settings: config().shared(),
        patience: Duration::from_secs(10),
        timeout: Duration::from_secs(10),
        heartbeat: config().heartbeat,
    };
    (caller, terms)
}

/// A world of `size` whose last rank is a mere connection, with a process of its own that does not live.
fn world_with_a_puppet(size: usize) -> (Vec<Member>, FramedStream) {
    let rendezvous = at(free_port());
    thread::scope(|scope| {
        let puppet = scope.spawn(|| {
            let (caller, terms) = stranger(size - 1, size);
            let deadline = Instant::now() + terms.patience;
            connect::attend(&CoordinatorTarget::Remote(&rendezvous), &caller, &terms, deadline, &fault())
                .expect("welcome")
                .0
        });
        let members = members(0..size - 1, size, &rendezvous, &config());
        (members, puppet.join().expect("welcome"))
    })
}
