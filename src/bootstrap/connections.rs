//! The sockets of a coordinator: its listeners, and the connections that it has accepted.
//!
//! Owns their limits, their deadlines and what is queued on them. Must not block on any of them: a silent,
//! slow or malicious client delays no other client.

use super::framed_stream::FramedStream;
use super::handshake::Admission;
use super::node_secret::NodeSecretListener;
use super::protocol::{Bytes, FRAME_LIMIT, OPENING_LIMIT, PROOF_LIMIT, Purpose, ToRank, encode};
use super::status_socket::StatusSocket;
use crate::descriptor;
use crate::descriptor_limit;
use crate::fault_point::{FaultPoint, reach};
use crate::process::ClosedInChild;
use crate::rank::Rank;
use crate::wake::{self, WakeFd};
use rustix::event::{PollFd, PollFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a connection may take to prove that it belongs to the job.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a rank may take to close its connection after the coordinator has sent everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of unauthenticated connections, if the process may have many descriptors. Each can hold a
/// proof of [`PROOF_LIMIT`] bytes.
const MAX_UNAUTHENTICATED: usize = 1024;
/// Connections accepted per listener before existing clients are served again.
const ACCEPT_BATCH: usize = 64;
/// How long the listeners are ignored after the system ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The state of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientState {
    /// The handshake is not complete.
    Unauthenticated { until: Instant },
    /// The connection belongs to this rank.
    Joined(Rank),
    /// All frames for the client are queued; `finished` once all are sent.
    Closing { until: Instant, finished: bool },
}

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) stream: FramedStream,
    /// The host that it connected from.
    pub(super) host: IpAddr,
    /// Whether that is this node.
    pub(super) is_on_this_node: bool,
    pub(super) state: ClientState,
    /// The handshake, until it is complete.
    pub(super) admission: Option<Admission>,
    /// Whether it is the connection of a rank. All others are limited in number.
    pub(super) is_rank: bool,
}

impl Client {
    /// Maximum length of the next frame, in bytes.
    pub(super) fn frame_limit(&self) -> usize {
        match (self.state, &self.admission) {
            (ClientState::Unauthenticated { .. }, Some(Admission::AwaitProof { .. })) => PROOF_LIMIT,
            // What a client sends while it is closed is discarded.
            (ClientState::Unauthenticated { .. } | ClientState::Closing { .. }, _) => OPENING_LIMIT,
            (ClientState::Joined(_), _) => FRAME_LIMIT,
        }
    }

    /// The rank that its other end claims and has not proved yet, as a verb phrase, if it claims one.
    pub(super) fn claim(&self) -> Option<String> {
        match &self.admission {
            Some(Admission::AwaitProof { opening, .. }) if opening.header.purpose == Purpose::Join => {
                Some(opening.header.claim())
            }
            _ => None,
        }
    }
}

/// Identifies a connection. Ids count up in the order of acceptance.
pub(super) type ClientId = u64;

/// The listeners and connections of a coordinator.
pub(super) struct Connections {
    closed_in_child: Vec<ClosedInChild>,
    listeners: Vec<TcpListener>,
    /// Hands the job's secret to the ranks of this node, if they need it.
    node_secret: Option<NodeSecretListener>,
    /// Where processes of this user ask for the state of the ranks. `None` if the system has no such sockets.
    status_socket: Option<StatusSocket>,
    /// Maximum number of connections that are not those of ranks. Beyond it some are dropped.
    max_unauthenticated: usize,
    accept_resumes: Option<Instant>,
    clients: BTreeMap<ClientId, Client>,
    /// Connections that have ended. They stay open until all other clients are notified.
    ended: Vec<FramedStream>,
    next_id: ClientId,
}

