//! The coordinator's thread: its listeners and connections.
//!
//! Owns every socket of one world's coordinator. The [`Rendezvous`] and then the [`FailureDetector`] decide
//! what is sent on them. Must not block on any of them: a silent, slow or malicious client delays no other
//! client.

use super::failure_detector::{DetectorAction, FailureDetector};
use super::framed_stream::FramedStream;
use super::process::Process;
use super::protocol::{Bytes, FRAME_LIMIT, HELLO_LIMIT, Hello, ToCoordinator, ToRank, decode, encode};
use super::rendezvous::{JoinOutcome, Rendezvous};
use crate::process::ClosedInChild;
use crate::rank::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a connection may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a rank may take to close its connection after the coordinator has sent everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long ranks that join late still get the rendezvous error, if no rank gave a timeout.
const LATE_JOIN_NOTICE: Duration = Duration::from_secs(60);
/// Maximum number of connections that have not sent a hello. Beyond it the oldest are dropped.
const MAX_UNAUTHENTICATED: usize = 4096;
/// Connections accepted per listener before existing clients are served again.
const ACCEPT_BATCH: usize = 64;
/// How long the listeners are ignored after the system ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The state of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    /// No hello has arrived yet.
    Unauthenticated { until: Instant },
    /// The connection belongs to this rank.
    Joined(Rank),
    /// All frames for the client are queued; `finished` once all are sent.
    Closing { until: Instant, finished: bool },
}

#[derive(Debug)]
struct Client {
    stream: FramedStream,
    state: ClientState,
}

#[expect(clippy::large_enum_variant, reason = "one per world")]
enum Phase {
    Rendezvous(Rendezvous),
    Monitoring(FailureDetector),
    /// The world is over; only queued frames must still be sent.
    Finished,
}

/// Identifies a connection. Ids count up in the order of acceptance.
type ClientId = u64;

/// The coordinator's thread.
pub(super) struct Server {
    wake: Arc<WakeFd>,
    abandoned: Arc<AtomicBool>,
    _closed_in_child: Vec<ClosedInChild>,
    listeners: Vec<TcpListener>,
    accept_resumes: Option<Instant>,
    clients: BTreeMap<ClientId, Client>,
    by_rank: BTreeMap<Rank, ClientId>,
    /// Connections that have ended. They stay open until all other clients are notified.
    ended: Vec<FramedStream>,
    next_id: ClientId,
    /// Ranks that received the rendezvous error, and when the rendezvous failed.
    notified: BTreeSet<Rank>,
    failed_at: Option<Instant>,
    phase: Phase,
}

impl Server {
    /// Serves `rendezvous` at `listeners`, which do not block. `wake` is notified when `abandoned` changes.
    pub(super) fn new(
        wake: Arc<WakeFd>,
        abandoned: Arc<AtomicBool>,
        listeners: Vec<TcpListener>,
        rendezvous: Rendezvous,
    ) -> Self {
        Self {
            wake,
            abandoned,
            _closed_in_child: listeners.iter().map(|listener| ClosedInChild::new(listener.as_fd())).collect(),
            listeners,
            accept_resumes: None,
            clients: BTreeMap::new(),
            by_rank: BTreeMap::new(),
            ended: Vec::new(),
            next_id: 0,
            notified: BTreeSet::new(),
            failed_at: None,
            phase: Phase::Rendezvous(rendezvous),
        }
    }

    /// Runs until there is no client left.
    pub(super) fn run(mut self) {
        while !(matches!(self.phase, Phase::Finished) && self.clients.is_empty()) {
            let (incoming, ready) = self.wait();
            let now = Instant::now();
            self.check_abandoned();
            if incoming {
                self.accept(now);
            }
            for id in ready {
                self.receive(id, now);
            }
            self.on_tick(now);
            self.apply_decisions(now);
            self.flush(now);
        }
        log::debug!("the coordinator has served its world");
    }

    /// Sleeps until an event. Returns whether connections can be accepted, and which clients are ready.
    fn wait(&self) -> (bool, Vec<ClientId>) {
        let now = Instant::now();
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let listening = if self.accept_resumes.is_none() { self.listeners.as_slice() } else { &[] };
        fds.extend(listening.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(
            self.clients.values().map(|client| PollFd::new(&client.stream, client.stream.poll_flags())),
        );
        let timeout =
            self.deadline().and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        // An interrupted wait ends early, and the next one makes up for it.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return (false, Vec::new());
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (listeners, connections) = fds[1..].split_at(listening.len());
        let ready =
            self.clients.keys().zip(connections).filter(|(_, fd)| is_ready(fd)).map(|(id, _)| *id).collect();
        (listeners.iter().any(is_ready), ready)
    }

    fn deadline(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Rendezvous(rendezvous) => self.late_join_deadline(rendezvous).or(rendezvous.deadline()),
            Phase::Monitoring(detector) => detector.deadline(),
            Phase::Finished => None,
        };
        let clients = self.clients.values().filter_map(|client| match client.state {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => Some(until),
            ClientState::Joined(_) => None,
        });
        clients.chain(phase).chain(self.accept_resumes).min()
    }

