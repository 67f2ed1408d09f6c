//! The check of one call: the contents of its vectors before the call, and the expected contents afterwards.
//!
//! Owns, for every collective, which rank contributes which range and which range it must receive.

use super::collective::Extent;
use super::exact_element::ExactElement;
use super::pattern::{CheckPattern, CheckResult, compare};
use super::redop::RedOp;
use flexring_core::call::Collective;
use std::ops::Range;

/// Whether the result overwrites the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Out of place: from the send vector to the receive vector.
    OutOfPlace,
    /// In place: the receive vector holds input and result.
    InPlace,
}

/// The checks of one collective on one rank.
#[derive(Clone, Debug)]
pub struct CallCheck<T> {
    pub collective: Collective,
    pub pattern: CheckPattern<T>,
    pub rank: usize,
    pub world: usize,
    pub root: usize,
}

/// The period of the tokens. A prime, so that a token repeats at no boundary where vectors are divided.
const TOKENS: usize = 113;

impl<T: ExactElement> CallCheck<T> {
    /// The checks of `collective` with `op` on `rank` of `world`.
    pub fn new(collective: Collective, op: RedOp, root: usize, rank: usize, world: usize) -> Self {
        Self { collective, pattern: CheckPattern::new(op, world), rank, world, root }
    }

    /// The number of checks after which each rank has contributed a distinguishable value.
    pub fn rounds(&self, extent: Extent) -> usize {
        if self.collective.reduces() { self.pattern.rounds(extent.whole) } else { 1 }
    }

    /// Fills both vectors for check number `round`. What is not input is set to zero, so that stale data does
    /// not pass for a result.
    pub fn fill(
        &self,
        round: usize,
        extent: Extent,
        placement: Placement,
        send: &mut [T],
        receive: &mut [T],
    ) {
        receive[..extent.whole].fill(T::default());
        let given = self.input(extent, placement);
        let vector = if placement == Placement::OutOfPlace { send } else { receive };
        if self.collective.reduces() {
            self.pattern.fill(self.rank, round * extent.whole, &mut vector[given]);
        } else {
            let table = tokens(self.rank, 0, given.len());
            for part in vector[given].chunks_mut(table.len()) {
                part.copy_from_slice(&table[..part.len()]);
            }
        }
    }

    /// Compares both vectors with the contents expected after check number `round`.
    pub fn verify(
        &self,
        round: usize,
        extent: Extent,
        placement: Placement,
        send: &[T],
        receive: &[T],
    ) -> CheckResult {
        let Extent { whole, part } = extent;
        let first = round * whole;
        let is_root = self.rank == self.root;
        let result = match self.collective {
            Collective::AllReduce => self.pattern.verify(first, &receive[..whole]),
            Collective::ReduceScatter => {
                let own = self.rank * part;
                let at = if placement == Placement::OutOfPlace { 0 } else { own };
                self.pattern.verify(first + own, &receive[at..at + part])
            }
            Collective::AllGather => {
                self.verify_parts(|rank| verify_tokens(rank, 0, &receive[rank * part..][..part]))
            }
            Collective::Broadcast => verify_tokens(self.root, 0, &receive[..whole]),
            Collective::Gather if is_root => {
                self.verify_parts(|rank| verify_tokens(rank, 0, &receive[rank * part..][..part]))
            }
            Collective::Gather => {
                let given = self.input(extent, placement);
                let own = if placement == Placement::InPlace { given } else { 0..0 };
                let others = verify_untouched(&receive[..own.start]);
                let others = others.and(verify_untouched(&receive[own.end..whole]));
                others.and(verify_tokens(self.rank, 0, &receive[own]))
            }
            Collective::Scatter => {
                let own = self.rank * part;
                let at = if placement == Placement::OutOfPlace { 0 } else { own };
                verify_tokens(self.root, own, &receive[at..at + part])
            }
            Collective::AllToAll | Collective::AllToAllV => self
                .verify_parts(|rank| verify_tokens(rank, self.rank * part, &receive[rank * part..][..part])),
            Collective::SendRecv => {
                verify_tokens((self.rank + self.world - 1) % self.world, 0, &receive[..whole])
            }
            Collective::Barrier => CheckResult::default(),
            Collective::Reduce if is_root => self.pattern.verify(first, &receive[..whole]),
            Collective::Reduce if placement == Placement::InPlace => {
                self.pattern.verify_input(self.rank, first, &receive[..whole])
            }
            Collective::Reduce => verify_untouched(&receive[..whole]),
        };
        if placement == Placement::InPlace {
            return result;
        }
        let given = &send[self.input(extent, placement)];
        result.and(if self.collective.reduces() {
            self.pattern.verify_input(self.rank, first, given)
        } else {
            let sentence =
                |index, got, given| format!("element {index} of the input was changed from {given} to {got}");
            compare(given, &tokens(self.rank, 0, given.len()), |got, given| got == given, sentence)
        })
    }

    /// The results of `verify` for the parts that come from all ranks, together.
    fn verify_parts(&self, verify: impl FnMut(usize) -> CheckResult) -> CheckResult {
        (0..self.world).map(verify).fold(CheckResult::default(), CheckResult::and)
    }

    /// The range of this rank's input in its input vector.
    fn input(&self, Extent { whole, part }: Extent, placement: Placement) -> Range<usize> {
        match self.collective {
            Collective::AllGather | Collective::Gather if placement == Placement::InPlace => {
                self.rank * part..(self.rank + 1) * part
            }
            Collective::AllGather | Collective::Gather => 0..part,
            Collective::Broadcast | Collective::Scatter if self.rank != self.root => 0..0,
            _ => 0..whole,
        }
    }
}

