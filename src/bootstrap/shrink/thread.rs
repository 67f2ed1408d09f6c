//! The thread that answers ranks that shrink, and carries out the shrink of this rank.
//!
//! Owns the listening sockets and all connections between ranks that shrink, and the coordinator of a new world until it
//! is joined. [`Agreement`] decides. Must not block on any connection.

use super::agreement::{Agreement, AgreementAction};
use super::listener::ShrinkListener;
use super::message::NewWorld;
use super::notices::Notices;
use super::request::{AgreedWorld, ServiceRequest, ServiceShared};
use super::session::Session;
use crate::bootstrap::coordinator::Coordinator;
use crate::bootstrap::unique_id::UniqueId;
use crate::config::Config;
use crate::descriptor_limit;
use crate::error::Result;
use crate::fault::Fault;
use crate::rank::Rank;
use crate::secret::SecretKey;
use crate::transport::tcp::start_connecting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an accepted connection may take to authenticate.
const OPENING_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections accepted per listener before others are served again.
const ACCEPT_BATCH: usize = 64;
/// How long the listeners are ignored after the system ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Accepted connections that may be unauthenticated, in addition to one for each rank. All together have at most a quarter of
/// the descriptors of the process.
const UNAUTHENTICATED: usize = 64;

/// What a service needs.
#[derive(Debug)]
pub struct ShrinkServiceParams {
    /// This process's rank.
    pub me: Rank,
    /// By rank, the endpoint of its [`ShrinkListener`] by which this rank reaches it.
    pub endpoints: Vec<SocketAddr>,
    /// Authenticates the ranks of this communicator.
    pub key: SecretKey,
    /// The sockets of this rank.
    pub listener: ShrinkListener,
    /// Ranks of a node for each of its cores, rounded down: where many ranks share a core, they may answer later.
    pub ranks_per_core: usize,
    /// For the coordinator of a new world.
    pub config: Config,
}

/// A connection, authenticated or not.
#[derive(Debug)]
struct ServedSession {
    session: Session,
    opened: Instant,
    /// Closes once everything is sent.
    closing: bool,
}

/// The service's thread.
pub(super) struct ServiceThread {
    shared: Arc<ServiceShared>,
    params: ShrinkServiceParams,
    agreement: Agreement,
    sessions: Vec<ServedSession>,
    /// Connections that the kernel is making.
    connecting: Vec<(Rank, TcpStream)>,
    /// Notices that travel on connections of their own.
    notices: Notices,
    max_unauthenticated: usize,
    accept_resumes: Option<Instant>,
    /// The coordinator of the new world that this rank leads, until the world is joined. Dropping it cancels an incomplete
    /// rendezvous.
    coordinator: Option<Coordinator>,
    /// The fault of the new world, until it is joined.
    fault: Option<Arc<Fault>>,
    /// The number of the last call.
    call: u64,
}

/// What is ready, by index.
#[derive(Debug, Default)]
struct ReadyIo {
    accept: bool,
    connecting: Vec<usize>,
    sessions: Vec<usize>,
    /// By position, whether the connections of notices are ready.
    notices: Vec<bool>,
}

impl ServiceThread {
    pub(super) fn new(shared: Arc<ServiceShared>, params: ShrinkServiceParams) -> Self {
        Self {
            shared,
            agreement: Agreement::new(
                params.me,
                params.endpoints.len(),
                silence(params.ranks_per_core),
                Instant::now(),
            ),
            sessions: Vec::new(),
            connecting: Vec::new(),
            notices: Notices::default(),
            max_unauthenticated: descriptor_limit::unauthenticated(UNAUTHENTICATED + params.endpoints.len()),
            accept_resumes: None,
            coordinator: None,
            fault: None,
            call: 0,
            params,
        }
    }

