//! What a program computes: the collective and its variants.
//!
//! Owns the options that a plan's programs differ in.

use crate::Rank;
use crate::fraction::{Fraction, Span};
use crate::program::HeldSpans;
use flexring_core::call::Collective;

/// The part of the whole vector that one of a caller's vectors holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldPart {
    /// All of it.
    Whole,
    /// The rank's own of as many equal parts as there are ranks.
    Own,
    /// All of it on the root, and nothing on other ranks.
    AtRoot,
    /// Nothing.
    Nothing,
}

impl HeldPart {
    /// The parts that a caller provides and receives.
    #[must_use]
    pub fn of(collective: Collective) -> (Self, Self) {
        match collective {
            Collective::AllReduce | Collective::Barrier => (Self::Whole, Self::Whole),
            Collective::ReduceScatter => (Self::Whole, Self::Own),
            // The output of an all-to-all is every block that goes to this rank: see `receives`.
            Collective::AllGather | Collective::AllToAll | Collective::AllToAllV => (Self::Own, Self::Whole),
            Collective::Broadcast => (Self::AtRoot, Self::Whole),
            Collective::Reduce => (Self::Whole, Self::AtRoot),
            Collective::Gather => (Self::Own, Self::AtRoot),
            Collective::Scatter => (Self::AtRoot, Self::Own),
            // Runs no program.
            Collective::SendRecv => (Self::Nothing, Self::Nothing),
        }
    }
}

/// The collective that a program executes, and in which variant. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProgramSpec {
    /// The collective.
    pub collective: Collective,
    /// The source of a broadcast or scatter, or the destination of a reduce or gather; 0 for other
    /// collectives.
    pub root: Rank,
    /// Whether each rank's contribution is multiplied by its factor before it is added.
    pub prescale: bool,
    /// Whether the owner of each element adds all contributions in rank order in one pass, whatever the
    /// schedule.
    pub reproducible: bool,
    /// How the vector moves.
    pub movement: Movement,
}

/// How the vector of a call moves between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Movement {
    /// In spans that are sent whole, in as few messages as possible: through all levels, or straight to their
    /// destination where the collective has no levels.
    Spans,
    /// In sub-chunks, in waves: each through all levels on its own. For shards that are longer than a
    /// sub-chunk.
    Waves,
    /// One-shot: every rank adds all contributions itself, in rank order, so that an all-reduce is one hop.
    /// For vectors so short that the number of hops determines the time. Excludes `prescale`.
    OneShot,
    /// The blocks of an all-to-all go from node to node in one message for each pair of nodes, which one rank
    /// of each node sends and receives for the others.
    ByNode,
}

impl Movement {
    /// Through the levels of the schedule, `in_waves` or in spans.
    #[must_use]
    pub fn through_levels(in_waves: bool) -> Self {
        if in_waves { Self::Waves } else { Self::Spans }
    }
}

impl ProgramSpec {
    /// An all-reduce in spans, with all variants off.
    pub const ALL_REDUCE: Self = Self {
        collective: Collective::AllReduce,
        root: 0,
        prescale: false,
        reproducible: false,
        movement: Movement::Spans,
    };

    /// Whether every rank adds all contributions itself, whatever the schedule.
    #[must_use]
    pub fn is_one_shot(&self) -> bool {
        self.movement == Movement::OneShot
    }

    /// Whether sub-chunks move in waves.
    #[must_use]
    pub fn in_waves(&self) -> bool {
        self.movement == Movement::Waves
    }

    /// Whether blocks go by node.
    #[must_use]
    pub fn by_node(&self) -> bool {
        self.movement == Movement::ByNode
    }

    /// The parts of the vector that the caller on `rank` provides and receives.
    #[must_use]
    pub fn held_spans(&self, rank: Rank, world: usize) -> HeldSpans {
        let span = |part| match part {
            // The blocks of a rank do not lie together: see `BlockOrder`.
            _ if self.by_node() => Span::WHOLE,
            HeldPart::Own => Span::part(rank, world),
            HeldPart::Whole => Span::WHOLE,
            HeldPart::AtRoot if rank == self.root => Span::WHOLE,
            HeldPart::AtRoot | HeldPart::Nothing => Span { start: Fraction::ZERO, end: Fraction::ZERO },
        };
        let (input, output) = HeldPart::of(self.collective);
        let disjoint = self.is_one_shot();
        HeldSpans { input: span(input), output: span(output), disjoint }
    }

    /// The block of a straight collective that goes from one rank to another. The vector of an all-to-all is
    /// the concatenation of all ranks' inputs, so it has a block for each pair of ranks.
    #[must_use]
    pub fn block(&self, from: Rank, to: Rank, world: usize) -> Span {
        match self.collective {
            Collective::AllToAll | Collective::AllToAllV => Span::part(from * world + to, world * world),
            Collective::Scatter => Span::part(to, world),
            _ => Span::part(from, world),
        }
    }

    /// Whether the caller on `rank` receives the point of the vector.
    #[must_use]
    pub fn receives(&self, rank: Rank, point: Fraction, world: usize) -> bool {
        if self.collective.is_all_to_all() {
            return point.element((world * world) as u64, 1) as usize % world == rank;
        }
        let Span { start, end } = self.held_spans(rank, world).output;
        start <= point && point < end
    }

    /// The part of the vector that the caller on `rank` both provides and receives.
    #[must_use]
    pub fn kept(&self, rank: Rank, world: usize) -> Span {
        if self.collective.is_all_to_all() {
            return self.block(rank, rank, world);
        }
        let HeldSpans { input, output, .. } = self.held_spans(rank, world);
        input.intersection(output)
    }

    /// A number that differs between variants, apart from the root.
    pub(super) fn variant(&self) -> u64 {
        (self.collective as u64) << 8
            | u64::from(self.prescale) << 1
            | u64::from(self.reproducible) << 2
            | (self.movement as u64) << 3
    }
}
