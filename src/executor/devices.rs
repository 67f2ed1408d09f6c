//! The devices of a rank: one for the host's memory, and one for that of a GPU, if there is one.
//!
//! Owns which of them does a job, and how many jobs are under way. Must not know what jobs are about.

use crate::device::{Device, Job, Submitted};
use crate::error::{Error, Result};
use crate::fault::Fault;

pub(super) struct Devices {
    host: Box<dyn Device>,
    gpu: Option<Box<dyn Device>>,
    under_way: usize,
}

impl Devices {
    pub(super) fn new(host: Box<dyn Device>) -> Self {
        Self { host, gpu: None, under_way: 0 }
    }

    pub(super) fn use_gpu(&mut self, gpu: Box<dyn Device>) {
        self.gpu = Some(gpu);
    }

    /// Whether jobs are under way.
    pub(super) fn are_busy(&self) -> bool {
        self.under_way > 0
    }

    /// Starts a job on the device whose memory it is about.
    pub(super) fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted> {
        let on_host = job.into.is_host() && job.operands.iter().all(|operand| operand.piece.is_host());
        let device = if on_host { Some(&mut self.host) } else { self.gpu.as_mut() };
        let device = device.ok_or_else(|| Error::internal("a job for a GPU, but there is none"))?;
        let submitted = device.submit(job, ticket)?;
        self.under_way += usize::from(submitted == Submitted::InFlight);
        Ok(submitted)
    }

    /// Reports the tickets of jobs that have become done.
    pub(super) fn poll(&mut self, done: &mut dyn FnMut(u64)) -> Result<()> {
        let Self { host, gpu, under_way } = self;
        for device in std::iter::once(host).chain(gpu) {
            device.poll(&mut |ticket| {
                *under_way -= 1;
                done(ticket);
            })?;
        }
        Ok(())
    }

    /// Does one job to its end, while no other is under way.
    pub(super) fn run(&mut self, job: &Job<'_>, fault: &Fault) -> Result<()> {
        self.submit(job, 0)?;
        while self.are_busy() {
            fault.check()?;
            self.poll(&mut |_| {})?;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Gives up what is under way: afterwards no job touches memory any more, and none is reported.
    pub(super) fn give_up(&mut self) {
        self.host.give_up();
        if let Some(gpu) = &mut self.gpu {
            gpu.give_up();
        }
        self.under_way = 0;
    }
}
