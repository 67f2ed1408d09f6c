//! The coordinator that a rank moves away from: that of the process which created the unique id.
//!
//! Owns the connection to it until the new coordinator, in rank 0's process, knows this rank. Until then each
//! rank is connected to one of the two at least, so its death is noticed at once. The former coordinator
//! reports a death to rank 0, which passes it on to the new one; so all ranks get one error.

use super::coordinator_ports::CoordinatorControl;
use super::framed_stream::FramedStream;
use super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, decode, encode};
use crate::error::Result;
use rustix::event::{PollFd, PollFlags};

/// The connection to the coordinator that this rank moves away from, if it does.
pub(super) struct CoordinatorHandover<'a> {
    connection: Option<FramedStream>,
    /// The coordinator that takes the world over, if it is in this process.
    successor: Option<&'a CoordinatorControl>,
}

impl<'a> CoordinatorHandover<'a> {
    /// This rank does not move.
    pub(super) fn none() -> Self {
        Self { connection: None, successor: None }
    }

    /// This rank moves away from the other end of `connection`.
    pub(super) fn new(connection: FramedStream, successor: Option<&'a CoordinatorControl>) -> Self {
        Self { connection: Some(connection), successor }
    }

    /// Fails if a rank has died before the new coordinator knew it. Rank 0 gets that error from the new
    /// coordinator, as the others do.
    ///
    /// # Errors
    /// The root cause that the former coordinator sends.
    pub(super) fn check(&mut self) -> Result<()> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        let received = connection.receive(FRAME_LIMIT);
        // The process that created the id may end.
        if received.end.is_some() {
            self.connection = None;
        }
        for frame in &received.frames {
            if let Some(ToRank::RootCause(error)) = decode(frame) {
                match self.successor {
                    Some(successor) => successor.fail(error),
                    None => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Tells it that the new coordinator knows this rank. Closing the connection then is no failure.
    pub(super) fn leave(&mut self) {
        if let Some(mut connection) = self.connection.take()
            && let Ok(message) = encode(&ToCoordinator::Moved)
        {
            connection.enqueue(message);
            // The socket has room for it, and a coordinator that is gone does not need it.
            let _ = connection.flush();
            connection.shut_down_write();
        }
    }

    /// What to poll for, besides other events.
    pub(super) fn poll_fd(&self) -> Option<PollFd<'_>> {
        self.connection.as_ref().map(|connection| PollFd::new(connection, PollFlags::IN))
    }
}
