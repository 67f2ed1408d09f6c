//! The flags of `flexring simulate`.
//!
//! Owns their names, ranges and defaults.

use crate::plan::PlanSource;
use clap::Args;
use flexring_core::config::Size;
use flexring_simulator::simulator::{LONGEST_VECTOR, SimulationParameters};
use std::path::PathBuf;

/// Simulate an all-reduce on a described cluster: its time, the load of each link, and what determined the
/// time
///
/// Runs the programs of all ranks in virtual time, sub-chunk by sub-chunk, in the order of a real run. Links
/// have the bandwidths and latencies of the topology; transfers that share a link share its bandwidth. Equal
/// inputs give equal results. Calls that would use the mailboxes of a node's shared memory are simulated with
/// the plan instead.
///
/// Without a topology or an algorithm, those of the settings are used (see flexring env). With --tuning,
/// links, rates and settings are those that flexring tune has measured, and auto is what a job with this
/// profile uses.
#[derive(Args, Clone, Debug)]
pub struct SimulateOptions {
    #[command(flatten)]
    pub source: PlanSource,

    /// Bytes of the vector, such as 64M; several with commas
    #[arg(long = "size", value_name = "BYTES", default_value = "64M", value_delimiter = ',', value_parser = bytes)]
    pub sizes: Vec<u64>,

    /// Bytes per second that a rank's additions and copies read and write together, such as 20G (decimal)
    /// [default: that of the tuning profile, or 20G]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub memory_bandwidth: Option<u64>,

    /// Nanoseconds that each addition and copy takes besides
    #[arg(long, value_name = "NS", default_value_t = SimulationParameters::DEFAULT.job_nanoseconds)]
    pub job_time: u64,

    /// Most messages in flight on a link between nodes in each direction: 16 over TCP, 32 over RDMA
    #[arg(long, value_name = "N", default_value_t = SimulationParameters::DEFAULT.window)]
    pub window: usize,

    /// Input and output are the same memory
    #[arg(long)]
    pub in_place: bool,

    /// Do not find the critical path, which needs memory for each message
    #[arg(long)]
    pub no_path: bool,

    /// Refuse simulations that need more memory than this, such as 16G
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = memory)]
    pub max_memory: u64,

    /// Refuse simulations of more messages than this: a million takes between 0.3 s and 4 s
    #[arg(long, value_name = "N", default_value = "64M", value_parser = messages)]
    pub max_messages: u64,

    /// Draw the run as an SVG file: ranks and links over time; with several sizes, the time by size
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write the timeline of the ranks as Chrome trace events, as the merged file of a real run with
    /// FLEXRING_TRACE
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Print a line of comma-separated values for each size
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl SimulateOptions {
    /// The parameters with those that flags specify.
    pub fn parameters(&self, parameters: SimulationParameters) -> SimulationParameters {
        SimulationParameters {
            in_place: self.in_place,
            window: self.window,
            memory_bandwidth: self.memory_bandwidth.unwrap_or(parameters.memory_bandwidth),
            job_nanoseconds: self.job_time,
            ..parameters
        }
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    let size = Size::parse(text).and_then(|size| u64::try_from(size.0).ok());
    // Elements are floats.
    let size = size.filter(|bytes| (4..=LONGEST_VECTOR).contains(bytes) && bytes.is_multiple_of(4));
    size.ok_or_else(|| {
        "expected a number of bytes from 4 to 1048576G in multiples of 4, such as 4096, 512K or 64M"
            .to_owned()
    })
}

fn memory(text: &str) -> Result<u64, String> {
    let size = Size::parse(text).filter(|size| size.0 > 0);
    size.map(|size| size.0 as u64).ok_or_else(|| "expected a number of bytes, such as 512M or 16G".to_owned())
}

fn messages(text: &str) -> Result<u64, String> {
    let count = Size::parse(text).filter(|count| count.0 > 0);
    count
        .map(|count| count.0 as u64)
        .ok_or_else(|| "expected a number of messages, such as 1000 or 256M".to_owned())
}

fn rate(text: &str) -> Result<u64, String> {
    let expected =
        || "expected bytes per second from 1 to 1000T with a decimal unit, such as 500M or 20G".to_owned();
    let text = text.trim();
    let units = [('K', 1e3), ('M', 1e6), ('G', 1e9), ('T', 1e12)];
    let unit = units.into_iter().find(|(unit, _)| text.ends_with([*unit, unit.to_ascii_lowercase()]));
    let (number, unit) = unit.map_or((text, 1.0), |(_, scale)| (&text[..text.len() - 1], scale));
    let number: f64 = number.parse().map_err(|_| expected())?;
    let rate = number * unit;
    // Also false if it is not a number.
    if (1.0..=1e15).contains(&rate) { Ok(rate as u64) } else { Err(expected()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;
    use flexring_simulator::simulator::SimulationInput;

    fn parse(flags: &str) -> Result<SimulateOptions, clap::Error> {
        let command = SimulateOptions::augment_args(clap::Command::new("simulate"));
        let args = std::iter::once("simulate").chain(flags.split_whitespace());
        command.try_get_matches_from(args).and_then(|matches| SimulateOptions::from_arg_matches(&matches))
    }

    #[test]
    fn sizes_are_a_list_and_rates_have_decimal_units() {
        let options = parse("--topology 2+3 --size 64K,1M --memory-bandwidth 2.5G").expect("valid");
        assert_eq!(options.sizes, [64 << 10, 1 << 20]);
        assert_eq!(options.memory_bandwidth, Some(2_500_000_000));
        let defaults = SimulationParameters::DEFAULT;
        assert_eq!(parse("").expect("valid").parameters(defaults), defaults);
        let limits = parse("").expect("valid");
        let limits = (limits.max_memory, limits.max_messages);
        assert_eq!(limits, (SimulationInput::MOST_MEMORY, SimulationInput::MOST_MESSAGES));
    }

    #[test]
    fn errors_quote_the_value_and_what_was_expected() {
        for (flags, message) in [
            ("--size 0", "'0' for '--size <BYTES>': expected a number of bytes from 4 to 1048576G"),
            ("--size 6", "in multiples of 4"),
            ("--size 1152921504606846976", "expected a number of bytes from 4 to 1048576G"),
            ("--size 99999999999999999999999", "expected a number of bytes"),
            ("--size 1M,", "expected a number of bytes"),
            ("--max-memory 0", "expected a number of bytes, such as 512M"),
            ("--max-messages some", "expected a number of messages, such as 1000"),
            ("--memory-bandwidth NaN", "'NaN' for '--memory-bandwidth <RATE>': expected bytes per second"),
            ("--memory-bandwidth inf", "expected bytes per second"),
            ("--memory-bandwidth 0", "expected bytes per second"),
            ("--memory-bandwidth -1G", "unexpected argument"),
            ("--algo rign", "expected auto, ring, "),
            ("--json --csv", "cannot be used with"),
        ] {
            let error = parse(flags).expect_err(flags).to_string();
            assert!(error.contains(message), "{flags}: {error}");
        }
    }
}
