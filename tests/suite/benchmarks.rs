//! Runs the checks of the benchmarks' scripts. Speed is not asserted.

use crate::programs::{root, succeed};
use crate::python::interpreter;
use std::process::Command;
use std::time::Duration;

/// Timeout on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// `make versus`, `make bench-training` and `make bench-prediction` kill what hangs, and an interrupted run
/// leaves no process and no namespace.
#[test]
fn comparisons_end_at_their_bounds_and_leave_nothing() {
    let Some(python) = interpreter("unittest") else { return };
    let mut checks = Command::new(python);
    checks.arg(root().join("bench/test_bounds.py")).arg("-v").env("PYTHONDONTWRITEBYTECODE", "1");
    let text = succeed(&mut checks, LIMIT);
    assert!(text.contains("\nOK"), "{text}");
    for line in text.lines().filter(|line| line.contains("... skipped ")) {
        eprintln!("skipped: {line}");
    }
}
