//! Log output.
//!
//! The library logs through the `log` crate, so the records go to the program's own logger if it has one. For
//! programs without a logger, which includes all C and Python programs, this module installs one that writes
//! to standard error.

use crate::config::LogLevel;

/// Installs a logger on standard error with this level, unless the program has a logger.
pub fn init(level: LogLevel) {
    let filter = match level {
        LogLevel::Off => log::LevelFilter::Off,
        LogLevel::Error => log::LevelFilter::Error,
        LogLevel::Warn => log::LevelFilter::Warn,
        LogLevel::Info => log::LevelFilter::Info,
        LogLevel::Debug => log::LevelFilter::Debug,
        LogLevel::Trace => log::LevelFilter::Trace,
    };
    // Fails if a logger is installed already, for example by an earlier communicator.
    let _ = env_logger::Builder::new().filter_module("flexring", filter).format_target(false).try_init();
}
