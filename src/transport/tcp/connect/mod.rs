//! Establishing links: connecting, accepting, and the handshake that identifies the other end.
//!
//! Owns each connection until its handshake is complete; `acceptance` is the side that accepts.
//!
//! One loop drives all connections, so no peer waits for another. Connections from processes outside of the
//! communicator (invalid bytes, silence, a flood) cannot delay it, and cannot fail it: until the handshake
//! proves that a peer sent them, bytes that arrive concern their connection alone.

mod acceptance;

use super::congestion;
use super::handshake::{self, CHALLENGE, HELLO, LinkHello};
use super::listener::Listener;
use super::socket::{LinkOptions, LinkSocket, is_within_machine};
use super::unauthenticated::{HandshakeBuffer, Unauthenticated};
use crate::descriptor;
use crate::descriptor_limit;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::{Fault, UNWATCHED_SLEEP};
use crate::fault_point::{FaultPoint, reach};
use crate::interrupt::longest_sleep;
use crate::secret::{SecretKey, random_bytes};
use crate::tls::{INTERCEPTOR, TlsRole};
use crate::transport::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use socket2::{SockRef, TcpKeepalive};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long the initiator waits before it tries again.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How long the first attempt at one of several addresses of a peer may take. Each further round takes twice
/// as long, for machines that are busy.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);

/// When it is clear that no address of a peer leads there: the kernel answers for a peer that is busy or
/// stopped, and repeats lost packets after 1, 3 and 7 s. At most a quarter of the time that joining may take.
/// A process that has accepted has this long to answer.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(15);

/// Accepted connections that may wait for their handshake, in addition to the expected ones. All together
/// have at most a quarter of the process's descriptors.
const UNAUTHENTICATED: usize = 64;

/// How long a rank waits before it says which link is missing. From then on it says it after twice the time
/// each.
const FIRST_REPORT: Duration = Duration::from_secs(5);

/// What to check when ranks cannot reach each other.
const ADVICE: &str = "check that no firewall is in between and that FLEXRING_SOCKET_IFNAME names an interface that all ranks can reach";

/// One socket of one link that this rank needs.
#[derive(Debug)]
struct PendingSocket {
    peer: Rank,
    /// The addresses at which the peer listens, the best one first.
    addresses: Vec<SocketAddr>,
    /// Number of attempts to connect that have failed. They go through the addresses.
    failures: usize,
    /// How many of the last ones have failed because there is no way to the address.
    dead_ends: usize,
    /// When the current attempt ends, if there are other addresses and the peer has not proved that it is
    /// there.
    attempt_ends: Option<Instant>,
    /// Whether a process has accepted a connection at one of them.
    is_reached: bool,
    /// Key of the link to this peer.
    key: SecretKey,
    /// Index of the socket in its link.
    socket: usize,
    state: ConnectState,
    /// Why it is not connected yet.
    cause: String,
}

impl PendingSocket {
    /// The address that this rank connects to now.
    fn address(&self) -> SocketAddr {
        self.addresses[self.failures % self.addresses.len()]
    }

    /// The addresses, for messages.
    fn places(&self) -> String {
        let places: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        places.join(" or ")
    }
}

#[derive(Debug)]
enum ConnectState {
    /// The peer is the initiator and has not connected.
    Awaited,
    /// This rank is the initiator and connects at this time.
    Paused(Instant),
    /// The kernel is connecting.
    Connecting(TcpStream),
    /// Connected; this hello is sent, the encryption begins, and then the challenge is being received.
    Handshaking(LinkSocket, [u8; HELLO], HandshakeBuffer<CHALLENGE>),
    /// The proof is sent, and the acceptor's last byte is being received.
    Confirming(LinkSocket),
    /// The handshake is complete.
    Established(LinkSocket),
}

/// What a polled descriptor belongs to, by index.
#[derive(Debug, Clone, Copy)]
enum Polled {
    Fault,
    Listener(usize),
    Unauthenticated(usize),
    Pending(usize),
}

