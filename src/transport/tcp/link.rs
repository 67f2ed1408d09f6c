//! The link to one peer: messages in order over one or several sockets.
//!
//! Owns the order of a link's messages, and the decision whether a lost connection fails the running call.

use super::frame::{Frame, FrameError, FrameHeader, FrameProgress};
use super::socket::{LinkSocket, is_within_machine};
use super::stream::{FrameStream, ReadOutcome};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::transport::{Event, Events, Rank};
use std::io;
use std::net::SocketAddr;

/// Bytes to read from one socket before the other sockets are driven and events are reported.
///
/// Not tuned yet. Over loopback on a busy machine with two cores (512 KiB messages, one direction), 256 KiB
/// was faster than 1 MiB in three of three rounds (1.4, 1.6, 1.4 against 1.0, 1.0, 0.9 GB/s), but not when
/// repeated under more load (0.7, 0.8 against 0.7, 1.1). To be measured with `bench/tcp_link.rs` on an idle
/// machine.
const READ_BUDGET: usize = 256 << 10;

/// The link to one peer. Calls travel on socket 0, message `i` of a call on socket `i` modulo the number of
/// sockets.
///
/// Each socket keeps the order of its messages, so a count per socket is enough to find the oldest incomplete
/// message.
#[derive(Debug)]
pub(super) struct Link {
    pub peer: Rank,
    pub address: SocketAddr,
    pub streams: Vec<FrameStream>,
    /// Sequence number of the call that this rank is in.
    sequence: u64,
    /// Whether this call was announced to the peer.
    announced: bool,
    /// The call, as long as its announcement waits for the first message.
    unsent_call: Option<Call>,
    /// Whether the peer's entry into this call was reported.
    peer_entered: bool,
    /// Messages of this call that were queued to be sent, and those of them that were reported as sent.
    sends_posted: u64,
    sent: u64,
    /// Receives posted in this call, and those of them that were reported as complete.
    recvs_posted: u64,
    received: u64,
    /// Why the link cannot be used any more. The next operation that needs the link returns this error.
    broken: Option<Error>,
}

impl Link {
    /// A link to `peer` at `address` over connected sockets, with `window` messages per socket and direction.
    pub fn new(peer: Rank, address: SocketAddr, sockets: Vec<LinkSocket>, window: usize) -> Self {
        let streams = sockets.into_iter().map(|socket| FrameStream::new(socket, window)).collect();
        Self {
            peer,
            address,
            streams,
            sequence: 0,
            announced: false,
            unsent_call: None,
            peer_entered: true,
            sends_posted: 0,
            sent: 0,
            recvs_posted: 0,
            received: 0,
            broken: None,
        }
    }

    /// Begins call `sequence`: the peer's entry into it may be reported from now on.
    pub fn begin(&mut self, sequence: u64) {
        (self.sequence, self.announced, self.unsent_call) = (sequence, false, None);
        if self.peer_entered {
            self.peer_entered = false;
            self.streams[0].incoming.push_back(Frame::for_call());
        }
        (self.sends_posted, self.sent, self.recvs_posted, self.received) = (0, 0, 0, 0);
        for stream in &mut self.streams {
            (stream.sent, stream.received) = (0, 0);
        }
        // Detects a peer that left after the last call before anything is sent to it, if epoll was asked
        // before.
        if self.streams[0].is_ending() && self.broken.is_none() {
            let _ = self.receive(0);
        }
    }

