//! The control: one rank's control connection, from the meeting to the goodbye.
//!
//! Owns the thread that says "I live" and listens for verdicts, and the exchange of cards among ranks. Must
//! not know what a call does: the executor writes a [`CallStateCell`] and reports what fails.
//!
//! Whatever ends one world ends as the same [`Fault`] on all its ranks, and touches no other world.

use super::call_state::{CallState, CallStateCell};
use super::connect::{self, CoordinatorTarget};
use super::coordinator::Coordinator;
use super::framed_stream::FramedStream;
use super::heartbeat::{HeartbeatMonitor, seconds};
use super::launcher::{Identity, RendezvousPoint};
use super::process::Process;
use super::protocol::{
    FRAME_LIMIT, HelloHeader, HelloParams, ToCoordinator, ToRank, VERSION, decode, encode,
};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::rank::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a report waits for the verdict on it.
const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a goodbye may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(800);
/// How much longer than the coordinator a rank waits for an exchange, so that it hears who was missing.
const GRACE: Duration = Duration::from_secs(2);

/// A rank's place among its world.
#[derive(Debug)]
pub struct ControlConnection {
    rank: Rank,
    world: usize,
    timeout: Duration,
    shared: Arc<Shared>,
    /// The number of the last exchange; held while one is under way, so that they keep their order.
    exchanges: Mutex<u64>,
    thread: Option<JoinHandle<()>>,
    /// Rank 0's, if the ranks meet at an address. Dropped last: the others may still need it.
    _coordinator: Option<Coordinator>,
}

/// What the control connection shares with its thread.
#[derive(Debug)]
struct Shared {
    fault: Arc<Fault>,
    call_state: Arc<CallStateCell>,
    state: Mutex<SharedState>,
    changed: Condvar,
    wake: WakeFd,
}

/// What lies between the threads of a rank and its control connection's thread.
#[derive(Debug, Default)]
struct SharedState {
    send_queue: Vec<ToCoordinator>,
    gathered: Option<(u64, Vec<Vec<u8>>)>,
    root_cause: Option<Error>,
    leaving: bool,
    /// The thread has ended or is about to: nothing more comes or goes.
    ended: bool,
}

