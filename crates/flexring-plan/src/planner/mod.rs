//! The planners: one pure function from topology to schedule for each algorithm.
//!
//! Owns the list of algorithms. A planner must not know how groups become transfers, or how long they take.
//!
//! | file | algorithms |
//! |---|---|
//! | `ring` | the ring |
//! | `hierarchical`, `blueconnect` | rings in dimensions |
//! | `rabenseifner` | recursive halving and doubling |
//! | `flexreduce`, `weighted` | uneven trees; with spans by rates |
//! | `local_master`, `parameter_server`, `tree` | some ranks, or one, reduce for others |
//! | `forest` | links that form a graph |

pub mod blueconnect;
pub mod flexreduce;
pub mod forest;
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
use flexring_core::config::{Algorithm, Config};
use flexring_core::error::{Error, Result};

/// Inputs of some planners besides the topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The dimensions of a hierarchical ring, from the innermost; empty for those of the topology.
    pub dimensions: Vec<usize>,
    /// The ranks that are parameter servers; empty for the first rank of each node.
    pub servers: Vec<Rank>,
}

impl Details {
    /// The inputs that the settings specify.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            dimensions: config.dimensions.clone().unwrap_or_default().0,
            servers: config.servers.clone().unwrap_or_default().0,
        }
    }
}

/// The schedule of `algorithm`. `auto` is treated as FlexReduce here; see [`selection`](super::selection).
///
/// # Errors
/// `InvalidSetting` with the reason, if the algorithm does not support this topology.
pub fn plan(algorithm: Algorithm, topology: &Topology, details: &Details) -> Result<Schedule> {
    Ok(match algorithm {
        Algorithm::Ring => ring::plan(topology),
        Algorithm::Rabenseifner => rabenseifner::plan(topology),
        Algorithm::Hierarchical if details.dimensions.is_empty() => {
            let dimensions = topology.dimensions().map_err(|asymmetry| {
                let words = format!("{}: give the dimensions with FLEXRING_DIMENSIONS", asymmetry.message());
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
        Algorithm::Forest => forest::plan(topology)?,
        Algorithm::ParameterServer => parameter_server::plan(topology, &details.servers)?,
    })
}
