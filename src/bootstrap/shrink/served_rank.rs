//! One rank of one communicator, which the thread serves.
//!
//! Owns all connections between this rank and others that shrink, and the coordinator of a new world until it
//! is joined. [`Agreement`] decides. Must not block on any connection, and must not know which other ranks
//! the thread serves.

use super::agreement::{Agreement, AgreementAction};
use super::frame::ServiceNumber;
use super::message::NewWorld;
use super::notices::Notices;
use super::request::{AgreedWorld, ServedState, ServiceRequest, ServiceShared};
use super::session::{Session, SessionParams};
use super::unidentified::{OPENING_TIMEOUT, OpenedConnection};
use crate::bootstrap::coordinator::Coordinator;
use crate::bootstrap::unique_id::UniqueId;
use crate::config::Config;
use crate::error::Result;
use crate::fault::Fault;
use crate::rank::Rank;
use crate::transport::tcp::{check_connected, start_connecting};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Errors of a connection that say nothing about the rank at its other end: this process or host lacks
/// something.
const LACKS: [Errno; 5] = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];

/// What a rank is served with.
#[derive(Debug)]
pub(super) struct ServedRankParams {
    pub(super) session: SessionParams,
    /// As [`ShrinkServiceParams::endpoints`](super::service::ShrinkServiceParams::endpoints).
    pub(super) endpoints: Vec<Vec<SocketAddr>>,
    pub(super) ranks_per_core: usize,
    /// For the coordinator of a new world.
    pub(super) config: Config,
}

/// A connection that the kernel is making.
#[derive(Debug)]
struct PendingConnection {
    rank: Rank,
    /// The index of the endpoint.
    endpoint: usize,
    stream: TcpStream,
    /// When the next endpoint is tried, if there is one.
    until: Option<Instant>,
}

/// A connection, authenticated or not.
#[derive(Debug)]
struct ServedSession {
    session: Session,
    /// Whether what its other end says about the rank's process counts: not at an address that may be that of
    /// another machine.
    is_best: bool,
    opened: Instant,
    /// Closes once everything is sent.
    closing: bool,
}

/// A rank that the thread serves.
#[derive(Debug)]
pub(super) struct ServedRank {
    number: ServiceNumber,
    shared: Arc<ServiceShared>,
    params: ServedRankParams,
    agreement: Agreement,
    sessions: Vec<ServedSession>,
    /// Connections that the kernel is making.
    connecting: Vec<PendingConnection>,
    /// By rank, the index of the endpoint that was reached last.
    reached: Vec<usize>,
    /// Notices that travel on connections of their own.
    notices: Notices,
    /// The coordinator of the new world that this rank leads, until the world is joined. Dropping it cancels
    /// an incomplete rendezvous.
    coordinator: Option<Coordinator>,
    /// The fault of the new world, until it is joined.
    fault: Option<Arc<Fault>>,
    /// The number of the last call.
    call: u64,
    /// Whether something has happened since the last [`advance`](Self::advance), and when the next one is due
    /// otherwise.
    has_events: bool,
    due: Option<Instant>,
    has_left: bool,
    /// Last, because the handle may wait until the connections above are closed.
    _served: ServedState,
}

impl ServedRank {
    /// Begins to serve the rank of the handle that has `shared`.
    pub(super) fn new(shared: Arc<ServiceShared>, params: ServedRankParams) -> Self {
        let SessionParams { key, me, world, .. } = &params.session;
        let silence = silence(params.ranks_per_core);
        Self {
            number: ServiceNumber::new(key, *me),
            agreement: Agreement::new(*me, *world, silence, Instant::now()),
            sessions: Vec::new(),
            connecting: Vec::new(),
            reached: vec![0; *world],
            notices: Notices::default(),
            coordinator: None,
            fault: None,
            call: 0,
            has_events: false,
            due: None,
            has_left: false,
            params,
            _served: ServedState::new(&shared),
            shared,
        }
    }

    pub(super) fn number(&self) -> ServiceNumber {
        self.number
    }

    /// The number of ranks of its communicator.
    pub(super) fn world(&self) -> usize {
        self.params.session.world
    }

