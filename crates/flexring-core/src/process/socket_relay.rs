//! Sockets whose other end soon learns that this process was killed.
//!
//! The kernel closes the descriptors of a killed process when the last of its threads ends, after it has
//! freed the process's memory: 0.1 s for 400 MB on a busy machine. A thread with a table of descriptors of
//! its own loses them when it ends itself, mostly before.
//!
//! Owns such a thread for one socket. It runs no code of the program, whose descriptors its table lacks.

use super::spawn;
use crate::descriptor;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, read};
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};

/// Bytes on their way in one direction.
const BUFFER: usize = 16 << 10;

/// A thread that holds a socket, and passes on what the process sends and receives over a local socket.
/// Dropping it waits until the thread has ended, which it does when either socket is closed or shut down and
/// all bytes have been passed on.
#[derive(Debug)]
pub struct SocketRelay {
    thread: Option<JoinHandle<()>>,
    /// The error number of the socket, if it broke; 0 before.
    broken: Arc<AtomicI32>,
}

impl SocketRelay {
    /// Starts a relay for `socket`, which must not block. Returns the relay and its local socket, which does
    /// not block either. The caller closes `socket` afterwards, so that the relay alone holds it.
    ///
    /// # Errors
    /// Those of the kernel. Linux before 5.9 lacks a system call that this needs.
    pub fn start(socket: BorrowedFd<'_>) -> io::Result<(Self, OwnedFd)> {
        let (near, far) = descriptor::unix_stream_pair()?;
        let numbers = [socket.as_raw_fd(), far.as_raw_fd()];
        let (report, reported) = mpsc::channel();
        let broken = Arc::new(AtomicI32::new(0));
        let record = Arc::clone(&broken);
        let thread = spawn(Builder::new().name("flexring-relay".to_owned()), move || {
            let outcome = keep_only(numbers);
            let failed = outcome.is_err();
            if report.send(outcome).is_err() || failed {
                return;
            }
            drop(report);
            // SAFETY: this thread's table has both, and only the end of the thread closes them.
            let [remote, local] = numbers.map(|number| unsafe { BorrowedFd::borrow_raw(number) });
            pass_on(remote, local, &record);
        })?;
        let relay = Self { thread: Some(thread), broken };
        // The thread uses the numbers until it reports, so both must stay open here until then.
        reported.recv().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))?;
        Ok((relay, near))
    }

    /// Why the socket broke, if it did: the local socket only shows its end.
    pub fn error(&self) -> Option<io::Error> {
        let number = self.broken.load(Ordering::Acquire);
        (number != 0).then(|| io::Error::from_raw_os_error(number))
    }
}

impl Drop for SocketRelay {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a relay panicked");
        }
    }
}

/// Gives this thread a table of descriptors of its own, with these two only.
fn keep_only(mut numbers: [RawFd; 2]) -> io::Result<()> {
    numbers.sort_unstable();
    let [first, second] = numbers.map(i64::from);
    let rest = i64::from(u32::MAX);
    // The first one makes the table.
    close_range(second + 1, rest, i64::from(libc::CLOSE_RANGE_UNSHARE))?;
    for (from, to) in [(0, first - 1), (first + 1, second - 1)] {
        if from <= to {
            close_range(from, to, 0)?;
        }
    }
    Ok(())
}

