//! The parent of `perf --ranks N`: what is done with the files of the ranks when they have ended.
//!
//! Owns the merged timeline, and the error in the report.

use super::options::PerfOptions;
use super::report::ReportFile;
use crate::error::CommandError;
use crate::output_file::{OutputFile, expect_two_files};
use crate::{local_ranks, output, trace};
use flexring::Error;
use flexring_core::config::Config;
use flexring_core::trace::TracePath;
use std::path::{Path, PathBuf};

/// Starts `ranks` ranks and waits for all of them.
pub fn run(options: &PerfOptions, config: &Config, ranks: usize) -> Result<(), CommandError> {
    // The timelines of the ranks are merged here.
    let timelines: Vec<PathBuf> =
        options.trace.iter().flat_map(|setting| timelines(setting, ranks)).collect();
    for timeline in timelines.iter().map(|path| &**path).chain(options.trace.as_deref().map(Path::new)) {
        expect_two_files([("--json", options.json.as_deref()), ("--trace", Some(timeline))])?;
    }
    for path in [options.json.as_deref(), options.trace.as_deref().map(Path::new)].into_iter().flatten() {
        OutputFile::new(path).check()?;
    }
    let failures = local_ranks::run(config, ranks, &options.settings())?;
    if failures.is_empty() {
        return options.trace.as_ref().map_or(Ok(()), |setting| merge_trace(setting, ranks, true));
    }
    if let Some(path) = &options.json {
        ReportFile::new(path).amend(&failures.join("; "))?;
    }
    if let Some(setting) = &options.trace {
        merge_trace(setting, ranks, false)?;
    }
    Err(CommandError::Reported)
}

/// The files that the ranks write.
fn timelines(setting: &str, ranks: usize) -> impl Iterator<Item = PathBuf> {
    (0..ranks).map(|rank| TracePath::new(setting, "", rank).path().to_owned())
}

/// Merges the timelines of the ranks, and removes their files. After a failure some ranks may have none.
fn merge_trace(setting: &str, ranks: usize, has_succeeded: bool) -> Result<(), CommandError> {
    let mut paths: Vec<PathBuf> = timelines(setting, ranks).collect();
    if !has_succeeded {
        let is_written = |path: &PathBuf| path.metadata().is_ok_and(|file| file.len() > 0);
        paths.retain(is_written);
        if paths.is_empty() {
            return Ok(());
        }
    }
    trace::merge_files(&paths, Path::new(setting))?;
    for path in paths.iter().filter(|path| **path != *Path::new(setting)) {
        std::fs::remove_file(path)
            .map_err(|cause| Error::io(format!("cannot remove {}", path.display()), cause))?;
    }
    output::print(&format!("# {}", trace::where_it_is(Path::new(setting))))
}
