//! How a communicator is created: the ranks find each other, exchange their addresses, agree on plans, share
//! memory and make links.
//!
//! Owns the order of these steps.
//!
//! | step | files |
//! |---|---|
//! | 1. the ranks send each other what they need to know | `introduction`, `peer_info`; addresses: `endpoints` |
//! | 2. they agree on plans | `world_plan`, `tuning` |
//! | 3. ranks of a node share memory | `node_share`, `node_memories`, `region_layout`, `cpu_set` |
//! | 4. links | `links`; between nodes `inter_node` |
//! | 5. the runner | `runner_builder` |

mod cpu_set;
mod endpoints;
#[cfg(test)]
mod fuzz;
mod inter_node;
mod introduction;
mod links;
mod node_memories;
mod node_share;
mod peer_info;
mod region_layout;
mod runner_builder;
mod tuning;
mod world_plan;

pub(super) use introduction::ConnectionOrigin;

use super::Communicator;
use super::control_plane::{ControlPlane, LocalGroup, LocalMember};
use super::gpu_state;
use super::launch_group::LaunchGroup;
use super::local_gathering::LocalGathering;
use super::plans::{Plans, no_times};
use super::resource_offers::ResourceKey;
use super::runner::CallRunner;
use super::trace_files::{self, TraceFiles};
use super::world_template::{LocalRank, WorldSpec, WorldTemplate};
use crate::bootstrap::{
    ControlConnection, Identity, RendezvousPoint, ShrinkService, ShrinkServiceParams, host_name, local_rank,
};
use crate::config::{Config, environment};
use crate::descriptor_limit;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::process::DefaultFloatEnvironment;
use crate::rank::Rank;
use crate::secret::random_bytes;
use crate::trace::Trace;
use crate::transport::local;
use crate::transport::shm::{NodeMemory, Region, RegionOfRank};
use cpu_set::CpuSet;
use endpoints::PeerAddresses;
use introduction::Introduction;
use links::RankLinks;
use node_share::NodeShare;
use peer_info::PeerInfo;
use region_layout::region_layout;
use runner_builder::CallRunnerBuilder;
use std::sync::{Arc, Once};
use world_plan::{WorldPlan, topology_of_processes, topology_of_threads};

impl Communicator {
    /// Joins the world that `identity` names, with the settings in `config`.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env).
    pub fn with_config(config: &Config, identity: &Identity) -> Result<Self> {
        let _default = DefaultFloatEnvironment::enter();
        crate::logging::init(&config.log);
        log_settings(identity.rank, config);
        descriptor_limit::raise();
        Self::join(WorldSpec::new(config), identity, Arc::new(Fault::new()))
    }

    /// Joins the world that `identity` names. `fault` is raised when it fails, and ends joining if it is
    /// raised meanwhile.
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

    /// Makes a communicator of ranks that know each other: they agree on plans, share the memory of their
    /// nodes, make links, and wait for each other.
    fn join_introduced(
        spec: WorldSpec,
        mut introduction: Introduction,
        (connection_key, connection): &(ResourceKey, Arc<ControlConnection>),
        fault: Arc<Fault>,
    ) -> Result<Self> {
        let me = connection.rank();
        let topology = topology_of_processes(&spec, &introduction.infos)?;
        let hosts: Vec<&str> = introduction.infos.iter().map(|info| info.topology_name.as_str()).collect();
        let mut plan = WorldPlan::new(spec, topology, &hosts, |path| tuning::agree(path, connection))?;
        let plans = plan.agree_on_plans(connection)?;
        reach(FaultPoint::JoinComparedPlans);
        let trace_files = TraceFiles::of(&plan.config, plan.spec.is_derived, &introduction.infos[0].nonce);
        let trace = TraceFiles::trace(trace_files.as_ref(), me, connection.world())?;
        let mut share = NodeShare::new(&plan.config, &mut introduction, me, &fault)?;
        let links = RankLinks::new(&mut plan, &plans, &mut introduction, &mut share, connection, &fault)?;
        let service = shrink_service(&plan.config, &mut introduction, connection, share.ranks_per_core)?;
        reach(FaultPoint::JoinHasLinks);
        let runner = Self::build(&plan, plans, links, share, trace, &introduction, (connection, fault))?;
        reach(FaultPoint::JoinBuiltRunner);
        await_links(&runner, connection, &introduction.infos)?;
        reach(FaultPoint::JoinEnds);
        let is_traced = plan.config.trace.is_some();
        let template =
            WorldTemplate { connection_key: Some(*connection_key), service, ..plan.into_template() };
        let comm = Self::new(runner, template);
        if is_traced {
            trace_files::align(&comm, connection)?;
        }
        Ok(comm)
    }

