//! Descriptors of the library, which are never those of standard input, output and error.
//!
//! A program may run with these closed. The kernel then gives their numbers to the next descriptors, and what
//! the program prints would go to a peer. Owns all functions that make descriptors for longer than a read of
//! a file; `clippy.toml` refuses them elsewhere.
#![allow(clippy::disallowed_methods, reason = "this module makes all descriptors")]

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::path::Arg;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// The lowest number of a descriptor of the library.
const FIRST: RawFd = 3;

/// The descriptor itself, or another one in its place if its number is too low.
///
/// # Errors
/// That the process has no descriptor left.
pub fn above_standard<F: AsFd + From<OwnedFd>>(descriptor: F) -> rustix::io::Result<F> {
    if descriptor.as_fd().as_raw_fd() >= FIRST {
        return Ok(descriptor);
    }
    fcntl_dupfd_cloexec(&descriptor, FIRST).map(F::from)
}

/// Keeps the low numbers from other libraries, whose descriptors cannot be moved, until it is dropped.
#[derive(Debug)]
pub struct StandardHeld {
    _placeholders: Vec<OwnedFd>,
}

impl StandardHeld {
    /// Takes the numbers that are free, if there are descriptors left.
    pub fn hold() -> Self {
        let mut placeholders = Vec::new();
        // What the program reads and prints meanwhile finds an end and disappears.
        let open = || rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        while let Ok(placeholder) = open()
            && placeholder.as_raw_fd() < FIRST
        {
            placeholders.push(placeholder);
        }
        Self { _placeholders: placeholders }
    }
}

/// An eventfd that does not block.
pub fn event() -> rustix::io::Result<OwnedFd> {
    above_standard(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// An epoll instance.
pub fn poll_set() -> rustix::io::Result<OwnedFd> {
    above_standard(epoll::create(epoll::CreateFlags::CLOEXEC)?)
}

/// An empty file in memory.
pub fn memory(name: &str, flags: MemfdFlags) -> rustix::io::Result<OwnedFd> {
    above_standard(rustix::fs::memfd_create(name, flags | MemfdFlags::CLOEXEC)?)
}

/// An open file. `mode` is that of a new one.
pub fn file(path: impl Arg, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    above_standard(rustix::fs::open(path, flags | OFlags::CLOEXEC, mode)?)
}

const UNIX_FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A Unix socket that does not block: not even connecting, which waits if the queue of the other end is full.
pub fn unix_socket(kind: SocketType) -> rustix::io::Result<OwnedFd> {
    above_standard(rustix::net::socket_with(AddressFamily::UNIX, kind, UNIX_FLAGS, None)?)
}

/// Two Unix sockets that are connected and do not block.
pub fn unix_stream_pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, UNIX_FLAGS, None)?;
    Ok((above_standard(near)?, above_standard(far)?))
}

/// The next connection at a listening Unix socket. It does not block.
pub fn accept_unix(listener: impl AsFd) -> rustix::io::Result<OwnedFd> {
    above_standard(rustix::net::accept_with(listener, UNIX_FLAGS)?)
}

/// A TCP socket for this kind of address.
pub fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    Ok(above_standard(Socket::new(Domain::for_address(address), Type::STREAM, None)?)?)
}

/// The next connection at a listening TCP socket, and the address of its other end.
pub fn accept_tcp(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, address) = listener.accept()?;
    Ok((above_standard(stream)?, address))
}

/// A UDP socket at this address.
pub fn udp_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    Ok(above_standard(UdpSocket::bind(address)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn low_numbers_are_moved_and_others_stay() {
        let file = File::open("/dev/null").expect("it exists");
        let number = file.as_raw_fd();
        assert_eq!(above_standard(file).expect("a descriptor").as_raw_fd(), number);
    }
}
