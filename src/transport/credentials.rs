//! Which user is at the other end of a Unix socket, as the kernel says.
//!
//! Owns the call that asks the kernel, and the comparison with this process's user. Must not know what the socket is for.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The effective user of the process that connected this socket, or that listens on the one it is connected to.
///
/// # Errors
/// That of the system call, for example if this is not a connected Unix socket.
fn peer_user(socket: impl AsFd) -> io::Result<u32> {
    // rustix's `UCred` cannot be used: the process id is 0 if the peer is in a PID namespace that this process cannot see,
    // and its type has no 0.
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `credentials`, a plain structure that every content is valid for, and
    // the number of bytes to `len`; both live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    match result {
        0 if len as usize == size_of::<libc::ucred>() => Ok(credentials.uid),
        0 => Err(io::Error::other("the kernel returned credentials of another size")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The user at the other end of a Unix socket, as a phrase, if it is another one than this process's or is not known.
pub(crate) fn foreign_user(socket: impl AsFd) -> Option<String> {
    match peer_user(socket) {
        Ok(user) if user == rustix::process::geteuid().as_raw() => None,
        Ok(user) => Some(format!("user {user}")),
        Err(cause) => Some(format!("an unknown user ({cause})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_other_end_of_a_pair_is_this_user() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(peer_user(&one).expect("credentials"), rustix::process::geteuid().as_raw());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        assert_eq!(foreign_user(&one), None);
        assert!(foreign_user(&tcp).is_some());
        assert!(peer_user(&tcp).map_or(true, |user| user != rustix::process::geteuid().as_raw()));
    }
}
