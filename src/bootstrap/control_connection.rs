//! A rank's control connection to its coordinator, from joining to leaving.
//!
//! Owns the thread that sends heartbeats and receives root causes, and the exchange of data among ranks over
//! the coordinator. Must not know what a call does: the executor writes a [`CallStateCell`] and reports
//! failures.
//!
//! A failure of one world raises the same [`Fault`] on all its ranks and does not affect other worlds.

use super::call_state::{CallState, CallStateCell};
use super::connect::{CoordinatorTarget, Joined, Joiner};
use super::coordinator::Coordinator;
use super::framed_stream::FramedStream;
use super::heartbeat::{HeartbeatMonitor, seconds};
use super::launcher::{Identity, RendezvousPoint};
use super::listen;
use super::process::Process;
use super::protocol::{
    FRAME_LIMIT, HelloHeader, HelloParams, ToCoordinator, ToRank, VERSION, decode, encode,
};
use super::secret::{JobSecret, SecretSource};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::longest_sleep;
use crate::process::spawn;
use crate::rank::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a report waits for the root cause.
const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long leaving may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(800);
/// How much longer than the coordinator a rank waits for an exchange, so that it receives the list of missing
/// ranks.
const GRACE: Duration = Duration::from_secs(2);

/// One rank's membership of its world.
#[derive(Debug)]
pub struct ControlConnection {
    rank: Rank,
    world: usize,
    timeout: Duration,
    secret: JobSecret,
    shared: Arc<Shared>,
    /// Number of the last exchange. Locked during an exchange, so that exchanges keep their order.
    exchanges: Mutex<u64>,
    thread: Option<JoinHandle<()>>,
    /// The coordinator, if this is rank 0 of a rendezvous at an address. Dropped last, because the other
    /// ranks may still need it.
    _coordinator: Option<Coordinator>,
}

/// State shared between the handle and the control connection's thread.
#[derive(Debug)]
struct Shared {
    fault: Arc<Fault>,
    call_state: Arc<CallStateCell>,
    state: Mutex<SharedState>,
    changed: Condvar,
    wake: WakeFd,
}