    /// The runner of this rank.
    fn build(
        plan: &WorldPlan,
        plans: Plans,
        links: RankLinks,
        share: NodeShare,
        trace: Trace,
        introduction: &Introduction,
        (connection, fault): (&Arc<ControlConnection>, Arc<Fault>),
    ) -> Result<CallRunner> {
        let (me, world, infos) = (connection.rank(), connection.world(), &introduction.infos);
        let threads: Vec<Rank> =
            (0..world).filter(|rank| infos[*rank].process == infos[me].process).collect();
        let builder = CallRunnerBuilder {
            plan,
            world,
            me,
            plans,
            links,
            ranks_per_core: share.ranks_per_core,
            launch_group: (threads.len() > 1).then(|| LaunchGroup::shared(infos[0].nonce, threads)),
            opens_gpu: true,
            trace,
            fault,
            node: share.ranks,
            memory: share.memory,
            region: share.region,
        };
        builder.build(ControlPlane::Processes(Arc::clone(connection)))
    }

    /// A world of `world` ranks that are threads of this process, with the settings in `config`; one
    /// communicator each, in the order of ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for a world without ranks; `System` if there is too little memory.
    pub fn local_with(config: &Config, world: usize) -> Result<Vec<Self>> {
        let _default = DefaultFloatEnvironment::enter();
        crate::logging::init(&config.log);
        let ranks = Self::local_ranks(WorldSpec::new(config), world)?;
        Ok(ranks.into_iter().map(|rank| Self::new(rank.runner, rank.template)).collect())
    }

    /// The ranks of a world of threads, in their order.
    pub(super) fn local_ranks(spec: WorldSpec, world: usize) -> Result<Vec<LocalRank>> {
        if world == 0 {
            return Err(Error::invalid_argument("a world has at least one rank"));
        }
        descriptor_limit::raise();
        let fault = Arc::new(Fault::new());
        let group = LocalGroup::new(world, Arc::clone(&fault));
        let topology = topology_of_threads(&spec, world)?;
        let host = spec.config.node.clone().unwrap_or_else(host_name);
        let mut plan = WorldPlan::new(spec, topology, &vec![&*host; world], tuning::read)?;
        plan.set_transport(None)?;
        let config = &plan.config;
        let ranks_per_core = CpuSet::ranks_per_core(std::iter::repeat_n(&CpuSet::of_this_process(), world));
        let opens_gpu = !plan.spec.is_derived || config.gpu.is_some();
        let has_gpu = opens_gpu && gpu_state::known(config.gpu).is_some();
        let may_use_gpus = has_gpu || gpu_state::may_exist(config.gpu);
        let layout = region_layout(config, world, world, ranks_per_core, may_use_gpus);
        let key: [u8; 16] = random_bytes()?;
        let trace_files = TraceFiles::of(config, plan.spec.is_derived, &key);
        let launch_group = LaunchGroup::new((0..world).collect());
        let memories = local::share_memory(world, key)?;
        let regions = memories.iter().map(|memory| memory.own().region(layout, None));
        let regions = regions.collect::<Result<Vec<Region>>>()?;
        let of_rank =
            |(rank, region): (Rank, &Region)| RegionOfRank { rank, place: rank, region: region.address() };
        let of_ranks: Vec<RegionOfRank> = regions.iter().enumerate().map(of_rank).collect();
        let rank = |(me, (memory, mut region)): (Rank, (NodeMemory, Region))| {
            let builder = CallRunnerBuilder {
                plan: &plan,
                world,
                me,
                plans: plan.plans(me, &mut no_times)?,
                links: RankLinks::within_process(me, &memory, &mut region, &of_ranks)?,
                ranks_per_core,
                launch_group: Some(Arc::clone(&launch_group)),
                // The thread that makes all ranks of a derived world need not use the GPU of each.
                opens_gpu,
                trace: TraceFiles::trace(trace_files.as_ref(), me, world)?,
                fault: Arc::clone(&fault),
                node: (0..world).collect(),
                memory: Arc::new(memory),
                region,
            };
            let member = LocalMember { group: Arc::clone(&group), rank: me };
            builder.build(ControlPlane::Threads(member))
        };
        let runners: Vec<CallRunner> =
            memories.into_iter().zip(regions).enumerate().map(rank).collect::<Result<_>>()?;
        // Each rank has published its GPU memory; each opens that of the others.
        runners.iter().for_each(|runner| runner.lock_state().executor.open_neighbours());
        let offers: Vec<_> = runners.iter().map(CallRunner::offer_kernels).collect();
        runners.iter().for_each(|runner| runner.agree_on_kernels(&offers));
        let gathering = Some(Arc::new(LocalGathering::new()));
        let template = WorldTemplate { gathering, ..plan.into_template() };
        Ok(runners.into_iter().map(|runner| LocalRank { runner, template: template.clone() }).collect())
    }
}

