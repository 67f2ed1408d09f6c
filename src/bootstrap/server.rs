//! The coordinator's thread.
//!
//! Owns the phases of one job and the coordinator's clock. The [`Rendezvous`] and then the [`Worlds`] decide
//! what is sent on the [`Connections`]. Must not block.

use super::connections::{Client, ClientId, ClientState, Connections, closing_at, encode_or_log, send};
use super::coordinator_ports::CoordinatorControl;
use super::coordinator_worlds::{Worlds, WorldsAction};
use super::frame_decoder::Unreadable;
use super::handshake::{AdmissionStep, Gate};
use super::heartbeat::ActiveClock;
use super::node_secret::NodeSecretListener;
use super::phase::Phase;
use super::process::Process;
use super::protocol::{Hello, PROOF_LIMIT, Purpose, ToCoordinator, ToRank, decode};
use super::rendezvous::{JoinOutcome, Rendezvous};
use super::status_socket;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::process::spawn;
use crate::rank::Rank;
use crate::secret::random_bytes;
use crate::tls::TlsRole;
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long ranks that join late still get the rendezvous error, if no rank gave a timeout.
const LATE_JOIN_NOTICE: Duration = Duration::from_secs(60);

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
    gate: Gate,
    clients: Connections,
    by_rank: BTreeMap<Rank, ClientId>,
    /// The connection of rank 0, also after the world has failed.
    client_of_rank_0: Option<ClientId>,
    /// Ranks that received the rendezvous error or have gone before, and when the rendezvous failed.
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
            attempt: random_bytes().map_or(0, u64::from_ne_bytes),
            clock: ActiveClock::new(Instant::now()),
            expires: None,
            superseded: false,
            clients: Connections::new(listeners, node_secret),
            phase: Phase::Rendezvous(Rendezvous::new(gate.location.clone(), Process::current())),
            gate,
            by_rank: BTreeMap::new(),
            client_of_rank_0: None,
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
            let questions = if incoming { self.clients.accept_questions() } else { Vec::new() };
            if !questions.is_empty() {
                status_socket::answer(questions, &self.phase.status(now));
            }
            if incoming
                && let Some(cause) = self.clients.accept(now)
                && let Phase::Rendezvous(rendezvous) = &mut self.phase
            {
                rendezvous.note_accept_failure(&cause.to_string());
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
        let ready = self.clients.poll(self.control.wake(), sleep);
        paused += self.clock.advance(Instant::now(), sleep);
        if let Phase::Monitoring(worlds) = &mut self.phase
            && !paused.is_zero()
        {
            log::info!("this process was paused for {paused:?}, and with it the coordinator of all ranks");
            worlds.on_pause(paused, self.clock.now());
        }
        ready
    }

    fn deadline(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Rendezvous(rendezvous) => self.late_join_deadline(rendezvous).or(rendezvous.next_tick()),
            Phase::Monitoring(worlds) => worlds.deadline(),
            Phase::Moving { until, .. } => Some(*until),
            Phase::Finished => None,
        };
        // No deadline depends on a pause while no rank has joined, so both clocks will do.
        let expires = self.expires.filter(|_| self.is_unused());
        self.clients.deadline().into_iter().chain(phase).chain(expires).min()
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
        if let (Some(error), Phase::Rendezvous(rendezvous)) = (self.control.failure(), &mut self.phase) {
            rendezvous.fail_with(error);
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
            // If the next rendezvous has given up waiting, the listeners close.
            let _ = request.send(self.clients.take_listeners());
        }
    }

    /// Notes for the ranks that wait why another one may be missing.
    fn note_refusal(&mut self, text: String) {
        if let Phase::Rendezvous(rendezvous) = &mut self.phase {
            rendezvous.note_refusal(text);
        }
    }

    fn receive(&mut self, id: ClientId, now: Instant) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        let received = client.stream.receive(client.frame_limit());
        for frame in received.frames {
            // The state may change from one frame to the next.
            match self.clients.get(id).map(|client| client.state) {
                Some(ClientState::Unauthenticated { .. }) => self.on_handshake(id, frame, now),
                Some(ClientState::Joined(rank)) => self.on_frame(rank, &frame, now),
                Some(ClientState::Closing { .. }) | None => {}
            }
        }
        if let Some(unreadable) = received.unreadable {
            let closing = |client: &Client| matches!(client.state, ClientState::Closing { .. });
            // A client that is closed gets the reason first.
            if self.clients.get(id).is_some_and(closing) || self.refuse_unreadable(id, unreadable, now) {
                return;
            }
        }
        if let Some(cause) = received.end {
            self.on_end(id, &cause, now);
        }
    }

    /// Handles the end of a connection.
    fn on_end(&mut self, id: ClientId, cause: &str, now: Instant) {
        if let Some(client) = self.clients.get(id)
            && let (ClientState::Unauthenticated { .. }, Some(claim)) = (client.state, client.claim())
        {
            let note = format!(
                "a process at {} {claim}, but its connection {cause} before it proved that",
                client.host
            );
            log::debug!("{note}");
            self.note_refusal(note);
        }
        if let Some(ClientState::Joined(rank)) = self.clients.end(id) {
            self.on_disconnect(rank, cause, now);
        }
    }

    /// Answers a caller that speaks another version of the protocol. Whether this is one.
    fn refuse_unreadable(&mut self, id: ClientId, unreadable: Unreadable, now: Instant) -> bool {
        let Some(client) = self.clients.get(id) else {
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

    /// Refuses a caller, which changes nothing for others. `what` is a verb phrase that describes the caller
    /// to them.
    fn refuse(&mut self, id: ClientId, error: Error, what: &str, now: Instant) {
        let Some(client) = self.clients.get_mut(id) else {
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
        let Some(client) = self.clients.get_mut(id) else { return };
        let Some(admission) = client.admission.take() else {
            self.clients.remove(id);
            return;
        };
        match admission.on_frame(&self.gate, frame, client.stream.binding()) {
            AdmissionStep::Continue(admission, answer) => {
                client.admission = Some(admission);
                send(client, &answer);
                if self.gate.secret.is_encrypted() {
                    client.stream.require_encryption(TlsRole::Acceptor, PROOF_LIMIT);
                }
            }
            AdmissionStep::Admitted(hello, answer) => {
                // Requests for the status are limited in number, as strangers are.
                client.is_rank = hello.header.purpose == Purpose::Join;
                client.stream.trust();
                send(client, &answer);
                self.on_hello(id, hello, now);
            }
            AdmissionStep::Refused(error, what) => self.refuse(id, error, &what, now),
            AdmissionStep::WhoListens { claim, is_of_this_job } if client.is_on_this_node => {
                let message = format!("a flexring coordinator ({}) listens there", Process::current());
                let answer =
                    if is_of_this_job { Error::rendezvous(message) } else { Error::disagreement(message) };
                self.refuse(id, answer, &claim, now);
            }
            // Other nodes learn nothing about this process.
            AdmissionStep::WhoListens { .. } | AdmissionStep::Malformed => {
                self.clients.remove(id);
            }
        }
    }

    /// Handles a caller that belongs to the job.
    fn on_hello(&mut self, id: ClientId, hello: Hello, now: Instant) {
        reach(FaultPoint::CoordinatorReceivedHello);
        if hello.header.purpose == Purpose::Status {
            let status = self.phase.status(now);
            self.clients.answer(id, closing_at(now), [ToRank::Status(status)]);
            return;
        }
        let Phase::Rendezvous(rendezvous) = &mut self.phase else {
            let why =
                "all ranks of the last communicator have joined, and rank 0 does not create another one";
            self.clients.answer(id, closing_at(now), [ToRank::TryAgain(why.into())]);
            return;
        };
        let rank = hello.header.rank;
        let attempt = ToRank::Attempt(self.attempt);
        match rendezvous.join(hello, now) {
            outcome @ (JoinOutcome::Waiting | JoinOutcome::Complete) => {
                self.by_rank.insert(rank, id);
                if rank == 0 {
                    self.client_of_rank_0 = Some(id);
                }
                self.clients.answer(id, ClientState::Joined(rank), [attempt]);
                if outcome == JoinOutcome::Complete {
                    self.on_complete(now);
                }
            }
            JoinOutcome::Failed => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.notified.insert(rank);
                self.clients.answer(id, closing_at(now), [attempt, ToRank::RootCause(root_cause)]);
            }
            JoinOutcome::Malformed => {
                self.clients.remove(id);
            }
        }
    }

    /// All ranks have joined. The listeners stay open for questions about the world, and for the process's
    /// next rendezvous.
    fn on_complete(&mut self, now: Instant) {
        reach(FaultPoint::CoordinatorCompletedRendezvous);
        let joined: BTreeSet<ClientId> = self.by_rank.values().copied().collect();
        self.clients.retain(&joined);
        for id in &joined {
            if let Some(client) = self.clients.get_mut(*id) {
                client.stream.make_room(joined.len());
            }
        }
        let Phase::Rendezvous(rendezvous) = std::mem::replace(&mut self.phase, Phase::Finished) else {
            return;
        };
        match rendezvous.successor() {
            // This process may end before the ranks leave, so one of them takes the world over.
            Some(addresses) => {
                for (rank, id) in &self.by_rank {
                    let state = ClientState::Joined(*rank);
                    self.clients.answer(*id, state, [ToRank::Moved(addresses.clone())]);
                }
                self.clients.stop_listening();
                self.phase = Phase::moving(rendezvous, now);
            }
            None => {
                let worlds = Worlds::new(rendezvous.into_peers(), Process::current(), now);
                self.phase = Phase::Monitoring(worlds);
            }
        }
    }

    /// Handles a frame of a joined rank.
    fn on_frame(&mut self, rank: Rank, frame: &[u8], now: Instant) {
        let is_valid = match &mut self.phase {
            Phase::Monitoring(worlds) => worlds.on_frame(rank, frame, now),
            Phase::Moving { rendezvous, .. } if decode(frame) == Some(ToCoordinator::Moved) => {
                rendezvous.on_moved(rank);
                if let Some(client) = self.by_rank.remove(&rank).and_then(|id| self.clients.get_mut(id)) {
                    client.state = closing_at(now);
                }
                true
            }
            Phase::Rendezvous(rendezvous) => match decode(frame) {
                Some(ToCoordinator::Report { error, .. }) => {
                    rendezvous.fail_with(&error);
                    true
                }
                _ => false,
            },
            Phase::Moving { .. } => false,
            Phase::Finished => true,
        };
        if !is_valid {
            if let Some(id) = self.by_rank.get(&rank) {
                self.clients.remove(*id);
            }
            self.on_disconnect(rank, "carried an invalid frame", now);
        }
    }

    /// Handles the end of a rank's connection.
    fn on_disconnect(&mut self, rank: Rank, cause: &str, now: Instant) {
        self.by_rank.remove(&rank);
        // It does not wait for the rendezvous error.
        self.notified.insert(rank);
        self.phase.on_disconnect(rank, cause, now);
    }

    fn on_tick(&mut self, now: Instant) {
        self.clients.on_tick(now);
        if self.is_unused() && self.expires.is_some_and(|at| now >= at) {
            self.end();
        }
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => rendezvous.on_tick(now),
            Phase::Monitoring(worlds) => worlds.on_tick(now),
            // The new coordinator has decided by now.
            Phase::Moving { until, .. } if now >= *until => self.by_rank.clear(),
            Phase::Moving { .. } | Phase::Finished => {}
        }
    }

    /// Carries out what the rendezvous or the failure detector decided.
    fn apply_decisions(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Rendezvous(rendezvous) => {
                for (ranks, text) in rendezvous.notices() {
                    for rank in ranks {
                        if let Some(id) = self.by_rank.get(&rank) {
                            let notice = ToRank::Notice(text.as_str().into());
                            self.clients.answer(*id, ClientState::Joined(rank), [notice]);
                        }
                    }
                }
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.failed_at.get_or_insert(now);
                for (rank, id) in std::mem::take(&mut self.by_rank) {
                    if let Some(client) = self.clients.get_mut(id) {
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
            Phase::Moving { rendezvous, .. } => {
                if let Some(root_cause) = rendezvous.root_cause().cloned() {
                    for id in std::mem::take(&mut self.by_rank).into_values() {
                        self.clients.answer(id, closing_at(now), [ToRank::RootCause(root_cause.clone())]);
                    }
                }
                if self.by_rank.is_empty() {
                    self.clients.close_all(now);
                    self.end();
                }
            }
            Phase::Monitoring(worlds) => {
                let actions = worlds.actions();
                if worlds.is_over() {
                    self.end();
                }
                for action in actions {
                    self.execute(action, now);
                }
            }
            Phase::Finished => {}
        }
    }

    fn execute(&mut self, action: WorldsAction, now: Instant) {
        let (ranks, frame) = match action {
            WorldsAction::Broadcast(frame) => (self.by_rank.keys().copied().collect(), frame),
            WorldsAction::Send(ranks, frame) => (ranks, frame),
            WorldsAction::Close(rank) => {
                if let Some(client) = self.by_rank.remove(&rank).and_then(|id| self.clients.get_mut(id)) {
                    client.state = closing_at(now);
                }
                return;
            }
        };
        let Some(bytes) = encode_or_log(&frame) else {
            return;
        };
        for rank in ranks {
            if let Some(client) = self.by_rank.get(&rank).and_then(|id| self.clients.get_mut(*id))
                // Do not queue heartbeat replies behind unsent data.
                && !(frame == ToRank::HeartbeatAck && client.stream.has_unsent())
            {
                client.stream.enqueue(bytes.clone());
            }
        }
    }

    /// Sends what is queued, and closes what can be closed.
    fn flush(&mut self, now: Instant) {
        // Rank 0 comes last: this thread may be in its process, which may exit as soon as it knows that the
        // world has failed.
        for (id, cause) in self.clients.flush(self.client_of_rank_0) {
            // What the rank has sent before says more than the end of its connection.
            self.receive(id, now);
            self.on_end(id, &cause, now);
            self.apply_decisions(now);
        }
        self.clients.finish();
    }

    /// Ends the world: drops all unauthenticated clients; the others still receive their queued frames.
    fn end(&mut self) {
        self.phase = Phase::Finished;
        self.clients.stop_listening();
        self.clients.drop_unauthenticated();
    }
}
