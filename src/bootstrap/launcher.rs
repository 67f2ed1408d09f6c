//! This process's identity: its rank, its world and its rendezvous point, from the launcher's environment.
//!
//! Owns the environment variables of the launchers and their meaning. Must not know how the rendezvous works.
//!
//! | launcher | recognised by | rendezvous point |
//! |---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` + 1 (its own store listens on `MASTER_PORT`) |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | this node, if all ranks are on it |
//! | MPICH, Intel MPI | `PMI_RANK` or `PMI_ID` | this node, if all ranks are on it |
//! | Slurm | `SLURM_PROCID` within a step | the step's first node |
//!
//! `FLEXRING_RANK`, `FLEXRING_WORLD_SIZE`, `FLEXRING_MASTER_ADDR` and `FLEXRING_MASTER_PORT` each take
//! precedence over the launcher's value; no launcher is needed if they are complete. `FLEXRING_UNIQUE_ID`
//! replaces address and port. If no port is given, it is derived from the job's name.

use super::unique_id::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::rank::Rank;
use twox_hash::XxHash3_128;

/// The rank of this process, and where its world rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// This process's rank, less than `world`.
    pub rank: Rank,
    /// The number of ranks, at least 1.
    pub world: usize,
    /// Where the ranks rendezvous.
    pub rendezvous: RendezvousPoint,
    /// Distinguishes this job from others that may use the same rendezvous point; 0 if the job has no known
    /// name. Not secret.
    pub token: u128,
    /// Whether all ranks are on this node, as their launcher says.
    pub one_node: bool,
    /// The source of the identity, for messages: the launcher's name, for example.
    pub launcher: &'static str,
}

impl Identity {
    /// The identity of rank `rank` of the `world` ranks that share `id`.
    ///
    /// # Errors
    /// `InvalidArgument` unless `rank` is less than `world`.
    pub fn from_unique_id(world: usize, id: &UniqueId, rank: Rank) -> Result<Self> {
        if rank >= world {
            let message = format!("rank {rank} is not in a world of {world}: ranks count from 0");
            return Err(Error::invalid_argument(message));
        }
        let rendezvous = RendezvousPoint::Id(*id);
        Ok(Self { rank, world, token: id.job(), one_node: false, rendezvous, launcher: "a unique id" })
    }

    /// The identity of the only rank of a world.
    #[must_use]
    pub fn alone() -> Self {
        // No other rank has to connect.
        let rendezvous = RendezvousPoint::Address { host: "127.0.0.1".to_owned(), port: 0 };
        Self { rank: 0, world: 1, rendezvous, token: 0, one_node: false, launcher: "a world of one rank" }
    }
}

/// Where the ranks of a world rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousPoint {
    /// Rank 0 listens at this address.
    Address {
        /// Host name or address of rank 0.
        host: String,
        /// TCP port; 0 (any) for a world of one.
        port: u16,
    },
    /// The process that created this id already listens.
    Id(UniqueId),
}

/// Determines the identity of this process. `lookup` returns the text of an environment variable, if it is
/// set.
///
/// # Errors
/// `InvalidSetting`, quoting the variables, if they are incomplete or contradict each other; `Rendezvous`,
/// with what to set, if there are none or if the rendezvous point is unknown.
pub fn identity(config: &Config, lookup: impl Fn(&str) -> Option<String>) -> Result<Identity> {
    let environment = Environment(&lookup);
    let complete = config.rank.is_some()
        && config.world_size.is_some()
        && (environment.text(UNIQUE_ID).is_some()
            || (config.master_addr.is_some() && config.master_port.is_some()));
    // If every value of the launcher is overridden, its variables may be invalid.
    let launcher_info = if complete { None } else { detect_launcher(&environment)? };
    let (rank, world) = rank_and_world(config, launcher_info.as_ref())?;
    check(&rank, &world)?;

    let launcher = launcher_info.as_ref().map_or("FLEXRING_RANK", |launcher_info| launcher_info.launcher);
    let (rank, world) = (rank.value, world.value);
    if let Some((name, text)) = environment.text(UNIQUE_ID) {
        // The text is not quoted, because it is secret.
        let id = UniqueId::from_hex(&text)
            .map_err(|error| Error::invalid_setting(format!("{name}: {}", error.message())))?;
        return Ok(Identity {
            rank,
            world,
            token: id.job(),
            one_node: false,
            rendezvous: RendezvousPoint::Id(id),
            launcher,
        });
    }
    let token = launcher_info.as_ref().map_or(0, LauncherInfo::token);
    let rendezvous = if world == 1 {
        // No other rank has to connect.
        RendezvousPoint::Address { host: "127.0.0.1".to_owned(), port: 0 }
    } else {
        let host = config
            .master_addr
            .clone()
            .or_else(|| launcher_info.as_ref().and_then(|launcher_info| launcher_info.host.clone()))
            .ok_or_else(|| no_address(launcher_info.as_ref()))?;
        let port = config
            .master_port
            .or_else(|| launcher_info.as_ref().and_then(|launcher_info| launcher_info.port))
            .unwrap_or_else(|| derived_port(token));
        RendezvousPoint::Address { host, port }
    };
    let one_node = launcher_info.is_some_and(|info| info.one_node && info.world.value == world);
    Ok(Identity { rank, world, rendezvous, token, one_node, launcher })
}

