//! How threads wait for kernels that end soon.
//!
//! Owns how long they sleep between two looks. Must not know what they look at.

use std::time::{Duration, Instant};

/// How long a thread looks without a sleep: kernels end within microseconds of their calls.
const SPIN: Duration = Duration::from_micros(50);
/// The shortest and the longest sleep.
const NAPS: [Duration; 2] = [Duration::from_micros(5), Duration::from_micros(20)];

/// Waits until `is_over`.
pub(crate) fn nap_until(mut is_over: impl FnMut() -> bool) {
    let begun = Instant::now();
    let mut nap = NAPS[0];
    while !is_over() {
        if begun.elapsed() < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(nap);
            nap = (2 * nap).min(NAPS[1]);
        }
    }
}
