//! The flags of `flexring tune`.
//!
//! Owns their names, defaults and ranges.

use clap::Args;
use flexring_core::config::Size;
use flexring_plan::tuning::MOST_CHOICES;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Most lengths of vectors.
const MOST_SIZES: usize = MOST_CHOICES;
/// Longest vector that is measured.
const LONGEST: Size = Size(1 << 30);

/// Measure the links and devices of a job, and write a profile that FLEXRING_TUNING loads
///
/// Measures latency and bandwidth within nodes, between nodes and of each node's own link, the rates at which
/// ranks copy and add, and the time of all-reduces by the plans that the model predicts to be fast, with
/// several lengths of sub-chunks, numbers of slots and sockets per link. Measurements end after 100 s: what
/// is left out then keeps its default.
///
/// With --ranks N it starts N ranks on this machine. Otherwise it joins the job of torchrun, mpirun or srun,
/// or the job described by FLEXRING_RANK, FLEXRING_WORLD_SIZE and related settings, and rank 0 writes the
/// profile.
#[derive(Args, Clone, Debug)]
pub struct TuneOptions {
    /// Start N ranks on this machine
    #[arg(long, value_name = "N")]
    pub ranks: Option<NonZeroUsize>,

    /// The file of the profile
    #[arg(short, long, value_name = "FILE", default_value = "flexring-tuning.toml")]
    pub output: PathBuf,

    /// Lengths of the vectors for which plans are compared, in bytes, such as 64K,1M; at most 64
    #[arg(long, value_name = "SIZES", default_value = "16K,256K,4M,64M", value_delimiter = ',', value_parser = size)]
    pub sizes: Vec<Size>,

    /// About how long each measurement takes, in milliseconds
    #[arg(long, value_name = "MS", default_value = "100", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub time_ms: u64,

    /// Run as a rank that the process PID started
    #[arg(long, value_name = "PID", hide = true)]
    pub rank_of: Option<i32>,

    /// Draw the progress bar on the standard error of the process given by --rank-of
    #[arg(long, requires = "rank_of", hide = true)]
    pub borrow_terminal: bool,
}

impl TuneOptions {
    /// How long a measurement takes.
    pub fn time(&self) -> Duration {
        Duration::from_millis(self.time_ms)
    }

    /// Checks what no flag alone shows.
    ///
    /// # Errors
    /// What cannot be used, and what can.
    pub fn check(&self) -> Result<(), String> {
        let sizes = self.sizes().len();
        let message = format!("--sizes has {sizes} lengths: give at most {MOST_SIZES}");
        if sizes > MOST_SIZES { Err(message) } else { Ok(()) }
    }

    /// The lengths of vectors in bytes, ascending.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.sizes.iter().map(|size| size.0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

fn size(text: &str) -> Result<Size, String> {
    let size =
        Size::parse(text).filter(|size| (Size(4)..=LONGEST).contains(size) && size.0.is_multiple_of(4));
    size.ok_or_else(|| {
        format!("expected a number of bytes from 4 to {LONGEST} in multiples of 4, such as 64K or 1M")
    })
}
