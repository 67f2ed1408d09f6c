//! Which process is at the other end of a Unix socket, as the kernel says.
//!
//! Owns the calls that ask the kernel, and the comparison with this process. A number counts only where it is
//! unique: a user if it is not the overflow uid, which stands for every user that this user namespace does
//! not map; a process if it is in the PID namespace of this one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Returns a descriptor of the peer's process. Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// Reads an option of a socket.
///
/// # Safety
/// `T` is a plain structure that every content is valid for.
unsafe fn socket_option<T>(socket: impl AsFd, option: libc::c_int, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, for which the caller says every content is
    // valid, and the number of bytes to `len`; both live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    match result {
        0 if len as usize == size_of::<T>() => Ok(value),
        0 => Err(io::Error::other("the kernel returned an option of another size")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The effective user and the process id of the process that connected this socket, or that listens on the
/// one it is connected to. The id is 0 if this process's PID namespace does not contain that process.
///
/// # Errors
/// That of the system call, for example if this is not a connected Unix socket.
fn peer_credentials(socket: impl AsFd) -> io::Result<libc::ucred> {
    // rustix's `UCred` cannot be used: its type of a process id has no 0.
    let unknown = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    // SAFETY: `ucred` has three integers.
    unsafe { socket_option(socket, libc::SO_PEERCRED, unknown) }
}

/// The user at the other end of a Unix socket, as a phrase that follows "of", if its number is another one
/// than that of this process's user or is not known. For peers that must also prove that they have a secret.
pub(crate) fn foreign_user(socket: impl AsFd) -> Option<String> {
    match peer_credentials(socket) {
        Ok(peer) if peer.uid == rustix::process::geteuid().as_raw() => None,
        Ok(peer) => Some(format!("user {}", peer.uid)),
        Err(cause) => Some(format!("an unknown user ({cause})")),
    }
}

/// This process's user, as a phrase, if its number may stand for several users, so that no process can be
/// recognized as one of it.
pub(crate) fn ambiguous_user() -> Option<String> {
    let user = rustix::process::geteuid().as_raw();
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    let overflow = overflow.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65_534);
    // The first user namespace maps all users, each to its own number.
    let maps_all = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    let is_ambiguous = user == overflow && !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(maps_all);
    is_ambiguous
        .then(|| format!("user {user}, which stands for every user that its user namespace does not map"))
}

/// The process at the other end of a Unix socket, as a phrase that follows "a process of", if it is one of
/// another user or of another PID namespace, or is not known. Processes of one user in one PID namespace can
/// read each other's memory anyway.
pub(crate) fn foreign_process(socket: impl AsFd) -> Option<String> {
    foreign_user(&socket).or_else(ambiguous_user).or_else(|| {
        let pid = peer_credentials(&socket).map_or(0, |peer| peer.pid);
        let is_own_namespace = pid != 0 && namespaces_below(&socket, pid).is_none_or(|below| below == 0);
        (!is_own_namespace).then(|| "another PID namespace, as of another container".to_owned())
    })
}

/// How many PID namespaces the peer of `socket`, which this namespace sees as process `pid`, is below this
/// process. `None` if the kernel does not say: it is older than Linux 5.5, or /proc is not mounted.
fn namespaces_below(socket: impl AsFd, pid: i32) -> Option<usize> {
    // SAFETY: every content is valid for an integer.
    let process = match unsafe { socket_option(socket, SO_PEERPIDFD, -1) } {
        // SAFETY: the kernel has opened this descriptor for the caller.
        Ok(descriptor) => unsafe { OwnedFd::from_raw_fd(descriptor) },
        // Before Linux 6.5: the number may belong to another process by now, if that one has ended.
        Err(_) => {
            let pid = rustix::process::Pid::from_raw(pid)?;
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?
        }
    };
    let depth = |path: &str| {
        let text = std::fs::read_to_string(path).ok()?;
        // One number for each namespace, from that of /proc downwards.
        let numbers = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some(numbers.split_whitespace().count())
    };
    let peer = depth(&format!("/proc/self/fdinfo/{}", process.as_raw_fd()))?;
    Some(peer.abs_diff(depth("/proc/self/status")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        let peer = peer_credentials(&one).expect("credentials");
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert_eq!(peer.pid as u32, std::process::id());
        assert_eq!(namespaces_below(&one, peer.pid), Some(0));
        assert_eq!(foreign_user(&one), None);
        assert_eq!(foreign_process(&one), None);
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        assert!(foreign_user(&tcp).is_some() && foreign_process(&tcp).is_some());
    }
}
