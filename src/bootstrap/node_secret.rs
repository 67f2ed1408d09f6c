//! A secret for the ranks of one node that needs no setting: rank 0 draws it, and hands it to processes of
//! its own user and PID namespace.
//!
//! Owns the Unix socket over which it travels.
//!
//! The name of the socket is not secret: each end reads the credentials of the other's process from the
//! kernel, and refuses those of other users and containers. The name lies in the abstract namespace, which
//! belongs to the network namespace as the loopback interface does. So every process that reaches rank 0 over
//! loopback reaches the socket, and no file is left behind.

use crate::descriptor;
use crate::logging::WarningLimit;
use crate::process::ClosedInChild;
use crate::secret::SecretKey;
use crate::transport::credentials::foreign_process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};
use rustix::net::{SocketAddrUnix, SocketType, bind, connect, listen, recv, send};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long rank 0 may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// What ranks do that cannot get the secret this way.
const FIX: &str = "if it is a rank of this job, set FLEXRING_SECRET on all ranks";
/// Connections served before the coordinator's other clients are served again.
const BATCH: usize = 256;
/// Length of the queue of pending connections; the system may impose a lower limit.
const BACKLOG: i32 = 4096;

/// A secret that rank 0 hands out, and the name under which others ask for it.
#[derive(Debug)]
pub(super) struct NodeSecret {
    pub(super) name: String,
    pub(super) key: SecretKey,
}

/// The name under which rank 0 of this job hands out its secret. Its numbers distinguish jobs that meet at
/// one port of a node.
pub(super) fn name(job: u128, port: u16) -> String {
    format!("flexring-secret-{port}-{job:032x}")
}

/// The listening socket of rank 0.
#[derive(Debug)]
pub(super) struct NodeSecretListener {
    _closed_in_child: ClosedInChild,
    socket: OwnedFd,
    key: SecretKey,
}

impl NodeSecretListener {
    /// Listens under the secret's name.
    pub(super) fn bind(secret: &NodeSecret) -> io::Result<Self> {
        let socket = descriptor::unix_socket(SocketType::STREAM)?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(secret.name.as_bytes())?)?;
        listen(&socket, BACKLOG)?;
        let _closed_in_child = ClosedInChild::new(socket.as_fd());
        Ok(Self { _closed_in_child, socket, key: secret.key.clone() })
    }

    /// Sends the secret to the processes of this user and PID namespace that have connected, and drops all
    /// others.
    ///
    /// # Errors
    /// That of accepting, mostly that there is no descriptor left. The connection then waits.
    pub(super) fn serve(&self) -> io::Result<()> {
        for _ in 0..BATCH {
            let caller = match descriptor::accept_unix(&self.socket) {
                Ok(caller) => caller,
                Err(cause) if io::Error::from(cause).kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(cause) => return Err(cause.into()),
            };
            if let Some(owner) = foreign_process(&caller) {
                static REFUSED: WarningLimit = WarningLimit::new();
                REFUSED.warn(format_args!("did not hand the job's secret to a process of {owner}: {FIX}"));
                continue;
            }
            // A new socket has room for it. A caller that is gone needs nothing.
            let _ = send(&caller, self.key.as_bytes(), SendFlags::NOSIGNAL);
        }
        Ok(())
    }
}

impl AsFd for NodeSecretListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Asks rank 0 for the secret with this name.
///
/// # Errors
/// Why there is no answer, as a sentence.
pub(super) fn ask(name: &str) -> Result<SecretKey, String> {
    let failed = |cause: io::Error| {
        format!(
            "rank 0 on this node does not hand out the job's secret ({cause}); does another job use its port?"
        )
    };
    let ask = || -> io::Result<Result<SecretKey, String>> {
        let socket = descriptor::unix_socket(SocketType::STREAM)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        if let Some(owner) = foreign_process(&socket) {
            return Ok(Err(format!("the job's secret is offered by a process of {owner} ({FIX})")));
        }
        let mut bytes = [0; 32];
        let mut len = 0;
        let until = Instant::now() + ANSWER_TIMEOUT;
        while len < bytes.len() {
            match recv(&socket, &mut bytes[len..], RecvFlags::empty()).map_err(io::Error::from) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((count, _)) => len += count,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => wait_readable(&socket, until)?,
                Err(cause) => return Err(cause),
            }
        }
        Ok(Ok(SecretKey::from_bytes(bytes)))
    };
    ask().map_err(failed)?
}

/// Waits until there is something to read.
///
/// # Errors
/// `TimedOut` if it is too late to wait.
pub(super) fn wait_readable(socket: &impl AsFd, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // An interrupted wait ends early, and the next one makes up for it.
    let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Timespec::try_from(left).ok().as_ref());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused_name() -> String {
        let number = crate::secret::random_bytes().map(u128::from_le_bytes).expect("random bytes");
        name(number, 1)
    }

    #[test]
    fn a_process_of_this_user_gets_the_secret() {
        let name = unused_name();
        let key = SecretKey::random().expect("random bytes");
        let listener =
            NodeSecretListener::bind(&NodeSecret { name: name.clone(), key: key.clone() }).expect("bound");
        let answer = std::thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&name));
            while !asking.is_finished() {
                listener.serve().expect("served");
            }
            asking.join().expect("no panic")
        });
        assert!(answer.expect("an answer").verify("test", &[], &key.mac("test", &[])));
    }

    #[test]
    fn silence_and_absence_are_reported_in_time() {
        let name = unused_name();
        let error = ask(&name).expect_err("no listener");
        assert!(error.contains("refused"), "{error}");
        let key = SecretKey::random().expect("random bytes");
        let _listener = NodeSecretListener::bind(&NodeSecret { name: name.clone(), key }).expect("bound");
        let began = Instant::now();
        let error = ask(&name).expect_err("no answer");
        assert!(error.contains("timed out") && began.elapsed() < 5 * ANSWER_TIMEOUT, "{error}");
    }

    #[test]
    fn a_name_is_free_again_once_its_listener_is_dropped() {
        let name = unused_name();
        for _ in 0..2 {
            let key = SecretKey::random().expect("random bytes");
            drop(
                NodeSecretListener::bind(&NodeSecret { name: name.clone(), key }).expect("the name is free"),
            );
        }
    }
}
