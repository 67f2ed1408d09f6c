//! How far each combine of a program has come in one call.
//!
//! Owns the counters, of the steps between the oldest unfinished one and the newest that has begun only:
//! programs may have millions of steps, of which few are in progress.

use super::bound_steps::BoundSteps;
use crate::program::StepId;
use std::collections::VecDeque;

/// The sub-chunks of one combine.
#[derive(Clone, Copy, Debug, Default)]
struct CombineProgress {
    /// Submitted to the device.
    issued: u32,
    done: u32,
    /// Operands of the next sub-chunk to submit that were received, before the first that was not when they
    /// were checked last.
    received: u32,
    /// Whether the operand after them is still to come.
    waits: bool,
}

/// The progress of all combines.
#[derive(Debug)]
pub(super) struct StepProgress {
    /// All combines before this step are complete.
    first: StepId,
    /// From `first` on. Steps beyond have not begun.
    begun: VecDeque<CombineProgress>,
    /// By step, one bit: whether the pipeline has queued it.
    queued: Vec<u64>,
}

impl StepProgress {
    /// The progress of a program with this many steps. Does not allocate later if `reserve`.
    pub(super) fn new(steps: usize, reserve: bool) -> Self {
        let begun = VecDeque::with_capacity(if reserve { steps } else { 0 });
        Self { first: 0, begun, queued: vec![0; steps.div_ceil(64)] }
    }

    /// Starts a call.
    pub(super) fn restart(&mut self) {
        self.first = 0;
        self.begun.clear();
        self.queued.fill(0);
    }

    /// Marks a step as queued. Whether it was not.
    pub(super) fn queue(&mut self, step: StepId) -> bool {
        let (word, bit) = (&mut self.queued[step as usize / 64], 1 << (step % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    pub(super) fn unqueue(&mut self, step: StepId) {
        self.queued[step as usize / 64] &= !(1 << (step % 64));
    }

    /// Sub-chunks of a combine that were submitted, of `subs`.
    pub(super) fn issued(&self, step: StepId, subs: u32) -> u32 {
        self.get(step).map_or(subs, |progress| progress.issued)
    }

    /// Sub-chunks of a combine that are done, of `subs`.
    pub(super) fn done(&self, step: StepId, subs: u32) -> u32 {
        self.get(step).map_or(subs, |progress| progress.done)
    }

    /// `None` if the step is complete.
    fn get(&self, step: StepId) -> Option<CombineProgress> {
        let at = step.checked_sub(self.first)?;
        Some(self.begun.get(at as usize).copied().unwrap_or_default())
    }

    /// Operands of the next sub-chunk to submit that were received, and need not be checked; `None` if the
    /// one after them was not.
    pub(super) fn received(&self, step: StepId) -> Option<u32> {
        let progress = self.get(step).unwrap_or_default();
        (!progress.waits).then_some(progress.received)
    }

    /// The next sub-chunk of a step to submit waits for this operand, and has all before it.
    pub(super) fn wait_for(&mut self, step: StepId, operand: u32) {
        let progress = self.begun(step);
        (progress.received, progress.waits) = (operand, true);
    }

    /// The next sub-chunk of a step to submit has all its operands.
    pub(super) fn all_received(&mut self, step: StepId, operands: u32) {
        self.begun(step).received = operands;
    }

    /// A message with this operand was received, perhaps for a later sub-chunk than the next.
    pub(super) fn receive(&mut self, step: StepId, operand: u32) {
        let at = step.checked_sub(self.first).map(|at| at as usize);
        if let Some(progress) = at.and_then(|at| self.begun.get_mut(at)) {
            progress.waits &= progress.received != operand;
        }
    }

    fn begun(&mut self, step: StepId) -> &mut CombineProgress {
        let at = (step - self.first) as usize;
        if at >= self.begun.len() {
            self.begun.resize(at + 1, CombineProgress::default());
        }
        &mut self.begun[at]
    }

    /// Counts a sub-chunk of a combine as submitted.
    #[inline]
    pub(super) fn issue(&mut self, step: StepId) {
        let progress = self.begun(step);
        progress.issued += 1;
        (progress.received, progress.waits) = (0, false);
    }

    /// Counts a submitted sub-chunk of a combine as done, and forgets the steps that no longer need counters.
    #[inline]
    pub(super) fn finish(&mut self, step: StepId, bound: &BoundSteps) {
        self.begun[(step - self.first) as usize].done += 1;
        while let Some(is_send) = bound.is_send(self.first) {
            let done = self.begun.front().map_or(0, |progress| progress.done);
            if !is_send && done < bound.place(self.first).subs {
                break;
            }
            self.begun.pop_front();
            self.first += 1;
        }
    }
}
