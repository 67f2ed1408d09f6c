//! One socket of a link: the frames that wait to leave through it, and those that are expected from it.
//!
//! Owns the socket, what is known of its readiness, and its two queues. Must not know links, ranks or events.

use super::frame::Frame;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::array;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// How many frames one system call moves at most.
const BATCH: usize = 8;

/// How far a socket moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// This many bytes.
    Bytes(usize),
    /// Not at all: there is nothing to move, or the socket is not ready.
    Nothing,
    /// Not at all, and it never will: the peer has closed its end.
    Ended,
}

/// One socket. What is expected from the peer is a queue of frames like those that are sent to it, so that
/// heads and messages are read in one go, straight to where they belong. Nothing else is ever read: what the
/// peer sends ahead of this rank waits in the kernel.
#[derive(Debug)]
pub(super) struct Stream {
    socket: TcpStream,
    /// Frames to be sent, oldest first.
    outgoing: VecDeque<Frame>,
    /// Frames to be received, oldest first.
    pub incoming: VecDeque<Frame>,
    /// Whether a read may give something: the kernel tells only when this changes.
    readable: bool,
    /// Whether a write may take something.
    writable: bool,
    /// Whether the peer has closed its end, so that a short read does not mean that nothing is left to learn.
    ending: bool,
    /// Messages of this call that are sent.
    pub sent: u64,
    /// Messages of this call that have landed.
    pub landed: u64,
    /// Whether it is on the list of streams that the next poll looks at.
    pub enlisted: bool,
}

impl Stream {
    /// A connected socket with room for `window` messages each way.
    pub fn new(socket: TcpStream, window: usize) -> Self {
        Self {
            socket,
            // A call of this rank's, and one that was not taken before the next.
            outgoing: VecDeque::with_capacity(window + 2),
            incoming: VecDeque::with_capacity(window + 1),
            readable: false,
            writable: true,
            ending: false,
            sent: 0,
            landed: 0,
            enlisted: false,
        }
    }

    /// Takes note of what the kernel says about the socket.
    pub fn learn(&mut self, events: EventFlags) {
        let over = EventFlags::ERR | EventFlags::HUP;
        self.readable |= events.intersects(EventFlags::IN | EventFlags::RDHUP | over);
        self.writable |= events.intersects(EventFlags::OUT | over);
        self.ending |= events.intersects(EventFlags::RDHUP | over);
    }

    /// Whether moving bytes should be tried now.
    pub fn can_move(&self) -> bool {
        (self.readable && self.is_expecting()) || (self.writable && self.is_sending())
    }

    /// Whether the peer was seen to close its end; what it had sent before may still be unread.
    pub fn is_ending(&self) -> bool {
        self.ending
    }

    /// Whether frames wait to leave.
    pub fn is_sending(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Frames are filled in order, so the last one tells whether any is not.
    fn is_expecting(&self) -> bool {
        self.incoming.back().is_some_and(|last| !last.is_whole())
    }

    /// Queues a frame.
    pub fn push(&mut self, frame: Frame) {
        self.outgoing.push_back(frame);
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// Whatever the socket says but that it is not ready.
    pub fn flush(&mut self) -> Result<usize, Errno> {
        let mut total = 0;
        while self.writable && self.is_sending() {
            let mut iov = [IoSlice::new(&[]); 2 * BATCH];
            let mut asked = 0;
            let mut used = 0;
            for (frame, place) in self.outgoing.iter().zip(iov.chunks_exact_mut(2)) {
                place.copy_from_slice(&frame.unsent());
                asked += frame.missing();
                used += 2;
            }
            let sent = match rustix::net::sendmsg(
                &self.socket,
                &iov[..used],
                &mut SendAncillaryBuffer::default(),
                // A program that links flexring may not have SIGPIPE ignored.
                SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => sent,
                Err(Errno::AGAIN) => {
                    self.writable = false;
                    break;
                }
                Err(Errno::INTR) => continue,
                Err(cause) => {
                    self.writable = false;
                    return Err(cause);
                }
            };
            // The kernel takes less than it is given only if it is full, and then tells when it is not.
            self.writable = sent == asked;
            total += sent;
            self.account(sent);
        }
        Ok(total)
    }

    fn account(&mut self, mut sent: usize) {
        while let Some(frame) = self.outgoing.front_mut() {
            sent = frame.advance(sent);
            if !frame.is_whole() {
                return;
            }
            self.sent += u64::from(frame.is_data());
            self.outgoing.pop_front();
        }
    }

    /// Receives, with one system call, what has come of the frames that are expected: about `limit` bytes at most.
    ///
    /// # Errors
    /// Whatever the socket says but that it is not ready.
    pub fn fill(&mut self, limit: usize) -> Result<Moved, Errno> {
        if !(self.readable && self.is_expecting()) {
            return Ok(Moved::Nothing);
        }
        let mut iov: [IoSliceMut<'_>; 2 * BATCH] = array::from_fn(|_| IoSliceMut::new(&mut []));
        let mut asked = 0;
        let mut used = 0;
        let open = self.incoming.iter_mut().filter(|frame| !frame.is_whole());
        for (frame, place) in open.zip(iov.chunks_exact_mut(2)) {
            if asked >= limit {
                break;
            }
            used += 2;
            for (place, part) in place.iter_mut().zip(frame.unfilled(limit - asked)) {
                asked += part.len();
                *place = part;
            }
        }
        let mut got = loop {
            match rustix::io::readv(&self.socket, &mut iov[..used]) {
                Ok(0) => {
                    self.readable = false;
                    return Ok(Moved::Ended);
                }
                Ok(got) => break got,
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Ok(Moved::Nothing);
                }
                Err(Errno::INTR) => {}
                Err(cause) => {
                    self.readable = false;
                    return Err(cause);
                }
            }
        };
        self.readable = got == asked || self.ending;
        let moved = Moved::Bytes(got);
        for frame in &mut self.incoming {
            got = frame.advance(got);
        }
        Ok(moved)
    }

    /// Forgets every piece and closes the socket both ways.
    pub fn shut(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
        // It fails if the peer was faster, which is as good.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
