//! Symbolic execution: runs the programs of all ranks on expressions and checks their results.
//!
//! Owns values, sums and the progress of the run.

use super::segments::{cuts, range};
use crate::Rank;
use crate::fraction::{Fraction, Span};
use crate::lowering::ProgramSpec;
use crate::program::{Body, BufferKind, OperandSource, Program};
use flexring_core::call::Collective;
use std::collections::{BTreeSet, HashMap};

/// The value of a segment at some rank: how it was computed.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Expression {
    /// A rank's own contribution.
    Input(Rank),
    /// The sum of expressions, by number, in this order.
    Sum(Vec<u32>),
}

/// The ranks whose contributions a value contains.
#[derive(Clone, Default)]
struct Contents {
    /// One bit per rank.
    ranks: Vec<u64>,
    /// A rank that is contained more than once.
    duplicate: Option<Rank>,
}

impl Contents {
    fn has(&self, rank: Rank) -> bool {
        self.ranks.get(rank / 64).is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    fn add(&mut self, other: &Self) {
        self.ranks.resize(self.ranks.len().max(other.ranks.len()), 0);
        for (at, (mine, theirs)) in self.ranks.iter_mut().zip(&other.ranks).enumerate() {
            if *mine & theirs != 0 {
                self.duplicate = Some(at * 64 + (*mine & theirs).trailing_zeros() as usize);
            }
            *mine |= theirs;
        }
        self.duplicate = self.duplicate.or(other.duplicate);
    }
}

/// What one rank holds, by segment.
#[derive(Clone)]
struct RankMemory {
    output: Vec<Option<u32>>,
    /// Data to pass on.
    transit: Vec<Option<u32>>,
}

/// Runs the programs on expressions instead of numbers, segment by segment.
pub(super) struct SymbolicRun<'a> {
    programs: &'a [Program],
    /// Ranks that contribute nothing and get no result.
    helpers: &'a BTreeSet<Rank>,
    cuts: Vec<Fraction>,
    known: HashMap<Expression, u32>,
    /// By expression number.
    contents: Vec<Contents>,
}

impl<'a> SymbolicRun<'a> {
    pub(super) fn new(programs: &'a [Program], helpers: &'a BTreeSet<Rank>) -> Self {
        let cuts = cuts(programs.iter());
        Self { programs, helpers, cuts, known: HashMap::new(), contents: Vec::new() }
    }

