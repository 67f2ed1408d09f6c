//! What the ranks of a new world use before they have links: settings, topology, plans.
//!
//! Owns how a tuning profile and the settings make them.

use super::peer_info::PeerInfo;
use super::tuning;
use crate::bootstrap::ControlConnection;
use crate::communicator::plans::Plans;
use crate::communicator::world_template::{WorldSpec, WorldTemplate};
use crate::config::{Algorithm, Config};
use crate::description;
use crate::error::{Error, Result};
use crate::plan::choice::{Simulate, Trial, share_out};
use crate::plan::topology::Topology;
use crate::plan::tuning::{ClusterIdentity, TuningProfile};
use crate::rank::Rank;
use flexring_simulator::trials::simulated_time;
use std::collections::BTreeMap;
use twox_hash::XxHash3_64;

/// The transport of worlds whose ranks all share memory, in tuning profiles.
const SHARED_MEMORY: &str = "memory";

/// Settings and topology of a new world, equal on all of its ranks.
pub(in crate::communicator) struct WorldPlan {
    /// What the world was asked to be.
    pub(super) spec: WorldSpec,
    /// Without the rates of a tuning profile.
    planned: Topology,
    profile: Option<TuningProfile>,
    /// The settings of `spec`, and those of the tuning profile.
    pub config: Config,
    /// With the rates of the tuning profile.
    pub topology: Topology,
    /// The hosts and ranks of its nodes, and the transport between them.
    pub cluster: ClusterIdentity,
}

impl WorldPlan {
    /// The plan for `topology`, whose ranks have these names of hosts. `read_profile` reads the tuning
    /// profile at a path.
    ///
    /// # Errors
    /// Those of `read_profile`; `InvalidSetting` if the profile is of another cluster.
    pub(super) fn new(
        spec: WorldSpec,
        topology: Topology,
        hosts: &[&str],
        read_profile: impl FnOnce(&str) -> Result<TuningProfile>,
    ) -> Result<Self> {
        let cluster = ClusterIdentity::new(&topology, hosts, SHARED_MEMORY);
        let profile = spec.config.tuning.as_deref().map(read_profile).transpose()?;
        if let Some((path, profile)) = spec.config.tuning.as_ref().zip(profile.as_ref()) {
            tuning::check_cluster(path, profile, &cluster)?;
        }
        let (measured, config) = match &profile {
            Some(profile) => (profile.topology(&topology), profile.configure(&spec.config)),
            None => (topology.clone(), spec.config.clone()),
        };
        Ok(Self { spec, planned: topology, profile, config, topology: measured, cluster })
    }

    fn is_described(&self) -> bool {
        self.spec.topology.is_some() || self.spec.config.topology.is_some() || self.profile.is_some()
    }

    /// The plans of rank `me`. Where times decide, `simulate` is called. If an algorithm that the user named
    /// cannot be used on what is left of a world, selects one.
    ///
    /// # Errors
    /// `InvalidSetting` if the settings fit no plan; those of `simulate`.
    pub(super) fn plans(&self, me: Rank, simulate: &mut Simulate<'_>) -> Result<Plans> {
        let WorldSpec { config, is_derived, .. } = &self.spec;
        let mut plans =
            |config: &Config| Plans::new(config, &self.planned, me, self.profile.as_ref(), simulate);
        plans(config).or_else(|error| {
            if !is_derived || config.algo == Algorithm::Auto {
                return Err(error);
            }
            log::warn!(
                "{} cannot be used for the ranks of a new communicator ({error}): using auto",
                config.algo.name()
            );
            plans(&Config { algo: Algorithm::Auto, ..config.clone() })
        })
    }

    /// The plans of this rank, compared with those of the other ranks. The ranks divide the simulations that
    /// the choice needs.
    ///
    /// # Errors
    /// As for [`plans`](Self::plans); `Disagreement` if the ranks made different ones.
    pub(super) fn agree_on_plans(&self, connection: &ControlConnection) -> Result<Plans> {
        let (me, world) = (connection.rank(), connection.world());
        let plans = self.plans(me, &mut |topology, trials| {
            let ranks = share_out(trials, world);
            let mine = trials.iter().zip(&ranks).filter(|(_, rank)| **rank == me);
            let mine = mine.map(|(trial, _)| simulated_time(&self.spec.config, topology, trial)).collect();
            let exchange = PlanExchange { plans: digest(trials), are_last: false, times: mine };
            let mut times = exchange.agree(connection)?;
            Ok(ranks.into_iter().map(|rank| times[rank].next().flatten()).collect())
        })?;
        let chosen = PlanExchange { plans: plans.digest(), are_last: true, times: Vec::new() };
        chosen.agree(connection)?;
        Ok(plans)
    }

    /// Notes the transport between nodes; `None` if all ranks share memory.
    ///
    /// # Errors
    /// `InvalidSetting` if the tuning profile was measured with another one.
    pub(super) fn set_transport(&mut self, between_nodes: Option<&str>) -> Result<()> {
        self.cluster.transport = between_nodes.unwrap_or(SHARED_MEMORY).to_owned();
        match self.config.tuning.as_ref().zip(self.profile.as_ref()) {
            Some((path, profile)) => tuning::check_transport(path, profile, &self.cluster.transport),
            None => Ok(()),
        }
    }

    /// What the communicator keeps.
    pub(super) fn into_template(self) -> WorldTemplate {
        WorldTemplate {
            is_described: self.is_described(),
            untuned_subchunk: self.spec.config.subchunk,
            config: self.config,
            connection_key: None,
            topology: self.topology,
            cluster: self.cluster,
            service: None,
            ancestors: self.spec.ancestors,
            gathering: None,
        }
    }
}

