//! How a communicator is created: the ranks find each other, exchange their addresses, make links, and check
//! that they use the same plans.
//!
//! Owns the order of these steps. Must not know how each is done.

use super::Communicator;
use super::blueprint::{Blueprint, LocalRank, WorldSpec};
use super::control_plane::{ControlPlane, LocalGroup, LocalMember};
use super::cores::Cores;
use super::endpoints::PeerAddresses;
use super::gpu;
use super::inter_node::{self, InterNodeSetup};
use super::introduction::{ConnectionOrigin, Introduction, has_room};
use super::launch_group::LaunchGroup;
use super::local_gathering::LocalGathering;
use super::node_memories;
use super::offers::OfferKey;
use super::peer_info::PeerInfo;
use super::plans::Plans;
use super::runner::CallRunner;
use super::runner_builder::{CallRunnerBuilder, region_layout};
use super::timeline::{self, Timeline};
use super::tuning;
use crate::bootstrap::{
    ControlConnection, Identity, RendezvousPoint, ShrinkService, ShrinkServiceParams, host_name, local_rank,
};
use crate::config::{Algorithm, Config, TransportChoice, environment};
use crate::description;
use crate::descriptor_limit;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::plan::topology::Topology;
use crate::plan::tuning::{ClusterIdentity, TuningProfile};
use crate::process::DefaultFloatEnvironment;
use crate::rank::Rank;
use crate::secret::random_bytes;
use crate::transport::shm::{Mailbox, NodeMemory, OwnMemory, Region, RegionOfRank, Shm};
use crate::transport::{AnyTransport, local};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};

/// The transport of worlds whose ranks all share memory, in tuning profiles.
const SHARED_MEMORY: &str = "memory";

impl Communicator {
    /// Joins the world that `identity` names, with the settings in `config`.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env).
    pub fn with_config(config: &Config, identity: &Identity) -> Result<Self> {
        let _default = DefaultFloatEnvironment::enter();
        crate::logging::init(config.log);
        warn_of_unknown_variables(identity.rank);
        descriptor_limit::raise();
        Self::join(WorldSpec::new(config), identity, Arc::new(Fault::new()))
    }

    /// Joins the world that `identity` names. `fault` is raised when it fails, and ends joining if it is raised meanwhile.
    pub(super) fn join(spec: WorldSpec, identity: &Identity, fault: Arc<Fault>) -> Result<Self> {
        let config = &spec.config;
        inter_node::check_encryption(config)
            .map_err(|error| ControlConnection::decline(identity, config, error))?;
        let connection = ControlConnection::join(identity, config, Arc::clone(&fault))?;
        let origin = match identity.rendezvous {
            RendezvousPoint::Id(_) => ConnectionOrigin::UniqueId,
            RendezvousPoint::Address { .. } => ConnectionOrigin::Address,
        };
        Self::join_over(spec, connection, origin, fault)
    }

    /// Joins the world of `connection`.
    pub(super) fn join_over(
        spec: WorldSpec,
        connection: ControlConnection,
        origin: ConnectionOrigin,
        fault: Arc<Fault>,
    ) -> Result<Self> {
        let introduction = Introduction::exchange(&spec.config, &connection, origin);
        let mut introduction = introduction.map_err(|error| connection.report(error))?;
        let connection = introduction.choose_connection(connection, origin, &spec.config, &fault)?;
        // The other ranks learn why this one does not join.
        Self::join_introduced(spec, introduction, &connection, fault)
            .map_err(|error| connection.1.report(error))
    }

