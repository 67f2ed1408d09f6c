//! Which parts of the vector a program keeps in scratch memory, and what waits for memory there.
//!
//! Owns the rings of sub-chunks.
//!
//! In waves, a grid is in scratch memory as a ring of sub-chunks: a step that writes a sub-chunk waits until
//! the sub-chunk that was at the same place is used up ([`DependencyKind::Reuse`]). The ring is so long that
//! every message of the earlier sub-chunk is due before every message of the later one. So a message still
//! waits for earlier messages only, which is why programs end (see [`pipeline`](crate::pipeline)). Programs
//! without waves are for vectors whose shards are no longer than a sub-chunk; they keep their spans as a
//! whole.

use super::step::{Body, BufferKind, Dependency, DependencyKind, OperandSource, Step, StepId};
use super::waves::Waves;
use crate::fraction::Span;
use crate::step_lists::StepLists;
use std::ops::Range;

/// Length of a ring, as a multiple of the shortest with which programs end: the previous sub-chunk at a place
/// may be used up this much later than it is due before the next one waits for it. Rings of no hops, with a
/// copy that is sent at once, are as long as those of one, so that several sub-chunks are in flight. Chosen
/// by calculation, not measured.
const SLACK: u64 = 2;

/// A part of the vector in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScratchSpan {
    /// The part: with waves, the grid of the steps that use it.
    pub span: Span,
    /// Hops from the first step that uses it to the last.
    pub hops: u32,
}

impl ScratchSpan {
    /// Its elements in a call of `count` elements, and for how many of them there is memory: a whole number
    /// of sub-chunks unless it is for all. The ends of spans are multiples of `align`.
    #[must_use]
    pub fn elements(
        &self,
        waves: Option<&Waves>,
        count: u64,
        subchunk: u64,
        align: u64,
    ) -> (Range<u64>, u64) {
        let elements = self.span.elements(count, align);
        let length = elements.end - elements.start;
        let ring = waves.map(|waves| {
            let apart = SLACK * waves.lag * u64::from(self.hops.max(1)) + 1;
            (apart * length.div_ceil(subchunk)).div_ceil(waves.number(count, subchunk)) * subchunk
        });
        (elements, ring.map_or(length, |ring| ring.min(length)))
    }
}

/// The memory that a step uses other than the input.
fn memory_of(step: &Step) -> Option<BufferKind> {
    match &*step.body {
        Body::Send { buffer, .. } => Some(*buffer).filter(|buffer| *buffer != BufferKind::Input),
        Body::Combine { operands, into, .. } => {
            // What is passed on is delivered to the output.
            let transit = OperandSource::Own { buffer: BufferKind::Transit, scaled: false };
            Some(if operands.contains(&transit) { BufferKind::Transit } else { *into })
        }
    }
}

/// The parts of a step's span that it uses in scratch memory, because they are not in `output`.
fn parts_of(step: &Step, output: Span) -> impl Iterator<Item = Span> + use<> {
    let span = step.span();
    let parts = match memory_of(step) {
        Some(BufferKind::Transit) => [Some(span), None],
        Some(_) => [
            Some(Span { end: span.end.min(output.start), ..span }),
            Some(Span { start: span.start.max(output.end), ..span }),
        ],
        None => [None, None],
    };
    parts.into_iter().flatten().filter(|part| !part.is_empty())
}

/// What steps use outside of `output`, in rising order: in `waves` their grids, else their spans, of which
/// those that overlap are one.
pub(super) fn scratch_spans(steps: &[Step], output: Span, waves: bool) -> Vec<ScratchSpan> {
    let of_step = |step: &Step| {
        let (grid, depth) = (step.place.grid, step.depth);
        parts_of(step, output).map(move |part| (if waves { grid } else { part }, depth, depth))
    };
    let mut used: Vec<(Span, u32, u32)> = steps.iter().flat_map(of_step).collect();
    used.sort_unstable_by_key(|(span, ..)| (span.start, span.end));
    used.dedup_by(|(next, next_first, next_last), (span, first, last)| {
        let overlaps = next.start < span.end;
        if overlaps {
            span.end = span.end.max(next.end);
            (*first, *last) = ((*first).min(*next_first), (*last).max(*next_last));
        }
        overlaps
    });
    used.into_iter().map(|(span, first, last)| ScratchSpan { span, hops: last - first }).collect()
}

/// Adds the waits for the places of rings to `depends`, the dependencies of `steps`: all that write to a ring
/// wait for all that use it, but for those whose elements a later step waits for.
pub(super) fn add_reuse(
    steps: &[Step],
    scratch: &[ScratchSpan],
    output: Span,
    depends: &StepLists<Dependency>,
) -> StepLists<Dependency> {
    let mut users: Vec<Vec<StepId>> = vec![Vec::new(); scratch.len()];
    for (number, step) in (0..).zip(steps).filter(|(_, step)| parts_of(step, output).next().is_some()) {
        let ring = scratch.partition_point(|scratch| scratch.span.end <= step.span().start);
        users[ring].push(number);
    }
    let mut added: Vec<(StepId, Dependency)> = Vec::new();
    for users in &users {
        let is_followed = |user: &StepId| {
            let whole = steps[*user as usize].span();
            let follows = |later: &StepId| {
                let names = |on: &Dependency| on.on == *user && on.kind == DependencyKind::Elements;
                steps[*later as usize].span().intersection(whole) == whole
                    && depends.get(*later).iter().any(names)
            };
            users.iter().any(follows)
        };
        let last: Vec<StepId> = users.iter().copied().filter(|user| !is_followed(user)).collect();
        let writes = |user: &&StepId| matches!(*steps[**user as usize].body, Body::Combine { .. });
        for writer in users.iter().filter(writes) {
            added
                .extend(last.iter().map(|on| (*writer, Dependency { on: *on, kind: DependencyKind::Reuse })));
        }
    }
    added.sort_by_key(|(step, _)| *step);
    let mut all = StepLists::default();
    let mut added = added.into_iter().peekable();
    for step in 0..steps.len() as StepId {
        depends.get(step).iter().for_each(|dependency| all.push(*dependency));
        while let Some((_, dependency)) = added.next_if(|(waiting, _)| *waiting == step) {
            all.push(dependency);
        }
        all.end_step();
    }
    all
}
