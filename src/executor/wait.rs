//! Waiting: a rank spins briefly, then sleeps until a wake-up, and never beyond its timeout.
//!
//! A spinning wait yields its core to ranks and programs that share it. A program that computes keeps the
//! core for a time slice of milliseconds, while a thread that sleeps gets the core soon after its wake-up. So
//! after a slow yield waits sleep at once for some time.
//!
//! Owns how long to spin and to sleep.

use super::links::Links;
use crate::error::Result;
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::interrupt::{InterruptTimer, longest_sleep};
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Polls without progress before the time counts for which a wait spins. Most waits are over by then.
const POLLS_BEFORE_SPIN: u32 = 64;

/// A yield that lasts longer, for each other rank on this core, gave the core to a program that computes: a
/// rank has work for one sub-chunk before it waits in turn, a few hundred microseconds, and time slices are 2
/// to 8 ms. With 100 us in its place calls of 4 to 64 ranks on 2 idle cores took 1.0 to 4.3 times as long,
/// because ranks that copy were taken for such programs.
const SLOW_YIELD: Duration = Duration::from_millis(1);

/// How long waits sleep without yielding after a slow yield. If the next yield is slow, too, twice as long,
/// otherwise half as long: one slow yield on an idle machine costs little, and on a busy one few yields are
/// slow.
const LEAST_BUSY_TIME: Duration = Duration::from_millis(2);

/// The longest time of waits that sleep without yielding.
const LONGEST_BUSY_TIME: Duration = Duration::from_millis(512);

/// How long waits spin on a busy core of their own. Ranks that make the same call at the same time rarely
/// wait longer.
const SPIN_ON_BUSY_CORE: Duration = Duration::from_micros(10);

/// The longest sleep, so that a missed wake-up delays a call but does not hang it.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// The longest sleep that the fault does not end.
const LONGEST_DEAF_SLEEP: Duration = Duration::from_millis(50);

/// The longest sleep that no neighbour ends, because more communicators of this process sleep than it has
/// descriptors for.
const LONGEST_UNWOKEN_SLEEP: Duration = Duration::from_millis(1);

/// Yields before a sleep that has a wake-up of its own. On 2 quiet cores (medians of 2 runs in us, 1, 2, 4, 8
/// and 32 yields) 8 ranks take 43, 39, 15, 15 and 13 for 4 KiB, 16 ranks 70, 48, 40, 43 and 43, and 16 ranks
/// 8 B 40, 28, 30, 26 and 26. Beside programs that compute on both cores, 8 ranks take 0.4 to 1.0 ms with 1
/// to 4 yields, and 0.6 to 1.8 with 8.
const YIELDS: u32 = 4;

/// The first sleep while a device is busy, which has no wake-up descriptor. Each further one is twice as
/// long.
const FIRST_NAP: Duration = Duration::from_micros(5);

/// The longest sleep while a device is busy: about the time in which a long sub-chunk crosses PCI Express.
const LONGEST_NAP: Duration = Duration::from_micros(50);

/// The state of one rank's waiting.
#[derive(Debug)]
pub(super) struct Wait {
    spin: Duration,
    timeout: Duration,
    /// Whether more ranks than cores share the node.
    crowded: bool,
    /// A yield that lasts longer gave the core to a program that computes.
    slow_yield: Duration,
    /// Until when the core counts as busy with such programs.
    busy_until: Option<Instant>,
    /// How long the core counts as busy after the next slow yield.
    busy_time: Duration,
    /// Polls since the last progress.
    polls: u32,
    /// When waiting began, if the clock was read since the last progress.
    since: Option<Instant>,
    /// The next sleep while a device is busy.
    nap: Duration,
    /// When this call asks next whether the program wants its thread back.
    interrupt: InterruptTimer,
    /// What the fault notifies, if no link lends an eventfd for it.
    eventfd: Option<Arc<WakeFd>>,
}