    /// Until when ranks that join late get the rendezvous error.
    fn late_join_deadline(&self, rendezvous: &Rendezvous) -> Option<Instant> {
        let failed_at = self.failed_at?;
        Some(rendezvous.deadline().unwrap_or(failed_at + LATE_JOIN_NOTICE))
    }

    fn check_abandoned(&mut self) {
        if !self.wake.drain() || !self.abandoned.load(Ordering::Acquire) {
            return;
        }
        if let Phase::Rendezvous(rendezvous) = &mut self.phase
            && rendezvous.root_cause().is_none()
        {
            rendezvous.cancel();
            if rendezvous.world().is_none() {
                // No rank has joined, so no rank needs the error.
                self.end();
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let mut out_of_descriptors = false;
        for listener in &self.listeners {
            for _ in 0..ACCEPT_BATCH {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        // Mostly out of descriptors. The listener stays readable, so polling it would spin.
                        log::debug!("the coordinator cannot accept a connection: {cause}");
                        self.accept_resumes = Some(now + ACCEPT_PAUSE);
                        out_of_descriptors = true;
                        break;
                    }
                };
                let stream = match FramedStream::new(stream, true) {
                    Ok(stream) => stream,
                    Err(cause) => {
                        log::debug!("the coordinator cannot use a connection: {cause}");
                        continue;
                    }
                };
                let state = ClientState::Unauthenticated { until: now + HELLO_TIMEOUT };
                self.clients.insert(self.next_id, Client { stream, state });
                self.next_id += 1;
            }
        }
        let unauthenticated: Vec<ClientId> = self
            .clients
            .iter()
            .filter(|(_, client)| matches!(client.state, ClientState::Unauthenticated { .. }))
            .map(|(id, _)| *id)
            .collect();
        let excess = unauthenticated.len().saturating_sub(MAX_UNAUTHENTICATED);
        let excess = excess.max(usize::from(out_of_descriptors)).min(unauthenticated.len());
        for id in &unauthenticated[..excess] {
            self.clients.remove(id);
        }
    }