impl Connections {
    /// Listens at `listeners`, which do not block, and hands the job's secret out at `node_secret`.
    pub(super) fn new(listeners: Vec<TcpListener>, node_secret: Option<NodeSecretListener>) -> Self {
        Self {
            closed_in_child: listeners.iter().map(|listener| ClosedInChild::new(listener.as_fd())).collect(),
            listeners,
            node_secret,
            status_socket: StatusSocket::bind()
                .inspect_err(|cause| log::debug!("flexring status cannot find this process: {cause}"))
                .ok(),
            max_unauthenticated: descriptor_limit::unauthenticated(MAX_UNAUTHENTICATED),
            accept_resumes: None,
            clients: BTreeMap::new(),
            ended: Vec::new(),
            next_id: 0,
        }
    }

    /// Whether there is no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// The connection with this number, if it is open.
    pub(super) fn get(&self, id: ClientId) -> Option<&Client> {
        self.clients.get(&id)
    }

    /// The connection with this number, if it is open.
    pub(super) fn get_mut(&mut self, id: ClientId) -> Option<&mut Client> {
        self.clients.get_mut(&id)
    }

    /// Drops a connection at once.
    pub(super) fn remove(&mut self, id: ClientId) {
        self.clients.remove(&id);
    }

    /// Drops all connections but these.
    pub(super) fn retain(&mut self, ids: &BTreeSet<ClientId>) {
        self.clients.retain(|id, _| ids.contains(id));
    }

    /// Drops the connections that have not proved that they belong to the job.
    pub(super) fn drop_unauthenticated(&mut self) {
        self.clients.retain(|_, client| !matches!(client.state, ClientState::Unauthenticated { .. }));
    }

    /// Removes a connection that the client has closed, and keeps it open until [`finish`](Self::finish).
    /// Returns its state.
    pub(super) fn end(&mut self, id: ClientId) -> Option<ClientState> {
        let Client { stream, state, .. } = self.clients.remove(&id)?;
        self.ended.push(stream);
        Some(state)
    }

    /// Closes all connections that are in use, once everything is sent.
    pub(super) fn close_all(&mut self, now: Instant) {
        for client in
            self.clients.values_mut().filter(|client| matches!(client.state, ClientState::Joined(_)))
        {
            client.state = closing_at(now);
        }
    }

