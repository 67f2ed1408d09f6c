//! `flexring status`: what the ranks of running jobs do, and which ranks they wait for.
//!
//! Owns the flags, and which jobs are meant. The coordinators of the jobs answer; the library makes the
//! tables.

mod process;

use crate::error::CommandError;
use crate::output;
use clap::Args;
use flexring::internal::bootstrap::{
    JobAddress, LocalCoordinator, WorldStatus, host_name, job, local_coordinators, world_status,
};
use flexring::{Error, ErrorKind};
use flexring_core::config::{Config, environment};
use process::RankProcess;
use serde::Serialize;

/// Print what the ranks of running jobs do, and which ranks they wait for
///
/// Without flags, shows the jobs of this user that have ranks on this node. Their coordinators, in the
/// processes of rank 0, give host, process, last call and state of each rank, how long it has been in this
/// state, and the ranks that it waits for. Heartbeats carry the state, so it may be as old as
/// FLEXRING_HEARTBEAT_MS.
///
/// A job whose rank 0 is on another node is asked there, if the variables of its ranks say where. If the
/// FLEXRING_ variables of the environment name a job (FLEXRING_MASTER_ADDR, FLEXRING_UNIQUE_ID), only this
/// one is shown.
///
/// Exits with 1 if no job is found, or if one does not answer.
#[derive(Args, Debug)]
pub struct StatusOptions {
    /// Show the job of this process only
    #[arg(long, value_name = "PID", conflicts_with = "address")]
    pid: Option<u32>,

    /// Address of the coordinator, that of rank 0. The environment must have the job's secret
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    address: Option<(String, u16)>,

    /// Print JSON. Its names are in docs/debugging.md, and do not change
    #[arg(long)]
    json: bool,
}

/// All that is printed.
#[derive(Debug, Default, Serialize)]
struct StatusReport {
    jobs: Vec<JobStatus>,
    /// Processes of which no state is known.
    unanswered: Vec<Unanswered>,
}

/// The state of a job.
#[derive(Debug, Serialize)]
struct JobStatus {
    /// The process of the coordinator, if it is on this node.
    coordinator: Option<u32>,
    #[serde(flatten)]
    world: WorldStatus,
}

/// A process of which no state is known.
#[derive(Debug, Serialize)]
struct Unanswered {
    pid: u32,
    reason: String,
}

/// Runs the command.
pub fn run(options: &StatusOptions) -> Result<(), CommandError> {
    let config = Config::from_env()?;
    let is_named = config.master_addr.is_some() || environment("FLEXRING_UNIQUE_ID").is_some();
    if options.address.is_some() || (options.pid.is_none() && is_named) {
        let job = job(&config, options.address.clone(), environment)?;
        let world = ask(&job, &config)?;
        let report =
            StatusReport { jobs: vec![JobStatus { coordinator: None, world }], unanswered: Vec::new() };
        return report.print(options.json);
    }
    let report = on_this_node(options.pid)?;
    match options.pid {
        _ if !report.jobs.is_empty() || !report.unanswered.is_empty() => report.print(options.json)?,
        Some(pid) => {
            return Err(match process::owner(pid) {
                None => CommandError::Usage(format!("there is no process {pid} on this node")),
                Some(user) if user != process::this_user() => CommandError::Failed(format!(
                    "process {pid} belongs to user {user}: run flexring status as that user"
                )),
                Some(_) => CommandError::Failed(format!(
                    "process {pid} is no rank of a job: it has not joined one yet, has left it, or its ranks are threads of one process"
                )),
            });
        }
        None => {
            return Err(CommandError::Failed(
                "no process of this user on this node is a rank of a job; ranks that are threads of one process do not count, and \
                 containers have jobs of their own: run flexring status there"
                    .to_owned(),
            ));
        }
    }
    if report.unanswered.is_empty() { Ok(()) } else { Err(CommandError::Reported) }
}

