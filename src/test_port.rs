//! Ports for tests that start a server at a number which clients know before.
//!
//! Owns the range: below the ephemeral ports, from which the kernel would give a port to another socket. The integration tests
//! include this file as well.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Number of ports of one process. Tests run in a process each, with process ids close to each other.
const PER_PROCESS: u16 = 100;

/// A port on which nothing listens. No other test gets it at the same time.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 220) as u16 * PER_PROCESS;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % PER_PROCESS;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
