//! How a call is laid out: the length and alignment of its sub-chunks, and which memory is staged.
//!
//! Owns these rules, as pure functions of facts that the executor collects.

use super::block_order::BlockOrder;
use super::pipeline::{Binding, BlockLayout, LinkProfile, Staging};
use super::program::{BufferKind, HeldSpans, Program};
use super::thresholds::STREAMING_BYTES;
use flexring_core::call::{BlockCounts, Collective};
use flexring_core::error::{Error, Result};
use std::ops::Range;

/// Bytes of a cache line, to which spans are aligned.
const CACHE_LINE: usize = 64;

/// Cache lines of a rank's share of the vector from which spans are aligned.
const MIN_ALIGNED_LINES: u64 = 16;

/// Sub-chunks of one vector, at most. The pipeline counts those of a step with 32 bits.
const MAX_SUBCHUNKS: u64 = (1 << 30) - 1;

/// What a call's layout depends on.
#[derive(Clone, Copy, Debug)]
pub struct CallFacts {
    /// The collective that is called.
    pub collective: Collective,
    /// Elements of the whole vector; may be 0.
    pub count: u64,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Ranks of the communicator.
    pub world: usize,
    /// Whether input and output share memory.
    pub in_place: bool,
    /// Bytes of this rank's output.
    pub output_bytes: usize,
    /// Bytes of a sub-chunk: a slot of the pool.
    pub slot_bytes: usize,
}

/// How a program's elements are laid out in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallLayout {
    /// What the pipeline is bound to. A call without elements moves one dummy element, so that a mismatch
    /// between ranks reaches every peer.
    pub binding: Binding,
    /// The elements of the whole vector that the caller's input holds.
    pub input: Range<u64>,
    /// The elements of the whole vector that the caller's output holds.
    pub output: Range<u64>,
    /// Whether the input must be copied to other memory first: it shares memory with the output, and peers
    /// may read it until the output is complete.
    pub copies_input: bool,
    /// Whether sums are written with non-temporal stores.
    pub streaming: bool,
}

impl CallLayout {
    /// The layout of an all-to-all of `rank`, whose blocks are `counts`, one after the other in the order of
    /// ranks in each vector. Writes the place of each block to `blocks`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_blocks(
        facts: &CallFacts,
        counts: &BlockCounts,
        rank: usize,
        blocks: &mut BlockLayout,
    ) -> Result<Self> {
        let place = |ranges: &mut Vec<Range<u64>>, count: &dyn Fn(usize) -> u64| {
            ranges.clear();
            let mut next = 0;
            ranges.extend((0..facts.world).map(|peer| {
                let start = next;
                next += count(peer);
                start..next
            }));
            next
        };
        let sent = place(&mut blocks.sends, &|peer| counts.sent_to(peer));
        let received = place(&mut blocks.receives, &|peer| counts.received_from(peer));
        // The block that stays on this rank has the same elements in both vectors.
        let (sent_at, received_at) = (blocks.sends[rank].start, blocks.receives[rank].start);
        let (input, output) = (received_at.saturating_sub(sent_at), sent_at.saturating_sub(received_at));
        let shift = |ranges: &mut Vec<Range<u64>>, by: u64| {
            ranges.iter_mut().for_each(|range| *range = range.start + by..range.end + by);
        };
        shift(&mut blocks.sends, input);
        shift(&mut blocks.receives, output);
        // Ranks know different counts, and the two ends of a link must cut a block at the same places.
        let subchunk = (facts.slot_bytes / facts.element_bytes) as u64;
        check_subchunks(sent.max(received), subchunk, facts.element_bytes)?;
        Ok(Self {
            binding: Binding { count: facts.count, subchunk, align: 1, in_place: false },
            input: input..input + sent,
            output: output..output + received,
            copies_input: false,
            streaming: facts.output_bytes > STREAMING_BYTES,
        })
    }

    /// The layout of an all-to-all of equal blocks that go by node: the vector has the blocks of all ranks.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn by_node(facts: &CallFacts) -> Result<Self> {
        let binding = binding_by_node(facts);
        check_subchunks(binding.count, binding.subchunk, facts.element_bytes)?;
        Ok(Self {
            binding,
            input: 0..facts.count,
            output: 0..facts.count,
            copies_input: false,
            streaming: false,
        })
    }

    /// The place of an element in one of the caller's vectors; `None` if it is in scratch memory. `blocks` is
    /// the program's.
    #[must_use]
    #[inline]
    pub fn place_of(&self, buffer: BufferKind, element: u64, blocks: Option<&BlockOrder>) -> Option<u64> {
        let held = match buffer {
            BufferKind::Input => &self.input,
            BufferKind::Output => &self.output,
            BufferKind::Transit => return None,
        };
        if let Some(blocks) = blocks {
            let length = self.binding.count / (blocks.world() * blocks.world()) as u64;
            return Some(blocks.place_of(element, length, buffer == BufferKind::Output));
        }
        // Programs cut their steps at the ends of the held spans, so a sub-chunk is wholly inside or outside.
        held.contains(&element).then(|| element - held.start)
    }

    /// The layout of a call of a program whose steps move parts of the vector.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_program(facts: &CallFacts, program: &Program) -> Result<Self> {
        if program.blocks.is_some() { Self::by_node(facts) } else { Self::new(facts, &program.held_spans) }
    }

    /// The layout of a call of a program that holds these spans.
    ///
    /// # Errors
    /// `InvalidSetting` if the vector has more sub-chunks than can be counted.
    pub fn new(facts: &CallFacts, held_spans: &HeldSpans) -> Result<Self> {
        let copies_input = facts.in_place && held_spans.disjoint;
        let binding = Binding { in_place: facts.in_place && !copies_input, ..binding(facts) };
        check_subchunks(binding.count, binding.subchunk, facts.element_bytes)?;
        Ok(Self {
            input: held_spans.input.elements(binding.count, binding.align),
            output: held_spans.output.elements(binding.count, binding.align),
            binding,
            copies_input,
            streaming: facts.output_bytes > STREAMING_BYTES,
        })
    }
}

