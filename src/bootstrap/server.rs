//! The coordinator's thread: its listeners and connections.
//!
//! Owns every socket of one world's coordinator, and its clock. The [`Rendezvous`] and then the [`FailureDetector`] decide
//! what is sent on them. Must not block on any of them: a silent, slow or malicious client delays no other
//! client.

use super::failure_detector::{DetectorAction, FailureDetector};
use super::framed_stream::FramedStream;
use super::handshake::{Admission, AdmissionStep, Gate};
use super::heartbeat::ActiveClock;
use super::node_secret::NodeSecretListener;
use super::open_ports::CoordinatorControl;
use super::process::Process;
use super::protocol::{
    Bytes, FRAME_LIMIT, Hello, OPENING_LIMIT, PROOF_LIMIT, Purpose, ToCoordinator, ToRank, Unreadable,
    decode, encode,
};
use super::rendezvous::{JoinOutcome, Rendezvous};
use super::world_status::{RankActivity, RankReport, WorldStatus};
use crate::error::{Error, Result};
use crate::process::{ClosedInChild, spawn};
use crate::rank::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Resource;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a connection may take to prove that it belongs to the job.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a rank may take to close its connection after the coordinator has sent everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long ranks that join late still get the rendezvous error, if no rank gave a timeout.
const LATE_JOIN_NOTICE: Duration = Duration::from_secs(60);
/// Maximum number of unauthenticated connections, if the process may have many descriptors. Each can hold a proof of
/// [`PROOF_LIMIT`] bytes.
const MAX_UNAUTHENTICATED: usize = 1024;
/// Connections accepted per listener before existing clients are served again.
const ACCEPT_BATCH: usize = 64;
/// How long the listeners are ignored after the system ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The state of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    /// The handshake is not complete.
    Unauthenticated { until: Instant },
    /// The connection belongs to this rank.
    Joined(Rank),
    /// All frames for the client are queued; `finished` once all are sent.
    Closing { until: Instant, finished: bool },
}

#[derive(Debug)]
struct Client {
    stream: FramedStream,
    /// The host that it connected from.
    host: IpAddr,
    state: ClientState,
    /// The handshake, until it is complete.
    admission: Option<Admission>,
    /// Whether it has proved that it belongs to the job.
    authenticated: bool,
}

impl Client {
    /// Maximum length of the next frame, in bytes.
    fn frame_limit(&self) -> usize {
        match (self.state, &self.admission) {
            (ClientState::Unauthenticated { .. }, Some(Admission::AwaitProof { .. })) => PROOF_LIMIT,
            // What a client sends while it is closed is discarded.
            (ClientState::Unauthenticated { .. } | ClientState::Closing { .. }, _) => OPENING_LIMIT,
            (ClientState::Joined(_), _) => FRAME_LIMIT,
        }
    }
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
    control: Arc<CoordinatorControl>,
    /// Number of the attempt at a rendezvous. Random, so that no other attempt has it.
    attempt: u64,
    clock: ActiveClock,
    /// When the rendezvous ends if no rank has joined, in real time.
    expires: Option<Instant>,
    /// Whether another rendezvous of this process has taken the listeners over.
    superseded: bool,
    closed_in_child: Vec<ClosedInChild>,
    listeners: Vec<TcpListener>,
    /// Hands the job's secret to the ranks of this node, if they need it.
    node_secret: Option<NodeSecretListener>,
    gate: Gate,
    /// Maximum number of unauthenticated connections. Beyond it some are dropped.
    max_unauthenticated: usize,
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
    /// Serves the job of `gate` at `listeners`, which do not block.
    pub(super) fn new(
        control: Arc<CoordinatorControl>,
        listeners: Vec<TcpListener>,
        node_secret: Option<NodeSecretListener>,
        gate: Gate,
    ) -> Self {
        Self {
            control,
            // Without random numbers, a rank may take a late answer of a failed attempt for one of the next.
            attempt: getrandom::u64().unwrap_or(0),
            clock: ActiveClock::new(Instant::now()),
            expires: None,
            superseded: false,
            closed_in_child: listeners.iter().map(|listener| ClosedInChild::new(listener.as_fd())).collect(),
            listeners,
            node_secret,
            phase: Phase::Rendezvous(Rendezvous::new(gate.location.clone())),
            gate,
            max_unauthenticated: a_quarter_of(rustix::process::getrlimit(Resource::Nofile).current),
            accept_resumes: None,
            clients: BTreeMap::new(),
            by_rank: BTreeMap::new(),
            ended: Vec::new(),
            next_id: 0,
            notified: BTreeSet::new(),
            failed_at: None,
        }
    }

