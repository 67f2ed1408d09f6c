//! From a schedule to the program of one rank.
//!
//! Owns the choice how a group's data meets: in a chain, where each participant adds its own part and hands
//! the sum on, or in a direct exchange, where everybody sends to the root and the root adds all in one pass.
//! Must not know which planner made the schedule.

use super::Rank;
use super::fraction::Span;
use super::program::{Dependency, Operand, Program, Source, Step, StepId};
use super::schedule::{Group, Schedule};
use super::span_map::SpanMap;
use super::topology::Topology;
use crate::config::Lowering;
use crate::error::{Error, ErrorKind, Result};

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

/// How `group` is lowered. Within a node a direct exchange touches memory least: each of k contributions is
/// read once and one sum is written. Between nodes with one participant each it moves what a chain moves, in
/// fewer steps. Where a node holds several participants only a chain crosses each node's link but once.
#[must_use]
pub fn form_of(group: &Group, topology: &Topology, setting: Lowering) -> Form {
    match setting {
        Lowering::Chain => return Form::Chain,
        Lowering::Direct => return Form::Direct,
        Lowering::Auto => {}
    }
    let mut nodes: Vec<usize> = group.participants.iter().map(|rank| topology.node_of(rank)).collect();
    let participants = nodes.len();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.len() == 1 || (nodes.len() == participants && participants <= DIRECT_BETWEEN_NODES) {
        Form::Direct
    } else {
        Form::Chain
    }
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
    /// Whether every rank's own contribution is multiplied with a factor before it is used.
    prescale: bool,
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
            let own = Operand::Own { source: Source::Input, scaled: self.prescale };
            self.combine(part, vec![own], false);
        }
        Source::Output
    }

    fn send(&mut self, span: Span, peers: Vec<Rank>) {
        let source = self.own(span, true);
        let step = self.steps.len() as StepId;
        let mut depends = Vec::new();
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, in_place_only: false }));
            history.readers.push((step, source == Source::Input));
        }
        self.push(Step::Send { span, source, peers }, depends);
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
        self.push(Step::Combine { span, operands, last }, depends);
    }

    fn push(&mut self, step: Step, mut depends: Vec<Dependency>) {
        depends.sort_unstable_by_key(|dependency| (dependency.on, dependency.in_place_only));
        depends.dedup_by_key(|dependency| dependency.on);
        self.steps.push(step);
        self.depends.push(depends);
    }

    /// This rank receives from `peers` what they hold of `span` and adds it in the order of `order`, in which
    /// it may itself be.
    fn reduce(&mut self, span: Span, order: &[Rank], last: bool) {
        let own = order.contains(&self.rank).then(|| self.own(span, false));
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

/// A group's part in a program: what happens at which hop. Hops of one level are ordered among all groups.
struct Leg<'a> {
    hop: usize,
    group: &'a Group,
    last: bool,
    act: Act,
}

enum Act {
    /// Send what is held here to the ranks.
    Send(Vec<Rank>),
    /// Add what the ranks hold, in this order.
    Reduce(Vec<Rank>),
    /// Take what that rank has.
    Copy(Rank),
}

/// The order in which a chain visits the group's ranks: the participants, and the root last.
fn chain_order(group: &Group) -> Vec<Rank> {
    let mut order: Vec<Rank> = group.participants.iter().filter(|rank| *rank != group.root).collect();
    order.push(group.root);
    order
}

fn reduce_legs<'a>(group: &'a Group, form: Form, rank: Rank, last: bool, legs: &mut Vec<Leg<'a>>) {
    // Wherever else a part of the sum is made, others are still to be added.
    let last = last && rank == group.root;
    let mut leg = |hop, act| legs.push(Leg { hop, group, last, act });
    match form {
        Form::Direct if rank == group.root => leg(0, Act::Reduce(group.participants.iter().collect())),
        Form::Direct => leg(0, Act::Send(vec![group.root])),
        Form::Chain => {
            let order = chain_order(group);
            let place = order.iter().position(|other| *other == rank).expect("the rank is in the group");
            let root_adds = group.participants.iter().any(|participant| participant == group.root);
            if place > 0 {
                let adds = rank != group.root || root_adds;
                let operands = if adds { vec![order[place - 1], rank] } else { vec![order[place - 1]] };
                leg(place - 1, Act::Reduce(operands));
            }
            if let Some(next) = order.get(place + 1) {
                leg(place, Act::Send(vec![*next]));
            }
        }
    }
}