impl ControlConnection {
    /// Meets the other ranks and begins to live: when this returns, all have come. As rank 0 of a meeting at
    /// an address, it is the host. `fault` is raised when this world fails.
    ///
    /// # Errors
    /// `Rendezvous` if the ranks do not find each other within `connect_timeout`; `Disagreement` if they
    /// differ in release, world size or settings; `PeerLost` if one dies meanwhile; `System`.
    pub fn join(identity: &Identity, config: &Config, fault: Arc<Fault>) -> Result<Self> {
        let deadline = Instant::now() + config.connect_timeout;
        let coordinator = match &identity.rendezvous {
            RendezvousPoint::Address { host, port } if identity.rank == 0 => {
                let listeners = connect::listen(host, *port)?;
                Some(Coordinator::start(identity.token, listeners, format!("{host} port {port}"))?)
            }
            RendezvousPoint::Address { .. } | RendezvousPoint::Id(_) => None,
        };
        let target =
            coordinator.as_ref().map_or(CoordinatorTarget::Remote(&identity.rendezvous), |coordinator| {
                CoordinatorTarget::Local(coordinator.addresses())
            });
        let header = HelloHeader {
            version: VERSION.to_owned(),
            token: identity.token,
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
        let (connection, host) = connect::join(&target, &header, &params, deadline, &fault)?;
        let shared = Arc::new(Shared {
            fault,
            call_state: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: WakeFd::new()?,
        });
        let control_thread = ControlThread {
            shared: shared.clone(),
            connection,
            host,
            heartbeat: config.heartbeat,
            state: CallState::Idle { finished: 0 },
            closing: false,
        };
        let thread = std::thread::Builder::new()
            .name("flexring-control".to_owned())
            .spawn(move || control_thread.run())
            .map_err(|cause| Error::io("cannot start the control connection's thread", cause))?;
        Ok(Self {
            rank: identity.rank,
            world: identity.world,
            timeout: config.connect_timeout,
            shared,
            exchanges: Mutex::new(0),
            thread: Some(thread),
            _coordinator: coordinator,
        })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// Where the executor says which call it is in; heartbeats tell the others.
    #[must_use]
    pub fn call_state(&self) -> &Arc<CallStateCell> {
        &self.shared.call_state
    }

    /// Gives every rank's `mine` to every rank, in the order of ranks; `what` it is, for messages. All ranks
    /// must call this in the same order. With nothing to give it is a barrier.
    ///
    /// # Errors
    /// `InvalidArgument` if `mine` is longer than 8 MiB divided by the ranks; `Timeout`, naming the ranks
    /// that did not come, after `connect_timeout`; or what else has failed this world.
    pub fn all_gather(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Half the limit is for the parts, and more than enough for what lies around them.
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
                "an exchange of {label} among {} ranks gave {} parts",
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

    /// Tells the world that this rank's call failed, while it still stands in that call, and gives back what
    /// counts for all: a verdict of the coordinator, which knows of deaths and of who has not called, or `error` if
    /// none comes within a second. `suspect` is the rank that `error` blames, if any. Raises the fault.
    pub fn report(&self, error: Error, suspect: Option<Rank>) -> Error {
        // Seen from the thread that enters calls, this is always known.
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

    /// Ends this world for everybody, from any thread and at once: raises the fault here, and lets the coordinator
    /// tell the others.
    pub fn abort(&self, reason: &str) {
        let message = format!("rank {}: {reason}", self.rank);
        self.shared.fault.raise(Error::aborted(message));
        self.shared.send(ToCoordinator::Abort { reason: reason.to_owned() });
    }

    /// Says goodbye, as dropping does. Takes a second at most.
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

    fn ring(&self) {
        self.wake.notify();
    }

    /// Lays something on the queue for the coordinator. Does not block.
    fn send(&self, message: ToCoordinator) {
        self.state().send_queue.push(message);
        self.wake.notify();
    }

    /// Waits until `done` says so, at most this long.
    fn wait(&self, patience: Duration, mut done: impl FnMut(&mut SharedState) -> bool) {
        let state = self.state();
        // Whether it was done or late is seen by what `done` has taken.
        let _ = self.changed.wait_timeout_while(state, patience, |state| !done(state));
    }
}

/// The control connection's thread.
struct ControlThread {
    shared: Arc<Shared>,
    connection: FramedStream,
    /// What the coordinator's process is called.
    host: String,
    heartbeat: Duration,
    /// Where this rank was last seen to stand.
    state: CallState,
    /// Whether the coordinator said that it may go away.
    closing: bool,
}

/// Why a connection is no more: "closed", or "has been silent for …".
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

    /// Until this rank leaves.
    fn run_until_leaving(&mut self) -> std::result::Result<(), ConnectionLost> {
        let mut monitor = HeartbeatMonitor::new(self.heartbeat);
        let mut last = Instant::now();
        let mut next_heartbeat = last;
        loop {
            let now = Instant::now();
            monitor.advance(now.saturating_duration_since(last));
            last = now;
            let leaving = self.take_send_queue();
            if leaving {
                self.shut_down();
                return Ok(());
            }
            // A coordinator that does not read is not told more; its silence will tell.
            if now >= next_heartbeat {
                if !self.connection.has_unsent() {
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

    /// Posts what lies on the queue. Whether this rank leaves.
    fn take_send_queue(&mut self) -> bool {
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
            Ok(bytes) => self.connection.enqueue(bytes),
            Err(error) => log::error!("a rank cannot speak to its coordinator: {error}"),
        }
    }

    fn send_heartbeat(&mut self) {
        let state = self.state();
        self.enqueue(&ToCoordinator::Heartbeat(state));
    }

    /// Where this rank stands; if that changes all the while, where it stood.
    fn state(&mut self) -> CallState {
        if let Some(state) = self.shared.call_state.read() {
            self.state = state;
        }
        self.state
    }

    fn flush(&mut self) -> std::result::Result<(), ConnectionLost> {
        self.connection.flush().map_err(|cause| ConnectionLost(format!("broke ({cause})")))
    }

    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::new(&self.connection, self.connection.poll_flags()),
        ];
        // An interrupted wait is over early, and the next one makes up for it.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        self.shared.wake.drain();
    }

    /// Reads what the coordinator says. Whether it said anything.
    fn receive(&mut self) -> std::result::Result<bool, ConnectionLost> {
        let received = self.connection.receive(FRAME_LIMIT);
        for frame in &received.frames {
            let Some(message) = decode::<ToRank>(frame) else {
                return Err(ConnectionLost("carried a frame that makes no sense".to_owned()));
            };
            self.on_message(message);
        }
        received.end.map_or(Ok(received.any), |cause| Err(ConnectionLost(cause)))
    }

    fn on_message(&mut self, message: ToRank) {
        match message {
            ToRank::RootCause(error) | ToRank::WrongJob(error) => {
                log::debug!("verdict: {error}");
                self.fail(error);
            }
            ToRank::Gathered { number, parts } => {
                self.shared.state().gathered = Some((number, parts));
                self.shared.changed.notify_all();
            }
            ToRank::RequestState => self.send_heartbeat(),
            ToRank::Closing => self.closing = true,
            ToRank::HelloAck | ToRank::Welcome { .. } | ToRank::HeartbeatAck => {}
        }
    }

    fn fail(&self, error: Error) {
        // The fault first: whoever waits at the queue looks at it next.
        self.shared.fault.raise(error.clone());
        self.shared.state().root_cause.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// The coordinator is gone, and with it the process that it lived in.
    fn on_coordinator_lost(&mut self, cause: &str) {
        if self.shared.state().root_cause.is_some() {
            return;
        }
        let doing = match self.state() {
            CallState::InCall(call) => format!("while this rank was in {call}"),
            CallState::Idle { .. } => "while this rank was in no call".to_owned(),
        };
        let message = format!("{} is gone: the control connection to it {cause} {doing}", self.host);
        self.fail(Error::peer_lost(message));
    }

    /// Says goodbye and waits until the coordinator hangs up, which it does when everybody it concerns has been told.
    fn shut_down(&mut self) {
        let until = Instant::now() + GOODBYE_TIMEOUT;
        let state = self.state();
        self.enqueue(&ToCoordinator::Goodbye(state));
        let mut finished = false;
        while Instant::now() < until {
            if self.flush().is_err() {
                return;
            }
            if !finished && !self.connection.has_unsent() {
                // Closing at once could make the system forget the goodbye if something unread has come.
                self.connection.shut_down_write();
                finished = true;
            }
            self.wait(until);
            if self.receive().is_err() {
                return;
            }
        }
        log::debug!("the coordinator did not answer a goodbye");
    }
}
