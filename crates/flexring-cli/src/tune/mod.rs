//! `flexring tune`: measures the links and devices of a running job, and which plans are fast on them.
//!
//! Owns the decision whether this process starts ranks or is a rank.

mod choices;
mod devices;
mod links;
mod messages;
mod options;
mod profile_output;
mod rank;
mod session;

pub use options::TuneOptions;

use crate::error::CommandError;
use crate::local_ranks::{self, no_job};
use crate::settings::warn_about_unknown_settings;
use flexring::Identity;
use flexring_core::config::Config;

/// Runs the command.
pub fn run(options: &TuneOptions) -> Result<(), CommandError> {
    options.check().map_err(CommandError::Usage)?;
    if options.rank_of.is_none() {
        // All settings are validated before any rank starts.
        let config = Config::from_env()?;
        if let Some(ranks) = options.ranks {
            warn_about_unknown_settings();
            let failures = local_ranks::run(&config, ranks.get(), &[])?;
            return if failures.is_empty() { Ok(()) } else { Err(CommandError::Reported) };
        }
        Identity::from_env(&config).map_err(no_job)?;
    }
    Ok(rank::run(options)?)
}
