//! The hub's thread: its listeners and connections.
//!
//! Owns every socket of one world's hub; the [`Assembly`] and then the [`Watch`] decide what is said on them.
//! Must not block on any of them: whoever is silent, slow or talks nonsense delays nobody else.

use super::assembly::{Arrival, Assembly};
use super::connection::Connection;
use super::frame::{Bytes, FRAME_LIMIT, HELLO_LIMIT, Hello, ToHub, ToRank, decode, encode};
use super::roster::Process;
use super::watch::{Order, Watch};
use crate::transport::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a connection may take to say hello.
const STRANGER_PATIENCE: Duration = Duration::from_secs(5);
/// How long a rank that was told the end may take to hang up.
const PARTING_PATIENCE: Duration = Duration::from_secs(2);
/// How long ranks that come late are told why there is no world, if none said how patient it is.
const OBITUARY: Duration = Duration::from_secs(60);
/// Connections that have not said hello; beyond this the oldest gives way.
const MAX_STRANGERS: usize = 4096;
/// How many connections are taken before the others get their turn.
const ACCEPTED_AT_ONCE: usize = 64;
/// How long no connection is taken when the system has none left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a connection is to the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It has not said hello yet.
    Stranger { until: Instant },
    /// It is this rank's.
    Seated(Rank),
    /// It has been told everything; `finished` once all of that is sent.
    Parting { until: Instant, finished: bool },
}

#[derive(Debug)]
struct Peer {
    connection: Connection,
    role: Role,
}

enum Stage {
    Assembling(Assembly),
    Watching(Watch),
    /// Only what was said must still be sent.
    Over,
}

/// Connections are numbered in the order in which they came.
type Id = u64;

/// The hub's thread.
pub(super) struct Service {
    wake: Arc<WakeFd>,
    abandoned: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    accept_again: Option<Instant>,
    peers: BTreeMap<Id, Peer>,
    seats: BTreeMap<Rank, Id>,
    /// Connections that have ended, kept open until everybody was told.
    ended: Vec<Connection>,
    next: Id,
    /// The ranks that know why there is no world, and since when there is none.
    told: BTreeSet<Rank>,
    condemned: Option<Instant>,
    stage: Stage,
}

impl Service {
    /// Serves `assembly` at `listeners`, which do not block. `wake` is notified when `abandoned` changes.
    pub(super) fn new(
        wake: Arc<WakeFd>,
        abandoned: Arc<AtomicBool>,
        listeners: Vec<TcpListener>,
        assembly: Assembly,
    ) -> Self {
        Self {
            wake,
            abandoned,
            listeners,
            accept_again: None,
            peers: BTreeMap::new(),
            seats: BTreeMap::new(),
            ended: Vec::new(),
            next: 0,
            told: BTreeSet::new(),
            condemned: None,
            stage: Stage::Assembling(assembly),
        }
    }

    /// Until nobody is left to serve.
    pub(super) fn run(mut self) {
        while !(matches!(self.stage, Stage::Over) && self.peers.is_empty()) {
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
        log::debug!("the hub's world is over");
    }

    /// Sleeps until something happens: whether somebody knocks, and whose connections are ready.
    fn wait(&self) -> (bool, Vec<Id>) {
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
            Stage::Assembling(assembly) => self.obituary_ends(assembly).or(assembly.deadline()),
            Stage::Watching(watch) => watch.deadline(),
            Stage::Over => None,
        };
        let peers = self.peers.values().filter_map(|peer| match peer.role {
            Role::Stranger { until } | Role::Parting { until, .. } => Some(until),
            Role::Seated(_) => None,
        });
        peers.chain(stage).chain(self.accept_again).min()
    }

    /// Until when ranks that come late are told why there is no world.
    fn obituary_ends(&self, assembly: &Assembly) -> Option<Instant> {
        let condemned = self.condemned?;
        Some(assembly.deadline().unwrap_or(condemned + OBITUARY))
    }

