//! The JSON file of a rank's timeline, and its name.
//!
//! Owns the form of the file: an object with `traceEvents`, as Chrome's trace viewer and Perfetto read it,
//! and what the file is about in `otherData`.

use super::clock::ClockAlignment;
use super::events::{TraceEvent, events_of};
use super::recording::{RecordedCall, RecordedSpan, Recording, TraceOrigin};
use crate::error::{Error, Result};
use crate::named_file;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// The whole file.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceFile {
    /// The unit in which viewers show times.
    pub display_time_unit: String,
    /// What the events are about.
    pub other_data: TraceSummary,
    /// The events.
    pub trace_events: Vec<TraceEvent>,
}

/// What the events of a rank are about.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TraceSummary {
    /// The ranks whose events the file has.
    pub ranks: Vec<TracedRank>,
}

/// A rank in a file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TracedRank {
    /// Where the events come from.
    #[serde(flatten)]
    pub origin: TraceOrigin,
    /// How the rank's clock was aligned with that of rank 0.
    pub clock: ClockAlignment,
    /// Spans that were recorded, but replaced by newer ones.
    pub dropped_spans: u64,
    /// Calls that were recorded, but replaced by newer ones.
    pub dropped_calls: u64,
}

impl TracedRank {
    fn of(recording: &Recording) -> Self {
        Self {
            origin: recording.origin.clone(),
            clock: recording.alignment,
            dropped_spans: recording.spans.dropped(),
            dropped_calls: recording.calls.dropped(),
        }
    }
}

/// The unit in which viewers show times.
pub(super) const TIME_UNIT: &str = "ns";

impl TraceFile {
    /// The timeline of a rank that made one call and recorded these spans, such as a simulated one. Its clock
    /// is that of rank 0.
    #[must_use]
    pub fn of_call(origin: TraceOrigin, call: RecordedCall, spans: &[RecordedSpan]) -> Self {
        let mut recording = Recording::new(origin, spans.len());
        recording.calls.push(call);
        spans.iter().for_each(|span| recording.spans.push(*span));
        Self {
            display_time_unit: TIME_UNIT.to_owned(),
            other_data: TraceSummary { ranks: vec![TracedRank::of(&recording)] },
            trace_events: events_of(&recording).collect(),
        }
    }

    /// Writes the timeline of a rank.
    pub(super) fn write(file: &File, recording: &Recording) -> io::Result<()> {
        let rank = TracedRank::of(recording);
        let mut out = BufWriter::new(file);
        write!(out, "{{\"displayTimeUnit\":\"{TIME_UNIT}\",\"otherData\":")?;
        serde_json::to_writer(&mut out, &TraceSummary { ranks: vec![rank] })?;
        write!(out, ",\"traceEvents\":[")?;
        let mut separator = "\n";
        for event in events_of(recording) {
            out.write_all(separator.as_bytes())?;
            serde_json::to_writer(&mut out, &event)?;
            separator = ",\n";
        }
        out.write_all(b"\n]}\n")?;
        out.flush()
    }

    /// Writes the whole file.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let failed = |cause: io::Error| Error::io(format!("cannot write {}", path.display()), cause);
        let mut out = BufWriter::new(named_file::create(path).map_err(failed)?);
        serde_json::to_writer(&mut out, self).map_err(|cause| failed(cause.into()))?;
        out.write_all(b"\n").and_then(|()| out.flush()).map_err(failed)
    }

    /// Reads a file that a rank has written.
    ///
    /// # Errors
    /// `System` if it cannot be read; `InvalidArgument` if it is no such file.
    pub fn load(path: &Path) -> Result<Self> {
        let mut text = Vec::new();
        named_file::open(path)
            .and_then(|mut file| file.read_to_end(&mut text))
            .map_err(|cause| Error::io(format!("cannot read {}", path.display()), cause))?;
        if text.is_empty() {
            return Err(Error::invalid_argument(format!(
                "{} is empty: its process ended before it wrote the file",
                path.display()
            )));
        }
        serde_json::from_slice(&text).map_err(|cause| {
            Error::invalid_argument(format!("{} is no trace of a rank: {cause}", path.display()))
        })
    }
}

