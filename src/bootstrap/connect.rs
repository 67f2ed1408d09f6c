//! Reaching the coordinator: connecting until the deadline, and proving that this rank belongs to the job.
//!
//! Owns name resolution, retries and the errors when they fail. Must not know what the coordinator decides.

use super::attempts;
use super::framed_stream::FramedStream;
use super::handshake::Applicant;
use super::heartbeat::seconds;
use super::launcher::RendezvousPoint;
use super::protocol::{FRAME_LIMIT, HelloHeader, HelloParams, Nonce, OPENING_LIMIT, Purpose, ToRank, decode};
use super::secret::{JobSecret, SecretSource};
use super::world_status::WorldStatus;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::interrupt::longest_sleep;
use crate::tls::{INTERCEPTOR, TlsRole};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Time-out of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a coordinator may take for the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than its own deadline a rank waits, so that it receives the coordinator's list of missing
/// ranks.
const GRACE: Duration = Duration::from_secs(2);
/// How long resolved addresses are reused.
const RESOLVED_TTL: Duration = Duration::from_secs(2);
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// The addresses that a host's name resolves to, each once.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
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
    /// In rank 0's process, at these addresses.
    Successor(&'a [SocketAddr]),
}

impl CoordinatorTarget<'_> {
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port }) => resolve(host, *port),
            Self::Remote(RendezvousPoint::Id(id)) => Ok(id.addresses()),
            Self::Local(addresses) | Self::Successor(addresses) => Ok(addresses.to_vec()),
        }
    }

    /// Names the target, and says what to check if it cannot be reached.
    fn describe(&self) -> (String, &'static str) {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port }) => (
                format!("rank 0 at {host} port {port}"),
                "check that rank 0 runs, that FLEXRING_MASTER_ADDR and FLEXRING_MASTER_PORT (or the launcher's address) name it \
                 on every rank, and that no firewall blocks the port; rank 0 listens on one interface only, see FLEXRING_SOCKET_IFNAME",
            ),
            Self::Remote(RendezvousPoint::Id(id)) => (
                format!("the process that created the unique id, at {:?}", id.addresses()),
                "check that it still runs, that the id is fresh (each serves one world, and expires if no rank uses it), and \
                 that no firewall blocks the port",
            ),
            Self::Successor(addresses) => (
                format!("rank 0, which takes the world over, at {addresses:?}"),
                "check that it still runs, and that no firewall blocks the port",
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
    /// The coordinator that answered does not admit this rank.
    Refused(Error),
    /// Later attempts cannot succeed.
    Fatal(Error),
}

/// A rank that wants to join.
pub(super) struct Joiner<'a> {
    pub(super) target: &'a CoordinatorTarget<'a>,
    pub(super) source: &'a SecretSource,
    pub(super) header: &'a HelloHeader,
    pub(super) params: &'a HelloParams,
    pub(super) deadline: Instant,
    pub(super) fault: &'a Fault,
}

/// A rank that has joined a complete world.
pub(super) struct Joined {
    pub(super) stream: FramedStream,
    /// Description of the coordinator's process.
    pub(super) host_process: String,
    pub(super) secret: JobSecret,
}

/// What a coordinator answers a caller that it admits.
enum CoordinatorAnswer {
    /// All ranks have joined. The description of the coordinator's process.
    Welcome(String),
    /// All ranks have joined, and must join again at these addresses.
    Moved(Vec<SocketAddr>),
    /// The state of the world.
    Status(WorldStatus),
}

/// An answer, and the connection and secret with which it came.
type Answered = (CoordinatorAnswer, FramedStream, JobSecret);

type Attempt<T> = std::result::Result<T, ConnectError>;

