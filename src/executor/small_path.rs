//! The path of small calls: every rank publishes its contribution in its mailbox, at its place in the whole
//! vector of the collective. All contributions to an element are added in rank order; where there is only
//! one, it is copied. In an all-to-all every rank copies its block out of each mailbox.
//!
//! Where every rank has a core, each assembles its own result: one hop. Where many ranks share few cores, the
//! leader (the first rank of the node) assembles the whole vector and publishes it, so that a call takes a
//! few switches between ranks for each rank and not one for each pair. In an all-to-all, where no rank needs
//! all data, its post says that all have posted. Both ways give the same bits. Every rank waits for all
//! others, whose mailboxes it uses or not: so a mailbox can be filled again, and all calls are compared. Owns
//! the order of these steps.

use super::bound_call::BoundCall;
use super::resources::Resources;
use super::ticket::OUTSIDE_JOB;
use crate::call::{Call, CallWords};
use crate::device::{Finish, Job, Operand};
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{self, Piece};
use crate::plan::small_layout::SmallLayout;
use crate::plan::thresholds::goes_through_leader;
use crate::rank::Rank;
use crate::trace::{JobKind, MessagePart};
use crate::transport::shm::{Mailbox, Posted};
use std::ops::Range;

/// The leader's index on the node.
const LEADER: usize = 0;

/// Executes calls through mailboxes.
pub(super) struct SmallPath {
    mailbox: Mailbox,
    /// Whether the leader adds for all. Equal on all ranks.
    through_leader: bool,
    /// The messages of calls of the same length, by slot of the mailbox.
    messages: [Messages; 2],
}

/// The messages of all ranks in one slot of their mailboxes, as operands, in the order of local ranks. Kept,
/// because the next call that uses the slot, the one after the next, is often as long: an 8-byte call
/// executes 140 instructions less.
struct Messages {
    /// The length of each message.
    len: usize,
    /// The bytes of it that are listed.
    bytes: Range<usize>,
    operands: Vec<Operand>,
}

impl SmallPath {
    /// `ranks_per_core`: as in [`ExecutorParts`](super::ExecutorParts).
    pub(super) fn new(mailbox: Mailbox, ranks_per_core: usize) -> Self {
        let through_leader = goes_through_leader(mailbox.ranks(), ranks_per_core);
        // The first call allocates no more than later ones.
        let messages =
            [(); 2].map(|()| Messages { len: 0, bytes: 0..0, operands: Vec::with_capacity(mailbox.ranks()) });
        Self { mailbox, through_leader, messages }
    }

    /// Executes a call whose whole vector fits a mailbox, and whose own vectors are host memory.
    /// Contributions are added in the order of local ranks, so all ranks get the same bits.
    pub(super) fn run(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let call = &bound.call;
        let bytes = call.count as usize * call.dtype.size();
        let layout = SmallLayout::new(call.collective, call.root as Rank, resources.world, bytes);
        let (contributed, received) = (layout.contributed(resources.rank), layout.received(resources.rank));
        self.mailbox.begin(call.to_words(), bytes);
        let whole = self.mailbox.message(self.mailbox.local_rank());
        let factor = bound.prescale.then_some(call.factor);
        copy(resources, bound, bound.input, part(whole, contributed), factor)?;
        reach(FaultPoint::SmallWritten);
        if !self.through_leader {
            self.list_messages(&layout, received.clone());
            self.mailbox.post();
            reach(FaultPoint::SmallPosted);
            // The first look comes before the fence in `wake_neighbours`, so that this rank's cache line and
            // those of the others travel at the same time (bench/results/README.md, "Short calls").
            let missing = self.first_missing(resources.rank, bound, 0);
            self.mailbox.wake_neighbours();
            self.collect(resources, bound, missing?)?;
            reach(FaultPoint::SmallCollected);
            if layout.exchanges_blocks() {
                self.copy_blocks(resources, bound, &layout)?;
            } else {
                self.assemble(resources, bound, &layout, received, bound.output)?;
            }
            self.mailbox.prefetch_next();
            return Ok(());
        }
        if self.mailbox.local_rank() == LEADER {
            self.list_messages(&layout, layout.whole());
            self.collect_for_all(resources, bound)?;
            reach(FaultPoint::LeaderCollected);
            if !layout.exchanges_blocks() {
                self.assemble(resources, bound, &layout, layout.whole(), whole)?;
            }
            self.mailbox.post_to_members();
            reach(FaultPoint::LeaderPosted);
            if layout.exchanges_blocks() {
                return self.copy_blocks(resources, bound, &layout);
            }
            return copy(resources, bound, part(whole, received), bound.output, None);
        }
        self.mailbox.post_to_leader();
        reach(FaultPoint::MemberPosted);
        self.await_leader(resources, bound)?;
        reach(FaultPoint::MemberReceived);
        if layout.exchanges_blocks() {
            self.list_messages(&layout, layout.whole());
            // The leader has seen all posts, so none is waited for.
            self.collect(resources, bound, 0)?;
            return self.copy_blocks(resources, bound, &layout);
        }
        copy(resources, bound, part(self.mailbox.message(LEADER), received), bound.output, None)
    }

