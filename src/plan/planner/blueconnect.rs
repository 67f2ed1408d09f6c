//! BlueConnect: the hierarchical ring with its dimensions read off a symmetric topology.

use super::hierarchical::grid;
use crate::error::{Error, Result};
use crate::plan::schedule::Schedule;
use crate::plan::topology::Topology;

/// Plans BlueConnect (Cho et al., SysML 2019, as `papers/000` describes it): a reduce-scatter per level of the
/// tree, all branches of a level side by side.
///
/// # Errors
/// `InvalidSetting` if the topology is not symmetric, naming two branches that differ.
pub fn plan(topology: &Topology) -> Result<Schedule> {
    let dimensions = topology.dimensions().map_err(|asymmetry| {
        let words = format!("BlueConnect needs a symmetric topology: {}", asymmetry.message());
        Error::new(asymmetry.kind(), words)
    })?;
    grid("blueconnect", topology, &dimensions)
}
