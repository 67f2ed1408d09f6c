//! The end of another process of this machine.
//!
//! Owns for how long this process waits for it. A process that fails takes a while to end: an interpreter
//! frees its modules. Ranks that fail with it and end sooner would look like the cause to a launcher.

use super::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The longest wait, for a process that has said that it ends. On a busy machine an interpreter with PyTorch
/// takes seconds.
pub(super) const EXIT_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait for one that has only left a world: it may end, or go on without it.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);
/// How long a launcher may take to see that a process has ended: torchrun looks every 100 ms.
const LAUNCHER_LAG: Duration = Duration::from_millis(150);

/// A wait for the end of a process.
#[derive(Debug)]
pub(super) struct ProcessExit {
    /// Readable when the process has ended. `None` if it has.
    running: Option<OwnedFd>,
    until: Instant,
}

impl ProcessExit {
    /// Waits for this process, which ends or has only left a world, from `now` on. `None` if it is this one,
    /// or in another PID namespace, where its number is that of an unrelated process or of none.
    pub(super) fn of(process: &Process, ends: bool, now: Instant) -> Option<Self> {
        let this = Process::current();
        if process.pid_namespace != this.pid_namespace || process.pid == this.pid {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(process.pid).ok()?)?;
        let running = pidfd_open(pid, PidfdFlags::empty()).ok();
        let limit = if ends { EXIT_LIMIT } else { LEAVE_LIMIT };
        let wait = if running.is_some() { limit } else { LAUNCHER_LAG };
        Some(Self { running, until: now + wait })
    }

    /// Whether the wait is over. Does not block.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        if let Some(running) = &self.running {
            let mut fds = [PollFd::new(running, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
                self.running = None;
                self.until = self.until.min(now + LAUNCHER_LAG);
            }
        }
        now >= self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn waits_for_the_end_of_a_process_of_this_pid_namespace_and_no_other() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("a process");
        let now = Instant::now();
        assert!(ProcessExit::of(&Process::current(), true, now).is_none());
        let child_process = Process { pid: child.id(), ..Process::current() };
        // As in containers, and on machines with one name.
        let elsewhere = Process { pid_namespace: "another".into(), ..child_process.clone() };
        assert!(ProcessExit::of(&elsewhere, true, now).is_none());

        let mut exit = ProcessExit::of(&child_process, true, now).expect("a wait");
        assert!(!exit.is_over(now + LAUNCHER_LAG));
        assert!(!exit.is_over(now + LEAVE_LIMIT));
        assert!(exit.is_over(now + EXIT_LIMIT), "it does not end in time");
        let mut exit = ProcessExit::of(&child_process, false, now).expect("a wait");
        assert!(!exit.is_over(now + LAUNCHER_LAG));
        assert!(exit.is_over(now + LEAVE_LIMIT), "it goes on");

        let mut exit = ProcessExit::of(&child_process, true, now).expect("a wait");
        drop(child.stdin.take());
        // A zombie has ended, too; `wait` sees it without removing it only afterwards.
        while !exit.is_over(now) && exit.running.is_some() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(!exit.is_over(now), "the launcher has not seen it yet");
        assert!(exit.is_over(now + LAUNCHER_LAG));
        child.wait().expect("its status");
        let mut exit = ProcessExit::of(&child_process, true, now).expect("a wait");
        assert!(exit.is_over(now + LAUNCHER_LAG), "there is no such process any more");
    }
}
