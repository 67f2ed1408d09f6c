//! A Unix socket at which a coordinator shows the state of its ranks to processes of its user on its node.
//!
//! Owns the names of these sockets, how they are found, and who is answered.
//!
//! The name lies in the abstract namespace, as that of `node_secret`: it belongs to the network namespace,
//! and nothing is left behind by a process that is killed. It contains user, process and a random number,
//! because a process may run several coordinators. No secret of the job is needed: the kernel identifies the
//! process at the other end. A coordinator answers processes of its own user and PID namespace only, and
//! `flexring status` reads answers of its own user's processes only. Every user can listen under such a name.

use super::node_secret::wait_readable;
use super::world_status::WorldStatus;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::process::{ClosedInChild, spawn};
use crate::secret::random_bytes;
use crate::transport::credentials::{foreign_process, foreign_user};
use rustix::net::{SocketAddrUnix, SocketType, bind, connect, listen};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How the names of all these sockets begin.
const PREFIX: &str = "flexring-status-";
/// How long a coordinator may take for its whole answer, and a caller to read a part of it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Callers that are answered at the same time. More are refused.
const MOST_CALLERS: usize = 16;
/// Length of the queue of pending connections.
const BACKLOG: i32 = 64;
/// Longest answer that is read. A status has at most some ten thousand rows.
const LONGEST: u64 = 64 << 20;

/// The listening socket of a coordinator.
#[derive(Debug)]
pub(super) struct StatusSocket {
    _closed_in_child: ClosedInChild,
    socket: OwnedFd,
}

impl StatusSocket {
    /// Listens under a name of its own.
    pub(super) fn bind() -> io::Result<Self> {
        let number = random_bytes().map(u64::from_ne_bytes).map_err(io::Error::other)?;
        let name = format!("{}{}-{number:016x}", prefix(), std::process::id());
        let socket = descriptor::unix_socket(SocketType::STREAM)?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        listen(&socket, BACKLOG)?;
        Ok(Self { _closed_in_child: ClosedInChild::new(socket.as_fd()), socket })
    }

    /// Accepts the processes of this user and PID namespace that have connected, and drops all others. Does
    /// not block.
    pub(super) fn accept(&self) -> Vec<UnixStream> {
        let accepted = (0..BACKLOG).map_while(|_| descriptor::accept_unix(&self.socket).ok());
        let callers = accepted.filter(|caller| foreign_process(caller).is_none());
        callers.map(UnixStream::from).take(MOST_CALLERS).collect()
    }
}

impl AsFd for StatusSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends `status` to these callers, on a thread of its own: they may be slow.
pub(super) fn answer(callers: Vec<UnixStream>, status: &WorldStatus) {
    static ANSWERED: AtomicUsize = AtomicUsize::new(0);
    let count = callers.len();
    let text = serde_json::to_vec(status).unwrap_or_default();
    if ANSWERED.fetch_add(count, Ordering::Relaxed) + count > MOST_CALLERS {
        ANSWERED.fetch_sub(count, Ordering::Relaxed);
        return;
    }
    let send = move || {
        for mut caller in callers {
            let waits = caller.set_nonblocking(false).and_then(|()| caller.set_write_timeout(Some(TIMEOUT)));
            // A caller that is gone needs no answer.
            let _ = waits.and_then(|()| caller.write_all(&text));
        }
        ANSWERED.fetch_sub(count, Ordering::Relaxed);
    };
    if spawn(Builder::new().name("flexring-status".to_owned()), send).is_err() {
        ANSWERED.fetch_sub(count, Ordering::Relaxed);
    }
}

/// How the names of this user's sockets begin.
fn prefix() -> String {
    format!("{PREFIX}{}-", rustix::process::geteuid().as_raw())
}

/// What a coordinator on this node answered.
#[derive(Debug)]
pub struct LocalCoordinator {
    /// Its process, by the number in its PID namespace.
    pub pid: u32,
    /// The state of its ranks. It has no rows before the first rank has joined, and when all have moved to
    /// another coordinator. The error says why there is no answer.
    pub status: Result<WorldStatus>,
}