/// Size and layout of a call whose program moves no blocks.
pub(super) fn binding(facts: &CallFacts) -> Binding {
    Binding {
        count: facts.count.max(1),
        subchunk: (facts.slot_bytes / facts.element_bytes) as u64,
        align: alignment(facts.collective, facts.count, facts.element_bytes, facts.world),
        in_place: facts.in_place,
    }
}

/// Size and layout of an all-to-all of equal blocks that go by node.
pub(super) fn binding_by_node(facts: &CallFacts) -> Binding {
    Binding {
        count: facts.count.saturating_mul(facts.world as u64),
        subchunk: (facts.slot_bytes / facts.element_bytes) as u64,
        align: 1,
        in_place: false,
    }
}

/// Refuses vectors of more sub-chunks than the pipeline can count.
fn check_subchunks(count: u64, subchunk: u64, element_bytes: usize) -> Result<()> {
    if count.div_ceil(subchunk) <= MAX_SUBCHUNKS {
        return Ok(());
    }
    let bytes = subchunk * element_bytes as u64;
    Err(Error::invalid_setting(format!(
        "{count} elements are more than {MAX_SUBCHUNKS} sub-chunks of {bytes} bytes: set FLEXRING_SUBCHUNK to a greater length on all ranks, \
         or make several shorter calls"
    )))
}

/// Spans of long vectors begin on a cache line, so that no line is written by two ranks. They are not aligned
/// if that would move the ends of the parts that the ranks' own vectors hold.
fn alignment(collective: Collective, count: u64, element_bytes: usize, world: usize) -> u64 {
    let line = (CACHE_LINE / element_bytes) as u64;
    let world = world as u64;
    let keeps_ends = !collective.has_parts() || (count / world).is_multiple_of(line);
    if keeps_ends && count >= MIN_ALIGNED_LINES * line * world { line } else { 1 }
}

/// What a link can do with one of the call's vectors, as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorAccess {
    /// Whether messages can be sent from it.
    pub can_send_from: bool,
    /// Whether messages can be received into it. True on links whose messages are read in place.
    pub can_recv_into: bool,
}

/// What a link stages. `input` is its access to the input; `output` and `scratch` are that to the memory that
/// sums are written to. `None` for a vector that this rank does not have.
#[must_use]
pub fn staging(
    input: Option<VectorAccess>,
    output: Option<VectorAccess>,
    scratch: Option<VectorAccess>,
) -> Staging {
    let written = [output, scratch];
    let any = |lacks: fn(&VectorAccess) -> bool| written.iter().flatten().any(lacks);
    Staging {
        input: input.is_some_and(|access| !access.can_send_from),
        output: any(|access| !access.can_send_from),
        recv: any(|access| !access.can_recv_into),
    }
}

/// Slots of the pool that each link may hold, if there is at least one. `slots` are those of the pool,
/// `links` those of the program.
#[must_use]
pub fn slots_per_link(slots: usize, links: usize) -> Option<usize> {
    Some(slots / links.max(1)).filter(|slots| *slots > 0)
}