/// The input of `rank` from element `first` on where it is copied and not reduced: values that differ by rank
/// and position, never 0. Returns at most `count` elements; longer vectors repeat them.
fn tokens<T: ExactElement>(rank: usize, first: usize, count: usize) -> Vec<T> {
    let step = 1 + rank / TOKENS % (TOKENS - 1);
    (first..first + count.clamp(1, TOKENS))
        .map(|at| T::distinct(1 + ((rank + at % TOKENS * step) % TOKENS) as i64))
        .collect()
}

fn verify_tokens<T: ExactElement>(rank: usize, first: usize, vector: &[T]) -> CheckResult {
    let sentence = |index, got: T, expected| {
        let absent = if got == T::default() { ": nothing was received" } else { "" };
        format!(
            "first wrong element {index} of the input of rank {rank}: got {got}, expected {expected}{absent}"
        )
    };
    compare(vector, &tokens(rank, first, vector.len()), |got, expected| got == expected, sentence)
}

fn verify_untouched<T: ExactElement>(vector: &[T]) -> CheckResult {
    let sentence =
        |index, got, _| format!("element {index} was overwritten with {got} on a rank that is not the root");
    compare(vector, &[T::default(); 1 << 10], |got, zero| got == zero, sentence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::collective;

    const EXTENT: Extent = Extent { whole: 1200, part: 400 };

    #[test]
    fn vectors_before_the_call_fail_the_check() {
        for collective in collective::measurable() {
            for placement in [Placement::OutOfPlace, Placement::InPlace] {
                let check = CallCheck::<f32>::new(collective, RedOp::Sum, 2, 1, 3);
                let (mut send, mut receive) = (vec![0.0; 1200], vec![7.0; 1200]);
                check.fill(0, EXTENT, placement, &mut send, &mut receive);
                let finding = check.verify(0, EXTENT, placement, &send, &receive);
                // Rank 1 is not the root, so it receives nothing from a reduce or gather.
                assert_eq!(
                    finding.wrong == 0,
                    matches!(collective, Collective::Reduce | Collective::Gather | Collective::Barrier),
                    "{collective:?}: {finding:?}"
                );
            }
        }
    }

    #[test]
    fn a_missing_part_is_attributed_to_its_rank() {
        let part = |rank| -> Vec<i8> { tokens(rank, 0, 400).into_iter().cycle().take(400).collect() };
        let check = CallCheck::<i8>::new(Collective::AllGather, RedOp::Sum, 0, 1, 3);
        let (mut send, mut receive) = (vec![0; 1200], vec![0; 1200]);
        check.fill(0, EXTENT, Placement::OutOfPlace, &mut send, &mut receive);
        for rank in [0, 1] {
            receive[rank * 400..][..400].copy_from_slice(&part(rank));
        }
        let finding = check.verify(0, EXTENT, Placement::OutOfPlace, &send, &receive);
        let sentence =
            "first wrong element 0 of the input of rank 2: got 0, expected 3: nothing was received";
        assert_eq!(finding, CheckResult { wrong: 400, sentence: Some(sentence.to_owned()) });
        receive[800..].copy_from_slice(&part(1));
        assert_eq!(check.verify(0, EXTENT, Placement::OutOfPlace, &send, &receive).wrong, 400);
        receive[800..].copy_from_slice(&part(2));
        send[7] += 1;
        let finding = check.verify(0, EXTENT, Placement::OutOfPlace, &send, &receive);
        assert_eq!(finding.sentence.as_deref(), Some("element 7 of the input was changed from 9 to 10"));
    }

    #[test]
    fn a_block_from_the_wrong_place_is_found() {
        let part = |first| -> Vec<i8> { tokens(2, first, 400).into_iter().cycle().take(400).collect() };
        let mut received = vec![0; 1200];
        let mut find = |collective, block: &[i8], at: usize| {
            received[at..at + 400].copy_from_slice(block);
            let check = CallCheck::<i8>::new(collective, RedOp::Sum, 2, 1, 3);
            check.verify(0, EXTENT, Placement::InPlace, &[], &received).wrong
        };
        assert_eq!(find(Collective::Scatter, &part(800), 400), 400);
        assert_eq!(find(Collective::Scatter, &part(400), 400), 0);
        assert_eq!(find(Collective::AllToAll, &part(0), 800), 1200);
        assert_eq!(find(Collective::AllToAll, &part(400), 800), 800, "blocks of the other ranks are missing");
    }

    #[test]
    fn an_overwritten_vector_of_a_rank_that_is_not_the_root_is_reported() {
        let check = CallCheck::<f64>::new(Collective::Reduce, RedOp::Max, 0, 1, 3);
        let (mut send, mut receive) = (vec![0.0; 1200], vec![0.0; 1200]);
        check.fill(0, EXTENT, Placement::OutOfPlace, &mut send, &mut receive);
        receive[1199] = 1.0;
        let finding = check.verify(0, EXTENT, Placement::OutOfPlace, &send, &receive);
        assert_eq!(finding.wrong, 1);
        assert!(
            finding.sentence.is_some_and(|sentence| sentence.starts_with("element 1199 was overwritten"))
        );
    }

    #[test]
    fn tokens_differ_between_thousands_of_ranks() {
        let all: std::collections::HashSet<Vec<u8>> = (0..5000)
            .map(|rank| tokens::<i8>(rank, 0, TOKENS).iter().map(|token| *token as u8).collect())
            .collect();
        assert_eq!(all.len(), 5000);
    }
}
