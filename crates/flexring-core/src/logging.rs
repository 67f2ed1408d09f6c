//! Log output.
//!
//! The library logs through the `log` crate, so the records go to the program's own logger if it has one. For
//! programs without a logger, which includes all C and Python programs, this module installs one that writes
//! to standard error. Warnings that other processes can cause are limited (`WarningLimit`).

use crate::config::{LogFilter, LogLevel};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Installs a logger on standard error, unless the program has a logger.
pub fn init(filter: &LogFilter) {
    // Fails if a logger is installed already, for example by an earlier communicator.
    let _ = builder(filter).format_target(false).try_init();
}

fn builder(filter: &LogFilter) -> env_logger::Builder {
    let mut builder = env_logger::Builder::new();
    // The prefix of the modules of all crates.
    builder.filter_module("flexring", level_filter(filter.level()));
    for (module, level) in filter.modules() {
        builder.filter_module(module, level_filter(level));
    }
    builder
}

fn level_filter(level: LogLevel) -> log::LevelFilter {
    match level {
        LogLevel::Off => log::LevelFilter::Off,
        LogLevel::Error => log::LevelFilter::Error,
        LogLevel::Warn => log::LevelFilter::Warn,
        LogLevel::Info => log::LevelFilter::Info,
        LogLevel::Debug => log::LevelFilter::Debug,
        LogLevel::Trace => log::LevelFilter::Trace,
    }
}

/// How long a [`WarningLimit`] stays silent after a warning.
const SILENCE: Duration = Duration::from_secs(10);

/// Limits a warning that other processes can cause, one for each place that warns: it is written once in 10
/// s, with the number of those that were left out since.
pub struct WarningLimit {
    state: Mutex<LimitState>,
}

struct LimitState {
    silent_until: Option<Instant>,
    left_out: u64,
}

impl WarningLimit {
    /// A limit that has seen no warning.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it is for statics")]
    pub const fn new() -> Self {
        Self { state: Mutex::new(LimitState { silent_until: None, left_out: 0 }) }
    }

    /// Writes the warning, or counts it.
    pub fn warn(&self, message: fmt::Arguments<'_>) {
        match self.admit(Instant::now()) {
            None => {}
            Some(0) => log::warn!("{message}"),
            Some(left_out) => log::warn!("{message} (and {left_out} times since the last such warning)"),
        }
    }

    /// How many were left out since the last one, if one may be written now.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.silent_until.is_some_and(|until| now < until) {
            state.left_out += 1;
            return None;
        }
        state.silent_until = Some(now + SILENCE);
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_has_its_level_and_all_else_the_common_one() {
        use log::Log;

        let filter = LogFilter::parse("info,tcp=debug,plan=off").expect("a filter");
        let logger = builder(&filter).build();
        let is_written = |target: &str, level: log::Level| {
            logger.enabled(&log::Metadata::builder().target(target).level(level).build())
        };
        for (target, level, expected) in [
            ("flexring::transport::tcp::link", log::Level::Debug, true),
            ("flexring::transport::tcp::link", log::Level::Trace, false),
            ("flexring::transport::shm", log::Level::Info, true),
            ("flexring::transport::shm", log::Level::Debug, false),
            ("flexring_core::process", log::Level::Info, true),
            ("flexring_plan::tuning", log::Level::Error, false),
            ("rustls::client", log::Level::Error, false),
        ] {
            assert_eq!(is_written(target, level), expected, "{target} {level}");
        }
    }

    #[test]
    fn a_warning_that_others_cause_is_written_once_in_a_while_and_counted() {
        let (limit, begin) = (WarningLimit::new(), Instant::now());
        assert_eq!(limit.admit(begin), Some(0));
        assert!((1..50_000).all(|micros| limit.admit(begin + Duration::from_micros(micros)).is_none()));
        assert_eq!(limit.admit(begin + SILENCE), Some(49_999));
        assert_eq!(limit.admit(begin + 2 * SILENCE), Some(0));
    }
}
