//! The coordinator's thread: its listeners and connections.
//!
//! Owns every socket of one world's coordinator; the [`Rendezvous`] and then the [`FailureDetector`] decide what is said on them.
//! Must not block on any of them: whoever is silent, slow or talks nonsense delays nobody else.

use super::failure_detector::{DetectorAction, FailureDetector};
use super::framed_stream::FramedStream;
use super::process::Process;
use super::protocol::{Bytes, FRAME_LIMIT, HELLO_LIMIT, Hello, ToCoordinator, ToRank, decode, encode};
use super::rendezvous::{JoinOutcome, Rendezvous};
use crate::rank::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a connection may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a rank that was told the end may take to hang up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long ranks that come late are told why there is no world, if none said how patient it is.
const LATE_JOIN_NOTICE: Duration = Duration::from_secs(60);
/// Connections that have not said hello; beyond this the oldest gives way.
const MAX_UNAUTHENTICATED: usize = 4096;
/// How many connections are taken before the others get their turn.
const ACCEPTED_AT_ONCE: usize = 64;
/// How long no connection is taken when the system has none left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a connection is to the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    /// It has not said hello yet.
    Unauthenticated { until: Instant },
    /// It is this rank's.
    Joined(Rank),
    /// It has been told everything; `finished` once all of that is sent.
    Closing { until: Instant, finished: bool },
}

#[derive(Debug)]
struct Client {
    connection: FramedStream,
    role: ClientState,
}

enum Phase {
    Rendezvous(Rendezvous),
    Monitoring(FailureDetector),
    /// Only what was said must still be sent.
    Finished,
}

/// Connections are numbered in the order in which they came.
type ClientId = u64;

