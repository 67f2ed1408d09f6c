//! HeartbeatMonitor: how long a peer has said nothing, counted so that the listener's own pauses are not held against it.

use std::time::Duration;

/// A peer that is silent for this many of its heartbeats counts as dead.
const MISSED_HEARTBEATS: u32 = 20;

/// How long one peer has been silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeartbeatMonitor {
    interval: Duration,
    silent: Duration,
}

impl HeartbeatMonitor {
    /// A peer that is heard now and promises a word every `beat`.
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, silent: Duration::ZERO }
    }

    /// It said something.
    pub(super) fn reset(&mut self) {
        self.silent = Duration::ZERO;
    }

    /// `elapsed` has passed since the listener last looked. More than two heartbeats at once means that the
    /// listener itself was stopped or starved and could not hear, so the rest of it counts for nothing.
    pub(super) fn advance(&mut self, elapsed: Duration) {
        self.silent += elapsed.min(2 * self.interval);
    }

    /// How long the peer has been silent, if that is too long.
    pub(super) fn expired(&self) -> Option<Duration> {
        (self.silent >= MISSED_HEARTBEATS * self.interval).then_some(self.silent)
    }
}

/// A duration as sentences have it: `60 s`, `1.5 s`.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{} s", (duration.as_secs_f64() * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_heartbeats_are_too_long_and_a_word_starts_afresh() {
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
    fn a_listener_that_was_stopped_blames_nobody() {
        let mut monitor = HeartbeatMonitor::new(Duration::from_millis(500));
        monitor.advance(Duration::from_secs(3600));
        assert_eq!(monitor.expired(), None);
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_secs(60)), "60 s");
        assert_eq!(seconds(Duration::from_millis(1503)), "1.5 s");
    }
}
