//! The elements of a program's steps, bound to a call.
//!
//! Owns where steps start, end and are cut. Constant during a call, so that pipelines of one program share
//! it.

use super::binding::{Binding, BlockLayout};
use crate::Rank;
use crate::program::{Body, OperandSource, Program, Step, StepId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The elements of steps with one place, bound to a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct BoundPlace {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// First element of the grid.
    pub(crate) origin: u64,
    /// Sub-chunks of the grid.
    pub(crate) cells: u64,
    /// Index in the grid of the first sub-chunk.
    pub(crate) first: u64,
    /// Sub-chunks of each step.
    pub(crate) subs: u32,
    /// Elements of its ring in scratch memory; `u64::MAX` if nothing there is used again.
    pub(crate) ring: u64,
    /// The first step with this place.
    step: StepId,
}

impl BoundPlace {
    /// The elements of a sub-chunk, as a range of the vector.
    #[inline]
    pub(crate) fn elements(&self, sub: u64, subchunk: u64) -> Range<u64> {
        let cell = self.origin + (self.first + sub) * subchunk;
        cell.max(self.start)..(cell + subchunk).min(self.end)
    }

    /// When a sub-chunk is due, in waves: its position in its grid, scaled to the number of waves, and the
    /// lag of each hop before.
    pub(crate) fn due(&self, sub: u32, (waves, lag): (u64, u64), depth: u32) -> u64 {
        (self.first + u64::from(sub)) * waves / self.cells + lag * u64::from(depth)
    }
}

/// The elements of all steps of a program.
#[derive(Clone, Debug)]
pub(crate) struct BoundSteps {
    steps: Vec<BoundStep>,
    /// Steps of one place share them, unless blocks are bound.
    places: Vec<BoundPlace>,
    /// The combines of this rank's own data only.
    local: Vec<StepId>,
    /// Sub-chunks of all combines.
    combined: u64,
}

#[derive(Clone, Copy, Debug)]
struct BoundStep {
    /// Index of its place.
    place: u32,
    /// Whether it sends; otherwise it combines.
    is_send: bool,
}

impl BoundSteps {
    /// The steps of a program without elements.
    pub(crate) fn new(program: &Program) -> Self {
        let (mut numbers, mut places) = (HashMap::new(), Vec::new());
        let bound = |(number, step): (StepId, &Step)| {
            let place = *numbers.entry(Arc::as_ptr(&step.place)).or_insert_with(|| {
                places.push(BoundPlace { step: number, ..BoundPlace::default() });
                places.len() as u32 - 1
            });
            BoundStep { place, is_send: matches!(*step.body, Body::Send { .. }) }
        };
        let steps = (0..).zip(&program.steps).map(bound).collect();
        places.shrink_to_fit();
        let local = (0..).zip(&program.steps).filter(|(_, step)| step.is_local());
        Self { steps, places, local: local.map(|(number, _)| number).collect(), combined: 0 }
    }

    /// Computes the elements and sub-chunks of every step. `blocks` are those that steps move; empty lists if
    /// steps move their spans of the vector.
    pub(crate) fn bind(&mut self, program: &Program, binding: &Binding, blocks: &BlockLayout) {
        let Binding { count, subchunk, align, .. } = *binding;
        if !blocks.sends.is_empty() && self.places.len() < self.steps.len() {
            // Blocks differ where places are equal.
            self.places.clear();
            for (step, bound) in (0..).zip(&mut self.steps) {
                bound.place = step;
                self.places.push(BoundPlace { step, ..BoundPlace::default() });
            }
        }
        for place in &mut self.places {
            let step = &program.steps[place.step as usize];
            let block = block_of(step, program.rank, blocks);
            let Range { start, end } = block.clone().unwrap_or_else(|| step.span().elements(count, align));
            let grid = block.unwrap_or_else(|| step.place.grid.elements(count, align));
            let (origin, cells) = (grid.start, (grid.end - grid.start).div_ceil(subchunk));
            let first = (start - origin) / subchunk;
            let subs = if start == end { 0 } else { (end - 1 - origin) / subchunk - first + 1 };
            let subs = u32::try_from(subs).expect("`CallLayout` refuses so many");
            let ring = ring_of(program, step, binding).unwrap_or(u64::MAX);
            *place = BoundPlace { start, end, origin, cells, first, subs, ring, step: place.step };
        }
        let combines = self.steps.iter().filter(|step| !step.is_send);
        self.combined = combines.map(|step| u64::from(self.places[step.place as usize].subs)).sum();
    }

    pub(crate) fn place(&self, step: StepId) -> &BoundPlace {
        &self.places[self.steps[step as usize].place as usize]
    }

    /// Whether a step sends; `None` past the last step.
    pub(crate) fn is_send(&self, step: StepId) -> Option<bool> {
        self.steps.get(step as usize).map(|step| step.is_send)
    }

    pub(crate) fn local(&self) -> &[StepId] {
        &self.local
    }

    pub(crate) fn combined(&self) -> u64 {
        self.combined
    }
}

/// Elements of the ring that the grid of a step has in scratch memory; `None` if it has none, or is there as
/// a whole.
fn ring_of(program: &Program, step: &Step, binding: &Binding) -> Option<u64> {
    let waves = program.waves.as_ref()?;
    let at =
        program.scratch.binary_search_by_key(&step.place.grid.start, |scratch| scratch.span.start).ok()?;
    let (elements, kept) =
        program.scratch[at].elements(Some(waves), binding.count, binding.subchunk, binding.align);
    (kept < elements.end - elements.start).then_some(kept)
}

/// The elements of the block that a step moves; `None` if `blocks` is empty.
fn block_of(step: &Step, rank: Rank, blocks: &BlockLayout) -> Option<Range<u64>> {
    match &*step.body {
        Body::Send { peers, .. } => blocks.sends.get(*peers.first()?).cloned(),
        Body::Combine { operands, .. } => match operands.first()? {
            OperandSource::Received { peer } => blocks.receives.get(*peer).cloned(),
            OperandSource::Own { .. } => blocks.receives.get(rank).cloned(),
        },
    }
}