    /// Whether a connection of this link is within this machine.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn is_local(&self, stream: &FrameStream) -> rustix::io::Result<bool> {
        let own = SocketAddr::try_from(rustix::net::getsockname(stream)?)?;
        Ok(is_within_machine(own.ip(), self.address.ip()))
    }

    /// Whether messages are in flight, so that the link holds pieces.
    pub fn is_busy(&self) -> bool {
        self.in_flight() != (0, 0)
    }

    /// The number of messages in flight: to the peer, and from it.
    pub fn in_flight(&self) -> (u64, u64) {
        (self.sends_posted - self.sent, self.recvs_posted - self.received)
    }

    /// Whether frames wait to be sent.
    pub fn has_unsent(&self) -> bool {
        self.streams.iter().any(FrameStream::is_sending)
    }

    /// The number of receives that were posted in this call.
    pub fn recvs_posted(&self) -> u64 {
        self.recvs_posted
    }

    /// Whether the message with this number, counted from 0 in this call, is reported as received.
    pub fn has_received(&self, number: u64) -> bool {
        number < self.received
    }

    /// Returns the error that broke the link, if it is broken.
    pub fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Queues a call, which the first message of this call takes along, or the next [`drive`](Self::drive):
    /// one system call and one packet less. The index of the socket that it takes.
    pub fn announce(&mut self, call: &Call) -> Result<usize> {
        self.announce_with_message(call)?;
        self.queue_announcement();
        Ok(0)
    }

    /// Has the first message of this call take the call along.
    pub fn announce_with_message(&mut self, call: &Call) -> Result<()> {
        self.check()?;
        self.announced = true;
        self.unsent_call = Some(*call);
        Ok(())
    }

    /// Queues the announcement if it still waits for a message. Whether it did.
    pub fn queue_announcement(&mut self) -> bool {
        let Some(call) = self.unsent_call.take() else { return false };
        self.streams[0].push(Frame::of_call(&call));
        true
    }

    /// Sends the next message. The index of the socket that it takes.
    pub fn send(&mut self, piece: Piece) -> Result<usize> {
        self.check()?;
        let at = self.socket_of(self.sends_posted);
        self.queue_announcement();
        self.streams[at].push(Frame::of_data(self.sequence, self.sends_posted, piece));
        self.sends_posted += 1;
        self.flush(at)?;
        Ok(at)
    }

    /// Posts the destination of the next message. The index of the socket that it takes.
    pub fn post_recv(&mut self, piece: Piece) -> Result<usize> {
        self.check()?;
        let at = self.socket_of(self.recvs_posted);
        self.streams[at].incoming.push_back(Frame::for_data(self.sequence, self.recvs_posted, piece));
        self.recvs_posted += 1;
        Ok(at)
    }

    /// The index of the socket that a message of this call takes.
    pub fn socket_of(&self, message: u64) -> usize {
        (message % self.streams.len() as u64) as usize
    }

    /// Sends and receives on one socket, up to the read budget, and reports events. Whether anything moved.
    pub fn drive(&mut self, at: usize, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let mut moved = self.flush(at)?;
        let mut read = 0;
        loop {
            self.take_received(at, events)?;
            if read >= READ_BUDGET {
                break;
            }
            let ReadOutcome::Bytes(bytes) = self.receive(at)? else {
                break;
            };
            read += bytes;
        }
        moved += read;
        self.report(events);
        Ok(moved > 0 || events.len() > before)
    }

    fn flush(&mut self, at: usize) -> Result<usize> {
        self.streams[at].flush().map_err(|cause| self.lose(Self::broken_by(&cause)))
    }

    /// Reads from a socket. A connection that the peer has closed is an error only if this call still needs
    /// it.
    fn receive(&mut self, at: usize) -> Result<ReadOutcome> {
        let loss = match self.streams[at].fill(READ_BUDGET) {
            Ok(ReadOutcome::Closed) => "closed its connection".to_owned(),
            Ok(outcome) => return Ok(outcome),
            Err(cause) => Self::broken_by(&cause),
        };
        let mid_frame =
            self.streams[at].incoming.iter().any(|frame| !frame.is_untouched() && !frame.is_complete());
        let awaited = self.announced && !self.peer_entered;
        let needed = awaited || mid_frame || self.is_busy() || self.has_unsent();
        let error = self.lose(if mid_frame { format!("{loss} in the middle of a message") } else { loss });
        if needed { Err(error) } else { Ok(ReadOutcome::Closed) }
    }

    /// Removes the frames that are complete and due from the queue, and checks the header of the next one.
    fn take_received(&mut self, at: usize, events: &mut Events) -> Result<()> {
        while let Some(frame) = self.streams[at].incoming.front() {
            let received = frame.received().map_err(|error| self.refuse(error))?;
            match received {
                FrameProgress::Partial => break,
                FrameProgress::Data => self.streams[at].received += 1,
                FrameProgress::Call(None) => {
                    return Err(self.disagree("made a call that this version of flexring does not support"));
                }
                FrameProgress::Call(Some(call)) => {
                    // A call that is ahead of this rank's stays queued until this rank begins it. But if this
                    // call still expects a message, the peer will never send it, so the later call is
                    // reported.
                    if call.sequence > self.sequence && self.recvs_posted == self.received {
                        break;
                    }
                    self.peer_entered = true;
                    events.push_back(Event::PeerEntered { peer: self.peer, call });
                    if call.sequence != self.sequence {
                        // The executor compares the calls. Whatever follows this one cannot be used.
                        self.disagree(&format!(
                            "is in call {}, this rank in call {}",
                            call.sequence, self.sequence
                        ));
                        self.streams[at].incoming.clear();
                        break;
                    }
                }
            }
            self.streams[at].incoming.pop_front();
        }
        Ok(())
    }

    /// Reports the messages that are sent or received completely, in their order.
    fn report(&mut self, events: &mut Events) {
        let peer = self.peer;
        let sockets = self.streams.len() as u64;
        while self.sent < self.sends_posted
            && self.streams[self.socket_of(self.sent)].sent > self.sent / sockets
        {
            self.sent += 1;
            events.push_back(Event::SendComplete { peer });
        }
        while self.received < self.recvs_posted
            && self.streams[self.socket_of(self.received)].received > self.received / sockets
        {
            self.received += 1;
            events.push_back(Event::RecvComplete { peer });
        }
    }

    fn broken_by(cause: &io::Error) -> String {
        format!("broke its connection: {cause}")
    }

    fn refuse(&mut self, error: FrameError) -> Error {
        let name = |expected: FrameHeader| {
            if expected.is_call() { "its next call".to_owned() } else { expected.to_string() }
        };
        match error {
            FrameError::Unexpected(received, expected) => self.disagree(&format!(
                "sent {received} where {} was expected: do all ranks run the same version with the same settings?",
                name(expected)
            )),
            // No failure of a rank would explain it.
            FrameError::Damaged(expected) => self.break_by(Error::system(format!(
                "what rank {} ({}) sent was changed on the way: {} has a wrong checksum (fix: replace the network adapter, cable or router that \
                 changes data, or the memory; `ethtool -S` counts errors, and without offloads, `ethtool -K <interface> rx off tx off`, the \
                 kernel checks packets itself)",
                self.peer,
                self.address,
                name(expected)
            ))),
        }
    }

    fn disagree(&mut self, what: &str) -> Error {
        self.fail(ErrorKind::Disagreement, what)
    }

    fn lose(&mut self, what: String) -> Error {
        self.fail(ErrorKind::PeerLost, &what)
    }

    fn fail(&mut self, kind: ErrorKind, what: &str) -> Error {
        let message = format!("rank {} ({}) {what}", self.peer, self.address);
        self.break_by(Error::new(kind, message).with_suspect(self.peer))
    }

    fn break_by(&mut self, error: Error) -> Error {
        self.broken.get_or_insert(error).clone()
    }

    /// Drops every piece and shuts all sockets down.
    pub fn shut(&mut self) {
        for stream in &mut self.streams {
            stream.shut();
        }
        self.broken.get_or_insert_with(|| {
            Error::peer_lost(format!("the link to rank {} ({}) was aborted", self.peer, self.address))
        });
        (self.sends_posted, self.sent, self.recvs_posted, self.received) = (0, 0, 0, 0);
    }
}
