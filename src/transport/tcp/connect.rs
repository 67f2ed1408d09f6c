//! Making links: listening, calling, and finding out who is at the other end.
//!
//! Owns everything up to the greeting of each connection. Must not know what is said afterwards.
//!
//! One loop does all of it at once, so no peer waits for another, and nothing that a stranger does at the
//! listener (nonsense, silence, a flood) can hold up those who belong here.

use super::greeting::{GREETING, Greeting, Role};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::transport::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use std::collections::VecDeque;
use std::io::{self, ErrorKind as Io, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a caller waits before it tries again.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may take to say who it is. The greeting of a rank comes with its first packet.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connections beyond those that are expected that may be waiting to say who they are.
const STRANGERS: usize = 64;

/// What to check when ranks cannot reach each other.
const ADVICE: &str =
    "is a firewall in between, and does FLEXRING_SOCKET_IFNAME name an interface that all ranks can reach";

/// Sockets that peers can connect to.
#[derive(Debug)]
pub struct Listener {
    sockets: Vec<TcpListener>,
    endpoints: Vec<SocketAddr>,
}

impl Listener {
    /// Listens at each of `addresses`, at ports that the kernel picks.
    ///
    /// # Errors
    /// `System`, naming the address that cannot be listened at; `InvalidArgument` if there is none.
    pub fn bind(addresses: &[IpAddr]) -> Result<Self> {
        if addresses.is_empty() {
            return Err(Error::invalid_argument("there is no address to listen at"));
        }
        let mut listener = Self { sockets: Vec::new(), endpoints: Vec::new() };
        for &address in addresses {
            let (socket, endpoint) = Self::listen(SocketAddr::new(address, 0))
                .map_err(|cause| Error::io(format!("cannot listen at {address}"), cause))?;
            listener.sockets.push(socket);
            listener.endpoints.push(endpoint);
        }
        Ok(listener)
    }

    fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        if address.is_ipv6() {
            // Else it would take IPv4 callers under names that no rank goes by.
            socket.set_only_v6(true)?;
        }
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        // All higher ranks call at once; the kernel lowers this to what it allows.
        socket.listen(4096)?;
        let socket = TcpListener::from(socket);
        let endpoint = socket.local_addr()?;
        Ok((socket, endpoint))
    }

    /// Where this listens, in the order of the addresses.
    #[must_use]
    pub fn endpoints(&self) -> Vec<SocketAddr> {
        self.endpoints.clone()
    }
}

/// One connection of one link, as this rank wants it.
#[derive(Debug)]
struct Seat {
    peer: Rank,
    address: SocketAddr,
    socket: usize,
    state: State,
    /// Why there is no connection yet, in words.
    cause: String,
}

#[derive(Debug)]
enum State {
    /// A higher rank's to call.
    Awaited,
    /// This rank's to call, from then on.
    Paused(Instant),
    /// The kernel is connecting.
    Calling(TcpStream),
    /// Connected, and told the peer who calls; its answer comes.
    Greeted(TcpStream, Words),
    /// Both ends know each other.
    Taken(TcpStream),
}

/// A greeting as far as it has come.
#[derive(Debug)]
struct Words {
    bytes: [u8; GREETING],
    len: usize,
}

impl Words {
    const NONE: Self = Self { bytes: [0; GREETING], len: 0 };

