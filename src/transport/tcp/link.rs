//! The link to one peer: messages in order over one or several sockets.
//!
//! Owns the order of a link's messages and what a lost connection means for the call that runs. Must not know
//! other links, nor how readiness is learned.

use super::frame::{Content, Frame, Head};
use super::stream::{Moved, Stream};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::transport::{Event, Events, Rank};
use rustix::io::Errno;
use std::net::{SocketAddr, TcpStream};

/// How many bytes are read from one socket before others have their turn and the executor is told.
///
/// Not tuned yet. Over loopback on a busy machine of two cores (512 KiB messages, one way), 256 KiB beat 1 MiB in
/// three rounds of three (1.4, 1.6, 1.4 against 1.0, 1.0, 0.9 GB/s) and did not when that was repeated under more
/// load (0.7, 0.8 against 0.7, 1.1). `bench/tcp_link.rs` on an idle machine is to settle it.
const TURN: usize = 256 << 10;

/// The link to one peer. Calls travel on socket 0, message `i` of a call on socket `i` modulo their number.
///
/// As messages go round the sockets in turn and each socket keeps its order, counting per socket is enough to
/// know which message is the oldest that is not through.
#[derive(Debug)]
pub(super) struct Link {
    pub peer: Rank,
    address: SocketAddr,
    pub streams: Vec<Stream>,
    /// The call that this rank is in.
    sequence: u64,
    /// Whether the peer's call was reported in this one.
    called: bool,
    /// Messages of this call handed over to be sent, and those of them reported as sent.
    posted: u64,
    sent: u64,
    /// Landings of this call, and those of them reported as filled.
    awaited: u64,
    landed: u64,
    /// Why the link cannot be used any more, if so. Whoever needs it next is told.
    broken: Option<Error>,
}

impl Link {
    /// A link to `peer`, which is at `address`, over connected sockets.
    pub fn new(peer: Rank, address: SocketAddr, sockets: Vec<TcpStream>, window: usize) -> Self {
        let streams = sockets.into_iter().map(|socket| Stream::new(socket, window)).collect();
        Self {
            peer,
            address,
            streams,
            sequence: 0,
            called: true,
            posted: 0,
            sent: 0,
            awaited: 0,
            landed: 0,
            broken: None,
        }
    }

    /// Begins a call: the peer's may be reported from now on.
    pub fn begin(&mut self, sequence: u64) {
        self.sequence = sequence;
        if self.called {
            self.called = false;
            self.streams[0].incoming.push_back(Frame::for_call());
        }
        (self.posted, self.sent, self.awaited, self.landed) = (0, 0, 0, 0);
        for stream in &mut self.streams {
            (stream.sent, stream.landed) = (0, 0);
        }
        // A peer that left after the last call is best noticed before anything is sent to it.
        if self.streams[0].is_ending() && self.broken.is_none() {
            let _ = self.receive(0);
        }
    }

    /// Whether messages are under way, so that pieces are held.
    pub fn is_busy(&self) -> bool {
        self.under_way() != (0, 0)
    }

    /// How many messages are under way: to the peer, and from it.
    pub fn under_way(&self) -> (u64, u64) {
        (self.posted - self.sent, self.awaited - self.landed)
    }

    /// An error if the link cannot be used any more.
    pub fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Sends a call, and returns the socket that it goes through.
    pub fn announce(&mut self, call: &Call) -> Result<usize> {
        self.check()?;
        self.streams[0].push(Frame::of_call(call));
        self.flush(0)?;
        Ok(0)
    }

    /// Sends the next message, and returns the socket that it goes through.
    pub fn send(&mut self, piece: Piece) -> Result<usize> {
        self.check()?;
        let at = self.socket_of(self.posted);
        self.streams[at].push(Frame::of_data(self.sequence, self.posted, piece));
        self.posted += 1;
        self.flush(at)?;
        Ok(at)
    }

    /// Makes room for the next message, and returns the socket that it comes through.
    pub fn post_recv(&mut self, piece: Piece) -> Result<usize> {
        self.check()?;
        let at = self.socket_of(self.awaited);
        self.streams[at].incoming.push_back(Frame::for_data(self.sequence, self.awaited, piece));
        self.awaited += 1;
        Ok(at)
    }

