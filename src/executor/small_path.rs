//! The path of small calls: every rank publishes its vector in its mailbox, and all vectors are added in rank order.
//!
//! Where every rank has a core, each adds all vectors itself: one hop. Where many ranks share few cores, the leader (the first
//! rank of the node) adds them and publishes the sum, so that a call takes a few switches between ranks for each rank and not
//! one for each pair. Both ways give the same bits. Owns the order of these steps. Must not know how a mailbox is laid out.

use super::bound_call::BoundCall;
use super::resources::Resources;
use crate::device::{Finish, Job, Operand};
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::Piece;
use crate::transport::shm::Mailbox;

/// The leader's index on the node.
const LEADER: usize = 0;

/// From this number of ranks on, a leader adds for all of them if they have to share cores.
const LEADER_RANKS: usize = 8;

/// Executes calls through mailboxes.
pub(super) struct SmallPath {
    mailbox: Mailbox,
    /// Whether the leader adds for all. Equal on all ranks.
    through_leader: bool,
}

impl SmallPath {
    /// `crowded`: the ranks outnumber the cores of the node. Equal on all ranks.
    pub(super) fn new(mailbox: Mailbox, crowded: bool) -> Self {
        let through_leader = crowded && mailbox.ranks() >= LEADER_RANKS;
        Self { mailbox, through_leader }
    }

    /// Executes a call whose vectors fit a mailbox and are host memory. The vectors are added in the order of local ranks,
    /// so all ranks get the same bits.
    pub(super) fn run(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let slot = self.fill(resources, bound)?;
        reach(FaultPoint::SmallWritten);
        if !self.through_leader {
            self.mailbox.post(&bound.call);
            reach(FaultPoint::SmallPosted);
            self.collect(resources, bound)?;
            reach(FaultPoint::SmallCollected);
            return add(resources, bound);
        }
        if self.mailbox.local_rank() == LEADER {
            self.collect_for_all(resources, bound, slot)?;
            reach(FaultPoint::LeaderCollected);
            add(resources, bound)?;
            copy(resources, bound, bound.output, slot, None)?;
            self.mailbox.post_to_members(&bound.call);
            reach(FaultPoint::LeaderPosted);
            return Ok(());
        }
        self.mailbox.post_to_leader(&bound.call);
        reach(FaultPoint::MemberPosted);
        let sum = self.await_sum(resources, bound)?;
        reach(FaultPoint::MemberReceived);
        copy(resources, bound, sum, bound.output, None)
    }

    /// Writes this rank's vector to its mailbox. Returns the place.
    fn fill(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<Piece> {
        let slot = self.mailbox.begin().narrow(0, bound.input.len());
        let factor = bound.prescale.then_some(bound.call.factor);
        copy(resources, bound, bound.input, slot, factor)?;
        Ok(slot)
    }

    /// Waits for the vectors of all ranks, checks their calls, and lists the vectors as operands.
    fn collect(&self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let Resources { rank: me, world, links, fault, wait, operands, .. } = resources;
        operands.clear();
        wait.begin();
        while operands.len() < *world {
            let local_rank = operands.len();
            let Some(bytes) = self.checked_post(*me, bound, local_rank)? else {
                reach(FaultPoint::SmallWaits);
                let is_posted = || self.mailbox.peek(local_rank).is_some();
                if !wait.pause_unless(fault, links, is_posted)? {
                    return Err(self.timed_out(resources, bound, local_rank));
                }
                continue;
            };
            wait.progressed();
            operands.push(Operand { piece: bytes, factor: None });
        }
        Ok(())
    }

    /// What [`collect`](Self::collect) does, by the leader, whose own vector is in `slot`. It sleeps for one rank after another,
    /// from the last one down: in that time others post without waking it, so it sleeps for few of them.
    fn collect_for_all(&self, resources: &mut Resources, bound: &BoundCall, slot: Piece) -> Result<()> {
        let Resources { rank: me, world, fault, wait, operands, .. } = resources;
        operands.clear();
        operands.resize(*world, Operand { piece: slot, factor: None });
        wait.begin();
        for local_rank in (LEADER + 1..*world).rev() {
            let bytes = loop {
                if let Some(bytes) = self.checked_post(*me, bound, local_rank)? {
                    break bytes;
                }
                if !wait.pause_by(fault, |longest| self.mailbox.await_post(local_rank, longest))? {
                    return Err(self.timed_out(resources, bound, local_rank));
                }
            };
            wait.progressed();
            operands[local_rank].piece = bytes;
        }
        Ok(())
    }

    /// Waits for the sum of the leader, and checks its call.
    fn await_sum(&self, resources: &mut Resources, bound: &BoundCall) -> Result<Piece> {
        let Resources { rank: me, fault, wait, .. } = resources;
        wait.begin();
        loop {
            if let Some(sum) = self.checked_post(*me, bound, LEADER)? {
                return Ok(sum);
            }
            if !wait.pause_by(fault, |longest| self.mailbox.await_post(LEADER, longest))? {
                // The leader waits for the others, so it is the last to be blamed.
                let members = LEADER + 1..self.mailbox.ranks();
                let missing = members.rev().find(|member| self.mailbox.peek(*member).is_none());
                return Err(self.timed_out(resources, bound, missing.unwrap_or(LEADER)));
            }
        }
    }

    /// The vector that a rank has posted; `None` if it has not yet.
    ///
    /// # Errors
    /// `Disagreement` if its call is another one than this rank's.
    fn checked_post(&self, me: usize, bound: &BoundCall, local_rank: usize) -> Result<Option<Piece>> {
        let Some((call, bytes)) = self.mailbox.peek(local_rank) else { return Ok(None) };
        let rank = self.mailbox.rank_at(local_rank);
        match call {
            Some(call) if bound.call.agrees_with(&call) => Ok(Some(bytes.narrow(0, bound.input.len()))),
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
    resources.devices.run(&copy, &resources.fault)
}

/// Adds all operands into the output.
fn add(resources: &mut Resources, bound: &BoundCall) -> Result<()> {
    if bound.output.is_empty() {
        return Ok(());
    }
    let sum = Job {
        dtype: bound.call.dtype,
        arithmetic: bound.arithmetic,
        into: bound.output,
        operands: &resources.operands,
        finish: if bound.average { Finish::Divide(resources.world as u32) } else { Finish::Keep },
        streaming: false,
    };
    resources.devices.run(&sum, &resources.fault)
}
