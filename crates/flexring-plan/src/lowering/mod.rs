//! The lowering turns a schedule into the program of one rank.
//!
//! Owns how a group becomes sends and additions, and what each collective does with the levels. Must not know
//! which planner made the schedule.
//!
//! Gather, scatter and all-to-all are one level of groups of one participant each, whose data goes straight
//! to the root; the lowering derives these groups from the number of ranks, because a schedule would list one
//! for each pair of ranks. The blocks of an all-to-all are spans of one vector like any other, but their
//! lengths are bound with the call ([`BlockLayout`](super::pipeline::BlockLayout)), because no rank knows the
//! lengths of all of them. Equal blocks may also go by node, in three levels of such groups: to a rank of the
//! source's node, to one of the destination's, to the destination. They have an order of their own then
//! ([`BlockOrder`]).
//!
//! | module | owns |
//! |---|---|
//! | `exchange` | chain or direct exchange, for each group |
//! | `by_node` | the all-to-all with one message for each pair of nodes |
//! | `program_classes` | which ranks have equal programs but for spans and peers |
//! | `program_spec` | the collective and its variants |
//! | `segment` | where the vector is cut |
//! | `transfers` | the sends and receives of one rank, by depth |
//! | `step_builder` | the steps of the program, and their dependencies |

mod by_node;
mod exchange;
mod program_classes;
mod program_spec;
mod segment;
mod step_builder;
mod transfers;

pub(crate) use exchange::chain_before_root;
pub use exchange::{ExchangePattern, chain_len, chain_rank, pattern_of};
pub use program_classes::{ProgramClass, ProgramClasses};
pub use program_spec::{HeldPart, Movement, ProgramSpec};

use super::Rank;
use super::block_order::BlockOrder;
use super::fraction::Fraction;
use super::program::{Program, ProgramParts, SharedSteps, Waves};
use super::schedule::{Group, Level, ParticipantSet, Schedule};
use super::topology::Topology;
use flexring_core::config::Lowering;
use segment::{Segment, group_starts, segments};
use std::sync::Arc;
use step_builder::StepBuilder;
use transfers::{RankLowering, Transfer, TransferOp};
use twox_hash::XxHash3_64;

/// Sub-chunks of the whole vector, summed over all shards, by which each hop of a program in waves is ahead
/// of the next. The lead hides the round trip to a peer, queues in switches included, but sums that come late
/// cost a tail at the end. Measured with sub-chunks of 128 KiB of 64 MiB over links of 1 Gbit/s with queues
/// of up to 100 ms, as the bound of the link divided by the time: 1+1+1 with a slow node 0.97 with 8, 0.98
/// with 16, 0.99 with 32; 4+4+4 0.966 with 32, 0.955 with 48, 0.95 with 96, 0.93 with 192.
const LEAD: f64 = 32.0;
/// The smallest lag, in waves, with which a message can arrive while the previous one is used.
const MIN_LAG: u64 = 2;

/// A schedule with all decisions that are equal for all ranks and all specs.
#[derive(Clone, Debug)]
pub struct Plan {
    schedule: Schedule,
    /// By level and group.
    patterns: Vec<Vec<ExchangePattern>>,
    /// By level, the hops of its longest group.
    hops: Vec<u32>,
    digest: u64,
    /// Where groups start, in rising order.
    group_starts: Vec<Fraction>,
    longest_shard: f64,
    /// The order of the blocks of an all-to-all by node, if the nodes are known.
    blocks: Option<Arc<BlockOrder>>,
}

impl Plan {
    /// A plan with the exchange pattern that `pattern` returns for each group. It must return the same on all
    /// ranks.
    #[must_use]
    pub fn new(schedule: Schedule, mut pattern: impl FnMut(&Group) -> ExchangePattern) -> Self {
        let mut digest = schedule.digest();
        let (mut patterns, mut hops) = (Vec::new(), Vec::new());
        for level in schedule.levels() {
            let of_level: Vec<ExchangePattern> = level.groups().iter().map(&mut pattern).collect();
            let mut longest = 0;
            for (group, pattern) in level.groups().iter().zip(&of_level).filter(|(group, _)| group.moves()) {
                // A hash, so that equal patterns of two groups do not cancel each other.
                digest = XxHash3_64::oneshot(&(digest ^ (*pattern as u64 + 1)).to_le_bytes());
                longest = longest.max(match pattern {
                    ExchangePattern::Direct => 1,
                    ExchangePattern::Chain => chain_len(group) - 1,
                });
            }
            patterns.push(of_level);
            hops.push(longest as u32);
        }
        let longest_shard = schedule.shards().iter().map(|shard| shard.span.extent()).fold(0.0, f64::max);
        let group_starts = group_starts(&schedule);
        Self { schedule, patterns, hops, digest, group_starts, longest_shard, blocks: None }
    }

