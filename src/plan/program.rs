//! What one rank does: sends and combines, each after the earlier steps that touch its span.
//!
//! A program holds for every element count. Steps are listed in an order that all ranks share (phase, level,
//! hop, group), which gives two things at once: both ends of a link see the same list of messages, and the
//! earliest unfinished message of the whole world can always be moved, so no program waits for itself.

use super::Rank;
use super::fraction::Span;
use std::ops::Range;

/// A step's place in its program.
pub type StepId = u32;

/// Which of the operation's two vectors something is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// What the caller gave: nothing was added to this span here yet.
    Input,
    /// What was made of it so far.
    Output,
}

/// One addend of a combine, in the order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// This rank's own part.
    Own {
        /// Where it is.
        source: Source,
        /// Whether it still has to be multiplied with this rank's factor.
        scaled: bool,
    },
    /// A message of `peer`.
    From {
        /// Who sends it.
        peer: Rank,
    },
}

/// One thing that a rank does, sub-chunk by sub-chunk, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the span to each of the peers.
    Send {
        /// Which part of the vector.
        span: Span,
        /// From where.
        source: Source,
        /// To whom; each is on a link of its own.
        peers: Vec<Rank>,
    },
    /// Add the operands and write the sum to the output.
    Combine {
        /// Which part of the vector.
        span: Span,
        /// What is added, at least one.
        operands: Vec<Operand>,
        /// Whether this completes the sum over all ranks, so that an average is divided here.
        last: bool,
    },
}

impl Step {
    /// The part of the vector that it touches.
    #[must_use]
    pub fn span(&self) -> Span {
        match self {
            Self::Send { span, .. } | Self::Combine { span, .. } => *span,
        }
    }

    /// Whether it only moves a peer's bytes to where they belong, so that they can land there directly.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(self, Self::Combine { operands, last: false, .. } if matches!(operands[..], [Operand::From { .. }]))
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

/// What one rank does in one collective.
#[derive(Clone, Debug)]
pub struct Program {
    /// Whose program this is.
    pub rank: Rank,
    /// How many ranks take part.
    pub world: usize,
    /// Equal on all ranks that run the same collective.
    pub digest: u64,
    /// What it does.
    pub steps: Vec<Step>,
    /// For each step, the earlier steps it waits for, as a range of `dependencies`.
    pub(super) dependency_ranges: Vec<Range<u32>>,
    pub(super) dependencies: Vec<Dependency>,
    /// For each step, the later steps that wait for it, as a range of `dependents`.
    pub(super) dependent_ranges: Vec<Range<u32>>,
    pub(super) dependents: Vec<StepId>,
    /// Per peer, what is sent to it, in order.
    pub sends: Vec<Vec<LinkEntry>>,
    /// Per peer, what is received from it, in order.
    pub receives: Vec<Vec<LinkEntry>>,
}

impl Program {
    /// Completes a program from its steps and their dependencies.
    pub(super) fn assemble(
        rank: Rank,
        world: usize,
        digest: u64,
        steps: Vec<Step>,
        depends: Vec<Vec<Dependency>>,
    ) -> Self {
        let mut sends = vec![Vec::new(); world];
        let mut receives = vec![Vec::new(); world];
        for (step, body) in (0..).zip(&steps) {
            match body {
                Step::Send { peers, .. } => {
                    for (part, peer) in (0..).zip(peers) {
                        sends[*peer].push(LinkEntry { step, part });
                    }
                }
                Step::Combine { operands, .. } => {
                    for (part, operand) in (0..).zip(operands) {
                        if let Operand::From { peer } = operand {
                            receives[*peer].push(LinkEntry { step, part });
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
            dependency_ranges,
            dependencies,
            dependent_ranges,
            dependents,
            sends,
            receives,
        }
    }

    /// The earlier steps that `step` waits for.
    #[must_use]
    pub fn dependencies(&self, step: StepId) -> &[Dependency] {
        let range = &self.dependency_ranges[step as usize];
        &self.dependencies[range.start as usize..range.end as usize]
    }

    /// The later steps that wait for `step`.
    #[must_use]
    pub fn dependents(&self, step: StepId) -> &[StepId] {
        let range = &self.dependent_ranges[step as usize];
        &self.dependents[range.start as usize..range.end as usize]
    }

    /// The peers that this rank sends to or receives from.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.world).filter(|peer| !self.sends[*peer].is_empty() || !self.receives[*peer].is_empty())
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