impl Wait {
    /// Waits like this; the fault notifies `eventfd`, if no link lends one for it. `ranks_per_core` is
    /// rounded up.
    pub(super) fn new(
        spin: Duration,
        timeout: Duration,
        ranks_per_core: usize,
        eventfd: Option<Arc<WakeFd>>,
    ) -> Self {
        let others = u32::try_from(ranks_per_core.saturating_sub(1)).unwrap_or(u32::MAX);
        Self {
            spin,
            timeout,
            crowded: ranks_per_core > 1,
            slow_yield: SLOW_YIELD.saturating_mul(others.max(1)),
            busy_until: None,
            busy_time: LEAST_BUSY_TIME,
            polls: 0,
            since: None,
            nap: FIRST_NAP,
            interrupt: InterruptTimer::default(),
            eventfd,
        }
    }

    /// How long a call may make no progress.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Resets the wait at the start of a call.
    pub(super) fn begin(&mut self) {
        self.interrupt = InterruptTimer::default();
        self.progressed();
    }

    /// Resets the wait after progress.
    pub(super) fn progressed(&mut self) {
        self.polls = 0;
        self.since = None;
        self.nap = FIRST_NAP;
    }

    /// Spins once, or sleeps until a link may have work. While devices are busy sleeps are short, as devices
    /// have no wake-up descriptor. `false` if there was no progress for the timeout.
    ///
    /// # Errors
    /// The fault, if it was raised; `Aborted` if the program wants its thread back.
    pub(super) fn pause(&mut self, fault: &Fault, links: &mut Links, devices_busy: bool) -> Result<bool> {
        let longest = if devices_busy { self.nap } else { LONGEST_SLEEP };
        self.pause_for(fault, links, longest, |is_idle| is_idle)
    }

    /// Spins once, or sleeps until a peer notifies this rank, in a call that uses neither links nor devices.
    /// What an earlier call left unread on a link does not keep it awake. Does not sleep if `is_ready`
    /// returns true after peers were asked to notify this rank. `false` if there was no progress for the
    /// timeout.
    ///
    /// # Errors
    /// As for [`pause`](Self::pause).
    pub(super) fn pause_unless(
        &mut self,
        fault: &Fault,
        links: &mut Links,
        is_ready: impl Fn() -> bool,
    ) -> Result<bool> {
        self.pause_for(fault, links, LONGEST_SLEEP, |_| !is_ready())
    }

    /// Yields, or sleeps by `sleep`, for no longer than the time that it is given. For waits that have a
    /// wake-up of their own, which neither links nor the fault notify. `false` if there was no progress for
    /// the timeout.
    ///
    /// # Errors
    /// As for [`pause`](Self::pause).
    pub(super) fn pause_by(&mut self, fault: &Fault, sleep: impl FnOnce(Duration)) -> Result<bool> {
        fault.check()?;
        self.polls = self.polls.saturating_add(1);
        let now = Instant::now();
        if self.polls <= YIELDS && self.yield_unless_busy(now) {
            return Ok(true);
        }
        let waited = now - *self.since.get_or_insert(now);
        if waited >= self.timeout {
            return Ok(false);
        }
        self.interrupt.check_at(now)?;
        sleep((self.timeout - waited).min(LONGEST_DEAF_SLEEP));
        Ok(true)
    }

