//! One socket of a link: the frames to be sent over it, and those that are expected from it.
//!
//! Owns the socket, its readiness, and its two queues.

use super::frame::Frame;
use super::socket::{LinkSocket, SendProgress};
use crate::process::ClosedInChild;
use rustix::event::epoll::EventFlags;
use std::array;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

/// The largest number of frames that one system call moves.
const BATCH: usize = 8;

/// The result of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    /// The number of bytes read.
    Bytes(usize),
    /// No bytes: no frame is expected, or the socket is not ready.
    Blocked,
    /// No bytes, now or later: the peer has closed its end.
    Closed,
}

/// One socket. Expected frames form a queue like the frames to be sent, so that one system call reads headers
/// and messages directly to their destinations. Nothing else is read: what the peer sends ahead of this rank
/// waits in the kernel, but for one read of an encrypted socket.
#[derive(Debug)]
pub(super) struct FrameStream {
    _closed_in_child: ClosedInChild,
    socket: LinkSocket,
    /// Frames to send, oldest first.
    outgoing: VecDeque<Frame>,
    /// Expected frames, oldest first.
    pub incoming: VecDeque<Frame>,
    /// Whether a read may return bytes. The kernel reports only changes.
    readable: bool,
    /// Whether a write may take bytes.
    writable: bool,
    /// Whether the peer has closed its end. Then a short read does not mean that the socket is drained.
    ending: bool,
    /// Messages of this call that are sent completely.
    pub sent: u64,
    /// Messages of this call that are received completely.
    pub received: u64,
    /// Whether it is on the list of streams that the next poll drives.
    pub queued: bool,
}

impl FrameStream {
    /// Wraps a connected socket, with room for `window` messages in each direction.
    pub fn new(socket: LinkSocket, window: usize) -> Self {
        Self {
            _closed_in_child: ClosedInChild::new(socket.as_fd()),
            // What came behind the handshake is reported by no event.
            readable: socket.has_buffered(),
            socket,
            // Room for this rank's call too, and for a call that was not sent before the next one.
            outgoing: VecDeque::with_capacity(window + 2),
            incoming: VecDeque::with_capacity(window + 1),
            writable: true,
            ending: false,
            sent: 0,
            received: 0,
            queued: false,
        }
    }

    /// Updates the readiness from an epoll event.
    pub fn update_readiness(&mut self, events: EventFlags) {
        let ended = EventFlags::ERR | EventFlags::HUP;
        self.readable |= events.intersects(EventFlags::IN | EventFlags::RDHUP | ended);
        self.writable |= events.intersects(EventFlags::OUT | ended);
        self.ending |= events.intersects(EventFlags::RDHUP | ended);
    }

    /// Has the next read try without an epoll event.
    pub fn assume_readable(&mut self) {
        self.readable = true;
    }

    /// Whether a read or a write may move bytes now.
    pub fn can_move(&self) -> bool {
        (self.readable && self.is_expecting()) || (self.writable && self.is_sending())
    }

    /// Whether the peer has closed its end. Bytes that it sent before may still be unread.
    pub fn is_ending(&self) -> bool {
        self.ending
    }

    /// Whether there are frames to send.
    pub fn is_sending(&self) -> bool {
        !self.outgoing.is_empty() || self.socket.has_unsent()
    }

    /// Whether an expected frame is incomplete. Frames are filled in order, so the last one decides.
    fn is_expecting(&self) -> bool {
        self.incoming.back().is_some_and(|last| !last.is_complete())
    }

    /// Queues a frame to be sent.
    pub fn push(&mut self, frame: Frame) {
        self.outgoing.push_back(frame);
    }

    /// Sends as much as the socket takes. The number of bytes sent.
    ///
    /// # Errors
    /// Any error of the socket except that it is not ready.
    pub fn flush(&mut self) -> io::Result<usize> {
        let mut total = 0;
        while self.writable && self.is_sending() {
            let progress = match (self.outgoing.front(), self.outgoing.len()) {
                // Without a table: most often there is one.
                (Some(frame), 1) => self.socket.send_parts(&mut frame.unsent(), frame.missing()),
                _ => self.send_batch(),
            };
            let SendProgress { sent, writable } = progress.inspect_err(|_| self.writable = false)?;
            self.writable = writable;
            total += sent;
            self.account(sent);
        }
        Ok(total)
    }

    /// Sends bytes of several frames with one system call.
    fn send_batch(&mut self) -> io::Result<SendProgress> {
        let mut iov = [IoSlice::new(&[]); 2 * BATCH];
        let mut asked = 0;
        let mut used = 0;
        for (frame, place) in self.outgoing.iter().zip(iov.chunks_exact_mut(2)) {
            place.copy_from_slice(&frame.unsent());
            asked += frame.missing();
            used += 2;
        }
        self.socket.send_parts(&mut iov[..used], asked)
    }

    /// Removes the frames that are sent completely.
    fn account(&mut self, mut sent: usize) {
        while let Some(frame) = self.outgoing.front_mut() {
            sent = frame.advance(sent);
            if !frame.is_complete() {
                return;
            }
            self.sent += u64::from(frame.is_data());
            self.outgoing.pop_front();
        }
    }

    /// Reads bytes of the expected frames with one system call: at most about `limit` bytes.
    ///
    /// # Errors
    /// Any error of the socket except that it is not ready.
    pub fn fill(&mut self, limit: usize) -> io::Result<ReadOutcome> {
        if !(self.readable && self.is_expecting()) {
            return Ok(ReadOutcome::Blocked);
        }
        let is_batch = self.incoming.len() > 1;
        let received = match self.incoming.front_mut() {
            // Without a table: most often there is one.
            Some(frame) if !is_batch => {
                let mut parts = frame.unfilled(limit);
                let asked = parts.iter().map(|part| part.len()).sum();
                self.socket.receive_parts(&mut parts, asked)
            }
            _ => self.receive_batch(limit),
        };
        let (mut got, has_more) = match received {
            Ok((0, _)) => {
                self.readable = false;
                return Ok(ReadOutcome::Closed);
            }
            Ok(received) => received,
            Err(cause) => {
                self.readable = false;
                let is_blocked = cause.kind() == io::ErrorKind::WouldBlock;
                return if is_blocked { Ok(ReadOutcome::Blocked) } else { Err(cause) };
            }
        };
        self.readable = has_more || self.ending;
        let moved = ReadOutcome::Bytes(got);
        for frame in &mut self.incoming {
            got = frame.advance(got);
        }
        Ok(moved)
    }

    /// Reads bytes of several frames with one system call. How many, and whether there may be more.
    fn receive_batch(&mut self, limit: usize) -> io::Result<(usize, bool)> {
        let mut iov: [IoSliceMut<'_>; 2 * BATCH] = array::from_fn(|_| IoSliceMut::new(&mut []));
        let mut asked = 0;
        let mut used = 0;
        let open = self.incoming.iter_mut().filter(|frame| !frame.is_complete());
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
        self.socket.receive_parts(&mut iov[..used], asked)
    }

    /// Drops all frames, and with them every piece, and shuts the socket down in both directions.
    pub fn shut(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
        self.socket.shut();
    }
}

impl AsFd for FrameStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
