//! Wake-ups: the eventfd that wakes a sleeping thread, of this process or of another one on the same node.
//!
//! Owns creating, notifying and draining it. Must not know who sleeps on it, what for, or whether a
//! notification is needed: callers that save system calls keep a flag for that (`need_wakeup`).

use crate::descriptor;
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The longest time that a thread sleeps at once. A program may close all descriptors: nothing ends a sleep
/// then.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Pause of a thread whose descriptors were closed.
const CLOSED_PAUSE: Duration = Duration::from_millis(10);

/// An eventfd, close-on-exec and non-blocking. It is readable from [`notify`](Self::notify) to the next
/// [`drain`](Self::drain).
#[derive(Debug)]
pub struct WakeFd(OwnedFd);

impl WakeFd {
    /// A descriptor without a pending notification.
    ///
    /// # Errors
    /// `System` if the process or the system has no descriptor left.
    pub fn new() -> Result<Self> {
        descriptor::event().map(Self).map_err(|cause| Error::io("cannot create an event descriptor", cause))
    }

    /// A second descriptor of the same eventfd: a notification of one makes both readable.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn try_clone(&self) -> Result<Self> {
        self.0.try_clone().map(Self).map_err(|cause| Error::io("cannot duplicate an event descriptor", cause))
    }

    /// Makes the descriptor readable. Does not block and cannot fail: the one possible error is a full
    /// counter, and a full counter is readable.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next notification. Whether there had been any, or the
    /// program has closed the descriptor, so that there may have been.
    pub fn drain(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]) != Err(Errno::AGAIN)
    }
}

/// Sleeps until one of `fds`, among them a [`WakeFd`], is ready or `limit` has passed; but at most a second.
/// Whatever ended the sleep, the caller checks everything again.
///
/// # Errors
/// That of the system call: no descriptor is ready then.
pub fn sleep(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> rustix::io::Result<()> {
    let limit = Timespec::try_from(limit.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)).ok();
    poll(fds, limit.as_ref())?;
    if fds.iter().any(|fd| fd.revents().contains(PollFlags::NVAL)) {
        std::thread::sleep(CLOSED_PAUSE);
    }
    Ok(())
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Adopts an eventfd that another process created with [`WakeFd::new`] and passed over a socket.
impl From<OwnedFd> for WakeFd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

#[cfg(test)]
mod tests {
    use super::WakeFd;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(wake: &WakeFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(wake, PollFlags::IN)], Some(&now)).expect("can poll") == 1
    }

    #[test]
    fn readable_from_notify_to_drain() {
        let wake = WakeFd::new().expect("an event descriptor");
        assert!(!is_readable(&wake) && !wake.drain());
        wake.notify();
        wake.notify();
        assert!(is_readable(&wake));
        assert!(wake.drain(), "one drain takes all notifications");
        assert!(!is_readable(&wake) && !wake.drain());
    }

    #[test]
    fn a_clone_shares_notifications() {
        let wake = WakeFd::new().expect("an event descriptor");
        let clone = wake.try_clone().expect("an event descriptor");
        clone.notify();
        assert!(is_readable(&wake) && wake.drain());
        assert!(!is_readable(&clone));
    }
}
