//! How a communicator comes to be: the ranks meet, tell each other where they are, make their links, and agree
//! on a program.

use super::control_plane::{ControlPlane, LocalGroup, LocalMember};
use super::gpu::{self, GpuState};
use super::inter_node::{self, InterNodeSetup, RailOffer};
use super::user_memory::UserMemory;
use super::{Communicator, Core, Engine, call_queue::CallQueue, plans::Plans};
use crate::bootstrap::{self, ControlConnection, Identity};
use crate::config::{Config, TransportChoice};
use crate::description;
use crate::device::host::Host;
use crate::error::{Error, ErrorKind, Result};
use crate::executor::{Executor, Parts};
use crate::fault::Fault;
use crate::memory::{Arena, Registrar};
use crate::plan::topology::Topology;
use crate::rank::Rank;
use crate::transport::shm::{ArenaLayout, DescriptorExchange, Mailbox, Neighbours, RemotePrefault, Shm};
use crate::transport::tcp::Listener;
use crate::transport::{AnyTransport, local};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a rank tells all others of itself.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct PeerInfo {
    pub node: String,
    pub host: String,
    /// The node's name as people write it in a topology file.
    topology_name: String,
    /// How a neighbour hands in its descriptors; none if this rank does not share memory.
    secret: Option<[u8; 16]>,
    /// Where it listens for links.
    pub endpoints: Vec<SocketAddr>,
    /// A number that nobody can guess. Rank 0's is what links of this communicator greet each other with.
    pub token: u64,
    /// What it offers for links over RDMA devices.
    pub rails: RailOffer,
}

