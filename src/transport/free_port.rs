//! The ports of listening sockets whose peers learn the port from this process.
//!
//! Owns the choice of a port: the kernel's, or a free one of `FLEXRING_PORT_RANGE`.

use crate::config::ListeningPorts;
use crate::secret::random_bytes;
use std::io;
use std::net::{IpAddr, SocketAddr};

/// Listens at `address` by `listen`, on a port of `range`, or on one that the kernel chooses if there is no
/// range.
///
/// # Errors
/// That of `listen`; if all ports of the range are in use, an error that names the range.
pub(crate) fn listen_at_free_port<T>(
    address: IpAddr,
    range: Option<ListeningPorts>,
    listen: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let Some(range) = range else {
        return listen(SocketAddr::new(address, 0));
    };
    // Processes that start together try different ports first.
    let first = random_bytes().map_or(0, u16::from_ne_bytes);
    for port in range.starting_at(first) {
        match listen(SocketAddr::new(address, port)) {
            Err(cause) if cause.kind() == io::ErrorKind::AddrInUse => {}
            outcome => return outcome,
        }
    }
    let message = format!("all ports of FLEXRING_PORT_RANGE={range} are in use: allow more ports");
    Err(io::Error::new(io::ErrorKind::AddrInUse, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_testkit::port::free_port;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn a_port_of_the_range_is_used_until_none_is_left() {
        let (address, port) = (Ipv4Addr::LOCALHOST.into(), free_port());
        let range = Some(ListeningPorts { first: port, last: port });
        let listen = || listen_at_free_port(address, range, TcpListener::bind);
        let listener = listen().expect("the port is free");
        assert_eq!(listener.local_addr().expect("bound").port(), port);
        let error = listen().expect_err("no port is left");
        assert!(
            error.to_string().contains(&format!("FLEXRING_PORT_RANGE={port}-{port} are in use")),
            "{error}"
        );
        drop(listener);
        listen().expect("the port is free again");
        let other = listen_at_free_port(address, None, TcpListener::bind).expect("a port of the kernel's");
        assert_ne!(other.local_addr().expect("bound").port(), 0);
    }
}