    /// `may_sleep` is called after peers were asked to notify this rank, with whether the links are idle.
    fn pause_for(
        &mut self,
        fault: &Fault,
        links: &mut Links,
        longest: Duration,
        may_sleep: impl Fn(bool) -> bool,
    ) -> Result<bool> {
        fault.check()?;
        self.polls = self.polls.saturating_add(1);
        if self.polls < POLLS_BEFORE_SPIN {
            if !self.crowded {
                std::hint::spin_loop();
                return Ok(true);
            }
            // Another rank may need this core to do what this rank waits for.
            if self.yield_unless_busy(Instant::now()) {
                return Ok(true);
            }
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let waited = now - since;
        if waited >= self.timeout {
            return Ok(false);
        }
        if waited < self.spin && self.spin_once(now, waited) {
            return Ok(true);
        }
        self.interrupt.check_at(now)?;
        if may_sleep(links.set_need_wakeup()) {
            reach(FaultPoint::SleepBegins);
            sleep(
                fault,
                self.eventfd.as_ref(),
                links,
                (self.timeout - waited).min(longest).min(longest_sleep()),
            );
            self.nap = (2 * self.nap).min(LONGEST_NAP);
        }
        links.clear_need_wakeup();
        Ok(true)
    }

    /// Spins once, after it has `waited`; `false` if it is time to sleep, because the core is busy.
    fn spin_once(&mut self, now: Instant, waited: Duration) -> bool {
        // Other programs may need this core, even if every rank has its own.
        self.yield_unless_busy(now) || !self.crowded && waited < SPIN_ON_BUSY_CORE
    }

    /// Yields; `false` if it did not, because the core is busy with programs that compute.
    fn yield_unless_busy(&mut self, now: Instant) -> bool {
        if self.busy_until.is_some_and(|until| now < until) {
            return false;
        }
        std::thread::yield_now();
        let yielded = Instant::now();
        let was_busy = self.busy_until.take().is_some();
        if yielded - now > self.slow_yield {
            self.busy_until = Some(yielded + self.busy_time);
            self.busy_time = (2 * self.busy_time).min(LONGEST_BUSY_TIME);
        } else if was_busy {
            self.busy_time = (self.busy_time / 2).max(LEAST_BUSY_TIME);
        }
        // What was waited for may have come, so the caller polls before this wait sleeps.
        true
    }
}

/// Sleeps until the fault is raised or a link may have work, but no longer than `longest`.
fn sleep(fault: &Fault, own: Option<&Arc<WakeFd>>, links: &Links, longest: Duration) {
    let eventfd = links.eventfd().or(own);
    let is_woken = links.can_wake() && eventfd.is_some();
    let longest = if is_woken { longest } else { longest.min(LONGEST_UNWOKEN_SLEEP) };
    if let Some(eventfd) = eventfd {
        fault.notify(eventfd);
    }
    let mut wake_fds = [None; 1 + Links::TRANSPORTS];
    wake_fds[0] = eventfd.map(|eventfd| eventfd.as_fd());
    (1..).zip(0..Links::TRANSPORTS).for_each(|(at, index)| wake_fds[at] = links.wake_fd(index));
    let Some(any) = wake_fds.into_iter().flatten().next() else {
        std::thread::sleep(longest);
        return;
    };
    let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
    // One descriptor also stands in for those that do not exist.
    let mut descriptors =
        wake_fds.map(|wake_fd| PollFd::from_borrowed_fd(wake_fd.unwrap_or(any), PollFlags::IN));
    // The result does not matter: the caller polls everything again.
    let _ = poll(&mut descriptors, Some(&longest));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a wait of a rank spins on after it has `waited`, on a core that counts as busy for this time.
    fn spins(ranks_per_core: usize, waited: Duration, busy_for: Option<Duration>) -> bool {
        let second = Duration::from_secs(1);
        let mut wait = Wait::new(second, second, ranks_per_core, None);
        let now = Instant::now();
        wait.busy_until = busy_for.map(|time| now + time);
        wait.spin_once(now, waited)
    }

    #[test]
    fn waits_on_an_idle_core_spin() {
        for waited in [Duration::ZERO, SPIN_ON_BUSY_CORE, Duration::from_millis(900)] {
            assert!(spins(1, waited, None) && spins(2, waited, None));
            assert!(spins(2, waited, Some(Duration::ZERO)), "the core is no longer busy");
        }
    }

    #[test]
    fn waits_on_a_busy_core_sleep_soon_and_crowded_ones_at_once() {
        let hour = Some(Duration::from_secs(3600));
        assert!(spins(1, Duration::ZERO, hour));
        assert!(!spins(1, SPIN_ON_BUSY_CORE, hour));
        assert!(!spins(2, Duration::ZERO, hour));
    }
}
