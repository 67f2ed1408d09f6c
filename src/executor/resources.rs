//! What both ways of executing a call use: links, devices, slots, and waiting.
//!
//! Owns what must be stopped when a call fails.

use super::devices::Devices;
use super::links::Links;
use super::slots::Slots;
use super::ticket::OUTSIDE_JOB;
use super::wait::Wait;
use crate::device::{Arithmetic, Finish, Job, Operand};
use crate::dtype::DType;
use crate::error::Result;
use crate::fault::Fault;
use crate::memory::Piece;
use crate::rank::Rank;
use crate::trace::{JobKind, MessagePart, Trace};
use std::sync::Arc;

/// What a rank executes its calls with.
pub(super) struct Resources {
    pub rank: Rank,
    /// The number of ranks.
    pub world: usize,
    /// Dropped before the links, whose memory a GPU may have pinned.
    pub devices: Devices,
    pub links: Links,
    pub slots: Slots,
    pub fault: Arc<Fault>,
    pub wait: Wait,
    /// Records what happens, if the settings ask for it.
    pub trace: Trace,
    /// The operands of the job that is being made. Kept, so that no job allocates.
    pub operands: Vec<Operand>,
}

impl Resources {
    /// Sends the next message to `peer`: a sub-chunk of a step, or what belongs to none.
    pub(super) fn send(&mut self, peer: Rank, piece: Piece, part: MessagePart) -> Result<()> {
        self.trace.send_begins(peer, part);
        self.links.send(peer, piece)
    }

    /// Posts a receive for the next message of `peer`.
    pub(super) fn post_recv(&mut self, peer: Rank, piece: Piece, part: MessagePart) -> Result<()> {
        self.trace.receive_begins(peer, part);
        self.links.post_recv(peer, piece)
    }

    /// Releases the oldest view of `peer`.
    pub(super) fn release(&mut self, peer: Rank) -> Result<()> {
        self.links.release(peer)?;
        self.trace.receive_ends(peer);
        Ok(())
    }

    /// Resets the wait after progress.
    pub(super) fn progressed(&mut self) {
        self.wait.progressed();
        self.trace.progressed();
    }

    /// Waits for a link or a device to have something to do. `false` if nothing had for the timeout.
    pub(super) fn pause(&mut self) -> Result<bool> {
        self.trace.idle();
        self.wait.pause(&self.fault, &mut self.links, self.devices.are_busy())
    }

    /// [`pause`](Self::pause) in a call whose kernel writes words that this rank reads.
    pub(super) fn pause_beside_kernel(&mut self) -> Result<bool> {
        self.trace.idle();
        self.wait.pause(&self.fault, &mut self.links, true)
    }

    /// Copies bytes in host memory, and waits for that. No job may be in flight.
    pub(super) fn copy_on_host(&mut self, from: Piece, into: Piece) -> Result<()> {
        let job = Job {
            dtype: DType::U8,
            arithmetic: Arithmetic::Sum,
            into,
            operands: &[Operand { piece: from, factor: None }],
            finish: Finish::Keep,
            streaming: false,
        };
        self.trace.job_begins(JobKind::Copy, OUTSIDE_JOB, MessagePart::outside(into.len()));
        self.devices.run_on_host(&job, &self.fault, self.wait.timeout())?;
        self.trace.job_ends(OUTSIDE_JOB);
        Ok(())
    }

    /// Aborts the call: afterwards no link and no device accesses its memory.
    pub(super) fn abort(&mut self) {
        self.devices.abort();
        self.links.abort();
    }
}
