//! The path for small messages: everybody's vector in everybody's sight, added by each rank in rank order.

use super::{BoundCall, Executor};
use crate::device::{self, Finish, Job};
use crate::error::{Error, Result};
use crate::memory::Piece;

impl Executor {
    /// Runs a call whose vectors fit a mailbox. All ranks add in the order of their places on the node, so all
    /// end with the same bits.
    pub(super) fn run_small(&mut self, work: &BoundCall) -> Result<()> {
        let mailbox = self.mailbox.as_mut().expect("the communicator asks only if there is one");
        let into = mailbox.open().narrow(0, work.input.len());
        let factor = work.prescale.then_some(work.call.factor);
        let copy = Job {
            dtype: work.call.dtype,
            arithmetic: work.arithmetic,
            into,
            operands: &[device::Operand { piece: work.input, factor }],
            finish: Finish::Keep,
            streaming: false,
        };
        if !into.is_empty() {
            self.devices.run(&copy, &self.fault)?;
        }
        mailbox.post(&work.call);
        self.operands.clear();
        self.wait.begin();
        while self.operands.len() < self.world {
            let place = self.operands.len();
            let mailbox = self.mailbox.as_ref().expect("just used");
            let rank = mailbox.rank_at(place);
            let Some((call, bytes)) = mailbox.look(place) else {
                let mailbox = &self.mailbox;
                let come = || mailbox.as_ref().is_some_and(|mailbox| mailbox.look(place).is_some());
                if !self.wait.pause_unless(&self.fault, &mut self.links, come)? {
                    let words = format!(
                        "{}: rank {rank} did not make the same call within {:?}",
                        work.call,
                        self.wait.timeout()
                    );
                    return Err(Error::timeout(words).with_suspect(rank));
                }
                continue;
            };
            self.wait.progressed();
            match call {
                Some(call) if work.call.agrees_with(&call) => {}
                Some(call) => {
                    let words = work.call.difference(self.rank, &call, rank);
                    return Err(Error::disagreement(words));
                }
                None => {
                    let words = format!("what rank {rank} wrote to its mailbox is no call");
                    return Err(Error::disagreement(words));
                }
            }
            self.operands.push(device::Operand { piece: bytes.narrow(0, work.input.len()), factor: None });
        }
        if work.output == Piece::EMPTY || work.output.is_empty() {
            return Ok(());
        }
        // On the host, whose memory all of it is in; a GPU gets the result.
        let on_host = work.output.is_host();
        let into = if on_host { work.output } else { self.slots.spare(work.output.len()) };
        let sum = Job {
            dtype: work.call.dtype,
            arithmetic: work.arithmetic,
            into,
            operands: &self.operands,
            finish: if work.average { Finish::Divide(self.world as u32) } else { Finish::Keep },
            streaming: false,
        };
        self.devices.run(&sum, &self.fault)?;
        if !on_host {
            let operands = [device::Operand { piece: into, factor: None }];
            let hand_over = Job { into: work.output, operands: &operands, finish: Finish::Keep, ..sum };
            self.devices.run(&hand_over, &self.fault)?;
        }
        Ok(())
    }
}
