//! Reaching the coordinator: listening where the ranks look for it, and connecting until the deadline.
//!
//! Owns name resolution, addresses, retries and the errors when they fail. Must not know what the coordinator
//! decides.

use super::framed_stream::FramedStream;
use super::heartbeat::seconds;
use super::launcher::RendezvousPoint;
use super::protocol::{FRAME_LIMIT, Hello, HelloHeader, HelloParams, ToRank, decode};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::longest_sleep;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long rank 0 retries a port that is in use. A rank that connects before rank 0 listens can hold the
/// port briefly.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time-out of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a coordinator may take to answer a hello.
const HELLO_ACK_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than its own deadline a rank waits, so that it receives the coordinator's list of missing
/// ranks.
const GRACE: Duration = Duration::from_secs(2);
/// Length of the queue of pending connections; the system may impose a lower limit.
const BACKLOG: i32 = 4096;
/// How long resolved addresses are reused.
const RESOLVED_TTL: Duration = Duration::from_secs(2);
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Listens at exactly this address, even if a previous coordinator closed the port a moment ago.
pub(super) fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Listens as rank 0 at every address of this node that `host` resolves to. If there is none, as behind
/// address translation, listens at all addresses.
pub(super) fn listen(host: &str, port: u16) -> Result<Vec<TcpListener>> {
    let addresses = resolve(host, port).map_err(|cause| {
        Error::rendezvous(format!("rank 0 cannot resolve the master address {host}: {cause}"))
            .with_source(cause)
    })?;
    let since = Instant::now();
    loop {
        match bind(host, &addresses) {
            Ok(listeners) => return Ok(listeners),
            Err(cause) if cause.kind() == io::ErrorKind::AddrInUse && since.elapsed() < BIND_TIMEOUT => {
                std::thread::sleep(MAX_PAUSE);
            }
            Err(cause) => {
                return Err(Error::rendezvous(format!(
                    "rank 0 cannot listen on {host} port {port}: {cause}; set FLEXRING_MASTER_PORT to a port that is free \
                     on its node, the same on all ranks"
                ))
                .with_source(cause));
            }
        }
    }
}

fn bind(host: &str, addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    // Many systems map their own name to a loopback address, which other nodes cannot reach.
    let resolves_to_loopback = host.parse::<IpAddr>().is_err()
        && !host.eq_ignore_ascii_case("localhost")
        && addresses.iter().any(|address| address.ip().is_loopback());
    if !resolves_to_loopback {
        for address in addresses {
            match listen_at(*address) {
                Ok(listener) => listeners.push(listener),
                Err(cause) if cause.kind() == io::ErrorKind::AddrNotAvailable => {}
                // A machine without IPv6 may still have a name for ::1.
                Err(cause) if cause.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) => {
                }
                Err(cause) => return Err(cause),
            }
        }
    }
    if listeners.is_empty() {
        let any: IpAddr = match addresses.first().map(SocketAddr::ip) {
            Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        let port = addresses.first().map_or(0, SocketAddr::port);
        listeners.push(listen_at(SocketAddr::new(any, port))?);
    }
    Ok(listeners)
}

/// The addresses at which processes of this node reach these listeners.
pub(super) fn addresses_of(listeners: &[TcpListener]) -> Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for listener in listeners {
        let mut address = listener
            .local_addr()
            .map_err(|cause| Error::io("cannot read the coordinator's listening address", cause))?;
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    // IPv6 addresses before a port are often written in brackets.
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

/// Where a rank looks for its coordinator.
#[derive(Debug)]
pub(super) enum CoordinatorTarget<'a> {
    /// The rendezvous point that its launcher or caller gave.
    Remote(&'a RendezvousPoint),
    /// In this process, at these addresses.
    Local(&'a [SocketAddr]),
}

impl CoordinatorTarget<'_> {
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port }) => resolve(host, *port),
            Self::Remote(RendezvousPoint::Id(id)) => Ok(id.addresses()),
            Self::Local(addresses) => Ok(addresses.to_vec()),
        }
    }

    /// Names the target, and says what to check if it cannot be reached.
    fn describe(&self) -> (String, &'static str) {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port }) => (
                format!("rank 0 at {host} port {port}"),
                "check that rank 0 runs, that FLEXRING_MASTER_ADDR and FLEXRING_MASTER_PORT (or the launcher's address) name it \
                 on every rank, and that no firewall blocks the port",
            ),
            Self::Remote(RendezvousPoint::Id(id)) => (
                format!("the process that created the unique id, at {:?}", id.addresses()),
                "check that it still runs, that the id is fresh (each serves one world), and that no firewall blocks the port",
            ),
            Self::Local(addresses) => (
                format!("this process's own coordinator at {addresses:?}"),
                "check that the loopback interface is up",
            ),
        }
    }
}

/// Caches resolved addresses, so that a thousand ranks that retry do not overload a name server.
#[derive(Default)]
struct ResolverCache {
    known: Vec<SocketAddr>,
    since: Option<Instant>,
}

impl ResolverCache {
    fn addresses(&mut self, target: &CoordinatorTarget<'_>) -> io::Result<&[SocketAddr]> {
        if self.since.is_none_or(|since| since.elapsed() >= RESOLVED_TTL) {
            self.known = target.addresses()?;
            self.since = Some(Instant::now());
        }
        Ok(&self.known)
    }
}

/// Why an attempt failed.
enum ConnectError {
    /// A later attempt may succeed.
    Retry(String),
    /// The coordinator of another job answered.
    WrongJob(Error),
    /// Later attempts cannot succeed.
    Fatal(Error),
}

