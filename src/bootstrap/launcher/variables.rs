//! The variables of each launcher, and their meaning.
//!
//! Owns their names.

use crate::error::{Error, Result};
use std::fmt;
use twox_hash::XxHash3_128;

/// A number and the environment variable that contains it.
#[derive(Clone, Copy, Debug)]
pub(in crate::bootstrap) struct NumericVariable {
    pub(super) name: &'static str,
    pub(super) value: usize,
}

impl fmt::Display for NumericVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=\"{}\"", self.name, self.value)
    }
}

/// The values that a launcher set.
pub(in crate::bootstrap) struct LauncherInfo {
    pub(super) launcher: &'static str,
    /// Whether it is an mpirun, whose daemons srun may have started.
    pub(super) is_mpi: bool,
    pub(super) rank: NumericVariable,
    pub(super) world: NumericVariable,
    pub(in crate::bootstrap) host: Option<String>,
    /// Whether all ranks are on this node.
    pub(in crate::bootstrap) one_node: bool,
    /// The variables that may contain the rank's number on its node.
    pub(super) local: &'static [&'static str],
    /// A name that all ranks of the job share, and that no other job has.
    job: Option<String>,
    /// How to pass a variable to all ranks, for messages.
    pub(super) export: &'static str,
}

impl LauncherInfo {
    pub(in crate::bootstrap) fn token(&self) -> u128 {
        self.job.as_ref().map_or(0, |job| XxHash3_128::oneshot(format!("{}/{job}", self.launcher).as_bytes()))
    }
}

