//! The program of one rank: sends and combines, each with the earlier steps that touch the same span.
//!
//! Owns the form of a program, which serves every element count. Must not know which schedule it came from.
//!
//! Every step has a depth: the number of hops of the collective before it. On all ranks, steps that touch the same
//! elements have rising depths, and steps of one depth are listed in the same order. So both ends of a link derive
//! the same list of messages, and the earliest unfinished message of the whole world can always move: no program
//! deadlocks.

mod scratch_span;

pub use scratch_span::ScratchSpan;

use super::Rank;
use super::block_order::BlockOrder;
use super::fraction::Span;
use super::short_list::ShortList;
use super::step_lists::StepLists;
use scratch_span::{add_reuse, scratch_spans};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
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
    /// The span whose start sub-chunk boundaries are counted from: steps with equal grids cut the elements that they
    /// share at the same places.
    pub grid: Span,
}

/// Places and operations of steps. Programs that are made with one of these store each place once, and operations that follow
/// each other closely.
#[derive(Debug, Default)]
pub struct SharedSteps {
    places: HashSet<Arc<StepPlace>>,
    /// The newest operations. A rank of a chain alternates between few.
    bodies: VecDeque<Arc<Body>>,
}

/// Operations among which an equal one is searched.
const RECENT_BODIES: usize = 8;

impl SharedSteps {
    pub(super) fn body(&mut self, body: Body) -> Arc<Body> {
        if let Some(found) = self.bodies.iter().find(|recent| ***recent == body) {
            return Arc::clone(found);
        }
        let body = Arc::new(body);
        self.bodies.truncate(RECENT_BODIES - 1);
        self.bodies.push_front(Arc::clone(&body));
        body
    }

    pub(super) fn place(&mut self, place: StepPlace) -> Arc<StepPlace> {
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
        peers: ShortList<Rank>,
    },
    /// Add the operands and write the sum.
    Combine {
        /// The operands in the order of addition, at least one.
        operands: ShortList<OperandSource>,
        /// Where the sum is written: the output, or data to pass on.
        into: BufferKind,
        /// Whether this completes the sum over all ranks. An average is divided here.
        last: bool,
    },
}

impl Body {
    /// The ranks that it sends to or receives from.
    fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
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
    /// A later step, or the same, is done with the elements that were at the same place of scratch memory before: see
    /// [`ScratchSpan`].
    Reuse,
}

/// A step's messages on one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEntry {
    /// The step that sends or uses these messages.
    pub step: StepId,
    /// The index of the peer among a send's peers, or of the operand among a combine's operands.
    pub part: u32,
}

/// Where the messages of a step and one of its parts are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkPlace {
    /// Number of the link: the index of the peer in [`Program::links`].
    pub(super) link: u32,
    /// The index in the list of the link, [`LinkMessages::sends`] or [`LinkMessages::receives`].
    pub(super) entry: u32,
}

impl LinkPlace {
    /// In place of the messages of an operand that is not received.
    const NONE: Self = Self { link: u32::MAX, entry: u32::MAX };
}

/// The messages between this rank and one peer, in order.
#[derive(Clone, Debug, Default)]
pub struct LinkMessages {
    /// Messages to the peer.
    pub sends: Vec<LinkEntry>,
    /// Messages from the peer.
    pub receives: Vec<LinkEntry>,
}

/// The parts of the vector that the caller's memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldSpans {
    /// The span of the caller's input.
    pub input: Span,
    /// The span of the caller's output. Partial sums outside it are in the executor's scratch memory: see
    /// [`Program::scratch`].
    pub output: Span,
    /// Whether input and output must not overlap: peers may read the input until the output is complete.
    pub disjoint: bool,
}

/// The order of sub-chunks that are in flight at the same time. There are as many waves as the longest grid has
/// sub-chunks. The wave of a sub-chunk is its position in its own grid, scaled to that number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    /// Length of the longest grid of all ranks, as a part of the vector (0 to 1).
    pub longest: f64,
    /// Waves that each hop lags behind the previous one.
    pub lag: u64,
}

impl Waves {
    /// Number of waves, at least 1, in a call of `count` elements, in sub-chunks of `subchunk`.
    #[must_use]
    pub fn number(&self, count: u64, subchunk: u64) -> u64 {
        (self.longest * count as f64 / subchunk as f64).ceil().max(1.0) as u64
    }
}

/// The steps of one rank in one collective, with their dependencies and messages.
#[derive(Clone, Debug)]
pub struct Program {
    /// The rank that runs it.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// Equal on all ranks that run the same plan for the same collective.
    pub digest: u64,
    /// Steps by rising depth.
    pub steps: Vec<Step>,
    /// How sub-chunks of all depths are interleaved; `None` if the messages of a link are ordered by step.
    pub waves: Option<Waves>,
    /// The parts of the vector that the caller's memory holds.
    pub held_spans: HeldSpans,
    /// The spans outside the caller's output that steps use, in rising order.
    pub scratch: Vec<ScratchSpan>,
    /// The place of each block in the vector of an all-to-all that goes by node. `None` for other programs.
    pub blocks: Option<Arc<BlockOrder>>,
    /// By step, the steps that it waits for.
    dependencies: StepLists<Dependency>,
    /// By step, the steps that wait for it.
    dependents: StepLists<StepId>,
    /// By step and part, where its messages are listed.
    link_places: StepLists<LinkPlace>,
    /// By peer, the messages of the link; only peers with messages.
    pub links: BTreeMap<Rank, LinkMessages>,
}