impl Joiner<'_> {
    /// Connects to the coordinator and waits until all ranks have joined. If rank 0 takes the world over, connects to it.
    pub(super) fn join(&self) -> Result<Joined> {
        let mut answered = self.ask()?;
        if let (CoordinatorAnswer::Moved(addresses), ..) = &answered {
            let target = match self.params.successor.as_slice() {
                [] => CoordinatorTarget::Successor(addresses),
                own => CoordinatorTarget::Local(own),
            };
            // All ranks have joined in time; the move must not fail for the time that they took.
            let deadline = self.deadline.max(Instant::now() + GRACE);
            answered = Joiner { target: &target, deadline, ..*self }.ask()?;
        }
        match answered {
            (CoordinatorAnswer::Welcome(host_process), stream, secret) => {
                Ok(Joined { stream, host_process, secret })
            }
            _ => Err(Error::internal("the coordinator did not answer a rank with a welcome")),
        }
    }

    /// Asks the coordinator for the state of the world.
    pub(super) fn status(&self) -> Result<WorldStatus> {
        match self.ask()? {
            (CoordinatorAnswer::Status(status), ..) => Ok(status),
            _ => Err(Error::internal(
                "the coordinator answered a request for the status as if it came from a rank",
            )),
        }
    }

    /// Connects to the coordinator and waits for its answer.
    fn ask(&self) -> Result<Answered> {
        let begun = Instant::now();
        let mut pause = MIN_PAUSE;
        let mut refusal = None;
        let mut resolver = ResolverCache::default();
        loop {
            let mut last = match self.attempt(&mut resolver, begun, &mut refusal) {
                Ok(answered) => return Ok(answered),
                Err(ConnectError::Fatal(error) | ConnectError::Refused(error)) => return Err(error),
                Err(ConnectError::Retry(cause)) => cause,
            };
            let now = Instant::now();
            if now >= self.deadline {
                let (name, advice) = self.target.describe();
                if last.is_empty() {
                    last = "the deadline had passed".to_owned();
                }
                // Rank 0 may have given up since.
                if let Some(refusal) = refusal.filter(|refusal| !last.contains(refusal)) {
                    last = format!("{last}; before that it was refused: {refusal}");
                }
                let who = match self.header.purpose {
                    Purpose::Join => format!("rank {}", self.header.rank),
                    Purpose::Status => "this process".to_owned(),
                };
                return Err(Error::rendezvous(format!(
                    "{who} cannot reach {name} within {}: {last}; {advice}",
                    seconds(self.params.exchange_timeout)
                )));
            }
            let until = (now + pause).min(self.deadline);
            pause = (2 * pause).min(MAX_PAUSE);
            sleep(None, until, self.fault);
            self.fault.check_waiting()?;
        }
    }

    /// Tries every address once. Sets `refusal` if a process there does not admit this rank.
    fn attempt(
        &self,
        resolver: &mut ResolverCache,
        begun: Instant,
        refusal: &mut Option<String>,
    ) -> Attempt<Answered> {
        let secret = self.source.secret().map_err(ConnectError::Retry)?;
        let addresses = resolver
            .addresses(self.target)
            .map_err(|cause| ConnectError::Retry(format!("the name cannot be resolved ({cause})")))?;
        let mut causes = Vec::new();
        let mut refusals = Vec::new();
        for address in addresses {
            let mut number = None;
            let outcome = self.try_address(*address, &secret, &mut number);
            match outcome.map_err(|error| self.failure_of_attempt(number, error, begun)) {
                Ok((stream, answer)) => return Ok((answer, stream, secret)),
                Err(ConnectError::Retry(cause)) => causes.push(cause),
                // Every process that holds the port can send this. Rank 0 may still come, with another secret or at the same port. The
                // error at the deadline has the reason.
                Err(ConnectError::Refused(error)) if self.waits_for_rank_0() => {
                    causes.push(error.message().to_owned());
                    *refusal = Some(error.message().to_owned());
                }
                Err(ConnectError::Refused(error)) => refusals.push(error),
                Err(last @ ConnectError::Fatal(_)) => return Err(last),
            }
        }
        match refusals.into_iter().next() {
            // A unique id contains loopback addresses, which lead to other coordinators on other nodes. The id is
            // wrong only if all addresses do.
            Some(error) if causes.is_empty() => Err(ConnectError::Refused(error)),
            Some(error) => Err(ConnectError::Retry(format!("{}, {}", causes.join(", "), error.message()))),
            None => Err(ConnectError::Retry(causes.join(", "))),
        }
    }

    /// Whether rank 0 may begin to listen later than this rank calls. A unique id has a coordinator from the beginning.
    fn waits_for_rank_0(&self) -> bool {
        matches!(self.target, CoordinatorTarget::Remote(RendezvousPoint::Address { .. }))
            && self.header.purpose == Purpose::Join
    }

    /// What the failure of the attempt with this number means to a rank that began to join at `begun`. If the rank has failed in it before, the coordinator is
    /// that of the earlier attempt, and the rank waits for the next one.
    fn failure_of_attempt(&self, number: Option<u64>, error: ConnectError, begun: Instant) -> ConnectError {
        // A unique id has one attempt, whose error is final.
        let CoordinatorTarget::Remote(RendezvousPoint::Address { .. }) = self.target else {
            return error;
        };
        let Some(number) = number else {
            return error;
        };
        if !attempts::has_failed_before(self.header.rank, number, begun) {
            attempts::record_failure(self.header.rank, number);
            return error;
        }
        match error {
            ConnectError::Fatal(error) => ConnectError::Retry(format!(
                "rank 0 has not tried again since the last attempt failed ({})",
                error.message()
            )),
            error => error,
        }
    }

    /// Tries one address. Sets `number` to the number of the attempt that the coordinator serves, as soon as it is known.
    fn try_address(
        &self,
        address: SocketAddr,
        secret: &JobSecret,
        number: &mut Option<u64>,
    ) -> Attempt<(FramedStream, CoordinatorAnswer)> {
        let retry = |cause: String| ConnectError::Retry(format!("{address}: {cause}"));
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
        let stream =
            TcpStream::connect_timeout(&address, timeout).map_err(|cause| match (self.target, cause.kind()) {
                // It has listened before its address became known. Final only if all addresses refuse.
                (CoordinatorTarget::Successor(_), io::ErrorKind::ConnectionRefused) => {
                    let message = format!(
                        "rank 0 died before all ranks joined: it was to take the world over at {address} ({cause})"
                    );
                    ConnectError::Refused(Error::peer_lost(message))
                }
                _ => retry(cause.to_string()),
            })?;
        // On one node, a socket that connects to a port without a listener may connect to itself.
        if stream.local_addr().ok() == stream.peer_addr().ok() {
            return Err(retry("no process listens".to_owned()));
        }
        reach(FaultPoint::BootstrapConnected);
        let mut connection = FramedStream::new(stream, false).map_err(|cause| retry(cause.to_string()))?;
        let (applicant, opening) =
            Applicant::new(secret, self.source.job(), self.header).map_err(ConnectError::Fatal)?;
        connection.enqueue(opening);
        if secret.is_encrypted() {
            connection.require_encryption(TlsRole::Initiator, OPENING_LIMIT);
        }
        reach(FaultPoint::BootstrapSentHello);
        let until = (Instant::now() + HANDSHAKE_TIMEOUT).min(self.deadline + GRACE);
        let mut attempt = JoinAttempt {
            joiner: self,
            applicant,
            connection,
            challenge: None,
            is_challenged: false,
            is_acknowledged: false,
            until,
        };
        loop {
            self.fault.check_waiting().map_err(ConnectError::Fatal)?;
            let end = match attempt.connection.flush() {
                Ok(()) => {
                    let received = attempt.connection.receive(FRAME_LIMIT);
                    let mut frames = received.frames.into_iter();
                    while let Some(frame) = frames.next() {
                        let answer = attempt.on_frame(&frame, number).map_err(|error| match error {
                            ConnectError::Retry(cause) => retry(cause),
                            other => other,
                        })?;
                        if let Some(answer) = answer {
                            // The world may have failed right after it was complete.
                            attempt.connection.put_back(frames);
                            return Ok((attempt.connection, answer));
                        }
                    }
                    attempt.prove_once_bound().map_err(|error| retry(error.message().to_owned()))?;
                    received.end
                }
                Err(cause) => Some(format!("broke ({cause})")),
            };
            match end {
                // A coordinator that acknowledged a rank sends a reason before it closes, unless its process
                // dies.
                Some(cause) if attempt.is_acknowledged => {
                    let coordinator = match self.target {
                        CoordinatorTarget::Remote(RendezvousPoint::Id(_)) => {
                            "the process that created the unique id"
                        }
                        _ => "rank 0, whose process has the coordinator,",
                    };
                    return Err(ConnectError::Fatal(Error::peer_lost(format!(
                        "{coordinator} at {address} died before all ranks joined: the control connection to it {cause}"
                    ))));
                }
                Some(cause) => return Err(retry(format!("the connection {cause} before an answer"))),
                None if Instant::now() >= attempt.until => {
                    return Err(retry("the process that listens there does not answer".to_owned()));
                }
                None => sleep(Some(&attempt.connection), attempt.until, self.fault),
            }
        }
    }
}

