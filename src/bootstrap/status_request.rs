//! Asking the coordinator of a running job for the state of all ranks.
//!
//! Owns the request of a process that is no rank.

use super::connect::Joiner;
use super::coordinator_target::CoordinatorTarget;
use super::job_address::JobAddress;
use super::launcher::RendezvousPoint;
use super::protocol::{HelloHeader, HelloParams, Purpose};
use super::secret::SecretSource;
use super::world_status::WorldStatus;
use crate::config::Config;
use crate::error::Result;
use crate::fault::Fault;
use std::time::{Duration, Instant};

/// How long a coordinator may take to answer. It is no rank's rendezvous, so there is nothing to wait for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the coordinator of a running job for the state of all ranks. This process must have the job's secret.
///
/// # Errors
/// `Rendezvous` if no coordinator of this job answers within five seconds, or within
/// `FLEXRING_CONNECT_TIMEOUT_MS` if that is shorter, or if this process does not know the secret;
/// `InvalidSetting` if the secret cannot be used; `System` if a descriptor is unavailable.
pub fn world_status(job: &JobAddress, config: &Config) -> Result<WorldStatus> {
    let timeout = config.connect_timeout.min(ANSWER_TIMEOUT);
    let met_at = job.id.map_or_else(|| job.address.clone(), RendezvousPoint::Id);
    let (source, _) = SecretSource::of_job(config, &met_at, job.token, job.one_node, false)?;
    let header = HelloHeader::of_no_rank(Purpose::Status);
    let params = HelloParams::of_no_rank(timeout, config.heartbeat);
    let joiner = Joiner {
        target: &CoordinatorTarget::Remote(&job.address),
        source: &source,
        header: &header,
        params: &params,
        deadline: Instant::now() + timeout,
        fault: &Fault::new(),
    };
    joiner.status()
}