/// Connects all sockets of all links: for each of `peers`, in their order, as many connected sockets as the
/// options say. `key` gives the key of the link to a peer.
pub(super) fn connect_all(
    listener: Listener,
    me: Rank,
    peers: &[(Rank, Vec<SocketAddr>)],
    key: &dyn Fn(Rank) -> SecretKey,
    options: LinkOptions,
    deadline: Instant,
    fault: &Fault,
) -> Result<Vec<Vec<LinkSocket>>> {
    if let Some((peer, _)) = peers.iter().find(|(_, addresses)| addresses.is_empty()) {
        return Err(Error::invalid_argument(format!("rank {peer} has no address to connect to")));
    }
    let LinkOptions { sockets_per_link: sockets, is_encrypted, connect_timeout } = options;
    let pending = peers
        .iter()
        .flat_map(|(peer, addresses)| {
            let key = key(*peer);
            (0..sockets).map(move |socket| (*peer, addresses.clone(), key.clone(), socket))
        })
        .map(|(peer, addresses, key, socket)| PendingSocket {
            peer,
            addresses,
            failures: 0,
            dead_ends: 0,
            attempt_ends: None,
            is_reached: false,
            key,
            socket,
            state: if peer < me { ConnectState::Paused(Instant::now()) } else { ConnectState::Awaited },
            cause: if peer < me { "no answer" } else { "it did not connect" }.to_owned(),
        })
        .collect::<Vec<_>>();
    let connector = Connector {
        listener,
        me,
        sockets,
        is_encrypted,
        max_unauthenticated: descriptor_limit::unauthenticated(pending.len() + UNAUTHENTICATED),
        pending,
        unauthenticated: VecDeque::new(),
        accept_resumes: None,
        lacking_since: None,
        began: Instant::now(),
        report: (Instant::now() + FIRST_REPORT, FIRST_REPORT),
        answer_limit: UNREACHABLE_AFTER.min(connect_timeout / 4),
        deadline,
    };
    connector.run(fault)
}

struct Connector {
    listener: Listener,
    me: Rank,
    sockets: usize,
    is_encrypted: bool,
    pending: Vec<PendingSocket>,
    unauthenticated: VecDeque<Unauthenticated>,
    max_unauthenticated: usize,
    /// When the listeners are polled again, after the process ran out of descriptors.
    accept_resumes: Option<Instant>,
    /// Since when no connection could be accepted for lack of descriptors.
    lacking_since: Option<Instant>,
    began: Instant,
    /// When this rank says next which link is missing, and the time since it has said it before.
    report: (Instant, Duration),
    /// [`UNREACHABLE_AFTER`], or the quarter.
    answer_limit: Duration,
    deadline: Instant,
}

