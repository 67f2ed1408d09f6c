//! Attempts at a rendezvous that failed for ranks of this process.
//!
//! Owns the process-wide list of their numbers. A rank that tries again at the same address may meet the
//! coordinator of the attempt that it has failed in, which still answers late ranks. By the number it
//! recognises that answer, and waits for the next attempt. Numbers are random: a restarted process could not
//! continue a count.

use crate::process::PerProcess;
use crate::rank::Rank;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How many failures are remembered. The ranks of a process are few, and a coordinator outlives its failure
/// briefly.
const REMEMBERED: usize = 1024;

/// An attempt that failed for a rank, and when.
struct Failure {
    rank: Rank,
    number: u64,
    at: Instant,
}

fn failures() -> MutexGuard<'static, VecDeque<Failure>> {
    static FAILURES: PerProcess<Mutex<VecDeque<Failure>>> = PerProcess::new();
    FAILURES.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that attempt `number` failed for `rank` of this process.
pub(super) fn record_failure(rank: Rank, number: u64) {
    let mut failures = failures();
    if failures.len() == REMEMBERED {
        failures.pop_front();
    }
    failures.push_back(Failure { rank, number, at: Instant::now() });
}

/// Whether attempt `number` has failed for `rank` of this process before `begun`, when the rank began to
/// join. Another thread may claim the same rank in the same attempt.
pub(super) fn has_failed_before(rank: Rank, number: u64, begun: Instant) -> bool {
    failures().iter().any(|failure| (failure.rank, failure.number) == (rank, number) && failure.at < begun)
}
