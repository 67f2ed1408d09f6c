//! Builds the steps of one rank, each with the earlier steps that it waits for.
//!
//! Owns the accesses to every point of the vector.

use super::program_spec::ProgramSpec;
use crate::Rank;
use crate::fraction::Span;
use crate::inline_list::InlineList;
use crate::program::{
    Body, BufferKind, Dependency, DependencyKind, OperandSource, SharedSteps, Step, StepId, StepPlace,
};
use crate::span_map::SpanMap;
use crate::step_lists::StepLists;

/// The accesses to a point of the vector so far.
#[derive(Clone, Debug, Default)]
struct History {
    /// The last step that wrote it; `None` while only the input holds it.
    writer: Option<StepId>,
    /// The steps that read it since, and whether they read the input.
    readers: Vec<(StepId, bool)>,
}

/// The steps of one rank in the making.
pub(super) struct StepBuilder<'a> {
    rank: Rank,
    shared: &'a mut SharedSteps,
    prescale: bool,
    reproducible: bool,
    /// See [`HeldSpans::disjoint`](crate::program::HeldSpans::disjoint).
    disjoint: bool,
    /// Grid and depth of the steps that follow.
    position: (Span, u32, u32),
    pub(super) steps: Vec<Step>,
    pub(super) depends: StepLists<Dependency>,
    /// An empty list for the dependencies of the next step, which keeps its capacity.
    spare: Vec<Dependency>,
    history: SpanMap<History>,
    /// By point of the vector, the last step that wrote it to the memory for data to pass on.
    passed_on: SpanMap<Option<StepId>>,
}

impl<'a> StepBuilder<'a> {
    /// Starts the program of `rank`.
    pub(super) fn new(rank: Rank, spec: ProgramSpec, disjoint: bool, shared: &'a mut SharedSteps) -> Self {
        Self {
            rank,
            shared,
            prescale: spec.prescale,
            reproducible: spec.reproducible,
            disjoint,
            position: (Span::WHOLE, 0, 0),
            steps: Vec::new(),
            depends: StepLists::default(),
            spare: Vec::new(),
            history: SpanMap::uniform(History::default()),
            passed_on: SpanMap::uniform(None),
        }
    }

    /// Sets the grid, the depth and the group of the steps that follow.
    pub(super) fn set_position(&mut self, grid: Span, depth: u32, group: u32) {
        self.position = (grid, depth, group);
    }

    /// The vector that holds this rank's data for `span`. Where only a part of the span was written so far,
    /// the rest is copied to the output first.
    fn own(&mut self, span: Span, to_be_sent: bool) -> BufferKind {
        let unwritten = self.history.parts_where(span, |history| history.writer.is_none());
        let input = matches!(unwritten[..], [only] if only == span);
        if input && !(to_be_sent && self.prescale) {
            return BufferKind::Input;
        }
        for part in unwritten {
            self.copy_input(part);
        }
        BufferKind::Output
    }

    /// Copies the parts of `span` that no step has written from the input to the output.
    pub(super) fn keep(&mut self, span: Span) {
        let depth = self.steps.last().map_or(0, |step| step.depth);
        for part in self.history.parts_where(span, |history| history.writer.is_none()) {
            self.position = (part, depth, 0);
            self.copy_input(part);
        }
    }

    /// Copies `span` from the input to the output, scaled if the program prescales.
    fn copy_input(&mut self, span: Span) {
        let own = OperandSource::Own { buffer: BufferKind::Input, scaled: self.prescale };
        self.combine(span, [own].into(), false);
    }