/// Most messages in flight between two ranks of a node, in each direction: those that fit in a queue of
/// shared memory.
pub const IN_PLACE_WINDOW: usize = 62;

/// How messages arrive on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDelivery {
    /// They are read where the sender has them.
    InPlace,
    /// They are written to memory that was posted.
    Posted {
        /// Whether some memory of calls cannot be sent from directly.
        may_stage: bool,
    },
}

/// Divides a link's slots between the two directions. Messages that are read in place need slots only where
/// they are sent; those that are sent directly need them only where they are received. `slots` is at least 2
/// where both directions need some.
#[must_use]
pub fn link_profile(delivery: LinkDelivery, window: usize, slots: usize) -> LinkProfile {
    let (reads_in_place, send_slots) = match delivery {
        LinkDelivery::InPlace => (true, slots),
        LinkDelivery::Posted { may_stage: false } => (false, 0),
        LinkDelivery::Posted { may_stage: true } => (false, slots / 2),
    };
    LinkProfile { reads_in_place, window, send_slots, recv_slots: slots - send_slots }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fraction::Span;
    use crate::topology::Topology;
    use flexring_core::error::ErrorKind;

    const WHOLE: HeldSpans = HeldSpans { input: Span::WHOLE, output: Span::WHOLE, disjoint: false };

    /// 1 Mi floats on 4 ranks, in slots of 128 KiB.
    fn facts() -> CallFacts {
        CallFacts {
            collective: Collective::AllReduce,
            count: 1 << 20,
            element_bytes: 4,
            world: 4,
            in_place: false,
            output_bytes: 4 << 20,
            slot_bytes: 128 << 10,
        }
    }

    fn binding(facts: &CallFacts) -> Binding {
        CallLayout::new(facts, &WHOLE).expect("few sub-chunks").binding
    }

    #[test]
    fn a_subchunk_fills_a_slot() {
        for element_bytes in [1, 2, 4, 8] {
            let facts = CallFacts { element_bytes, ..facts() };
            assert_eq!(binding(&facts).subchunk, (128 << 10) / element_bytes as u64);
        }
    }

    #[test]
    fn more_sub_chunks_than_the_pipeline_can_count_are_refused() {
        // Slots of one element.
        let facts = |count| CallFacts { count, slot_bytes: 4, ..facts() };
        assert_eq!(binding(&facts(MAX_SUBCHUNKS)).count, MAX_SUBCHUNKS);
        for count in [MAX_SUBCHUNKS + 1, 1 << 32, u64::MAX] {
            let error = CallLayout::new(&facts(count), &WHOLE).expect_err("too many");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().contains(" FLEXRING_SUBCHUNK "), "{error}");
        }
        let facts = facts(MAX_SUBCHUNKS / 4 + 1);
        CallLayout::by_node(&facts).expect_err("four blocks of that length");
        let blocks = &mut BlockLayout::default();
        CallLayout::of_blocks(&facts, &BlockCounts::Equal(facts.count), 0, blocks).expect_err("four blocks");
    }

    #[test]
    fn long_vectors_are_aligned_to_cache_lines() {
        // 16 lines of 16 floats on each of 4 ranks.
        for (count, align) in [(16 * 16 * 4, 16), (16 * 16 * 4 - 1, 1), ((1 << 20) + 1, 16)] {
            assert_eq!(binding(&CallFacts { count, ..facts() }).align, align, "{count}");
        }
        assert_eq!(binding(&CallFacts { element_bytes: 8, ..facts() }).align, 8);
    }

    #[test]
    fn alignment_keeps_the_ends_of_the_ranks_parts() {
        for collective in Collective::ALL.into_iter().filter(|collective| collective.has_parts()) {
            for (part, align) in [(1 << 18, 16), ((1 << 18) + 1, 1)] {
                let facts = CallFacts { collective, count: part * 4, ..facts() };
                assert_eq!(binding(&facts).align, align, "{collective:?} with parts of {part}");
            }
        }
    }

    #[test]
    fn a_call_without_elements_moves_one() {
        let layout = CallLayout::new(&CallFacts { count: 0, output_bytes: 0, ..facts() }, &WHOLE)
            .expect("few sub-chunks");
        assert_eq!((layout.binding.count, layout.binding.align), (1, 1));
        assert_eq!((layout.input, layout.output), (0..1, 0..1));
    }

    #[test]
    fn the_block_that_stays_on_its_rank_has_the_same_elements_in_both_vectors() {
        let facts = CallFacts { collective: Collective::AllToAll, world: 3, ..facts() };
        let mut blocks = BlockLayout::default();
        let counts = BlockCounts::Listed([(2, 4), (3, 3), (0, 5)].into());
        let layout = CallLayout::of_blocks(&facts, &counts, 1, &mut blocks).expect("few sub-chunks");
        assert_eq!((layout.input, layout.output), (2..7, 0..12));
        assert_eq!(blocks.sends, [2..4, 4..7, 7..7]);
        assert_eq!(blocks.receives, [0..4, 4..7, 7..12]);
        let layout =
            CallLayout::of_blocks(&facts, &BlockCounts::Equal(7), 2, &mut blocks).expect("few sub-chunks");
        assert_eq!((layout.input, layout.output), (0..21, 0..21));
        assert_eq!(blocks.sends, blocks.receives);
    }

    #[test]
    fn blocks_that_go_by_node_have_places_by_source_and_destination() {
        let order = BlockOrder::by_node(&Topology::from_names(&["a", "b", "a"]));
        let facts = CallFacts { collective: Collective::AllToAll, world: 3, count: 15, ..facts() };
        let layout = CallLayout::by_node(&facts).expect("few sub-chunks");
        assert_eq!(layout.binding.count, 45);
        for (from, to) in (0..3).flat_map(|from| (0..3).map(move |to| (from, to))) {
            let first = order.block(from, to).elements(45, 1).start;
            let place = |buffer| layout.place_of(buffer, first + 3, Some(&order));
            assert_eq!(place(BufferKind::Input), Some(to as u64 * 5 + 3));
            assert_eq!(place(BufferKind::Output), Some(from as u64 * 5 + 3));
            assert_eq!(place(BufferKind::Transit), None);
        }
        let layout =
            CallLayout::new(&facts, &HeldSpans { input: Span::part(1, 3), ..WHOLE }).expect("few sub-chunks");
        assert_eq!(layout.place_of(BufferKind::Input, 7, None), Some(2));
        assert_eq!(layout.place_of(BufferKind::Input, 2, None), None);
    }

    #[test]
    fn an_input_that_must_stay_readable_is_copied() {
        for (in_place, disjoint, copies) in
            [(false, false, false), (false, true, false), (true, false, false), (true, true, true)]
        {
            let layout =
                CallLayout::new(&CallFacts { in_place, ..facts() }, &HeldSpans { disjoint, ..WHOLE })
                    .expect("few sub-chunks");
            assert_eq!(layout.copies_input, copies);
            assert_eq!(layout.binding.in_place, in_place && !disjoint);
        }
    }

    #[test]
    fn outputs_that_outgrow_the_cache_are_streamed() {
        for (output_bytes, streaming) in [(16 << 20, false), ((16 << 20) + 1, true)] {
            let layout =
                CallLayout::new(&CallFacts { output_bytes, ..facts() }, &WHOLE).expect("few sub-chunks");
            assert_eq!(layout.streaming, streaming);
        }
    }

    #[test]
    fn vectors_are_staged_where_a_link_cannot_use_one_of_them() {
        let access = |can_send_from, can_recv_into| Some(VectorAccess { can_send_from, can_recv_into });
        let all = access(true, true);
        assert_eq!(staging(all, all, all), Staging::default());
        assert_eq!(staging(None, None, None), Staging::default());
        assert_eq!(staging(access(false, true), all, None), Staging { input: true, ..Staging::default() });
        assert_eq!(staging(access(true, false), all, None), Staging::default(), "nothing is received there");
        for (output, scratch) in [(access(false, true), all), (all, access(false, true))] {
            assert_eq!(staging(all, output, scratch), Staging { output: true, ..Staging::default() });
        }
        for (output, scratch) in [(access(true, false), None), (all, access(true, false))] {
            assert_eq!(staging(all, output, scratch), Staging { recv: true, ..Staging::default() });
        }
    }

    #[test]
    fn links_share_the_pool_equally() {
        assert_eq!(slots_per_link(16, 3), Some(5));
        assert_eq!(slots_per_link(3, 3), Some(1));
        assert_eq!(slots_per_link(2, 3), None);
        assert_eq!(slots_per_link(16, 0), Some(16));
    }

    #[test]
    fn a_links_slots_are_divided_between_the_directions_that_need_them() {
        let slots = |delivery| {
            let profile = link_profile(delivery, 8, 5);
            assert_eq!(profile.window, 8);
            (profile.reads_in_place, profile.send_slots, profile.recv_slots)
        };
        assert_eq!(slots(LinkDelivery::InPlace), (true, 5, 0));
        assert_eq!(slots(LinkDelivery::Posted { may_stage: false }), (false, 0, 5));
        assert_eq!(slots(LinkDelivery::Posted { may_stage: true }), (false, 2, 3));
    }
}
