//! Heartbeat supervision: how long a peer has been silent.
//!
//! Owns the count of silent time and the limit. Does no I/O and reads no clock: callers pass the elapsed
//! time.

use std::time::Duration;

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
        (self.silent >= MISSED_HEARTBEATS * self.interval).then_some(self.silent)
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
    fn formats_durations() {
        assert_eq!(seconds(Duration::from_secs(60)), "60 s");
        assert_eq!(seconds(Duration::from_millis(1503)), "1.5 s");
    }
}
