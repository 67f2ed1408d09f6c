//! A rank's control connection to its coordinator, from joining to leaving.
//!
//! Owns joining, the exchange of data among ranks over the coordinator, and the handle to the thread that
//! sends heartbeats and receives root causes (`control_thread`). Must not know what a call does: the executor
//! writes a [`CallStateCell`] and reports failures.
//!
//! A failure of one world raises the same [`Fault`] on all its ranks and does not affect other worlds. The
//! ranks of a world can open further ones over its connections (`open_subworld`). The socket and the thread
//! last until the last of these worlds.

use super::call_state::{CallState, CallStateCell};
use super::connect::{Joined, Joiner};
use super::control_state::{AwaitedExchange, Shared};
use super::control_thread::ControlThread;
use super::coordinator::Coordinator;
use super::coordinator_ports::{self, CoordinatorControl};
use super::coordinator_target::CoordinatorTarget;
use super::framed_stream::ControlRoute;
use super::heartbeat::seconds;
use super::join_attempt::report_failure;
use super::launcher::{Identity, RendezvousPoint};
use super::listen::{self, ListenAddress};
use super::listening_process::listening_process;
use super::pending_ids;
use super::process::Process;
use super::process_exit::EXIT_LIMIT;
use super::protocol::{
    HelloHeader, HelloParams, Purpose, ToCoordinator, VERSION, decode, encode_value, part_limit,
};
use super::secret::{JobSecret, SecretSource};
use super::shrink::CallsMade;
use crate::call::Call;
use crate::config::{Config, Switch};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::process::{CreatorProcess, spawn};
use crate::rank::Rank;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the process of the coordinator stays after a rendezvous has failed, so that ranks that join late
/// get the cause.
const LINGER: Duration = Duration::from_secs(5);
/// How long it stays before it says why.
const QUIET_LINGER: Duration = Duration::from_millis(200);
const LINGER_PAUSE: Duration = Duration::from_millis(10);
/// How long a report waits for the root cause.
const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How much longer than the coordinator a rank waits for an exchange, so that it receives the list of missing
/// ranks.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// How and why a rank ends its world.
#[derive(Clone, Copy, Debug)]
pub enum Abort<'a> {
    /// At once, for this reason.
    AtOnce(&'a str),
    /// For this reason, by a process that is about to end: the coordinator has the message when the abort
    /// returns, after a second at most.
    BeforeExit(&'a str),
    /// Because the process is about to end, otherwise as `BeforeExit`. The cause is a verb phrase, which the
    /// errors of the other ranks contain.
    OnExit(&'a str),
}

impl Abort<'_> {
    /// The error of the rank that aborts.
    pub(crate) fn error_of(self, rank: Rank) -> Error {
        match self {
            Self::AtOnce(reason) | Self::BeforeExit(reason) => Error::aborted(reason).of_rank(rank),
            Self::OnExit(cause) => Error::peer_lost(format!("rank {rank} {cause}")),
        }
    }
}

/// One rank's membership of its world.
#[derive(Debug)]
pub struct ControlConnection {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) timeout: Duration,
    pub(super) secret: JobSecret,
    pub(super) shared: Arc<Shared>,
    /// Number of the last exchange. Locked during an exchange, so that exchanges keep their order.
    pub(super) exchanges: Mutex<u64>,
    /// By rank of this world, the ranks in the world that the connection was made for.
    pub(super) first_ranks: Vec<Rank>,
    pub(super) service: Arc<ControlService>,
}

/// What the worlds of one connection share, and the last of them ends.
#[derive(Debug)]
pub(super) struct ControlService {
    pub(super) creator: CreatorProcess,
    /// This rank in the world that the connection was made for, the secret of that world, and its ranks whose
    /// process runs the coordinator.
    pub(super) first: FirstWorld,
    route: Option<ControlRoute>,
    thread: Option<JoinHandle<()>>,
    /// The coordinator, if this is rank 0 of a rendezvous at an address, or has taken the world over from the
    /// process that created the unique id. Dropped last, because the other ranks may still need it.
    _coordinator: Option<Coordinator>,
}

