//! The verifier: proves of a world's programs what nobody should have to believe.
//!
//! Owns the proofs; must not know which planner or lowering made the programs, and repeats none of their
//! reasoning. What it proves holds for every count, sub-chunk size, window and number of slots:
//!
//! 1. **Sums.** Every part of every rank's result has every rank's contribution exactly once.
//! 2. **Bits.** Ranks that get the same part get it by the same additions in the same order.
//! 3. **Links.** Both ends of every link list the same messages, in one order.
//! 4. **Progress.** Whatever a step waits for comes earlier in one order of all messages of the world, so the
//!    earliest unfinished message can always move (see [`pipeline`](super::pipeline)).
//! 5. **Memory.** Nothing is overwritten that an earlier step still reads, and nothing is read that an earlier
//!    step still writes: each step waits for each of those.

use super::Rank;
use super::fraction::{Fraction, Span};
use super::lowering::{Plan, ProgramSpec};
use super::program::{Body, BufferKind, OperandSource, Program, Step, StepId, Windows};
use crate::call::Collective;
use crate::error::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// A plan that was proved.
#[derive(Clone, Debug)]
pub struct VerifiedPlan(Arc<Plan>);

impl VerifiedPlan {
    /// Proves of `plan` that it all-reduces, in waves and not. The other collectives are made of the same
    /// halves: what comes to the owners and what goes out from them.
    ///
    /// # Errors
    /// As for [`verify`].
    pub fn new(plan: Plan) -> Result<Self> {
        for by_wave in [true, false] {
            verify(&plan, ProgramSpec { by_wave, ..ProgramSpec::ALL_REDUCE })?;
        }
        Ok(Self(Arc::new(plan)))
    }

    /// Proves of `plan` every collective, in waves and not, reproducible and not, with and without factors.
    ///
    /// # Errors
    /// As for [`verify`].
    pub fn for_all(plan: Plan) -> Result<Self> {
        let last = plan.schedule().world().saturating_sub(1);
        for collective in Collective::ALL {
            for (by_wave, reproducible) in [(true, false), (false, false), (true, true)] {
                if reproducible && !collective.reduces() {
                    continue;
                }
                for root in if collective.has_root() { vec![0, last] } else { vec![0] } {
                    verify(
                        &plan,
                        ProgramSpec {
                            collective,
                            root,
                            by_wave,
                            reproducible,
                            prescale: reproducible,
                            one_shot: false,
                        },
                    )?;
                }
            }
        }
        verify(&plan, ProgramSpec { one_shot: true, ..ProgramSpec::ALL_REDUCE })?;
        Ok(Self(Arc::new(plan)))
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.0
    }
}

/// Proves of `plan` that its programs for `purpose` do what they are for.
///
/// # Errors
/// `InvalidSetting` with what is wrong, naming span and ranks.
pub fn verify(plan: &Plan, spec: ProgramSpec) -> Result<()> {
    let world = plan.schedule().world();
    let programs: Vec<Program> = (0..world).map(|rank| plan.program(rank, spec)).collect();
    verify_programs(&programs, spec).map_err(|words| {
        let name = plan.schedule().name();
        Error::new(ErrorKind::InvalidSetting, format!("the {name} plan does not hold: {words}"))
    })
}

/// Proves the same of programs, one for each rank of the world. The error is a clause that says what is wrong.
pub fn verify_programs(programs: &[Program], spec: ProgramSpec) -> std::result::Result<(), String> {
    links(programs)?;
    for program in programs {
        progress(program)?;
        memory(program)?;
    }
    SymbolicRun::new(programs).run(spec)
}

/// A message as one end of a link sees it: what it carries, how that is cut, and when it is due.
fn seen(step: &Step) -> (Span, Span, u32) {
    (step.span, step.grid, step.depth)
}

