//! The path of small calls: every rank publishes its vector in its mailbox and adds all vectors in rank order.
//!
//! Owns the order of these steps. Must not know how a mailbox is laid out.

use super::bound_call::BoundCall;
use super::resources::Resources;
use crate::device::{Finish, Job, Operand};
use crate::error::{Error, Result};
use crate::transport::shm::Mailbox;

/// Executes calls through mailboxes.
pub(super) struct SmallPath {
    mailbox: Mailbox,
}

impl SmallPath {
    pub(super) fn new(mailbox: Mailbox) -> Self {
        Self { mailbox }
    }

    /// Executes a call whose vectors fit a mailbox and are host memory. All ranks add in the order of their local ranks, so all
    /// get the same bits.
    pub(super) fn run(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        self.publish(resources, bound)?;
        self.collect(resources, bound)?;
        add(resources, bound)
    }

    /// Writes this rank's vector and call to its mailbox.
    fn publish(&mut self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let into = self.mailbox.begin().narrow(0, bound.input.len());
        let factor = bound.prescale.then_some(bound.call.factor);
        let copy = Job {
            dtype: bound.call.dtype,
            arithmetic: bound.arithmetic,
            into,
            operands: &[Operand { piece: bound.input, factor }],
            finish: Finish::Keep,
            streaming: false,
        };
        if !into.is_empty() {
            resources.devices.run(&copy, &resources.fault)?;
        }
        self.mailbox.post(&bound.call);
        Ok(())
    }

    /// Waits for the vectors of all ranks, checks their calls, and lists the vectors as operands.
    fn collect(&self, resources: &mut Resources, bound: &BoundCall) -> Result<()> {
        let Resources { rank: me, world, links, fault, wait, operands, .. } = resources;
        operands.clear();
        wait.begin();
        while operands.len() < *world {
            let local_rank = operands.len();
            let rank = self.mailbox.rank_at(local_rank);
            let Some((call, bytes)) = self.mailbox.peek(local_rank) else {
                let is_posted = || self.mailbox.peek(local_rank).is_some();
                if !wait.pause_unless(fault, links, is_posted)? {
                    let message = format!(
                        "{}: rank {rank} did not make the same call within {:?}",
                        bound.call,
                        wait.timeout()
                    );
                    return Err(Error::timeout(message).with_suspect(rank));
                }
                continue;
            };
            wait.progressed();
            match call {
                Some(call) if bound.call.agrees_with(&call) => {}
                Some(call) => {
                    let message = bound.call.difference(*me, &call, rank);
                    return Err(Error::disagreement(message));
                }
                None => {
                    let message = format!(
                        "the mailbox of rank {rank} holds no valid call: do all ranks run the same build of flexring?"
                    );
                    return Err(Error::disagreement(message));
                }
            }
            operands.push(Operand { piece: bytes.narrow(0, bound.input.len()), factor: None });
        }
        Ok(())
    }
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
