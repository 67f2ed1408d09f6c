//! The parts that a program cuts the vector into.
//!
//! Owns the cutting. Must not know what is sent.

use super::program_spec::ProgramSpec;
use crate::plan::fraction::Span;
use crate::plan::schedule::{Schedule, Shard};

/// A part of the vector that all steps treat as one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) span: Span,
    /// See [`Step::grid`](crate::plan::program::Step::grid).
    pub(super) grid: Span,
    /// The shard that the segment is in; the first, if it is in several.
    pub(super) shard: Shard,
}

/// Cuts the vector at the ends of shards and of the spans that callers hold. The sub-chunks of each part are a grid of their own. Spans that are sent whole are cut only where parts of them are complete at different levels.
pub(super) fn segments(schedule: &Schedule, spec: ProgramSpec) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    if spec.one_shot || spec.collective.is_straight() {
        return vec![Segment { span: Span::WHOLE, grid: Span::WHOLE, shard: schedule.shards()[0] }];
    }
    for shard in schedule.shards() {
        match segments.last_mut() {
            Some(last) if !spec.by_wave && last.shard.level == shard.level => {
                last.span.end = shard.span.end;
            }
            _ => segments.push(Segment { span: shard.span, grid: shard.span, shard: *shard }),
        }
    }
    if !spec.collective.has_parts() {
        return segments;
    }
    let world = schedule.world();
    let mut part = 0;
    let mut cut = Vec::new();
    for segment in segments {
        let mut rest = segment.span;
        while !rest.is_empty() {
            let own = Span::part(part, world);
            let span = rest.intersection(own);
            cut.push(Segment { span, grid: span, ..segment });
            if own.end > rest.end {
                break;
            }
            rest.start = own.end;
            part += 1;
        }
    }
    cut
}