/// The world that a connection was made for.
#[derive(Debug)]
pub(super) struct FirstWorld {
    pub(super) rank: Rank,
    pub(super) secret: JobSecret,
    pub(super) host_ranks: Vec<Rank>,
}

impl Drop for ControlService {
    fn drop(&mut self) {
        // A forked child has no copy of the thread.
        if let Some(thread) = self.thread.take().filter(|_| self.creator.is_current())
            && thread.join().is_err()
        {
            log::error!("a control connection's thread panicked");
        }
    }
}

impl ControlConnection {
    /// Joins the world, and returns when all ranks have joined. Rank 0 of a rendezvous at an address also
    /// runs the coordinator. `fault` is raised when this world fails.
    ///
    /// # Errors
    /// `Rendezvous` if the ranks do not find each other within `connect_timeout`; `Disagreement` if they
    /// differ in release, world size or settings; `PeerLost` if a rank dies meanwhile; `System` if a socket
    /// or thread is unavailable.
    pub fn join(identity: &Identity, config: &Config, fault: Arc<Fault>) -> Result<Self> {
        Self::join_unless(None, identity, config, fault)
    }

    /// Fails the rendezvous on all ranks, because this one cannot take part: they would wait for it until
    /// their deadline. Returns the error. `config` is what is known of the settings. Takes at most 5 s if the
    /// coordinator does not answer.
    pub fn decline(identity: &Identity, config: &Config, error: Error) -> Error {
        if identity.world > 1 {
            log::error!("rank {}: {error}", identity.rank);
            let config = Config { connect_timeout: config.connect_timeout.min(LINGER), ..config.clone() };
            // The others wait until their deadline if they cannot be reached.
            let _ = Self::join_unless(Some(error.clone()), identity, &config, Arc::new(Fault::new()));
        }
        error
    }