fn links(programs: &[Program]) -> std::result::Result<(), String> {
    for program in programs {
        let rank = program.rank;
        for (peer, traffic) in &program.links {
            let there = programs.get(*peer).and_then(|peer| peer.links.get(&rank));
            let receives = there.map(|traffic| &traffic.receives[..]).unwrap_or_default();
            let sends = there.map(|traffic| &traffic.sends[..]).unwrap_or_default();
            if traffic.sends.len() != receives.len() || traffic.receives.len() != sends.len() {
                return Err(format!(
                    "rank {rank} sends {} spans to rank {peer}, which expects {}, and expects {} of its {}",
                    traffic.sends.len(),
                    receives.len(),
                    traffic.receives.len(),
                    sends.len()
                ));
            }
            let mut last = None;
            for (ours, theirs) in traffic.sends.iter().zip(receives) {
                let (step, other) =
                    (&program.steps[ours.step as usize], &programs[*peer].steps[theirs.step as usize]);
                if seen(step) != seen(other) {
                    return Err(format!(
                        "rank {rank} sends {} where rank {peer} expects {}",
                        step.span, other.span
                    ));
                }
                if program.waves != programs[*peer].waves {
                    return Err(format!("ranks {rank} and {peer} number their messages differently"));
                }
                if last.is_some_and(|last| last > step.depth) {
                    return Err(format!(
                        "messages from rank {rank} to rank {peer} are not in the order of depth"
                    ));
                }
                last = Some(step.depth);
            }
        }
    }
    Ok(())
}

/// A message's place in the order of all is its depth, among equals its step's place in its program; where steps
/// go in waves sub-chunks of one grid keep that order, and sub-chunks of different grids must not meet.
fn progress(program: &Program) -> std::result::Result<(), String> {
    for (number, step) in (0..).zip(&program.steps) {
        for dependency in program.dependencies(number) {
            let before = &program.steps[dependency.on as usize];
            let local = before.is_local() || step.is_local();
            // What nothing waits for can wait for anything.
            let last = step.is_local() && program.dependents(number).is_empty();
            let rises =
                before.depth < step.depth || (before.depth == step.depth && before.is_local()) || last;
            if dependency.on >= number || !rises {
                return Err(format!(
                    "rank {}: {} at depth {} waits for {} at depth {}, which does not come before it",
                    program.rank, step.span, step.depth, before.span, before.depth
                ));
            }
            if program.waves.is_some() && !local && before.grid != step.grid {
                return Err(format!(
                    "rank {}: {} and {} meet and are cut by different grids",
                    program.rank, step.span, before.span
                ));
            }
        }
    }
    Ok(())
}

/// Who touched a stretch of a rank's memory last.
#[derive(Clone, Default)]
struct Touched {
    writer: Option<StepId>,
    /// With whether what they read was the input, which only matters in place.
    readers: Vec<(StepId, bool)>,
}

fn memory(program: &Program) -> std::result::Result<(), String> {
    let cuts = cuts(std::iter::once(program));
    let mut touched = vec![Touched::default(); cuts.len()];
    for (number, step) in (0..).zip(&program.steps) {
        let on: HashMap<StepId, bool> = program
            .dependencies(number)
            .iter()
            .map(|dependency| (dependency.on, dependency.in_place_only))
            .collect();
        let racing = |other: StepId| {
            Err(format!(
                "rank {}: step {number} does not wait for step {other}, which uses {} too",
                program.rank, step.span
            ))
        };
        let (reads_output, reads_input) = match &step.body {
            Body::Send { buffer, .. } => (*buffer == BufferKind::Output, *buffer == BufferKind::Input),
            Body::Combine { operands, .. } => {
                let reads = |wanted| {
                    operands.iter().any(
                        |operand| matches!(operand, OperandSource::Own { buffer, .. } if *buffer == wanted),
                    )
                };
                (reads(BufferKind::Output), reads(BufferKind::Input))
            }
        };
        let writes = matches!(step.body, Body::Combine { .. });
        for stretch in &mut touched[range(&cuts, step.span)] {
            if let Some(writer) = stretch.writer {
                if reads_input && !writes {
                    return Err(format!(
                        "rank {}: {} is sent as it came after it was added to",
                        program.rank, step.span
                    ));
                }
                if on.get(&writer) != Some(&false) {
                    return racing(writer);
                }
            }
            if reads_output && stretch.writer.is_none() {
                return Err(format!("rank {}: {} is used before it is made", program.rank, step.span));
            }
            if writes {
                for (reader, input) in &stretch.readers {
                    if *input && program.windows.apart {
                        continue;
                    }
                    if on.get(reader).is_none_or(|in_place_only| *in_place_only && !input) {
                        return racing(*reader);
                    }
                }
                *stretch = Touched { writer: Some(number), readers: Vec::new() };
            } else {
                stretch.readers.push((number, reads_input));
            }
        }
    }
    Ok(())
}