fn gather_legs<'a>(group: &'a Group, form: Form, rank: Rank, legs: &mut Vec<Leg<'a>>) {
    let mut leg = |hop, act| legs.push(Leg { hop, group, last: false, act });
    match form {
        Form::Direct if rank == group.root => {
            leg(0, Act::Send(group.participants.iter().filter(|other| *other != rank).collect()));
        }
        Form::Direct => leg(0, Act::Copy(group.root)),
        Form::Chain => {
            // The chain goes on around: from the root to the first participant and so to the last.
            let mut order = chain_order(group);
            order.rotate_right(1);
            let place = order.iter().position(|other| *other == rank).expect("the rank is in the group");
            if place > 0 {
                leg(place - 1, Act::Copy(order[place - 1]));
            }
            if let Some(next) = order.get(place + 1) {
                leg(place, Act::Send(vec![*next]));
            }
        }
    }
}

/// Whether anything moves in the group: it is not one rank that already holds the span alone.
fn moves(group: &Group) -> bool {
    group.participants.len() > 1 || group.participants.iter().any(|rank| rank != group.root)
}

/// Per level and group, whether it completes the sum of its span: no later level touches the span.
fn completing(schedule: &Schedule) -> Result<Vec<Vec<bool>>> {
    let mut covered = SpanMap::uniform(false);
    let mut lasts = Vec::with_capacity(schedule.levels.len());
    for level in schedule.levels.iter().rev() {
        let mut flags = Vec::with_capacity(level.groups.len());
        for group in &level.groups {
            let later = covered.over(group.span).filter(|flag| **flag).count();
            let segments = covered.over(group.span).count();
            if later != 0 && later != segments {
                return Err(Error::new(
                    ErrorKind::Internal,
                    format!(
                        "the {} schedule reduces a part of span {} again and not the rest",
                        schedule.name, group.span
                    ),
                ));
            }
            flags.push(later == 0 && moves(group));
        }
        for group in level.groups.iter().filter(|group| moves(group)) {
            covered.over(group.span).for_each(|flag| *flag = true);
        }
        lasts.push(flags);
    }
    lasts.reverse();
    Ok(lasts)
}

/// Lowers `schedule` to the program of `rank`: reduce-scatter down the levels, all-gather back up.
///
/// With `prescale`, each rank's own contribution is multiplied with its factor before anybody uses it.
/// `form` says how each group is lowered; all ranks must say the same.
///
/// # Errors
/// `Internal` if the schedule reduces parts of a group's span in different numbers of levels.
pub fn lower(
    schedule: &Schedule,
    rank: Rank,
    prescale: bool,
    form: impl Fn(&Group) -> Form,
) -> Result<Program> {
    let lasts = completing(schedule)?;
    let mut builder = Builder {
        rank,
        prescale,
        steps: Vec::new(),
        depends: Vec::new(),
        history: SpanMap::uniform(History::default()),
    };
    let mut digest = schedule.digest();
    let takes_part = |group: &Group| {
        moves(group) && (group.root == rank || group.participants.iter().any(|other| other == rank))
    };

    for (level, lasts) in schedule.levels.iter().zip(&lasts) {
        let mut legs = Vec::new();
        for (group, last) in level.groups.iter().zip(lasts) {
            let form = form(group);
            digest = digest.rotate_left(5) ^ (form as u64 + 1);
            if takes_part(group) {
                reduce_legs(group, form, rank, *last, &mut legs);
            }
        }
        run(&mut builder, legs);
    }
    for level in schedule.levels.iter().rev() {
        let mut legs = Vec::new();
        for group in level.groups.iter().filter(|group| takes_part(group)) {
            gather_legs(group, form(group), rank, &mut legs);
        }
        run(&mut builder, legs);
    }
    // A world of one, and spans that only ever had one holder.
    builder.own_everything();
    Ok(Program::assemble(rank, schedule.world, digest, builder.steps, builder.depends))
}

impl Builder {
    fn own_everything(&mut self) {
        for part in self.history.parts_where(Span::WHOLE, |history| history.writer.is_none()) {
            let own = Operand::Own { source: Source::Input, scaled: self.prescale };
            self.combine(part, vec![own], false);
        }
    }
}

fn run(builder: &mut Builder, mut legs: Vec<Leg<'_>>) {
    // The sort is stable: within a hop, groups keep the order of the schedule.
    legs.sort_by_key(|leg| leg.hop);
    for leg in legs {
        match leg.act {
            Act::Send(peers) => builder.send(leg.group.span, peers),
            Act::Reduce(order) => builder.reduce(leg.group.span, &order, leg.last),
            Act::Copy(from) => builder.copy(leg.group.span, from),
        }
    }
}