/// The part of the shared state that the mutex protects.
#[derive(Debug, Default)]
struct SharedState {
    send_queue: Vec<ToCoordinator>,
    gathered: Option<(u64, Vec<Vec<u8>>)>,
    root_cause: Option<Error>,
    leaving: bool,
    /// The thread has ended or is about to: no message is sent or received any more.
    ended: bool,
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
        let deadline = Instant::now() + config.connect_timeout;
        let (source, coordinator) = match &identity.rendezvous {
            RendezvousPoint::Id(id) => (SecretSource::of_id(config, id.job(), id.token())?, None),
            RendezvousPoint::Address { host, port } => {
                let is_rank_0 = identity.rank == 0;
                let (source, node_secret) = if identity.one_node && identity.world > 1 {
                    SecretSource::of_node(config, identity.token, *port, is_rank_0)?
                } else {
                    (SecretSource::of_settings(config, identity.token)?, None)
                };
                let coordinator = if is_rank_0 {
                    let (listeners, node_secret) = listen::listen(host, *port, config, node_secret)?;
                    listen::warn_of_strangers(&listeners, &source);
                    Some(Coordinator::start(&source, listeners, node_secret, format!("{host} port {port}"))?)
                } else {
                    None
                };
                (source, coordinator)
            }
        };
        let target =
            coordinator.as_ref().map_or(CoordinatorTarget::Remote(&identity.rendezvous), |coordinator| {
                CoordinatorTarget::Local(coordinator.addresses())
            });
        let header = HelloHeader {
            version: VERSION.to_owned(),
            rank: identity.rank,
            world: identity.world,
            process: Process::current(),
        };
        let params = HelloParams {
            settings: config.shared(),
            join_timeout: config.connect_timeout,
            exchange_timeout: config.connect_timeout,
            heartbeat: config.heartbeat,
        };
        let joiner = Joiner {
            target: &target,
            source: &source,
            header: &header,
            params: &params,
            deadline,
            fault: &fault,
        };
        let Joined { stream, host_process, secret } = joiner.join()?;
        let shared = Arc::new(Shared {
            fault,
            call_state: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: WakeFd::new()?,
        });
        let control_thread = ControlThread {
            shared: shared.clone(),
            stream,
            host_process,
            heartbeat: config.heartbeat,
            state: CallState::Idle { finished: 0 },
            closing: false,
        };
        let builder = std::thread::Builder::new().name("flexring-ctrl".to_owned());
        let thread = spawn(builder, move || control_thread.run())
            .map_err(|cause| Error::io("cannot start the control connection's thread", cause))?;
        Ok(Self {
            rank: identity.rank,
            world: identity.world,
            timeout: config.connect_timeout,
            secret,
            shared,
            exchanges: Mutex::new(0),
            thread: Some(thread),
            _coordinator: coordinator,
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

    /// Gathers every rank's `mine` on every rank, in rank order. `label` names the data in messages. All
    /// ranks must make these calls in the same order. With empty data it is a barrier.
    ///
    /// # Errors
    /// `InvalidArgument` if `mine` is longer than 8 MiB divided by the number of ranks; `Timeout`, naming the
    /// missing ranks, after `connect_timeout`; or the error that this world has already failed with.
    pub fn all_gather(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Half the limit is for the parts; the other half is more than enough for their framing.
        let limit = FRAME_LIMIT / 2 / self.world;
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
        self.shared.send(ToCoordinator::Gather {
            number: expected,
            label: label.to_owned(),
            part: mine.to_vec(),
        });
        let mut parts = None;
        self.shared.wait(self.timeout + GRACE, |state| {
            parts = state.gathered.take_if(|(number, _)| *number == expected).map(|(_, parts)| parts);
            parts.is_some() || state.root_cause.is_some() || state.ended
        });
        match parts {
            Some(parts) if parts.len() == self.world => Ok(parts),
            Some(parts) => Err(Error::internal(format!(
                "an exchange of {label} among {} ranks returned {} parts",
                self.world,
                parts.len()
            ))),
            None => {
                self.shared.fault.check()?;
                Err(Error::timeout(format!(
                    "the coordinator did not answer an exchange of {label} within {}",
                    seconds(self.timeout)
                )))
            }
        }
    }

    /// Reports that this rank's call failed, while the rank is still in that call, and returns the error that
    /// all ranks get: the coordinator's root cause, which takes dead and absent ranks into account, or
    /// `error` if none arrives within a second. `suspect` is the rank that `error` blames, if any. Raises the
    /// fault.
    pub fn report(&self, error: Error, suspect: Option<Rank>) -> Error {
        // The thread that enters calls does not write now, so the read cannot fail.
        let state = self.shared.call_state.read();
        self.shared.send(ToCoordinator::Report {
            error: error.clone(),
            suspect,
            state: state.unwrap_or(CallState::Idle { finished: 0 }),
        });
        let mut root_cause = None;
        self.shared.wait(ROOT_CAUSE_TIMEOUT, |state| {
            root_cause.clone_from(&state.root_cause);
            root_cause.is_some() || state.ended
        });
        self.shared.fault.raise(root_cause.unwrap_or(error))
    }

    /// Aborts this world, from any thread and at once: raises the fault here and lets the coordinator notify
    /// the other ranks.
    pub fn abort(&self, reason: &str) {
        let message = format!("rank {}: {reason}", self.rank);
        self.shared.fault.raise(Error::aborted(message));
        self.shared.send(ToCoordinator::Abort { reason: reason.to_owned() });
    }

    /// Leaves the world, as dropping does. Takes at most a second.
    pub fn leave(self) {
        drop(self);
    }
}

impl Drop for ControlConnection {
    fn drop(&mut self) {
        self.shared.state().leaving = true;
        self.shared.wake.notify();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the control connection's thread of rank {} panicked", self.rank);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message for the coordinator. Does not block.
    fn send(&self, message: ToCoordinator) {
        self.state().send_queue.push(message);
        self.wake.notify();
    }

    /// Waits until `done` returns true, at most for `timeout`, or until the program wants the thread back. Callers see from
    /// what `done` has taken, and from the fault, why the wait ended.
    fn wait(&self, timeout: Duration, mut done: impl FnMut(&mut SharedState) -> bool) {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let state = self.state();
            let slice = left.min(longest_sleep());
            let waited = self.changed.wait_timeout_while(state, slice, |state| !done(state));
            let (state, wait) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(state);
            if !wait.timed_out() || slice == left || self.fault.check_waiting().is_err() {
                return;
            }
        }
    }
}

/// The thread that serves the control connection.
struct ControlThread {
    shared: Arc<Shared>,
    stream: FramedStream,
    /// Description of the coordinator's process.
    host_process: String,
    heartbeat: Duration,
    /// The last known call state of this rank.
    state: CallState,
    /// Whether the coordinator announced that it may close the connection.
    closing: bool,
}

/// Why the connection ended: a verb phrase such as `closed` or `has been silent for 10 s`.
struct ConnectionLost(String);

impl ControlThread {
    fn run(mut self) {
        if let Err(ConnectionLost(cause)) = self.run_until_leaving()
            && !self.closing
        {
            self.on_coordinator_lost(&cause);
        }
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
    }

    /// Serves the connection until this rank leaves.
    fn run_until_leaving(&mut self) -> std::result::Result<(), ConnectionLost> {
        let mut monitor = HeartbeatMonitor::new(self.heartbeat);
        let mut last = Instant::now();
        let mut next_heartbeat = last;
        loop {
            let now = Instant::now();
            monitor.advance(now.saturating_duration_since(last));
            last = now;
            let leaving = self.send_queued();
            if leaving {
                self.shut_down();
                return Ok(());
            }
            // Skip the heartbeat while writes are pending; the timeout detects a stuck coordinator.
            if now >= next_heartbeat {
                if !self.stream.has_unsent() {
                    self.send_heartbeat();
                }
                next_heartbeat = now + self.heartbeat;
            }
            self.flush()?;
            self.wait(next_heartbeat);
            if self.receive()? {
                monitor.reset();
            }
            if let Some(silent) = monitor.expired() {
                return Err(ConnectionLost(format!("has been silent for {}", seconds(silent))));
            }
        }
    }

    /// Sends the queued messages. Whether this rank is leaving.
    fn send_queued(&mut self) -> bool {
        let (send_queue, leaving) = {
            let mut state = self.shared.state();
            (std::mem::take(&mut state.send_queue), state.leaving)
        };
        for message in &send_queue {
            self.enqueue(message);
        }
        leaving
    }

    fn enqueue(&mut self, message: &ToCoordinator) {
        match encode(message) {
            Ok(bytes) => self.stream.enqueue(bytes),
            Err(error) => log::error!("cannot encode a message to the coordinator: {error}"),
        }
    }

    fn send_heartbeat(&mut self) {
        let state = self.state();
        self.enqueue(&ToCoordinator::Heartbeat(state));
    }

    /// The call state of this rank, or the last known one if the executor changes it during the read.
    fn state(&mut self) -> CallState {
        if let Some(state) = self.shared.call_state.read() {
            self.state = state;
        }
        self.state
    }

    fn flush(&mut self) -> std::result::Result<(), ConnectionLost> {
        self.stream.flush().map_err(|cause| ConnectionLost(format!("broke ({cause})")))
    }

    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::new(&self.stream, self.stream.poll_flags()),
        ];
        // An interrupted wait ends early; the next one makes up for it.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        self.shared.wake.drain();
    }