impl Communicator {
    /// Joins the world that `identity` names, with these settings.
    ///
    /// # Errors
    /// As for [`from_env`](Self::from_env).
    pub fn with_config(config: &Config, identity: &Identity) -> Result<Self> {
        crate::logging::init(config.log);
        let fault = Arc::new(Fault::new()?);
        let (me, world) = (identity.rank, identity.world);
        let control = ControlConnection::join(identity, config, Arc::clone(&fault))?;
        let deadline = Instant::now() + config.connect_timeout;

        let shares = matches!(config.transport, TransportChoice::Auto | TransportChoice::Shm) && world > 1;
        let descriptor_exchange = shares.then(DescriptorExchange::new).transpose()?;
        let listens = matches!(config.transport, TransportChoice::Auto | TransportChoice::Tcp) && world > 1;
        let listener = listens.then(|| Listener::bind(&inter_node::addresses(config)?)).transpose()?;
        let token = getrandom::u64().map_err(|cause| {
            Error::new(ErrorKind::System, format!("cannot draw a random number: {cause}"))
        })?;
        let info = PeerInfo {
            token,
            node: bootstrap::node_name(config),
            host: bootstrap::host_name(),
            topology_name: config.node.clone().unwrap_or_else(bootstrap::host_name),
            secret: descriptor_exchange.as_ref().map(DescriptorExchange::secret),
            endpoints: listener.as_ref().map(Listener::endpoints).unwrap_or_default(),
            rails: inter_node::offer(config, world),
        };
        let infos = exchange(&control, &info)?;
        let node: Vec<Rank> = (0..world).filter(|rank| infos[*rank].node == infos[me].node).collect();
        // A topology or a plan that cannot be used is everybody's business: all ranks get the same sentence.
        let report_all = |error: Error| control.report(error, None);
        let topology = topology(config, &infos).map_err(report_all)?;
        let plans = Plans::new(config, &topology, me).map_err(report_all)?;
        agree(&control.all_gather("plans", &plans.digest().to_le_bytes())?).map_err(report_all)?;
        let intra_node: Vec<Rank> = if shares { node.clone() } else { vec![me] };
        let inter_node: Vec<Rank> = (0..world).filter(|rank| !intra_node.contains(rank)).collect();
        if config.transport == TransportChoice::Shm && !inter_node.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidSetting,
                format!(
                    "FLEXRING_TRANSPORT=shm, but rank {me} on {} and rank {} on {} do not share a node",
                    infos[me].host, inter_node[0], infos[inter_node[0]].host
                ),
            ));
        }

        let layout = layout(config, intra_node.len(), world);
        let arena = Arc::new(Arena::near(layout.bytes(), gpu::node(config.gpu))?);
        let mut transports: Vec<AnyTransport> = Vec::new();
        let mut routes = vec![0; world];
        let (mut mailbox, mut prefault, mut registrar) = (None, None, None);
        if let Some(descriptor_exchange) = descriptor_exchange.filter(|_| intra_node.len() > 1) {
            let secret = |rank: &Rank| {
                infos[*rank].secret.map(|secret| (*rank, secret)).ok_or_else(|| no_secret(*rank))
            };
            let node = intra_node.iter().map(secret).collect::<Result<Vec<_>>>()?;
            let neighbours = descriptor_exchange.run(me, &node, &arena, layout.bytes(), deadline, &fault)?;
            transports.push(AnyTransport::InPlace(Box::new(Shm::new(
                "shm",
                world,
                &arena,
                layout,
                &neighbours,
            )?)));
            prefault = Some(RemotePrefault::new(&arena, &neighbours)?);
            if inter_node.is_empty() {
                mailbox = Some(Mailbox::new(&arena, layout, &neighbours, me)?);
            }
        }
        if !inter_node.is_empty() {
            inter_node.iter().for_each(|rank| routes[*rank] = transports.len());
            let same_node: Vec<bool> = (0..world).map(|rank| node.contains(&rank)).collect();
            let plan = InterNodeSetup {
                config,
                me,
                infos: &infos,
                same_node: &same_node,
                inter_node: &inter_node,
                control: &control,
                deadline,
                fault: &fault,
            };
            let linked = plan.link(listener, layout.pool().piece(&arena))?;
            transports.push(AnyTransport::Posted(linked.transport));
            registrar = linked.registrar;
        }
        let crowded = crowded(node.len());
        let assembly = CoreParts {
            config,
            nodes: topology.nodes(),
            world,
            me,
            plans,
            arena,
            layout,
            transports,
            routes,
            mailbox,
            prefault,
            registrar,
            crowded,
            fault,
        };
        let core = assembly.finish(ControlPlane::ControlConnection(control))?;
        if let ControlPlane::ControlConnection(control) = &core.control {
            // Nobody calls before everybody has all links.
            control.all_gather("links", &[])?;
        }
        Self::start(core)
    }

    /// The ranks of a local world, with these settings.
    ///
    /// # Errors
    /// `InvalidArgument` for a world of none; `System` if there is too little memory.
    pub fn local_with(config: &Config, world: usize) -> Result<Vec<Self>> {
        crate::logging::init(config.log);
        if world == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a world has at least one rank"));
        }
        let fault = Arc::new(Fault::new()?);
        let group = LocalGroup::new(world, Arc::clone(&fault));
        let topology = match &config.topology {
            Some(text) => described(text, world, None)?,
            None => Topology::from_names(&vec!["here"; world]),
        };
        let layout = layout(config, world, world);
        let arenas =
            (0..world).map(|_| Arena::new(layout.bytes()).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let introduced: Vec<Neighbours> = local::introduce(&arenas, layout.bytes())?;
        let rank = |(me, (arena, neighbours)): (Rank, (Arc<Arena>, Neighbours))| {
            let shm = Shm::new("local", world, &arena, layout, &neighbours)?;
            let mailbox = Some(Mailbox::new(&arena, layout, &neighbours, me)?);
            let prefault = Some(RemotePrefault::new(&arena, &neighbours)?);
            let assembly = CoreParts {
                config,
                nodes: topology.nodes(),
                world,
                me,
                plans: Plans::new(config, &topology, me)?,
                arena,
                layout,
                transports: vec![AnyTransport::InPlace(Box::new(shm))],
                routes: vec![0; world],
                mailbox,
                prefault,
                registrar: None,
                crowded: crowded(world),
                fault: Arc::clone(&fault),
            };
            let member = LocalMember { group: Arc::clone(&group), rank: me };
            Self::start(assembly.finish(ControlPlane::LocalGroup(member))?)
        };
        arenas.into_iter().zip(introduced).enumerate().map(rank).collect()
    }
}

/// Where everything lies in a rank's arena.
fn layout(config: &Config, neighbours: usize, world: usize) -> ArenaLayout {
    // One slot more is the executor's own.
    let slots = config.slots_for(world) + 1;
    ArenaLayout::new(neighbours, config.small.0, slots, config.subchunk.0, config.gpu_slot_bytes())
}

/// Everything a rank has when its links are made.
struct CoreParts<'a> {
    config: &'a Config,
    nodes: usize,
    world: usize,
    me: Rank,
    plans: Plans,
    arena: Arc<Arena>,
    layout: ArenaLayout,
    transports: Vec<AnyTransport>,
    routes: Vec<usize>,
    mailbox: Option<Mailbox>,
    prefault: Option<RemotePrefault>,
    registrar: Option<Arc<dyn Registrar>>,
    crowded: bool,
    fault: Arc<Fault>,
}