    fn check_abandoned(&mut self) {
        if !self.wake.drain() || !self.abandoned.load(Ordering::Acquire) {
            return;
        }
        if let Stage::Assembling(assembly) = &mut self.stage
            && assembly.verdict().is_none()
        {
            assembly.give_up();
            if assembly.world().is_none() {
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
                        log::debug!("the hub cannot take a connection: {cause}");
                        self.accept_again = Some(now + ACCEPT_PAUSE);
                        crowded = true;
                        break;
                    }
                };
                let connection = match Connection::new(stream, true) {
                    Ok(connection) => connection,
                    Err(cause) => {
                        log::debug!("the hub cannot use a connection: {cause}");
                        continue;
                    }
                };
                let role = Role::Stranger { until: now + STRANGER_PATIENCE };
                self.peers.insert(self.next, Peer { connection, role });
                self.next += 1;
            }
        }
        let strangers: Vec<Id> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.role, Role::Stranger { .. }))
            .map(|(id, _)| *id)
            .collect();
        let surplus = strangers.len().saturating_sub(MAX_STRANGERS);
        let surplus = surplus.max(usize::from(crowded)).min(strangers.len());
        for id in &strangers[..surplus] {
            self.peers.remove(id);
        }
    }

    fn receive(&mut self, id: Id, now: Instant) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let limit = match peer.role {
            Role::Stranger { .. } => HELLO_LIMIT,
            Role::Seated(_) | Role::Parting { .. } => FRAME_LIMIT,
        };
        let received = peer.connection.receive(limit);
        for frame in received.frames {
            // The role may change from one frame to the next.
            match self.peers.get(&id).map(|peer| peer.role) {
                Some(Role::Stranger { .. }) => self.admit(id, &frame, now),
                Some(Role::Seated(rank)) => self.hear(rank, &frame, now),
                Some(Role::Parting { .. }) | None => {}
            }
        }
        if let Some(cause) = received.end
            && let Some(Peer { connection, role }) = self.peers.remove(&id)
        {
            self.ended.push(connection);
            if let Role::Seated(rank) = role {
                self.lose(rank, &cause);
            }
        }
    }

    /// A stranger says hello.
    fn admit(&mut self, id: Id, frame: &[u8], now: Instant) {
        let (Stage::Assembling(assembly), Some(hello)) = (&mut self.stage, Hello::decode(frame)) else {
            self.peers.remove(&id);
            return;
        };
        let rank = hello.caller.rank;
        let (role, answer) = match assembly.arrive(hello, now) {
            arrival @ (Arrival::Seated | Arrival::Complete) => {
                self.seats.insert(rank, id);
                if arrival == Arrival::Complete {
                    self.begin_watch(now);
                }
                (Role::Seated(rank), ToRank::Heard)
            }
            Arrival::Foreign(error) => (parting(now), ToRank::Foreign(error)),
            Arrival::Doomed => {
                let Some(verdict) = assembly.verdict().cloned() else {
                    return;
                };
                self.told.insert(rank);
                (parting(now), ToRank::Verdict(verdict))
            }
            Arrival::Garbled => {
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
        let seated: BTreeSet<Id> = self.seats.values().copied().collect();
        self.peers.retain(|id, _| seated.contains(id));
        if let Stage::Assembling(assembly) = std::mem::replace(&mut self.stage, Stage::Over) {
            let watch = Watch::new(assembly.into_guests(), Process::this(), now);
            self.stage = Stage::Watching(watch);
        }
    }

    /// A rank says something.
    fn hear(&mut self, rank: Rank, frame: &[u8], now: Instant) {
        let said = decode::<ToHub>(frame);
        match (&mut self.stage, said) {
            (Stage::Watching(watch), Some(said)) => watch.hear(rank, said, now),
            (Stage::Watching(_) | Stage::Assembling(_), _) => {
                if let Some(id) = self.seats.get(&rank) {
                    self.peers.remove(id);
                }
                self.lose(rank, "carried a frame that makes no sense");
            }
            (Stage::Over, _) => {}
        }
    }

    /// A rank's connection is gone.
    fn lose(&mut self, rank: Rank, cause: &str) {
        self.seats.remove(&rank);
        match &mut self.stage {
            Stage::Assembling(assembly) => assembly.depart(rank, cause),
            Stage::Watching(watch) => watch.lose(rank, cause),
            Stage::Over => {}
        }
    }

    fn tick(&mut self, now: Instant) {
        if self.accept_again.is_some_and(|at| now >= at) {
            self.accept_again = None;
        }
        self.peers.retain(|_, peer| match peer.role {
            Role::Stranger { until } | Role::Parting { until, .. } => now < until,
            Role::Seated(_) => true,
        });
        match &mut self.stage {
            Stage::Assembling(assembly) => assembly.tick(now),
            Stage::Watching(watch) => watch.tick(now),
            Stage::Over => {}
        }
    }

    /// Does what the assembly or the watch have decided.
    fn carry_out(&mut self, now: Instant) {
        match &mut self.stage {
            Stage::Assembling(assembly) => {
                let Some(verdict) = assembly.verdict().cloned() else {
                    return;
                };
                self.condemned.get_or_insert(now);
                for (rank, id) in std::mem::take(&mut self.seats) {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        post(peer, &ToRank::Verdict(verdict.clone()));
                        peer.role = parting(now);
                        self.told.insert(rank);
                    }
                }
                let Stage::Assembling(assembly) = &self.stage else {
                    return;
                };
                let all_told = assembly.world().is_some_and(|world| self.told.len() >= world);
                if all_told || self.obituary_ends(assembly).is_some_and(|at| now >= at) {
                    self.end();
                }
            }
            Stage::Watching(watch) => {
                let orders = watch.orders();
                if watch.is_over() {
                    self.end();
                }
                for order in orders {
                    self.obey(order, now);
                }
            }
            Stage::Over => {}
        }
    }

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::All(frame) => {
                let Some(bytes) = encoded(&frame) else {
                    return;
                };
                for id in self.seats.values() {
                    if let Some(peer) = self.peers.get_mut(id) {
                        peer.connection.post(bytes.clone());
                    }
                }
            }
            Order::One(rank, frame) => {
                if let Some(peer) = self.seats.get(&rank).and_then(|id| self.peers.get_mut(id))
                    // Whoever does not read what it was told need not be told that it is heard.
                    && !(frame == ToRank::Pulse && peer.connection.is_pending())
                {
                    post(peer, &frame);
                }
            }
            Order::Part(rank) => {
                if let Some(peer) = self.seats.remove(&rank).and_then(|id| self.peers.get_mut(&id)) {
                    peer.role = parting(now);
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
            if let Some(Peer { role: Role::Seated(rank), .. }) = self.peers.remove(&id) {
                self.lose(rank, &format!("broke ({cause})"));
                self.carry_out(now);
            }
        }
        for peer in self.peers.values_mut() {
            if let Role::Parting { finished, .. } = &mut peer.role
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
        self.stage = Stage::Over;
        self.listeners.clear();
        self.peers.retain(|_, peer| !matches!(peer.role, Role::Stranger { .. }));
    }
}

fn parting(now: Instant) -> Role {
    Role::Parting { until: now + PARTING_PATIENCE, finished: false }
}

fn encoded(frame: &ToRank) -> Option<Bytes> {
    encode(frame).inspect_err(|error| log::error!("the hub cannot speak: {error}")).ok()
}

fn post(peer: &mut Peer, frame: &ToRank) {
    if let Some(bytes) = encoded(frame) {
        peer.connection.post(bytes);
    }
}