/// The topology that the settings describe; by default the nodes of the ranks at one switch.
///
/// # Errors
/// `InvalidSetting` if the settings describe another number of ranks.
pub(super) fn topology_of_processes(spec: &WorldSpec, infos: &[PeerInfo]) -> Result<Topology> {
    match (&spec.topology, &spec.config.topology) {
        (Some(topology), _) => Ok(topology.clone()),
        (None, Some(text)) => {
            let hosts: Vec<String> = infos.iter().map(|info| info.topology_name.clone()).collect();
            configured_topology(text, infos.len(), Some(&hosts))
        }
        (None, None) => {
            let nodes: Vec<[&str; 2]> =
                infos.iter().map(|info| [&*info.topology_name, &*info.node]).collect();
            Ok(Topology::from_names(&node_labels(&nodes)))
        }
    }
}

/// The topology that the settings describe for `world` ranks of one process; by default one node.
///
/// # Errors
/// As for [`topology_of_processes`].
pub(super) fn topology_of_threads(spec: &WorldSpec, world: usize) -> Result<Topology> {
    match (&spec.topology, &spec.config.topology) {
        (Some(topology), _) => Ok(topology.clone()),
        (None, Some(text)) => configured_topology(text, world, None),
        (None, None) => Ok(Topology::from_names(&vec!["here"; world])),
    }
}

/// By rank, how messages name its node: as users do, with a number where several nodes have one name, such as
/// containers of a host. `nodes` are names of users and identifiers of nodes.
fn node_labels(nodes: &[[&str; 2]]) -> Vec<String> {
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for [name, node] in nodes {
        let same_name = by_name.entry(name).or_default();
        if !same_name.contains(node) {
            same_name.push(node);
        }
    }
    let label = |[name, node]: &[&str; 2]| {
        let same_name = &by_name[name];
        match same_name.iter().position(|other| other == node) {
            Some(at) if same_name.len() > 1 => format!("{name} ({})", at + 1),
            _ => (*name).to_owned(),
        }
    };
    nodes.iter().map(label).collect()
}

/// The topology that `FLEXRING_TOPOLOGY` describes. Fails unless it has `world` ranks.
fn configured_topology(text: &str, world: usize, hosts: Option<&[String]>) -> Result<Topology> {
    let refuse = |message: String| Error::invalid_setting(format!("FLEXRING_TOPOLOGY={text}: {message}"));
    let topology = description::topology(text, hosts).map_err(|error| error.context("FLEXRING_TOPOLOGY"))?;
    let ranks = topology.world();
    if ranks < world {
        return Err(refuse(format!(
            "it leaves out rank {ranks}: it has {ranks} ranks, but there are {world}"
        )));
    }
    if ranks > world {
        return Err(refuse(format!("it names rank {}, but there are {world} ranks", ranks - 1)));
    }
    Ok(topology)
}

/// What a rank tells the others while all choose plans.
#[derive(serde::Serialize, serde::Deserialize)]
struct PlanExchange {
    /// A hash of the chosen plans, or of those to be simulated. It is equal on all ranks.
    plans: u64,
    /// Whether these are the chosen ones.
    are_last: bool,
    /// The simulated times of this rank's part of the plans.
    times: Vec<Option<u64>>,
}

impl PlanExchange {
    /// The times of all ranks.
    ///
    /// # Errors
    /// `Disagreement` if a rank has other plans.
    fn agree(&self, connection: &ControlConnection) -> Result<Vec<std::vec::IntoIter<Option<u64>>>> {
        let all = connection.gather_values("plans", self)?;
        match all.iter().position(|one| (one.plans, one.are_last) != (all[0].plans, all[0].are_last)) {
            None => Ok(all.into_iter().map(|one| one.times.into_iter()).collect()),
            Some(rank) => Err(Error::disagreement(format!(
                "ranks 0 and {rank} made different plans: do they read the same topology and plan files?"
            ))),
        }
    }
}

/// A hash of plans and lengths.
fn digest(trials: &[Trial]) -> u64 {
    let combine = |digest: u64, trial: &Trial| {
        XxHash3_64::oneshot(&(digest ^ trial.plan.digest() ^ trial.bytes).to_le_bytes())
    };
    trials.iter().fold(0, combine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn nodes_have_names_of_users_with_a_number_where_several_have_one() {
        let nodes =
            [["a", "1/net:4/uid:0"], ["b", "2/net:4/uid:0"], ["a", "1/net:5/uid:0"], ["a", "1/net:4/uid:0"]];
        assert_eq!(node_labels(&nodes), ["a (1)", "b", "a (2)", "a (1)"]);
    }

    #[test]
    fn a_described_topology_has_the_ranks_of_the_world_and_is_kept_for_derived_ones() {
        let spec = |topology: Option<&str>| {
            WorldSpec::new(&Config { topology: topology.map(str::to_owned), ..Config::default() })
        };
        for (text, named) in [("2+1", "rank 3"), ("3+2", "rank 4")] {
            let error = topology_of_threads(&spec(Some(text)), 4).expect_err("four ranks");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.to_string().contains(named), "{error}");
        }
        for (text, is_described) in [(None, false), (Some("3+1"), true)] {
            let topology = topology_of_threads(&spec(text), 4).expect("four ranks");
            let plan = WorldPlan::new(spec(text), topology, &["host"; 4], tuning::read).expect("a plan");
            assert_eq!(plan.into_template().is_described, is_described);
        }
    }
}
