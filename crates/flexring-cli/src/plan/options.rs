//! The flags of `flexring plan`.
//!
//! Owns the flags for output.

use super::source::PlanSource;
use clap::Args;
use flexring_core::config::Size;
use std::path::PathBuf;

/// Show the plan of an all-reduce: which ranks reduce which spans onto which root
///
/// Prints a table of levels. Each group is a span of the vector that its participants hold and that is
/// reduced onto its root. After the last level, one rank has the sum of each span; the all-gather is the same
/// table read backwards.
///
/// Without a topology or an algorithm, those of the settings are used (see flexring env).
#[derive(Args, Clone, Debug)]
pub struct PlanOptions {
    #[command(flatten)]
    pub source: PlanSource,

    /// Show element ranges of a vector of N elements, and times for N floats
    #[arg(long, value_name = "N", value_parser = count)]
    pub count: Option<u64>,

    /// Show the algorithm, the reason for its selection, the load of each link, and all schedules by their
    /// predicted time
    #[arg(long)]
    pub explain: bool,

    /// Verify that the plan computes the right sums and always ends
    #[arg(long)]
    pub verify: bool,

    /// Print JSON
    #[arg(long, conflicts_with_all = ["explain", "verify"])]
    pub json: bool,

    /// Write the plan to this file, for FLEXRING_PLAN_FILE
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,

    /// Draw the plan to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Most elements: their bytes fit in 64 bits.
const LONGEST_COUNT: u64 = 1 << 60;

fn count(text: &str) -> Result<u64, String> {
    let count = Size::parse(text).and_then(|count| u64::try_from(count.0).ok());
    let count = count.filter(|count| (1..=LONGEST_COUNT).contains(count));
    count.ok_or_else(|| {
        "expected a number of elements, at least 1 and at most 1073741824G, such as 12 or 16M".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    fn parse(flags: &str) -> Result<PlanOptions, clap::Error> {
        let command = PlanOptions::augment_args(clap::Command::new("plan"));
        let args = std::iter::once("plan").chain(flags.split_whitespace());
        command.try_get_matches_from(args).and_then(|matches| PlanOptions::from_arg_matches(&matches))
    }

    #[test]
    fn flags_replace_settings() {
        let options = parse("--topology 2+3 --algo RING --dims 4x2 --servers 0,3").expect("valid");
        let settings = [
            ("FLEXRING_TOPOLOGY", "2+3"),
            ("FLEXRING_ALGO", "RING"),
            ("FLEXRING_DIMENSIONS", "4x2"),
            ("FLEXRING_SERVERS", "0,3"),
        ];
        assert_eq!(options.source.settings(), settings.map(|(name, value)| (name, value.to_owned())));
        assert_eq!(parse("--count 1K").expect("valid").count, Some(1024));
    }

    #[test]
    fn errors_quote_the_value_and_what_was_expected() {
        for (flags, message) in [
            ("--algo rign", "expected auto, ring, rabenseifner, "),
            ("--dims 4*2", "such as 4x2"),
            ("--servers zero", "such as 0,4"),
            ("--count 0", "at least 1"),
            ("--count 18446744073709551615", "at most 1073741824G"),
            ("--plan-file p.json --algo ring", "cannot be used with"),
            ("--json --verify", "cannot be used with"),
        ] {
            let error = parse(flags).expect_err(flags).to_string();
            assert!(error.contains(message), "{flags}: {error}");
        }
    }
}
