//! Collects the steps of one rank, each with the earlier ones that it waits for.
//!
//! Owns the history of every point of the vector. Must not know levels or groups.

use super::ProgramSpec;
use crate::plan::Rank;
use crate::plan::fraction::Span;
use crate::plan::program::{Body, BufferKind, Dependency, OperandSource, Step, StepId};
use crate::plan::span_map::SpanMap;

/// What happens to a point of the vector on this rank so far.
#[derive(Clone, Debug, Default)]
struct History {
    /// The step that wrote it last; none, and it is still the input.
    writer: Option<StepId>,
    /// Who reads what that step wrote (or the input), and whether it was the input.
    readers: Vec<(StepId, bool)>,
}

/// Collects the steps of one rank.
pub(super) struct StepBuilder {
    rank: Rank,
    prescale: bool,
    reproducible: bool,
    /// Whether what reads the input and what writes the output never meet.
    disjoint: bool,
    /// The grid and the depth of the transfer at hand.
    pub(super) at: (Span, u32),
    pub(super) steps: Vec<Step>,
    pub(super) depends: Vec<Vec<Dependency>>,
    history: SpanMap<History>,
}

impl StepBuilder {
    /// Begins the program of `rank`.
    pub(super) fn new(rank: Rank, spec: ProgramSpec) -> Self {
        Self {
            rank,
            prescale: spec.prescale,
            reproducible: spec.reproducible,
            disjoint: spec.one_shot,
            at: (Span::WHOLE, 0),
            steps: Vec::new(),
            depends: Vec::new(),
            history: SpanMap::uniform(History::default()),
        }
    }

    /// Where this rank's part of `span` is. Spans of which only a part was written yet are completed first.
    fn own(&mut self, span: Span, to_be_sent: bool) -> BufferKind {
        let untouched = self.history.parts_where(span, |history| history.writer.is_none());
        let input = matches!(untouched[..], [only] if only == span);
        if input && !(to_be_sent && self.prescale) {
            return BufferKind::Input;
        }
        for part in untouched {
            self.take(part);
        }
        BufferKind::Output
    }

    /// What is still untouched of `span` becomes output as it is.
    pub(super) fn keep(&mut self, span: Span) {
        let depth = self.steps.last().map_or(0, |step| step.depth);
        for part in self.history.parts_where(span, |history| history.writer.is_none()) {
            self.at = (part, depth);
            self.take(part);
        }
    }

    fn take(&mut self, span: Span) {
        let own = OperandSource::Own { buffer: BufferKind::Input, scaled: self.prescale };
        self.combine(span, vec![own], false);
    }

    pub(super) fn send(&mut self, span: Span, peers: Vec<Rank>) {
        let buffer = self.own(span, true);
        let step = self.steps.len() as StepId;
        let mut depends = Vec::new();
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, in_place_only: false }));
            history.readers.push((step, buffer == BufferKind::Input));
        }
        self.push(span, Body::Send { buffer, peers }, depends);
    }

    fn combine(&mut self, span: Span, operands: Vec<OperandSource>, last: bool) {
        let step = self.steps.len() as StepId;
        let mut depends = Vec::new();
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, in_place_only: false }));
            let disjoint = self.disjoint;
            let readers = history.readers.iter().filter(|(_, input)| !(*input && disjoint));
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
    pub(super) fn reduce(&mut self, span: Span, order: &[Rank], last: bool) {
        // Where bits must not depend on who adds, the own contribution is rounded like those that are sent.
        let own = order.contains(&self.rank).then(|| self.own(span, self.reproducible));
        let scaled = own == Some(BufferKind::Input) && self.prescale;
        let operand = |rank: &Rank| match own {
            Some(buffer) if *rank == self.rank => OperandSource::Own { buffer, scaled },
            _ => OperandSource::Received { peer: *rank },
        };
        self.combine(span, order.iter().map(operand).collect(), last);
    }

    pub(super) fn copy(&mut self, span: Span, from: Rank) {
        self.combine(span, vec![OperandSource::Received { peer: from }], false);
    }
}