    /// Makes the links among ranks that know each other.
    fn join_introduced(
        mut spec: WorldSpec,
        introduction: Introduction,
        (carrier, connection): &(OfferKey, Arc<ControlConnection>),
        fault: Arc<Fault>,
    ) -> Result<Self> {
        let Introduction { deadline, descriptors, listener, shrink_listener, memories, infos, .. } =
            introduction;
        let (me, world) = (connection.rank(), connection.world());
        let same_node: Vec<bool> = infos.iter().map(|info| info.node == infos[me].node).collect();
        let node: Vec<Rank> = (0..world).filter(|rank| same_node[*rank]).collect();
        let topology = match &spec.topology {
            Some(topology) => topology.clone(),
            None => topology(&spec.config, &infos)?,
        };
        let hosts: Vec<&str> = infos.iter().map(|info| info.topology_name.as_str()).collect();
        let mut cluster = ClusterIdentity::new(&topology, &hosts, SHARED_MEMORY);
        let profile = match &spec.config.tuning {
            Some(path) => {
                let profile = tuning::agree(path, connection)?;
                tuning::check_cluster(path, &profile, &cluster)?;
                Some(profile)
            }
            None => None,
        };
        let is_described = spec.topology.is_some() || spec.config.topology.is_some() || profile.is_some();
        let plans = plans(&spec, &topology, me, profile.as_ref())?;
        let topology = profile.as_ref().map_or(topology.clone(), |profile| profile.topology(&topology));
        let untuned_subchunk = spec.config.subchunk;
        if let Some(profile) = &profile {
            spec.config = profile.configure(&spec.config);
        }
        let config = &spec.config;
        check_equal(&connection.all_gather("plans", &plans.digest().to_le_bytes())?)?;
        reach(FaultPoint::JoinComparedPlans);
        let ranks_per_core = Cores::ranks_per_core(node.iter().map(|rank| &infos[*rank].cores));
        let may_have_gpus = |ranks: &[Rank]| ranks.iter().any(|rank| infos[*rank].may_have_gpus);
        let layout_for =
            |ranks: &[Rank]| region_layout(config, ranks.len(), world, ranks_per_core, may_have_gpus(ranks));
        let bytes = OwnMemory::bytes_with(layout_for(&node));
        let shares = descriptors.is_some() && has_room(config.transport, &infos, (me, &node), bytes)?;
        let descriptors = descriptors.filter(|_| shares);
        let intra_node: Vec<Rank> = if descriptors.is_some() { node.clone() } else { vec![me] };
        let inter_node: Vec<Rank> = (0..world).filter(|rank| !intra_node.contains(rank)).collect();
        if config.transport == TransportChoice::Shm && !inter_node.is_empty() {
            return Err(Error::invalid_setting(format!(
                "FLEXRING_TRANSPORT=shm, but rank {me} on {} and rank {} on {} do not share a node",
                infos[me].host, inter_node[0], infos[inter_node[0]].host
            )));
        }

        let offers: Vec<_> = infos.iter().map(|info| &info.memories).collect();
        let common = memories.common(&intra_node, &offers);
        let own = match &common {
            Some((memory, _)) => Arc::clone(memory.own()),
            None => OwnMemory::new(intra_node.len())?,
        };
        let timeline = Timeline::of(config, spec.is_derived, &infos[0].nonce);
        let trace = Timeline::trace(timeline.as_ref(), me, world)?;
        let mut region = own.region(layout_for(&intra_node), gpu::numa_node(config.gpu))?;
        reach(FaultPoint::JoinHasArena);
        let (memory, places) = match (common, descriptors) {
            (Some(common), _) => common,
            (None, descriptors) => {
                let key = infos[intra_node[0]].nonce;
                let memory = match descriptors.filter(|_| intra_node.len() > 1) {
                    Some(descriptors) => {
                        let address = |rank: &Rank| {
                            let address = infos[*rank].descriptors.clone();
                            address.map(|address| (*rank, address)).ok_or_else(|| not_shared(*rank))
                        };
                        let addresses = intra_node.iter().map(address).collect::<Result<Vec<_>>>()?;
                        descriptors.run(me, &addresses, &own, key, deadline, &fault)?
                    }
                    None => NodeMemory::new(key, 0, own, vec![None])?,
                };
                let memory = Arc::new(memory);
                node_memories::keep(&memory);
                (memory, (0..intra_node.len()).collect())
            }
        };
        let regions = connection.gather_values("regions", &region.address())?;
        let mut transports: Vec<AnyTransport> = Vec::new();
        let mut routes = vec![0; world];
        let (mut mailbox, mut registrar, mut rails) = (None, None, Arc::default());
        if intra_node.len() > 1 {
            let of_rank =
                |(rank, place): (&Rank, usize)| RegionOfRank { rank: *rank, place, region: regions[*rank] };
            let ranks: Vec<RegionOfRank> = intra_node.iter().zip(places).map(of_rank).collect();
            let neighbours = memory.neighbours(&mut region, &ranks)?;
            let shm = Shm::new("shm", world, region.arena(), &neighbours)?;
            transports.push(AnyTransport::InPlace(Box::new(shm)));
            reach(FaultPoint::JoinSharesMemory);
            if inter_node.is_empty() {
                mailbox = Some(Mailbox::new(region.arena(), &neighbours, me)?);
            }
        }
        if !inter_node.is_empty() {
            inter_node.iter().for_each(|rank| routes[*rank] = transports.len());
            let usual = plans.usual_peers();
            let planned: Vec<Rank> = inter_node.iter().copied().filter(|rank| usual.contains(rank)).collect();
            let setup = InterNodeSetup {
                config,
                me,
                infos: &infos,
                same_node: &same_node,
                peers: &inter_node,
                planned: &planned,
                bytes_in_flight: &|| plans.bytes_in_flight(config.socket_buffer.0, &topology, &node),
                connection,
                deadline,
                fault: &fault,
            };
            let linked = setup.link(listener, region.layout().pool().piece(region.arena()))?;
            cluster.transport = linked.transport.name().to_owned();
            transports.push(AnyTransport::Posted(linked.transport));
            (registrar, rails) = (linked.registrar, linked.rails);
        }
        if let Some((path, profile)) = config.tuning.as_ref().zip(profile.as_ref()) {
            tuning::check_transport(path, profile, &cluster.transport)?;
        }
        let threads: Vec<Rank> =
            (0..world).filter(|rank| infos[*rank].process == infos[me].process).collect();
        let builder = CallRunnerBuilder {
            config,
            topology: &topology,
            cluster: &cluster,
            world,
            me,
            plans,
            memory,
            region,
            transports,
            routes,
            mailbox,
            registrar,
            rails,
            ranks_per_core,
            launch_group: (threads.len() > 1).then(|| LaunchGroup::shared(infos[0].nonce, threads)),
            opens_gpu: true,
            trace,
            fault,
        };
        let service = match shrink_listener {
            Some(listener) => {
                let addresses = PeerAddresses::new(config, connection.route());
                let ordered = |(rank, info): (Rank, &PeerInfo)| {
                    let ordered = addresses.for_shrink(&info.shrink_endpoints, same_node[rank]);
                    let missing = || Error::internal(format!("rank {rank} has no address for a shrink"));
                    (!ordered.is_empty()).then_some(ordered).ok_or_else(missing)
                };
                let endpoints = infos.iter().enumerate().map(ordered).collect::<Result<Vec<_>>>()?;
                // Random numbers of all ranks, so that no other communicator has this key.
                let nonces: Vec<&[u8]> = infos.iter().map(|info| info.nonce.as_slice()).collect();
                let key = connection.secret().derive("shrink", &nonces);
                let config = config.clone();
                let params = ShrinkServiceParams { me, endpoints, key, listener, ranks_per_core, config };
                Some(Arc::new(ShrinkService::start(params)?))
            }
            None => None,
        };
        reach(FaultPoint::JoinHasLinks);
        let runner = builder.build(ControlPlane::Processes(Arc::clone(connection)))?;
        reach(FaultPoint::JoinBuiltRunner);
        if infos.iter().any(|info| info.has_gpu) {
            // Opening memory may wait for a GPU, so it is done before the first call.
            connection.all_gather("memory of GPUs", &[])?;
            runner.lock_state().executor.open_neighbours();
        }
        // No rank may make a call before all ranks have all links.
        let can_connect = runner.can_connect_kernels();
        let connectable = connection.gather_values("links", &can_connect)?;
        runner.lock_state().executor.settle_sharing();
        runner.connects_kernels.store(connectable.iter().all(|can| *can), Ordering::Relaxed);
        reach(FaultPoint::JoinEnds);
        let WorldSpec { config, ancestors, .. } = spec;
        let is_traced = config.trace.is_some();
        let comm = Self::new(
            runner,
            Blueprint {
                config,
                untuned_subchunk,
                carrier: Some(*carrier),
                topology,
                is_described,
                cluster,
                service,
                ancestors,
                gathering: None,
            },
        );
        if is_traced {
            timeline::align(&comm, connection)?;
        }
        Ok(comm)
    }