fn close_range(first: i64, last: i64, flags: i64) -> io::Result<()> {
    // SAFETY: it has no memory arguments. Descriptors are closed in this thread's own table, after the first
    // call has made it, and no code that runs in this thread owns any of them.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Passes bytes on in both directions until one socket is closed. `broken` gets the first error of `remote`.
fn pass_on(remote: BorrowedFd<'_>, local: BorrowedFd<'_>, broken: &AtomicI32) {
    let note = |cause: Errno| {
        let _ = broken.compare_exchange(0, cause.raw_os_error(), Ordering::Release, Ordering::Relaxed);
    };
    let (mut incoming, mut outgoing) = (ByteFlow::default(), ByteFlow::default());
    let mut is_closed = false;
    loop {
        incoming.advance(remote, local, note, |_| {});
        outgoing.advance(local, remote, |_| {}, note);
        if incoming.is_over || is_closed {
            return;
        }
        let mut waits = [
            PollFd::from_borrowed_fd(remote, incoming.reads() | outgoing.writes()),
            PollFd::from_borrowed_fd(local, outgoing.reads() | incoming.writes()),
        ];
        let _ = poll(&mut waits, None);
        // What was sent before goes out in the next round, as far as the remote socket has room for it.
        is_closed = waits[1].revents().contains(PollFlags::HUP);
    }
}

/// The bytes that travel from one socket to the other.
struct ByteFlow {
    buffer: Box<[u8; BUFFER]>,
    /// The bytes of the buffer that are to be sent.
    from: usize,
    to: usize,
    /// Whether nothing more comes.
    has_ended: bool,
    /// Whether the end has been passed on, or bytes cannot be.
    is_over: bool,
}

impl Default for ByteFlow {
    fn default() -> Self {
        let buffer = Box::new([0; BUFFER]);
        Self { buffer, from: 0, to: 0, has_ended: false, is_over: false }
    }
}

impl ByteFlow {
    /// Reads and writes as much as is possible at once. If `source` or `sink` breaks, its function gets the
    /// error before the end is passed on.
    fn advance(
        &mut self,
        source: BorrowedFd<'_>,
        sink: BorrowedFd<'_>,
        source_broke: impl Fn(Errno),
        sink_broke: impl Fn(Errno),
    ) {
        while !self.is_over {
            if self.from < self.to {
                match send(sink, &self.buffer[self.from..self.to], SendFlags::NOSIGNAL) {
                    Ok(count) => self.from += count,
                    Err(Errno::AGAIN) => return,
                    Err(Errno::INTR) => {}
                    Err(cause) => {
                        sink_broke(cause);
                        self.is_over = true;
                    }
                }
            } else if self.has_ended {
                let _ = shutdown(sink, Shutdown::Write);
                self.is_over = true;
            } else {
                (self.from, self.to) = (0, 0);
                match read(source, &mut self.buffer[..]) {
                    Ok(count) if count > 0 => self.to = count,
                    Err(Errno::AGAIN) => return,
                    Err(Errno::INTR) => {}
                    Ok(_) => self.has_ended = true,
                    Err(cause) => {
                        source_broke(cause);
                        self.has_ended = true;
                    }
                }
            }
        }
    }

    fn reads(&self) -> PollFlags {
        if self.from == self.to && !self.has_ended { PollFlags::IN } else { PollFlags::empty() }
    }

    fn writes(&self) -> PollFlags {
        if self.from < self.to { PollFlags::OUT } else { PollFlags::empty() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    /// A relay, the process's end of its connection, and the other end.
    fn relayed() -> (TcpStream, SocketRelay, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (far, _) = listener.accept().expect("a connection");
        near.set_nonblocking(true).expect("a socket option");
        let (relay, local) = SocketRelay::start(near.as_fd()).expect("a relay");
        let local = TcpStream::from(local);
        local.set_nonblocking(false).expect("a socket option");
        (local, relay, far)
    }

    #[test]
    fn bytes_pass_in_both_directions_while_nobody_reads() {
        // More than all buffers hold, so that each direction waits for its reader.
        const LEN: usize = 16 << 20;
        let (mut local, relay, mut far) = relayed();
        let bytes: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8).collect();
        std::thread::scope(|scope| {
            for (stream, other) in [(&local, &far), (&far, &local)] {
                let (mut stream, mut other) = (stream, other);
                let sent = &bytes;
                scope.spawn(move || stream.write_all(sent).expect("sent"));
                scope.spawn(move || {
                    let mut received = vec![0; LEN];
                    other.read_exact(&mut received).expect("received");
                    assert!(received == *sent);
                });
            }
        });
        // The end of one direction does not end the other.
        local.shutdown(std::net::Shutdown::Write).expect("open");
        assert_eq!(far.read(&mut [0]).expect("the end"), 0);
        far.write_all(b"goodbye").expect("sent");
        drop(far);
        let mut received = Vec::new();
        local.read_to_end(&mut received).expect("the end");
        assert_eq!(received, b"goodbye");
        drop((local, relay));
    }

    #[test]
    fn what_was_sent_arrives_after_the_process_has_shut_its_end_down() {
        let (mut local, relay, mut far) = relayed();
        local.write_all(b"last words").expect("sent");
        // A forked child may hold a copy, so that it is not closed.
        local.shutdown(std::net::Shutdown::Both).expect("open");
        drop(relay);
        let mut received = Vec::new();
        far.read_to_end(&mut received).expect("the end");
        assert_eq!(received, b"last words");
    }

    #[test]
    fn a_connection_that_is_reset_leaves_its_error() {
        let (mut local, relay, far) = relayed();
        assert!(relay.error().is_none());
        rustix::net::sockopt::set_socket_linger(&far, Some(Duration::ZERO)).expect("a socket option");
        drop(far);
        assert_eq!(local.read(&mut [0]).expect("the end"), 0);
        assert_eq!(relay.error().map(|cause| cause.kind()), Some(io::ErrorKind::ConnectionReset));
    }

    #[test]
    fn only_the_relay_holds_the_socket() {
        let (_local, _relay, far) = relayed();
        let descriptors = |of: &std::path::Path| {
            // The thread may have ended.
            let folder = std::fs::read_dir(of.join("fd"));
            folder
                .into_iter()
                .flatten()
                .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
                .collect::<Vec<_>>()
        };
        let tasks = std::fs::read_dir("/proc/self/task").expect("the kernel shows it");
        let relays: Vec<_> = tasks
            .filter_map(|task| Some(task.ok()?.path()))
            .filter(|task| {
                std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "flexring-relay\n")
            })
            .map(|task| descriptors(&task))
            .collect();
        let own = descriptors(std::path::Path::new("/proc/self"));
        // Other tests of this process may have relays, too, or start some.
        let is_apart = |held: &Vec<_>| held.len() == 2 && !held.iter().any(|socket| own.contains(socket));
        assert!(relays.iter().any(is_apart), "{relays:?}, {own:?}");
        drop(far);
    }
}
