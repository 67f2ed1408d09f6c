//! This process's identity: its rank, its world and its rendezvous point, from the launcher's environment.
//!
//! Owns the environment variables of the launchers and their meaning.
//!
//! | launcher | recognised by | rendezvous point |
//! |---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR` (its own store listens on `MASTER_PORT`, which is part of the job's name) |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | this node, if all ranks are on it |
//! | MPICH, Intel MPI | `PMI_RANK` or `PMI_ID` | this node, if all ranks are on it |
//! | Slurm | `SLURM_PROCID` within a step | the step's first node |
//!
//! `FLEXRING_RANK`, `FLEXRING_WORLD_SIZE`, `FLEXRING_MASTER_ADDR` and `FLEXRING_MASTER_PORT` each take
//! precedence over the launcher's value; no launcher is needed if they are complete. `FLEXRING_UNIQUE_ID`
//! replaces address and port. If no port is given, it is derived from the job's name. `cross_check` decides
//! if the variables of several launchers are set. `MASTER_ADDR` is the rendezvous point if the launcher gives
//! none.

mod cross_check;
mod variables;

use super::unique_id::UniqueId;
use crate::config::{Config, environment};
use crate::error::{Error, Result};
use crate::rank::Rank;
use cross_check::{alone_among_several, complete_launchers, detect_launcher, unusual_ranks};
use variables::NumericVariable;
pub(super) use variables::{Environment, LauncherInfo, invalid};

/// The rank of this process, and where its world rendezvous.
///
/// ```
/// use flexring::config::{Config, Size};
/// use flexring::{Communicator, Identity};
///
/// # fn main() -> flexring::Result<()> {
/// let config = Config { subchunk: Size(256 << 10), ..Config::from_env()? };
/// // Under a launcher `Identity::from_env(&config)?`.
/// let comm = Communicator::with_config(&config, &Identity::alone())?;
/// assert_eq!(comm.size(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// This process's rank, less than `world`.
    pub rank: Rank,
    /// The number of ranks, at least 1.
    pub world: usize,
    /// Where the ranks rendezvous.
    #[doc(hidden)]
    pub rendezvous: RendezvousPoint,
    /// Distinguishes this job from others that may use the same rendezvous point; 0 if the job has no known
    /// name. Not secret.
    #[doc(hidden)]
    pub token: u128,
    /// Whether all ranks are on this node, as their launcher says.
    #[doc(hidden)]
    pub one_node: bool,
    /// The source of the identity, for messages: the launcher's name, for example.
    #[doc(hidden)]
    pub launcher: &'static str,
}

impl Identity {
    /// The identity that the environment describes, as
    /// [`Communicator::from_env`](crate::Communicator::from_env) finds it.
    ///
    /// # Errors
    /// `InvalidSetting`, quoting the variables, if they are incomplete or contradict each other;
    /// `Rendezvous`, with what to set, if there are none or if the rendezvous point is unknown.
    pub fn from_env(config: &Config) -> Result<Self> {
        identity(config, environment)
    }

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
        let rendezvous = RendezvousPoint::at("127.0.0.1".to_owned(), 0);
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
        /// The ports that rank 0 tries next if another job has `port`.
        further_ports: Vec<u16>,
    },
    /// The process that created this id already listens.
    Id(UniqueId),
}

impl RendezvousPoint {
    /// Rank 0 listens at exactly this address.
    #[must_use]
    pub fn at(host: String, port: u16) -> Self {
        Self::Address { host, port, further_ports: Vec::new() }
    }

    /// Rank 0 of the job with this token listens at ports that follow from it, from 20000 to 30000, below
    /// Linux's range of ephemeral ports. Jobs recognize each other by their tokens; one without a name has a
    /// single port.
    pub(super) fn derived(host: String, token: u128) -> Self {
        let port = |shift: u32| 20_000 + ((token >> shift) % 10_001) as u16;
        let mut further_ports = if token == 0 { Vec::new() } else { vec![port(40), port(80)] };
        further_ports.retain(|further| *further != port(0));
        Self::Address { host, port: port(0), further_ports }
    }
}

/// Determines the identity of this process. `lookup` returns the text of an environment variable, if it is
/// set.
///
/// # Errors
/// `InvalidSetting`, quoting the variables, if they are incomplete or contradict each other; `Rendezvous`,
/// with what to set, if there are none or if the rendezvous point is unknown.
pub fn identity(config: &Config, lookup: impl Fn(&str) -> Option<String>) -> Result<Identity> {
    let environment = Environment(&lookup);
    let launcher_info = needed_launcher(config, &environment)?;
    let (rank, world) = rank_and_world(config, launcher_info.as_ref())?;
    check(&rank, &world)?;

    let launcher = launcher_info.as_ref().map_or("FLEXRING_RANK", |launcher_info| launcher_info.launcher);
    let is_of_launcher = config.rank.is_none() && config.world_size.is_none();
    let unusual = if is_of_launcher { unusual_ranks(&environment) } else { None };
    if let Some(warning) = alone_among_several(&environment, world).or(unusual) {
        crate::logging::init(&config.log);
        log::warn!("{warning}");
    }
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
        RendezvousPoint::at("127.0.0.1".to_owned(), 0)
    } else {
        let host = config
            .master_addr
            .clone()
            .or_else(|| launcher_info.as_ref().and_then(|launcher_info| launcher_info.host.clone()))
            .ok_or_else(|| no_address(launcher_info.as_ref()))?;
        match config.master_port {
            Some(port) => RendezvousPoint::at(host, port),
            None => RendezvousPoint::derived(host, token),
        }
    };
    let one_node = launcher_info.is_some_and(|info| info.one_node && info.world.value == world);
    Ok(Identity { rank, world, rendezvous, token, one_node, launcher })
}

/// The launcher whose values are needed beside the settings. `None` if there is no launcher, or if the
/// settings are complete.
///
/// # Errors
/// As [`complete_launchers`] and, if rank or world size are needed, [`detect_launcher`].
pub(super) fn needed_launcher(
    config: &Config,
    environment: &Environment<'_>,
) -> Result<Option<LauncherInfo>> {
    let is_rank_set = config.rank.is_some() && config.world_size.is_some();
    let is_place_set = environment.text(UNIQUE_ID).is_some()
        || (config.master_addr.is_some() && config.master_port.is_some());
    match (is_rank_set, is_place_set) {
        // If every value of the launcher is overridden, its variables may be invalid.
        (true, true) => Ok(None),
        // If these are, launchers may contradict each other in them.
        (true, false) => Ok(complete_launchers(environment)?.into_iter().next()),
        (false, _) => detect_launcher(environment),
    }
}

/// Whether no launcher and no setting makes this process a rank of a world.
///
/// # Errors
/// `InvalidSetting` if the only launcher's variables are incomplete.
pub fn is_alone(config: &Config, lookup: impl Fn(&str) -> Option<String>) -> Result<bool> {
    let is_set = config.rank.is_some() || config.world_size.is_some();
    Ok(!is_set && complete_launchers(&Environment(&lookup))?.is_empty())
}

/// This process's number among the ranks of its node, if its launcher sets one.
///
/// # Errors
/// As for [`is_alone`].
pub fn local_rank(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Rank>> {
    let environment = Environment(&lookup);
    let launchers = complete_launchers(&environment)?;
    let Some(launcher_info) = launchers.first() else { return Ok(None) };
    Ok(environment.number(launcher_info.local)?.map(|local| local.value))
}

/// The variable that contains a unique id.
pub(super) const UNIQUE_ID: &str = "FLEXRING_UNIQUE_ID";

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