    /// [`join`](Self::join), or fails the rendezvous for the reason `failure`.
    fn join_unless(
        failure: Option<Error>,
        identity: &Identity,
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<Self> {
        let deadline = Instant::now() + config.connect_timeout;
        reach(FaultPoint::BootstrapBegins);
        let started = start_coordinator(identity, config, deadline, &fault).map_err(|error| {
            // A secret that cannot be read. Without it this rank is refused, of which the others hear.
            if failure.is_some() || error.kind() != ErrorKind::InvalidSetting {
                return error;
            }
            let config = Config { secret: None, secret_file: None, tls: Switch(false), ..config.clone() };
            Self::decline(identity, &config, error)
        });
        let (source, coordinator) = started?;
        let header = HelloHeader {
            version: VERSION.into(),
            rank: identity.rank,
            world: identity.world,
            process: Process::current(),
            purpose: Purpose::Join,
        };
        let is_remote = matches!(identity.rendezvous, RendezvousPoint::Id(_));
        let own: &[SocketAddr] = coordinator.as_ref().map_or(&[], Coordinator::addresses);
        let params = HelloParams {
            settings: config.shared(),
            join_timeout: config.connect_timeout,
            exchange_timeout: config.connect_timeout,
            heartbeat: config.heartbeat,
            successor: if is_remote { own.to_vec() } else { Vec::new() },
            failure,
        };
        let target = if own.is_empty() || is_remote {
            CoordinatorTarget::Remote(&identity.rendezvous)
        } else {
            CoordinatorTarget::Local(own)
        };
        let successor = coordinator.as_ref().filter(|_| is_remote).map(|own| &**own.control());
        let joiner = Joiner {
            target: &target,
            source: &source,
            header: &header,
            params: &params,
            deadline,
            fault: &fault,
        };
        let joined = joiner.join(successor).inspect_err(|error| {
            // The ranks that have joined learn why this one, whose coordinator ends now, has not.
            if let Some(own) = &coordinator {
                own.control().fail(error.clone().of_rank(identity.rank));
            }
            if error.kind() != ErrorKind::Aborted {
                let created = || pending_ids::created_here(source.job())?.upgrade();
                let control = coordinator.as_ref().map(|own| Arc::clone(own.control())).or_else(created);
                control.inspect(|control| linger(control, error, &fault));
            }
        });
        let Joined { mut stream, host_process, host_ranks, secret } = joined?;
        reach(FaultPoint::BootstrapWelcomed);
        let shared =
            Shared::new(identity.rank, fault).inspect_err(|error| report_failure(&mut stream, error))?;
        let shared = Arc::new(shared);
        let route = stream.route();
        // A coordinator in this process ends with it.
        if !host_ranks.contains(&identity.rank)
            && let Err(cause) = stream.start_relay()
        {
            log::debug!("no relay holds the control connection: {cause}");
        }
        let builder = std::thread::Builder::new().name("flexring-ctrl".to_owned());
        // The thread gets the connection once it runs: if it cannot be started, the others learn why.
        let (start, started) = mpsc::channel::<ControlThread>();
        let body = move || started.recv().map_or((), ControlThread::run);
        let thread = spawn(builder, body)
            .map_err(|cause| Error::io("cannot start the control connection's thread", cause))
            .inspect_err(|error| report_failure(&mut stream, error))?;
        let control_thread = ControlThread::new(Arc::clone(&shared), stream, host_process, config.heartbeat);
        // The thread waits for it.
        let _ = start.send(control_thread);
        reach(FaultPoint::ControlThreadStarted);
        Ok(Self {
            rank: identity.rank,
            world: identity.world,
            timeout: config.connect_timeout,
            secret: secret.clone(),
            shared,
            exchanges: Mutex::new(0),
            first_ranks: (0..identity.world).collect(),
            service: Arc::new(ControlService {
                creator: CreatorProcess::current(),
                first: FirstWorld { rank: identity.rank, secret, host_ranks },
                route,
                thread: Some(thread),
                _coordinator: coordinator,
            }),
        })
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks in the world.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// The addresses of the connection that this one uses, if they are known.
    #[must_use]
    pub fn route(&self) -> Option<ControlRoute> {
        self.service.route
    }

    /// The secret that the ranks of this world share, for deriving the keys of links.
    #[must_use]
    pub fn secret(&self) -> &JobSecret {
        &self.secret
    }

    /// The cell in which the executor records the call it is in. Heartbeats send its content to the
    /// coordinator.
    #[must_use]
    pub fn call_state(&self) -> &Arc<CallStateCell> {
        &self.shared.call_state
    }

    /// Records that this rank enters a call, for heartbeats. Only the executing thread may call this and
    /// [`CallStateCell::leave`].
    ///
    /// # Errors
    /// `PeerLost` if a rank has left without this call.
    pub fn enter_call(&self, call: &Call) -> Result<()> {
        self.shared.enter_call(call)
    }

    /// The rank that has finished fewest calls among those that have left.
    #[cfg(feature = "cuda")]
    pub fn leaver(&self) -> Option<Rank> {
        self.shared.departure.leaver()
    }

    /// Gathers every rank's `mine` on every rank, in rank order. `label` names the data in messages. All
    /// ranks must make these calls in the same order. With empty data it is a barrier.
    ///
    /// # Errors
    /// `InvalidArgument` if `mine` is longer than 64 KiB and than 8 MiB divided by the number of ranks;
    /// `Timeout`, naming the missing ranks, after `connect_timeout`; `PeerLost` if the coordinator's process
    /// has left; or the error that this world has already failed with.
    pub fn all_gather(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let limit = part_limit(self.world);
        reach(FaultPoint::ExchangeBegins);
        if mine.len() > limit {
            return Err(Error::invalid_argument(format!(
                "cannot exchange {label}: {} bytes are more than the {limit} that each of {} ranks may give",
                mine.len(),
                self.world
            )));
        }
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.fault.check()?;
        *exchanges += 1;
        let expected = *exchanges;
        let gathering = AwaitedExchange { number: expected, world: self.world, parts: Vec::new() };
        self.shared.state().gathering = Some(gathering);
        self.shared.send(ToCoordinator::Gather {
            number: expected,
            label: label.into(),
            part: mine.to_vec(),
        });
        let mut parts = None;
        self.shared.wait(self.timeout + GRACE, |state| {
            parts = state.take_gathered();
            parts.is_some() || state.root_cause.is_some() || state.ended
        });
        reach(FaultPoint::ExchangeEnds);
        match parts {
            Some(parts) => Ok(parts),
            None => {
                self.shared.fault.check()?;
                if self.shared.state().ended {
                    return Err(self.shared.coordinator_has_left(&format!("cannot exchange {label}")));
                }
                Err(Error::timeout(format!(
                    "the coordinator did not answer an exchange of {label} within {}",
                    seconds(self.timeout)
                )))
            }
        }
    }

    /// Gathers every rank's value on every rank, as [`all_gather`](Self::all_gather) gathers bytes.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather); `Disagreement`, naming the rank, if one sends something
    /// else.
    pub(crate) fn gather_values<T>(&self, label: &str, mine: &T) -> Result<Vec<T>>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        let parts = self.all_gather(label, &encode_value(mine)?)?;
        let value =
            |(rank, part): (Rank, &Vec<u8>)| decode(part).ok_or_else(|| Self::unreadable(label, rank));
        parts.iter().enumerate().map(value).collect()
    }

    /// The error for a rank whose part of the exchange of `label` makes no sense. It is the same on all
    /// ranks.
    pub(crate) fn unreadable(label: &str, rank: Rank) -> Error {
        Error::disagreement(format!(
            "rank {rank} sent {label} that the other ranks cannot read: do all ranks run the same build of flexring?"
        ))
    }

    /// Reports that this rank failed, while it is still in the call or joins, and returns the error that
    /// all ranks get: the coordinator's root cause, which takes dead and absent ranks into account, or
    /// `error` with this rank if none arrives within a second. Raises the fault.
    pub fn report(&self, error: Error) -> Error {
        // The thread that enters calls does not write now, so the read cannot fail.
        let state = self.shared.call_state.read();
        self.shared.send(ToCoordinator::Report {
            error: error.clone(),
            suspect: error.suspect(),
            state: state.unwrap_or(CallState::Idle { finished: 0 }),
        });
        let mut root_cause = None;
        let mut is_held = false;
        self.shared.wait(ROOT_CAUSE_TIMEOUT, |state| {
            root_cause.clone_from(&state.root_cause);
            is_held = state.is_held;
            is_held || root_cause.is_some() || state.ended
        });
        if is_held && root_cause.is_none() {
            self.shared.wait(EXIT_LIMIT + ROOT_CAUSE_TIMEOUT, |state| {
                root_cause.clone_from(&state.root_cause);
                root_cause.is_some() || state.ended
            });
        }
        let own = || error.of_rank(self.rank);
        self.shared.fault.raise(root_cause.unwrap_or_else(own))
    }

    /// How many calls this rank has finished. Only between two calls.
    #[must_use]
    pub fn calls_made(&self) -> CallsMade {
        let has_failed = self.shared.fault.check().is_err();
        let last = self.shared.call_state.read_host().map_or(0, |state| state.finished());
        // The last one may be the call that failed.
        CallsMade { finished: last.saturating_sub(u64::from(has_failed)), has_failed }
    }

    /// Ends this world on all ranks, from any thread.
    pub fn abort(&self, abort: Abort<'_>) {
        let message = match abort {
            Abort::AtOnce(reason) | Abort::BeforeExit(reason) => {
                ToCoordinator::Abort { reason: reason.into() }
            }
            Abort::OnExit(cause) => ToCoordinator::Exit { cause: cause.into() },
        };
        if matches!(abort, Abort::AtOnce(_)) {
            self.shared.fault.raise(abort.error_of(self.rank));
            self.shared.send(message);
        } else if self.shared.fault.check().is_ok() {
            self.shared.send(message);
            // Once the fault is raised, a wait ends early.
            self.shared.wait(ROOT_CAUSE_TIMEOUT, |state| state.root_cause.is_some() || state.ended);
            self.shared.fault.raise(abort.error_of(self.rank));
        }
    }

    /// Tells the other ranks that this one makes no more calls, without waiting: dropping does the rest.
    /// Links are closed afterwards, so that a rank which still needs one learns why it was closed.
    pub fn begin_leaving(&self) {
        if self.service.creator.is_current() {
            self.shared.begin_leaving();
        }
    }

    /// Leaves the world, as dropping does. Takes at most a second.
    #[cfg(test)]
    pub fn leave(self) {
        drop(self);
    }
}

impl Drop for ControlConnection {
    fn drop(&mut self) {
        if self.service.creator.is_current() {
            self.shared.leave();
        }
        reach(FaultPoint::LeaveEnds);
    }
}

/// Waits until the coordinator of a rendezvous that has failed with `error` has sent it to all ranks, for at
/// most [`LINGER`], or until the program wants its thread back.
fn linger(control: &CoordinatorControl, error: &Error, fault: &Fault) {
    let begun = Instant::now();
    let mut is_said = false;
    while !control.has_ended() && begun.elapsed() < LINGER && fault.check_waiting().is_ok() {
        if !is_said && begun.elapsed() >= QUIET_LINGER {
            log::error!(
                "{error}; this process stays for up to {}, until the other ranks have got this error",
                seconds(LINGER)
            );
            is_said = true;
        }
        std::thread::sleep(LINGER_PAUSE);
    }
}

/// The secret of the job, and the coordinator that this rank runs. Rank 0 of a rendezvous at an address
/// serves it; rank 0 of a unique id from another process takes the world over once all ranks have joined.
fn start_coordinator(
    identity: &Identity,
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<(SecretSource, Option<Coordinator>)> {
    let Identity { rank, world, rendezvous, token, one_node, .. } = identity;
    let (source, node_secret) = match rendezvous {
        RendezvousPoint::Address { .. } if *world == 1 => (SecretSource::of_one_rank(config, *token)?, None),
        _ => SecretSource::of_job(config, rendezvous, *token, *one_node, *rank == 0)?,
    };
    let coordinator = match rendezvous {
        _ if *rank != 0 => None,
        RendezvousPoint::Address { host, port, further_ports } => {
            let owner = |addresses: &[SocketAddr]| listening_process(addresses, &source, config, fault);
            let (listeners, node_secret) = match coordinator_ports::take_over(host, *port) {
                Some(listeners) => (listeners, listen::hand_out(host, *port, node_secret, fault, || None)?),
                None => {
                    let at = ListenAddress { host, port: *port, further_ports };
                    listen::listen(at, config, node_secret, deadline, fault, owner)?
                }
            };
            listen::warn_of_strangers(&listeners, &source);
            let listening = listen::addresses_of(&listeners)?;
            let location = format!("{host} port {}", listening.first().map_or(*port, SocketAddr::port));
            let coordinator = Coordinator::start(&source, listeners, node_secret, location)?;
            if *port != 0 {
                coordinator_ports::register(host, *port, coordinator.control());
            }
            reach(FaultPoint::CoordinatorListens);
            Some(coordinator)
        }
        RendezvousPoint::Id(_) if pending_ids::created_here(source.job()).is_some() => None,
        RendezvousPoint::Id(_) => Coordinator::successor(&source, config)
            .inspect_err(|error| {
                log::warn!(
                    "the process that created the unique id must live until all ranks have left: {error}"
                );
            })
            .ok(),
    };
    Ok((source, coordinator))
}
