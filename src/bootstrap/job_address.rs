//! How a process that is no rank of a job reaches its coordinator.
//!
//! Owns which variables identify it.

use super::launcher::{Environment, LauncherInfo, RendezvousPoint, UNIQUE_ID, invalid, needed_launcher};
use super::unique_id::UniqueId;
use crate::config::Config;
use crate::error::Result;

/// Where a job's coordinator answers a process that is no rank of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobAddress {
    /// Where its coordinator listens.
    pub(super) address: RendezvousPoint,
    /// The id by which its ranks have met, if they have met by one.
    pub(super) id: Option<UniqueId>,
    /// The public number of a job that has met at an address.
    pub(super) token: u128,
    /// Whether all ranks are on this node.
    pub(super) one_node: bool,
}

impl JobAddress {
    /// Whether its ranks meet by a unique id. Then only rank 0's process can be asked, once all ranks have
    /// joined.
    #[must_use]
    pub fn is_by_id(&self) -> bool {
        self.id.is_some()
    }
}

/// The job that the environment describes, for a process that need not be a rank of it. `address` replaces
/// the host and port of rank 0.
///
/// # Errors
/// `InvalidSetting` if variables cannot be used, or if they do not give the address of rank 0.
pub fn job(
    config: &Config,
    address: Option<(String, u16)>,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<JobAddress> {
    let environment = Environment(&lookup);
    let at = |(host, port)| RendezvousPoint::at(host, port);
    if let Some((name, text)) = environment.text(UNIQUE_ID) {
        let id =
            UniqueId::from_hex(&text).map_err(|error| invalid(format!("{name}: {}", error.message())))?;
        let address = address.map_or(RendezvousPoint::Id(id), at);
        return Ok(JobAddress { address, id: Some(id), token: 0, one_node: false });
    }
    let launcher_info = needed_launcher(config, &environment)?;
    let token = launcher_info.as_ref().map_or(0, LauncherInfo::token);
    let (own_host, own_port) = address.unzip();
    let host = own_host
        .or_else(|| config.master_addr.clone())
        .or_else(|| launcher_info.as_ref().and_then(|info| info.host.clone()))
        .ok_or_else(|| {
            invalid(
                "the address of rank 0 is unknown: give --address, or set the variables that the job's ranks have \
                 (FLEXRING_MASTER_ADDR and FLEXRING_MASTER_PORT, FLEXRING_UNIQUE_ID, or those of its launcher)"
                    .to_owned(),
            )
        })?;
    let one_node = launcher_info.is_some_and(|info| info.one_node);
    let address = match own_port.or(config.master_port) {
        Some(port) => at((host, port)),
        None => RendezvousPoint::derived(host, token),
    };
    Ok(JobAddress { address, id: None, token, one_node })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::launcher::tests::lookup;

    const SLURM: &str = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_JOB_ID=77 SLURM_STEP_ID=0";

    #[test]
    fn a_process_that_is_no_rank_finds_the_job() {
        let find = |environment: &str, address: Option<(&str, u16)>| {
            let config = Config::read(lookup(environment)).expect("settings");
            let address = address.map(|(host, port)| (host.to_owned(), port));
            job(&config, address, lookup(environment))
                .map(|job| (job.address, job.token != 0 || job.id.is_some()))
        };
        let at = |host: &str, port| RendezvousPoint::at(host.to_owned(), port);
        let ours = "FLEXRING_MASTER_ADDR=a FLEXRING_MASTER_PORT=7";
        assert_eq!(find(ours, None), Ok((at("a", 7), false)));
        assert_eq!(find(ours, Some(("b", 8))), Ok((at("b", 8), false)));
        assert_eq!(find(&format!("{SLURM} {ours}"), None), Ok((at("a", 7), true)));
        // The settings decide between launchers that contradict each other, as for a rank.
        let contradicting = format!("{SLURM} RANK=0 WORLD_SIZE=2 MASTER_ADDR=c FLEXRING_MASTER_PORT=7");
        assert!(find(&contradicting, None).is_err());
        let settled = format!("{contradicting} FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=2");
        assert_eq!(find(&settled, None).map(|(address, _)| address), Ok(at("c", 7)));
        let error = find("", None).expect_err("no address");
        assert!(error.message().contains("--address"), "{error}");
        let id = UniqueId::new(5, &["127.0.0.1:4321".parse().expect("an address")]);
        let environment = format!("FLEXRING_UNIQUE_ID={}", id.to_hex());
        assert_eq!(find(&environment, None), Ok((RendezvousPoint::Id(id), true)));
        assert_eq!(find(&environment, Some(("b", 8))), Ok((at("b", 8), true)));
    }
}
