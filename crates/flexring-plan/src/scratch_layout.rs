//! Where the elements that a program keeps in scratch memory are, in one call.
//!
//! Owns the places. Must not know pieces or devices, nor which elements are kept: that is [`ScratchSpan`]'s.

use super::call_layout::{CallFacts, binding, binding_by_node};
use super::pipeline::Binding;
use super::program::{Program, ScratchSpan};
use std::ops::Range;

fn elements_of(scratch: &ScratchSpan, program: &Program, binding: &Binding) -> (Range<u64>, u64) {
    scratch.elements(program.waves.as_ref(), binding.count, binding.subchunk, binding.align)
}

/// Where the elements that a program keeps in scratch memory are, in one call.
#[derive(Debug, Default)]
pub struct ScratchLayout {
    /// The elements of each of the program's spans there, in rising order, with the place of the first and
    /// the length of the ring.
    spans: Vec<(Range<u64>, u64, u64)>,
    /// Number of elements for which there is memory.
    count: u64,
}

impl ScratchLayout {
    /// Lays out a call of a program.
    pub fn lay_out(&mut self, program: &Program, binding: &Binding) {
        self.spans.clear();
        self.count = 0;
        for scratch in &program.scratch {
            let (elements, kept) = elements_of(scratch, program, binding);
            self.spans.push((elements, self.count, kept));
            self.count += kept;
        }
    }

    /// Number of elements for which there is memory.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The place of an element. Those of a sub-chunk are one after the other.
    ///
    /// # Panics
    /// If the element is not in scratch memory.
    #[must_use]
    pub fn place_of(&self, element: u64) -> u64 {
        let after = self.spans.partition_point(|(elements, ..)| elements.start <= element);
        let (elements, first, kept) = &self.spans[after - 1];
        assert!(elements.contains(&element), "element {element} is not in scratch memory");
        first + (element - elements.start) % kept
    }
}

/// Bytes of scratch memory that a call of `program` needs.
#[must_use]
pub fn scratch_bytes(program: &Program, facts: &CallFacts) -> usize {
    // The dummy element of a call without elements is in a spare slot.
    if program.scratch.is_empty() || facts.count == 0 {
        return 0;
    }
    let binding = if program.blocks.is_some() { binding_by_node(facts) } else { binding(facts) };
    let kept = |scratch: &ScratchSpan| elements_of(scratch, program, &binding).1;
    program.scratch.iter().map(kept).sum::<u64>() as usize * facts.element_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_layout::CallLayout;
    use crate::fraction::Span;
    use crate::lowering::{Movement, Plan, ProgramSpec};
    use crate::planner::{flexreduce, ring};
    use crate::program::Waves;
    use crate::topology::Topology;
    use flexring_core::call::Collective;
    use flexring_core::config::Lowering;

    /// A call of floats on five ranks, in slots of 1 KiB.
    fn facts(collective: Collective, count: u64) -> CallFacts {
        CallFacts {
            collective,
            count,
            element_bytes: 4,
            world: 5,
            in_place: false,
            output_bytes: 0,
            slot_bytes: 1 << 10,
        }
    }

    /// The programs of five ranks on two nodes by several plans.
    fn programs(collective: Collective, movement: Movement) -> Vec<Program> {
        let topology = Topology::from_names(&["a", "a", "a", "b", "b"]);
        let schedules = [ring::plan(&topology), flexreduce::plan(&topology).expect("a small tree")];
        let plans = schedules.iter().flat_map(|schedule| {
            Lowering::ALL.iter().map(|lowering| Plan::on(schedule.clone(), &topology, *lowering))
        });
        let spec = ProgramSpec { collective, root: 1, movement, ..ProgramSpec::ALL_REDUCE };
        plans.flat_map(|plan| (0..5).map(move |rank| plan.program(rank, spec))).collect()
    }

    const REDUCTIONS: [Collective; 3] =
        [Collective::ReduceScatter, Collective::Reduce, Collective::AllReduce];

    #[test]
    fn the_bytes_of_scratch_memory_are_those_that_are_laid_out() {
        let mut longest = 0;
        for (collective, movement) in
            REDUCTIONS.iter().flat_map(|it| [(*it, Movement::Spans), (*it, Movement::Waves)])
        {
            for program in programs(collective, movement) {
                for count in [1, 7, 1200, 5 << 10, (5 << 10) + 5, 5 << 20] {
                    let facts = facts(collective, count);
                    let layout = CallLayout::of_program(&facts, &program).expect("few sub-chunks");
                    let mut scratch = ScratchLayout::default();
                    scratch.lay_out(&program, &layout.binding);
                    let bytes = scratch_bytes(&program, &facts);
                    assert_eq!(bytes, scratch.count() as usize * facts.element_bytes);
                    assert_eq!(scratch_bytes(&program, &CallFacts { count: 0, ..facts }), 0);
                    longest = longest.max(bytes);
                }
            }
        }
        assert!(longest > 0, "some program uses scratch memory");
    }

    #[test]
    fn elements_of_spans_without_waves_have_places_of_their_own() {
        let spans = programs(Collective::ReduceScatter, Movement::Spans);
        for program in spans.iter().filter(|program| !program.scratch.is_empty()) {
            let binding = binding(&facts(Collective::ReduceScatter, 605));
            let mut scratch = ScratchLayout::default();
            scratch.lay_out(program, &binding);
            let elements = program
                .scratch
                .iter()
                .flat_map(|scratch| scratch.elements(None, binding.count, binding.subchunk, binding.align).0);
            let places: Vec<u64> = elements.map(|element| scratch.place_of(element)).collect();
            assert_eq!(places, (0..scratch.count()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn scratch_memory_in_waves_does_not_grow_with_the_vector() {
        for program in programs(Collective::ReduceScatter, Movement::Waves)
            .into_iter()
            .chain(programs(Collective::Reduce, Movement::Waves))
        {
            let bytes = |count| scratch_bytes(&program, &facts(Collective::Reduce, count)) >> 10;
            // Twice the lead of 32 sub-chunks for each of up to four hops, and one or two more for each span.
            let most = 2 * 32 * 4 + 2 * program.scratch.len();
            assert!(bytes(5 << 20) <= most, "{} KiB of {:?}", bytes(5 << 20), program.scratch);
            assert!(bytes(5 << 24).abs_diff(bytes(5 << 20)) <= program.scratch.len());
        }
    }

    #[test]
    fn messages_of_the_earlier_sub_chunk_at_a_place_are_due_first() {
        let due = |sub: u64, waves: u64, cells: u64, lag: u64, hop: u64| sub * waves / cells + lag * hop;
        for (longest, extent) in [(8, 8), (8, 1), (7, 3), (100, 99), (1, 1)] {
            for (lag, hops, subchunk) in [(1, 1, 1), (2, 0, 3), (2, 3, 2), (5, 1, 7), (1, 2, 64)] {
                let span = Span::part(0, 100 / extent);
                let waves = Waves { longest: f64::from(longest) / 100.0, lag };
                let scratch = ScratchSpan { span, hops };
                let (elements, kept) = scratch.elements(Some(&waves), 10_000, subchunk, 1);
                let (cells, number) = (elements.end.div_ceil(subchunk), waves.number(10_000, subchunk));
                if kept == elements.end {
                    continue;
                }
                let ring = kept / subchunk;
                assert_eq!(kept % subchunk, 0, "a sub-chunk has one place");
                for sub in ring..cells {
                    let last = due(sub - ring, number, cells, lag, u64::from(hops));
                    assert!(last < due(sub, number, cells, lag, 0), "{scratch:?} {waves:?} {subchunk}");
                }
            }
        }
    }
}