/// Starts what answers ranks that shrink the communicator. `None` if there are no other ranks.
fn shrink_service(
    config: &Config,
    introduction: &mut Introduction,
    connection: &ControlConnection,
    ranks_per_core: usize,
) -> Result<Option<Arc<ShrinkService>>> {
    let Some(listener) = introduction.shrink_listener.take() else { return Ok(None) };
    let (me, infos) = (connection.rank(), &introduction.infos);
    let addresses = PeerAddresses::new(config, connection.route());
    let ordered = |(rank, info): (Rank, &PeerInfo)| {
        let ordered = addresses.for_shrink(&info.shrink_endpoints, info.shares_node(&infos[me]));
        let missing = || Error::internal(format!("rank {rank} has no address for a shrink"));
        (!ordered.is_empty()).then_some(ordered).ok_or_else(missing)
    };
    let endpoints = infos.iter().enumerate().map(ordered).collect::<Result<Vec<_>>>()?;
    // Random numbers of all ranks, so that no other communicator has this key.
    let nonces: Vec<&[u8]> = infos.iter().map(|info| info.nonce.as_slice()).collect();
    let key = connection.secret().derive("shrink", &nonces);
    let config = config.clone();
    let params = ShrinkServiceParams { me, endpoints, key, listener, ranks_per_core, config };
    ShrinkService::start(params).map(|service| Some(Arc::new(service)))
}

/// Waits until all ranks have all links: before, none may make a call. The ranks of a node open each other's
/// GPU memory.
fn await_links(runner: &CallRunner, connection: &ControlConnection, infos: &[PeerInfo]) -> Result<()> {
    if infos.iter().any(|info| info.has_gpu) {
        // Opening memory may wait for a GPU, so it is done before the first call.
        connection.all_gather("memory of GPUs", &[])?;
        runner.lock_state().executor.open_neighbours();
    }
    let offers = connection.gather_values("links", &runner.offer_kernels())?;
    runner.agree_on_kernels(&offers);
    Ok(())
}

/// Warns, once in a process, of variables that are probably misspelt settings, and logs which settings are
/// NCCL's: on rank 0, and on the first rank of each node that a launcher numbers.
fn log_settings(rank: Rank, config: &Config) {
    static LOGGED: Once = Once::new();
    let is_first = rank == 0 || matches!(local_rank(environment), Ok(Some(0)));
    if is_first {
        LOGGED.call_once(|| {
            Config::warnings().iter().for_each(|sentence| log::warn!("{sentence}"));
            let of_nccl = config.nccl_settings();
            if !of_nccl.is_empty() {
                log::info!("settings of NCCL count where flexring's are unset: {}", of_nccl.join(", "));
            }
        });
    }
}
