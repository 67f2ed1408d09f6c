//! Reaching the coordinator: connecting until the deadline, and following it to rank 0's process.
//!
//! Owns retries and the errors when they fail. A fault, an interrupt, and what the former coordinator reports
//! end every wait, but for the resolution of a name, and asking rank 0 on this node for its secret (at most 1
//! s).

use super::coordinator_handover::CoordinatorHandover;
use super::coordinator_ports::CoordinatorControl;
use super::coordinator_target::{CoordinatorTarget, ResolverCache};
use super::failed_rendezvous;
use super::framed_stream::FramedStream;
use super::heartbeat::seconds;
use super::join_attempt::{Attempt, ConnectError, CoordinatorAnswer, JoinAttempt};
use super::launcher::RendezvousPoint;
use super::protocol::{HelloHeader, HelloParams, Purpose};
use super::rendezvous::FIRST_REPORT;
use super::secret::{JobSecret, SecretSource};
use super::world_status::WorldStatus;
use crate::descriptor;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::{Fault, UNWATCHED_SLEEP};
use crate::fault_point::{FaultPoint, reach};
use crate::interrupt::longest_sleep;
use crate::peer_text::PeerText;
use crate::rank::Rank;
use crate::transport::tcp::{check_connected, start_connecting};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time-out of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a process at a port to which rank 0 may have moved may take for its first answer. A rank that has
/// waited longer for rank 0 grants an eighth of that time.
const FURTHER_PORT_TIMEOUT: Duration = Duration::from_secs(1);
/// How much longer than its own deadline a rank waits, so that it receives the coordinator's list of missing
/// ranks.
const GRACE: Duration = Duration::from_secs(2);
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(200);

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
    pub(super) host_process: PeerText,
    /// The ranks of that process.
    pub(super) host_ranks: Vec<Rank>,
    pub(super) secret: JobSecret,
}

/// An answer, and the connection and secret with which it came.
type Answered = (CoordinatorAnswer, FramedStream, JobSecret);