/// Connects to the coordinator and waits until all ranks have joined. Returns the connection and the
/// description of the coordinator's process.
pub(super) fn join(
    target: &CoordinatorTarget<'_>,
    header: &HelloHeader,
    params: &HelloParams,
    deadline: Instant,
    fault: &Fault,
) -> Result<(FramedStream, String)> {
    let mut pause = MIN_PAUSE;
    let mut resolver = ResolverCache::default();
    loop {
        let mut last = match try_all(&mut resolver, target, header, params, deadline, fault) {
            Ok(welcome) => return Ok(welcome),
            Err(ConnectError::Fatal(error) | ConnectError::WrongJob(error)) => return Err(error),
            Err(ConnectError::Retry(cause)) => cause,
        };
        let now = Instant::now();
        if now >= deadline {
            let (name, advice) = target.describe();
            if last.is_empty() {
                last = "the deadline had passed".to_owned();
            }
            return Err(Error::rendezvous(format!(
                "rank {} cannot reach {name} within {}: {last}; {advice}",
                header.rank,
                seconds(params.exchange_timeout)
            )));
        }
        let until = (now + pause).min(deadline);
        pause = (2 * pause).min(MAX_PAUSE);
        sleep(None, until, fault);
        fault.check_waiting()?;
    }
}

/// Tries every address once.
fn try_all(
    resolver: &mut ResolverCache,
    target: &CoordinatorTarget<'_>,
    header: &HelloHeader,
    params: &HelloParams,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<(FramedStream, String), ConnectError> {
    let addresses = resolver
        .addresses(target)
        .map_err(|cause| ConnectError::Retry(format!("the name cannot be resolved ({cause})")))?;
    let mut causes = Vec::new();
    let mut wrong_jobs = Vec::new();
    for address in addresses {
        match try_address(*address, header, params, deadline, fault) {
            Ok(welcome) => return Ok(welcome),
            Err(ConnectError::Retry(cause)) => causes.push(cause),
            Err(ConnectError::WrongJob(error)) => wrong_jobs.push(error),
            Err(last @ ConnectError::Fatal(_)) => return Err(last),
        }
    }
    match wrong_jobs.into_iter().next() {
        // A unique id contains loopback addresses, which lead to other coordinators on other nodes. The id is
        // wrong only if all addresses do.
        Some(error) if causes.is_empty() => Err(ConnectError::WrongJob(error)),
        Some(error) => Err(ConnectError::Retry(format!("{}, {}", causes.join(", "), error.message()))),
        None => Err(ConnectError::Retry(causes.join(", "))),
    }
}

fn try_address(
    address: SocketAddr,
    header: &HelloHeader,
    params: &HelloParams,
    deadline: Instant,
    fault: &Fault,
) -> std::result::Result<(FramedStream, String), ConnectError> {
    let retry = |cause: String| ConnectError::Retry(format!("{address}: {cause}"));
    let left = deadline.saturating_duration_since(Instant::now());
    let stream = TcpStream::connect_timeout(&address, left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT))
        .map_err(|cause| retry(cause.to_string()))?;
    // On one node, a socket that connects to a port without a listener may connect to itself.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(retry("no process listens".to_owned()));
    }
    let mut connection = FramedStream::new(stream, false).map_err(|cause| retry(cause.to_string()))?;
    let now = Instant::now();
    let params = HelloParams { join_timeout: deadline.saturating_duration_since(now), ..params.clone() };
    connection.enqueue(Hello::encode(header, &params).map_err(ConnectError::Fatal)?);
    let mut until = (now + HELLO_ACK_TIMEOUT).min(deadline + GRACE);
    let mut is_acknowledged = false;
    loop {
        fault.check_waiting().map_err(ConnectError::Fatal)?;
        let end = match connection.flush() {
            Ok(()) => {
                let received = connection.receive(FRAME_LIMIT);
                for frame in &received.frames {
                    match decode::<ToRank>(frame) {
                        Some(ToRank::HelloAck) => {
                            is_acknowledged = true;
                            until = deadline + GRACE;
                        }
                        Some(ToRank::Welcome { host }) => return Ok((connection, host)),
                        Some(ToRank::RootCause(error)) => return Err(ConnectError::Fatal(error)),
                        Some(ToRank::WrongJob(error)) => return Err(ConnectError::WrongJob(error)),
                        _ => {
                            return Err(retry(
                                "the process that listens there is not a flexring coordinator".to_owned(),
                            ));
                        }
                    }
                }
                received.end
            }
            Err(cause) => Some(format!("broke ({cause})")),
        };
        match end {
            // A coordinator that acknowledged a hello sends a reason before it closes, unless its process
            // dies.
            Some(cause) if is_acknowledged => {
                return Err(ConnectError::Fatal(Error::peer_lost(format!(
                    "the coordinator's process at {address} died before all ranks joined: the control \
                         connection to it {cause}"
                ))));
            }
            Some(cause) => return Err(retry(format!("the connection {cause} before an answer"))),
            None if Instant::now() >= until => {
                return Err(retry("the process that listens there does not answer".to_owned()));
            }
            None => sleep(Some(&connection), until, fault),
        }
    }
}

/// Sleeps until the connection is ready, the fault is raised, or `until`.
fn sleep(connection: Option<&FramedStream>, until: Instant, fault: &Fault) {
    let wake = fault.wake_fd();
    let mut fds = vec![PollFd::new(&wake, PollFlags::IN)];
    fds.extend(connection.map(|connection| PollFd::new(connection, connection.poll_flags())));
    let left = until.saturating_duration_since(Instant::now()).min(longest_sleep());
    // An early wake-up is harmless: every caller checks the clock.
    let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
}