/// All points at which some step of some program begins or ends, but for the end of the vector.
fn cuts<'a>(programs: impl Iterator<Item = &'a Program>) -> Vec<Fraction> {
    let mut cuts = vec![Fraction::ZERO];
    for program in programs {
        cuts.extend(program.steps.iter().flat_map(|step| [step.span.start, step.span.end]));
        let Windows { input, output, .. } = program.windows;
        cuts.extend([input.start, input.end, output.start, output.end]);
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.retain(|cut| *cut != Fraction::ONE);
    cuts
}

/// The stretches between cuts that make up the span.
fn range(cuts: &[Fraction], span: Span) -> std::ops::Range<usize> {
    cuts.partition_point(|cut| *cut < span.start)..cuts.partition_point(|cut| *cut < span.end)
}

/// A value that some rank has for a stretch: how it was made.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Expression {
    /// A rank's own contribution.
    Given(Rank),
    /// The sum of values in this order.
    Sum(Vec<u32>),
}

/// Whose contributions a value is made of.
#[derive(Clone, Default)]
struct Contents {
    /// A bit for each rank.
    ranks: Vec<u64>,
    /// Somebody who is in it more than once.
    doubled: Option<Rank>,
}

impl Contents {
    fn has(&self, rank: Rank) -> bool {
        self.ranks.get(rank / 64).is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    fn add(&mut self, other: &Self) {
        self.ranks.resize(self.ranks.len().max(other.ranks.len()), 0);
        for (at, (mine, theirs)) in self.ranks.iter_mut().zip(&other.ranks).enumerate() {
            if *mine & theirs != 0 {
                self.doubled = Some(at * 64 + (*mine & theirs).trailing_zeros() as usize);
            }
            *mine |= theirs;
        }
        self.doubled = self.doubled.or(other.doubled);
    }
}

/// Runs the programs with expressions for numbers, stretch by stretch.
struct SymbolicRun<'a> {
    programs: &'a [Program],
    cuts: Vec<Fraction>,
    known: HashMap<Expression, u32>,
    /// Of each expression, whose contributions are in it.
    contents: Vec<Contents>,
}

impl<'a> SymbolicRun<'a> {
    fn new(programs: &'a [Program]) -> Self {
        let cuts = cuts(programs.iter());
        Self { programs, cuts, known: HashMap::new(), contents: Vec::new() }
    }

    fn number(&mut self, expression: Expression) -> u32 {
        if let Some(number) = self.known.get(&expression) {
            return *number;
        }
        let mut contents = Contents::default();
        match &expression {
            Expression::Given(rank) => {
                contents.ranks.resize(rank / 64 + 1, 0);
                contents.ranks[rank / 64] |= 1 << (rank % 64);
            }
            Expression::Sum(parts) => {
                parts.iter().for_each(|part| contents.add(&self.contents[*part as usize]))
            }
        }
        let number = self.contents.len() as u32;
        self.known.insert(expression, number);
        self.contents.push(contents);
        number
    }