impl Connector {
    fn run(mut self, fault: &Fault) -> Result<Vec<Vec<LinkSocket>>> {
        let is_established = |pending: &PendingSocket| matches!(pending.state, ConnectState::Established(_));
        while !self.pending.iter().all(is_established) {
            fault.check_waiting()?;
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.timed_out());
            }
            let (at, since) = self.report;
            if now >= at {
                self.report = (now + 2 * since, 2 * since);
                log::warn!("rank {}: {}", self.me, self.timed_out().message());
            }
            for index in 0..self.pending.len() {
                let pending = &mut self.pending[index];
                if pending.attempt_ends.take_if(|ends| *ends <= now).is_some() {
                    self.retry_later(index, &io::ErrorKind::TimedOut.into())?;
                }
                if matches!(self.pending[index].state, ConnectState::Paused(until) if until <= now) {
                    self.start_connecting(index)?;
                }
            }
            self.unauthenticated.retain(|connection| now < connection.deadline);
            self.accept_resumes.take_if(|at| now >= *at);
            let ready = self.wait(fault, now)?;
            // From the highest index down, because a handled unauthenticated connection leaves the queue.
            for polled in ready.into_iter().rev() {
                match polled {
                    Polled::Fault => {}
                    Polled::Listener(index) => self.accept(index)?,
                    Polled::Unauthenticated(index) => self.authenticate(index)?,
                    Polled::Pending(index) => self.proceed(index)?,
                }
            }
            // The states are those of a later time than `now`.
            let is_late = |pending: &&PendingSocket| self.gives_up(pending).is_some_and(|at| at <= now);
            if let Some(pending) = self.pending.iter().find(is_late) {
                return Err(self.unreachable(pending));
            }
        }
        let mut links = Vec::new();
        for pending in self.pending {
            if pending.socket == 0 {
                links.push(Vec::with_capacity(self.sockets));
            }
            if let (ConnectState::Established(socket), Some(link)) = (pending.state, links.last_mut()) {
                link.push(socket);
            }
        }
        Ok(links)
    }

    /// When it is clear that no address leads to a peer that this rank has not reached yet. `None` if the
    /// peer connects, or is reached.
    fn gives_up(&self, pending: &PendingSocket) -> Option<Instant> {
        let has_tried_all = pending.addresses.len() == 1 || pending.failures >= pending.addresses.len();
        let connects = matches!(pending.state, ConnectState::Paused(_) | ConnectState::Connecting(_));
        (connects && has_tried_all && !pending.is_reached).then(|| self.began + self.answer_limit)
    }

    /// Sleeps until a descriptor is ready or a timeout is due. What is ready, in ascending order.
    fn wait(&self, fault: &Fault, now: Instant) -> Result<Vec<Polled>> {
        // If the process lacks a descriptor for it, the fault does not end the sleep, which is short then.
        let watch = fault.watch().ok();
        let mut fds: Vec<PollFd<'_>> = watch.iter().map(|watch| PollFd::new(watch, PollFlags::IN)).collect();
        let mut polled = vec![Polled::Fault; fds.len()];
        let mut until = self.deadline.min(self.report.0);
        for pending in &self.pending {
            let times = [pending.attempt_ends, self.gives_up(pending)];
            until = times.into_iter().flatten().min().map_or(until, |time| until.min(time));
        }
        let listening = if self.accept_resumes.is_none() { self.listener.sockets.as_slice() } else { &[] };
        until = self.accept_resumes.map_or(until, |at| until.min(at));
        for (index, socket) in listening.iter().enumerate() {
            polled.push(Polled::Listener(index));
            fds.push(PollFd::new(socket, PollFlags::IN));
        }
        for (index, connection) in self.unauthenticated.iter().enumerate() {
            polled.push(Polled::Unauthenticated(index));
            fds.push(PollFd::new(&connection.socket, PollFlags::IN));
            until = until.min(connection.deadline);
        }
        for (index, pending) in self.pending.iter().enumerate() {
            let (socket, flags) = match &pending.state {
                ConnectState::Connecting(socket) => (socket.as_fd(), PollFlags::OUT),
                ConnectState::Handshaking(socket, ..) | ConnectState::Confirming(socket) => {
                    (socket.as_fd(), PollFlags::IN)
                }
                ConnectState::Paused(retry) => {
                    until = until.min(*retry);
                    continue;
                }
                ConnectState::Awaited | ConnectState::Established(_) => continue,
            };
            polled.push(Polled::Pending(index));
            fds.push(PollFd::from_borrowed_fd(socket, flags));
        }
        let longest = if watch.is_some() { longest_sleep() } else { longest_sleep().min(UNWATCHED_SLEEP) };
        let timeout = until.saturating_duration_since(now).min(longest);
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(cause) => return Err(Error::io("cannot wait for peers to connect", cause)),
        }
        let ready = polled.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(polled, _)| *polled).collect())
    }

    /// Starts to connect to a peer.
    fn start_connecting(&mut self, index: usize) -> Result<()> {
        reach(FaultPoint::TcpConnects);
        let pending = &mut self.pending[index];
        if pending.addresses.len() > 1 {
            let rounds = (pending.failures / pending.addresses.len()).min(8) as u32;
            pending.attempt_ends = Some(Instant::now() + FIRST_ATTEMPT * 2_u32.pow(rounds));
        }
        match start_connecting(pending.address()) {
            Ok(socket) => pending.state = ConnectState::Connecting(socket),
            Err(cause) => self.retry_later(index, &cause)?,
        }
        Ok(())
    }

    /// Advances the state of a connection that this rank initiated.
    fn proceed(&mut self, index: usize) -> Result<()> {
        let pending = &mut self.pending[index];
        match std::mem::replace(&mut pending.state, ConnectState::Awaited) {
            ConnectState::Connecting(socket) => {
                let hello = LinkHello {
                    from: self.me,
                    to: pending.peer,
                    socket: pending.socket,
                    sockets: self.sockets,
                    encrypted: self.is_encrypted,
                    nonce: random_bytes()?,
                };
                let hello = hello.to_bytes();
                let mut socket = LinkSocket::new(socket);
                let outcome = finish_connecting(&mut socket, &hello).and_then(|()| {
                    if self.is_encrypted {
                        socket.encrypt(TlsRole::Initiator).map_err(io::Error::other)?;
                    }
                    socket.advance()
                });
                match outcome {
                    Ok(_) => {
                        pending.is_reached = true;
                        // The peer may still be busy with what comes before.
                        let limit = Instant::now() + self.answer_limit;
                        pending.attempt_ends = pending.attempt_ends.map(|ends| ends.max(limit));
                        pending.state = ConnectState::Handshaking(socket, hello, HandshakeBuffer::EMPTY);
                    }
                    Err(cause) => self.retry_later(index, &cause)?,
                }
            }
            ConnectState::Handshaking(mut socket, hello, mut buffer) => {
                match read(&mut socket, &mut buffer) {
                    Ok(Some(challenge)) => {
                        let (key, binding) = (&pending.key, socket.binding());
                        let Some(sockets) = handshake::verify_challenge(key, &hello, &challenge, binding)
                        else {
                            let interceptor = if self.is_encrypted { INTERCEPTOR } else { "" };
                            let cause = format!("the process there is not a rank of this job{interceptor}");
                            return self.retry_later(index, &io::Error::other(cause));
                        };
                        reach(FaultPoint::TcpConnected);
                        // The acceptor uses this connection from the proof on.
                        pending.attempt_ends = None;
                        let proof = handshake::proof(key, &hello, &challenge, binding);
                        socket.trust();
                        match socket.send(&proof) {
                            Ok(()) if sockets != self.sockets => {
                                return Err(differing_sockets(self.me, self.sockets, pending.peer, sockets));
                            }
                            Ok(()) => pending.state = ConnectState::Confirming(socket),
                            Err(cause) => self.retry_later(index, &cause)?,
                        }
                    }
                    Ok(None) => pending.state = ConnectState::Handshaking(socket, hello, buffer),
                    Err(cause) => self.retry_later(index, &cause)?,
                }
            }
            ConnectState::Confirming(mut socket) => {
                let mut buffer = HandshakeBuffer::EMPTY;
                match buffer.read(&mut socket) {
                    Ok(Some(handshake::ACCEPTED)) => {
                        pending.state = ConnectState::Established(set_options(socket)?);
                    }
                    Ok(Some(_)) => {
                        let cause = io::Error::other("the handshake ended with an unknown byte");
                        self.retry_later(index, &cause)?;
                    }
                    Ok(None) => pending.state = ConnectState::Confirming(socket),
                    Err(cause) => self.retry_later(index, &cause)?,
                }
            }
            other => pending.state = other,
        }
        Ok(())
    }

    /// Schedules another attempt to connect. An error if another attempt cannot succeed.
    fn retry_later(&mut self, index: usize, cause: &io::Error) -> Result<()> {
        let pending = &mut self.pending[index];
        let (peer, address) = (pending.peer, pending.address());
        pending.cause = cause.to_string();
        pending.failures += 1;
        pending.attempt_ends = None;
        // Each further address is tried at once.
        let is_last = pending.failures.is_multiple_of(pending.addresses.len());
        let pause = if is_last { RETRY_INTERVAL } else { Duration::ZERO };
        pending.state = ConnectState::Paused(Instant::now() + pause);
        let permanent = [
            Errno::NETUNREACH,
            Errno::AFNOSUPPORT,
            Errno::ACCESS,
            Errno::PERM,
            Errno::INVAL,
            Errno::MFILE,
            Errno::NFILE,
        ];
        let is_dead_end = permanent.iter().any(|errno| cause.raw_os_error() == Some(errno.raw_os_error()));
        pending.dead_ends = if is_dead_end { pending.dead_ends + 1 } else { 0 };
        if pending.dead_ends >= pending.addresses.len() || lacks_descriptors(cause) {
            let kind = if lacks_descriptors(cause) { ErrorKind::System } else { ErrorKind::Rendezvous };
            return Err(Error::new(
                kind,
                format!("cannot connect to rank {peer} at {}: {cause}; {}", pending.places(), advice(cause)),
            ));
        }
        log::trace!("tcp: rank {peer} at {address}: {cause}; trying again");
        Ok(())
    }

    /// The error if no address of a peer leads there.
    fn unreachable(&self, pending: &PendingSocket) -> Error {
        let PendingSocket { peer, cause, .. } = pending;
        let seconds = self.began.elapsed().as_secs_f64();
        let places = pending.places();
        Error::rendezvous(format!(
            "rank {peer} listens at {places}, but rank {} gets no answer from there within {seconds:.1} s: {cause}; {ADVICE}",
            self.me
        ))
    }

    /// The error for the peers that are not connected at the deadline.
    fn timed_out(&self) -> Error {
        let mut missing: Vec<&PendingSocket> = self
            .pending
            .iter()
            .filter(|pending| !matches!(pending.state, ConnectState::Established(_)))
            .collect();
        missing.dedup_by_key(|pending| pending.peer);
        let mut message = String::new();
        if let Some(pending) = missing.first() {
            let PendingSocket { peer, cause, .. } = pending;
            let address = pending.places();
            let seconds = self.began.elapsed().as_secs_f64();
            let others = match missing.len() - 1 {
                0 => String::new(),
                others => format!(", nor to {others} other ranks,"),
            };
            message = format!(
                "no connection to rank {peer} at {address}{others} within {seconds:.1} s: {cause}; {ADVICE}"
            );
        }
        Error::rendezvous(message)
    }
}