    fn receive(&mut self, id: ClientId, now: Instant) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let limit = match client.state {
            ClientState::Unauthenticated { .. } => HELLO_LIMIT,
            ClientState::Joined(_) | ClientState::Closing { .. } => FRAME_LIMIT,
        };
        let received = client.stream.receive(limit);
        for frame in received.frames {
            // The state may change from one frame to the next.
            match self.clients.get(&id).map(|client| client.state) {
                Some(ClientState::Unauthenticated { .. }) => self.on_hello(id, &frame, now),
                Some(ClientState::Joined(rank)) => self.on_frame(rank, &frame, now),
                Some(ClientState::Closing { .. }) | None => {}
            }
        }
        if let Some(cause) = received.end
            && let Some(Client { stream, state }) = self.clients.remove(&id)
        {
            self.ended.push(stream);
            if let ClientState::Joined(rank) = state {
                self.on_disconnect(rank, &cause);
            }
        }
    }

    /// Handles the first frame of an unauthenticated connection.
    fn on_hello(&mut self, id: ClientId, frame: &[u8], now: Instant) {
        let (Phase::Rendezvous(rendezvous), Some(hello)) = (&mut self.phase, Hello::decode(frame)) else {
            self.clients.remove(&id);
            return;
        };
        let rank = hello.header.rank;
        let (state, answer) = match rendezvous.join(hello, now) {
            outcome @ (JoinOutcome::Waiting | JoinOutcome::Complete) => {
                self.by_rank.insert(rank, id);
                if outcome == JoinOutcome::Complete {
                    self.start_monitoring(now);
                }
                (ClientState::Joined(rank), ToRank::HelloAck)
            }
            JoinOutcome::WrongJob(error) => (closing_at(now), ToRank::WrongJob(error)),
            JoinOutcome::Failed => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.notified.insert(rank);
                (closing_at(now), ToRank::RootCause(root_cause))
            }
            JoinOutcome::Malformed => {
                self.clients.remove(&id);
                return;
            }
        };
        if let Some(client) = self.clients.get_mut(&id) {
            client.state = state;
            send(client, &answer);
        }
    }

    /// All ranks have joined. Closes the listeners before the first rank is notified, so that the ranks' next
    /// communicator can use the same port.
    fn start_monitoring(&mut self, now: Instant) {
        self.listeners.clear();
        let joined: BTreeSet<ClientId> = self.by_rank.values().copied().collect();
        self.clients.retain(|id, _| joined.contains(id));
        if let Phase::Rendezvous(rendezvous) = std::mem::replace(&mut self.phase, Phase::Finished) {
            let detector = FailureDetector::new(rendezvous.into_peers(), Process::current(), now);
            self.phase = Phase::Monitoring(detector);
        }
    }

    /// Handles a frame of a joined rank.
    fn on_frame(&mut self, rank: Rank, frame: &[u8], now: Instant) {
        let message = decode::<ToCoordinator>(frame);
        match (&mut self.phase, message) {
            (Phase::Monitoring(detector), Some(message)) => detector.on_message(rank, message, now),
            (Phase::Monitoring(_) | Phase::Rendezvous(_), _) => {
                if let Some(id) = self.by_rank.get(&rank) {
                    self.clients.remove(id);
                }
                self.on_disconnect(rank, "carried an invalid frame");
            }
            (Phase::Finished, _) => {}
        }
    }

    /// Handles the end of a rank's connection.
    fn on_disconnect(&mut self, rank: Rank, cause: &str) {
        self.by_rank.remove(&rank);
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => rendezvous.on_disconnect(rank, cause),
            Phase::Monitoring(detector) => detector.on_disconnect(rank, cause),
            Phase::Finished => {}
        }
    }

    fn on_tick(&mut self, now: Instant) {
        if self.accept_resumes.is_some_and(|at| now >= at) {
            self.accept_resumes = None;
        }
        self.clients.retain(|_, client| match client.state {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => now < until,
            ClientState::Joined(_) => true,
        });
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => rendezvous.on_tick(now),
            Phase::Monitoring(detector) => detector.on_tick(now),
            Phase::Finished => {}
        }
    }

    /// Carries out what the rendezvous or the failure detector decided.
    fn apply_decisions(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.failed_at.get_or_insert(now);
                for (rank, id) in std::mem::take(&mut self.by_rank) {
                    if let Some(client) = self.clients.get_mut(&id) {
                        send(client, &ToRank::RootCause(root_cause.clone()));
                        client.state = closing_at(now);
                        self.notified.insert(rank);
                    }
                }
                let Phase::Rendezvous(rendezvous) = &self.phase else {
                    return;
                };
                let all_notified = rendezvous.world().is_some_and(|world| self.notified.len() >= world);
                if all_notified || self.late_join_deadline(rendezvous).is_some_and(|at| now >= at) {
                    self.end();
                }
            }
            Phase::Monitoring(detector) => {
                let actions = detector.actions();
                if detector.is_over() {
                    self.end();
                }
                for action in actions {
                    self.execute(action, now);
                }
            }
            Phase::Finished => {}
        }
    }

    fn execute(&mut self, action: DetectorAction, now: Instant) {
        match action {
            DetectorAction::Broadcast(frame) => {
                let Some(bytes) = encode_or_log(&frame) else {
                    return;
                };
                for id in self.by_rank.values() {
                    if let Some(client) = self.clients.get_mut(id) {
                        client.stream.enqueue(bytes.clone());
                    }
                }
            }
            DetectorAction::Send(rank, frame) => {
                if let Some(client) = self.by_rank.get(&rank).and_then(|id| self.clients.get_mut(id))
                    // Do not queue heartbeat replies behind unsent data.
                    && !(frame == ToRank::HeartbeatAck && client.stream.has_unsent())
                {
                    send(client, &frame);
                }
            }
            DetectorAction::Close(rank) => {
                if let Some(client) = self.by_rank.remove(&rank).and_then(|id| self.clients.get_mut(&id)) {
                    client.state = closing_at(now);
                }
            }
        }
    }

    /// Sends as much as the sockets accept. Ended connections are closed only afterwards: a client that sees
    /// the end of its connection can rely on the others having been notified.
    fn flush(&mut self, now: Instant) {
        let mut broken = Vec::new();
        for (id, client) in &mut self.clients {
            if let Err(cause) = client.stream.flush() {
                broken.push((*id, cause));
            }
        }
        for (id, cause) in broken {
            if let Some(Client { state: ClientState::Joined(rank), .. }) = self.clients.remove(&id) {
                self.on_disconnect(rank, &format!("broke ({cause})"));
                self.apply_decisions(now);
            }
        }
        for client in self.clients.values_mut() {
            if let ClientState::Closing { finished, .. } = &mut client.state
                && !*finished
                && !client.stream.has_unsent()
            {
                client.stream.shut_down_write();
                *finished = true;
            }
        }
        self.ended.clear();
    }

    /// Ends the world: drops all clients without a hello; the others still receive their queued frames.
    fn end(&mut self) {
        self.phase = Phase::Finished;
        self.listeners.clear();
        self.clients.retain(|_, client| !matches!(client.state, ClientState::Unauthenticated { .. }));
    }
}

fn closing_at(now: Instant) -> ClientState {
    ClientState::Closing { until: now + CLOSE_TIMEOUT, finished: false }
}

fn encode_or_log(frame: &ToRank) -> Option<Bytes> {
    encode(frame).inspect_err(|error| log::error!("the coordinator cannot encode a message: {error}")).ok()
}

fn send(client: &mut Client, frame: &ToRank) {
    if let Some(bytes) = encode_or_log(frame) {
        client.stream.enqueue(bytes);
    }
}