/// Whether no launcher and no setting makes this process a rank of a world.
///
/// # Errors
/// As for [`identity`], if the launcher's variables contradict each other.
pub fn is_alone(config: &Config, lookup: impl Fn(&str) -> Option<String>) -> Result<bool> {
    let is_set = config.rank.is_some() || config.world_size.is_some();
    Ok(!is_set && detect_launcher(&Environment(&lookup))?.is_none())
}

/// This process's number among the ranks of its node, if its launcher sets one.
///
/// # Errors
/// As for [`identity`], if the launcher's variables contradict each other.
pub fn local_rank(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Rank>> {
    let environment = Environment(&lookup);
    let Some(launcher_info) = detect_launcher(&environment)? else { return Ok(None) };
    Ok(environment.number(launcher_info.local)?.map(|local| local.value))
}

/// The variable that contains a unique id.
pub(super) const UNIQUE_ID: &str = "FLEXRING_UNIQUE_ID";

/// A port from 20000 to 30000, below Linux's range of ephemeral ports. Two jobs with the same port detect it
/// by their tokens.
pub(super) fn derived_port(token: u128) -> u16 {
    20_000 + (token % 10_001) as u16
}

/// A number and the environment variable that contains it.
#[derive(Clone, Copy, Debug)]
struct NumericVariable {
    name: &'static str,
    value: usize,
}

/// The values that a launcher set.
pub(super) struct LauncherInfo {
    launcher: &'static str,
    rank: NumericVariable,
    world: NumericVariable,
    pub(super) host: Option<String>,
    pub(super) port: Option<u16>,
    /// Whether all ranks are on this node.
    pub(super) one_node: bool,
    /// The variables that may contain the rank's number on its node.
    local: &'static [&'static str],
    /// A name that all ranks of the job share, and that no other job has.
    job: Option<String>,
    /// How to pass a variable to all ranks, for messages.
    export: &'static str,
}

impl LauncherInfo {
    pub(super) fn token(&self) -> u128 {
        self.job.as_ref().map_or(0, |job| XxHash3_128::oneshot(format!("{}/{job}", self.launcher).as_bytes()))
    }
}