    /// A plan with the exchange patterns of [`pattern_of`].
    #[must_use]
    pub fn on(schedule: Schedule, topology: &Topology, setting: Lowering) -> Self {
        let mut last: Option<(Arc<ParticipantSet>, ExchangePattern)> = None;
        let plan = Self::new(schedule, |group| match &last {
            Some((set, pattern)) if Arc::ptr_eq(set, &group.set) => *pattern,
            _ => last.insert((Arc::clone(&group.set), pattern_of(&group.set, topology, setting))).1,
        });
        plan.with_nodes(topology)
    }

    /// The plan with the nodes of `topology`, by which the blocks of an all-to-all can go.
    #[must_use]
    pub fn with_nodes(self, topology: &Topology) -> Self {
        Self { blocks: Some(Arc::new(BlockOrder::by_node(topology))), ..self }
    }

    /// Whether programs can have [`Movement::ByNode`].
    #[must_use]
    pub fn knows_nodes(&self) -> bool {
        self.blocks.is_some()
    }

    /// The schedule that the plan was made from.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The levels, each with the exchange patterns of its groups.
    pub(crate) fn levels(&self) -> impl Iterator<Item = (&Level, &[ExchangePattern])> {
        self.schedule.levels().iter().zip(self.patterns.iter().map(Vec::as_slice))
    }

    /// The length of the longest shard, as a part of the vector.
    pub(crate) fn longest_shard(&self) -> f64 {
        self.longest_shard
    }

    /// Equal on ranks whose schedules and exchange patterns are equal.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether shards of a vector of this many bytes are longer than a sub-chunk, so that calls move in
    /// waves.
    #[must_use]
    pub fn moves_in_waves(&self, bytes: u64, subchunk: usize) -> bool {
        self.longest_shard * bytes as f64 > subchunk as f64
    }

    /// The program of `rank`. The cost depends on the steps of that rank, not on the size of the world.
    ///
    /// # Panics
    /// If blocks must go by node, and the plan has no nodes.
    #[must_use]
    pub fn program(&self, rank: Rank, spec: ProgramSpec) -> Program {
        self.program_sharing(rank, spec, &mut SharedSteps::default())
    }

    fn lowering_of<'a>(&'a self, rank: Rank, spec: ProgramSpec, segments: &'a [Segment]) -> RankLowering<'a> {
        RankLowering {
            schedule: &self.schedule,
            patterns: &self.patterns,
            hops: &self.hops,
            rank,
            spec,
            segments,
            blocks: self.blocks.as_deref().filter(|_| spec.by_node()),
        }
    }