    /// A world of `world` ranks that are threads of this process, with the settings in `config`; one
    /// communicator each, in the order of ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for a world without ranks; `System` if there is too little memory.
    pub fn local_with(config: &Config, world: usize) -> Result<Vec<Self>> {
        let _default = DefaultFloatEnvironment::enter();
        crate::logging::init(config.log);
        let ranks = Self::local_ranks(&WorldSpec::new(config), world)?;
        Ok(ranks.into_iter().map(|rank| Self::new(rank.runner, rank.blueprint)).collect())
    }

    /// The ranks of a world of threads, in their order.
    pub(super) fn local_ranks(spec: &WorldSpec, world: usize) -> Result<Vec<LocalRank>> {
        if world == 0 {
            return Err(Error::invalid_argument("a world has at least one rank"));
        }
        descriptor_limit::raise();
        let fault = Arc::new(Fault::new());
        let group = LocalGroup::new(world, Arc::clone(&fault));
        let topology = match (&spec.topology, &spec.config.topology) {
            (Some(topology), _) => topology.clone(),
            (None, Some(text)) => configured_topology(text, world, None)?,
            (None, None) => Topology::from_names(&vec!["here"; world]),
        };
        let cluster = ClusterIdentity::new(
            &topology,
            &vec![spec.config.node.clone().unwrap_or_else(host_name); world],
            SHARED_MEMORY,
        );
        let profile = spec.config.tuning.as_deref().map(tuning::read).transpose()?;
        if let Some((path, profile)) = spec.config.tuning.as_ref().zip(profile.as_ref()) {
            tuning::check_cluster(path, profile, &cluster)?;
            tuning::check_transport(path, profile, &cluster.transport)?;
        }
        let is_described = spec.topology.is_some() || spec.config.topology.is_some() || profile.is_some();
        let measured = profile.as_ref().map_or(topology.clone(), |profile| profile.topology(&topology));
        let config =
            &profile.as_ref().map_or_else(|| spec.config.clone(), |profile| profile.configure(&spec.config));
        let ranks_per_core = Cores::ranks_per_core(std::iter::repeat_n(&Cores::of_this_process(), world));
        let layout = region_layout(config, world, world, ranks_per_core, gpu::may_exist(config.gpu));
        let key: [u8; 16] = random_bytes()?;
        let timeline = Timeline::of(config, spec.is_derived, &key);
        let launch_group = LaunchGroup::new((0..world).collect());
        let memories = local::share_memory(world, key)?;
        let regions = memories.iter().map(|memory| memory.own().region(layout, None));
        let regions = regions.collect::<Result<Vec<Region>>>()?;
        let of_rank =
            |(rank, region): (Rank, &Region)| RegionOfRank { rank, place: rank, region: region.address() };
        let of_ranks: Vec<RegionOfRank> = regions.iter().enumerate().map(of_rank).collect();
        let rank = |(me, (memory, mut region)): (Rank, (NodeMemory, Region))| {
            let neighbours = memory.neighbours(&mut region, &of_ranks)?;
            let shm = Shm::new("local", world, region.arena(), &neighbours)?;
            let mailbox = Some(Mailbox::new(region.arena(), &neighbours, me)?);
            let builder = CallRunnerBuilder {
                config,
                topology: &measured,
                cluster: &cluster,
                world,
                me,
                plans: plans(spec, &topology, me, profile.as_ref())?,
                memory: Arc::new(memory),
                region,
                transports: vec![AnyTransport::InPlace(Box::new(shm))],
                routes: vec![0; world],
                mailbox,
                registrar: None,
                rails: Arc::default(),
                ranks_per_core,
                launch_group: Some(Arc::clone(&launch_group)),
                // The thread that makes all ranks of a derived world need not use the GPU of each.
                opens_gpu: !spec.is_derived || config.gpu.is_some(),
                trace: Timeline::trace(timeline.as_ref(), me, world)?,
                fault: Arc::clone(&fault),
            };
            let member = LocalMember { group: Arc::clone(&group), rank: me };
            builder.build(ControlPlane::Threads(member))
        };
        let runners: Vec<CallRunner> =
            memories.into_iter().zip(regions).enumerate().map(rank).collect::<Result<_>>()?;
        // Each rank has published its GPU memory; each opens that of the others; then all know who has opened whose.
        runners.iter().for_each(|runner| runner.lock_state().executor.open_neighbours());
        runners.iter().for_each(|runner| runner.lock_state().executor.settle_sharing());
        let connectable = runners.iter().all(CallRunner::can_connect_kernels);
        runners.iter().for_each(|runner| runner.connects_kernels.store(connectable, Ordering::Relaxed));
        let gathering = Arc::new(LocalGathering::new());
        let blueprint = || Blueprint {
            config: config.clone(),
            untuned_subchunk: spec.config.subchunk,
            carrier: None,
            topology: measured.clone(),
            is_described,
            cluster: cluster.clone(),
            service: None,
            ancestors: Vec::new(),
            gathering: Some(Arc::clone(&gathering)),
        };
        Ok(runners.into_iter().map(|runner| LocalRank { runner, blueprint: blueprint() }).collect())
    }
}