/// Where a rank's file is: `FLEXRING_TRACE` with the rank before the extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePath {
    setting: String,
    path: PathBuf,
}

impl TracePath {
    /// The file of `rank` if the setting is `setting`. `communicator` is empty for the first communicator of
    /// a process.
    #[must_use]
    pub fn new(setting: &str, communicator: &str, rank: usize) -> Self {
        let label = if communicator.is_empty() { String::new() } else { format!(".{communicator}") };
        let path = format!("{}{label}.rank{rank}.json", Self::stem(setting)).into();
        Self { setting: setting.to_owned(), path }
    }

    /// The files that the ranks of a job have written, by name.
    ///
    /// # Errors
    /// `System` if the folder cannot be read.
    pub fn written(setting: &str) -> Result<Vec<PathBuf>> {
        let stem = Path::new(Self::stem(setting));
        let folder = stem.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let prefix = format!("{}.", stem.file_name().unwrap_or_default().to_string_lossy());
        let failed = |cause: io::Error| Error::io(format!("cannot read {}", folder.display()), cause);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(key) = name.strip_prefix(&prefix).and_then(order_of) {
                files.push((key, path));
            }
        }
        files.sort();
        Ok(files.into_iter().map(|(_, path)| path).collect())
    }

    fn stem(setting: &str) -> &str {
        setting.strip_suffix(".json").unwrap_or(setting)
    }

    /// The path itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the file.
    pub(super) fn create(&self) -> Result<File> {
        named_file::create(&self.path).map_err(|cause| {
            Error::invalid_setting(format!(
                "FLEXRING_TRACE=\"{}\" cannot be used: cannot create {}: {cause}",
                self.setting, self
            ))
        })
    }
}

/// Communicator and rank in the end of a file's name, such as `1f2e3d4c.rank3.json`. `None` if a rank has not
/// written it.
fn order_of(end: &str) -> Option<(String, usize)> {
    let parts: Vec<&str> = end.split('.').collect();
    let (communicator, rank) = match parts[..] {
        [rank, "json"] => ("", rank),
        [communicator, rank, "json"] => (communicator, rank),
        _ => return None,
    };
    Some((communicator.to_owned(), rank.strip_prefix("rank")?.parse().ok()?))
}

impl fmt::Display for TracePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_has_communicator_and_rank() {
        let path = |setting, communicator| TracePath::new(setting, communicator, 3).path;
        assert_eq!(path("/tmp/trace.json", ""), Path::new("/tmp/trace.rank3.json"));
        assert_eq!(path("trace", ""), Path::new("trace.rank3.json"));
        assert_eq!(path("trace.json", "1f2e3d4c"), Path::new("trace.1f2e3d4c.rank3.json"));
    }

    #[test]
    fn the_files_of_a_job_are_found_in_the_order_of_ranks() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let setting = folder.path().join("t.json").to_string_lossy().into_owned();
        let names =
            ["t.rank10.json", "t.rank9.json", "t.ab.rank0.json", "t.json", "t.rank.json", "u.rank1.json"];
        for name in names {
            std::fs::write(folder.path().join(name), "").expect("the file is written");
        }
        let found = TracePath::written(&setting).expect("the folder can be read");
        let found: Vec<_> = found.iter().map(|path| path.file_name().expect("a name")).collect();
        assert_eq!(found, ["t.rank9.json", "t.rank10.json", "t.ab.rank0.json"]);
    }

    #[test]
    fn errors_quote_setting_and_file() {
        let error = TracePath::new("/no/folder/t.json", "", 1).create().expect_err("no folder");
        let message =
            "FLEXRING_TRACE=\"/no/folder/t.json\" cannot be used: cannot create /no/folder/t.rank1.json: ";
        assert!(error.message().starts_with(message), "{error}");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("t.rank0.json");
        for (text, message) in [("", "is empty: its process ended"), ("[]", "is no trace of a rank: ")] {
            std::fs::write(&path, text).expect("the file is written");
            let error = TraceFile::load(&path).expect_err("no trace");
            assert!(error.message().contains(&format!("{} {message}", path.display())), "{error}");
        }
    }
}
