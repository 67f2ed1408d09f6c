//! From a schedule to the program of one rank.
//!
//! Owns the choice how a group's data meets: in a chain, where each participant adds its own part and hands
//! the sum on, or in a direct exchange, where everybody sends to the root and the root adds all in one pass.
//! Owns what each collective makes of the levels, too. Must not know which planner made the schedule.

mod builder;
mod legs;

use super::Rank;
use super::fraction::{Fraction, Span};
use super::program::{Program, ProgramParts, Waves, Windows};
use super::schedule::{Cast, Group, Home, Schedule};
use super::topology::Topology;
use crate::call::Collective;
use crate::config::Lowering;
use builder::Builder;
use legs::{Act, Lower, chain_len};
use std::collections::HashMap;
use std::sync::Arc;

/// How the parts of a group's span meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// From participant to participant, the root last.
    Chain,
    /// From every participant to the root at once.
    Direct,
}

/// Between nodes, at most this many participants send to one root at once; more are chained, because
/// each of them would get that fraction of the root's link only.
const DIRECT_BETWEEN_NODES: usize = 16;

/// How many sub-chunks of the vector each hop of a program in waves is ahead of the next one, all homes together.
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
pub fn form_of(cast: &Cast, topology: &Topology, setting: Lowering) -> Form {
    match setting {
        Lowering::Chain => return Form::Chain,
        Lowering::Direct => return Form::Direct,
        Lowering::Auto => {}
    }
    let mut place_of_node = HashMap::new();
    let mut apart = true;
    for (rank, place) in cast.members() {
        apart &= *place_of_node.entry(topology.node_of(rank)).or_insert(place) == place;
    }
    if place_of_node.len() == 1 || (apart && cast.len() <= DIRECT_BETWEEN_NODES) {
        Form::Direct
    } else {
        Form::Chain
    }
}

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purpose {
    /// Which collective.
    pub collective: Collective,
    /// The rank that a broadcast begins at or a reduce ends at.
    pub root: Rank,
    /// Whether each rank's own contribution is multiplied with its factor before anybody uses it.
    pub prescale: bool,
    /// Whether all contributions to an element are added in the order of the ranks, by its owner in one pass,
    /// whatever the schedule.
    pub reproducible: bool,
    /// Whether homes are longer than a sub-chunk, so that their sub-chunks travel in waves, each through all
    /// levels on its own. Otherwise spans are sent whole, in as few messages as there are.
    pub by_wave: bool,
    /// Whether every rank adds all contributions itself, in the order of the ranks, so that an all-reduce is one
    /// hop: for vectors so short that hops take the time. Not with factors.
    pub everywhere: bool,
}

impl Purpose {
    /// An all-reduce with nothing special.
    pub const ALL_REDUCE: Self = Self {
        collective: Collective::AllReduce,
        root: 0,
        prescale: false,
        reproducible: false,
        by_wave: false,
        everywhere: false,
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
        Windows { input, output, apart: self.everywhere }
    }
}

/// A schedule with everything that is decided once for all ranks and all purposes.
#[derive(Clone, Debug)]
pub struct Plan {
    schedule: Schedule,
    /// By level and group.
    forms: Vec<Vec<Form>>,
    /// By level, how many hops its longest group takes.
    hops: Vec<u32>,
    digest: u64,
    longest_home: f64,
}

impl Plan {
    /// Decides the form of every group by `form`, which must say the same on all ranks.
    #[must_use]
    pub fn new(schedule: Schedule, mut form: impl FnMut(&Group) -> Form) -> Self {
        let mut digest = schedule.digest();
        let (mut forms, mut hops) = (Vec::new(), Vec::new());
        for level in schedule.levels() {
            let of_level: Vec<Form> = level.groups().iter().map(&mut form).collect();
            let mut longest = 0;
            for (group, form) in level.groups().iter().zip(&of_level).filter(|(group, _)| group.moves()) {
                digest = digest.rotate_left(5) ^ (*form as u64 + 1);
                longest = longest.max(match form {
                    Form::Direct => 1,
                    Form::Chain => chain_len(group) - 1,
                });
            }
            forms.push(of_level);
            hops.push(longest as u32);
        }
        let longest_home = schedule.homes().iter().map(|home| home.span.extent()).fold(0.0, f64::max);
        Self { schedule, forms, hops, digest, longest_home }
    }