    /// Queues the answer to a handshake.
    pub(super) fn answer(
        &mut self,
        id: ClientId,
        state: ClientState,
        frames: impl IntoIterator<Item = ToRank>,
    ) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.state = state;
            frames.into_iter().for_each(|frame| send(client, &frame));
        }
    }

    /// The next time to call [`on_tick`](Self::on_tick).
    pub(super) fn deadline(&self) -> Option<Instant> {
        let clients = self.clients.values().filter_map(|client| match client.state {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => Some(until),
            ClientState::Joined(_) => None,
        });
        clients.chain(self.accept_resumes).min()
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        if self.accept_resumes.is_some_and(|at| now >= at) {
            self.accept_resumes = None;
        }
        self.clients.retain(|_, client| match client.state {
            ClientState::Unauthenticated { until } | ClientState::Closing { until, .. } => now < until,
            ClientState::Joined(_) => true,
        });
    }

    /// Sleeps for at most `sleep`, until `wake` is notified, or until a socket is ready. Returns whether
    /// connections can be accepted, and which clients are ready.
    pub(super) fn poll(&self, wake: &WakeFd, sleep: Option<Duration>) -> (bool, Vec<ClientId>) {
        let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
        if self.accept_resumes.is_none() {
            fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            fds.extend(self.node_secret.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
            fds.extend(self.status_socket.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        }
        let listening = fds.len() - 1;
        fds.extend(
            self.clients.values().map(|client| PollFd::new(&client.stream, client.stream.poll_flags())),
        );
        // An interrupted wait ends early, and the next one makes up for it.
        if wake::sleep(&mut fds, sleep).is_err() {
            return (false, Vec::new());
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (listeners, connections) = fds[1..].split_at(listening);
        let ready =
            self.clients.keys().zip(connections).filter(|(_, fd)| is_ready(fd)).map(|(id, _)| *id).collect();
        (listeners.iter().any(is_ready), ready)
    }

    /// Accepts connections, and hands the secret to ranks of this node. A lack of descriptors ends neither.
    /// Returns why a connection could not be accepted, if one could not.
    pub(super) fn accept(&mut self, now: Instant) -> Option<std::io::Error> {
        let mut failure = self.node_secret.as_ref().and_then(|listener| listener.serve().err());
        for index in 0..self.listeners.len() {
            for _ in 0..ACCEPT_BATCH {
                let (stream, address) = match descriptor::accept_tcp(&self.listeners[index]) {
                    Ok(accepted) => accepted,
                    Err(cause) if cause.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        failure = Some(cause);
                        break;
                    }
                };
                reach(FaultPoint::CoordinatorAccepted);
                // On one node, the kernel gives both ends of a connection the same address.
                let is_on_this_node = stream.local_addr().is_ok_and(|local| local.ip() == address.ip());
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
                let client = Client { stream, host, is_on_this_node, state, admission, is_rank: false };
                self.clients.insert(self.next_id, client);
                self.next_id += 1;
                self.drop_excess(0);
            }
        }
        let cause = failure?;
        // Mostly out of descriptors. The listener stays readable, so polling it would spin.
        log::debug!("the coordinator cannot accept a connection: {cause}");
        self.accept_resumes = Some(now + ACCEPT_PAUSE);
        self.drop_excess(1);
        Some(cause)
    }

    /// Drops connections that are not those of ranks beyond the limit, and `at_least` so many if there are:
    /// always the oldest one of the host that has most of them, so that one host cannot crowd out the others.
    fn drop_excess(&mut self, at_least: usize) {
        let mut by_host: BTreeMap<IpAddr, BTreeSet<ClientId>> = BTreeMap::new();
        for (id, client) in &self.clients {
            if !client.is_rank {
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

    /// Sends as much as the sockets accept, to the client `last` after all others. Returns the connections
    /// that broke, and how, as verb phrases. They can still be read from.
    pub(super) fn flush(&mut self, last: Option<ClientId>) -> Vec<(ClientId, String)> {
        let mut broken = Vec::new();
        let others: Vec<ClientId> = self.clients.keys().copied().filter(|id| Some(*id) != last).collect();
        for id in others.into_iter().chain(last) {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            if let Err(cause) = client.stream.flush() {
                broken.push((id, format!("broke ({cause})")));
            }
        }
        broken
    }

    /// Closes the connections on which everything is sent. Connections that clients have ended are closed
    /// only now: a client that sees the end of its connection can rely on the others having been notified.
    pub(super) fn finish(&mut self) {
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

    /// Accepts processes of this user that ask for the state of the ranks.
    pub(super) fn accept_questions(&self) -> Vec<UnixStream> {
        self.status_socket.as_ref().map(StatusSocket::accept).unwrap_or_default()
    }

    /// Frees the port, the name under which the secret was handed out, and that for questions.
    pub(super) fn stop_listening(&mut self) {
        self.status_socket = None;
        drop(self.take_listeners());
    }

    /// Stops listening, frees the name under which the secret was handed out, and returns the listeners.
    pub(super) fn take_listeners(&mut self) -> Vec<TcpListener> {
        self.node_secret = None;
        self.closed_in_child.clear();
        std::mem::take(&mut self.listeners)
    }
}

/// The state of a connection that is closed once all frames are sent.
pub(super) fn closing_at(now: Instant) -> ClientState {
    ClientState::Closing { until: now + CLOSE_TIMEOUT, finished: false }
}

/// The encoded frame, if it can be encoded.
pub(super) fn encode_or_log(frame: &ToRank) -> Option<Bytes> {
    encode(frame).inspect_err(|error| log::error!("the coordinator cannot encode a message: {error}")).ok()
}

/// Queues a frame.
pub(super) fn send(client: &mut Client, frame: &ToRank) {
    if let Some(bytes) = encode_or_log(frame) {
        client.stream.enqueue(bytes);
    }
}