    /// Reads on. `Some` when all of it is there; not a byte more is read.
    fn read(&mut self, mut from: &TcpStream) -> io::Result<Option<&[u8; GREETING]>> {
        while self.len < GREETING {
            match from.read(&mut self.bytes[self.len..]) {
                Ok(0) => {
                    return Err(io::Error::new(
                        Io::UnexpectedEof,
                        "the connection was closed before a greeting",
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

/// A connection at the listener that has not said who it is.
#[derive(Debug)]
struct Stranger {
    socket: TcpStream,
    address: SocketAddr,
    words: Words,
    until: Instant,
}

/// What the loop sleeps on, in the order of the descriptors.
#[derive(Debug, Clone, Copy)]
enum Source {
    Fault,
    Listener(usize),
    Stranger(usize),
    Seat(usize),
}

/// Makes all connections of all links; for each of `peers`, in their order, its sockets.
pub(super) fn meet(
    listener: Listener,
    me: Rank,
    peers: &[(Rank, SocketAddr)],
    token: u64,
    sockets: usize,
    deadline: Instant,
    fault: &Fault,
) -> Result<Vec<Vec<TcpStream>>> {
    let seats = peers
        .iter()
        .flat_map(|&(peer, address)| (0..sockets).map(move |socket| (peer, address, socket)))
        .map(|(peer, address, socket)| Seat {
            peer,
            address,
            socket,
            state: if peer < me { State::Paused(Instant::now()) } else { State::Awaited },
            cause: if peer < me { "no answer" } else { "it did not call" }.to_owned(),
        })
        .collect();
    let meeting = Meeting {
        listener,
        me,
        token,
        sockets,
        seats,
        strangers: VecDeque::new(),
        began: Instant::now(),
        deadline,
    };
    meeting.run(fault)
}

struct Meeting {
    listener: Listener,
    me: Rank,
    token: u64,
    sockets: usize,
    seats: Vec<Seat>,
    strangers: VecDeque<Stranger>,
    began: Instant,
    deadline: Instant,
}

impl Meeting {
    fn run(mut self, fault: &Fault) -> Result<Vec<Vec<TcpStream>>> {
        while !self.seats.iter().all(|seat| matches!(seat.state, State::Taken(_))) {
            fault.check()?;
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.absent());
            }
            for seat in 0..self.seats.len() {
                if matches!(self.seats[seat].state, State::Paused(until) if until <= now) {
                    self.call(seat)?;
                }
            }
            self.strangers.retain(|stranger| now < stranger.until);
            let ready = self.sleep(fault, now)?;
            // Strangers go back to front, as those who are dealt with leave the queue.
            for source in ready.into_iter().rev() {
                match source {
                    Source::Fault => {}
                    Source::Listener(which) => self.accept(which)?,
                    Source::Stranger(which) => self.hear(which)?,
                    Source::Seat(which) => self.proceed(which)?,
                }
            }
        }
        let mut links = Vec::new();
        for seat in self.seats {
            if seat.socket == 0 {
                links.push(Vec::with_capacity(self.sockets));
            }
            if let (State::Taken(socket), Some(link)) = (seat.state, links.last_mut()) {
                link.push(socket);
            }
        }
        Ok(links)
    }

    /// Sleeps until something is ready or due, and says what is ready.
    fn sleep(&self, fault: &Fault, now: Instant) -> Result<Vec<Source>> {
        let mut sources = vec![Source::Fault];
        let wake = fault.wake_fd();
        let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        let mut wake = self.deadline;
        for (which, socket) in self.listener.sockets.iter().enumerate() {
            sources.push(Source::Listener(which));
            fds.push(PollFd::new(socket, PollFlags::IN));
        }
        for (which, stranger) in self.strangers.iter().enumerate() {
            sources.push(Source::Stranger(which));
            fds.push(PollFd::new(&stranger.socket, PollFlags::IN));
            wake = wake.min(stranger.until);
        }
        for (which, seat) in self.seats.iter().enumerate() {
            let (socket, flags) = match &seat.state {
                State::Calling(socket) => (socket, PollFlags::OUT),
                State::Greeted(socket, _) => (socket, PollFlags::IN),
                State::Paused(until) => {
                    wake = wake.min(*until);
                    continue;
                }
                State::Awaited | State::Taken(_) => continue,
            };
            sources.push(Source::Seat(which));
            fds.push(PollFd::new(socket, flags));
        }
        let timeout = wake.saturating_duration_since(now);
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(cause) => return Err(Error::io("cannot wait for peers to connect", cause)),
        }
        let ready = sources.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|(source, _)| *source).collect())
    }

    /// Starts a connection to a peer.
    fn call(&mut self, which: usize) -> Result<()> {
        let address = self.seats[which].address;
        let attempt = Socket::new(Domain::for_address(address), Type::STREAM, None).and_then(|socket| {
            socket.set_nonblocking(true)?;
            match socket.connect(&address.into()) {
                Err(cause) if cause.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(cause),
                _ => Ok(socket),
            }
        });
        match attempt {
            Ok(socket) => self.seats[which].state = State::Calling(socket.into()),
            Err(cause) => self.pause(which, &cause)?,
        }
        Ok(())
    }

    /// Goes on with a connection to a peer.
    fn proceed(&mut self, which: usize) -> Result<()> {
        let seat = &mut self.seats[which];
        let greeting = Greeting {
            token: self.token,
            from: self.me,
            to: seat.peer,
            socket: seat.socket,
            sockets: self.sockets,
        };
        match std::mem::replace(&mut seat.state, State::Awaited) {
            State::Calling(socket) => match greet(&socket, &greeting.to_bytes(Role::Caller)) {
                Ok(()) => seat.state = State::Greeted(socket, Words::NONE),
                Err(cause) => self.pause(which, &cause)?,
            },
            State::Greeted(socket, mut words) => match words.read(&socket) {
                Ok(Some(bytes)) => {
                    let answer = Greeting::from_bytes(bytes, Role::Answerer);
                    let expected = Greeting { from: seat.peer, to: self.me, ..greeting };
                    match answer {
                        Some(answer) if answer == expected => {
                            seat.state = State::Taken(prepare(socket)?);
                        }
                        Some(answer) if answer == (Greeting { sockets: answer.sockets, ..expected }) => {
                            return Err(self.differing(greeting.to, answer.sockets));
                        }
                        _ => {
                            let cause = io::Error::other("something else answers there");
                            self.pause(which, &cause)?;
                        }
                    }
                }
                Ok(None) => seat.state = State::Greeted(socket, words),
                Err(cause) => self.pause(which, &cause)?,
            },
            other => seat.state = other,
        }
        Ok(())
    }

    /// Has a connection to a peer tried again, if that can help.
    fn pause(&mut self, which: usize, cause: &io::Error) -> Result<()> {
        let seat = &mut self.seats[which];
        seat.cause = cause.to_string();
        seat.state = State::Paused(Instant::now() + PAUSE);
        let Seat { peer, address, .. } = *seat;
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

    /// Takes all connections that wait at a listener.
    fn accept(&mut self, which: usize) -> Result<()> {
        loop {
            let (socket, address) = match self.listener.sockets[which].accept() {
                Ok(accepted) => accepted,
                Err(cause) if cause.kind() == Io::WouldBlock => return Ok(()),
                Err(cause) if lacks_descriptors(&cause) => {
                    let endpoint = self.listener.endpoints[which];
                    let what = format!("cannot accept connections at {endpoint} ({})", advice(&cause));
                    return Err(Error::io(what, cause));
                }
                // What went wrong with one caller does not concern the others.
                Err(cause) => {
                    log::debug!("tcp: a connection was lost before it was accepted: {cause}");
                    continue;
                }
            };
            if let Err(cause) = socket.set_nonblocking(true) {
                log::debug!("tcp: a connection from {address} cannot be used: {cause}");
                continue;
            }
            if self.strangers.len() >= self.seats.len() + STRANGERS {
                // The one that has been silent for longest is the least likely to belong here.
                self.strangers.pop_front();
            }
            let until = Instant::now() + PATIENCE;
            self.strangers.push_back(Stranger { socket, address, words: Words::NONE, until });
        }
    }

    /// Hears who a stranger is.
    fn hear(&mut self, which: usize) -> Result<()> {
        let stranger = &mut self.strangers[which];
        let greeting = match stranger.words.read(&stranger.socket) {
            Ok(None) => return Ok(()),
            Ok(Some(bytes)) => Greeting::from_bytes(bytes, Role::Caller),
            Err(_) => None,
        };
        let Some(Stranger { socket, address, .. }) = self.strangers.remove(which) else {
            return Ok(());
        };
        let expected = |greeting: &Greeting| {
            let from = greeting.from;
            greeting.token == self.token
                && greeting.to == self.me
                && from > self.me
                && self.seats.iter().any(|seat| seat.peer == from)
        };
        let Some(greeting) = greeting.filter(expected) else {
            log::debug!("tcp: dropped a connection from {address}, which is none of this communicator's");
            return Ok(());
        };
        let answer = Greeting { from: self.me, to: greeting.from, sockets: self.sockets, ..greeting };
        let answered = write(&socket, &answer.to_bytes(Role::Answerer));
        if greeting.sockets != self.sockets {
            return Err(self.differing(greeting.from, greeting.sockets));
        }
        let called = |seat: &&mut Seat| seat.peer == greeting.from && seat.socket == greeting.socket;
        if let Some(seat) = self.seats.iter_mut().find(called) {
            match answered {
                // A peer that calls twice has lost its first connection.
                Ok(()) => seat.state = State::Taken(prepare(socket)?),
                // It will call again.
                Err(cause) => seat.cause = cause.to_string(),
            }
        }
        Ok(())
    }

    fn differing(&self, peer: Rank, theirs: usize) -> Error {
        Error::disagreement(format!(
            "rank {peer} uses {theirs} sockets per link and rank {} uses {}: FLEXRING_SOCKETS_PER_LINK must be \
                 the same on all ranks",
            self.me, self.sockets
        ))
    }

    /// Who is missing, and why.
    fn absent(&self) -> Error {
        let mut absent: Vec<&Seat> =
            self.seats.iter().filter(|seat| !matches!(seat.state, State::Taken(_))).collect();
        absent.dedup_by_key(|seat| seat.peer);
        let mut message = String::new();
        if let Some(Seat { peer, address, cause, .. }) = absent.first() {
            let seconds = self.began.elapsed().as_secs_f64();
            let others = match absent.len() - 1 {
                0 => String::new(),
                others => format!(", nor with {others} other ranks"),
            };
            message = format!(
                "no connection with rank {peer} at {address}{others} within {seconds:.1} s: {cause}; {ADVICE}?"
            );
        }
        Error::rendezvous(message)
    }
}

/// Tells a peer who calls, now that the kernel has connected or failed to.
fn greet(socket: &TcpStream, greeting: &[u8; GREETING]) -> io::Result<()> {
    match socket.take_error()? {
        Some(cause) => Err(cause),
        None => write(socket, greeting),
    }
}

/// Writes a greeting, which always fits into the buffer of a new connection.
fn write(mut socket: &TcpStream, greeting: &[u8; GREETING]) -> io::Result<()> {
    match socket.write(greeting)? {
        GREETING => Ok(()),
        _ => Err(io::Error::other("the greeting could not be sent in one piece")),
    }
}

/// Sets what a link's sockets have in common.
fn prepare(socket: TcpStream) -> Result<TcpStream> {
    // No TCP_USER_TIMEOUT: it would also end the connection to a peer that lives but has not made room for
    // more for a while, because it computes. Keepalive ends only one whose machine no longer answers, after
    // 10 + 4 * 5 s.
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