    fn socket_of(&self, message: u64) -> usize {
        (message % self.streams.len() as u64) as usize
    }

    /// Moves what one socket can move in a turn and reports what came of it. `true` if there was anything.
    pub fn step(&mut self, at: usize, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let mut moved = self.flush(at)?;
        let mut read = 0;
        loop {
            self.settle(at, events)?;
            if read >= TURN {
                break;
            }
            let Moved::Bytes(bytes) = self.receive(at)? else {
                break;
            };
            read += bytes;
        }
        moved += read;
        self.report(events);
        Ok(moved > 0 || events.len() > before)
    }

    fn flush(&mut self, at: usize) -> Result<usize> {
        self.streams[at].flush().map_err(|cause| self.lose(Self::broke(cause)))
    }

    fn receive(&mut self, at: usize) -> Result<Moved> {
        let loss = match self.streams[at].fill(TURN) {
            Ok(Moved::Ended) => "closed its connection".to_owned(),
            Ok(moved) => return Ok(moved),
            Err(cause) => Self::broke(cause),
        };
        let amidst = self.streams[at].incoming.iter().any(|frame| !frame.is_untouched() && !frame.is_whole());
        let needed = amidst || self.is_busy() || self.streams.iter().any(Stream::is_sending);
        let error = self.lose(if amidst { format!("{loss} in the middle of a message") } else { loss });
        if needed { Err(error) } else { Ok(Moved::Ended) }
    }

    /// Takes the frames off the queue that are complete and due, and checks what has come of the next one.
    fn settle(&mut self, at: usize, events: &mut Events) -> Result<()> {
        while let Some(frame) = self.streams[at].incoming.front() {
            let content = frame.content().map_err(|(came, expected)| self.mismatch(&came, &expected))?;
            match content {
                Content::Partial => break,
                Content::Data => self.streams[at].landed += 1,
                Content::Call(None) => {
                    return Err(self.disagree("made a call that this version does not know"));
                }
                Content::Call(Some(call)) => {
                    // A peer that is ahead is heard when this rank is there too. But if this call needs
                    // something of a peer that has left it behind, that will never come.
                    if call.sequence > self.sequence && self.awaited == self.landed {
                        break;
                    }
                    self.called = true;
                    events.push_back(Event::PeerEntered { peer: self.peer, call });
                    if call.sequence != self.sequence {
                        // The executor compares; all that comes after this call is of no use.
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

    /// Reports the messages that are through, in their order.
    fn report(&mut self, events: &mut Events) {
        let peer = self.peer;
        let sockets = self.streams.len() as u64;
        while self.sent < self.posted && self.streams[self.socket_of(self.sent)].sent > self.sent / sockets {
            self.sent += 1;
            events.push_back(Event::SendComplete { peer });
        }
        while self.landed < self.awaited
            && self.streams[self.socket_of(self.landed)].landed > self.landed / sockets
        {
            self.landed += 1;
            events.push_back(Event::RecvComplete { peer });
        }
    }

    fn broke(cause: Errno) -> String {
        format!("broke its connection: {}", std::io::Error::from(cause))
    }

    fn mismatch(&mut self, came: &Head, expected: &Head) -> Error {
        let expected = if expected.is_call() { "its next call".to_owned() } else { expected.to_string() };
        self.disagree(&format!(
            "sent {came} where {expected} was expected; do all ranks run the same version with the same settings?"
        ))
    }

    fn disagree(&mut self, what: &str) -> Error {
        self.fail(ErrorKind::Disagreement, what)
    }

    fn lose(&mut self, what: String) -> Error {
        self.fail(ErrorKind::PeerLost, &what)
    }

    fn fail(&mut self, kind: ErrorKind, what: &str) -> Error {
        let error =
            Error::new(kind, format!("rank {} ({}) {what}", self.peer, self.address)).with_suspect(self.peer);
        self.broken.get_or_insert(error).clone()
    }

    /// Forgets every piece and closes all sockets.
    pub fn shut(&mut self) {
        for stream in &mut self.streams {
            stream.shut();
        }
        self.broken.get_or_insert_with(|| {
            Error::peer_lost(format!("the link to rank {} ({}) was given up", self.peer, self.address))
        });
        (self.posted, self.sent, self.awaited, self.landed) = (0, 0, 0, 0);
    }
}
