//! `flexring perf`: measures collectives, checks their results, and prints the table of nccl-tests.
//!
//! Owns the decision whether this process starts ranks or is a rank.

mod bench;
mod check;
mod collective;
mod exact_element;
pub mod gpu;
mod model;
mod options;
mod parent;
mod pattern;
mod progress_bar;
mod progress_output;
mod rank;
mod redop;
mod report;
mod step;
mod table;

pub use options::PerfOptions;
pub use progress_bar::Progress;

use crate::error::CommandError;
use crate::local_ranks::no_job;
use crate::output;
use crate::settings::warn_about_unknown_settings;
use flexring::Error;
use flexring::internal::bootstrap::{identity, is_alone};
use flexring::internal::description;
use flexring_core::config::{Config, environment};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Runs the command.
pub fn run(options: &PerfOptions) -> Result<(), CommandError> {
    if let Some(contradiction) = options.contradiction() {
        return Err(CommandError::Usage(contradiction));
    }
    // Whether this is rank 0 of a launcher's job.
    let mut is_first = false;
    if options.rank_of.is_none() {
        if options.device == options::VectorDevice::Cuda {
            gpu::check()?;
        }
        // Flags override environment variables. All settings are validated before any rank starts.
        let settings = options.settings();
        let lookup = |name: &str| {
            let flag = settings.iter().find(|(flag, _)| *flag == name).map(|(_, value)| value.clone());
            flag.or_else(|| environment(name))
        };
        let config = Config::read(lookup)?;
        if let Some(ranks) = ranks(options, &config, lookup)? {
            warn_about_unknown_settings();
            return parent::run(options, &config, ranks);
        }
        let identity = identity(&config, lookup).map_err(no_job)?;
        if settings.iter().any(|(name, value)| environment(name).as_ref() != Some(value)) {
            return Err(exec_again(settings));
        }
        is_first = identity.rank == 0;
    }
    let wrong = rank::run(options)?;
    if let Some(setting) = options.trace.as_ref().filter(|_| is_first) {
        output::print(&format!(
            "# timelines: one file for each rank; flexring trace {setting} merges them\n"
        ))?;
    }
    match wrong {
        0 => Ok(()),
        1 => Err(CommandError::Failed("1 element was wrong".to_owned())),
        wrong => Err(CommandError::Failed(format!("{wrong} elements were wrong"))),
    }
}

/// The number of ranks to start, or `None` if this process is to join an existing job.
fn ranks(
    options: &PerfOptions,
    config: &Config,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Option<usize>, Error> {
    match (&options.topology, options.ranks) {
        (_, Some(ranks)) => Ok(Some(ranks.get())),
        (Some(topology), None) if is_alone(config, lookup)? => {
            Ok(Some(description::topology(topology, None)?.world()))
        }
        _ => Ok(None),
    }
}

/// Executes this command again with `settings` in its environment, because a process cannot safely change its
/// own environment. Returns only on failure.
fn exec_again(settings: Vec<(&'static str, String)>) -> CommandError {
    let again = |program| Command::new(program).args(std::env::args_os().skip(1)).envs(settings).exec();
    let cause = std::env::current_exe().map_or_else(|cause| cause, again);
    Error::io("cannot execute this program again with the settings from its flags", cause).into()
}