    /// Decides the forms by [`form_of`].
    #[must_use]
    pub fn on(schedule: Schedule, topology: &Topology, setting: Lowering) -> Self {
        let mut last: Option<(Arc<Cast>, Form)> = None;
        Self::new(schedule, |group| match &last {
            Some((cast, form)) if Arc::ptr_eq(cast, &group.cast) => *form,
            _ => last.insert((Arc::clone(&group.cast), form_of(&group.cast, topology, setting))).1,
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

    /// The largest part of the vector that ends in one piece at one rank.
    #[must_use]
    pub fn longest_home(&self) -> f64 {
        self.longest_home
    }

    /// The program of `rank`. Costs what that rank does, not what the world does.
    #[must_use]
    pub fn program(&self, rank: Rank, purpose: Purpose) -> Program {
        let lowering = Lower { plan: self, rank, purpose, pieces: self.pieces(purpose) };
        let mut legs = lowering.legs();
        legs.sort_by_key(|leg| (leg.depth, leg.group, leg.piece.span.start));
        let windows = purpose.windows(rank, self.schedule.world());
        let mut builder = Builder::new(rank, purpose);
        for leg in legs {
            let span = leg.piece.span;
            builder.at = (if purpose.by_wave { leg.piece.grid } else { span }, leg.depth);
            match leg.act {
                Act::Send(peers) => builder.send(span, peers),
                Act::Reduce(order) => builder.reduce(span, &order, leg.completes),
                Act::Copy(from) => builder.copy(span, from),
            }
        }
        // What nobody else has to do with: a world of one, or the caller's own part of a gathered vector.
        let mine = windows.input.intersection(windows.output);
        if !mine.is_empty() {
            builder.keep(mine);
        }
        let kind = (purpose.collective as u64) << 8
            | u64::from(purpose.prescale) << 1
            | u64::from(purpose.reproducible) << 2
            | u64::from(purpose.by_wave) << 3
            | u64::from(purpose.everywhere) << 4;
        Program::assemble(ProgramParts {
            rank,
            world: self.schedule.world(),
            digest: self.digest ^ (kind ^ (purpose.root as u64) << 16).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            waves: purpose.by_wave.then(|| Waves {
                longest: self.longest_home,
                lag: (LEAD / self.schedule.homes().len() as u64).max(LEAST_LAG),
            }),
            windows,
            steps: builder.steps,
            depends: builder.depends,
        })
    }

    /// Where spans are cut: at the ends of homes, so that each home's sub-chunks are a grid of their own, and at
    /// the ends of what a caller gives or gets. Spans that are sent whole are cut only where one part of them is
    /// complete at another level than the rest.
    fn pieces(&self, purpose: Purpose) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        if purpose.everywhere {
            return vec![Piece { span: Span::WHOLE, grid: Span::WHOLE, home: self.schedule.homes()[0] }];
        }
        for home in self.schedule.homes() {
            match pieces.last_mut() {
                Some(last) if !purpose.by_wave && last.home.level == home.level => {
                    last.span.end = home.span.end
                }
                _ => pieces.push(Piece { span: home.span, grid: home.span, home: *home }),
            }
        }
        if !matches!(purpose.collective, Collective::ReduceScatter | Collective::AllGather) {
            return pieces;
        }
        let world = self.schedule.world();
        let mut part = 0;
        let mut cut = Vec::new();
        for piece in pieces {
            let mut rest = piece.span;
            while !rest.is_empty() {
                let own = Span::part(part, world);
                cut.push(Piece { span: rest.intersection(own), ..piece });
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
struct Piece {
    span: Span,
    /// What its sub-chunks are a grid of.
    grid: Span,
    home: Home,
}