/// One connection of a rank that is joining.
struct JoinAttempt<'a> {
    joiner: &'a Joiner<'a>,
    applicant: Applicant<'a>,
    connection: FramedStream,
    /// The coordinator's challenge, until it is answered.
    challenge: Option<Nonce>,
    /// Whether there was a challenge.
    is_challenged: bool,
    /// Whether the coordinator has proved that it belongs to the job.
    is_acknowledged: bool,
    until: Instant,
}

impl JoinAttempt<'_> {
    /// Handles a frame of the process that listens there. Returns its answer, if this is it.
    fn on_frame(&mut self, frame: &[u8], number: &mut Option<u64>) -> Attempt<Option<CoordinatorAnswer>> {
        match (decode::<ToRank>(frame), self.is_acknowledged) {
            (Some(ToRank::Challenge(nonce)), false) => {
                // Whatever a process sends that has not proved itself, the rank tries again.
                let retry = |cause: &str| ConnectError::Retry(cause.to_owned());
                if std::mem::replace(&mut self.is_challenged, true) {
                    return Err(retry("the process that listens there sent two challenges"));
                }
                self.challenge = Some(nonce);
                if self.applicant.is_encrypted() {
                    self.connection.encrypt().map_err(|error| retry(error.message()))?;
                }
            }
            (Some(ToRank::HelloAck(code)), false) => {
                if !self.applicant.is_proof(&code) {
                    let interceptor = if self.applicant.is_encrypted() { INTERCEPTOR } else { "" };
                    let cause =
                        format!("the process that listens there does not know the job's secret{interceptor}");
                    return Err(ConnectError::Retry(cause));
                }
                self.connection.trust();
                self.is_acknowledged = true;
                self.until = self.joiner.deadline + GRACE;
            }
            (Some(ToRank::Refused(error)), false) => return Err(ConnectError::Refused(error)),
            (Some(ToRank::Attempt(attempt)), true) => *number = Some(attempt),
            (Some(ToRank::Welcome { host }), true) => return Ok(Some(CoordinatorAnswer::Welcome(host))),
            (Some(ToRank::Moved(addresses)), true) => return Ok(Some(CoordinatorAnswer::Moved(addresses))),
            (Some(ToRank::Status(status)), true) => return Ok(Some(CoordinatorAnswer::Status(status))),
            (Some(ToRank::TryAgain(why)), true) => return Err(ConnectError::Retry(why)),
            (Some(ToRank::RootCause(error)), true) => return Err(ConnectError::Fatal(error)),
            _ => {
                let cause = "the process that listens there is not a flexring coordinator";
                return Err(ConnectError::Retry(cause.to_owned()));
            }
        }
        Ok(None)
    }

    /// Answers the challenge once the connection has its binding: at once, or after the handshake of its encryption.
    fn prove_once_bound(&mut self) -> Result<()> {
        let Some(binding) = self.connection.binding().map(<[u8]>::to_vec) else {
            return Ok(());
        };
        let Some(nonce) = self.challenge.take() else {
            return Ok(());
        };
        let left = self.joiner.deadline.saturating_duration_since(Instant::now());
        let params = HelloParams { join_timeout: left, ..self.joiner.params.clone() };
        let proof = self.applicant.prove(nonce, &binding, &params)?;
        self.connection.enqueue(proof);
        Ok(())
    }
}