/// Reads environment variables through a lookup function.
pub(in crate::bootstrap) struct Environment<'a>(pub(in crate::bootstrap) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// The first of these variables that is set and not empty.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|name| self.text(name))
    }

    pub(in crate::bootstrap) fn text(&self, name: &'static str) -> Option<(&'static str, String)> {
        (self.0)(name).filter(|text| !text.trim().is_empty()).map(|text| (name, text))
    }

    /// The first of these variables that is set, as an integer.
    pub(super) fn number(&self, names: &[&'static str]) -> Result<Option<NumericVariable>> {
        let Some((name, text)) = self.first(names) else {
            return Ok(None);
        };
        match text.trim().parse() {
            Ok(value) => Ok(Some(NumericVariable { name, value })),
            Err(_) => Err(invalid(format!("{name}=\"{text}\" cannot be used: expected a whole number"))),
        }
    }

    /// Rank and world size. `None` if neither is set.
    fn pair(
        &self,
        launcher: &str,
        ranks: &[&'static str],
        worlds: &[&'static str],
    ) -> Result<Option<(NumericVariable, NumericVariable)>> {
        match (self.number(ranks)?, self.number(worlds)?) {
            (Some(rank), Some(world)) => Ok(Some((rank, world))),
            (None, None) => Ok(None),
            (Some(NumericVariable { name, value }), None) => Err(half_set(launcher, name, value, worlds)),
            (None, Some(NumericVariable { name, value })) => Err(half_set(launcher, name, value, ranks)),
        }
    }

    /// The address of rank 0 as torchrun gives it, and scripts that use it with other launchers.
    fn master_address(&self) -> Option<String> {
        self.text("MASTER_ADDR").map(|(_, text)| text.trim().to_owned())
    }

    /// A name that all ranks of a job share, joined from all of these variables that are set.
    fn job(&self, names: &[&'static str]) -> Option<String> {
        let parts: Vec<String> =
            names.iter().filter_map(|name| self.text(name)).map(|(_, text)| text).collect();
        (!parts.is_empty()).then(|| parts.join("/"))
    }
}

fn half_set(launcher: &str, name: &str, value: usize, missing: &[&str]) -> Error {
    invalid(format!(
        "{name}=\"{value}\" is set, as {launcher} does, but {} is not: set both, or unset {name} if it means something else",
        missing.first().copied().unwrap_or_default()
    ))
}

pub(in crate::bootstrap) fn invalid(message: String) -> Error {
    Error::invalid_setting(message)
}

pub(super) fn torchrun(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let Some((rank, world)) = environment.pair("torchrun", &["RANK"], &["WORLD_SIZE"])? else {
        return Ok(None);
    };
    let loopback = on_one_node(environment, &["LOCAL_WORLD_SIZE"], world)?;
    Ok(Some(LauncherInfo {
        launcher: "torchrun",
        is_mpi: false,
        rank,
        world,
        one_node: loopback.is_some(),
        host: environment.master_address().or(loopback),
        local: &["LOCAL_RANK"],
        job: environment.job(&["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"]),
        export: "MASTER_ADDR=<host of rank 0> in front of each process",
    }))
}

pub(super) fn open_mpi(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let numbers = environment.pair("Open MPI", &["OMPI_COMM_WORLD_RANK"], &["OMPI_COMM_WORLD_SIZE"])?;
    let Some((rank, world)) = numbers else {
        return Ok(None);
    };
    let host = on_one_node(environment, &["OMPI_COMM_WORLD_LOCAL_SIZE"], world)?;
    Ok(Some(LauncherInfo {
        launcher: "Open MPI",
        is_mpi: true,
        rank,
        world,
        one_node: host.is_some(),
        host: host.or_else(|| environment.master_address()),
        local: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        job: environment
            .first(&["PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"])
            .map(|(_, text)| text),
        export: "mpirun -x FLEXRING_MASTER_ADDR=<host of rank 0>",
    }))
}

pub(super) fn mpich(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let numbers = environment.pair("MPICH", &["PMI_RANK", "PMI_ID"], &["PMI_SIZE"])?;
    // `srun --mpi=pmi2` sets them, too, also for the daemons of mpirun, which replace all but PMI_JOBID for
    // their ranks.
    let step =
        [&["SLURM_JOB_ID"][..], &["SLURM_STEP_ID", "SLURM_STEPID"]].map(|names| environment.first(names));
    let is_step = match (step, environment.text("PMI_JOBID")) {
        ([Some((_, job)), Some((_, step))], Some((_, name))) => name == format!("{job}.{step}"),
        _ => false,
    };
    let task = if is_step { slurm(environment).ok().flatten() } else { None };
    let is_task = |(rank, world): &(NumericVariable, NumericVariable)| {
        task.as_ref().is_some_and(|task| task.rank.value == rank.value && task.world.value == world.value)
    };
    let Some((rank, world)) = numbers.filter(|numbers| !is_task(numbers)) else {
        return Ok(None);
    };
    let host = on_one_node(environment, &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"], world)?;
    let job = environment
        .job(&["PMI_JOBID", "PALS_APID", "HYDRA_JOBID"])
        // Hydra does not name its jobs, but all ranks of a node descend from the same proxy.
        .or_else(|| host.is_some().then(hydra_proxy).flatten());
    Ok(Some(LauncherInfo {
        launcher: "MPICH",
        is_mpi: true,
        rank,
        world,
        one_node: host.is_some(),
        host: host.or_else(|| environment.master_address()),
        local: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
        job,
        export: "mpiexec -genv FLEXRING_MASTER_ADDR <host of rank 0>",
    }))
}

pub(super) fn slurm(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    // The shell of a batch script also has a SLURM_PROCID but is not a rank: only steps are.
    if environment.first(&["SLURM_STEP_ID", "SLURM_STEPID"]).is_none() {
        return Ok(None);
    }
    let worlds = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
    let Some((rank, world)) = environment.pair("Slurm", &["SLURM_PROCID"], &worlds)? else {
        return Ok(None);
    };
    let nodes = environment.number(&["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"])?;
    let one_node = nodes.is_some_and(|nodes| nodes.value == 1);
    let host = if one_node {
        Some("127.0.0.1".to_owned())
    } else {
        environment
            .first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])
            .and_then(|(_, list)| first_host(&list))
            .or_else(|| environment.master_address())
    };
    Ok(Some(LauncherInfo {
        launcher: "Slurm",
        is_mpi: false,
        rank,
        world,
        one_node,
        host,
        local: &["SLURM_LOCALID"],
        job: environment.job(&["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"]),
        export: "srun --export=ALL,FLEXRING_MASTER_ADDR=<host of rank 0>",
    }))
}

/// The loopback, if all ranks are on this node.
fn on_one_node(
    environment: &Environment<'_>,
    local: &[&'static str],
    world: NumericVariable,
) -> Result<Option<String>> {
    let local = environment.number(local)?;
    Ok(local.filter(|local| local.value == world.value).map(|_| "127.0.0.1".to_owned()))
}

/// The process id of the Hydra proxy (or mpiexec) that this process descends from.
fn hydra_proxy() -> Option<String> {
    let mut pid = std::process::id();
    for _generation in 0..16 {
        // "pid (name) state parent …", where the name itself may contain blanks and parentheses.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (head, tail) = stat.rsplit_once(')')?;
        let name = head.split_once('(')?.1;
        if ["hydra_", "pmi_proxy", "mpiexec"].iter().any(|proxy| name.starts_with(proxy)) {
            return Some(format!("proxy {pid}"));
        }
        pid = tail.split_whitespace().nth(1)?.parse().ok()?;
    }
    None
}

/// The first host of a Slurm node list such as `node[03-07,9],other`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim().chars();
    while let Some(letter) = rest.next() {
        match letter {
            ',' => break,
            '[' => {
                let inside: String = rest.by_ref().take_while(|letter| *letter != ']').collect();
                host.push_str(inside.split([',', '-']).next()?);
            }
            _ => host.push(letter),
        }
    }
    (!host.is_empty()).then_some(host)
}
