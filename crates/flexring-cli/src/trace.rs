//! `flexring trace`: merges the timelines of a job's ranks, and says where their time went.
//!
//! Owns the table.

use crate::error::CommandError;
use crate::output;
use crate::output_file::resolved_path;
use clap::Args;
use flexring::Error;
use flexring_core::rank::{Rank, RankList};
use flexring_core::trace::merge::{RankTotals, merge, totals};
use flexring_core::trace::{TraceFile, TraceOrigin, TracePath};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Merge the timelines that the ranks of a job wrote because of FLEXRING_TRACE, or say what a merged one
/// contains
///
/// The merged file begins at time 0 and opens in https://ui.perfetto.dev and in chrome://tracing. Times are
/// those of rank 0's clock. Prints for each rank how long it was in calls, and what part of that time it
/// waited, copied and reduced.
#[derive(Args, Debug)]
pub struct TraceOptions {
    /// The value of FLEXRING_TRACE, or a file that is merged already, such as that of perf --trace. Files of
    /// ranks on other machines must have been copied next to it
    #[arg(value_name = "FILE")]
    trace: String,

    /// The merged file [default: FILE]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs the command.
pub fn run(options: &TraceOptions) -> Result<(), CommandError> {
    let paths = TracePath::written(&options.trace)?;
    if paths.is_empty() && Path::new(&options.trace).is_file() {
        let merged = TraceFile::load(Path::new(&options.trace))?;
        options.output.as_deref().map_or(Ok(()), |output| merged.save(output))?;
        let path = options.output.as_deref().unwrap_or(Path::new(&options.trace));
        return output::print(&(table(&merged) + &where_it_is(path)));
    }
    if paths.is_empty() {
        let first = TracePath::new(&options.trace, "", 0);
        let message = format!(
            "no rank has written a timeline for FLEXRING_TRACE={}: there is no {first}",
            options.trace
        );
        return Err(CommandError::Usage(message));
    }
    let output = options.output.clone().unwrap_or_else(|| PathBuf::from(&options.trace));
    let resolved = resolved_path(&output);
    if paths.iter().any(|path| resolved_path(path) == resolved) {
        let message = format!("{} is the timeline of a rank: give another --output", output.display());
        return Err(CommandError::Usage(message));
    }
    let merged = merge_files(&paths, &output)?;
    output::print(&(table(&merged) + &where_it_is(&output)))
}

/// A line with the path of a merged timeline and how to see it.
pub fn where_it_is(path: &Path) -> String {
    format!("timeline: {} (open in https://ui.perfetto.dev)\n", resolved_path(path).display())
}

/// Merges files of ranks into `output`.
///
/// # Errors
/// If a file cannot be read or written, or is no timeline.
pub fn merge_files(paths: &[PathBuf], output: &Path) -> Result<TraceFile, Error> {
    let files = paths.iter().map(|path| TraceFile::load(path)).collect::<Result<Vec<_>, _>>()?;
    let merged = merge(files)?;
    merged.save(output)?;
    Ok(merged)
}

/// A line for each rank, and notes on clocks and lost spans.
fn table(merged: &TraceFile) -> String {
    let mut text = format!(
        "{:>24} {:>8} {:>14} {:>7} {:>7} {:>7} {:>9} {:>12}\n",
        "rank", "calls", "in calls (us)", "waits", "copies", "reduces", "registers", "sent (bytes)"
    );
    let mut notes = String::new();
    for (rank, totals) in merged.other_data.ranks.iter().zip(totals(merged)) {
        let RankTotals { calls, in_calls, waiting, copying, reducing, registering, sent_bytes } = totals;
        let label = match rank.origin.communicator.as_str() {
            "" => format!("{} on {}", rank.origin.rank, rank.origin.host),
            communicator => format!("{} of {communicator}", rank.origin.rank),
        };
        let part = |time: f64| format!("{:.0} %", 100.0 * time / in_calls.max(f64::MIN_POSITIVE));
        text += &format!(
            "{label:>24} {calls:>8} {in_calls:>14.0} {:>7} {:>7} {:>7} {:>9} {sent_bytes:>12}\n",
            part(waiting),
            part(copying),
            part(reducing),
            part(registering),
        );
        if rank.dropped_spans + rank.dropped_calls > 0 {
            notes += &format!(
                "rank {}: {} spans and {} calls are lost, the oldest ones: raise FLEXRING_TRACE_EVENTS\n",
                rank.origin.rank, rank.dropped_spans, rank.dropped_calls
            );
        }
        if rank.clock.error_ns > 0 {
            notes += &format!(
                "rank {}: its times may be off by {:.1} us, because it has another clock than rank 0\n",
                rank.origin.rank,
                rank.clock.error_ns as f64 / 1e3
            );
        }
    }
    for (communicator, world, missing) in missing_ranks(merged) {
        let of = if communicator.is_empty() { String::new() } else { format!(" of {communicator}") };
        notes += &format!(
            "{} of {world}{of} {} no file here: copy it next to the others, and merge again\n",
            RankList::new(&missing),
            RankList::new(&missing).have()
        );
    }
    text + &notes
}

/// Each communicator of which ranks have no timeline, with its number of ranks, and these ranks.
fn missing_ranks(merged: &TraceFile) -> Vec<(&str, usize, Vec<Rank>)> {
    let mut present = BTreeMap::<(&str, usize), BTreeSet<Rank>>::new();
    for TraceOrigin { communicator, world, rank, .. } in
        merged.other_data.ranks.iter().map(|rank| &rank.origin)
    {
        present.entry((communicator, *world)).or_default().insert(*rank);
    }
    let missing = |((communicator, world), ranks): ((_, usize), BTreeSet<Rank>)| {
        (communicator, world, (0..world).filter(|rank| !ranks.contains(rank)).collect::<Vec<_>>())
    };
    present.into_iter().map(missing).filter(|(.., missing)| !missing.is_empty()).collect()
}
