//! HeartbeatMonitor: how long a peer has said nothing, counted so that the listener's own pauses are not held against it.

use std::time::Duration;

/// A peer that is silent for this many of its heartbeats counts as dead.
const BEATS: u32 = 20;

/// How long one peer has been silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeartbeatMonitor {
    beat: Duration,
    total: Duration,
}

impl HeartbeatMonitor {
    /// A peer that is heard now and promises a word every `beat`.
    pub(super) fn new(beat: Duration) -> Self {
        Self { beat, total: Duration::ZERO }
    }

    /// It said something.
    pub(super) fn broken(&mut self) {
        self.total = Duration::ZERO;
    }

    /// `lapse` has passed since the listener last looked. More than two heartbeats at once means that the
    /// listener itself was stopped or starved and could not hear, so the rest of it counts for nothing.
    pub(super) fn lasts(&mut self, lapse: Duration) {
        self.total += lapse.min(2 * self.beat);
    }

    /// How long the peer has been silent, if that is too long.
    pub(super) fn fatal(&self) -> Option<Duration> {
        (self.total >= BEATS * self.beat).then_some(self.total)
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
        let beat = Duration::from_millis(500);
        let mut silence = HeartbeatMonitor::new(beat);
        for _ in 0..19 {
            silence.lasts(beat);
        }
        assert_eq!(silence.fatal(), None);
        silence.broken();
        silence.lasts(beat);
        assert_eq!(silence.fatal(), None);
        for _ in 0..19 {
            silence.lasts(beat);
        }
        assert_eq!(silence.fatal(), Some(Duration::from_secs(10)));
    }

    #[test]
    fn a_listener_that_was_stopped_blames_nobody() {
        let mut silence = HeartbeatMonitor::new(Duration::from_millis(500));
        silence.lasts(Duration::from_secs(3600));
        assert_eq!(silence.fatal(), None);
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_secs(60)), "60 s");
        assert_eq!(seconds(Duration::from_millis(1503)), "1.5 s");
    }
}