    fn run(mut self, spec: ProgramSpec) -> std::result::Result<(), String> {
        let (stretches, world) = (self.cuts.len(), self.programs.len());
        let mut output: Vec<Vec<Option<u32>>> = vec![vec![None; stretches]; world];
        let mut divided: Vec<Vec<u32>> = vec![vec![0; stretches]; world];
        // What is on its way, by sender, receiver and place in the link's list.
        let mut flying: HashMap<(Rank, Rank, usize), Vec<u32>> = HashMap::new();
        let mut sent: HashMap<(Rank, Rank), usize> = HashMap::new();
        let mut received: HashMap<(Rank, Rank), usize> = HashMap::new();
        let mut next = vec![0; world];
        // Steps of one depth do not wait for each other across ranks in any other way than by messages, so
        // each program is run as far as the messages allow, again and again.
        loop {
            let mut moved = false;
            for (rank, program) in self.programs.iter().enumerate() {
                while let Some(step) = program.steps.get(next[rank]) {
                    let range = range(&self.cuts, step.span);
                    match &step.body {
                        Body::Send { buffer, peers } => {
                            let values = self.own(rank, range, *buffer, &output[rank], spec)?;
                            for peer in peers {
                                let place = sent.entry((rank, *peer)).or_default();
                                flying.insert((rank, *peer, *place), values.clone());
                                *place += 1;
                            }
                        }
                        Body::Combine { operands, last } => {
                            let all_there = operands.iter().all(|operand| match operand {
                                OperandSource::Received { peer } => {
                                    let place = received.get(&(*peer, rank)).copied().unwrap_or(0);
                                    flying.contains_key(&(*peer, rank, place))
                                }
                                OperandSource::Own { .. } => true,
                            });
                            if !all_there {
                                break;
                            }
                            let mut columns = Vec::new();
                            for operand in operands {
                                columns.push(match operand {
                                    OperandSource::Received { peer } => {
                                        let place = received.entry((*peer, rank)).or_default();
                                        *place += 1;
                                        flying.remove(&(*peer, rank, *place - 1)).unwrap_or_default()
                                    }
                                    OperandSource::Own { buffer, .. } => {
                                        self.own(rank, range.clone(), *buffer, &output[rank], spec)?
                                    }
                                });
                            }
                            for (row, at) in range.enumerate() {
                                let parts: Vec<u32> = columns.iter().map(|column| column[row]).collect();
                                output[rank][at] = Some(match parts[..] {
                                    [only] => only,
                                    _ => self.number(Expression::Sum(parts)),
                                });
                                divided[rank][at] += u32::from(*last);
                            }
                        }
                    }
                    next[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        if let Some(rank) = (0..world).find(|rank| next[*rank] < self.programs[*rank].steps.len()) {
            let step = &self.programs[rank].steps[next[rank]];
            return Err(format!("it deadlocks: rank {rank} waits for {} and nobody can send it", step.span));
        }
        self.results(spec, &output, &divided)
    }

    /// What `rank` itself has for these stretches.
    fn own(
        &mut self,
        rank: Rank,
        stretches: std::ops::Range<usize>,
        buffer: BufferKind,
        output: &[Option<u32>],
        spec: ProgramSpec,
    ) -> std::result::Result<Vec<u32>, String> {
        let value = |at: usize| match buffer {
            BufferKind::Input => self.given(rank, at, spec),
            BufferKind::Output => output[at].ok_or_else(|| self.missing(rank, at)),
        };
        stretches.map(value).collect()
    }

    /// What the caller of `rank` gives for a stretch.
    fn given(&mut self, rank: Rank, at: usize, spec: ProgramSpec) -> std::result::Result<u32, String> {
        let input = spec.windows(rank, self.programs.len()).input;
        if self.cuts[at] < input.start || self.cuts[at] >= input.end {
            return Err(format!("rank {rank} sends of {} what its caller never gave", self.stretch(at)));
        }
        Ok(self.number(Expression::Given(rank)))
    }

    fn stretch(&self, at: usize) -> Span {
        Span { start: self.cuts[at], end: self.cuts.get(at + 1).copied().unwrap_or(Fraction::ONE) }
    }

    fn missing(&self, rank: Rank, at: usize) -> String {
        format!("rank {rank} uses {} before it has it", self.stretch(at))
    }

    fn results(
        &self,
        spec: ProgramSpec,
        output: &[Vec<Option<u32>>],
        divided: &[Vec<u32>],
    ) -> std::result::Result<(), String> {
        let world = self.programs.len();
        for at in 0..self.cuts.len() {
            let mut agreed: Option<(Rank, u32)> = None;
            let mut divisions = 0;
            for (rank, (results, divided)) in output.iter().zip(divided).enumerate() {
                divisions += divided[at];
                let window = spec.windows(rank, world).output;
                if self.cuts[at] < window.start || self.cuts[at] >= window.end {
                    continue;
                }
                let stretch = self.stretch(at);
                let Some(result) = results[at] else {
                    return Err(format!("rank {rank} gets nothing for {stretch}"));
                };
                self.complete(rank, stretch, result, spec)?;
                match agreed {
                    Some((other, value)) if value != result => {
                        return Err(format!("ranks {other} and {rank} add {stretch} in different orders"));
                    }
                    _ => agreed = Some((rank, result)),
                }
            }
            // Once by its owner, or by everybody who makes the whole sum.
            let once = if spec.one_shot { world as u32 } else { 1 };
            if spec.collective.reduces() && world > 1 && divisions != once {
                return Err(format!(
                    "{} would be divided {divisions} times for an average",
                    self.stretch(at)
                ));
            }
        }
        Ok(())
    }

    /// Whether a result has what it must have, once.
    fn complete(
        &self,
        rank: Rank,
        stretch: Span,
        result: u32,
        spec: ProgramSpec,
    ) -> std::result::Result<(), String> {
        let world = self.programs.len();
        let contents = &self.contents[result as usize];
        let wanted = |from: Rank| match spec.collective {
            Collective::AllGather => stretch.start.element(world as u64, 1) as Rank == from,
            Collective::Broadcast => from == spec.root,
            _ => true,
        };
        let wrong = |from: Rank, what: &str| {
            Err(format!("the contribution of rank {from} to {stretch} {what} at rank {rank}"))
        };
        if let Some(doubled) = contents.doubled {
            return wrong(doubled, "is counted more than once");
        }
        match (0..world).find(|from| wanted(*from) != contents.has(*from)) {
            Some(from) if wanted(from) => wrong(from, "is missing"),
            Some(from) => wrong(from, "is counted though nobody asked for it"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Lowering;
    use crate::plan::planner::ring;
    use crate::plan::topology::Topology;

    const PURPOSE: ProgramSpec = ProgramSpec { by_wave: true, ..ProgramSpec::ALL_REDUCE };

    /// What the verifier says of a ring of three whose programs `spoil` has changed.
    fn verdict(lowering: Lowering, spoil: impl FnOnce(&mut [Program])) -> String {
        let topology = Topology::from_names(&["a", "b", "c"]);
        let plan = Plan::on(ring::plan(&topology), &topology, lowering);
        let mut programs: Vec<Program> = (0..3).map(|rank| plan.program(rank, PURPOSE)).collect();
        spoil(&mut programs);
        verify_programs(&programs, PURPOSE).err().unwrap_or_else(|| "holds".to_owned())
    }

    fn operands(program: &mut Program, step: usize) -> &mut Vec<OperandSource> {
        match &mut program.steps[step].body {
            Body::Combine { operands, .. } => operands,
            Body::Send { .. } => panic!("step {step} adds nothing"),
        }
    }

    /// The first step of a program that adds its own part to others'.
    fn reduction(program: &Program) -> usize {
        let adds = |step: &Step| matches!(&step.body, Body::Combine { operands, .. } if operands.len() > 1);
        program.steps.iter().position(adds).expect("a rank of a ring adds")
    }

    #[test]
    fn what_is_right_holds() {
        for lowering in [Lowering::Auto, Lowering::Chain, Lowering::Direct] {
            assert_eq!(verdict(lowering, |_| {}), "holds");
        }
    }

    #[test]
    fn every_kind_of_mistake_is_found_and_named() {
        let said = verdict(Lowering::Direct, |programs| {
            let step = reduction(&programs[1]);
            operands(&mut programs[1], step).retain(|operand| !matches!(operand, OperandSource::Own { .. }));
        });
        assert!(said.starts_with("the contribution of rank 1 to [1/3, 2/3) is missing"), "{said}");

        let said = verdict(Lowering::Direct, |programs| {
            let step = reduction(&programs[2]);
            let own = operands(&mut programs[2], step)
                .iter()
                .copied()
                .find(|o| matches!(o, OperandSource::Own { .. }));
            operands(&mut programs[2], step).extend(own);
        });
        assert!(
            said.starts_with("the contribution of rank 2 to [2/3, 1) is counted more than once"),
            "{said}"
        );

        let said = verdict(Lowering::Chain, |programs| {
            let traffic = programs[0].links.values_mut().find(|traffic| traffic.sends.len() > 1);
            traffic.expect("a rank of a ring sends").sends.swap(0, 1);
        });
        assert!(said.starts_with("rank 0 sends "), "{said}");

        let said = verdict(Lowering::Chain, |programs| {
            let step = reduction(&programs[0]);
            programs[0].steps[step].depth = 9;
        });
        assert!(said.contains("expects"), "{said}");

        let said = verdict(Lowering::Chain, |programs| {
            let step = reduction(&programs[0]) as StepId;
            let waiting = programs[0].dependents(step)[0];
            programs[0].forget_dependencies(waiting);
        });
        assert!(said.contains(" does not wait for step "), "{said}");
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_a_deadlock() {
        // Each of two ranks adds what the other sends before it sends what the other adds.
        let topology = Topology::from_names(&["a", "b"]);
        let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Direct);
        let mut programs: Vec<Program> = (0..2).map(|rank| plan.program(rank, PURPOSE)).collect();
        for program in &mut programs {
            let step = reduction(program);
            program.steps.swap(0, step);
        }
        let said = SymbolicRun::new(&programs).run(PURPOSE).expect_err("nobody sends first");
        assert!(said.starts_with("it deadlocks: rank 0 waits for "), "{said}");
    }
}
