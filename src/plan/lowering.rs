//! From a schedule to the program of one rank.
//!
//! Owns the choice how a group's data meets: in a chain, where each participant adds its own part and hands
//! the sum on, or in a direct exchange, where everybody sends to the root and the root adds all in one pass.
//! Owns what each collective makes of the levels, too. Must not know which planner made the schedule.

use super::Rank;
use super::fraction::{Fraction, Span};
use super::program::{Body, Dependency, Operand, Parts, Program, Source, Step, StepId, Waves, Windows};
use super::schedule::{Cast, Group, Home, Schedule};
use super::span_map::SpanMap;
use super::topology::Topology;
use crate::call::Collective;
use crate::config::Lowering;
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
}

impl Purpose {
    /// An all-reduce with nothing special.
    pub const ALL_REDUCE: Self = Self {
        collective: Collective::AllReduce,
        root: 0,
        prescale: false,
        reproducible: false,
        by_wave: false,
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
        Windows { input, output }
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
        let length = |home: &Home| home.span.end.to_f64() - home.span.start.to_f64();
        let longest_home = schedule.homes().iter().map(length).fold(0.0, f64::max);
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
        let mut builder = Builder {
            rank,
            prescale: purpose.prescale,
            reproducible: purpose.reproducible,
            at: (Span::WHOLE, 0),
            steps: Vec::new(),
            depends: Vec::new(),
            history: SpanMap::uniform(History::default()),
        };
        for leg in legs {
            let span = leg.piece.span;
            builder.at = (if purpose.by_wave { leg.piece.grid } else { span }, leg.depth);
            match leg.act {
                Act::Send(peers) => builder.send(span, peers),
                Act::Reduce(order) => builder.reduce(span, &order, leg.piece.last && leg.completes),
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
            | u64::from(purpose.by_wave) << 3;
        Program::assemble(Parts {
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
        for home in self.schedule.homes() {
            match pieces.last_mut() {
                Some(last) if !purpose.by_wave && last.home.level == home.level => {
                    last.span.end = home.span.end
                }
                _ => {
                    pieces.push(Piece { span: home.span, grid: home.span, home: *home, last: false })
                }
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
    /// Whether the level at hand is the one that completes it.
    last: bool,
}

/// A group's part in a program: what happens at which hop.
struct Leg {
    depth: u32,
    group: usize,
    piece: Piece,
    /// Whether all that is left to be added is added here, if the level is the last.
    completes: bool,
    act: Act,
}

#[derive(Clone)]
enum Act {
    /// Send what is held here to the ranks.
    Send(Vec<Rank>),
    /// Add what the ranks hold, in this order.
    Reduce(Vec<Rank>),
    /// Take what that rank has.
    Copy(Rank),
}

/// How many ranks a chain visits: the participants, and the root last.
fn chain_len(group: &Group) -> usize {
    group.len() + usize::from(group.place_of(group.root).is_none())
}

/// The `place`-th rank that a chain visits.
fn chain_rank(group: &Group, place: usize) -> Rank {
    match group.place_of(group.root) {
        _ if place + 1 == chain_len(group) => group.root,
        Some(root) if place >= root => group.participant(place + 1),
        _ => group.participant(place),
    }
}

/// The place of `rank` in the chain.
fn chain_place(group: &Group, rank: Rank) -> usize {
    let root = group.place_of(group.root);
    match group.place_of(rank) {
        _ if rank == group.root => chain_len(group) - 1,
        Some(place) => place - usize::from(root.is_some_and(|root| root < place)),
        None => unreachable!("the rank is in the group"),
    }
}

struct Lower<'a> {
    plan: &'a Plan,
    rank: Rank,
    purpose: Purpose,
    pieces: Vec<Piece>,
}

impl Lower<'_> {
    /// All that the rank does, phase after phase.
    fn legs(&self) -> Vec<Leg> {
        let mut legs = Vec::new();
        let reduced = match self.purpose.collective {
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce => {
                if self.purpose.reproducible {
                    self.reduce_at_once(&mut legs)
                } else {
                    self.reduce(&mut legs)
                }
            }
            // What is gathered begins with the owners.
            Collective::AllGather | Collective::Broadcast => self.hand(0, false, &mut legs),
        };
        match self.purpose.collective {
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast => {
                self.gather(reduced, &mut legs);
            }
            Collective::ReduceScatter | Collective::Reduce => {
                self.hand(reduced, true, &mut legs);
            }
        }
        legs
    }

    /// Down the levels. Returns the depth that comes after.
    fn reduce(&self, legs: &mut Vec<Leg>) -> u32 {
        let mut depth = 0;
        for (number, level) in self.plan.schedule.levels().iter().enumerate() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                let completes = group.root == self.rank;
                self.reduce_hops(group, self.plan.forms[number][index], |hop, act| {
                    for mut piece in self.pieces_of(group.span) {
                        piece.last = piece.home.level == Some(number);
                        legs.push(Leg {
                            depth: depth + hop as u32,
                            group: index,
                            piece,
                            completes,
                            act: act.clone(),
                        });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
        depth
    }

    fn reduce_hops(&self, group: &Group, form: Form, mut leg: impl FnMut(usize, Act)) {
        let rank = self.rank;
        match form {
            Form::Direct if rank == group.root => leg(0, Act::Reduce(group.participants().collect())),
            Form::Direct => leg(0, Act::Send(vec![group.root])),
            Form::Chain => {
                let place = chain_place(group, rank);
                if place > 0 {
                    let before = chain_rank(group, place - 1);
                    let adds = group.place_of(rank).is_some();
                    leg(place - 1, Act::Reduce(if adds { vec![before, rank] } else { vec![before] }));
                }
                if place + 1 < chain_len(group) {
                    leg(place, Act::Send(vec![chain_rank(group, place + 1)]));
                }
            }
        }
    }

    /// Everybody's contribution straight to the owner, who adds them in the order of the ranks.
    fn reduce_at_once(&self, legs: &mut Vec<Leg>) -> u32 {
        let world = self.plan.schedule.world();
        let homes = self.plan.schedule.homes().iter().filter(|_| world > 1);
        for (index, home) in homes.enumerate() {
            let completes = home.owner == self.rank;
            let act = if completes { Act::Reduce((0..world).collect()) } else { Act::Send(vec![home.owner]) };
            for mut piece in self.pieces_of(home.span) {
                piece.last = true;
                legs.push(Leg { depth: 0, group: index, piece, completes, act: act.clone() });
            }
        }
        1
    }

    /// Back up the levels, beginning at `depth`.
    fn gather(&self, mut depth: u32, legs: &mut Vec<Leg>) {
        for (number, level) in self.plan.schedule.levels().iter().enumerate().rev() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                self.gather_hops(group, self.plan.forms[number][index], |hop, act| {
                    for piece in self.pieces_of(group.span) {
                        let depth = depth + hop as u32;
                        legs.push(Leg { depth, group: index, piece, completes: false, act: act.clone() });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
    }

    fn gather_hops(&self, group: &Group, form: Form, mut leg: impl FnMut(usize, Act)) {
        let rank = self.rank;
        match form {
            Form::Direct if rank == group.root => {
                leg(0, Act::Send(group.participants().filter(|other| *other != rank).collect()));
            }
            Form::Direct => leg(0, Act::Copy(group.root)),
            Form::Chain => {
                // The chain goes on around: from the root to the first participant and so to the last.
                let len = chain_len(group);
                let place = (chain_place(group, rank) + 1) % len;
                let at = |place: usize| chain_rank(group, (place + len - 1) % len);
                if place > 0 {
                    leg(place - 1, Act::Copy(at(place - 1)));
                }
                if place + 1 < len {
                    leg(place, Act::Send(vec![at(place + 1)]));
                }
            }
        }
    }

    /// Each part of the vector from its owner to the rank that shall have it, or back.
    fn hand(&self, depth: u32, out: bool, legs: &mut Vec<Leg>) -> u32 {
        let (rank, world) = (self.rank, self.plan.schedule.world());
        let homes = self.plan.schedule.homes();
        let mut home = 0;
        // Pieces that are sent whole may have several homes.
        for piece in &self.pieces {
            while homes[home].span.end <= piece.span.start {
                home += 1;
            }
            for part in homes[home..].iter().take_while(|part| part.span.start < piece.span.end) {
                let span = part.span.intersection(piece.span);
                let user = match self.purpose.collective {
                    Collective::Reduce | Collective::Broadcast => self.purpose.root,
                    _ => user_of(span.start, world),
                };
                let (from, to) = if out { (part.owner, user) } else { (user, part.owner) };
                if from == to || (rank != from && rank != to) {
                    continue;
                }
                let act = if rank == from { Act::Send(vec![to]) } else { Act::Copy(from) };
                let piece = Piece { span, ..*piece };
                legs.push(Leg { depth, group: 0, piece, completes: false, act });
            }
        }
        depth + 1
    }

    fn pieces_of(&self, span: Span) -> impl Iterator<Item = Piece> + '_ {
        let first = self.pieces.partition_point(|piece| piece.span.end <= span.start);
        let over = self.pieces[first..].iter().take_while(move |piece| piece.span.start < span.end);
        over.map(move |piece| Piece { span: piece.span.intersection(span), ..*piece })
    }
}

/// The rank whose part of `world` equal parts the point is in.
fn user_of(point: Fraction, world: usize) -> Rank {
    point.element(world as u64, 1) as Rank
}

/// What happens to a point of the vector on this rank so far.
#[derive(Clone, Debug, Default)]
struct History {
    /// The step that wrote it last; none, and it is still the input.
    writer: Option<StepId>,
    /// Who reads what that step wrote (or the input), and whether it was the input.
    readers: Vec<(StepId, bool)>,
}

/// Collects the steps of one rank.
struct Builder {
    rank: Rank,
    prescale: bool,
    reproducible: bool,
    /// The grid and the depth of the leg at hand.
    at: (Span, u32),
    steps: Vec<Step>,
    depends: Vec<Vec<Dependency>>,
    history: SpanMap<History>,
}

impl Builder {
    /// Where this rank's part of `span` is. Spans of which only a part was written yet are completed first.
    fn own(&mut self, span: Span, to_be_sent: bool) -> Source {
        let untouched = self.history.parts_where(span, |history| history.writer.is_none());
        let input = matches!(untouched[..], [only] if only == span);
        if input && !(to_be_sent && self.prescale) {
            return Source::Input;
        }
        for part in untouched {
            self.take(part);
        }
        Source::Output
    }

    /// What is still untouched of `span` becomes output as it is.
    fn keep(&mut self, span: Span) {
        let depth = self.steps.last().map_or(0, |step| step.depth);
        for part in self.history.parts_where(span, |history| history.writer.is_none()) {
            self.at = (part, depth);
            self.take(part);
        }
    }

    fn take(&mut self, span: Span) {
        let own = Operand::Own { source: Source::Input, scaled: self.prescale };
        self.combine(span, vec![own], false);
    }

    fn send(&mut self, span: Span, peers: Vec<Rank>) {
        let source = self.own(span, true);
        let step = self.steps.len() as StepId;
        let mut depends = Vec::new();
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, in_place_only: false }));
            history.readers.push((step, source == Source::Input));
        }
        self.push(span, Body::Send { source, peers }, depends);
    }

    fn combine(&mut self, span: Span, operands: Vec<Operand>, last: bool) {
        let step = self.steps.len() as StepId;
        let mut depends = Vec::new();
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, in_place_only: false }));
            let readers = history.readers.iter();
            depends.extend(readers.map(|(on, input)| Dependency { on: *on, in_place_only: *input }));
            *history = History { writer: Some(step), readers: Vec::new() };
        }
        self.push(span, Body::Combine { operands, last }, depends);
    }

    fn push(&mut self, span: Span, body: Body, mut depends: Vec<Dependency>) {
        depends.sort_unstable_by_key(|dependency| (dependency.on, dependency.in_place_only));
        depends.dedup_by_key(|dependency| dependency.on);
        let (grid, depth) = self.at;
        self.steps.push(Step { span, grid, depth, body });
        self.depends.push(depends);
    }

    /// This rank receives from the others in `order` what they hold of `span` and adds it in that order, in
    /// which it may itself be.
    fn reduce(&mut self, span: Span, order: &[Rank], last: bool) {
        // Where bits must not depend on who adds, the own contribution is rounded like those that are sent.
        let own = order.contains(&self.rank).then(|| self.own(span, self.reproducible));
        let scaled = own == Some(Source::Input) && self.prescale;
        let operand = |rank: &Rank| match own {
            Some(source) if *rank == self.rank => Operand::Own { source, scaled },
            _ => Operand::From { peer: *rank },
        };
        self.combine(span, order.iter().map(operand).collect(), last);
    }

    fn copy(&mut self, span: Span, from: Rank) {
        self.combine(span, vec![Operand::From { peer: from }], false);
    }
}
