//! BlueConnect: the hierarchical ring with the dimensions of a symmetric topology.

use super::hierarchical::grid;
use crate::schedule::Schedule;
use crate::topology::Topology;
use flexring_core::error::{Error, Result};

/// The schedule of BlueConnect (Cho et al., SysML 2019, as Lee et al., "FlexReduce", describe it): a
/// reduce-scatter for each level of the tree, with all branches of a level in parallel.
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
