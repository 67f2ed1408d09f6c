//! Ports for tests that start a server at a number which clients know before.
//!
//! Owns the range of this process: below the ephemeral ports, from which the kernel would give a port to
//! another socket.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Number of ports of one process. Tests run in a process each.
const PER_PROCESS: u16 = 100;
/// Number of processes that have ports at the same time.
const PROCESSES: u32 = 220;

/// The ports that a process has until it ends: a socket with the number of the range in its name.
struct PortRange {
    first: u16,
    _reserved: UnixListener,
}

impl PortRange {
    fn reserve() -> Self {
        let begin = std::process::id();
        let reserved = (0..PROCESSES).find_map(|offset| {
            let number = (begin + offset) % PROCESSES;
            let name = SocketAddr::from_abstract_name(format!("flexring test ports {number}")).ok()?;
            let first = 10_000 + number as u16 * PER_PROCESS;
            UnixListener::bind_addr(&name).ok().map(|_reserved| Self { first, _reserved })
        });
        reserved.expect("fewer processes than ranges of ports")
    }
}

/// A port on which nothing listens. No other test gets it at the same time.
pub fn free_port() -> u16 {
    static RANGE: OnceLock<PortRange> = OnceLock::new();
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = RANGE.get_or_init(PortRange::reserve).first;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % PER_PROCESS;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