    /// Ends the rendezvous at this time if no rank has joined by then.
    pub(super) fn expiring_at(self, expires: Instant) -> Self {
        Self { expires: Some(expires), ..self }
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// `System` if there is no thread.
    pub(super) fn spawn(self) -> Result<()> {
        let builder = std::thread::Builder::new().name("flexring-coord".to_owned());
        spawn(builder, move || self.run())
            .map(drop)
            .map_err(|cause| Error::io("cannot start the coordinator's thread", cause))
    }

    /// Runs until there is no client left.
    fn run(mut self) {
        while !(matches!(self.phase, Phase::Finished) && self.clients.is_empty()) {
            let (incoming, ready) = self.wait();
            let now = self.clock.now();
            self.check_control();
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
        self.control.end_requests();
        log::debug!("the coordinator has served its world");
    }

    /// Sleeps until an event. Returns whether connections can be accepted, and which clients are ready.
    fn wait(&mut self) -> (bool, Vec<ClientId>) {
        let mut paused = self.clock.advance(Instant::now(), Some(Duration::ZERO));
        let sleep = self.deadline().map(|at| at.saturating_duration_since(self.clock.now()));
        let ready = self.poll(sleep);
        paused += self.clock.advance(Instant::now(), sleep);
        if let Phase::Monitoring(detector) = &mut self.phase
            && !paused.is_zero()
        {
            log::warn!("this process was paused for {paused:?}, and with it the coordinator of all ranks");
            detector.on_pause(paused, self.clock.now());
        }
        ready
    }

    /// Sleeps for at most `sleep`.
    fn poll(&self, sleep: Option<Duration>) -> (bool, Vec<ClientId>) {
        let mut fds = vec![PollFd::new(self.control.wake(), PollFlags::IN)];
        if self.accept_resumes.is_none() {
            fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            fds.extend(self.node_secret.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        }
        let listening = fds.len() - 1;
        fds.extend(
            self.clients.values().map(|client| PollFd::new(&client.stream, client.stream.poll_flags())),
        );
        let timeout = sleep.and_then(|sleep| Timespec::try_from(sleep).ok());
        // An interrupted wait ends early, and the next one makes up for it.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return (false, Vec::new());
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (listeners, connections) = fds[1..].split_at(listening);
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
        // No deadline depends on a pause while no rank has joined, so both clocks will do.
        let expires = self.expires.filter(|_| self.is_unused());
        clients.chain(phase).chain(self.accept_resumes).chain(expires).min()
    }

    /// Until when ranks that join late get the rendezvous error.
    fn late_join_deadline(&self, rendezvous: &Rendezvous) -> Option<Instant> {
        let failed_at = self.failed_at?;
        Some(rendezvous.deadline().unwrap_or(failed_at + LATE_JOIN_NOTICE))
    }

    /// Whether no rank has joined yet.
    fn is_unused(&self) -> bool {
        matches!(&self.phase, Phase::Rendezvous(rendezvous) if rendezvous.world().is_none())
    }

    /// Handles what the rest of the process asks for.
    fn check_control(&mut self) {
        if !self.control.wake().drain() {
            return;
        }
        if self.control.is_abandoned()
            && let Phase::Rendezvous(rendezvous) = &mut self.phase
            && rendezvous.root_cause().is_none()
        {
            rendezvous.cancel();
            if rendezvous.world().is_none() {
                // No rank has joined, so no rank needs the error.
                self.end();
            }
        }
        let Some(request) = self.control.take_request() else {
            return;
        };
        // Ranks that meet the next rendezvous here are better served than by this one's error or status.
        let in_use =
            matches!(&self.phase, Phase::Rendezvous(rendezvous) if rendezvous.root_cause().is_none());
        if !in_use {
            self.superseded = true;
            // Frees its name, which the next rendezvous uses as well.
            self.node_secret = None;
            self.closed_in_child.clear();
            // If the next rendezvous has given up waiting, the listeners close.
            let _ = request.send(std::mem::take(&mut self.listeners));
        }
    }

    /// Accepts connections, and hands the secret to ranks of this node. A lack of descriptors ends neither.
    fn accept(&mut self, now: Instant) {
        let mut failure = self.node_secret.as_ref().and_then(|listener| listener.serve().err());
        for index in 0..self.listeners.len() {
            for _ in 0..ACCEPT_BATCH {
                let (stream, address) = match self.listeners[index].accept() {
                    Ok(accepted) => accepted,
                    Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        failure = Some(cause);
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
                let state = ClientState::Unauthenticated { until: now + HANDSHAKE_TIMEOUT };
                let admission = Some(Admission::AwaitOpening);
                let host = address.ip().to_canonical();
                self.clients
                    .insert(self.next_id, Client { stream, host, state, admission, authenticated: false });
                self.next_id += 1;
                self.drop_excess(0);
            }
        }
        if let Some(cause) = failure {
            // Mostly out of descriptors. The listener stays readable, so polling it would spin.
            log::debug!("the coordinator cannot accept a connection: {cause}");
            self.accept_resumes = Some(now + ACCEPT_PAUSE);
            self.note_refusal(format!("the coordinator could not accept a connection ({cause})"));
            self.drop_excess(1);
        }
    }

    /// Drops unauthenticated connections beyond the limit, and `at_least` so many if there are: always the oldest one of the
    /// host that has most of them, so that one host cannot crowd out the others.
    fn drop_excess(&mut self, at_least: usize) {
        let mut by_host: BTreeMap<IpAddr, BTreeSet<ClientId>> = BTreeMap::new();
        for (id, client) in &self.clients {
            if !client.authenticated {
                by_host.entry(client.host).or_default().insert(*id);
            }
        }
        let count: usize = by_host.values().map(BTreeSet::len).sum();
        let excess = count.saturating_sub(self.max_unauthenticated).max(at_least);
        for _ in 0..excess {
            let most = by_host.values_mut().max_by_key(|ids| ids.len());
            if let Some(oldest) = most.and_then(BTreeSet::pop_first) {
                self.clients.remove(&oldest);
            }
        }
    }

    /// Notes for the ranks that wait why another one may be missing.
    fn note_refusal(&mut self, text: String) {
        if let Phase::Rendezvous(rendezvous) = &mut self.phase {
            rendezvous.note_refusal(text);
        }
    }

    fn receive(&mut self, id: ClientId, now: Instant) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let received = client.stream.receive(client.frame_limit());
        for frame in received.frames {
            // The state may change from one frame to the next.
            match self.clients.get(&id).map(|client| client.state) {
                Some(ClientState::Unauthenticated { .. }) => self.on_handshake(id, frame, now),
                Some(ClientState::Joined(rank)) => self.on_frame(rank, &frame, now),
                Some(ClientState::Closing { .. }) | None => {}
            }
        }
        if let Some(unreadable) = received.unreadable {
            let closing = |client: &Client| matches!(client.state, ClientState::Closing { .. });
            // A client that is closed gets the reason first.
            if self.clients.get(&id).is_some_and(closing) || self.refuse_unreadable(id, unreadable, now) {
                return;
            }
        }
        if let Some(cause) = received.end
            && let Some(Client { stream, state, .. }) = self.clients.remove(&id)
        {
            self.ended.push(stream);
            if let ClientState::Joined(rank) = state {
                self.on_disconnect(rank, &cause, now);
            }
        }
    }

    /// Answers a caller that speaks another version of the protocol. Whether this is one.
    fn refuse_unreadable(&mut self, id: ClientId, unreadable: Unreadable, now: Instant) -> bool {
        let Some(client) = self.clients.get(&id) else {
            return false;
        };
        match (client.state, unreadable.describe()) {
            (ClientState::Unauthenticated { .. }, Some(difference)) => {
                let message = format!(
                    "the process at {} {difference}: all ranks must run the same release of flexring, on machines of one \
                     byte order (rendezvous at {})",
                    client.host, self.gate.location
                );
                self.refuse(id, Error::disagreement(message), &difference, now);
                true
            }
            _ => false,
        }
    }

    /// Refuses a caller, which changes nothing for others. `what` is a verb phrase that describes the caller to them.
    fn refuse(&mut self, id: ClientId, error: Error, what: &str, now: Instant) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.state = closing_at(now);
        send(client, &ToRank::Refused(error));
        let note = format!("a process at {} was refused: it {what}", client.host);
        log::debug!("{note}");
        self.note_refusal(note);
    }

    /// Handles a frame of an unauthenticated connection.
    fn on_handshake(&mut self, id: ClientId, frame: Vec<u8>, now: Instant) {
        let admission = self.clients.get_mut(&id).and_then(|client| client.admission.take());
        let Some(admission) = admission else {
            self.clients.remove(&id);
            return;
        };
        match admission.on_frame(&self.gate, frame) {
            AdmissionStep::Continue(admission, answer) => {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.admission = Some(admission);
                    send(client, &answer);
                }
            }
            AdmissionStep::Admitted(hello, answer) => {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.authenticated = true;
                    send(client, &answer);
                }
                self.on_hello(id, hello, now);
            }
            AdmissionStep::Refused(error, what) => self.refuse(id, error, &what, now),
            AdmissionStep::Malformed => {
                self.clients.remove(&id);
            }
        }
    }

