//! Messages from one rank of a world to another, over their control connections.
//!
//! Owns sending and reading them. They are short and rare: ranks use
//! them to make links that not all ranks make at once.

use super::control_connection::ControlConnection;
use super::control_state::Shared;
use super::protocol::{MOST_PEER_MESSAGES, PEER_MESSAGE_LIMIT, ToCoordinator};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wake::WakeFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One rank's end of the messages among the ranks of its world. It does not keep the rank in the world.
#[derive(Debug)]
pub struct PeerMessages {
    shared: Arc<Shared>,
    wake: Arc<WakeFd>,
}

impl ControlConnection {
    /// The messages between this rank and others of its world. There is one reader.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn peer_messages(&self) -> Result<PeerMessages> {
        let wake = Arc::new(WakeFd::new()?);
        self.shared.state().peer_messages.set_wake(Some(Arc::clone(&wake)));
        Ok(PeerMessages { shared: Arc::clone(&self.shared), wake })
    }
}

impl PeerMessages {
    /// Sends messages to other ranks. Those from one rank to another arrive in their order. Does not block.
    /// If the other rank has left, or leaves later, an empty message from it arrives.
    ///
    /// # Errors
    /// `InvalidArgument` if one is longer than 4 KiB; `PeerLost` if the coordinator's process has left.
    pub fn send(&self, messages: &[(Rank, Vec<u8>)]) -> Result<()> {
        self.check()?;
        if let Some((to, message)) = messages.iter().find(|(_, message)| message.len() > PEER_MESSAGE_LIMIT) {
            return Err(Error::invalid_argument(format!(
                "cannot send rank {to} a message of {} bytes: at most {PEER_MESSAGE_LIMIT} are possible",
                message.len()
            )));
        }
        for messages in messages.chunks(MOST_PEER_MESSAGES) {
            self.shared.send(ToCoordinator::ToPeers(messages.to_vec()));
        }
        Ok(())
    }

    /// The oldest unread message, and the rank that sent it. Costs one load if there is none.
    #[must_use]
    pub fn receive(&self) -> Option<(Rank, Vec<u8>)> {
        if !self.shared.has_peer_messages.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.shared.state();
        self.wake.drain();
        let message = state.peer_messages.pop();
        // Written under the mutex, as by the thread that adds messages.
        self.shared.has_peer_messages.store(!state.peer_messages.is_empty(), Ordering::Release);
        message
    }

    /// Whether messages can still be sent and received.
    ///
    /// # Errors
    /// `PeerLost` if the coordinator's process has left.
    pub fn check(&self) -> Result<()> {
        if self.shared.state().ended {
            let message = "the process that runs the coordinator has left, so ranks cannot make further links: keep the \
                           communicator of rank 0 until the others need it no more";
            return Err(Error::peer_lost(message));
        }
        Ok(())
    }
}

impl Drop for PeerMessages {
    fn drop(&mut self) {
        self.shared.state().peer_messages.set_wake(None);
    }
}

impl AsFd for PeerMessages {
    /// Readable when a message may be unread.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