/// Warns, once in a process, of variables that are probably misspelt settings: on rank 0, and on the first rank of each node that a launcher
/// numbers.
fn warn_of_unknown_variables(rank: Rank) {
    static WARNED: Once = Once::new();
    let is_first = rank == 0 || matches!(local_rank(environment), Ok(Some(0)));
    if is_first {
        WARNED.call_once(|| Config::warnings().iter().for_each(|sentence| log::warn!("{sentence}")));
    }
}

/// The plans for `topology`. If an algorithm that the user named cannot be used on what is left of a world, selects one.
fn plans(spec: &WorldSpec, topology: &Topology, me: Rank, profile: Option<&TuningProfile>) -> Result<Plans> {
    let config = &spec.config;
    match Plans::new(config, topology, me, profile) {
        Err(error) if spec.is_derived && config.algo != Algorithm::Auto => {
            log::warn!(
                "{} cannot be used for the ranks of a new communicator ({error}): using auto",
                config.algo.name()
            );
            let config = Config { algo: Algorithm::Auto, ..config.clone() };
            Plans::new(&config, topology, me, profile)
        }
        plans => plans,
    }
}

/// The topology that the settings describe; by default the nodes of the ranks at one switch.
fn topology(config: &Config, infos: &[PeerInfo]) -> Result<Topology> {
    match &config.topology {
        Some(text) => {
            let hosts: Vec<String> = infos.iter().map(|info| info.topology_name.clone()).collect();
            configured_topology(text, infos.len(), Some(&hosts))
        }
        None => {
            let nodes: Vec<[&str; 2]> =
                infos.iter().map(|info| [&*info.topology_name, &*info.node]).collect();
            Ok(Topology::from_names(&node_labels(&nodes)))
        }
    }
}

/// By rank, how messages name its node: as users do, with a number where several nodes have one name, such as containers of a host. `nodes` are
/// names of users and identifiers of nodes.
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

/// Checks that all ranks have the same plans, by their digests.
fn check_equal(digests: &[Vec<u8>]) -> Result<()> {
    match digests.iter().position(|digest| *digest != digests[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::disagreement(format!(
            "ranks 0 and {rank} made different plans: do they read the same topology and plan files?"
        ))),
    }
}

fn not_shared(rank: Rank) -> Error {
    Error::disagreement(format!(
        "rank {rank} does not share its memory: does it have FLEXRING_TRANSPORT=tcp, or refuses its container memfd_create?"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_names_of_users_with_a_number_where_several_have_one() {
        let nodes =
            [["a", "1/net:4/uid:0"], ["b", "2/net:4/uid:0"], ["a", "1/net:5/uid:0"], ["a", "1/net:4/uid:0"]];
        assert_eq!(node_labels(&nodes), ["a (1)", "b", "a (2)", "a (1)"]);
    }
}
