//! How a rank waits: it spins briefly, then sleeps until a bell rings, and never longer than its deadline.

use super::links::Links;
use crate::error::Result;
use crate::fault::Fault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

/// Turns without progress before the clock is read for the first time: most waits are over by then.
const TURNS_BEFORE_CLOCK: u32 = 64;

/// A sleep is never longer than this, so that a bell that is never rung costs time and not for ever.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// How long a rank sleeps that waits for something that rings no bell too: about a sub-chunk's way over PCI Express.
const NAP: Duration = Duration::from_micros(20);

/// One rank's patience.
#[derive(Debug)]
pub(super) struct Wait {
    spin: Duration,
    timeout: Duration,
    crowded: bool,
    turns: u32,
    since: Option<Instant>,
}

impl Wait {
    pub(super) fn new(spin: Duration, timeout: Duration, crowded: bool) -> Self {
        Self { spin, timeout, crowded, turns: 0, since: None }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A call begins.
    pub(super) fn begin(&mut self) {
        self.progressed();
    }

    /// Something moved: patience is as long as ever.
    pub(super) fn progressed(&mut self) {
        self.turns = 0;
        self.since = None;
    }

    /// Waits a little for something to happen at the transports, or at devices that are `busy` and ring no bell.
    /// `false` if nothing did for too long.
    ///
    /// # Errors
    /// The fault, if it was raised.
    pub(super) fn pause(&mut self, fault: &Fault, links: &mut Links, busy: bool) -> Result<bool> {
        self.pause_for(fault, links, if busy { NAP } else { LONGEST_SLEEP }, || false)
    }

    /// The same without devices, but does not sleep if `come` is true after peers were asked to ring.
    ///
    /// # Errors
    /// The fault, if it was raised.
    pub(super) fn pause_unless(
        &mut self,
        fault: &Fault,
        links: &mut Links,
        come: impl Fn() -> bool,
    ) -> Result<bool> {
        self.pause_for(fault, links, LONGEST_SLEEP, come)
    }

    fn pause_for(
        &mut self,
        fault: &Fault,
        links: &mut Links,
        longest: Duration,
        come: impl Fn() -> bool,
    ) -> Result<bool> {
        fault.check()?;
        self.turns = self.turns.saturating_add(1);
        if self.crowded {
            // Somebody else needs this core to make what is waited for.
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        if self.turns < TURNS_BEFORE_CLOCK {
            return Ok(true);
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let waited = now - since;
        if waited >= self.timeout {
            return Ok(false);
        }
        if waited < self.spin {
            if !self.crowded {
                // Even with a core for every rank there may be other programs.
                std::thread::yield_now();
            }
            return Ok(true);
        }
        if links.set_need_wakeup() && !come() {
            sleep(fault, links, (self.timeout - waited).min(longest));
        }
        links.clear_need_wakeup();
        Ok(true)
    }
}

/// Sleeps until a bell rings, but no longer than `longest`.
fn sleep(fault: &Fault, links: &Links, longest: Duration) {
    let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
    let fault = fault.wake_fd();
    // The first is the fault's, and so are those of transports that there are not.
    let mut descriptors: [_; 1 + Links::TRANSPORTS] = std::array::from_fn(|index| {
        let wake_fd = index.checked_sub(1).and_then(|index| links.wake_fd(index)).unwrap_or(fault);
        PollFd::from_borrowed_fd(wake_fd, PollFlags::IN)
    });
    // Whatever ends the sleep, the caller looks at everything again.
    let _ = poll(&mut descriptors, Some(&longest));
}