    /// Lists the messages of all ranks; contributions that are reduced with the bytes `reduced` only. Called
    /// before the post, because what a rank does between its post and its first look at the others' posts
    /// delays the call.
    fn list_messages(&mut self, layout: &SmallLayout, reduced: Range<usize>) {
        let len = layout.whole().end;
        let bytes = if layout.reduces() { reduced } else { layout.whole() };
        let messages = &mut self.messages[self.mailbox.slot()];
        if messages.operands.is_empty() || (messages.len, &messages.bytes) != (len, &bytes) {
            let message = |local_rank| part(self.mailbox.message(local_rank), bytes.clone());
            let all = (0..self.mailbox.ranks()).map(|rank| Operand { piece: message(rank), factor: None });
            messages.operands.clear();
            messages.operands.extend(all);
            (messages.len, messages.bytes) = (len, bytes);
        }
    }

    /// The messages that were listed for this call.
    fn operands(&self) -> &[Operand] {
        &self.messages[self.mailbox.slot()].operands
    }

    /// Copies this rank's block out of each message in the list.
    fn copy_blocks(&self, resources: &mut Resources, bound: &BoundCall, layout: &SmallLayout) -> Result<()> {
        let mine = layout.block(resources.rank);
        for (local_rank, message) in self.operands().iter().enumerate() {
            let from = part(message.piece, mine.clone());
            let into = part(bound.output, layout.block(self.mailbox.rank_at(local_rank)));
            copy(resources, bound, from, into, None)?;
        }
        Ok(())
    }