impl Joiner<'_> {
    /// Connects to the coordinator and waits until all ranks have joined. If rank 0 takes the world over,
    /// connects to it. `successor` is that coordinator if this is rank 0.
    pub(super) fn join(&self, successor: Option<&CoordinatorControl>) -> Result<Joined> {
        let mut answered = self.ask(&mut CoordinatorHandover::none())?;
        if let (CoordinatorAnswer::Moved(addresses), former, _) = answered {
            let target = match self.params.successor.as_slice() {
                [] => CoordinatorTarget::Successor(&addresses),
                own => CoordinatorTarget::Local(own),
            };
            // All ranks have joined in time; the move must not fail for the time that they took.
            let deadline = self.deadline.max(Instant::now() + GRACE);
            let mut former = CoordinatorHandover::new(former, successor);
            let outcome = Joiner { target: &target, deadline, ..*self }.ask(&mut former);
            // The others learn why rank 0 has failed from its own coordinator. The former one would report
            // that it died.
            if outcome.is_ok() || self.header.rank == 0 {
                former.leave();
            }
            answered = outcome?;
        }
        match answered {
            (CoordinatorAnswer::Welcome { host, ranks }, stream, secret) => {
                Ok(Joined { stream, host_process: host, host_ranks: ranks, secret })
            }
            _ => Err(self.unexpected("a rank that joins")),
        }
    }

    /// Asks the coordinator for the state of the world.
    pub(super) fn status(&self) -> Result<WorldStatus> {
        match self.ask(&mut CoordinatorHandover::none())? {
            (CoordinatorAnswer::Status(status), ..) => Ok(status),
            _ => Err(self.unexpected("a request for the status")),
        }
    }

    /// The error of an answer that no coordinator gives.
    fn unexpected(&self, request: &str) -> Error {
        Error::disagreement(format!(
            "{} did not answer {request} as this release of flexring does: do all ranks run the same build?",
            self.target.name()
        ))
    }

    /// Asks once which process listens there, and whether it serves the job that this one belongs to. `None`
    /// if that is no coordinator, or one of another wire version.
    pub(super) fn listening_process(&self) -> Option<(String, bool)> {
        let mut resolver = ResolverCache::default();
        match self.attempt(&mut resolver, Instant::now(), &mut None, &mut CoordinatorHandover::none()) {
            Err(ConnectError::Refused(error)) => match error.kind() {
                ErrorKind::Rendezvous => Some((error.message().to_owned(), true)),
                ErrorKind::Disagreement => Some((error.message().to_owned(), false)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Connects to the coordinator and waits for its answer.
    fn ask(&self, former: &mut CoordinatorHandover<'_>) -> Result<Answered> {
        let begun = Instant::now();
        let mut pause = MIN_PAUSE;
        let mut refusal = None;
        let mut resolver = ResolverCache::default();
        let (mut report_at, mut since) = (begun + FIRST_REPORT, FIRST_REPORT);
        loop {
            let (mut last, is_unreachable) = match self.attempt(&mut resolver, begun, &mut refusal, former) {
                Ok(answered) => return Ok(answered),
                Err(ConnectError::Fatal(error) | ConnectError::Refused(error)) => return Err(error),
                Err(ConnectError::Retry(cause)) => (cause, false),
                Err(ConnectError::Unreachable(cause)) => (cause, true),
            };
            let now = Instant::now();
            if now >= self.deadline {
                let name = self.target.name();
                if last.is_empty() {
                    last = "the deadline had passed".to_owned();
                }
                let end = match refusal {
                    None => format!("; {}", self.target.advice(is_unreachable)),
                    // The refusal says what to do. Rank 0 may have given up since.
                    Some(refusal) if !last.contains(&refusal) => {
                        format!("; before that it was refused: {refusal}")
                    }
                    Some(_) => String::new(),
                };
                let who = match self.header.purpose {
                    Purpose::Join => format!("rank {}", self.header.rank),
                    Purpose::Status | Purpose::WhoListens => "this process".to_owned(),
                };
                return Err(Error::rendezvous(format!(
                    "{who} cannot reach {name} within {}: {last}{end}",
                    seconds(self.params.exchange_timeout)
                )));
            }
            if now >= report_at && self.header.purpose == Purpose::Join {
                since *= 2;
                report_at = now + since;
                log::warn!("rank {}: waiting for {}: {last}", self.header.rank, self.target.name());
            }
            let until = (now + pause).min(self.deadline);
            pause = (2 * pause).min(MAX_PAUSE);
            self.sleep(None, until, former);
            self.fault.check_waiting().and_then(|()| former.check())?;
        }
    }

    /// Tries every address once. Sets `refusal` if a process there does not admit this rank.
    fn attempt(
        &self,
        resolver: &mut ResolverCache,
        begun: Instant,
        refusal: &mut Option<String>,
        former: &mut CoordinatorHandover<'_>,
    ) -> Attempt<Answered> {
        let secret = self.source.secret().map_err(ConnectError::Retry)?;
        let addresses = resolver
            .addresses(self.target)
            .map_err(|cause| ConnectError::Retry(format!("the name cannot be resolved ({cause})")))?;
        let mut causes = Vec::new();
        let mut refusals = Vec::new();
        let mut is_unreachable = true;
        for address in addresses {
            let mut number = None;
            // Rank 0 may by now listen at the first port.
            let longest_silence = match self.target {
                CoordinatorTarget::Remote(RendezvousPoint::Address { port, .. })
                    if address.port() != *port =>
                {
                    FURTHER_PORT_TIMEOUT.max(begun.elapsed() / 8)
                }
                _ => Duration::MAX,
            };
            let outcome = self.try_address(*address, longest_silence, &secret, &mut number, former);
            match outcome.map_err(|error| self.failure_of_attempt(number, error, begun)) {
                Ok((stream, answer)) => return Ok((answer, stream, secret)),
                Err(ConnectError::Retry(cause)) => {
                    causes.push(cause);
                    is_unreachable = false;
                }
                Err(ConnectError::Unreachable(cause)) => causes.push(cause),
                // Every process that holds the port can send this. Rank 0 may still come, with another secret
                // or at the same port. The error at the deadline has the reason.
                Err(ConnectError::Refused(error)) if self.waits_for_rank_0() => {
                    causes.push(error.message().to_owned());
                    is_unreachable = false;
                    if refusal.is_none() {
                        log::warn!(
                            "{}; this rank tries again until FLEXRING_CONNECT_TIMEOUT_MS is over",
                            error.message()
                        );
                    }
                    *refusal = Some(error.message().to_owned());
                }
                Err(ConnectError::Refused(error)) => refusals.push(error),
                Err(last @ ConnectError::Fatal(_)) => return Err(last),
            }
        }
        match refusals.into_iter().next() {
            // A unique id contains loopback addresses, which lead to other coordinators on other nodes. The
            // id is wrong only if all addresses do.
            Some(error) if causes.is_empty() => Err(ConnectError::Refused(error)),
            Some(error) => Err(ConnectError::Retry(format!("{}, {}", causes.join(", "), error.message()))),
            None if is_unreachable => Err(ConnectError::Unreachable(causes.join(", "))),
            None => Err(ConnectError::Retry(causes.join(", "))),
        }
    }

    /// Whether rank 0 may begin to listen later than this rank calls. A unique id has a coordinator from the
    /// beginning. A rank that joins only to report its failure does not wait: a coordinator that refuses it
    /// has the report.
    fn waits_for_rank_0(&self) -> bool {
        matches!(self.target, CoordinatorTarget::Remote(RendezvousPoint::Address { .. }))
            && self.header.purpose == Purpose::Join
            && self.params.failure.is_none()
    }

    /// What the failure of the attempt with this number means to a rank that began to join at `begun`. If the
    /// rank has failed in it before, the coordinator is that of the earlier attempt, and the rank waits for
    /// the next one.
    fn failure_of_attempt(&self, number: Option<u64>, error: ConnectError, begun: Instant) -> ConnectError {
        // A unique id has one attempt, whose error is final.
        let CoordinatorTarget::Remote(RendezvousPoint::Address { .. }) = self.target else {
            return error;
        };
        let Some(number) = number else {
            return error;
        };
        if !failed_rendezvous::has_failed_before(self.header.rank, number, begun) {
            failed_rendezvous::record_failure(self.header.rank, number);
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

    /// Tries one address, at which a process may take `longest_silence` for its first answer. Sets `number`
    /// to the number of the attempt that the coordinator serves, as soon as it is known.
    fn try_address(
        &self,
        address: SocketAddr,
        longest_silence: Duration,
        secret: &JobSecret,
        number: &mut Option<u64>,
        former: &mut CoordinatorHandover<'_>,
    ) -> Attempt<(FramedStream, CoordinatorAnswer)> {
        let retry = |cause: String| ConnectError::Retry(format!("{address}: {cause}"));
        let connected = self.connect(address, former)?;
        // Rank 0 may have ended because of another rank's death, which the former coordinator has reported.
        self.check(former)?;
        let stream = connected.map_err(|cause| match (self.target, cause.kind()) {
            // It has listened before its address became known. Final only if all addresses refuse.
            (CoordinatorTarget::Successor(_), io::ErrorKind::ConnectionRefused) => {
                let message = format!(
                    "rank 0 died before all ranks joined: it was to take the world over at {address} ({cause})"
                );
                ConnectError::Refused(Error::peer_lost(message))
            }
            _ if is_on_this_node(address.ip()) => retry(cause.to_string()),
            _ => ConnectError::Unreachable(format!("{address}: {cause}")),
        })?;
        reach(FaultPoint::BootstrapConnected);
        let connection = FramedStream::new(stream, false).map_err(|cause| retry(cause.to_string()))?;
        let until = [self.deadline, self.deadline + GRACE];
        let mut attempt =
            JoinAttempt::new(connection, secret, self.source.job(), self.header, self.params, until)
                .map_err(ConnectError::Fatal)?;
        attempt.limit_silence(longest_silence);
        reach(FaultPoint::BootstrapSentHello);
        loop {
            if let Err(own) = self.fault.check_waiting() {
                attempt.give_up(&own.clone().of_rank(self.header.rank));
                return Err(ConnectError::Fatal(own));
            }
            if let Err(root_cause) = former.check() {
                attempt.give_up(&root_cause);
                return Err(ConnectError::Fatal(root_cause));
            }
            let advanced = attempt.advance(number);
            // Rank 0 passes on what the former coordinator finds out until the new world is complete.
            if attempt.is_acknowledged() && self.header.rank != 0 {
                former.leave();
            }
            let (answer, end) = advanced.map_err(|error| match error {
                ConnectError::Retry(cause) => retry(cause),
                other => other,
            })?;
            if let Some(answer) = answer {
                return Ok((attempt.into_connection(), answer));
            }
            match end {
                // A coordinator that acknowledged a rank sends a reason before it closes, unless its process
                // dies.
                Some(cause) if attempt.is_acknowledged() => {
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
                None if Instant::now() >= attempt.until() => {
                    return Err(retry("the process that listens there does not answer".to_owned()));
                }
                None => drop(self.sleep(Some(attempt.poll_fd()), attempt.until(), former)),
            }
        }
    }

    /// Connects to an address. The outer error is that of this rank's world, the inner one that of the
    /// connection.
    fn connect(
        &self,
        address: SocketAddr,
        former: &mut CoordinatorHandover<'_>,
    ) -> Attempt<io::Result<TcpStream>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let until = Instant::now() + left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
        let stream = match start_connecting(address) {
            Ok(stream) => stream,
            Err(cause) => return Ok(Err(cause)),
        };
        loop {
            self.check(former)?;
            if self.sleep(Some(PollFd::new(&stream, PollFlags::OUT)), until, former) {
                return Ok(check_connected(&stream).map(|()| stream));
            }
            if Instant::now() >= until {
                return Ok(Err(io::ErrorKind::TimedOut.into()));
            }
        }
    }

    /// Fails if this rank need not wait any longer.
    fn check(&self, former: &mut CoordinatorHandover<'_>) -> Attempt<()> {
        self.fault.check_waiting().and_then(|()| former.check()).map_err(ConnectError::Fatal)
    }

    /// Sleeps until `polled` is ready, a [`check`](Self::check) is due, or `until`. Whether `polled` is
    /// ready.
    fn sleep(&self, polled: Option<PollFd<'_>>, until: Instant, former: &CoordinatorHandover<'_>) -> bool {
        let watch = self.fault.watch().ok();
        let mut fds: Vec<PollFd<'_>> = watch.iter().map(|watch| PollFd::new(watch, PollFlags::IN)).collect();
        fds.extend(former.poll_fd());
        let others = fds.len();
        fds.extend(polled);
        // Without a descriptor the fault does not end the sleep.
        let longest = if watch.is_some() { longest_sleep() } else { longest_sleep().min(UNWATCHED_SLEEP) };
        let left = until.saturating_duration_since(Instant::now()).min(longest);
        // An early wake-up is harmless: every caller checks the clock.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        fds[others..].iter().any(|fd| !fd.revents().is_empty())
    }
}

/// Whether an address is one of this node, so that no network is on the way to it.
fn is_on_this_node(ip: IpAddr) -> bool {
    descriptor::udp_socket((ip, 0).into()).is_ok()
}