    fn number(&mut self, expression: Expression) -> u32 {
        if let Some(number) = self.known.get(&expression) {
            return *number;
        }
        let mut contents = Contents::default();
        match &expression {
            Expression::Input(rank) => {
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

    pub(super) fn run(mut self, spec: ProgramSpec) -> std::result::Result<(), String> {
        let (segments, world) = (self.cuts.len(), self.programs.len());
        let nothing = RankMemory { output: vec![None; segments], transit: vec![None; segments] };
        let mut memory = vec![nothing; world];
        let mut divided: Vec<Vec<u32>> = vec![vec![0; segments]; world];
        // Messages in flight, by sender, receiver and index in the link's list.
        let mut in_flight: HashMap<(Rank, Rank, usize), Vec<u32>> = HashMap::new();
        let mut sent: HashMap<(Rank, Rank), usize> = HashMap::new();
        let mut received: HashMap<(Rank, Rank), usize> = HashMap::new();
        let mut next = vec![0; world];
        // Ranks wait for each other through messages only. So each program is run as far as its messages
        // allow, again and again until no program can move.
        loop {
            let mut moved = false;
            for (rank, program) in self.programs.iter().enumerate() {
                while let Some(step) = program.steps.get(next[rank]) {
                    let range = range(&self.cuts, step.span());
                    match &*step.body {
                        Body::Send { buffer, peers } => {
                            let values = self.own(rank, range, *buffer, &memory[rank], spec)?;
                            for peer in peers {
                                let place = sent.entry((rank, *peer)).or_default();
                                in_flight.insert((rank, *peer, *place), values.clone());
                                *place += 1;
                            }
                        }
                        Body::Combine { operands, into, last } => {
                            let all_received = operands.iter().all(|operand| match operand {
                                OperandSource::Received { peer } => {
                                    let place = received.get(&(*peer, rank)).copied().unwrap_or(0);
                                    in_flight.contains_key(&(*peer, rank, place))
                                }
                                OperandSource::Own { .. } => true,
                            });
                            if !all_received {
                                break;
                            }
                            let mut columns = Vec::new();
                            for operand in operands {
                                columns.push(match operand {
                                    OperandSource::Received { peer } => {
                                        let place = received.entry((*peer, rank)).or_default();
                                        *place += 1;
                                        in_flight.remove(&(*peer, rank, *place - 1)).unwrap_or_default()
                                    }
                                    OperandSource::Own { buffer, .. } => {
                                        self.own(rank, range.clone(), *buffer, &memory[rank], spec)?
                                    }
                                });
                            }
                            for (row, at) in range.enumerate() {
                                let parts: Vec<u32> = columns.iter().map(|column| column[row]).collect();
                                let held = match into {
                                    BufferKind::Transit => &mut memory[rank].transit,
                                    _ => &mut memory[rank].output,
                                };
                                held[at] = Some(match parts[..] {
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
            return Err(format!(
                "it deadlocks: rank {rank} waits for {}, which no rank can send",
                step.span()
            ));
        }
        self.results(spec, &memory, &divided)
    }

    /// The values that `rank` itself holds for these segments.
    fn own(
        &mut self,
        rank: Rank,
        segments: std::ops::Range<usize>,
        buffer: BufferKind,
        memory: &RankMemory,
        spec: ProgramSpec,
    ) -> std::result::Result<Vec<u32>, String> {
        let value = |at: usize| match buffer {
            BufferKind::Input => self.input(rank, at, spec),
            BufferKind::Output => memory.output[at].ok_or_else(|| self.undefined(rank, at)),
            BufferKind::Transit => memory.transit[at].ok_or_else(|| self.undefined(rank, at)),
        };
        segments.map(value).collect()
    }

    /// The contribution of `rank` to a segment.
    fn input(&mut self, rank: Rank, at: usize, spec: ProgramSpec) -> std::result::Result<u32, String> {
        let input = spec.held_spans(rank, self.programs.len()).input;
        let is_foreign = self.block_at(at).is_some_and(|(source, _)| source != rank);
        if is_foreign || self.cuts[at] < input.start || self.cuts[at] >= input.end {
            return Err(format!(
                "rank {rank} uses {} of the input, which its caller does not provide",
                self.segment(at)
            ));
        }
        if self.helpers.contains(&rank) {
            return Err(format!("rank {rank} is a helper, but contributes to {}", self.segment(at)));
        }
        Ok(self.number(Expression::Input(rank)))
    }

    /// Source and destination of the block that a segment is in, if blocks go by node.
    fn block_at(&self, at: usize) -> Option<(Rank, Rank)> {
        let order = self.programs.first()?.blocks.as_ref()?;
        let blocks = (order.world() * order.world()) as u64;
        Some(order.ranks_at(self.cuts[at].element(blocks, 1) as usize))
    }

    fn segment(&self, at: usize) -> Span {
        Span { start: self.cuts[at], end: self.cuts.get(at + 1).copied().unwrap_or(Fraction::ONE) }
    }

    fn undefined(&self, rank: Rank, at: usize) -> String {
        format!("rank {rank} uses {} before it is computed", self.segment(at))
    }

    /// Checks the results of all ranks after the run.
    fn results(
        &self,
        spec: ProgramSpec,
        memory: &[RankMemory],
        divided: &[Vec<u32>],
    ) -> std::result::Result<(), String> {
        let world = self.programs.len();
        for at in 0..self.cuts.len() {
            let mut first: Option<(Rank, u32)> = None;
            let mut divisions = 0;
            for (rank, (held, divided)) in memory.iter().zip(divided).enumerate() {
                divisions += divided[at];
                let receives = match self.block_at(at) {
                    Some((_, to)) => to == rank,
                    None => spec.receives(rank, self.cuts[at], world),
                };
                if !receives || self.helpers.contains(&rank) {
                    continue;
                }
                let segment = self.segment(at);
                let Some(result) = held.output[at] else {
                    return Err(format!("rank {rank} gets no result for {segment}"));
                };
                self.complete(rank, at, result, spec)?;
                match first {
                    Some((other, value)) if value != result => {
                        return Err(format!("ranks {other} and {rank} add {segment} in different orders"));
                    }
                    _ => first = Some((rank, result)),
                }
            }
            // Once by the owner, or once by every rank.
            let once = if spec.is_one_shot() { world as u32 } else { 1 };
            if spec.collective.reduces() && world > 1 && divisions != once {
                return Err(format!(
                    "{} would be divided {divisions} times for an average",
                    self.segment(at)
                ));
            }
        }
        Ok(())
    }

    /// Checks that a result contains the contributions that it must, each once, and no others.
    fn complete(
        &self,
        rank: Rank,
        at: usize,
        result: u32,
        spec: ProgramSpec,
    ) -> std::result::Result<(), String> {
        let (world, segment) = (self.programs.len(), self.segment(at));
        let block = self.block_at(at);
        let contents = &self.contents[result as usize];
        let wanted = |from: Rank| match spec.collective {
            _ if block.is_some() => block.is_some_and(|(source, _)| source == from),
            Collective::AllGather | Collective::Gather => {
                segment.start.element(world as u64, 1) as Rank == from
            }
            Collective::AllToAll | Collective::AllToAllV => {
                segment.start.element((world * world) as u64, 1) as Rank / world == from
            }
            Collective::Broadcast | Collective::Scatter => from == spec.root,
            _ => !self.helpers.contains(&from),
        };
        let wrong = |from: Rank, what: &str| {
            Err(format!("the contribution of rank {from} to {segment} {what} at rank {rank}"))
        };
        if let Some(duplicate) = contents.duplicate {
            return wrong(duplicate, "is counted more than once");
        }
        match (0..world).find(|from| wanted(*from) != contents.has(*from)) {
            Some(from) if wanted(from) => wrong(from, "is missing"),
            Some(from) => wrong(from, "is counted but does not belong"),
            None => Ok(()),
        }
    }
}
