//! The listening sockets of a rank.
//!
//! Owns binding them.

use crate::config::ListeningPorts;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::transport::free_port::listen_at_free_port;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

/// The listening sockets of a rank.
#[derive(Debug)]
pub struct Listener {
    pub(super) sockets: Vec<TcpListener>,
    pub(super) endpoints: Vec<SocketAddr>,
}

impl Listener {
    /// Listens on each of `addresses`, on a port of `range`, or on one that the kernel chooses.
    ///
    /// # Errors
    /// `System`, naming the address, if one cannot be listened on; `InvalidArgument` if there is none.
    pub fn bind(addresses: &[IpAddr], range: Option<ListeningPorts>) -> Result<Self> {
        if addresses.is_empty() {
            return Err(Error::invalid_argument("there is no address to listen on"));
        }
        let mut listener = Self { sockets: Vec::new(), endpoints: Vec::new() };
        for &address in addresses {
            let (socket, endpoint) = listen_at_free_port(address, range, Self::listen)
                .map_err(|cause| Error::io(format!("cannot listen on {address}"), cause))?;
            listener.sockets.push(socket);
            listener.endpoints.push(endpoint);
        }
        Ok(listener)
    }

    pub(super) fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
        let socket = descriptor::tcp_socket(address)?;
        if address.is_ipv6() {
            // A dual-stack socket would accept IPv4 peers under mapped addresses, which no rank announces.
            socket.set_only_v6(true)?;
        }
        socket.set_nonblocking(true)?;
        if address.port() != 0 {
            // Links that a listener accepted before, and closed ones for a minute, have its port.
            socket.set_reuse_address(true)?;
        }
        socket.bind(&address.into())?;
        // All higher ranks connect at once. The kernel lowers the backlog to its limit.
        socket.listen(4096)?;
        let socket = TcpListener::from(socket);
        let endpoint = socket.local_addr()?;
        Ok((socket, endpoint))
    }

    /// The addresses and ports that this listens on, in the order of the addresses given.
    #[must_use]
    pub fn endpoints(&self) -> Vec<SocketAddr> {
        self.endpoints.clone()
    }
}