    /// Writes these bytes of the whole vector to `into`, from the contributions in the list. Those that are
    /// reduced are listed with these bytes only.
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
            debug_assert_eq!(self.messages[self.mailbox.slot()].bytes, bytes);
            return add(resources, bound, into, self.operands());
        }
        for (local_rank, message) in self.operands().iter().enumerate() {
            let given = layout.contributed(self.mailbox.rank_at(local_rank));
            let common = given.start.max(bytes.start)..given.end.min(bytes.end);
            if common.is_empty() {
                continue;
            }
            let from = part(message.piece, common.clone());
            let into = part(into, common.start - bytes.start..common.end - bytes.start);
            // The leader's own contribution is at its place already.
            if from != into {
                copy(resources, bound, from, into, None)?;
            }
        }
        Ok(())
    }

    /// The first of the ranks from this local rank on that has not posted; the number of ranks if all have.
    fn first_missing(&self, me: Rank, bound: &BoundCall, from: usize) -> Result<usize> {
        for local_rank in from..self.mailbox.ranks() {
            if local_rank != self.mailbox.local_rank() && !self.has_posted(me, bound, local_rank)? {
                return Ok(local_rank);
            }
        }
        Ok(self.mailbox.ranks())
    }

    /// Waits until all ranks from the local rank `missing` on have posted, and checks their calls.
    fn collect(&self, resources: &mut Resources, bound: &BoundCall, mut missing: usize) -> Result<()> {
        let Resources { rank: me, links, fault, wait, trace, .. } = resources;
        if missing == self.mailbox.ranks() {
            trace.progressed();
            return Ok(());
        }
        wait.begin();
        loop {
            let before = missing;
            missing = self.first_missing(*me, bound, before)?;
            if missing == self.mailbox.ranks() {
                trace.progressed();
                return Ok(());
            }
            if missing > before {
                wait.progressed();
                trace.progressed();
            }
            reach(FaultPoint::SmallWaits);
            trace.idle();
            let is_posted = || self.mailbox.peek(missing) != Posted::Nothing;
            if !wait.pause_unless(fault, links, is_posted)? {
                return Err(self.timed_out(resources, bound, missing));
            }
        }
    }

    /// What [`collect`](Self::collect) does, by the leader. It sleeps for one rank after another,
    /// from the last one down: in that time others post without waking it, so it sleeps for few of them.
    fn collect_for_all(&self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let Resources { rank: me, fault, wait, trace, .. } = resources;
        wait.begin();
        for local_rank in (LEADER + 1..self.mailbox.ranks()).rev() {
            while !self.has_posted(*me, bound, local_rank)? {
                trace.idle();
                if !wait.pause_by(fault, |longest| self.mailbox.await_post(local_rank, longest))? {
                    return Err(self.timed_out(resources, bound, local_rank));
                }
            }
            wait.progressed();
            trace.progressed();
        }
        Ok(())
    }

    /// Waits for the whole vector of the leader, and checks its call.
    fn await_leader(&self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let Resources { rank: me, fault, wait, trace, .. } = resources;
        wait.begin();
        while !self.has_posted(*me, bound, LEADER)? {
            trace.idle();
            if !wait.pause_by(fault, |longest| self.mailbox.await_post(LEADER, longest))? {
                // The leader waits for the others, so it is the last to be blamed.
                let members = LEADER + 1..self.mailbox.ranks();
                let missing = members.rev().find(|member| self.mailbox.peek(*member) == Posted::Nothing);
                return Err(self.timed_out(resources, bound, missing.unwrap_or(LEADER)));
            }
        }
        trace.progressed();
        Ok(())
    }

    /// Whether a rank has posted this call.
    ///
    /// # Errors
    /// `Disagreement` if it has posted another one.
    fn has_posted(&self, me: Rank, bound: &BoundCall, local_rank: usize) -> Result<bool> {
        match self.mailbox.peek(local_rank) {
            Posted::Nothing => Ok(false),
            Posted::SameCall => Ok(true),
            Posted::OtherCall(words) => self.check_other(me, bound, local_rank, words).map(|()| true),
        }
    }

    /// Checks a call whose words differ from those of this rank: the factor may.
    #[cold]
    fn check_other(&self, me: Rank, bound: &BoundCall, local_rank: usize, words: CallWords) -> Result<()> {
        let rank = self.mailbox.rank_at(local_rank);
        match Call::from_words(words) {
            Some(call) if bound.call.agrees_with(&call) => Ok(()),
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
    resources.trace.job_begins(JobKind::Copy, OUTSIDE_JOB, MessagePart::outside(into.len()));
    // A device executes more instructions before it copies the first byte.
    if factor.is_some() || !memory::copy_short(into, from) {
        let copy = Job {
            dtype: bound.call.dtype,
            arithmetic: bound.arithmetic,
            into,
            operands: &[Operand { piece: from, factor }],
            finish: Finish::Keep,
            streaming: false,
        };
        resources.devices.run_on_host(&copy, &resources.fault, resources.wait.timeout())?;
    }
    resources.trace.job_ends(OUTSIDE_JOB);
    Ok(())
}

/// Adds all operands into `into`.
fn add(resources: &mut Resources, bound: &BoundCall, into: Piece, operands: &[Operand]) -> Result<()> {
    let sum = Job {
        dtype: bound.call.dtype,
        arithmetic: bound.arithmetic,
        into,
        operands,
        finish: if bound.average { Finish::Divide(resources.world as u32) } else { Finish::Keep },
        streaming: false,
    };
    resources.trace.job_begins(JobKind::Reduce, OUTSIDE_JOB, MessagePart::outside(into.len()));
    resources.devices.run_on_host(&sum, &resources.fault, resources.wait.timeout())?;
    resources.trace.job_ends(OUTSIDE_JOB);
    Ok(())
}
