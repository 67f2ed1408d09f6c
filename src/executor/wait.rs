//! How a rank waits: it spins briefly, then sleeps until a bell rings, and never longer than its deadline.

use crate::error::Result;
use crate::fault::Fault;
use crate::transport::Transport;
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
    pub(super) fn pause(
        &mut self,
        fault: &Fault,
        transports: &mut [Box<dyn Transport>],
        busy: bool,
    ) -> Result<bool> {
        self.pause_for(fault, transports, if busy { NAP } else { LONGEST_SLEEP }, || false)
    }

    /// The same without devices, but does not sleep if `come` is true after peers were asked to ring.
    ///
    /// # Errors
    /// The fault, if it was raised.
    pub(super) fn pause_unless(
        &mut self,
        fault: &Fault,
        transports: &mut [Box<dyn Transport>],
        come: impl Fn() -> bool,
    ) -> Result<bool> {
        self.pause_for(fault, transports, LONGEST_SLEEP, come)
    }

    fn pause_for(
        &mut self,
        fault: &Fault,
        transports: &mut [Box<dyn Transport>],
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
        // All of them must know, even if one has news.
        let busy = transports
            .iter_mut()
            .filter_map(|transport| (!transport.set_need_wakeup()).then_some(()))
            .count();
        if busy == 0 && !come() {
            sleep(fault, transports, (self.timeout - waited).min(longest));
        }
        transports.iter_mut().for_each(|transport| transport.clear_need_wakeup());
        Ok(true)
    }
}

/// Sleeps until a bell rings, but no longer than `longest`.
fn sleep(fault: &Fault, transports: &[Box<dyn Transport>], longest: Duration) {
    let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
    let bell = fault.wake_fd();
    // A rank has one transport for its node and one for other nodes; an unused place listens to the fault twice.
    let mut descriptors: [_; 3] = std::array::from_fn(|index| {
        let bell = index
            .checked_sub(1)
            .and_then(|index| transports.get(index))
            .map_or(bell, |other| other.wake_fd());
        PollFd::from_borrowed_fd(bell, PollFlags::IN)
    });
    // Whatever ends the sleep, the caller looks at everything again.
    let _ = poll(&mut descriptors, Some(&longest));
}