    /// Serves until the handle is dropped.
    pub(super) fn run(mut self) {
        loop {
            let ready = self.wait();
            let now = Instant::now();
            if self.accept_resumes.is_some_and(|at| now >= at) {
                self.accept_resumes = None;
            }
            self.shared.wake.drain();
            let (requests, leaving) = {
                let mut state = self.shared.lock();
                (std::mem::take(&mut state.requests), state.leaving)
            };
            // Connections are added after the ones that are ready by their index.
            self.receive(&ready.sessions, now);
            self.finish_connecting(&ready.connecting, now);
            self.advance_notices(&ready.notices, now);
            if ready.accept {
                self.accept(now);
            }
            for request in requests {
                self.on_request(request, now);
            }
            self.agreement.on_tick(now);
            self.execute_all(now);
            self.flush();
            if leaving {
                // The others see that this rank is gone when the sockets close.
                return;
            }
            self.close_finished(now);
        }
    }

    /// Sleeps until an event.
    fn wait(&self) -> ReadyIo {
        let now = Instant::now();
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let listening = if self.accept_resumes.is_none() { &*self.params.listener.sockets } else { &[] };
        fds.extend(listening.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(self.connecting.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::OUT)));
        fds.extend(
            self.sessions.iter().map(|served| PollFd::new(&served.session, served.session.poll_flags())),
        );
        fds.extend(self.notices.poll_fds());
        let unauthenticated = self.sessions.iter().filter(|served| served.session.peer().is_none());
        let until = unauthenticated
            .map(|served| served.opened + OPENING_TIMEOUT)
            .chain(self.agreement.deadline(now))
            .chain(self.accept_resumes)
            .chain(self.notices.deadline())
            .min();
        let timeout = until.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        // An interrupted wait ends early, and the next one makes up for it.
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return ReadyIo::default();
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let indices = |fds: &[PollFd<'_>]| {
            fds.iter().enumerate().filter(|(_, fd)| is_ready(fd)).map(|(index, _)| index).collect()
        };
        let (listeners, others) = fds[1..].split_at(listening.len());
        let (connecting, others) = others.split_at(self.connecting.len());
        let (sessions, notices) = others.split_at(self.sessions.len());
        ReadyIo {
            accept: listeners.iter().any(is_ready),
            connecting: indices(connecting),
            sessions: indices(sessions),
            notices: notices.iter().map(is_ready).collect(),
        }
    }

    fn on_request(&mut self, request: ServiceRequest, now: Instant) {
        match request {
            ServiceRequest::Call { number, exclude, calls, deadline } => {
                self.call = number;
                self.agreement.call(exclude, calls, now, deadline);
            }
            ServiceRequest::CallAgain { number } => {
                self.call = number;
                self.end_join();
                self.agreement.call_again(now);
            }
            ServiceRequest::Joined => {
                self.end_join();
                self.agreement.joined();
                self.execute_all(now);
                self.close_own();
            }
            ServiceRequest::GaveUp => {
                self.end_join();
                self.agreement.gave_up();
                self.execute_all(now);
                self.close_own();
            }
        }
    }

    fn end_join(&mut self) {
        self.coordinator = None;
        self.fault = None;
    }

    /// Closes the connections that this rank made, once everything is sent.
    fn close_own(&mut self) {
        self.connecting.clear();
        for served in self.sessions.iter_mut().filter(|served| served.session.is_initiator()) {
            served.closing = true;
        }
    }

    /// Carries out what the agreement decided, and what it decides meanwhile.
    fn execute_all(&mut self, now: Instant) {
        loop {
            let actions = self.agreement.actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.execute(action, now);
            }
        }
    }

    fn execute(&mut self, action: AgreementAction, now: Instant) {
        match action {
            AgreementAction::Connect(rank) => self.connect(rank, now),
            AgreementAction::Send(rank, message) => {
                if let Some(session) = self.session_of(rank)
                    && let Err(error) = session.send(message)
                {
                    log::error!("cannot send a message of a shrink to rank {rank}: {error}");
                }
            }
            AgreementAction::Notify(rank, notice) => {
                match self.session_of(rank).filter(|session| session.can_notify()) {
                    Some(session) => {
                        if let Err(error) = session.send_notice(&notice) {
                            log::error!("cannot send rank {rank} the notice of a shrink: {error}");
                        }
                    }
                    None => self.notices.send(rank, self.params.endpoints[rank], notice, now),
                }
            }
            // A rank that is stopped must find its notice when it continues.
            AgreementAction::Decide(_) if !self.notices.is_empty() => self.agreement.decide_later(now),
            AgreementAction::Decide(members) => {
                let created = Coordinator::create(&self.params.config)
                    .and_then(|(coordinator, id)| Ok((coordinator, id.hide(&self.params.key)?)));
                let (coordinator, id) = created
                    .map_or_else(|error| (None, Err(error)), |(coordinator, id)| (Some(coordinator), Ok(id)));
                if self.agreement.decided(members, id) {
                    self.coordinator = coordinator;
                }
            }
            AgreementAction::Cancel(error) => {
                // Ends the rendezvous, or the joins of ranks that have not reached it. A world that is complete has lost a
                // rank all the same, and its next call says so.
                self.coordinator = None;
                if let Some(fault) = &self.fault {
                    fault.raise(error);
                }
            }
            AgreementAction::Finish(outcome) => {
                let outcome = outcome.and_then(|world| self.agreed(world));
                if outcome.is_err() {
                    self.end_join();
                    self.close_own();
                }
                self.shared.lock().outcome = Some((self.call, outcome));
                self.shared.changed.notify_all();
            }
        }
    }

    fn agreed(&mut self, world: NewWorld) -> Result<AgreedWorld> {
        let id = UniqueId::reveal(&world.id, &self.params.key)?;
        let fault = Arc::new(Fault::new()?);
        self.fault = Some(Arc::clone(&fault));
        Ok(AgreedWorld { members: world.members, id, fault })
    }

    /// A connection with the rank, authenticated if there is one.
    fn session_of(&mut self, rank: Rank) -> Option<&mut Session> {
        let with_rank = |served: &&mut ServedSession| served.session.peer() == Some(rank) && !served.closing;
        let sessions = self.sessions.iter_mut().filter(with_rank);
        sessions.max_by_key(|served| served.session.is_authenticated()).map(|served| &mut served.session)
    }

    fn connect(&mut self, rank: Rank, now: Instant) {
        match start_connecting(self.params.endpoints[rank]) {
            Ok(socket) => self.connecting.push((rank, socket)),
            Err(cause) => self.on_connect_error(rank, &cause, now),
        }
    }

    fn on_connect_error(&mut self, rank: Rank, cause: &io::Error, now: Instant) {
        let errno = cause.raw_os_error();
        let is = |expected: Errno| errno == Some(expected.raw_os_error());
        if is(Errno::CONNREFUSED) || is(Errno::CONNRESET) {
            self.agreement.on_refused(rank, now);
        } else {
            log::debug!("rank {rank} cannot be asked whether it shrinks: {cause}");
            self.agreement.on_unreachable(rank, now);
        }
    }

    /// Completes connections, from the highest index down, because a completed one leaves the list.
    fn finish_connecting(&mut self, ready: &[usize], now: Instant) {
        for index in ready.iter().rev() {
            let (rank, stream) = self.connecting.swap_remove(*index);
            // On one node, a socket that connects to a port without a listener may connect to itself.
            let is_own = stream.local_addr().ok().is_some_and(|local| stream.peer_addr().ok() == Some(local));
            let outcome = match stream.take_error() {
                Ok(None) if is_own => Err(io::Error::from(io::ErrorKind::ConnectionRefused)),
                Ok(None) => Ok(()),
                Ok(Some(cause)) | Err(cause) => Err(cause),
            };
            match outcome {
                Ok(()) => {
                    self.agreement.on_connected(rank);
                    self.open(stream, Some(rank), now);
                }
                Err(cause) if is_own => {
                    log::debug!("rank {rank}: {cause}");
                    self.agreement.on_refused(rank, now);
                }
                Err(cause) => self.on_connect_error(rank, &cause, now),
            }
        }
    }

    fn open(&mut self, stream: TcpStream, peer: Option<Rank>, now: Instant) {
        let ShrinkServiceParams { key, me, endpoints, config, .. } = &self.params;
        let opened = Session::new(stream, key.clone(), *me, peer, endpoints.len(), config.tls.0).and_then(
            |mut session| {
                if peer.is_some() {
                    session.send(self.agreement.state())?;
                }
                Ok(session)
            },
        );
        match opened {
            Ok(session) => self.sessions.push(ServedSession { session, opened: now, closing: false }),
            Err(error) => {
                log::debug!("{error}");
                if let Some(rank) = peer {
                    self.agreement.on_lost(rank, now);
                }
            }
        }
    }

    fn advance_notices(&mut self, ready: &[bool], now: Instant) {
        let ShrinkServiceParams { key, me, endpoints, config, .. } = &self.params;
        self.notices.advance(ready, now, |stream, rank| {
            Session::new(stream, key.clone(), *me, Some(rank), endpoints.len(), config.tls.0)
        });
    }

    fn accept(&mut self, now: Instant) {
        for index in 0..self.params.listener.sockets.len() {
            for _ in 0..ACCEPT_BATCH {
                match self.params.listener.sockets[index].accept() {
                    Ok((stream, _)) => self.open(stream, None, now),
                    Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        // Mostly out of descriptors. The listener stays readable, so polling it would spin.
                        log::debug!("cannot accept a connection of a rank that shrinks: {cause}");
                        self.accept_resumes = Some(now + ACCEPT_PAUSE);
                        break;
                    }
                }
                let is_unknown = |served: &ServedSession| served.session.peer().is_none();
                let unknown = self.sessions.iter().filter(|served| is_unknown(served)).count();
                if unknown > self.max_unauthenticated
                    && let Some(oldest) = self.sessions.iter().position(is_unknown)
                {
                    self.sessions.remove(oldest);
                }
            }
        }
    }

    fn receive(&mut self, ready: &[usize], now: Instant) {
        let mut ended: Vec<(usize, Option<Rank>)> = Vec::new();
        for index in ready {
            let received = self.sessions[*index].session.receive();
            let peer = self.sessions[*index].session.peer();
            for notice in received.notices {
                self.agreement.on_notice(notice);
            }
            if let Some(rank) = peer.filter(|rank| *rank < self.params.endpoints.len()) {
                for message in received.messages {
                    self.agreement.on_message(rank, message, now);
                }
            }
            if let Some(why) = received.end {
                log::trace!("a connection between ranks that shrink {why}");
                ended.push((*index, peer));
            }
        }
        for (index, _) in ended.iter().rev() {
            self.sessions.remove(*index);
        }
        for rank in ended.into_iter().filter_map(|(_, peer)| peer) {
            self.on_session_end(rank, now);
        }
    }

    fn on_session_end(&mut self, rank: Rank, now: Instant) {
        if rank < self.params.endpoints.len() && self.session_of(rank).is_none() {
            self.agreement.on_lost(rank, now);
        }
    }

    fn flush(&mut self) {
        for served in &mut self.sessions {
            if let Err(cause) = served.session.flush() {
                // The next read reports the end of the connection.
                log::trace!("a connection between ranks that shrink broke: {cause}");
            }
        }
    }

    /// Closes connections that are done, or that did not authenticate in time.
    fn close_finished(&mut self, now: Instant) {
        let is_over = |served: &ServedSession| {
            let is_late = served.session.peer().is_none() && now >= served.opened + OPENING_TIMEOUT;
            is_late || (served.closing && !served.session.has_unsent())
        };
        let closed: Vec<Rank> = self
            .sessions
            .iter()
            .filter(|served| is_over(served))
            .filter_map(|served| served.session.peer())
            .collect();
        self.sessions.retain(|served| !is_over(served));
        for rank in closed {
            self.on_session_end(rank, now);
        }
    }
}

/// How long a rank may be silent before it counts as stopped or unreachable: 1.5 s, or as long as each of the ranks that
/// share a core runs for 50 ms in turn.
fn silence(ranks_per_core: usize) -> Duration {
    Duration::from_millis(1500)
        .max(Duration::from_millis(50) * u32::try_from(ranks_per_core).unwrap_or(u32::MAX))
}
