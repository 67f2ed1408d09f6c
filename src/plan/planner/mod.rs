//! The planners: one pure function per algorithm, from a topology to a schedule.
//!
//! Owns which algorithms there are. A planner must not know how groups become transfers, how long anything
//! takes, or who asks.

pub mod blueconnect;
pub mod flexreduce;
pub mod hierarchical;
pub mod local_master;
pub mod parameter_server;
pub mod rabenseifner;
pub mod ring;
pub mod tree;
pub mod weighted;

use super::Rank;
use super::schedule::Schedule;
use super::topology::Topology;
use crate::config::{Algorithm, Config};
use crate::error::{Error, Result};

/// What some planners want to know beyond the topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The dimensions of a hierarchical ring, the nearest ranks first; empty for those of the topology.
    pub dimensions: Vec<usize>,
    /// The ranks that are parameter servers; empty for the first of each node.
    pub servers: Vec<Rank>,
}

impl Details {
    /// What the settings say.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            dimensions: config.dimensions.clone().unwrap_or_default().0,
            servers: config.servers.clone().unwrap_or_default().0,
        }
    }
}

/// Plans by `algorithm`; `auto` is not one (see [`choice`](super::choice)) and counts as FlexReduce.
///
/// # Errors
/// `InvalidSetting` if the algorithm cannot be had on this topology, with the reason.
pub fn plan(algorithm: Algorithm, topology: &Topology, details: &Details) -> Result<Schedule> {
    Ok(match algorithm {
        Algorithm::Ring => ring::plan(topology),
        Algorithm::Rabenseifner => rabenseifner::plan(topology),
        Algorithm::Hierarchical if details.dimensions.is_empty() => {
            let dimensions = topology.dimensions().map_err(|asymmetry| {
                let words = format!("{}: give the dimensions by FLEXRING_DIMENSIONS", asymmetry.message());
                Error::new(asymmetry.kind(), words)
            })?;
            hierarchical::plan(topology, &dimensions)?
        }
        Algorithm::Hierarchical => hierarchical::plan(topology, &details.dimensions)?,
        Algorithm::Blueconnect => blueconnect::plan(topology)?,
        Algorithm::Auto | Algorithm::Flexreduce => flexreduce::plan(topology)?,
        Algorithm::Weighted => weighted::plan(topology)?,
        Algorithm::Tree => tree::binary(topology),
        Algorithm::Star => tree::star(topology),
        Algorithm::LocalMaster => local_master::plan(topology),
        Algorithm::ParameterServer => parameter_server::plan(topology, &details.servers)?,
    })
}
