//! Shuts the connections of a process down that has stopped itself.
//!
//! Owns how another process's sockets are reached.

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};
use socket2::SockRef;
use std::fs;
use std::net::Shutdown;
use std::process::Child;

/// Shuts all TCP connections of `child` down at once and continues it, if it is stopped. Returns whether it
/// was.
pub fn once_stopped(child: &Child) -> bool {
    let folder = format!("/proc/{}", child.id());
    let threads = fs::read_dir(format!("{folder}/task")).into_iter().flatten().flatten();
    // The state follows the name, which is in parentheses.
    let is_stopped = |stat: String| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"));
    let mut states =
        threads.map(|thread| fs::read_to_string(thread.path().join("stat")).is_ok_and(is_stopped));
    if !states.all(|is_stopped| is_stopped) {
        return false;
    }
    let pid = Pid::from_child(child);
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("a child");
    for entry in fs::read_dir(format!("{folder}/fd")).expect("its descriptors").flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok()).expect("a number");
        let descriptor =
            pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).expect("a descriptor of a child");
        let socket = SockRef::from(&descriptor);
        if socket.peer_addr().is_ok_and(|address| address.as_socket().is_some()) {
            // The other end may have closed it.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
    kill_process(pid, Signal::CONT).expect("a child");
    true
}