/// Asks every coordinator of this user in this network namespace, ordered by process.
///
/// # Errors
/// `System` if `/proc/net/unix` cannot be read.
pub fn local_coordinators() -> Result<Vec<LocalCoordinator>> {
    let table = std::fs::read_to_string("/proc/net/unix").map_err(|cause| {
        Error::io("cannot read /proc/net/unix, which lists this node's coordinators", cause)
    })?;
    let prefix = prefix();
    let pid = |name: &str| name.strip_prefix(&prefix)?.split('-').next()?.parse::<u32>().ok();
    let names = table.lines().filter_map(|line| line.rsplit_once('@').map(|(_, name)| name));
    // Accepted connections have the name, too.
    let names: BTreeSet<(u32, &str)> = names.filter_map(|name| Some((pid(name)?, name))).collect();
    Ok(names
        .into_iter()
        .map(|(pid, name)| LocalCoordinator { pid, status: ask(pid, name, TIMEOUT) })
        .collect())
}

fn ask(pid: u32, name: &str, timeout: Duration) -> Result<WorldStatus> {
    let until = Instant::now() + timeout;
    let failed = |cause: io::Error| {
        let what = format!("the coordinator in process {pid} does not answer");
        match cause.kind() {
            io::ErrorKind::WouldBlock => {
                Error::timeout(format!("{what}, and its queue is full: is it stopped?"))
            }
            io::ErrorKind::TimedOut => Error::timeout(format!("{what} within {timeout:?}: is it stopped?")),
            _ => Error::io(what, cause),
        }
    };
    let connected = || -> io::Result<UnixStream> {
        let socket = descriptor::unix_socket(SocketType::STREAM)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        Ok(socket.into())
    };
    let stream = connected().map_err(failed)?;
    if let Some(user) = foreign_user(&stream) {
        return Err(Error::system(format!("the coordinator in process {pid} belongs to {user}")));
    }
    let (mut text, mut answer) = (Vec::new(), (&stream).take(LONGEST));
    // What has been read stays in `text`.
    while let Err(cause) = answer.read_to_end(&mut text) {
        let waited = match cause.kind() {
            io::ErrorKind::WouldBlock => wait_readable(&stream, until),
            _ => Err(cause),
        };
        waited.map_err(failed)?;
    }
    serde_json::from_slice(&text).map_err(|cause| {
        let what = "is busy, in another container, or runs another release of flexring";
        Error::system(format!("the coordinator in process {pid} gave no status ({cause}): it {what}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listening socket whose connections are not accepted, and its name.
    fn listener(backlog: i32) -> (OwnedFd, String) {
        let name =
            format!("flexring-test-{:032x}", random_bytes().map(u128::from_ne_bytes).expect("a number"));
        let socket = descriptor::unix_socket(SocketType::STREAM).expect("a socket");
        bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name")).expect("bound");
        listen(&socket, backlog).expect("it listens");
        (socket, name)
    }

    fn error(name: &str, timeout: Duration) -> String {
        ask(7, name, timeout).expect_err("no answer").message().to_owned()
    }

    #[test]
    fn asking_a_coordinator_that_accepts_nothing_ends() {
        let (_listener, name) = listener(0);
        let expected = "the coordinator in process 7 does not answer within 50ms: is it stopped?";
        assert_eq!(error(&name, Duration::from_millis(50)), expected);
        // That connection still fills the queue.
        let expected = "the coordinator in process 7 does not answer, and its queue is full: is it stopped?";
        assert_eq!(error(&name, Duration::from_secs(3600)), expected);
    }

    #[test]
    fn an_answer_that_never_ends_is_not_waited_for() {
        let (listener, name) = listener(1);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| error(&name, Duration::from_millis(200)));
            let mut caller = None;
            while !asking.is_finished() {
                caller = caller.or_else(|| descriptor::accept_unix(&listener).ok().map(UnixStream::from));
                if let Some(caller) = &mut caller {
                    // It fails when the caller has gone.
                    let _ = caller.write_all(b" ");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let message = asking.join().expect("no panic");
            assert!(message.contains("does not answer within 200ms"), "{message}");
        });
    }
}
