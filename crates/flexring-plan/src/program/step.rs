//! The steps of a program, and what they wait for.
//!
//! Owns their form.

use crate::Rank;
use crate::fraction::Span;
use crate::inline_list::InlineList;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Index of a step in its program.
pub type StepId = u32;

/// A memory that holds parts of the vector: the caller's two vectors, and one of this rank's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferKind {
    /// The caller's contribution. Never written.
    Input,
    /// The result; partial sums until the program ends.
    Output,
    /// Data that this rank passes on as it is, in scratch memory.
    Transit,
}

/// One operand of a combine, in the order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    /// A part of one of this rank's own vectors.
    Own {
        /// The vector that holds it.
        buffer: BufferKind,
        /// Whether the combine multiplies it by this rank's factor.
        scaled: bool,
    },
    /// A message.
    Received {
        /// The sender.
        peer: Rank,
    },
}

/// The elements of a step, and where they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepPlace {
    /// The part of the vector that it reads or writes.
    pub span: Span,
    /// The span whose start sub-chunk boundaries are counted from: steps with equal grids cut the elements
    /// that they share at the same places.
    pub grid: Span,
}

/// Places and operations of steps. Programs that are made with one of these store each place once, and
/// operations that follow each other closely.
#[derive(Debug, Default)]
pub struct SharedSteps {
    by_rank: bool,
    places: HashSet<Arc<StepPlace>>,
    /// The newest operations. A rank of a chain alternates between few.
    bodies: VecDeque<Arc<Body>>,
}

/// Operations among which an equal one is searched.
const RECENT_BODIES: usize = 8;

impl SharedSteps {
    /// For programs whose steps list peers and operands by rank, not in the order of addition; a rank's own
    /// operands are last. More programs are equal then but for spans and peers. Their sums are those of
    /// another order, so they must be simulated only.
    #[must_use]
    pub fn by_rank() -> Self {
        Self { by_rank: true, ..Self::default() }
    }

    pub(crate) fn body(&mut self, body: Body) -> Arc<Body> {
        let body = if self.by_rank { body.by_rank() } else { body };
        if let Some(found) = self.bodies.iter().find(|recent| ***recent == body) {
            return Arc::clone(found);
        }
        let body = Arc::new(body);
        self.bodies.truncate(RECENT_BODIES - 1);
        self.bodies.push_front(Arc::clone(&body));
        body
    }

    pub(crate) fn place(&mut self, place: StepPlace) -> Arc<StepPlace> {
        if let Some(found) = self.places.get(&place) {
            return Arc::clone(found);
        }
        let place = Arc::new(place);
        self.places.insert(Arc::clone(&place));
        place
    }
}

/// One send or combine, executed sub-chunk by sub-chunk in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its elements.
    pub place: Arc<StepPlace>,
    /// Hops of the collective before this step.
    pub depth: u32,
    /// The group that it moves data for, among those of its depth. Equal at both ends of a link.
    pub group: u32,
    /// The operation.
    pub body: Arc<Body>,
}

/// The operation of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Send the span to each of the peers.
    Send {
        /// The vector to send from.
        buffer: BufferKind,
        /// The receivers, all different.
        peers: InlineList<Rank>,
    },
    /// Add the operands and write the sum.
    Combine {
        /// The operands in the order of addition, at least one.
        operands: InlineList<OperandSource>,
        /// Where the sum is written: the output, or data to pass on.
        into: BufferKind,
        /// Whether this completes the sum over all ranks. An average is divided here.
        last: bool,
    },
}

impl Body {
    /// The operation with its lists by rank.
    fn by_rank(self) -> Self {
        match self {
            Self::Send { buffer, peers } => {
                let mut peers = peers.to_vec();
                peers.sort_unstable();
                Self::Send { buffer, peers: peers.into() }
            }
            Self::Combine { operands, into, last } => {
                let mut operands = operands.to_vec();
                operands.sort_by_key(|operand| match operand {
                    OperandSource::Received { peer } => *peer,
                    OperandSource::Own { .. } => Rank::MAX,
                });
                Self::Combine { operands: operands.into(), into, last }
            }
        }
    }

    /// The ranks that it sends to or receives from.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        let (sends, operands) = match self {
            Self::Send { peers, .. } => (&peers[..], &[][..]),
            Self::Combine { operands, .. } => (&[][..], &operands[..]),
        };
        let received = operands.iter().filter_map(|operand| match operand {
            OperandSource::Received { peer } => Some(*peer),
            OperandSource::Own { .. } => None,
        });
        sends.iter().copied().chain(received)
    }
}

impl Step {
    /// The part of the vector that it reads or writes.
    #[must_use]
    pub fn span(&self) -> Span {
        self.place.span
    }

    /// Whether it is a combine of this rank's own data only.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(&*self.body, Body::Combine { operands, .. } if operands.iter().all(|operand| matches!(operand, OperandSource::Own { .. })))
    }

    /// The memory that a combine writes to.
    #[must_use]
    pub fn destination(&self) -> BufferKind {
        match *self.body {
            Body::Combine { into, .. } => into,
            Body::Send { .. } => BufferKind::Output,
        }
    }

    /// Whether it only copies a message, so that the message can be received at its destination directly.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(&*self.body, Body::Combine { operands, last: false, .. } if matches!(operands[..], [OperandSource::Received { .. }]))
    }
}

/// A step that another one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// The step.
    pub on: StepId,
    /// What each sub-chunk waits for.
    pub kind: DependencyKind,
}

/// What the sub-chunks of a step wait for in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DependencyKind {
    /// An earlier step is done with the same elements.
    Elements,
    /// As `Elements`, if input and output are the same memory. Otherwise nothing.
    ElementsInPlace,
    /// A later step, or the same, is done with the elements that were at the same place of scratch memory
    /// before: see [`ScratchSpan`](super::ScratchSpan).
    Reuse,
}
