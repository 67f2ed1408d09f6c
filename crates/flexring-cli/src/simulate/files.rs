//! The files of `flexring simulate`: the drawing, and the timeline of the ranks.
//!
//! Owns what they show.

use super::options::SimulateOptions;
use super::report::{Report, SimulatedSize, amount};
use crate::error::CommandError;
use crate::output;
use crate::output_file::{OutputFile, expect_two_files};
use flexring::Error;
use flexring_core::call::{Call, Collective};
use flexring_core::dtype::{DType, ReduceOp};
use flexring_core::trace::merge::merge;
use flexring_core::trace::{RecordedCall, TraceFile, TraceOrigin};
use flexring_plan::topology::Topology;
use flexring_simulator::drawing::{MOST_TIMELINE_RANKS, SizePoint, draw_sizes, draw_timeline};

/// Checks that the files can be written, before anything is simulated.
pub fn check(options: &SimulateOptions, topology: &Topology) -> Result<(), CommandError> {
    let (world, sizes) = (topology.world(), options.sizes.len());
    if options.svg.is_some() && sizes == 1 && world > MOST_TIMELINE_RANKS {
        return Err(CommandError::Usage(format!(
            "{world} ranks are too many for a drawing of one run: expected at most {MOST_TIMELINE_RANKS}; several sizes are \
             drawn for any number of ranks, and --trace writes a file that Perfetto shows"
        )));
    }
    if options.svg.is_some() && sizes == 1 && options.no_path {
        let message = "a drawing of one run shows what --no-path leaves out: omit --no-path or --svg";
        return Err(CommandError::Usage(message.to_owned()));
    }
    if options.trace.is_some() && sizes > 1 {
        let message = format!(
            "a timeline shows one run, but there are {sizes} sizes: give --trace with a single --size"
        );
        return Err(CommandError::Usage(message));
    }
    expect_two_files([("--svg", options.svg.as_deref()), ("--trace", options.trace.as_deref())])?;
    let mut files = [&options.svg, &options.trace].into_iter().flatten();
    Ok(files.try_for_each(|path| OutputFile::new(path).check())?)
}

/// Writes the files that the flags ask for.
pub fn write(options: &SimulateOptions, report: &Report<'_>) -> Result<(), CommandError> {
    if let Some(path) = &options.svg {
        OutputFile::new(path).write(drawing(report).as_bytes())?;
    }
    match (&options.trace, &report.sizes[..]) {
        (Some(path), [only]) => Ok(timeline(report, only)?.save(path)?),
        _ => Ok(()),
    }
}

fn drawing(report: &Report<'_>) -> String {
    let planned = report.planned;
    let place = planned.place();
    if let [only @ SimulatedSize { bytes, schedule, run, .. }] = &report.sizes[..] {
        let title = format!("{schedule} on {}, {}", planned.called, amount(*bytes));
        let bound = report.seconds_per_byte_at_least * *bytes as f64;
        let bound = if bound > 0.0 { format!(", bound {}", output::duration(bound)) } else { String::new() };
        let time = output::duration(run.seconds());
        let subtitle = format!("simulated: {place}; {time}{bound}{}", only.other_clause());
        return draw_timeline(run, &planned.topology, &title, &subtitle);
    }
    let points = report.sizes.iter().map(|SimulatedSize { bytes, schedule, run, other, .. }| SizePoint {
        bytes: *bytes,
        other: other.as_ref().map_or(0.0, |(_, seconds)| *seconds),
        seconds: run.seconds(),
        bound: report.seconds_per_byte_at_least * *bytes as f64,
        schedule: schedule.clone(),
    });
    let title = format!("all-reduce on {}", planned.called);
    draw_sizes(&points.collect::<Vec<_>>(), &title, &format!("simulated: {place}"))
}

/// The timelines of all ranks, as one file.
fn timeline(report: &Report<'_>, size: &SimulatedSize) -> Result<TraceFile, Error> {
    let topology = &report.planned.topology;
    let call = Call {
        sequence: 1,
        collective: Collective::AllReduce,
        dtype: DType::F32,
        op: ReduceOp::Sum.code(),
        root: 0,
        count: size.bytes.div_ceil(DType::F32.size() as u64),
        program: 0,
        on_gpu: false,
        factor: 1.0,
    };
    let files = size.run.ranks.iter().enumerate().map(|(rank, timeline)| {
        let node = topology.vertices()[topology.leaf(rank)].parent.unwrap_or(0);
        let host = format!("{} (simulated)", topology.vertices()[node].name);
        let origin = TraceOrigin { rank, world: topology.world(), host, pid: 0, communicator: String::new() };
        let call = RecordedCall { call, start: 0, end: timeline.end, failed: false };
        TraceFile::of_call(origin, call, &timeline.spans)
    });
    merge(files.collect())
}
