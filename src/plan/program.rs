//! What one rank does: sends and combines, each after the earlier steps that touch its span.
//!
//! A program holds for every element count. Every step has a depth: how many hops of the collective come before
//! it. Steps that touch the same elements have rising depths, on all ranks, and all ranks list the steps of one
//! depth in the same order. That gives two things at once: both ends of a link see the same list of messages,
//! and the earliest unfinished message of the whole world can always be moved, so no program waits for itself.

use super::Rank;
use super::fraction::Span;
use std::collections::BTreeMap;
use std::ops::Range;

/// A step's place in its program.
pub type StepId = u32;

/// Which of the operation's two vectors something is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferKind {
    /// What the caller gave: nothing was added to this span here yet.
    Input,
    /// What was made of it so far.
    Output,
}

/// One addend of a combine, in the order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    /// This rank's own part.
    Own {
        /// Where it is.
        buffer: BufferKind,
        /// Whether it still has to be multiplied with this rank's factor.
        scaled: bool,
    },
    /// A message of `peer`.
    Received {
        /// Who sends it.
        peer: Rank,
    },
}

/// One thing that a rank does, sub-chunk by sub-chunk, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which part of the vector it touches.
    pub span: Span,
    /// What its sub-chunks are a grid of: steps with one grid cut the elements that they share alike.
    pub grid: Span,
    /// How many hops come before it.
    pub depth: u32,
    /// What it does.
    pub body: Body,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Send the span to each of the peers.
    Send {
        /// From where.
        buffer: BufferKind,
        /// To whom; each is on a link of its own.
        peers: Vec<Rank>,
    },
    /// Add the operands and write the sum to the output.
    Combine {
        /// What is added, at least one.
        operands: Vec<OperandSource>,
        /// Whether this completes the sum over all ranks, so that an average is divided here.
        last: bool,
    },
}

impl Step {
    /// Whether it needs nothing from other ranks and gives them nothing.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(&self.body, Body::Combine { operands, .. } if operands.iter().all(|operand| matches!(operand, OperandSource::Own { .. })))
    }

    /// Whether it only moves a peer's bytes to where they belong, so that they can land there directly.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(&self.body, Body::Combine { operands, last: false } if matches!(operands[..], [OperandSource::Received { .. }]))
    }
}

/// Why a step waits for an earlier one. It waits element by element: for those of its sub-chunk only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// The earlier step.
    pub on: StepId,
    /// Whether it matters only where input and output are the same memory.
    pub in_place_only: bool,
}

/// A step's part in the traffic of one link: for a send which of its peers, for a combine which operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEntry {
    /// The step.
    pub step: StepId,
    /// The index of the peer among a send's peers, or of the operand among a combine's operands.
    pub part: u32,
}

/// What moves between this rank and one peer, in order.
#[derive(Clone, Debug, Default)]
pub struct LinkMessages {
    /// What is sent.
    pub sends: Vec<LinkEntry>,
    /// What is received.
    pub receives: Vec<LinkEntry>,
}

/// Which part of the vector a caller's memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// What the caller gives.
    pub input: Span,
    /// What the caller gets; what is made elsewhere on the way is the executor's own.
    pub output: Span,
    /// Whether the two must not be the same memory: others may read the input until the output is complete.
    pub apart: bool,
}

/// The order of sub-chunks that travel side by side. There are as many waves as the longest grid has sub-chunks;
/// a sub-chunk's wave is its place on its own grid, stretched to that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    /// The longest grid of the world, as a part of the vector.
    pub longest: f64,
    /// How many waves each hop lags behind the one before it.
    pub lag: u64,
}

/// What one rank does in one collective.
#[derive(Clone, Debug)]
pub struct Program {
    /// Whose program this is.
    pub rank: Rank,
    /// How many ranks take part.
    pub world: usize,
    /// Equal on all ranks that run the same collective.
    pub digest: u64,
    /// What it does, by rising depth.
    pub steps: Vec<Step>,
    /// How sub-chunks of all depths travel side by side; none, and one step's come after another's.
    pub waves: Option<Waves>,
    /// Which parts of the vector are the caller's.
    pub windows: Windows,
    /// For each step, the earlier steps it waits for, as a range of `dependencies`.
    dependency_ranges: Vec<Range<u32>>,
    dependencies: Vec<Dependency>,
    /// For each step, the later steps that wait for it, as a range of `dependents`.
    dependent_ranges: Vec<Range<u32>>,
    dependents: Vec<StepId>,
    /// By peer, the traffic of its link; only those that have any.
    pub links: BTreeMap<Rank, LinkMessages>,
}

/// The parts of a program that [`Program::assemble`] completes.
pub(super) struct ProgramParts {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) digest: u64,
    pub(super) waves: Option<Waves>,
    pub(super) windows: Windows,
    pub(super) steps: Vec<Step>,
    pub(super) depends: Vec<Vec<Dependency>>,
}

impl Program {
    /// Completes a program from its steps and their dependencies.
    pub(super) fn assemble(parts: ProgramParts) -> Self {
        let ProgramParts { rank, world, digest, waves, windows, steps, depends } = parts;
        let mut links: BTreeMap<Rank, LinkMessages> = BTreeMap::new();
        for (step, body) in (0..).zip(steps.iter().map(|step| &step.body)) {
            match body {
                Body::Send { peers, .. } => {
                    for (part, peer) in (0..).zip(peers) {
                        links.entry(*peer).or_default().sends.push(LinkEntry { step, part });
                    }
                }
                Body::Combine { operands, .. } => {
                    for (part, operand) in (0..).zip(operands) {
                        if let OperandSource::Received { peer } = operand {
                            links.entry(*peer).or_default().receives.push(LinkEntry { step, part });
                        }
                    }
                }
            }
        }
        let mut waiting = vec![Vec::new(); steps.len()];
        for (step, list) in (0..).zip(&depends) {
            for dependency in list {
                waiting[dependency.on as usize].push(step);
            }
        }
        let (dependency_ranges, dependencies) = flatten(depends);
        let (dependent_ranges, dependents) = flatten(waiting);
        Self {
            rank,
            world,
            digest,
            steps,
            waves,
            windows,
            dependency_ranges,
            dependencies,
            dependent_ranges,
            dependents,
            links,
        }
    }

    /// The earlier steps that `step` waits for.
    #[must_use]
    pub fn dependencies(&self, step: StepId) -> &[Dependency] {
        let range = &self.dependency_ranges[step as usize];
        &self.dependencies[range.start as usize..range.end as usize]
    }

    /// Has `step` wait for nothing, which is wrong.
    #[cfg(test)]
    pub(super) fn forget_dependencies(&mut self, step: StepId) {
        self.dependency_ranges[step as usize] = 0..0;
    }

    /// The later steps that wait for `step`.
    #[must_use]
    pub fn dependents(&self, step: StepId) -> &[StepId] {
        let range = &self.dependent_ranges[step as usize];
        &self.dependents[range.start as usize..range.end as usize]
    }

    /// The peers that this rank sends to or receives from.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.links.keys().copied()
    }
}

fn flatten<T>(lists: Vec<Vec<T>>) -> (Vec<Range<u32>>, Vec<T>) {
    let mut ranges = Vec::with_capacity(lists.len());
    let mut flat = Vec::new();
    for list in lists {
        let start = flat.len() as u32;
        flat.extend(list);
        ranges.push(start..flat.len() as u32);
    }
    (ranges, flat)
}
