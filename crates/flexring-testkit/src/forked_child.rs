//! Forked children of a test.
//!
//! Owns forking and the exit status.

/// Runs `body` in a forked child, and returns its exit status, or -1 if a signal has ended it. The child ends
/// without running exit handlers.
pub fn in_forked_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `body` and ends; `body` takes no lock that another thread may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status = body();
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(status) };
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: `status` may be written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 }
}