/// Reads environment variables through a lookup function.
pub(super) struct Environment<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// The first of these variables that is set and not empty.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|name| self.text(name))
    }

    pub(super) fn text(&self, name: &'static str) -> Option<(&'static str, String)> {
        (self.0)(name).filter(|text| !text.trim().is_empty()).map(|text| (name, text))
    }

    /// The first of these variables that is set, as an integer.
    fn number(&self, names: &[&'static str]) -> Result<Option<NumericVariable>> {
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

pub(super) fn invalid(message: String) -> Error {
    Error::invalid_setting(message)
}

/// The launcher that started this process, if it is a known one.
pub(super) fn detect_launcher(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    for launcher in [torchrun, open_mpi, mpich, slurm] {
        if let Some(launcher_info) = launcher(environment)? {
            return Ok(Some(launcher_info));
        }
    }
    Ok(None)
}

fn torchrun(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let Some((rank, world)) = environment.pair("torchrun", &["RANK"], &["WORLD_SIZE"])? else {
        return Ok(None);
    };
    let port = match environment.text("MASTER_PORT") {
        None => None,
        Some((name, text)) => {
            // Port `MASTER_PORT` itself is torchrun's store.
            let next = text.trim().parse::<u16>().ok().filter(|port| *port > 0);
            Some(next.and_then(|port| port.checked_add(1)).ok_or_else(|| {
                invalid(format!(
                    "{name}=\"{text}\" cannot be used: expected a port number from 1 to 65534, because flexring uses \
                     the one above it; or set FLEXRING_MASTER_PORT"
                ))
            })?)
        }
    };
    let loopback = on_one_node(environment, &["LOCAL_WORLD_SIZE"], world)?;
    Ok(Some(LauncherInfo {
        launcher: "torchrun",
        rank,
        world,
        one_node: loopback.is_some(),
        host: environment.text("MASTER_ADDR").map(|(_, text)| text.trim().to_owned()).or(loopback),
        port,
        local: &["LOCAL_RANK"],
        job: environment.job(&["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]),
        export: "MASTER_ADDR=<host of rank 0> in front of each process",
    }))
}

fn open_mpi(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let numbers = environment.pair("Open MPI", &["OMPI_COMM_WORLD_RANK"], &["OMPI_COMM_WORLD_SIZE"])?;
    let Some((rank, world)) = numbers else {
        return Ok(None);
    };
    let host = on_one_node(environment, &["OMPI_COMM_WORLD_LOCAL_SIZE"], world)?;
    Ok(Some(LauncherInfo {
        launcher: "Open MPI",
        rank,
        world,
        one_node: host.is_some(),
        host,
        port: None,
        local: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        job: environment
            .first(&["PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"])
            .map(|(_, text)| text),
        export: "mpirun -x FLEXRING_MASTER_ADDR=<host of rank 0>",
    }))
}

fn mpich(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let numbers = environment.pair("MPICH", &["PMI_RANK", "PMI_ID"], &["PMI_SIZE"])?;
    let Some((rank, world)) = numbers else {
        return Ok(None);
    };
    let host = on_one_node(environment, &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"], world)?;
    let job = environment
        .job(&["PMI_JOBID", "PALS_APID", "HYDRA_JOBID"])
        // Hydra does not name its jobs, but all ranks of a node descend from the same proxy.
        .or_else(|| host.is_some().then(hydra_proxy).flatten());
    Ok(Some(LauncherInfo {
        launcher: "MPICH",
        rank,
        world,
        one_node: host.is_some(),
        host,
        port: None,
        local: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
        job,
        export: "mpiexec -genv FLEXRING_MASTER_ADDR <host of rank 0>",
    }))
}

fn slurm(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
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
    };
    Ok(Some(LauncherInfo {
        launcher: "Slurm",
        rank,
        world,
        one_node,
        host,
        port: None,
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
fn first_host(list: &str) -> Option<String> {
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

fn rank_and_world(
    config: &Config,
    launcher_info: Option<&LauncherInfo>,
) -> Result<(NumericVariable, NumericVariable)> {
    let own = |name, value: Option<usize>| value.map(|value| NumericVariable { name, value });
    let rank = own("FLEXRING_RANK", config.rank).or(launcher_info.map(|launcher_info| launcher_info.rank));
    let world = own("FLEXRING_WORLD_SIZE", config.world_size)
        .or(launcher_info.map(|launcher_info| launcher_info.world));
    match (rank, world) {
        (Some(rank), Some(world)) => Ok((rank, world)),
        (None, None) => Err(Error::rendezvous(
            "this process has no rank: start it with torchrun, mpirun or srun (a Slurm batch script's own process is no \
             rank), or set FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR and FLEXRING_MASTER_PORT",
        )),
        (Some(NumericVariable { name, value }), None) => Err(invalid(format!(
            "{name}=\"{value}\" is set but FLEXRING_WORLD_SIZE is not, and no launcher sets the world size"
        ))),
        (None, Some(NumericVariable { name, value })) => Err(invalid(format!(
            "{name}=\"{value}\" is set but FLEXRING_RANK is not, and no launcher sets the rank"
        ))),
    }
}

fn check(rank: &NumericVariable, world: &NumericVariable) -> Result<()> {
    if rank.value < world.value {
        return Ok(());
    }
    Err(invalid(format!(
        "{}=\"{}\" does not fit {}=\"{}\": ranks are numbered from 0 and less than the size of their world",
        rank.name, rank.value, world.name, world.value
    )))
}

fn no_address(launcher_info: Option<&LauncherInfo>) -> Error {
    let message = match launcher_info {
        Some(launcher_info) => format!(
            "{} does not give the address of rank 0, and the ranks are on several nodes: set FLEXRING_MASTER_ADDR to the host \
             name or address of rank 0 on all ranks, for example with {}",
            launcher_info.launcher, launcher_info.export
        ),
        None => "the address of rank 0 is unknown: set FLEXRING_MASTER_ADDR to the host name or address of rank 0 on all \
                 ranks (127.0.0.1 if all are on this node)"
            .to_owned(),
    };
    Error::rendezvous(message)
}

#[cfg(test)]
pub(super) mod tests;