/// Asks the coordinator of a job over TCP.
fn ask(job: &JobAddress, config: &Config) -> Result<WorldStatus, Error> {
    world_status(job, config).map_err(|error| {
        if !job.is_by_id() || error.kind() != ErrorKind::Rendezvous {
            return error;
        }
        Error::rendezvous(format!(
            "the process that created the unique id does not answer for its job: once all ranks have joined, only rank 0's process does; run \
             flexring status without this id on the node of rank 0 ({})",
            error.message()
        ))
    })
}

/// The jobs of this user with ranks on this node, or only that of process `pid`.
fn on_this_node(pid: Option<u32>) -> Result<StatusReport, CommandError> {
    let host = host_name();
    let mut report = StatusReport::default();
    let mut known = Vec::new();
    for LocalCoordinator { pid: coordinator, status } in local_coordinators()? {
        match status {
            Ok(world) => {
                let here = world.ranks.iter().filter(|row| row.host == host).map(|row| row.pid);
                let here: Vec<u32> = here.collect();
                let is_meant = pid.is_none_or(|pid| here.contains(&pid) || coordinator == pid);
                known.extend(here);
                // Before its first rank, and after its ranks have moved to another coordinator, it has no
                // rows.
                if is_meant && !world.ranks.is_empty() {
                    report.jobs.push(JobStatus { coordinator: Some(coordinator), world });
                }
            }
            Err(error) => {
                if pid.is_none_or(|pid| coordinator == pid) {
                    report
                        .unanswered
                        .push(Unanswered { pid: coordinator, reason: error.message().to_owned() });
                    known.push(coordinator);
                }
            }
        }
    }
    // Ranks whose coordinator is elsewhere.
    let mut asked: Vec<(JobAddress, bool)> = Vec::new();
    for process in process::ranks()
        .into_iter()
        .filter(|process| pid.is_none_or(|pid| process.pid == pid) && !known.contains(&process.pid))
    {
        let RankProcess { pid, ref variables, .. } = process;
        let outcome = process.reachable().and_then(|()| {
            let lookup = |name: &str| variables.get(name).cloned();
            let no_address = |error: Error| {
                format!(
                    "it is a rank of a job whose coordinator is on another node, and its environment does not say on which; run flexring status on \
                     the node of rank 0 ({})",
                    error.message()
                )
            };
            let config = Config::read(lookup).map_err(|error| error.message().to_owned())?;
            Ok((job(&config, None, lookup).map_err(no_address)?, config))
        });
        let answer = outcome.and_then(|(job, config)| {
            if let Some((_, has_answered)) = asked.iter().find(|(known, _)| *known == job) {
                let again = "its job's coordinator does not answer, see above";
                return if *has_answered { Ok(None) } else { Err(again.to_owned()) };
            }
            let answer = ask(&job, &config);
            asked.push((job, answer.is_ok()));
            answer.map(Some).map_err(|error| error.message().to_owned())
        });
        match answer {
            Ok(world) => {
                report.jobs.extend(world.map(|world| JobStatus { coordinator: None, world }));
            }
            Err(reason) => {
                report.unanswered.push(Unanswered { pid, reason: format!("{}: {reason}", process.command) });
            }
        }
    }
    Ok(report)
}

impl StatusReport {
    fn print(&self, json: bool) -> Result<(), CommandError> {
        if json {
            return output::print(&output::json(self)?);
        }
        let has_heads = self.jobs.len() > 1 || self.jobs.iter().any(|job| job.coordinator.is_some());
        let mut text = Vec::new();
        for JobStatus { coordinator, world } in &self.jobs {
            let place = match coordinator {
                Some(pid) => format!("process {pid} ({})", process::command(*pid)),
                None => "another node".to_owned(),
            };
            let ranks = world.ranks.len();
            let ranks = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
            let head =
                if has_heads { format!("job of {ranks}, coordinator in {place}\n") } else { String::new() };
            text.push(format!("{head}{world}"));
        }
        for Unanswered { pid, reason } in &self.unanswered {
            text.push(format!("process {pid}: no status: {reason}\n"));
        }
        output::print(&text.join("\n"))
    }
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
