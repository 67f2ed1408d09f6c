//! The tuning profile of a new communicator.
//!
//! Owns how ranks agree on its contents, and its refusal on a cluster where it was not measured.

use crate::bootstrap::ControlConnection;
use crate::description;
use crate::error::{Error, Result};
use crate::plan::tuning::{self, ClusterIdentity, TuningProfile};

/// The profile in the file at `path` on the node of rank 0, equal on all ranks. All ranks have equal
/// settings, so all of them call this.
pub(super) fn agree(path: &str, connection: &ControlConnection) -> Result<TuningProfile> {
    let label = "tuning profile";
    let text = (connection.rank() == 0).then(|| description::tuning_profile(path));
    let text = connection.gather_values(label, &text)?.swap_remove(0);
    let text = text.ok_or_else(|| ControlConnection::unreadable(label, 0))?;
    tuning::parse(path, &text?)
}

/// The profile in the file at `path`, for ranks that are threads of this process.
pub(super) fn read(path: &str) -> Result<TuningProfile> {
    tuning::parse(path, &description::tuning_profile(path)?)
}

/// Refuses a profile of other ranks, hosts or switches than those of `job`.
pub(super) fn check_cluster(path: &str, profile: &TuningProfile, job: &ClusterIdentity) -> Result<()> {
    profile.cluster.difference(job).map_or(Ok(()), |difference| Err(refusal(path, &difference)))
}

/// Refuses a profile that was measured over another transport than `job` uses.
pub(super) fn check_transport(path: &str, profile: &TuningProfile, transport: &str) -> Result<()> {
    let difference = profile.cluster.transport_difference(transport);
    difference.map_or(Ok(()), |difference| Err(refusal(path, &difference)))
}

fn refusal(path: &str, difference: &str) -> Error {
    Error::invalid_setting(format!(
        "FLEXRING_TUNING={path} is the profile of another cluster: {difference}: run `flexring tune` on this one, or unset \
         FLEXRING_TUNING"
    ))
}