    /// [`program`](Self::program), for callers that need the programs of many ranks: they share memory
    /// through `shared`.
    ///
    /// # Panics
    /// If blocks must go by node, and the plan has no nodes.
    #[must_use]
    pub fn program_sharing(&self, rank: Rank, spec: ProgramSpec, shared: &mut SharedSteps) -> Program {
        let world = self.schedule.world();
        let order = || self.blocks.as_ref().expect("the plan knows the nodes");
        let blocks = spec.by_node().then(order);
        let segments = segments(&self.schedule, &self.group_starts, spec);
        let lowering = self.lowering_of(rank, spec, &segments);
        let mut transfers = lowering.transfers();
        // Both ends of a link list its messages by group and span. Sends come before receives, so that the
        // programs of a ring's ranks differ by a rotation only.
        let key = |transfer: &Transfer| {
            (transfer.depth, transfer.op.receives(), transfer.group, transfer.segment.span.start)
        };
        transfers.sort_by_key(key);
        let held_spans = spec.held_spans(rank, world);
        let mut builder = StepBuilder::new(rank, spec, held_spans.disjoint, shared);
        for transfer in transfers {
            let span = transfer.segment.span;
            builder.set_position(span, transfer.depth, transfer.group as u32);
            match transfer.op {
                TransferOp::Send(peers) => builder.send(span, peers),
                TransferOp::Reduce(order) => builder.reduce(span, &order, transfer.completes),
                TransferOp::Copy(from) => builder.copy(span, from),
                TransferOp::PassOn(from) => builder.pass_on(span, from),
                TransferOp::Forward(to) => builder.forward(span, to),
                TransferOp::Deliver => builder.deliver(span),
            }
        }
        // Data that no other rank touches: all of it in a world of one, or the caller's own part of an
        // all-gather. Helpers have none.
        let mine = blocks.map_or_else(|| spec.kept(rank, world), |blocks| blocks.block(rank, rank));
        if !mine.is_empty() && !self.schedule.helpers().contains(&rank) {
            builder.keep(mine);
        }
        let order = blocks.map_or(0, |blocks| blocks.digest());
        let kind = spec.variant() ^ ((spec.root as u64) << 16) ^ order;
        Program::assemble(ProgramParts {
            rank,
            world,
            digest: self.digest ^ kind.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            waves: spec.in_waves().then(|| Waves {
                longest: self.longest_shard,
                // A wave has 1 / longest_shard sub-chunks on average.
                lag: ((LEAD * self.longest_shard) as u64).max(MIN_LAG),
            }),
            held_spans,
            blocks: blocks.map(Arc::clone),
            steps: builder.steps,
            depends: builder.depends,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fraction::Span;
    use crate::planner::{flexreduce, ring};
    use crate::program::{Body, Step};
    use flexring_core::call::Collective;

    /// The program of each of four ranks on one node for a collective with root 1, by a ring.
    fn programs(collective: Collective, lowering: Lowering) -> Vec<Program> {
        let topology = Topology::from_names(&["a"; 4]);
        let plan = Plan::on(ring::plan(&topology), &topology, lowering);
        let root = if collective.has_root() { 1 } else { 0 };
        let spec = ProgramSpec { collective, root, ..ProgramSpec::ALL_REDUCE };
        (0..4).map(|rank| plan.program(rank, spec)).collect()
    }

    /// The length of all that ranks send to a rank, in vectors.
    fn received(programs: &[Program], rank: Rank) -> f64 {
        let to_rank = |step: &Step| matches!(&*step.body, Body::Send { peers, .. } if peers.contains(&rank));
        let steps = programs.iter().flat_map(|program| &program.steps);
        steps.filter(|step| to_rank(step)).map(|step| step.span().extent()).sum()
    }

    #[test]
    fn ranks_receive_what_they_need_only() {
        for lowering in [Lowering::Direct, Lowering::Chain] {
            let broadcast = programs(Collective::Broadcast, lowering);
            assert_eq!(
                (0..4).map(|rank| received(&broadcast, rank)).collect::<Vec<_>>(),
                [1.0, 0.0, 1.0, 1.0]
            );
            let gather = programs(Collective::Gather, lowering);
            assert_eq!((0..4).map(|rank| received(&gather, rank)).collect::<Vec<_>>(), [0.0, 0.75, 0.0, 0.0]);
            let scatter = programs(Collective::Scatter, lowering);
            let quarters = [0.25, 0.0, 0.25, 0.25];
            assert_eq!((0..4).map(|rank| received(&scatter, rank)).collect::<Vec<_>>(), quarters);
        }
    }

    #[test]
    fn only_partial_sums_of_other_ranks_parts_need_scratch_memory() {
        let lengths = |collective, lowering| -> Vec<f64> {
            let scratch =
                |program: &Program| program.scratch.iter().map(|scratch| scratch.span.extent()).sum();
            programs(collective, lowering).iter().map(scratch).collect()
        };
        assert_eq!(lengths(Collective::ReduceScatter, Lowering::Direct), [0.0; 4]);
        // A chain of four ranks has two in the middle, which add to each part that is not theirs.
        assert_eq!(lengths(Collective::ReduceScatter, Lowering::Chain), [0.5; 4]);
        assert_eq!(lengths(Collective::AllReduce, Lowering::Chain), [0.0; 4]);
        assert_eq!(lengths(Collective::AllToAll, Lowering::Chain), [0.0; 4]);
    }

    #[test]
    fn steps_write_the_output_and_scratch_memory_only() {
        let topology = Topology::from_names(&["a", "a", "a", "b", "b"]);
        let schedules = [ring::plan(&topology), flexreduce::plan(&topology).expect("a small tree")];
        for (schedule, lowering) in schedules
            .iter()
            .flat_map(|schedule| Lowering::ALL.iter().map(move |lowering| (schedule, lowering)))
        {
            let plan = Plan::on(schedule.clone(), &topology, *lowering);
            for (collective, prescale) in
                [Collective::ReduceScatter, Collective::Reduce].into_iter().zip([false, true])
            {
                let spec = ProgramSpec { collective, prescale, ..ProgramSpec::ALL_REDUCE };
                for program in (0..5).map(|rank| plan.program(rank, spec)) {
                    let held = |span: Span| {
                        let is_in = |whole: &Span| whole.start <= span.start && span.end <= whole.end;
                        is_in(&program.held_spans.output)
                            || program.scratch.iter().any(|scratch| is_in(&scratch.span))
                    };
                    for step in program.steps.iter().filter(|step| matches!(*step.body, Body::Combine { .. }))
                    {
                        assert!(held(step.span()), "rank {}: {step:?}: {:?}", program.rank, program.scratch);
                    }
                    assert!(program.scratch.is_sorted_by(|left, right| left.span.end <= right.span.start));
                    let output = program.held_spans.output;
                    assert!(
                        program.scratch.iter().all(|scratch| scratch.span.intersection(output).is_empty())
                    );
                }
            }
        }
    }
}
