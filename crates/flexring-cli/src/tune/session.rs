//! What all measurements of a rank share: the communicator, the time, and the progress.
//!
//! Owns how ranks agree on a number, and when measuring ends.

use super::options::TuneOptions;
use crate::perf::Progress;
use flexring::{Communicator, Identity, ReduceOp, Result, UniqueId, create_unique_id};
use flexring_core::config::Config;
use std::time::{Duration, Instant};

/// When measuring ends, so that 64 ranks have a profile within two minutes.
const LIMIT: Duration = Duration::from_secs(100);

/// One rank's measurements.
pub struct TuningSession {
    pub comm: Communicator,
    pub config: Config,
    /// About how long a measurement takes.
    pub time: Duration,
    begun: Instant,
    /// Whether a measurement was left out because of the limit. Equal on all ranks.
    pub is_cut: bool,
    progress: Progress,
}

impl TuningSession {
    /// The measurements of the rank that `identity` names. `steps` is the most steps with this communicator.
    ///
    /// # Errors
    /// Any error of joining.
    pub fn new(
        options: &TuneOptions,
        config: Config,
        identity: &Identity,
        steps: impl FnOnce(&Communicator) -> usize,
    ) -> Result<Self> {
        let begun = Instant::now();
        let comm = Communicator::with_config(&config, identity)?;
        let steps = steps(&comm);
        let lender = options.rank_of.filter(|_| options.borrow_terminal);
        let shows = identity.rank == 0 && (options.rank_of.is_none() || lender.is_some());
        let progress = if shows { Progress::new(steps as u64, lender) } else { Progress::hidden() };
        Ok(Self { comm, config, time: options.time(), begun, is_cut: false, progress })
    }

    /// The largest of the ranks' values, on every rank.
    ///
    /// # Errors
    /// Any error of a call.
    pub fn largest(&self, value: f64) -> Result<f64> {
        let mut values = [value];
        self.comm.all_reduce(&mut values, ReduceOp::Max)?;
        Ok(values[0])
    }

    /// Counts a step, and returns whether there is time for it: the same on all ranks.
    ///
    /// # Errors
    /// Any error of a call.
    pub fn step(&mut self, message: impl FnOnce() -> String) -> Result<bool> {
        self.progress.step(Instant::now(), message);
        let over = self.largest(f64::from(u8::from(self.begun.elapsed() > LIMIT)))? > 0.0;
        self.is_cut |= over;
        Ok(!over)
    }

    /// Seconds since the session began.
    pub fn elapsed(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Another communicator of the same ranks, with other settings.
    ///
    /// # Errors
    /// Any error of joining.
    pub fn communicator(&self, config: &Config) -> Result<Communicator> {
        let mut bytes = [0u8; UniqueId::SIZE];
        if self.comm.rank() == 0 {
            bytes.copy_from_slice(create_unique_id(config)?.as_bytes());
        }
        self.comm.broadcast(&mut bytes, 0)?;
        let id = UniqueId::from_bytes(&bytes)?;
        let identity = Identity::from_unique_id(self.comm.world_size(), &id, self.comm.rank())?;
        Communicator::with_config(config, &identity)
    }
}

/// The median of some values; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len => f64::midpoint(values[(len - 1) / 2], values[len / 2]),
    }
}
