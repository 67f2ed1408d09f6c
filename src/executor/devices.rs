//! The device of a rank, which adds and copies in host memory.
//!
//! Owns the number of jobs in flight.

use crate::device::{Device, Job, Submitted};
use crate::error::{Error, Result};
use crate::fault::Fault;
use std::time::{Duration, Instant};

/// The device of one rank, and its work.
pub(super) struct Devices {
    host: Box<dyn Device>,
    /// The number of jobs in flight.
    under_way: usize,
}

impl Devices {
    pub(super) fn new(host: Box<dyn Device>) -> Self {
        Self { host, under_way: 0 }
    }

    /// Whether jobs are in flight.
    pub(super) fn are_busy(&self) -> bool {
        self.under_way > 0
    }

    /// Starts a job. All its memory is host memory.
    pub(super) fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted> {
        if !job.into.is_host() || job.operands.iter().any(|operand| !operand.piece.is_host()) {
            return Err(Error::internal("a job of the host uses GPU memory"));
        }
        let submitted = self.host.submit(job, ticket)?;
        self.under_way += usize::from(submitted == Submitted::InFlight);
        Ok(submitted)
    }

    /// Reports the tickets of jobs that have finished.
    pub(super) fn poll(&mut self, finished: &mut dyn FnMut(u64)) -> Result<()> {
        let Self { host, under_way } = self;
        host.poll(&mut |ticket| {
            *under_way -= 1;
            finished(ticket);
        })
    }

    /// Runs one job to its end. No other job may be in flight.
    ///
    /// # Errors
    /// Those of the device; the fault, if it is raised meanwhile; `Timeout` if the device does not complete
    /// the job.
    pub(super) fn run(&mut self, job: &Job<'_>, fault: &Fault, timeout: Duration) -> Result<()> {
        self.submit(job, 0)?;
        self.finish(fault, timeout)
    }

    /// [`run`](Self::run) for a job on host memory, which the caller guarantees.
    pub(super) fn run_on_host(&mut self, job: &Job<'_>, fault: &Fault, timeout: Duration) -> Result<()> {
        debug_assert!(job.into.is_host() && job.operands.iter().all(|operand| operand.piece.is_host()));
        let submitted = self.host.submit(job, 0)?;
        if submitted == Submitted::Done {
            return Ok(());
        }
        self.under_way += 1;
        self.finish(fault, timeout)
    }

    /// Waits until no job is in flight.
    fn finish(&mut self, fault: &Fault, timeout: Duration) -> Result<()> {
        let mut began = None;
        while self.are_busy() {
            fault.check()?;
            self.poll(&mut |_| {})?;
            std::thread::yield_now();
            if began.get_or_insert_with(Instant::now).elapsed() >= timeout {
                return Err(Error::timeout(format!(
                    "waited {timeout:?} for the GPU, which has not completed a copy or a reduction (fix: look at nvidia-smi and the kernel's log)"
                )));
            }
        }
        Ok(())
    }

    /// Aborts all jobs: afterwards none accesses memory, and none is reported.
    pub(super) fn abort(&mut self) {
        self.host.abort();
        self.under_way = 0;
    }
}