fn differing_sockets(me: Rank, mine: usize, peer: Rank, theirs: usize) -> Error {
    Error::disagreement(format!(
        "rank {peer} uses {theirs} sockets per link and rank {me} uses {mine}: set FLEXRING_SOCKETS_PER_LINK to the same \
         value on all ranks"
    ))
}

/// A socket that does not block and has begun to connect to `address`. Its error is known once it is
/// writable.
///
/// # Errors
/// That of the system call.
pub(crate) fn start_connecting(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = descriptor::tcp_socket(address)?;
    socket.set_nonblocking(true)?;
    // The messages of a handshake are short, and each waits for the one before.
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&address.into()) {
        Err(cause) if cause.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(cause),
        _ => Ok(socket.into()),
    }
}

/// Checks a socket of [`start_connecting`] that is ready: whether the kernel has connected it to another
/// process.
///
/// # Errors
/// Why it has not. `ConnectionRefused` also if no process listens and the socket has connected to itself, as
/// happens between ports of one node.
pub(crate) fn check_connected(stream: &TcpStream) -> io::Result<()> {
    if let Some(cause) = stream.take_error()? {
        return Err(cause);
    }
    let local = stream.local_addr()?;
    // A connection that has ended already has no other end. Its first read says so.
    if stream.peer_addr().is_ok_and(|peer| peer == local) {
        return Err(Errno::CONNREFUSED.into());
    }
    Ok(())
}