    /// Whether the handle is being dropped, and everything is sent.
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    /// Adds what to poll for: connections that are being made, sessions, and notices.
    pub(super) fn poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.extend(self.connecting.iter().map(|pending| PollFd::new(&pending.stream, PollFlags::OUT)));
        fds.extend(
            self.sessions.iter().map(|served| PollFd::new(&served.session, served.session.poll_flags())),
        );
        fds.extend(self.notices.poll_fds());
    }

    /// When [`advance`](Self::advance) is due, if no event comes before.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Handles the connections that are ready, given in the order of [`poll_fds`](Self::poll_fds).
    pub(super) fn on_ready(&mut self, ready: &[bool], now: Instant) {
        if !ready.contains(&true) {
            return;
        }
        let indices = |ready: &[bool]| {
            Vec::from_iter(ready.iter().enumerate().filter(|(_, ready)| **ready).map(|(index, _)| index))
        };
        let (connecting, others) = ready.split_at(self.connecting.len());
        let (sessions, notices) = others.split_at(self.sessions.len());
        self.has_events = true;
        // Connections are added behind the ones that are ready.
        self.receive(&indices(sessions), now);
        self.finish_connecting(&indices(connecting), now);
        self.advance_notices(notices, now);
    }

    /// Does what is due, and what the program has asked for if `was_woken`. Costs next to nothing if there is
    /// neither, so that many ranks do not delay each other.
    pub(super) fn advance(&mut self, was_woken: bool, now: Instant) {
        let leaving = was_woken && self.take_requests(now);
        if !self.has_events && self.due.is_none_or(|at| now < at) {
            self.has_left = leaving;
            return;
        }
        self.has_events = false;
        self.try_further_endpoints(now);
        if self.agreement.is_active() {
            self.agreement.on_tick(now);
        }
        self.execute_all(now);
        if !self.notices.is_empty() {
            // Those that take too long are given up.
            self.advance_notices(&[], now);
        }
        self.flush();
        // The others see that this rank is gone when its connections close.
        self.has_left = leaving;
        self.close_finished(now);
        let late = self.oldest_unauthenticated().map(|opened| opened + OPENING_TIMEOUT);
        let further = self.connecting.iter().filter_map(|pending| pending.until);
        let due = further.chain(late).chain(self.agreement.deadline(now)).chain(self.notices.deadline());
        self.due = due.min();
    }

    /// Carries out what the program has asked for. Whether the handle is being dropped.
    fn take_requests(&mut self, now: Instant) -> bool {
        let (requests, leaving) = {
            let mut state = self.shared.lock();
            (std::mem::take(&mut state.requests), state.leaving)
        };
        for request in requests {
            self.has_events = true;
            self.on_request(request, now);
        }
        leaving
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
        for pending in self.connecting.drain(..) {
            self.agreement.on_not_tried(pending.rank, None);
        }
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
            AgreementAction::Connect(rank) => self.connect(rank, 0, now),
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
                    None => {
                        let endpoint = self.params.endpoints[rank][self.reached[rank]];
                        self.notices.send(rank, endpoint, notice, now);
                    }
                }
            }
            // A rank that is stopped must find its notice when it continues.
            AgreementAction::Decide(_) if !self.notices.is_empty() => self.agreement.decide_later(now),
            AgreementAction::Decide(members) => {
                let created = Coordinator::create(&self.params.config)
                    .and_then(|(coordinator, id)| Ok((coordinator, id.hide(&self.params.session.key)?)));
                let (coordinator, id) = created
                    .map_or_else(|error| (None, Err(error)), |(coordinator, id)| (Some(coordinator), Ok(id)));
                if self.agreement.decided(members, id) {
                    self.coordinator = coordinator;
                }
            }
            AgreementAction::Cancel(error) => {
                // Ends the rendezvous, or the joins of ranks that have not reached it. A world that is
                // complete has lost a rank all the same, and its next call says so.
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
        let id = UniqueId::reveal(&world.id, &self.params.session.key)?;
        let fault = Arc::new(Fault::new());
        self.fault = Some(Arc::clone(&fault));
        Ok(AgreedWorld { members: world.members, id, fault })
    }

    /// A connection with the rank, authenticated if there is one.
    fn session_of(&mut self, rank: Rank) -> Option<&mut Session> {
        let with_rank = |served: &&mut ServedSession| served.session.peer() == Some(rank) && !served.closing;
        let sessions = self.sessions.iter_mut().filter(with_rank);
        sessions.max_by_key(|served| served.session.is_authenticated()).map(|served| &mut served.session)
    }

    /// Begins to connect to an endpoint of the rank.
    fn connect(&mut self, rank: Rank, endpoint: usize, now: Instant) {
        let count = self.params.endpoints[rank].len();
        match start_connecting(self.params.endpoints[rank][endpoint]) {
            Ok(stream) => {
                // All are tried before the rank counts as unreachable.
                let share =
                    silence(self.params.ranks_per_core) / u32::try_from(count + 1).unwrap_or(u32::MAX);
                let until = (endpoint + 1 < count).then(|| now + share);
                self.connecting.push(PendingConnection { rank, endpoint, stream, until });
            }
            Err(cause) => self.on_connect_error(rank, endpoint, &cause, now),
        }
    }

    /// Gives up connections that take too long for ranks that have further endpoints.
    fn try_further_endpoints(&mut self, now: Instant) {
        let is_late = |pending: &mut PendingConnection| pending.until.is_some_and(|until| until <= now);
        for late in Vec::from_iter(self.connecting.extract_if(.., is_late)) {
            self.connect(late.rank, late.endpoint + 1, now);
        }
    }

    fn on_connect_error(&mut self, rank: Rank, endpoint: usize, cause: &io::Error, now: Instant) {
        let errno = cause.raw_os_error();
        let is = |expected: Errno| errno == Some(expected.raw_os_error());
        if endpoint == 0 && (is(Errno::CONNREFUSED) || is(Errno::CONNRESET)) {
            self.agreement.on_refused(rank, now);
        } else if LACKS.into_iter().any(is) {
            log::debug!("rank {rank} is asked later whether it shrinks: {cause}");
            self.agreement.on_not_tried(rank, Some(now));
        } else if endpoint + 1 < self.params.endpoints[rank].len() {
            self.connect(rank, endpoint + 1, now);
        } else {
            log::debug!("rank {rank} cannot be asked whether it shrinks: {cause}");
            self.agreement.on_unreachable(rank, now);
        }
    }

    /// Completes connections, from the highest index down, because a completed one leaves the list.
    fn finish_connecting(&mut self, ready: &[usize], now: Instant) {
        for index in ready.iter().rev() {
            let PendingConnection { rank, endpoint, stream, .. } = self.connecting.swap_remove(*index);
            match check_connected(&stream) {
                Ok(()) => {
                    self.reached[rank] = endpoint;
                    self.agreement.on_connected(rank);
                    self.open(stream, rank, now);
                }
                Err(cause) => self.on_connect_error(rank, endpoint, &cause, now),
            }
        }
    }

    /// Begins to talk on a connection that this rank has made.
    fn open(&mut self, stream: TcpStream, rank: Rank, now: Instant) {
        let opened = Session::connect(stream, &self.params.session, rank).and_then(|mut session| {
            session.send(self.agreement.state())?;
            Ok(session)
        });
        match opened {
            Ok(session) => {
                let is_best = self.reached[rank] == 0;
                self.sessions.push(ServedSession { session, is_best, opened: now, closing: false });
            }
            Err(error) => {
                log::debug!("{error}");
                self.agreement.on_lost(rank, now);
            }
        }
    }

    /// Takes over a connection that was opened to this rank.
    pub(super) fn accept(&mut self, connection: OpenedConnection, now: Instant) {
        match Session::accept(connection, &self.params.session) {
            Ok(session) => {
                self.sessions.push(ServedSession { session, is_best: true, opened: now, closing: false });
                self.has_events = true;
                // What came together with the opening makes the socket readable no more.
                self.receive(&[self.sessions.len() - 1], now);
            }
            Err(error) => log::debug!("{error}"),
        }
    }

    /// How many accepted connections are not authenticated.
    pub(super) fn unauthenticated(&self) -> usize {
        self.sessions.iter().filter(|served| served.session.peer().is_none()).count()
    }

    /// When the oldest of them was taken over.
    pub(super) fn oldest_unauthenticated(&self) -> Option<Instant> {
        let unauthenticated = self.sessions.iter().filter(|served| served.session.peer().is_none());
        unauthenticated.map(|served| served.opened).min()
    }

    /// Closes it.
    pub(super) fn remove_oldest_unauthenticated(&mut self) {
        let oldest = self.oldest_unauthenticated();
        let is_oldest =
            |served: &ServedSession| served.session.peer().is_none() && Some(served.opened) == oldest;
        if let Some(index) = self.sessions.iter().position(is_oldest) {
            self.sessions.remove(index);
        }
    }

    fn advance_notices(&mut self, ready: &[bool], now: Instant) {
        let params = &self.params.session;
        self.notices.advance(ready, now, |stream, rank| Session::connect(stream, params, rank));
    }

    fn receive(&mut self, ready: &[usize], now: Instant) {
        let mut ended: Vec<(usize, Option<Rank>, bool)> = Vec::new();
        for index in ready {
            let received = self.sessions[*index].session.receive();
            let peer = self.sessions[*index].session.peer();
            for notice in received.notices {
                self.agreement.on_notice(notice);
            }
            if let Some(rank) = peer {
                for message in received.messages {
                    self.agreement.on_message(rank, message, now);
                }
            }
            if let Some(why) = received.end {
                log::trace!("a connection between ranks that shrink {why}");
                ended.push((*index, peer, received.is_gone && self.sessions[*index].is_best));
            }
        }
        for (index, ..) in ended.iter().rev() {
            self.sessions.remove(*index);
        }
        for (_, peer, is_gone) in ended {
            match peer {
                Some(rank) if is_gone => self.agreement.on_refused(rank, now),
                Some(rank) => self.on_session_end(rank, now),
                None => {}
            }
        }
    }

    fn on_session_end(&mut self, rank: Rank, now: Instant) {
        if self.session_of(rank).is_none() {
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

/// How long a rank may be silent before it counts as stopped or unreachable: 1.5 s, or as long as each of the
/// ranks that share a core runs for 50 ms in turn.
fn silence(ranks_per_core: usize) -> Duration {
    Duration::from_millis(1500)
        .max(Duration::from_millis(50) * u32::try_from(ranks_per_core).unwrap_or(u32::MAX))
}
