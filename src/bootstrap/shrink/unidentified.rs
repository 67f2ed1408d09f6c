//! Connections whose rank is not known yet.
//!
//! Owns each of them from its beginning to its opening, which names the rank that the other end looks for;
//! those whose rank is not there yet; and those that were answered that it is gone.

use super::frame::{SHRINK_MAGIC, SHRINK_VERSION, ServiceNumber, SessionNonce, ShrinkFrame};
use crate::bootstrap::framed_stream::FramedStream;
use crate::bootstrap::protocol::{decode, encode};
use crate::rank::Rank;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How long an accepted connection may take to send its opening, how long a rank that takes it over waits for
/// proof, and how long one that was refused may stay.
pub(super) const OPENING_TIMEOUT: Duration = Duration::from_secs(5);

/// What the end that connected has sent first.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionOpening {
    pub(super) to: ServiceNumber,
    /// The rank that it claims to be.
    pub(super) from: Rank,
    pub(super) nonce: SessionNonce,
}

/// A connection whose opening has arrived.
#[derive(Debug)]
pub(super) struct OpenedConnection {
    /// Returns first what came behind the opening.
    pub(super) stream: FramedStream,
    pub(super) opening: SessionOpening,
}

/// What is to be done about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// The rank with this position takes it over.
    To(usize),
    /// The rank may come yet.
    Wait,
    /// The rank does not exist any more.
    Refuse,
}

#[derive(Debug)]
enum UnidentifiedState {
    /// The opening has not arrived.
    Unopened,
    /// The rank is not there yet. Nothing more is read, so that it waits in the kernel. There is no time
    /// limit: the other end takes a rank that does not answer for a stopped one, and one whose connections
    /// end for one that may come back.
    Waiting(SessionOpening),
    /// The answer is being sent. The other end closes the connection when it has it: closing it here could
    /// destroy the answer.
    Refused,
}

/// One connection.
#[derive(Debug)]
struct UnidentifiedConnection {
    stream: FramedStream,
    state: UnidentifiedState,
    /// When it was accepted.
    opened: Instant,
    /// When it is closed.
    until: Option<Instant>,
}

/// All of them, the oldest first.
#[derive(Debug, Default)]
pub(super) struct UnidentifiedConnections {
    connections: Vec<UnidentifiedConnection>,
}

impl UnidentifiedConnections {
    /// Adds a connection that was accepted.
    ///
    /// # Errors
    /// Those of setting the socket's options.
    pub(super) fn add(&mut self, stream: TcpStream, now: Instant) -> io::Result<()> {
        let stream = FramedStream::new(stream, false)?;
        let (state, until) = (UnidentifiedState::Unopened, Some(now + OPENING_TIMEOUT));
        self.connections.push(UnidentifiedConnection { stream, state, opened: now, until });
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    /// When the oldest one was accepted.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.connections.first().map(|connection| connection.opened)
    }

    /// Closes the oldest one.
    pub(super) fn remove_oldest(&mut self) {
        if !self.connections.is_empty() {
            self.connections.remove(0);
        }
    }

    /// Closes those that have taken too long.
    pub(super) fn remove_late(&mut self, now: Instant) {
        self.connections.retain(|connection| connection.until.is_none_or(|until| now < until));
    }

    /// When the next one has taken too long.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.connections.iter().filter_map(|connection| connection.until).min()
    }

    /// What to poll for, the oldest first.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.connections.iter().map(|connection| {
            let flags = match connection.state {
                UnidentifiedState::Waiting(_) => PollFlags::empty(),
                UnidentifiedState::Unopened | UnidentifiedState::Refused => connection.stream.poll_flags(),
            };
            PollFd::new(&connection.stream, flags)
        })
    }

    /// Reads the connections that are ready, given in the order of [`poll_fds`](Self::poll_fds). Frames have
    /// at most `limit` bytes.
    pub(super) fn receive(&mut self, ready: &[bool], limit: usize) {
        let mut ready = ready.iter();
        self.connections
            .retain_mut(|connection| !ready.next().is_some_and(|ready| *ready) || connection.receive(limit));
    }

    /// Has `route` say what is done about each connection whose opening has arrived, and returns those that a
    /// rank takes over, with its position.
    pub(super) fn route(
        &mut self,
        now: Instant,
        mut route: impl FnMut(&ServiceNumber) -> Routing,
    ) -> Vec<(usize, OpenedConnection)> {
        let mut routed = Vec::new();
        for mut connection in std::mem::take(&mut self.connections) {
            if let UnidentifiedState::Waiting(opening) = connection.state {
                match route(&opening.to) {
                    Routing::To(position) => {
                        let UnidentifiedConnection { stream, .. } = connection;
                        routed.push((position, OpenedConnection { stream, opening }));
                        continue;
                    }
                    Routing::Wait => {}
                    Routing::Refuse => {
                        if !connection.refuse(opening.nonce, now) {
                            continue;
                        }
                    }
                }
            }
            self.connections.push(connection);
        }
        routed
    }
}

impl UnidentifiedConnection {
    /// Reads once, and continues to send. Whether the connection is of use.
    fn receive(&mut self, limit: usize) -> bool {
        match self.state {
            UnidentifiedState::Unopened => {
                let received = self.stream.receive(limit);
                let mut frames = received.frames.into_iter();
                if let Some(first) = frames.next() {
                    let Some(opening) = opening_in(&first) else { return false };
                    self.state = UnidentifiedState::Waiting(opening);
                    self.until = None;
                    self.stream.put_back(frames);
                }
                received.end.is_none()
            }
            // The connection broke.
            UnidentifiedState::Waiting(_) => false,
            UnidentifiedState::Refused => self.stream.receive(limit).end.is_none() && self.send_refusal(),
        }
    }

    /// Answers that the rank is gone. Whether the connection is of use.
    fn refuse(&mut self, nonce: SessionNonce, now: Instant) -> bool {
        self.state = UnidentifiedState::Refused;
        self.until = Some(now + OPENING_TIMEOUT);
        match encode(&ShrinkFrame::Gone { nonce }) {
            Ok(answer) => self.stream.enqueue(answer),
            Err(error) => {
                log::error!("cannot answer a rank that shrinks: {error}");
                return false;
            }
        }
        self.send_refusal()
    }

    fn send_refusal(&mut self) -> bool {
        if self.stream.flush().is_err() {
            return false;
        }
        if !self.stream.has_unsent() {
            self.stream.shut_down_write();
        }
        true
    }
}

/// The opening in a frame, if it is one of this version.
fn opening_in(frame: &[u8]) -> Option<SessionOpening> {
    match decode::<ShrinkFrame>(frame)? {
        ShrinkFrame::Opening { magic, version, to, from, nonce }
            if magic == SHRINK_MAGIC && version == SHRINK_VERSION =>
        {
            Some(SessionOpening { to, from, nonce })
        }
        _ => None,
    }
}