/// Sends the hello if the kernel has connected. An error if it failed to.
fn finish_connecting(socket: &mut LinkSocket, hello: &[u8; HELLO]) -> io::Result<()> {
    check_connected(socket.get())?;
    socket.send(hello)
}

/// Reads a message on, once the encryption has begun.
fn read<const BYTES: usize>(
    socket: &mut LinkSocket,
    message: &mut HandshakeBuffer<BYTES>,
) -> io::Result<Option<[u8; BYTES]>> {
    if socket.advance()? { message.read(socket) } else { Ok(None) }
}

/// Sets the options that all sockets of links have.
fn set_options(socket: LinkSocket) -> Result<LinkSocket> {
    // No TCP_USER_TIMEOUT: it would also end the connection to a live peer that does not read for a while
    // because it computes. Keepalive ends only a connection whose machine no longer answers, after 10 + 4 * 5
    // s.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    let options = SockRef::from(socket.get());
    options
        .set_tcp_nodelay(true)
        .and_then(|()| options.set_tcp_keepalive(&keepalive))
        .map_err(|cause| Error::io("cannot set the options of a connection", cause))?;
    let ends = (socket.get().local_addr(), socket.get().peer_addr());
    if matches!(ends, (Ok(own), Ok(peer)) if !is_within_machine(own.ip(), peer.ip())) {
        congestion::replace_bbr(socket.get());
    }
    Ok(socket)
}

fn lacks_descriptors(cause: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| cause.raw_os_error() == Some(errno.raw_os_error()))
}

fn advice(cause: &io::Error) -> &'static str {
    if lacks_descriptors(cause) { "raise the limit of open files (ulimit -n)" } else { ADVICE }
}

#[cfg(test)]
mod tests;
