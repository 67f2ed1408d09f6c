//! From a schedule to the program of one rank.
//!
//! Owns the choice how a group's data meets: in a chain, where each participant adds its own part and hands
//! the sum on, or in a direct exchange, where everybody sends to the root and the root adds all in one pass.
//! Owns what each collective makes of the levels, too. Must not know which planner made the schedule.

mod step_builder;
mod transfers;

use super::Rank;
use super::fraction::{Fraction, Span};
use super::program::{Program, ProgramParts, Waves, Windows};
use super::schedule::{Group, ParticipantSet, Schedule, Shard};
use super::topology::Topology;
use crate::call::Collective;
use crate::config::Lowering;
use std::collections::HashMap;
use std::sync::Arc;
use step_builder::StepBuilder;
use transfers::{RankLowering, TransferOp, chain_len};

/// How the parts of a group's span meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangePattern {
    /// From participant to participant, the root last.
    Chain,
    /// From every participant to the root at once.
    Direct,
}

/// Between nodes, at most this many participants send to one root at once; more are chained, because
/// each of them would get that fraction of the root's link only.
const DIRECT_BETWEEN_NODES: usize = 16;

/// How many sub-chunks of the vector each hop of a program in waves is ahead of the next one, all shards together.
/// The lead hides the way to a peer and back, switches' queues included; but sums that come late leave a tail.
/// Measured with sub-chunks of 128 KiB of 64 MiB behind links of 1 Gbit/s with queues of up to 100 ms, as the
/// link's bound over the time: 1+1+1 with a slow node 0.97 with 8, 0.98 with 16, 0.99 with 32; 4+4+4 0.966 with
/// 32, 0.955 with 48, 0.95 with 96, 0.93 with 192.
const LEAD: u64 = 32;
/// The least that still lets a message come while the one before it is used.
const LEAST_LAG: u64 = 2;

/// How the groups of `cast` are lowered. Within a node a direct exchange touches memory least: each of k
/// contributions is read once and one sum is written. Between nodes with one participant each it moves what a
/// chain moves, in fewer steps. Where a node holds several participants only a chain crosses each node's link
/// but once.
#[must_use]
pub fn pattern_of(set: &ParticipantSet, topology: &Topology, setting: Lowering) -> ExchangePattern {
    match setting {
        Lowering::Chain => return ExchangePattern::Chain,
        Lowering::Direct => return ExchangePattern::Direct,
        Lowering::Auto => {}
    }
    let mut place_of_node = HashMap::new();
    let mut apart = true;
    for (rank, place) in set.members() {
        apart &= *place_of_node.entry(topology.node_of(rank)).or_insert(place) == place;
    }
    if place_of_node.len() == 1 || (apart && set.len() <= DIRECT_BETWEEN_NODES) {
        ExchangePattern::Direct
    } else {
        ExchangePattern::Chain
    }
}

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramSpec {
    /// Which collective.
    pub collective: Collective,
    /// The rank that a broadcast begins at or a reduce ends at.
    pub root: Rank,
    /// Whether each rank's own contribution is multiplied with its factor before anybody uses it.
    pub prescale: bool,
    /// Whether all contributions to an element are added in the order of the ranks, by its owner in one pass,
    /// whatever the schedule.
    pub reproducible: bool,
    /// Whether shards are longer than a sub-chunk, so that their sub-chunks travel in waves, each through all
    /// levels on its own. Otherwise spans are sent whole, in as few messages as there are.
    pub by_wave: bool,
    /// Whether every rank adds all contributions itself, in the order of the ranks, so that an all-reduce is one
    /// hop: for vectors so short that hops take the time. Not with factors.
    pub one_shot: bool,
}

impl ProgramSpec {
    /// An all-reduce with nothing special.
    pub const ALL_REDUCE: Self = Self {
        collective: Collective::AllReduce,
        root: 0,
        prescale: false,
        reproducible: false,
        by_wave: false,
        one_shot: false,
    };

    /// Which part of the vector `rank` gives and gets.
    #[must_use]
    pub fn windows(&self, rank: Rank, world: usize) -> Windows {
        let nothing = Span { start: Fraction::ZERO, end: Fraction::ZERO };
        let own = Span::part(rank, world);
        let at_root = if rank == self.root { Span::WHOLE } else { nothing };
        let (input, output) = match self.collective {
            Collective::AllReduce => (Span::WHOLE, Span::WHOLE),
            Collective::ReduceScatter => (Span::WHOLE, own),
            Collective::AllGather => (own, Span::WHOLE),
            Collective::Broadcast => (at_root, Span::WHOLE),
            Collective::Reduce => (Span::WHOLE, at_root),
        };
        Windows { input, output, disjoint: self.one_shot }
    }
}

/// A schedule with everything that is decided once for all ranks and all purposes.
#[derive(Clone, Debug)]
pub struct Plan {
    schedule: Schedule,
    /// By level and group.
    patterns: Vec<Vec<ExchangePattern>>,
    /// By level, how many hops its longest group takes.
    hops: Vec<u32>,
    digest: u64,
    longest_shard: f64,
}