    /// Handles a caller that belongs to the job.
    fn on_hello(&mut self, id: ClientId, hello: Hello, now: Instant) {
        if hello.header.purpose == Purpose::Status {
            let status = self.status(now);
            self.answer(id, closing_at(now), [ToRank::Status(status)]);
            return;
        }
        let Phase::Rendezvous(rendezvous) = &mut self.phase else {
            let why =
                "all ranks of the last communicator have joined, and rank 0 does not create another one";
            self.answer(id, closing_at(now), [ToRank::TryAgain(why.to_owned())]);
            return;
        };
        let rank = hello.header.rank;
        let attempt = ToRank::Attempt(self.attempt);
        match rendezvous.join(hello, now) {
            outcome @ (JoinOutcome::Waiting | JoinOutcome::Complete) => {
                self.by_rank.insert(rank, id);
                self.answer(id, ClientState::Joined(rank), [attempt]);
                if outcome == JoinOutcome::Complete {
                    self.on_complete(now);
                }
            }
            JoinOutcome::Failed => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.notified.insert(rank);
                self.answer(id, closing_at(now), [attempt, ToRank::RootCause(root_cause)]);
            }
            JoinOutcome::Malformed => {
                self.clients.remove(&id);
            }
        }
    }

    /// Queues the answer to a hello.
    fn answer(&mut self, id: ClientId, state: ClientState, frames: impl IntoIterator<Item = ToRank>) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.state = state;
            frames.into_iter().for_each(|frame| send(client, &frame));
        }
    }

    /// The state of all ranks.
    fn status(&self, now: Instant) -> WorldStatus {
        match &self.phase {
            Phase::Rendezvous(rendezvous) => {
                let absent = |rank| RankReport::new(rank, "", 0, RankActivity::Absent);
                let mut rows: Vec<RankReport> = (0..rendezvous.world().unwrap_or(0)).map(absent).collect();
                for (rank, process) in rendezvous.joined() {
                    rows[rank] = RankReport::new(rank, &process.host, process.pid, RankActivity::Joining);
                }
                WorldStatus::new(rows, rendezvous.root_cause().cloned())
            }
            Phase::Monitoring(detector) => detector.status(now),
            Phase::Finished => WorldStatus::default(),
        }
    }

    /// All ranks have joined. The listeners stay open for questions about the world, and for the process's next
    /// rendezvous.
    fn on_complete(&mut self, now: Instant) {
        let joined: BTreeSet<ClientId> = self.by_rank.values().copied().collect();
        self.clients.retain(|id, _| joined.contains(id));
        let Phase::Rendezvous(rendezvous) = std::mem::replace(&mut self.phase, Phase::Finished) else {
            return;
        };
        match rendezvous.successor(&Process::current()) {
            // This process may end before the ranks leave, so one of them takes the world over.
            Some(addresses) => {
                for id in std::mem::take(&mut self.by_rank).into_values() {
                    self.answer(id, closing_at(now), [ToRank::Moved(addresses.clone())]);
                }
                self.end();
            }
            None => {
                let detector = FailureDetector::new(rendezvous.into_peers(), Process::current(), now);
                self.phase = Phase::Monitoring(detector);
            }
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
                self.on_disconnect(rank, "carried an invalid frame", now);
            }
            (Phase::Finished, _) => {}
        }
    }

    /// Handles the end of a rank's connection.
    fn on_disconnect(&mut self, rank: Rank, cause: &str, now: Instant) {
        self.by_rank.remove(&rank);
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => rendezvous.on_disconnect(rank, cause),
            Phase::Monitoring(detector) => detector.on_disconnect(rank, cause, now),
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
        if self.is_unused() && self.expires.is_some_and(|at| now >= at) {
            self.end();
        }
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
                if all_notified
                    || self.superseded
                    || self.late_join_deadline(rendezvous).is_some_and(|at| now >= at)
                {
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
                self.on_disconnect(rank, &format!("broke ({cause})"), now);
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

    /// Ends the world: drops all unauthenticated clients; the others still receive their queued frames.
    fn end(&mut self) {
        self.phase = Phase::Finished;
        self.stop_listening();
        self.clients.retain(|_, client| !matches!(client.state, ClientState::Unauthenticated { .. }));
    }

    /// Frees the port, and the name under which the secret was handed out.
    fn stop_listening(&mut self) {
        self.closed_in_child.clear();
        self.listeners.clear();
        self.node_secret = None;
    }
}

/// How many unauthenticated connections are accepted at once in a process that may have `limit` descriptors: at most a quarter
/// of them, so that strangers never use up those that ranks need.
fn a_quarter_of(limit: Option<u64>) -> usize {
    let quarter = limit.map_or(usize::MAX, |limit| usize::try_from(limit / 4).unwrap_or(usize::MAX));
    quarter.clamp(1, MAX_UNAUTHENTICATED)
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
