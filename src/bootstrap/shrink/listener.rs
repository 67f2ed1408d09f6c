//! The sockets at which a rank answers ranks that shrink.
//!
//! Owns binding them. Must not know who connects.

use crate::bootstrap::listen::listen_at;
use crate::error::{Error, Result};
use crate::process::ClosedInChild;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsFd;

/// The sockets at which a rank can be asked whether it is there. They exist before the ranks exchange addresses, and are
/// served once a `ShrinkService` takes them over.
#[derive(Debug)]
pub struct ShrinkListener {
    _closed_in_child: Vec<ClosedInChild>,
    pub(super) sockets: Vec<TcpListener>,
    endpoints: Vec<SocketAddr>,
}

impl ShrinkListener {
    /// Listens on each of `addresses`, on a port that the kernel chooses.
    ///
    /// # Errors
    /// `System`, naming the address, if one cannot be listened on.
    pub fn bind(addresses: &[IpAddr]) -> Result<Self> {
        let mut listener = Self { _closed_in_child: Vec::new(), sockets: Vec::new(), endpoints: Vec::new() };
        for address in addresses {
            let cannot = |cause| Error::io(format!("cannot listen on {address}"), cause);
            let socket = listen_at(SocketAddr::new(*address, 0)).map_err(cannot)?;
            socket.set_nonblocking(true).map_err(cannot)?;
            listener.endpoints.push(socket.local_addr().map_err(cannot)?);
            listener._closed_in_child.push(ClosedInChild::new(socket.as_fd()));
            listener.sockets.push(socket);
        }
        Ok(listener)
    }

    /// The addresses and ports, in the order of the addresses given.
    #[must_use]
    pub fn endpoints(&self) -> &[SocketAddr] {
        &self.endpoints
    }
}