impl CoreParts<'_> {
    fn finish(self, control: ControlPlane) -> Result<Core> {
        let Self { config, me, world, nodes, mut plans, .. } = self;
        let host = Host::new(config.simd)?;
        let links: Vec<String> = self
            .transports
            .iter()
            .enumerate()
            .map(|(index, transport)| {
                let ranks = (0..world).filter(|rank| *rank != me && self.routes[*rank] == index).count();
                format!(
                    "{} to {ranks} {}",
                    transport.common().name(),
                    if ranks == 1 { "rank" } else { "ranks" }
                )
            })
            .collect();
        let links = if links.is_empty() { "alone".to_owned() } else { links.join(", ") };
        let summary = format!(
            "rank {me} of {world}, {nodes} {}: {links}; {}, {} sub-chunks of {}, {} arithmetic{}",
            if nodes == 1 { "node" } else { "nodes" },
            plans.summary(),
            config.slots_for(world),
            config.subchunk,
            host.simd().name(),
            if config.reproducible.0 { ", reproducible" } else { "" },
        );
        let mut executor = Executor::new(Parts {
            rank: me,
            world,
            transports: self.transports,
            routes: self.routes,
            device: Box::new(host),
            slots: self.layout.pool().cut(self.layout.pool().piece(&self.arena)),
            mailbox: self.mailbox,
            fault: Arc::clone(&self.fault),
            spin: config.spin(),
            timeout: config.timeout,
            crowded: self.crowded,
        });
        plans.prepare(&mut executor)?;
        let gpu_state =
            GpuState::new(config.gpu, config.gpu_ipc.0, self.layout, &self.arena, self.registrar.clone());
        gpu_state.prepare_early(&mut executor)?;
        Ok(Core {
            rank: me,
            world,
            small: config.small.0,
            subchunk: config.subchunk.0,
            gpu_state,
            user_memory: UserMemory {
                arena: self.arena,
                prefault: self.prefault,
                registrar: self.registrar,
                registered: Mutex::default(),
            },
            engine: Mutex::new(Engine { executor, plans, scratch: None, sequence: 0 }),
            call_queue: CallQueue::default(),
            fault: self.fault,
            error_reported: AtomicBool::new(false),
            control,
            summary,
        })
    }
}

/// The topology that the settings describe; else what the ranks told of their nodes.
fn topology(config: &Config, infos: &[PeerInfo]) -> Result<Topology> {
    match &config.topology {
        Some(text) => {
            let hosts: Vec<String> = infos.iter().map(|info| info.topology_name.clone()).collect();
            described(text, infos.len(), Some(&hosts))
        }
        None => Ok(Topology::from_names(&infos.iter().map(|info| &info.node).collect::<Vec<_>>())),
    }
}

/// What `FLEXRING_TOPOLOGY` says, if it is about a world of this size.
fn described(text: &str, world: usize, hosts: Option<&[String]>) -> Result<Topology> {
    let refuse =
        |words: String| Error::new(ErrorKind::InvalidSetting, format!("FLEXRING_TOPOLOGY={text}: {words}"));
    let topology = description::topology(text, hosts)?;
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

/// Whether all ranks have planned the same, by their digests.
fn agree(digests: &[Vec<u8>]) -> Result<()> {
    match digests.iter().position(|digest| *digest != digests[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::new(
            ErrorKind::Disagreement,
            format!(
                "ranks 0 and {rank} made different plans: do they read the same topology and plan files?"
            ),
        )),
    }
}

fn exchange(control: &ControlConnection, info: &PeerInfo) -> Result<Vec<PeerInfo>> {
    let unreadable =
        |cause: postcard::Error| Error::new(ErrorKind::Internal, format!("cannot read peer info: {cause}"));
    let mine = postcard::to_stdvec(info).map_err(unreadable)?;
    let infos = control.all_gather("peer info", &mine)?;
    infos.iter().map(|info| postcard::from_bytes(info).map_err(unreadable)).collect()
}

fn no_secret(rank: Rank) -> Error {
    Error::new(
        ErrorKind::Disagreement,
        format!("rank {rank} does not share its memory: does it have FLEXRING_TRANSPORT=tcp?"),
    )
}

/// Whether this many ranks on a node must share cores.
fn crowded(ranks: usize) -> bool {
    std::thread::available_parallelism().map_or(true, |cores| ranks > cores.get())
}