    /// Sends `span` to `peers`, all different.
    pub(super) fn send(&mut self, span: Span, peers: InlineList<Rank>) {
        let buffer = self.own(span, true);
        let mut depends = std::mem::take(&mut self.spare);
        let step = self.steps.len() as StepId;
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, kind: DependencyKind::Elements }));
            history.readers.push((step, buffer == BufferKind::Input));
        }
        self.push(span, Body::Send { buffer, peers }, depends);
    }

    /// Writes the sum of `operands` to the output.
    fn combine(&mut self, span: Span, operands: InlineList<OperandSource>, last: bool) {
        let mut depends = std::mem::take(&mut self.spare);
        let step = self.steps.len() as StepId;
        for history in self.history.over(span) {
            depends.extend(history.writer.map(|on| Dependency { on, kind: DependencyKind::Elements }));
            let disjoint = self.disjoint;
            let readers = history.readers.iter().filter(|(_, input)| !(*input && disjoint));
            depends.extend(readers.map(|(on, input)| after_reader(*on, *input)));
            *history = History { writer: Some(step), readers: Vec::new() };
        }
        self.push(span, Body::Combine { operands, into: BufferKind::Output, last }, depends);
    }

    /// Writes `span` to the memory for data to pass on, once: from the input, or a message of `from`.
    pub(super) fn pass_on(&mut self, span: Span, from: Option<Rank>) {
        let step = self.steps.len() as StepId;
        let own = OperandSource::Own { buffer: BufferKind::Input, scaled: false };
        let operand = from.map_or(own, |peer| OperandSource::Received { peer });
        if from.is_none() {
            self.history.over(span).for_each(|history| history.readers.push((step, true)));
        }
        self.passed_on.over(span).for_each(|writer| *writer = Some(step));
        let body = Body::Combine { operands: [operand].into(), into: BufferKind::Transit, last: false };
        self.push(span, body, Vec::new());
    }

    /// Sends `span`, which was written by [`pass_on`](Self::pass_on).
    pub(super) fn forward(&mut self, span: Span, to: Rank) {
        let depends = self.writers_of_passed_on(span);
        self.push(span, Body::Send { buffer: BufferKind::Transit, peers: [to].into() }, depends);
    }

    /// Copies `span`, which was written by [`pass_on`](Self::pass_on), to the output.
    pub(super) fn deliver(&mut self, span: Span) {
        let mut depends = self.writers_of_passed_on(span);
        let step = self.steps.len() as StepId;
        for history in self.history.over(span) {
            depends.extend(history.readers.iter().map(|(on, input)| after_reader(*on, *input)));
            *history = History { writer: Some(step), readers: Vec::new() };
        }
        let own = OperandSource::Own { buffer: BufferKind::Transit, scaled: false };
        let body = Body::Combine { operands: [own].into(), into: BufferKind::Output, last: false };
        self.push(span, body, depends);
    }

    fn writers_of_passed_on(&mut self, span: Span) -> Vec<Dependency> {
        let writers = self.passed_on.over(span).flat_map(|writer| *writer);
        writers.map(|on| Dependency { on, kind: DependencyKind::Elements }).collect()
    }

    fn push(&mut self, span: Span, body: Body, mut depends: Vec<Dependency>) {
        depends.sort_unstable_by_key(|dependency| (dependency.on, dependency.kind));
        depends.dedup_by_key(|dependency| dependency.on);
        let (grid, depth, group) = self.position;
        let place = self.shared.place(StepPlace { span, grid });
        let body = self.shared.body(body);
        self.steps.push(Step { place, depth, group, body });
        depends.iter().for_each(|dependency| self.depends.push(*dependency));
        self.depends.end_step();
        depends.clear();
        self.spare = depends;
    }

    /// Receives `span` from the other ranks in `order` and adds the data in that order. If this rank is in
    /// `order`, its own data is added at that place.
    pub(super) fn reduce(&mut self, span: Span, order: &[Rank], last: bool) {
        // Where bits must not depend on which rank adds, the own contribution is rounded like those that are
        // sent.
        let own = order.contains(&self.rank).then(|| {
            let buffer = self.own(span, self.reproducible);
            OperandSource::Own { buffer, scaled: buffer == BufferKind::Input && self.prescale }
        });
        let operand = |rank: &Rank| match own {
            Some(own) if *rank == self.rank => own,
            _ => OperandSource::Received { peer: *rank },
        };
        let operands = match order {
            [only] => [operand(only)].into(),
            [first, second] => [operand(first), operand(second)].into(),
            _ => order.iter().map(operand).collect::<Vec<_>>().into(),
        };
        self.combine(span, operands, last);
    }

    /// Receives `span` from another rank into the output.
    pub(super) fn copy(&mut self, span: Span, from: Rank) {
        self.combine(span, [OperandSource::Received { peer: from }].into(), false);
    }
}

/// The dependency of a step that writes what `on` reads; from the input if `input`.
fn after_reader(on: StepId, input: bool) -> Dependency {
    Dependency { on, kind: if input { DependencyKind::ElementsInPlace } else { DependencyKind::Elements } }
}