impl Plan {
    /// Decides the form of every group by `form`, which must say the same on all ranks.
    #[must_use]
    pub fn new(schedule: Schedule, mut pattern: impl FnMut(&Group) -> ExchangePattern) -> Self {
        let mut digest = schedule.digest();
        let (mut patterns, mut hops) = (Vec::new(), Vec::new());
        for level in schedule.levels() {
            let of_level: Vec<ExchangePattern> = level.groups().iter().map(&mut pattern).collect();
            let mut longest = 0;
            for (group, pattern) in level.groups().iter().zip(&of_level).filter(|(group, _)| group.moves()) {
                digest = digest.rotate_left(5) ^ (*pattern as u64 + 1);
                longest = longest.max(match pattern {
                    ExchangePattern::Direct => 1,
                    ExchangePattern::Chain => chain_len(group) - 1,
                });
            }
            patterns.push(of_level);
            hops.push(longest as u32);
        }
        let longest_shard = schedule.shards().iter().map(|shard| shard.span.extent()).fold(0.0, f64::max);
        Self { schedule, patterns, hops, digest, longest_shard }
    }

    /// Decides the forms by [`pattern_of`].
    #[must_use]
    pub fn on(schedule: Schedule, topology: &Topology, setting: Lowering) -> Self {
        let mut last: Option<(Arc<ParticipantSet>, ExchangePattern)> = None;
        Self::new(schedule, |group| match &last {
            Some((set, pattern)) if Arc::ptr_eq(set, &group.set) => *pattern,
            _ => last.insert((Arc::clone(&group.set), pattern_of(&group.set, topology, setting))).1,
        })
    }

    /// The schedule.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Equal on all ranks that planned the same.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The largest part of the vector that ends in one segment at one rank.
    #[must_use]
    pub fn longest_shard(&self) -> f64 {
        self.longest_shard
    }

    /// The program of `rank`. Costs what that rank does, not what the world does.
    #[must_use]
    pub fn program(&self, rank: Rank, spec: ProgramSpec) -> Program {
        let lowering = RankLowering { plan: self, rank, spec, segments: self.segments(spec) };
        let mut transfers = lowering.transfers();
        transfers.sort_by_key(|transfer| (transfer.depth, transfer.group, transfer.segment.span.start));
        let windows = spec.windows(rank, self.schedule.world());
        let mut builder = StepBuilder::new(rank, spec);
        for transfer in transfers {
            let span = transfer.segment.span;
            builder.at = (if spec.by_wave { transfer.segment.grid } else { span }, transfer.depth);
            match transfer.op {
                TransferOp::Send(peers) => builder.send(span, peers),
                TransferOp::Reduce(order) => builder.reduce(span, &order, transfer.completes),
                TransferOp::Copy(from) => builder.copy(span, from),
            }
        }
        // What nobody else has to do with: a world of one, or the caller's own part of a gathered vector.
        let mine = windows.input.intersection(windows.output);
        if !mine.is_empty() {
            builder.keep(mine);
        }
        let kind = (spec.collective as u64) << 8
            | u64::from(spec.prescale) << 1
            | u64::from(spec.reproducible) << 2
            | u64::from(spec.by_wave) << 3
            | u64::from(spec.one_shot) << 4;
        Program::assemble(ProgramParts {
            rank,
            world: self.schedule.world(),
            digest: self.digest ^ (kind ^ (spec.root as u64) << 16).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            waves: spec.by_wave.then(|| Waves {
                longest: self.longest_shard,
                lag: (LEAD / self.schedule.shards().len() as u64).max(LEAST_LAG),
            }),
            windows,
            steps: builder.steps,
            depends: builder.depends,
        })
    }

    /// Where spans are cut: at the ends of shards, so that each shard's sub-chunks are a grid of their own, and at
    /// the ends of what a caller gives or gets. Spans that are sent whole are cut only where one part of them is
    /// complete at another level than the rest.
    fn segments(&self, spec: ProgramSpec) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        if spec.one_shot {
            return vec![Segment { span: Span::WHOLE, grid: Span::WHOLE, shard: self.schedule.shards()[0] }];
        }
        for shard in self.schedule.shards() {
            match segments.last_mut() {
                Some(last) if !spec.by_wave && last.shard.level == shard.level => {
                    last.span.end = shard.span.end
                }
                _ => segments.push(Segment { span: shard.span, grid: shard.span, shard: *shard }),
            }
        }
        if !matches!(spec.collective, Collective::ReduceScatter | Collective::AllGather) {
            return segments;
        }
        let world = self.schedule.world();
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
}

/// A part of the vector that all steps treat as one.
#[derive(Clone, Copy, Debug)]
struct Segment {
    span: Span,
    /// What its sub-chunks are a grid of.
    grid: Span,
    shard: Shard,
}
