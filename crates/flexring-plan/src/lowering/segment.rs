//! The parts that a program cuts the vector into.
//!
//! Owns the cutting.

use super::program_spec::ProgramSpec;
use crate::fraction::{Fraction, Span};
use crate::schedule::{Schedule, Shard};

/// A part of the vector that all steps treat as one. Its sub-chunks are a grid of their own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) span: Span,
    /// The shard that the segment is in; the first, if it is in several.
    pub(super) shard: Shard,
}

/// The points where groups of a level start, in rising order.
pub(super) fn group_starts(schedule: &Schedule) -> Vec<Fraction> {
    let groups = schedule.levels().iter().flat_map(|level| level.groups());
    let mut starts: Vec<Fraction> =
        groups.filter(|group| group.moves()).map(|group| group.span.start).collect();
    // Groups of a level are in order, so there are few runs to merge.
    starts.sort();
    starts.dedup();
    starts
}

/// Cuts the vector at the ends of shards, and at the ends of the spans that callers hold. Programs in waves
/// also cut it at `group_starts`, so that the sub-chunks of each part are a grid of their own, and all parts
/// are summed at the same time: the parts of one shard may come from different ranks, whose links would be
/// used one after the other. Spans that are sent whole are cut only where parts of them are complete at
/// different levels.
pub(super) fn segments(schedule: &Schedule, group_starts: &[Fraction], spec: ProgramSpec) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    if spec.is_one_shot() || spec.collective.is_straight() {
        return vec![Segment { span: Span::WHOLE, shard: schedule.shards()[0] }];
    }
    for shard in schedule.shards() {
        match segments.last_mut() {
            Some(last) if !spec.in_waves() && last.shard.level == shard.level => {
                last.span.end = shard.span.end;
            }
            _ if spec.in_waves() => {
                let Span { start, end } = shard.span;
                let inside = group_starts.iter().skip(group_starts.partition_point(|cut| *cut <= start));
                let mut from = start;
                for to in inside.copied().take_while(|cut| *cut < end).chain([end]) {
                    segments.push(Segment { span: Span { start: from, end: to }, shard: *shard });
                    from = to;
                }
            }
            _ => segments.push(Segment { span: shard.span, shard: *shard }),
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
            cut.push(Segment { span: rest.intersection(own), ..segment });
            if own.end > rest.end {
                break;
            }
            rest.start = own.end;
            part += 1;
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::super::program_spec::Movement;
    use super::*;
    use crate::planner::flexreduce;
    use crate::topology::Topology;

    fn fractions(cuts: &[Fraction]) -> Vec<String> {
        cuts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_shard_is_cut_where_its_parts_come_from_different_ranks() {
        let topology = Topology::from_names(&["a", "b", "b", "b", "b"]);
        let schedule = flexreduce::plan(&topology).expect("a small tree");
        let starts = |in_waves| -> Vec<Fraction> {
            let spec =
                ProgramSpec { movement: Movement::through_levels(in_waves), ..ProgramSpec::ALL_REDUCE };
            segments(&schedule, &group_starts(&schedule), spec).iter().map(|part| part.span.start).collect()
        };
        // The nodes take turns: in each quarter that a rank of the other node holds, the only rank of its
        // node owns an eighth.
        let shards: Vec<Fraction> = schedule.shards().iter().map(|shard| shard.span.start).collect();
        assert_eq!(fractions(&shards), ["0", "1/8", "1/4", "3/8", "1/2", "5/8", "7/8"]);
        assert_eq!(fractions(&starts(true)), ["0", "1/8", "1/4", "3/8", "1/2", "5/8", "3/4", "7/8"]);
        assert_eq!(fractions(&starts(false)), ["0"]);
    }
}
