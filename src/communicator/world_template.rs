//! What a communicator keeps so that its ranks can make further ones.
//!
//! Owns the settings and the topology of a world, how they change for some of its ranks, and the services
//! that outlive their communicators.

use super::local_gathering::LocalGathering;
use super::resource_offers::ResourceKey;
use super::runner::CallRunner;
use crate::bootstrap::ShrinkService;
use crate::config::{Config, Servers, Size};
use crate::plan::topology::Topology;
use crate::plan::tuning::ClusterIdentity;
use crate::rank::Rank;
use std::sync::Arc;

/// Settings of a world that is about to be made.
pub(super) struct WorldSpec {
    pub config: Config,
    /// The topology; `None` for the one that the settings describe.
    pub topology: Option<Topology>,
    /// Whether the ranks come from another communicator, whose settings may not fit them.
    pub is_derived: bool,
    /// The services of the communicators that the ranks come from.
    pub ancestors: Vec<Arc<ShrinkService>>,
}

impl WorldSpec {
    /// A world with these settings.
    pub(super) fn new(config: &Config) -> Self {
        let config = config.with_bounded_times();
        Self { config, topology: None, is_derived: false, ancestors: Vec::new() }
    }
}

/// A rank that is a thread of this process, and whose communicator is not made yet.
pub(super) struct LocalRank {
    pub runner: CallRunner,
    pub template: WorldTemplate,
}

/// What is kept.
#[derive(Clone)]
pub(super) struct WorldTemplate {
    pub config: Config,
    /// The sub-chunk that the user has set, or its default. That of `config` has room for all choices of a
    /// tuning profile.
    pub untuned_subchunk: Size,
    /// Identifies the control connection, for communicators that are opened over it. `None` if the ranks are
    /// threads.
    pub connection_key: Option<ResourceKey>,
    pub topology: Topology,
    /// Whether the settings or a tuning profile describe the topology. Otherwise it follows from the ranks'
    /// nodes.
    pub is_described: bool,
    pub cluster: ClusterIdentity,
    /// Answers ranks that shrink this communicator. `None` if there are no other ranks, or if they are
    /// threads.
    pub service: Option<Arc<ShrinkService>>,
    /// The services of the communicators that this one was shrunk from. While they answer, a rank that was
    /// left out does not mistake the others for dead.
    pub ancestors: Vec<Arc<ShrinkService>>,
    /// Where ranks that are threads of one process meet.
    pub gathering: Option<Arc<LocalGathering<LocalRank>>>,
}

impl WorldTemplate {
    /// The settings of a world of `members`, the ranks of this one in their new order.
    pub(super) fn for_members(&self, members: &[Rank]) -> WorldSpec {
        let mut config = self.config.clone();
        // A plan and dimensions are for a number of ranks, and the planners make new ones. The topology and
        // these settings already contain a tuning profile's links and settings; its choices apply to all
        // ranks only.
        config.plan_file = None;
        config.tuning = None;
        config.subchunk = self.untuned_subchunk;
        config.dimensions = None;
        config.servers = config.servers.and_then(|Servers(servers)| {
            let position = |server: Rank| members.iter().position(|member| *member == server);
            let kept: Vec<Rank> = servers.into_iter().filter_map(position).collect();
            (!kept.is_empty()).then_some(Servers(kept))
        });
        let topology = self.is_described.then(|| self.topology.restricted_to(members));
        let ancestors = self.ancestors.iter().chain(&self.service).map(Arc::clone).collect();
        WorldSpec { config, topology, is_derived: true, ancestors }
    }
}
