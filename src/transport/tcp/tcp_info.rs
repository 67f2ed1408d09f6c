//! What the kernel knows of a TCP connection.
//!
//! Owns the system call, and the sign by which a connection that carries nothing is recognised.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// The kernel's record of a connection; `None` if it gives none.
pub(super) fn tcp_info(socket: impl AsFd) -> Option<libc::tcp_info> {
    // SAFETY: the structure consists of integers, for which zeros are a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes of the structure, which
    // outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &mut len,
        )
    };
    (result == 0).then_some(info)
}

/// Describes a connection to `peer` whose packets or their acknowledgements do not arrive: the kernel repeats
/// a packet again and again. A peer that reads nothing acknowledges what it receives, so its connection is no
/// such one.
pub(super) fn stalled(socket: impl AsFd, peer: SocketAddr) -> Option<String> {
    let info = tcp_info(&socket).filter(|info| info.tcpi_unacked > 0 && info.tcpi_retransmits > 1)?;
    let own = SocketAddr::try_from(rustix::net::getsockname(&socket).ok()?).ok()?;
    let silent = Duration::from_millis(info.tcpi_last_ack_recv.into());
    Some(format!(
        "the TCP connection from {own} to {peer} has carried nothing for {:.1} s ({} retransmissions in a row)",
        silent.as_secs_f64(),
        info.tcpi_retransmits
    ))
}
