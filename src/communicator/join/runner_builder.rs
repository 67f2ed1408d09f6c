//! Builds the call runner of a rank once its links are ready.
//!
//! Owns the assembly of executor, plans and user memory.

use super::links::RankLinks;
use super::world_plan::WorldPlan;
use crate::communicator::adaptation::LinkAdaptation;
use crate::communicator::block_lists::BlockLists;
use crate::communicator::control_plane::ControlPlane;
use crate::communicator::gpu_state::GpuState;
use crate::communicator::launch_group::{LaunchGroup, LaunchMember};
use crate::communicator::plans::Plans;
use crate::communicator::runner::{CallRunner, RunnerState};
use crate::communicator::user_memory::UserMemory;
use crate::device::host::Host;
use crate::error::Result;
use crate::executor::{Executor, ExecutorParts};
use crate::fault::Fault;
use crate::plan::thresholds::mailbox_limit;
use crate::rank::Rank;
use crate::trace::Trace;
use crate::transport::AnyTransport;
use crate::transport::shm::{NodeMemory, Region};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock};

/// What a rank has when its links are ready.
pub(in crate::communicator) struct CallRunnerBuilder<'a> {
    pub plan: &'a WorldPlan,
    /// Number of ranks.
    pub world: usize,
    pub me: Rank,
    pub plans: Plans,
    pub links: RankLinks,
    /// Number of ranks of this node for each of its cores, rounded up. Equal on all of them.
    pub ranks_per_core: usize,
    /// The ranks of this process, if there are others than this one.
    pub launch_group: Option<Arc<LaunchGroup>>,
    /// Whether the GPU that this thread uses is opened at once; otherwise that of the first vector on a GPU
    /// is.
    pub opens_gpu: bool,
    /// The timeline of this rank, if the settings ask for one.
    pub trace: Trace,
    pub fault: Arc<Fault>,
    /// The ranks that share memory, this one included.
    pub node: Vec<Rank>,
    /// The process's memory, and the part of it that is for this communicator. The last fields: transports
    /// use it until they are dropped.
    pub memory: Arc<NodeMemory>,
    pub region: Region,
}

impl CallRunnerBuilder<'_> {
    pub(super) fn build(mut self, control: ControlPlane) -> Result<CallRunner> {
        let WorldPlan { config, topology, cluster, .. } = self.plan;
        let host = Host::new(config.simd)?.with_threads(config.threads)?;
        let summary = self.summary(&host);
        let Self { me, world, memory, region, fault, launch_group, .. } = self;
        let RankLinks { transports, routes, mailbox, notices, registrar, rails } = self.links;
        let (arena, layout) = (region.arena(), region.layout());
        let has_mailboxes = world > 1 && mailbox.is_some();
        let mut executor = Executor::new(ExecutorParts {
            rank: me,
            world,
            transports,
            routes,
            device: Box::new(host),
            slots: layout.pool().cut(layout.pool().piece(arena)),
            mailbox,
            fault: Arc::clone(&fault),
            spin: config.spin(),
            timeout: config.timeout,
            ranks_per_core: self.ranks_per_core,
            trace: self.trace,
        })?;
        self.plans.set_slot_bytes(layout.pool().slots().1);
        self.plans.prepare(&mut executor)?;
        let launch_member = launch_group.and_then(|group| LaunchMember::new(&group, me));
        let mailbox_limit = mailbox_limit(config, world, self.ranks_per_core);
        let mut gpu_state =
            GpuState::new(config, launch_member.is_some(), self.node.len(), layout, arena, registrar.clone());
        // Kernels access registered memory in calls within a node.
        if let Some(notices) = notices.filter(|_| self.node.len() == world) {
            gpu_state.set_notices(me, notices);
        }
        if self.opens_gpu {
            gpu_state.open_known(&mut executor)?;
        }
        let user_memory = UserMemory::new(memory, registrar, config.register_shared.0);
        let mut adaptation = LinkAdaptation::new(config, topology, cluster, me, &user_memory)?.map(Box::new);
        if let Some(adaptation) = &mut adaptation {
            adaptation.note_plan(self.plans.algorithm(), |first| self.plans.traffic(first), None);
        }
        let statistics = adaptation.as_deref().map(LinkAdaptation::statistics);
        Ok(CallRunner {
            rank: me,
            world,
            mailbox_limit,
            has_mailboxes,
            node: self.node,
            spin: config.spin(),
            timeout: config.timeout,
            gpu_state,
            kernel_ctas: AtomicU32::new(0),
            kernel_node: OnceLock::new(),
            launch_member,
            leaving: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            user_memory,
            block_lists: BlockLists::default(),
            state: Mutex::new(RunnerState {
                executor,
                scratch: None,
                adaptation,
                sequence: 0,
                kernels: 0,
                plans_digest: self.plans.digest(),
                #[cfg(test)]
                panics: false,
            }),
            plans: Mutex::new(self.plans),
            queue: Arc::default(),
            submit: OnceLock::new(),
            fault,
            rails,
            ranks_per_core: self.ranks_per_core,
            error_reported: AtomicBool::new(false),
            control,
            summary,
            adaptation: statistics,
            region: Mutex::new(Some(region)),
        })
    }

    /// Links, schedule and settings of this rank, in one sentence.
    fn summary(&self, host: &Host) -> String {
        let Self { me, world, .. } = *self;
        let config = &self.plan.config;
        let nodes = self.plan.topology.nodes();
        let link = |(index, transport): (usize, &AnyTransport)| {
            let ranks = (0..world).filter(|rank| *rank != me && self.links.routes[*rank] == index).count();
            format!("{} to {ranks} {}", transport.common().name(), if ranks == 1 { "rank" } else { "ranks" })
        };
        let links: Vec<String> = self.links.transports.iter().enumerate().map(link).collect();
        let links = if links.is_empty() { "alone".to_owned() } else { links.join(", ") };
        format!(
            "rank {me} of {world}, {nodes} {}: {links}; {}, {} sub-chunks of {}, {} arithmetic{}",
            if nodes == 1 { "node" } else { "nodes" },
            self.plans.summary(),
            self.region.layout().pool().slots().0 - 1,
            config.subchunk,
            host.simd().name(),
            if config.reproducible.0 { ", reproducible" } else { "" },
        )
    }
}
