//! `flexring status`: what the ranks of a running job do, and which ranks they wait for.
//!
//! Owns the flags. The coordinator of the job answers; the library makes the table.

use crate::error::CommandError;
use crate::output;
use clap::Args;
use flexring::bootstrap::{job, world_status};
use flexring::config::{Config, environment};

/// Print what the ranks of a running job do, and which ranks they wait for
///
/// Asks the job's coordinator, and prints host, process, last call and state of each rank, how long it has been in this
/// state, and the ranks that it waits for. Heartbeats carry the state, so it may be as old as FLEXRING_HEARTBEAT_MS.
///
/// Must run with the variables that identify the job: those of its launcher, or the FLEXRING_ variables of its ranks.
///
/// Exits with 1 if no coordinator of the job answers.
#[derive(Args, Debug)]
pub struct StatusOptions {
    /// Address of the coordinator, if the environment does not give it: that of rank 0
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    address: Option<(String, u16)>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(options: &StatusOptions) -> Result<(), CommandError> {
    let config = Config::from_env()?;
    let job = job(&config, options.address.clone(), environment)?;
    let status = world_status(&job, &config)?;
    output::print(&if options.json { output::json(&status)? } else { status.to_string() })
}

/// Splits an address at its last colon. IPv6 addresses stand in brackets.
fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    match parsed {
        Some((host, port)) if !host.is_empty() && port != 0 => Ok((host.to_owned(), port)),
        _ => Err("expected a host name or address and a port, such as node1:29401".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        assert_eq!(host_and_port("node1:29401"), Ok(("node1".to_owned(), 29401)));
        assert_eq!(host_and_port("[fd00::2]:1"), Ok(("[fd00::2]".to_owned(), 1)));
        for text in ["", "node1", "node1:", ":1", "node1:0", "node1:70000"] {
            assert!(host_and_port(text).is_err(), "{text}");
        }
    }
}