    /// Handles received messages. Whether any bytes arrived.
    fn receive(&mut self) -> std::result::Result<bool, ConnectionLost> {
        let received = self.stream.receive(FRAME_LIMIT);
        for frame in &received.frames {
            let Some(message) = decode::<ToRank>(frame) else {
                return Err(ConnectionLost("carried an invalid frame".to_owned()));
            };
            self.on_message(message);
        }
        received.end.map_or(Ok(received.any), |cause| Err(ConnectionLost(cause)))
    }

    fn on_message(&mut self, message: ToRank) {
        match message {
            ToRank::RootCause(error) => {
                log::debug!("root cause: {error}");
                self.fail(error);
            }
            ToRank::Gathered { number, parts } => {
                self.shared.state().gathered = Some((number, parts));
                self.shared.changed.notify_all();
            }
            ToRank::RequestState => self.send_heartbeat(),
            ToRank::Closing => self.closing = true,
            ToRank::Refused(_)
            | ToRank::Challenge(_)
            | ToRank::HelloAck(_)
            | ToRank::Welcome { .. }
            | ToRank::HeartbeatAck => {}
        }
    }

    fn fail(&self, error: Error) {
        // Raise the fault first: threads that wait for the shared state check the fault next.
        self.shared.fault.raise(error.clone());
        self.shared.state().root_cause.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// The coordinator is gone, and with it the process it ran in.
    fn on_coordinator_lost(&mut self, cause: &str) {
        if self.shared.state().root_cause.is_some() {
            return;
        }
        let activity = match self.state() {
            CallState::InCall(call) => format!("while this rank was in {call}"),
            CallState::Idle { .. } => "while this rank was in no call".to_owned(),
        };
        let message =
            format!("{} is gone: the control connection to it {cause} {activity}", self.host_process);
        self.fail(Error::peer_lost(message));
    }

    /// Sends a goodbye and waits until the coordinator closes the connection. It does so once all ranks
    /// concerned are notified.
    fn shut_down(&mut self) {
        let until = Instant::now() + GOODBYE_TIMEOUT;
        let state = self.state();
        self.enqueue(&ToCoordinator::Goodbye(state));
        let mut finished = false;
        while Instant::now() < until {
            if self.flush().is_err() {
                return;
            }
            if !finished && !self.stream.has_unsent() {
                // Closing at once could discard the goodbye if received data is still unread.
                self.stream.shut_down_write();
                finished = true;
            }
            self.wait(until);
            if self.receive().is_err() {
                return;
            }
        }
        log::debug!("the coordinator did not close the connection after a goodbye");
    }
}
