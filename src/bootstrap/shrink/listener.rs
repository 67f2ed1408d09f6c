//! The handle by which a rank that joins a communicator can be found.
//!
//! Owns the time between the announcement of the addresses and the start of the service.

use super::ports::ShrinkPorts;
use super::served_rank::ServedRank;
use crate::config::ListeningPorts;
use crate::error::Result;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The addresses at which a rank can be asked whether it is there. They exist before the ranks exchange
/// addresses. The ranks of one process share the sockets; a rank that others ask for before its
/// `ShrinkService` takes the handle over answers late.
#[derive(Debug)]
pub struct ShrinkListener {
    ports: Arc<ShrinkPorts>,
}

impl ShrinkListener {
    /// Listens on each of `addresses`, on a port of `range` or one that the kernel chooses, or shares the
    /// ports of this process there.
    ///
    /// # Errors
    /// `System`, naming the address, if one cannot be listened on; also if no descriptor or thread is
    /// available.
    pub fn bind(addresses: &[IpAddr], range: Option<ListeningPorts>) -> Result<Self> {
        let ports = ShrinkPorts::at(addresses, range)?;
        ports.begin_join();
        Ok(Self { ports })
    }

    /// The addresses and ports, in the order of the addresses given.
    #[must_use]
    pub fn endpoints(&self) -> &[SocketAddr] {
        self.ports.endpoints()
    }

    /// Has the thread serve a rank.
    ///
    /// # Errors
    /// `Internal` if the thread has ended.
    pub(super) fn serve(self, rank: ServedRank) -> Result<Arc<ShrinkPorts>> {
        let ports = Arc::clone(&self.ports);
        // Before the handle is dropped: without either, other ranks would take this one for gone.
        ports.serve(rank)?;
        Ok(ports)
    }
}

impl Drop for ShrinkListener {
    fn drop(&mut self) {
        if self.ports.are_of_this_process() {
            self.ports.end_join();
        }
    }
}
