//! The path of small calls: every rank publishes its contribution in its mailbox, at its place in the whole vector of the
//! collective. All contributions to an element are added in rank order; where there is only one, it is copied. In an all-to-all every
//! rank copies its block out of each mailbox.
//!
//! Where every rank has a core, each assembles its own result: one hop. Where many ranks share few cores, the leader (the first
//! rank of the node) assembles the whole vector and publishes it, so that a call takes a few switches between ranks for each rank
//! and not one for each pair. In an all-to-all, where no rank needs all data, its post says that all have posted. Both ways give the
//! same bits. Every rank waits for all others, whose mailboxes it uses or not: so a
//! mailbox can be filled again, and all calls are compared. Owns the order of these steps. Must not know how a mailbox is laid out.

use super::bound_call::BoundCall;
use super::resources::Resources;
use super::ticket::OUTSIDE_JOB;
use crate::call::{Call, CallWords};
use crate::device::{Finish, Job, Operand};
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::Piece;
use crate::plan::small_layout::SmallLayout;
use crate::rank::Rank;
use crate::trace::{JobKind, MessagePart};
use crate::transport::shm::Mailbox;
use std::ops::Range;

/// The leader's index on the node.
const LEADER: usize = 0;

/// From this number of ranks on, a leader adds for all of them if they have to share cores.
const LEADER_RANKS: usize = 8;

/// Executes calls through mailboxes.
pub(super) struct SmallPath {
    mailbox: Mailbox,
    /// Whether the leader adds for all. Equal on all ranks.
    through_leader: bool,
    /// The running call, packed: the calls of others are compared without unpacking them.
    words: CallWords,
}

impl SmallPath {
    /// `ranks_per_core`: as in [`ExecutorParts`](super::ExecutorParts).
    pub(super) fn new(mailbox: Mailbox, ranks_per_core: usize) -> Self {
        let through_leader = ranks_per_core > 1 && mailbox.ranks() >= LEADER_RANKS;
        Self { mailbox, through_leader, words: CallWords::default() }
    }

    /// Executes a call whose whole vector fits a mailbox, and whose own vectors are host memory. Contributions are added in the
    /// order of local ranks, so all ranks get the same bits.
    pub(super) fn run(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let call = &bound.call;
        self.words = call.to_words();
        let bytes = call.count as usize * call.dtype.size();
        let layout = SmallLayout::new(call.collective, call.root as Rank, resources.world, bytes);
        let (contributed, received) = (layout.contributed(resources.rank), layout.received(resources.rank));
        let whole = self.mailbox.begin(bytes);
        let factor = bound.prescale.then_some(call.factor);
        copy(resources, bound, bound.input, part(whole, contributed), factor)?;
        reach(FaultPoint::SmallWritten);
        if !self.through_leader {
            self.mailbox.post(&self.words);
            reach(FaultPoint::SmallPosted);
            self.collect(resources, bound, whole)?;
            reach(FaultPoint::SmallCollected);
            if layout.exchanges_blocks() {
                return self.copy_blocks(resources, bound, &layout);
            }
            return self.assemble(resources, bound, &layout, received, bound.output);
        }
        if self.mailbox.local_rank() == LEADER {
            self.collect_for_all(resources, bound, whole)?;
            reach(FaultPoint::LeaderCollected);
            if !layout.exchanges_blocks() {
                self.assemble(resources, bound, &layout, layout.whole(), whole)?;
            }
            self.mailbox.post_to_members(&self.words);
            reach(FaultPoint::LeaderPosted);
            if layout.exchanges_blocks() {
                return self.copy_blocks(resources, bound, &layout);
            }
            return copy(resources, bound, part(whole, received), bound.output, None);
        }
        self.mailbox.post_to_leader(&self.words);
        reach(FaultPoint::MemberPosted);
        let result = self.await_leader(resources, bound)?;
        reach(FaultPoint::MemberReceived);
        if layout.exchanges_blocks() {
            // The leader has seen all posts, so none is waited for.
            self.collect(resources, bound, whole)?;
            return self.copy_blocks(resources, bound, &layout);
        }
        copy(resources, bound, part(result, received), bound.output, None)
    }

    /// Copies this rank's block out of each of the mailboxes that are listed as operands.
    fn copy_blocks(&self, resources: &mut Resources, bound: &BoundCall, layout: &SmallLayout) -> Result<()> {
        let mine = layout.block(resources.rank);
        for local_rank in 0..resources.operands.len() {
            let from = part(resources.operands[local_rank].piece, mine.clone());
            let into = part(bound.output, layout.block(self.mailbox.rank_at(local_rank)));
            copy(resources, bound, from, into, None)?;
        }
        Ok(())
    }