/// The coordinator's thread.
pub(super) struct Server {
    wake: Arc<WakeFd>,
    abandoned: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    accept_again: Option<Instant>,
    peers: BTreeMap<ClientId, Client>,
    joined: BTreeMap<Rank, ClientId>,
    /// Connections that have ended, kept open until everybody was told.
    ended: Vec<FramedStream>,
    next: ClientId,
    /// The ranks that know why there is no world, and since when there is none.
    notified: BTreeSet<Rank>,
    failed_at: Option<Instant>,
    stage: Phase,
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
            listeners,
            accept_again: None,
            peers: BTreeMap::new(),
            joined: BTreeMap::new(),
            ended: Vec::new(),
            next: 0,
            notified: BTreeSet::new(),
            failed_at: None,
            stage: Phase::Rendezvous(rendezvous),
        }
    }

    /// Until nobody is left to serve.
    pub(super) fn run(mut self) {
        while !(matches!(self.stage, Phase::Finished) && self.peers.is_empty()) {
            let (knocking, ready) = self.wait();
            let now = Instant::now();
            self.check_abandoned();
            if knocking {
                self.accept(now);
            }
            for id in ready {
                self.receive(id, now);
            }
            self.tick(now);
            self.carry_out(now);
            self.flush(now);
        }
        log::debug!("the coordinator's world is over");
    }

    /// Sleeps until something happens: whether somebody knocks, and whose connections are ready.
    fn wait(&self) -> (bool, Vec<ClientId>) {
        let now = Instant::now();
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let listening = if self.accept_again.is_none() { self.listeners.as_slice() } else { &[] };
        fds.extend(listening.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(self.peers.values().map(|peer| PollFd::new(&peer.connection, peer.connection.interest())));
        let timeout =
            self.deadline().and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        // An interrupted wait is over early, and the next one makes up for it.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return (false, Vec::new());
        }
        let rings = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (doors, connections) = fds[1..].split_at(listening.len());
        let ready =
            self.peers.keys().zip(connections).filter(|(_, fd)| rings(fd)).map(|(id, _)| *id).collect();
        (doors.iter().any(rings), ready)
    }

    fn deadline(&self) -> Option<Instant> {
        let stage = match &self.stage {
            Phase::Rendezvous(rendezvous) => self.late_join_deadline(rendezvous).or(rendezvous.deadline()),
            Phase::Monitoring(detector) => detector.deadline(),
            Phase::Finished => None,
        };
        let peers = self.peers.values().filter_map(|peer| match peer.role {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => Some(until),
            ClientState::Joined(_) => None,
        });
        peers.chain(stage).chain(self.accept_again).min()
    }

    /// Until when ranks that come late are told why there is no world.
    fn late_join_deadline(&self, rendezvous: &Rendezvous) -> Option<Instant> {
        let failed_at = self.failed_at?;
        Some(rendezvous.deadline().unwrap_or(failed_at + LATE_JOIN_NOTICE))
    }

    fn check_abandoned(&mut self) {
        if !self.wake.drain() || !self.abandoned.load(Ordering::Acquire) {
            return;
        }
        if let Phase::Rendezvous(rendezvous) = &mut self.stage
            && rendezvous.root_cause().is_none()
        {
            rendezvous.give_up();
            if rendezvous.world().is_none() {
                // Nobody has come, and nobody will be missed.
                self.end();
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let mut crowded = false;
        for listener in &self.listeners {
            for _ in 0..ACCEPTED_AT_ONCE {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        // Out of descriptors, mostly: the listener stays readable, so waiting on it would spin.
                        log::debug!("the coordinator cannot take a connection: {cause}");
                        self.accept_again = Some(now + ACCEPT_PAUSE);
                        crowded = true;
                        break;
                    }
                };
                let connection = match FramedStream::new(stream, true) {
                    Ok(connection) => connection,
                    Err(cause) => {
                        log::debug!("the coordinator cannot use a connection: {cause}");
                        continue;
                    }
                };
                let role = ClientState::Unauthenticated { until: now + HELLO_TIMEOUT };
                self.peers.insert(self.next, Client { connection, role });
                self.next += 1;
            }
        }
        let unauthenticated: Vec<ClientId> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.role, ClientState::Unauthenticated { .. }))
            .map(|(id, _)| *id)
            .collect();
        let surplus = unauthenticated.len().saturating_sub(MAX_UNAUTHENTICATED);
        let surplus = surplus.max(usize::from(crowded)).min(unauthenticated.len());
        for id in &unauthenticated[..surplus] {
            self.peers.remove(id);
        }
    }

    fn receive(&mut self, id: ClientId, now: Instant) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let limit = match peer.role {
            ClientState::Unauthenticated { .. } => HELLO_LIMIT,
            ClientState::Joined(_) | ClientState::Closing { .. } => FRAME_LIMIT,
        };
        let received = peer.connection.receive(limit);
        for frame in received.frames {
            // The role may change from one frame to the next.
            match self.peers.get(&id).map(|peer| peer.role) {
                Some(ClientState::Unauthenticated { .. }) => self.admit(id, &frame, now),
                Some(ClientState::Joined(rank)) => self.hear(rank, &frame, now),
                Some(ClientState::Closing { .. }) | None => {}
            }
        }
        if let Some(cause) = received.end
            && let Some(Client { connection, role }) = self.peers.remove(&id)
        {
            self.ended.push(connection);
            if let ClientState::Joined(rank) = role {
                self.lose(rank, &cause);
            }
        }
    }

    /// A stranger says hello.
    fn admit(&mut self, id: ClientId, frame: &[u8], now: Instant) {
        let (Phase::Rendezvous(rendezvous), Some(hello)) = (&mut self.stage, Hello::decode(frame)) else {
            self.peers.remove(&id);
            return;
        };
        let rank = hello.caller.rank;
        let (role, answer) = match rendezvous.arrive(hello, now) {
            arrival @ (JoinOutcome::Waiting | JoinOutcome::Complete) => {
                self.joined.insert(rank, id);
                if arrival == JoinOutcome::Complete {
                    self.begin_watch(now);
                }
                (ClientState::Joined(rank), ToRank::HelloAck)
            }
            JoinOutcome::WrongJob(error) => (closing(now), ToRank::WrongJob(error)),
            JoinOutcome::Failed => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.notified.insert(rank);
                (closing(now), ToRank::RootCause(root_cause))
            }
            JoinOutcome::Malformed => {
                self.peers.remove(&id);
                return;
            }
        };
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.role = role;
            post(peer, &answer);
        }
    }

    /// All have come. The doors are shut before the first of them hears of it, so that their next
    /// communicator can meet at the same port.
    fn begin_watch(&mut self, now: Instant) {
        self.listeners.clear();
        let seated: BTreeSet<ClientId> = self.joined.values().copied().collect();
        self.peers.retain(|id, _| seated.contains(id));
        if let Phase::Rendezvous(rendezvous) = std::mem::replace(&mut self.stage, Phase::Finished) {
            let detector = FailureDetector::new(rendezvous.into_peers(), Process::current(), now);
            self.stage = Phase::Monitoring(detector);
        }
    }

    /// A rank says something.
    fn hear(&mut self, rank: Rank, frame: &[u8], now: Instant) {
        let said = decode::<ToCoordinator>(frame);
        match (&mut self.stage, said) {
            (Phase::Monitoring(detector), Some(said)) => detector.hear(rank, said, now),
            (Phase::Monitoring(_) | Phase::Rendezvous(_), _) => {
                if let Some(id) = self.joined.get(&rank) {
                    self.peers.remove(id);
                }
                self.lose(rank, "carried a frame that makes no sense");
            }
            (Phase::Finished, _) => {}
        }
    }

    /// A rank's connection is gone.
    fn lose(&mut self, rank: Rank, cause: &str) {
        self.joined.remove(&rank);
        match &mut self.stage {
            Phase::Rendezvous(rendezvous) => rendezvous.depart(rank, cause),
            Phase::Monitoring(detector) => detector.lose(rank, cause),
            Phase::Finished => {}
        }
    }

    fn tick(&mut self, now: Instant) {
        if self.accept_again.is_some_and(|at| now >= at) {
            self.accept_again = None;
        }
        self.peers.retain(|_, peer| match peer.role {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => now < until,
            ClientState::Joined(_) => true,
        });
        match &mut self.stage {
            Phase::Rendezvous(rendezvous) => rendezvous.tick(now),
            Phase::Monitoring(detector) => detector.tick(now),
            Phase::Finished => {}
        }
    }

    /// Does what the rendezvous or the watch have decided.
    fn carry_out(&mut self, now: Instant) {
        match &mut self.stage {
            Phase::Rendezvous(rendezvous) => {
                let Some(root_cause) = rendezvous.root_cause().cloned() else {
                    return;
                };
                self.failed_at.get_or_insert(now);
                for (rank, id) in std::mem::take(&mut self.joined) {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        post(peer, &ToRank::RootCause(root_cause.clone()));
                        peer.role = closing(now);
                        self.notified.insert(rank);
                    }
                }
                let Phase::Rendezvous(rendezvous) = &self.stage else {
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
                let Some(bytes) = encoded(&frame) else {
                    return;
                };
                for id in self.joined.values() {
                    if let Some(peer) = self.peers.get_mut(id) {
                        peer.connection.post(bytes.clone());
                    }
                }
            }
            DetectorAction::Send(rank, frame) => {
                if let Some(peer) = self.joined.get(&rank).and_then(|id| self.peers.get_mut(id))
                    // Whoever does not read what it was told need not be told that it is heard.
                    && !(frame == ToRank::HeartbeatAck && peer.connection.is_pending())
                {
                    post(peer, &frame);
                }
            }
            DetectorAction::Close(rank) => {
                if let Some(peer) = self.joined.remove(&rank).and_then(|id| self.peers.get_mut(&id)) {
                    peer.role = closing(now);
                }
            }
        }
    }

    /// Sends what can be sent. Connections are closed only afterwards, so that whoever sees the end of its own
    /// knows that the others have been told.
    fn flush(&mut self, now: Instant) {
        let mut broken = Vec::new();
        for (id, peer) in &mut self.peers {
            if let Err(cause) = peer.connection.flush() {
                broken.push((*id, cause));
            }
        }
        for (id, cause) in broken {
            if let Some(Client { role: ClientState::Joined(rank), .. }) = self.peers.remove(&id) {
                self.lose(rank, &format!("broke ({cause})"));
                self.carry_out(now);
            }
        }
        for peer in self.peers.values_mut() {
            if let ClientState::Closing { finished, .. } = &mut peer.role
                && !*finished
                && !peer.connection.is_pending()
            {
                peer.connection.finish();
                *finished = true;
            }
        }
        self.ended.clear();
    }

    /// Nothing is left but to send what was said.
    fn end(&mut self) {
        self.stage = Phase::Finished;
        self.listeners.clear();
        self.peers.retain(|_, peer| !matches!(peer.role, ClientState::Unauthenticated { .. }));
    }
}

fn closing(now: Instant) -> ClientState {
    ClientState::Closing { until: now + CLOSE_TIMEOUT, finished: false }
}

fn encoded(frame: &ToRank) -> Option<Bytes> {
    encode(frame).inspect_err(|error| log::error!("the coordinator cannot speak: {error}")).ok()
}

fn post(peer: &mut Client, frame: &ToRank) {
    if let Some(bytes) = encoded(frame) {
        peer.connection.post(bytes);
    }
}
