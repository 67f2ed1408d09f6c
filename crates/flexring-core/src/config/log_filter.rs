//! Which messages are written.
//!
//! Owns the notation `warn,tcp=debug`, and which modules an area contains.

use super::choices::{LogArea, LogLevel};
use super::values::SettingValue;
use std::borrow::Cow;
use std::fmt;

/// The level of messages, and other levels for areas of flexring: `info`, `tcp=debug` or
/// `warn,tcp=debug,plan=off`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter {
    level: LogLevel,
    /// In the order in which they were given; a later one replaces an earlier one for the same area.
    areas: Vec<(LogArea, LogLevel)>,
}

impl LogFilter {
    /// Parses a level, or levels of areas, or both, joined by commas. Without a level other areas write
    /// warnings and errors.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (mut level, mut areas) = (None, Vec::new());
        for part in text.split(',') {
            match part.split_once('=') {
                Some((area, level)) => {
                    areas.push((LogArea::parse(area.trim())?, LogLevel::parse(level.trim())?));
                }
                None if level.is_none() => level = Some(LogLevel::parse(part.trim())?),
                None => return None,
            }
        }
        Some(Self { level: level.unwrap_or(LogLevel::Warn), areas })
    }

    /// The level of all other areas.
    pub(crate) fn level(&self) -> LogLevel {
        self.level
    }

    /// The modules with a level of their own.
    pub(crate) fn modules(&self) -> impl Iterator<Item = (&'static str, LogLevel)> + '_ {
        let modules = |(area, level): &(LogArea, LogLevel)| {
            let level = *level;
            modules_of(*area).iter().map(move |module| (*module, level))
        };
        self.areas.iter().flat_map(modules)
    }
}

impl From<LogLevel> for LogFilter {
    fn from(level: LogLevel) -> Self {
        Self { level, areas: Vec::new() }
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.level.name())?;
        self.areas.iter().try_for_each(|(area, level)| write!(f, ",{}={}", area.name(), level.name()))
    }
}

impl SettingValue for LogFilter {
    fn expected() -> Cow<'static, str> {
        let areas: Vec<&str> = LogArea::ALL.iter().map(|area| area.name()).collect();
        let levels = <LogLevel as SettingValue>::expected();
        format!("{levels}, also for areas ({}), such as warn,tcp=debug", areas.join(", ")).into()
    }
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

/// The modules of an area, each with all modules below it.
fn modules_of(area: LogArea) -> &'static [&'static str] {
    match area {
        LogArea::Bootstrap => &["flexring::bootstrap"],
        LogArea::Calls => &["flexring::communicator", "flexring::executor"],
        LogArea::Gpu => &[
            "flexring::communicator::gpu_calls",
            "flexring::communicator::gpu_state",
            "flexring::cuda_driver",
            "flexring::device",
        ],
        LogArea::Memory => &["flexring::memory"],
        LogArea::Plan => &["flexring::description", "flexring_plan"],
        LogArea::Shm => &["flexring::transport::shm"],
        LogArea::Tcp => &["flexring::transport::tcp"],
        LogArea::Verbs => &["flexring::transport::verbs"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn levels_of_areas_are_parsed_and_print_as_they_parse() {
        for (text, shown) in [
            ("info", "info"),
            ("tcp=debug", "warn,tcp=debug"),
            (" Plan = off , TRACE", "trace,plan=off"),
            ("error,tcp=info,tcp=debug", "error,tcp=info,tcp=debug"),
        ] {
            let filter = LogFilter::parse(text).expect(text);
            assert_eq!(filter.to_string(), shown);
            assert_eq!(LogFilter::parse(shown), Some(filter));
        }
        for text in ["", "loud", "info,warn", "udp=info", "tcp=", "tcp", "tcp=info,"] {
            assert_eq!(LogFilter::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_modules_of_all_areas_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for module in LogArea::ALL.iter().flat_map(|area| modules_of(*area)) {
            let (library, path) = module.split_once("::").unwrap_or((module, ""));
            let source =
                if library == "flexring" { "src".to_owned() } else { "crates/flexring-plan/src".to_owned() };
            let path = root.join(source).join(path.replace("::", "/"));
            assert!(path.is_dir() || path.with_extension("rs").is_file(), "{module}: {}", path.display());
        }
    }
}