    /// Writes these bytes of the whole vector to `into`, from the contributions that are listed as operands.
    fn assemble(
        &self,
        resources: &mut Resources,
        bound: &BoundCall,
        layout: &SmallLayout,
        bytes: Range<usize>,
        into: Piece,
    ) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        if layout.reduces() {
            for operand in &mut resources.operands {
                operand.piece = part(operand.piece, bytes.clone());
            }
            return add(resources, bound, into);
        }
        for local_rank in 0..resources.operands.len() {
            let given = layout.contributed(self.mailbox.rank_at(local_rank));
            let common = given.start.max(bytes.start)..given.end.min(bytes.end);
            if common.is_empty() {
                continue;
            }
            let from = part(resources.operands[local_rank].piece, common.clone());
            let into = part(into, common.start - bytes.start..common.end - bytes.start);
            // The leader's own contribution is at its place already.
            if from != into {
                copy(resources, bound, from, into, None)?;
            }
        }
        Ok(())
    }

    /// Waits for the contributions of all ranks, checks their calls, and lists the messages in all mailboxes as operands. This rank's
    /// is `own`.
    fn collect(&self, resources: &mut Resources, bound: &BoundCall, own: Piece) -> Result<()> {
        let Resources { rank: me, world, links, fault, wait, operands, trace, .. } = resources;
        operands.clear();
        wait.begin();
        while operands.len() < *world {
            let local_rank = operands.len();
            if local_rank == self.mailbox.local_rank() {
                operands.push(Operand { piece: own, factor: None });
                continue;
            }
            let Some(message) = self.checked_post(*me, bound, local_rank)? else {
                reach(FaultPoint::SmallWaits);
                trace.idle();
                let is_posted = || self.mailbox.peek(local_rank).is_some();
                if !wait.pause_unless(fault, links, is_posted)? {
                    return Err(self.timed_out(resources, bound, local_rank));
                }
                continue;
            };
            wait.progressed();
            trace.progressed();
            operands.push(Operand { piece: message, factor: None });
        }
        Ok(())
    }

    /// What [`collect`](Self::collect) does, by the leader, whose own mailbox is `own`. It sleeps for one rank after another,
    /// from the last one down: in that time others post without waking it, so it sleeps for few of them.
    fn collect_for_all(&self, resources: &mut Resources, bound: &BoundCall, own: Piece) -> Result<()> {
        let Resources { rank: me, world, fault, wait, operands, trace, .. } = resources;
        operands.clear();
        operands.resize(*world, Operand { piece: own, factor: None });
        wait.begin();
        for local_rank in (LEADER + 1..*world).rev() {
            let message = loop {
                if let Some(message) = self.checked_post(*me, bound, local_rank)? {
                    break message;
                }
                trace.idle();
                if !wait.pause_by(fault, |longest| self.mailbox.await_post(local_rank, longest))? {
                    return Err(self.timed_out(resources, bound, local_rank));
                }
            };
            wait.progressed();
            trace.progressed();
            operands[local_rank].piece = message;
        }
        Ok(())
    }

    /// Waits for the whole vector of the leader, and checks its call.
    fn await_leader(&self, resources: &mut Resources, bound: &BoundCall) -> Result<Piece> {
        let Resources { rank: me, fault, wait, trace, .. } = resources;
        wait.begin();
        loop {
            if let Some(whole) = self.checked_post(*me, bound, LEADER)? {
                trace.progressed();
                return Ok(whole);
            }
            trace.idle();
            if !wait.pause_by(fault, |longest| self.mailbox.await_post(LEADER, longest))? {
                // The leader waits for the others, so it is the last to be blamed.
                let members = LEADER + 1..self.mailbox.ranks();
                let missing = members.rev().find(|member| self.mailbox.peek(*member).is_none());
                return Err(self.timed_out(resources, bound, missing.unwrap_or(LEADER)));
            }
        }
    }

    /// The message of a rank that has posted; `None` if it has not yet.
    ///
    /// # Errors
    /// `Disagreement` if its call is another one than this rank's.
    fn checked_post(&self, me: usize, bound: &BoundCall, local_rank: usize) -> Result<Option<Piece>> {
        let Some((words, message)) = self.mailbox.peek(local_rank) else { return Ok(None) };
        if words == self.words {
            return Ok(Some(message));
        }
        let rank = self.mailbox.rank_at(local_rank);
        match Call::from_words(words) {
            Some(call) if bound.call.agrees_with(&call) => Ok(Some(message)),
            Some(call) => Err(Error::disagreement(bound.call.difference(me, &call, rank))),
            None => Err(Error::disagreement(format!(
                "the mailbox of rank {rank} holds no valid call: do all ranks run the same build of flexring?"
            ))),
        }
    }

    fn timed_out(&self, resources: &Resources, bound: &BoundCall, local_rank: usize) -> Error {
        let rank = self.mailbox.rank_at(local_rank);
        let timeout = resources.wait.timeout();
        let message = format!("{}: rank {rank} did not make the same call within {timeout:?}", bound.call);
        Error::timeout(message).with_suspect(rank)
    }
}

fn part(piece: Piece, bytes: Range<usize>) -> Piece {
    piece.narrow(bytes.start, bytes.len())
}

/// Copies a vector of the call, multiplied by `factor` if there is one.
fn copy(
    resources: &mut Resources,
    bound: &BoundCall,
    from: Piece,
    into: Piece,
    factor: Option<f64>,
) -> Result<()> {
    if into.is_empty() {
        return Ok(());
    }
    let copy = Job {
        dtype: bound.call.dtype,
        arithmetic: bound.arithmetic,
        into,
        operands: &[Operand { piece: from, factor }],
        finish: Finish::Keep,
        streaming: false,
    };
    resources.trace.job_begins(JobKind::Copy, OUTSIDE_JOB, MessagePart::outside(into.len()));
    resources.devices.run(&copy, &resources.fault)?;
    resources.trace.job_ends(OUTSIDE_JOB);
    Ok(())
}

/// Adds all operands into `into`.
fn add(resources: &mut Resources, bound: &BoundCall, into: Piece) -> Result<()> {
    let sum = Job {
        dtype: bound.call.dtype,
        arithmetic: bound.arithmetic,
        into,
        operands: &resources.operands,
        finish: if bound.average { Finish::Divide(resources.world as u32) } else { Finish::Keep },
        streaming: false,
    };
    resources.trace.job_begins(JobKind::Reduce, OUTSIDE_JOB, MessagePart::outside(into.len()));
    resources.devices.run(&sum, &resources.fault)?;
    resources.trace.job_ends(OUTSIDE_JOB);
    Ok(())
}
