//! Heartbeat supervision: how long a peer has been silent, and how long this process was paused.
//!
//! Owns the count of silent time, its limit, and the clock of the coordinator, which leaves out pauses. Does
//! no I/O and reads no clock: callers pass the time.

use std::time::{Duration, Instant};

/// A peer is considered dead after this many heartbeat intervals of silence.
const MISSED_HEARTBEATS: u32 = 20;

/// Counts how long one peer has been silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeartbeatMonitor {
    interval: Duration,
    silent: Duration,
}

impl HeartbeatMonitor {
    /// Starts the count. The peer has promised a message every `interval`.
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, silent: Duration::ZERO }
    }

    /// Restarts the count: the peer sent something.
    pub(super) fn reset(&mut self) {
        self.silent = Duration::ZERO;
    }

    /// Adds the time since the last call. More than two intervals at once mean that this process was stopped
    /// or starved and could not receive, so the excess does not count as silence of the peer.
    pub(super) fn advance(&mut self, elapsed: Duration) {
        self.silent += elapsed.min(2 * self.interval);
    }

    /// How long the peer has been silent, if that is too long.
    pub(super) fn expired(&self) -> Option<Duration> {
        self.silent_for(MISSED_HEARTBEATS)
    }

    /// How long the peer has been silent, if that is too long for a peer that went silent when another one
    /// did which is [`expired`](Self::expired): two peers that stop at once have sent their last heartbeats
    /// up to an interval apart, and this count advances in steps of up to one.
    pub(super) fn expires_with_another(&self) -> Option<Duration> {
        self.silent_for(MISSED_HEARTBEATS - 2)
    }

    fn silent_for(&self, intervals: u32) -> Option<Duration> {
        (self.silent >= intervals * self.interval).then_some(self.silent)
    }
}

/// How much later than expected a thread may wake up before the delay counts as a pause of its process.
const LATE_WAKE_UP: Duration = Duration::from_secs(1);

/// A clock that stands still while this process is stopped (by a signal, a debugger or a frozen virtual
/// machine). Deadlines on this clock leave peers the time to be heard that they had before the pause.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActiveClock {
    last: Instant,
    paused: Duration,
}

impl ActiveClock {
    /// Starts the clock at `now`, in real time.
    pub(super) fn new(now: Instant) -> Self {
        Self { last: now, paused: Duration::ZERO }
    }

    /// Sets the clock to `now`, in real time, after a sleep of at most `asleep` (`None`: unlimited). Returns
    /// how long this process was paused since the last call.
    pub(super) fn advance(&mut self, now: Instant, asleep: Option<Duration>) -> Duration {
        let elapsed = now.saturating_duration_since(self.last);
        self.last = now;
        let late = asleep.map_or(Duration::ZERO, |asleep| elapsed.saturating_sub(asleep));
        let pause = if late > LATE_WAKE_UP { late } else { Duration::ZERO };
        self.paused += pause;
        pause
    }

    /// The time on this clock.
    pub(super) fn now(&self) -> Instant {
        // The pauses lie between the start and the last call, so this cannot underflow.
        self.last - self.paused
    }
}

/// A duration for messages: `60 s`, `1.5 s`.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{} s", (duration.as_secs_f64() * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expires_after_twenty_intervals_unless_reset() {
        let interval = Duration::from_millis(500);
        let mut monitor = HeartbeatMonitor::new(interval);
        for _ in 0..19 {
            monitor.advance(interval);
        }
        assert_eq!(monitor.expired(), None);
        monitor.reset();
        monitor.advance(interval);
        assert_eq!(monitor.expired(), None);
        for _ in 0..19 {
            monitor.advance(interval);
        }
        assert_eq!(monitor.expired(), Some(Duration::from_secs(10)));
    }

    #[test]
    fn pauses_of_this_process_do_not_count() {
        let mut monitor = HeartbeatMonitor::new(Duration::from_millis(500));
        monitor.advance(Duration::from_secs(3600));
        assert_eq!(monitor.expired(), None);
    }

    #[test]
    fn the_coordinators_clock_leaves_out_pauses() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut clock = ActiveClock::new(start);
        assert_eq!(clock.advance(start + second / 2, Some(second / 2)), Duration::ZERO);
        assert_eq!(clock.now(), start + second / 2, "a sleep that ends on time counts");
        assert_eq!(clock.advance(start + 3600 * second, None), Duration::ZERO);
        assert_eq!(clock.now(), start + 3600 * second, "so does one without an end");
        assert_eq!(clock.advance(start + 3661 * second, Some(second)), 60 * second);
        assert_eq!(clock.now(), start + 3601 * second);
    }

    #[test]
    fn formats_durations() {
        assert_eq!(seconds(Duration::from_secs(60)), "60 s");
        assert_eq!(seconds(Duration::from_millis(1503)), "1.5 s");
    }
}
