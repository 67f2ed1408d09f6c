//! The program of one rank: sends and combines, each with the earlier steps that touch the same span.
//!
//! Owns the form of a program, which serves every element count. Must not know which schedule it came from.
//!
//! Every step has a depth: the number of hops of the collective before it. On all ranks, steps that touch the
//! same elements have rising depths, and steps of one depth are listed in the same order. So both ends of a
//! link derive the same list of messages, and the earliest unfinished message of the whole world can always
//! move: no program deadlocks.
//!
//! | module | owns |
//! |---|---|
//! | `step` | steps, and what they wait for |
//! | `waves` | the number of sub-chunks that are in flight |
//! | `scratch_span` | rings of sub-chunks in scratch memory |

mod scratch_span;
mod step;
mod waves;

pub use scratch_span::ScratchSpan;
pub use step::{
    Body, BufferKind, Dependency, DependencyKind, OperandSource, SharedSteps, Step, StepId, StepPlace,
};
pub use waves::Waves;

use super::Rank;
use super::block_order::BlockOrder;
use super::fraction::Span;
use super::step_lists::StepLists;
use scratch_span::{add_reuse, scratch_spans};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    /// Whether each peer is sent the whole vector, so that none goes without a message, however short the
    /// vector is.
    pub sends_all_to_peers: bool,
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
        let is_sent_all = |messages: &LinkMessages| {
            messages.sends.iter().any(|entry| steps[entry.step as usize].span() == Span::WHOLE)
        };
        let sends_all_to_peers = lists.iter().all(is_sent_all);
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
            sends_all_to_peers,
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
                group: 0,
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

    /// By part of a step, where its messages are listed. `part` is that of [`LinkEntry`]; operands that are
    /// not received have no messages.
    #[must_use]
    pub(super) fn link_places(&self, step: StepId) -> &[LinkPlace] {
        self.link_places.get(step)
    }

    /// The peers that this rank sends to or receives from.
    pub fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.links.keys().copied()
    }
}