/// A rank that gets answers, for fuzzing.
#[cfg(test)]
pub(super) struct AnsweredRank {
    source: SecretSource,
    header: HelloHeader,
    params: HelloParams,
    fault: Fault,
}

#[cfg(test)]
impl AnsweredRank {
    pub(super) fn new(header: HelloHeader, params: HelloParams) -> Self {
        let source = SecretSource::of_settings(&crate::config::Config::default(), 7).expect("valid");
        Self { source, header, params, fault: Fault::new().expect("an event descriptor") }
    }

    /// Handles frames until one ends the attempt. `is_acknowledged` if the coordinator has proved itself before.
    pub(super) fn receive(
        &self,
        connection: FramedStream,
        is_acknowledged: bool,
        frames: impl Iterator<Item = Vec<u8>>,
    ) {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        let target = CoordinatorTarget::Local(&[]);
        let (source, fault) = (&self.source, &self.fault);
        let joiner = Joiner {
            target: &target,
            source,
            header: &self.header,
            params: &self.params,
            deadline: until,
            fault,
        };
        let secret = source.secret().expect("none is needed");
        let (applicant, _) = Applicant::new(&secret, source.job(), &self.header).expect("random bytes");
        let mut attempt = JoinAttempt {
            joiner: &joiner,
            applicant,
            connection,
            challenge: None,
            is_challenged: false,
            is_acknowledged,
            until,
        };
        let mut number = None;
        for frame in frames {
            if !matches!(attempt.on_frame(&frame, &mut number), Ok(None))
                || attempt.prove_once_bound().is_err()
            {
                return;
            }
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
