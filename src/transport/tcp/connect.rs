//! Establishing links: connecting, accepting, and the handshake that identifies the other end.
//!
//! Owns each connection until its handshake is complete. Must not know what is sent afterwards.
//!
//! One loop drives all connections, so no peer waits for another. Connections from processes outside of the communicator
//! (invalid bytes, silence, a flood) cannot delay it.

use super::handshake::{HANDSHAKE, Handshake, Side};
use super::listener::Listener;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::transport::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use std::collections::VecDeque;
use std::io::{self, ErrorKind as Io, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long the initiator waits before it tries again.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How long an accepted connection may take for its handshake. The handshake of a rank comes with its first packet.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Accepted connections that may wait for their handshake, in addition to the expected ones.
const UNAUTHENTICATED: usize = 64;

/// What to check when ranks cannot reach each other.
const ADVICE: &str = "check that no firewall is in between and that FLEXRING_SOCKET_IFNAME names an interface that all ranks can reach";

/// One socket of one link that this rank needs.
#[derive(Debug)]
struct PendingSocket {
    peer: Rank,
    address: SocketAddr,
    /// Index of the socket in its link.
    socket: usize,
    state: ConnectState,
    /// Why it is not connected yet.
    cause: String,
}

#[derive(Debug)]
enum ConnectState {
    /// The peer is the initiator and has not connected.
    Awaited,
    /// This rank is the initiator and connects at this time.
    Paused(Instant),
    /// The kernel is connecting.
    Connecting(TcpStream),
    /// Connected; the handshake is sent and the answer is being received.
    Handshaking(TcpStream, HandshakeBuffer),
    /// The handshake is complete.
    Established(TcpStream),
}

/// A handshake that is being received.
#[derive(Debug)]
struct HandshakeBuffer {
    bytes: [u8; HANDSHAKE],
    len: usize,
}

impl HandshakeBuffer {
    const EMPTY: Self = Self { bytes: [0; HANDSHAKE], len: 0 };

    /// Reads on. `Some` when the handshake is complete; reads no byte beyond it.
    fn read(&mut self, mut from: &TcpStream) -> io::Result<Option<&[u8; HANDSHAKE]>> {
        while self.len < HANDSHAKE {
            match from.read(&mut self.bytes[self.len..]) {
                Ok(0) => {
                    return Err(io::Error::new(
                        Io::UnexpectedEof,
                        "the connection was closed during the handshake",
                    ));
                }
                Ok(read) => self.len += read,
                Err(cause) if cause.kind() == Io::WouldBlock => return Ok(None),
                Err(cause) if cause.kind() == Io::Interrupted => {}
                Err(cause) => return Err(cause),
            }
        }
        Ok(Some(&self.bytes))
    }
}

/// An accepted connection whose handshake is not complete.
#[derive(Debug)]
struct Unauthenticated {
    socket: TcpStream,
    address: SocketAddr,
    handshake: HandshakeBuffer,
    deadline: Instant,
}

/// What a polled descriptor belongs to, by index.
#[derive(Debug, Clone, Copy)]
enum Polled {
    Fault,
    Listener(usize),
    Unauthenticated(usize),
    Pending(usize),
}

/// Connects all sockets of all links: for each of `peers`, in their order, `sockets` connected sockets.
pub(super) fn connect_all(
    listener: Listener,
    me: Rank,
    peers: &[(Rank, SocketAddr)],
    token: u64,
    sockets: usize,
    deadline: Instant,
    fault: &Fault,
) -> Result<Vec<Vec<TcpStream>>> {
    let pending = peers
        .iter()
        .flat_map(|&(peer, address)| (0..sockets).map(move |socket| (peer, address, socket)))
        .map(|(peer, address, socket)| PendingSocket {
            peer,
            address,
            socket,
            state: if peer < me { ConnectState::Paused(Instant::now()) } else { ConnectState::Awaited },
            cause: if peer < me { "no answer" } else { "it did not connect" }.to_owned(),
        })
        .collect();
    let connector = Connector {
        listener,
        me,
        token,
        sockets,
        pending,
        unauthenticated: VecDeque::new(),
        began: Instant::now(),
        deadline,
    };
    connector.run(fault)
}

struct Connector {
    listener: Listener,
    me: Rank,
    token: u64,
    sockets: usize,
    pending: Vec<PendingSocket>,
    unauthenticated: VecDeque<Unauthenticated>,
    began: Instant,
    deadline: Instant,
}

impl Connector {
    fn run(mut self, fault: &Fault) -> Result<Vec<Vec<TcpStream>>> {
        let is_established = |pending: &PendingSocket| matches!(pending.state, ConnectState::Established(_));
        while !self.pending.iter().all(is_established) {
            fault.check()?;
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.timed_out());
            }
            for index in 0..self.pending.len() {
                if matches!(self.pending[index].state, ConnectState::Paused(until) if until <= now) {
                    self.start_connecting(index)?;
                }
            }
            self.unauthenticated.retain(|connection| now < connection.deadline);
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

    /// Sleeps until a descriptor is ready or a timeout is due. What is ready, in ascending order.
    fn wait(&self, fault: &Fault, now: Instant) -> Result<Vec<Polled>> {
        let mut polled = vec![Polled::Fault];
        let wake = fault.wake_fd();
        let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        let mut until = self.deadline;
        for (index, socket) in self.listener.sockets.iter().enumerate() {
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
                ConnectState::Connecting(socket) => (socket, PollFlags::OUT),
                ConnectState::Handshaking(socket, _) => (socket, PollFlags::IN),
                ConnectState::Paused(retry) => {
                    until = until.min(*retry);
                    continue;
                }
                ConnectState::Awaited | ConnectState::Established(_) => continue,
            };
            polled.push(Polled::Pending(index));
            fds.push(PollFd::new(socket, flags));
        }
        let timeout = until.saturating_duration_since(now);
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
        let address = self.pending[index].address;
        let attempt = Socket::new(Domain::for_address(address), Type::STREAM, None).and_then(|socket| {
            socket.set_nonblocking(true)?;
            match socket.connect(&address.into()) {
                Err(cause) if cause.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(cause),
                _ => Ok(socket),
            }
        });
        match attempt {
            Ok(socket) => self.pending[index].state = ConnectState::Connecting(socket.into()),
            Err(cause) => self.retry_later(index, &cause)?,
        }
        Ok(())
    }

    /// Advances the state of a connection that this rank initiated.
    fn proceed(&mut self, index: usize) -> Result<()> {
        let pending = &mut self.pending[index];
        let handshake = Handshake {
            token: self.token,
            from: self.me,
            to: pending.peer,
            socket: pending.socket,
            sockets: self.sockets,
        };
        match std::mem::replace(&mut pending.state, ConnectState::Awaited) {
            ConnectState::Connecting(socket) => {
                match finish_connecting(&socket, &handshake.to_bytes(Side::Initiator)) {
                    Ok(()) => pending.state = ConnectState::Handshaking(socket, HandshakeBuffer::EMPTY),
                    Err(cause) => self.retry_later(index, &cause)?,
                }
            }
            ConnectState::Handshaking(socket, mut buffer) => match buffer.read(&socket) {
                Ok(Some(bytes)) => {
                    let answer = Handshake::from_bytes(bytes, Side::Acceptor);
                    let expected = Handshake { from: pending.peer, to: self.me, ..handshake };
                    match answer {
                        Some(answer) if answer == expected => {
                            pending.state = ConnectState::Established(set_options(socket)?);
                        }
                        Some(answer) if answer == (Handshake { sockets: answer.sockets, ..expected }) => {
                            return Err(self.differing_sockets(handshake.to, answer.sockets));
                        }
                        _ => {
                            let cause = io::Error::other("the process there is not a rank of this job");
                            self.retry_later(index, &cause)?;
                        }
                    }
                }
                Ok(None) => pending.state = ConnectState::Handshaking(socket, buffer),
                Err(cause) => self.retry_later(index, &cause)?,
            },
            other => pending.state = other,
        }
        Ok(())
    }

    /// Schedules another attempt to connect. An error if another attempt cannot succeed.
    fn retry_later(&mut self, index: usize, cause: &io::Error) -> Result<()> {
        let pending = &mut self.pending[index];
        pending.cause = cause.to_string();
        pending.state = ConnectState::Paused(Instant::now() + RETRY_INTERVAL);
        let PendingSocket { peer, address, .. } = *pending;
        let permanent = [
            Errno::NETUNREACH,
            Errno::AFNOSUPPORT,
            Errno::ACCESS,
            Errno::PERM,
            Errno::INVAL,
            Errno::MFILE,
            Errno::NFILE,
        ];
        if permanent.iter().any(|errno| cause.raw_os_error() == Some(errno.raw_os_error())) {
            let kind = if lacks_descriptors(cause) { ErrorKind::System } else { ErrorKind::Rendezvous };
            return Err(Error::new(
                kind,
                format!("cannot connect to rank {peer} at {address}: {cause}; {}", advice(cause)),
            ));
        }
        log::trace!("tcp: rank {peer} at {address}: {cause}; trying again");
        Ok(())
    }

    /// Accepts all connections that wait at a listener.
    fn accept(&mut self, index: usize) -> Result<()> {
        loop {
            let (socket, address) = match self.listener.sockets[index].accept() {
                Ok(accepted) => accepted,
                Err(cause) if cause.kind() == Io::WouldBlock => return Ok(()),
                Err(cause) if lacks_descriptors(&cause) => {
                    let endpoint = self.listener.endpoints[index];
                    let context = format!("cannot accept connections at {endpoint} ({})", advice(&cause));
                    return Err(Error::io(context, cause));
                }
                // The failure of one connection does not affect the others.
                Err(cause) => {
                    log::debug!("tcp: a connection was lost before it was accepted: {cause}");
                    continue;
                }
            };
            if let Err(cause) = socket.set_nonblocking(true) {
                log::debug!("tcp: a connection from {address} cannot be used: {cause}");
                continue;
            }
            if self.unauthenticated.len() >= self.pending.len() + UNAUTHENTICATED {
                // The oldest one is the least likely to be a rank.
                self.unauthenticated.pop_front();
            }
            let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
            let handshake = HandshakeBuffer::EMPTY;
            self.unauthenticated.push_back(Unauthenticated { socket, address, handshake, deadline });
        }
    }

    /// Reads the handshake of an accepted connection. Once complete, answers it and establishes the connection, or drops
    /// the connection if it is not from an expected rank.
    fn authenticate(&mut self, index: usize) -> Result<()> {
        let connection = &mut self.unauthenticated[index];
        let handshake = match connection.handshake.read(&connection.socket) {
            Ok(None) => return Ok(()),
            Ok(Some(bytes)) => Handshake::from_bytes(bytes, Side::Initiator),
            Err(_) => None,
        };
        let Some(Unauthenticated { socket, address, .. }) = self.unauthenticated.remove(index) else {
            return Ok(());
        };
        let is_expected = |handshake: &Handshake| {
            let from = handshake.from;
            handshake.token == self.token
                && handshake.to == self.me
                && from > self.me
                && self.pending.iter().any(|pending| pending.peer == from)
        };
        let Some(handshake) = handshake.filter(is_expected) else {
            log::debug!("tcp: dropped a connection from {address}, which is not from a rank of this job");
            return Ok(());
        };
        let answer = Handshake { from: self.me, to: handshake.from, sockets: self.sockets, ..handshake };
        let answered = send(&socket, &answer.to_bytes(Side::Acceptor));
        if handshake.sockets != self.sockets {
            return Err(self.differing_sockets(handshake.from, handshake.sockets));
        }
        let matches = |pending: &&mut PendingSocket| {
            pending.peer == handshake.from && pending.socket == handshake.socket
        };
        if let Some(pending) = self.pending.iter_mut().find(matches) {
            match answered {
                // A peer that connects twice has lost its first connection.
                Ok(()) => pending.state = ConnectState::Established(set_options(socket)?),
                // The peer will connect again.
                Err(cause) => pending.cause = cause.to_string(),
            }
        }
        Ok(())
    }

    fn differing_sockets(&self, peer: Rank, theirs: usize) -> Error {
        Error::disagreement(format!(
            "rank {peer} uses {theirs} sockets per link and rank {} uses {}: set FLEXRING_SOCKETS_PER_LINK to the \
                 same value on all ranks",
            self.me, self.sockets
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
        if let Some(PendingSocket { peer, address, cause, .. }) = missing.first() {
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

/// Sends the handshake if the kernel has connected. An error if it failed to.
fn finish_connecting(socket: &TcpStream, handshake: &[u8; HANDSHAKE]) -> io::Result<()> {
    match socket.take_error()? {
        Some(cause) => Err(cause),
        None => send(socket, handshake),
    }
}

/// Sends a handshake, which always fits into the send buffer of a new connection.
fn send(mut socket: &TcpStream, handshake: &[u8; HANDSHAKE]) -> io::Result<()> {
    match socket.write(handshake)? {
        HANDSHAKE => Ok(()),
        _ => Err(io::Error::other("the handshake could not be sent in one piece")),
    }
}

/// Sets the options that all sockets of links have.
fn set_options(socket: TcpStream) -> Result<TcpStream> {
    // No TCP_USER_TIMEOUT: it would also end the connection to a live peer that does not read for a while because it
    // computes. Keepalive ends only a connection whose machine no longer answers, after 10 + 4 * 5 s.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    let options = SockRef::from(&socket);
    options
        .set_tcp_nodelay(true)
        .and_then(|()| options.set_tcp_keepalive(&keepalive))
        .map_err(|cause| Error::io("cannot set the options of a connection", cause))?;
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