/// Input of [`Program::assemble`].
pub(super) struct ProgramParts {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) digest: u64,
    pub(super) waves: Option<Waves>,
    pub(super) held_spans: HeldSpans,
    pub(super) blocks: Option<Arc<BlockOrder>>,
    pub(super) steps: Vec<Step>,
    pub(super) depends: StepLists<Dependency>,
}

impl Program {
    /// Builds a program from its steps and their dependencies: derives dependents and messages.
    pub(super) fn assemble(parts: ProgramParts) -> Self {
        let ProgramParts { rank, world, digest, waves, held_spans, blocks, mut steps, mut depends } = parts;
        steps.shrink_to_fit();
        let peers: BTreeSet<Rank> = steps.iter().flat_map(|step| step.body.peers()).collect();
        let peers: Vec<Rank> = peers.into_iter().collect();
        let mut lists = vec![LinkMessages::default(); peers.len()];
        let mut link_places = StepLists::default();
        let mut add = |peer: Rank, is_send: bool, entry: LinkEntry| {
            let link = peers.binary_search(&peer).expect("a peer of a step");
            let LinkMessages { sends, receives } = &mut lists[link];
            let list = if is_send { sends } else { receives };
            list.push(entry);
            LinkPlace { link: link as u32, entry: list.len() as u32 - 1 }
        };
        for (step, body) in (0..).zip(steps.iter().map(|step| &step.body)) {
            match &**body {
                Body::Send { peers, .. } => {
                    for (part, peer) in (0..).zip(peers) {
                        link_places.push(add(*peer, true, LinkEntry { step, part }));
                    }
                }
                Body::Combine { operands, .. } => {
                    for (part, operand) in (0..).zip(operands) {
                        link_places.push(match operand {
                            OperandSource::Received { peer } => add(*peer, false, LinkEntry { step, part }),
                            OperandSource::Own { .. } => LinkPlace::NONE,
                        });
                    }
                }
            }
            link_places.end_step();
        }
        link_places.shrink_to_fit();
        for messages in &mut lists {
            messages.sends.shrink_to_fit();
            messages.receives.shrink_to_fit();
        }
        let links = peers.into_iter().zip(lists).collect();
        let scratch = scratch_spans(&steps, held_spans.output, waves.is_some());
        if waves.is_some() && !scratch.is_empty() {
            depends = add_reuse(&steps, &scratch, held_spans.output, &depends);
        }
        depends.shrink_to_fit();
        let dependents = depends.reversed(|dependency| dependency.on);
        Self {
            rank,
            world,
            digest,
            steps,
            waves,
            held_spans,
            scratch,
            blocks,
            dependencies: depends,
            dependents,
            link_places,
            links,
        }
    }

    /// The program of `rank` that only sends one message to `peer`, or only receives one from it.
    #[must_use]
    pub fn of_message(rank: Rank, world: usize, peer: Rank, is_send: bool) -> Self {
        let body = if is_send {
            Body::Send { buffer: BufferKind::Input, peers: [peer].into() }
        } else {
            Body::Combine {
                operands: [OperandSource::Received { peer }].into(),
                into: BufferKind::Output,
                last: false,
            }
        };
        Self::assemble(ProgramParts {
            rank,
            world,
            digest: 0,
            waves: None,
            held_spans: HeldSpans { input: Span::WHOLE, output: Span::WHOLE, disjoint: false },
            blocks: None,
            steps: vec![Step {
                place: Arc::new(StepPlace { span: Span::WHOLE, grid: Span::WHOLE }),
                depth: 0,
                body: Arc::new(body),
            }],
            depends: StepLists::without_entries(1),
        })
    }

    /// The steps that `step` waits for.
    #[must_use]
    pub fn dependencies(&self, step: StepId) -> &[Dependency] {
        self.dependencies.get(step)
    }

    /// Removes the dependencies of `step`, which makes the program wrong.
    #[cfg(test)]
    pub(super) fn remove_dependencies(&mut self, step: StepId) {
        self.dependencies.clear_step(step);
    }

    /// The steps that wait for `step`.
    #[must_use]
    pub fn dependents(&self, step: StepId) -> &[StepId] {
        self.dependents.get(step)
    }

    /// By part of a step, where its messages are listed. `part` is that of [`LinkEntry`]; operands that are not received have no messages.
    #[must_use]
    pub(super) fn link_places(&self, step: StepId) -> &[LinkPlace] {
        self.link_places.get(step)
    }

    /// The peers that this rank sends to or receives from.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.links.keys().copied()
    }
}
