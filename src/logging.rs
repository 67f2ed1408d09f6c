//! What flexring says while it runs.
//!
//! The library speaks through the `log` crate, so a program that has a logger of its own hears everything
//! there. In programs without one, which includes all that are written in C or Python, this module puts one on
//! standard error.

use crate::config::LogLevel;

/// Installs a logger on standard error that says as much as `level`, unless the program has one.
pub fn init(level: LogLevel) {
    let filter = match level {
        LogLevel::Off => log::LevelFilter::Off,
        LogLevel::Error => log::LevelFilter::Error,
        LogLevel::Warn => log::LevelFilter::Warn,
        LogLevel::Info => log::LevelFilter::Info,
        LogLevel::Debug => log::LevelFilter::Debug,
        LogLevel::Trace => log::LevelFilter::Trace,
    };
    // A second communicator finds the logger of the first.
    let _ = env_logger::Builder::new().filter_module("flexring", filter).format_target(false).try_init();
}
