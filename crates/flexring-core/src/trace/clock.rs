//! The clock of a timeline, and its offset from the clock of rank 0.
//!
//! Owns the choice of the clock, how two processes find out whether they have the same one, and the estimate
//! of an offset.

use rustix::time::{ClockId, clock_gettime};
use std::path::Path;

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
#[must_use]
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A name that processes with the same clock have in common, and others do not: the machine's boot and the
/// time namespace. Empty if the system gives none.
#[must_use]
pub fn clock_name() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // A kernel without time namespaces has one clock.
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    named(boot.trim(), &namespace)
}

fn named(boot: &str, namespace: &Path) -> String {
    if boot.is_empty() { String::new() } else { format!("{boot} {}", namespace.display()) }
}

/// How a rank's clock relates to that of rank 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ClockAlignment {
    /// Nanoseconds that are added to this rank's clock to get that of rank 0.
    pub offset_ns: i64,
    /// The offset may be wrong by up to this many nanoseconds. 0 if the two are one clock.
    pub error_ns: u64,
}

/// One exchange of messages between rank 0 and another rank, in nanoseconds of their own clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSample {
    /// When rank 0 sent its message.
    pub sent: u64,
    /// When the other rank had it, and sent its own.
    pub remote: u64,
    /// When rank 0 had that.
    pub received: u64,
}

impl ClockAlignment {
    /// The alignment by the sample with the shortest round trip. The other rank read its clock some time
    /// within the round trip: the estimate takes its middle, and half of it is the error.
    #[must_use]
    pub fn of_samples(samples: &[ClockSample]) -> Self {
        let round_trip = |sample: &&ClockSample| sample.received.saturating_sub(sample.sent);
        let Some(best) = samples.iter().min_by_key(round_trip) else { return Self::default() };
        let half = round_trip(&best) / 2;
        Self { offset_ns: (best.sent + half) as i64 - best.remote as i64, error_ns: half.max(1) }
    }

    /// A time of this rank's clock by that of rank 0.
    #[must_use]
    pub fn apply(&self, time: u64) -> u64 {
        time.saturating_add_signed(self.offset_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_round_trip_gives_offset_and_error() {
        let sample = |sent, remote, received| ClockSample { sent, remote, received };
        // The other clock is 5000 ahead.
        let samples = [sample(1000, 6900, 2000), sample(3000, 8040, 3100), sample(4000, 9010, 9000)];
        let alignment = ClockAlignment::of_samples(&samples);
        assert_eq!(alignment, ClockAlignment { offset_ns: 3050 - 8040, error_ns: 50 });
        let by_rank_0 = alignment.apply(8040);
        assert!((3000..=3100).contains(&by_rank_0), "{by_rank_0}");
        assert_eq!(ClockAlignment::of_samples(&[]), ClockAlignment::default());
    }

    #[test]
    fn processes_of_one_machine_and_time_namespace_have_one_clock() {
        assert_eq!(clock_name(), clock_name());
        let name = named("boot", Path::new("time:[4026531834]"));
        assert_ne!(name, named("boot", Path::new("time:[4026532000]")));
        assert_ne!(name, named("other boot", Path::new("time:[4026531834]")));
        assert_eq!(named("", Path::new("time:[4026531834]")), "");
    }

    #[test]
    fn time_passes() {
        let before = now();
        assert!(before > 0 && now() >= before);
    }
}
