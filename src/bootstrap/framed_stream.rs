//! Framed I/O over one control connection, never blocking.
//!
//! Owns the socket, the frames that wait to be sent, and the bytes of an incomplete frame. Must not know what
//! the frames mean.

use super::protocol::{Bytes, FrameDecoder, Unreadable};
use crate::process::ClosedInChild;
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct FramedStream {
    _closed_in_child: ClosedInChild,
    stream: TcpStream,
    cutter: FrameDecoder,
    /// Frames that were received before and are returned again.
    put_back: Vec<Vec<u8>>,
    outgoing: VecDeque<Bytes>,
    /// Bytes of the first queued frame that are already sent.
    sent: usize,
}

/// The result of one read.
#[derive(Debug, Default)]
pub(super) struct ReceivedFrames {
    /// Whether any bytes arrived.
    pub(super) any: bool,
    /// Complete frames, in order.
    pub(super) frames: Vec<Vec<u8>>,
    /// Why no more frames will arrive: a verb phrase whose subject is the connection, such as `closed`.
    pub(super) end: Option<String>,
    /// Why the bytes that arrived cannot be split into frames, if that is the end.
    pub(super) unreadable: Option<Unreadable>,
}

impl FramedStream {
    /// Takes over a connected socket. With `preamble` the peer's first bytes must be a preamble.
    pub(super) fn new(stream: TcpStream, preamble: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            _closed_in_child: ClosedInChild::new(stream.as_fd()),
            stream,
            cutter: FrameDecoder::new(preamble),
            put_back: Vec::new(),
            outgoing: VecDeque::new(),
            sent: 0,
        })
    }

    /// Has the next [`receive`](Self::receive) return these frames first.
    pub(super) fn put_back(&mut self, frames: impl IntoIterator<Item = Vec<u8>>) {
        self.put_back.extend(frames);
    }

    /// Reads once, at most 16 KiB, so that no peer can keep the thread from the others. Frames longer than
    /// `limit` bytes end the connection.
    pub(super) fn receive(&mut self, limit: usize) -> ReceivedFrames {
        let mut received = ReceivedFrames::default();
        received.frames.append(&mut self.put_back);
        received.any = !received.frames.is_empty();
        let mut chunk = [0; 16 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => received.end = Some("closed".to_owned()),
            Ok(count) => {
                received.any = true;
                self.cutter.append(&chunk[..count]);
                loop {
                    match self.cutter.next(limit) {
                        Ok(Some(frame)) => received.frames.push(frame),
                        Ok(None) => break,
                        Err(cause) => {
                            received.unreadable = Some(cause);
                            received.end = Some("carried bytes that are not flexring frames".to_owned());
                            break;
                        }
                    }
                }
            }
            Err(cause) if is_transient(&cause) => {}
            Err(cause) => received.end = Some(format!("broke ({cause})")),
        }
        received
    }

    /// Queues a frame for [`flush`](Self::flush).
    pub(super) fn enqueue(&mut self, frame: Bytes) {
        self.outgoing.push_back(frame);
    }

    /// Whether queued frames are not completely sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends as much as the socket accepts.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.outgoing.front() {
            match self.stream.write(&frame[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    if self.sent == frame.len() {
                        self.outgoing.pop_front();
                        self.sent = 0;
                    }
                }
                Err(cause) if is_transient(&cause) => break,
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    /// Closes the sending direction. What the peer still sends can be received.
    pub(super) fn shut_down_write(&self) {
        // Fails only if the connection is gone, which the next `receive` reports.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// The events to poll for.
    pub(super) fn poll_flags(&self) -> PollFlags {
        if self.has_unsent() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

impl AsFd for FramedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_transient(cause: &io::Error) -> bool {
    matches!(cause.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
