//! A control connection: frames in, frames out, without ever blocking.
//!
//! Owns one socket and what is on its way through it. Must not know what the frames say.

use super::protocol::{Bytes, FrameDecoder};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct FramedStream {
    stream: TcpStream,
    cutter: FrameDecoder,
    outgoing: VecDeque<Bytes>,
    /// How much of the first outgoing frame is gone.
    sent: usize,
}

/// What one look at a connection brought.
#[derive(Debug, Default)]
pub(super) struct Received {
    /// Whether anything came at all.
    pub(super) any: bool,
    /// Frames that are complete.
    pub(super) frames: Vec<Vec<u8>>,
    /// Why no more will come, if so.
    pub(super) end: Option<String>,
}

impl FramedStream {
    /// Takes a connected socket over. `magic` if the peer's first bytes must be the magic word.
    pub(super) fn new(stream: TcpStream, magic: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, cutter: FrameDecoder::new(magic), outgoing: VecDeque::new(), sent: 0 })
    }

    /// Reads once, a bounded amount, so that no peer takes more than its turn.
    pub(super) fn receive(&mut self, limit: usize) -> Received {
        let mut received = Received::default();
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
                        Err(_) => {
                            received.end = Some("carried bytes that are no frames of flexring".to_owned());
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

    /// Queues a frame.
    pub(super) fn enqueue(&mut self, frame: Bytes) {
        self.outgoing.push_back(frame);
    }

    /// Whether frames are queued.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends what the socket takes.
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

    /// Says that nothing more will be sent; what the peer still sends can be received.
    pub(super) fn shut_down_write(&self) {
        // Fails only on a connection that is gone, which the next receive tells.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// What to wait for.
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
