//! The smallest spans that the steps of programs distinguish.
//!
//! Owns the cut points.

use crate::fraction::{Fraction, Span};
use crate::program::{HeldSpans, Program};

/// All points where a step, a window or a block of some program begins or ends, sorted, without the end of
/// the vector. Segment i is from cut i to cut i + 1 (or to the end of the vector).
pub(super) fn cuts<'a>(programs: impl Iterator<Item = &'a Program>) -> Vec<Fraction> {
    let mut cuts = vec![Fraction::ZERO];
    for program in programs {
        cuts.extend(program.steps.iter().flat_map(|step| [step.span().start, step.span().end]));
        let HeldSpans { input, output, .. } = program.held_spans;
        cuts.extend([input.start, input.end, output.start, output.end]);
        if let Some(order) = &program.blocks {
            let blocks = order.world() * order.world();
            cuts.extend((0..blocks).map(|block| Span::part(block, blocks).start));
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.retain(|cut| *cut != Fraction::ONE);
    cuts
}

/// The segments that make up the span, by number.
pub(super) fn range(cuts: &[Fraction], span: Span) -> std::ops::Range<usize> {
    cuts.partition_point(|cut| *cut < span.start)..cuts.partition_point(|cut| *cut < span.end)
}
