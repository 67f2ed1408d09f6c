//! Shrink: the ranks that are left after a failure make a new communicator.
//!
//! Owns its order of steps on this rank, and the whole of it for ranks that are threads. Must not know how processes find
//! out who is left (`bootstrap`).

use super::Communicator;
use super::blueprint::{Blueprint, LocalRank};
use super::control_plane::{ControlPlane, LocalMember};
use super::local_gathering::{GatheringRequest, LocalGathering};
use crate::bootstrap::{AgreedWorld, Identity, ShrinkService};
use crate::error::{Error, Result};
use crate::interrupt::InterruptWatch;
use crate::rank::{Rank, RankList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// Makes a communicator of the ranks that are left, in their order, with the settings of this one. Every rank that is
    /// alive and not in `exclude` must call it, with the same list, except ranks that have dropped this communicator. Ranks
    /// that died, were stopped or cannot be reached are left out; a schedule is planned for the others.
    ///
    /// This communicator may have failed or not, and must still be dropped. Its calls end first. After a failure the
    /// vectors of the failed calls have undefined contents.
    ///
    /// # Errors
    /// `InvalidArgument` if `exclude` contains this rank or one that does not exist; `Disagreement` if ranks exclude
    /// different ranks; `Rendezvous` if the others went on without this rank, or if it cannot be excluded that they did;
    /// `Timeout`, naming the ranks, if ranks that are alive do not call it within FLEXRING_CONNECT_TIMEOUT_MS; `Aborted` if
    /// the program interrupts it; the errors of [`from_env`](Self::from_env).
    pub fn shrink(&self, exclude: &[Rank]) -> Result<Self> {
        self.check_process()?;
        let exclude = self.excluded(exclude)?;
        // Calls that are running or queued end first. Whether they failed does not matter, unless the program interrupted
        // the wait.
        let watch = InterruptWatch::start();
        let _ = self.synchronize();
        watch.check()?;
        let deadline = Instant::now() + self.blueprint.config.connect_timeout;
        match (&self.runner.control, &self.blueprint.gathering, &self.blueprint.service) {
            (ControlPlane::Threads(member), Some(gathering), _) => {
                shrink_threads(&self.blueprint, member, gathering, exclude, deadline)
            }
            (_, _, Some(service)) => self.shrink_processes(service, exclude, deadline),
            _ => Self::alone(&self.blueprint),
        }
    }

    /// Checks the list of ranks to leave out, and sorts it.
    fn excluded(&self, exclude: &[Rank]) -> Result<Vec<Rank>> {
        let (rank, world) = (self.rank(), self.world_size());
        if let Some(unknown) = exclude.iter().find(|rank| **rank >= world) {
            let message =
                format!("rank {unknown} cannot be excluded: there are {world} ranks, numbered from 0");
            return Err(Error::invalid_argument(message));
        }
        if exclude.contains(&rank) {
            let message = format!("rank {rank} excludes itself: ranks that are excluded do not call shrink");
            return Err(Error::invalid_argument(message));
        }
        let mut exclude = exclude.to_vec();
        exclude.sort_unstable();
        exclude.dedup();
        Ok(exclude)
    }

    fn shrink_processes(
        &self,
        service: &ShrinkService,
        exclude: Vec<Rank>,
        deadline: Instant,
    ) -> Result<Self> {
        service.shrink(exclude, deadline, |world: &AgreedWorld| {
            let position = world.members.iter().position(|member| *member == self.rank());
            let rank = position.ok_or_else(|| Error::internal("this rank is no member of its new world"))?;
            let identity = Identity::from_unique_id(world.members.len(), &world.id, rank)?;
            let spec = self.blueprint.for_members(&world.members);
            Self::join(spec, &identity, Arc::clone(&world.fault))
        })
    }

    /// A communicator of one rank.
    pub(super) fn alone(blueprint: &Blueprint) -> Result<Self> {
        let spec = blueprint.for_members(&[0]);
        Self::join(spec, &Identity::alone(), Arc::new(crate::fault::Fault::new()?))
    }
}

/// Shrinks a communicator whose ranks are threads of this process.
fn shrink_threads(
    blueprint: &Blueprint,
    member: &LocalMember,
    gathering: &LocalGathering<LocalRank>,
    exclude: Vec<Rank>,
    deadline: Instant,
) -> Result<Communicator> {
    let missing = |requests: &BTreeMap<Rank, GatheringRequest>| {
        let is_missing = |rank: &Rank| !exclude.contains(rank) && !requests.contains_key(rank);
        Ok(member.group.present().into_iter().filter(is_missing).collect())
    };
    let late = |missing: &[Rank]| {
        let missing = RankList::new(missing);
        let have = missing.have();
        Error::timeout(format!(
            "{missing} {have} not called shrink: all ranks must call it, or be named in the list of ranks to leave out"
        ))
    };
    let request = GatheringRequest::Shrink { exclude: exclude.clone() };
    let finish = |requests| shrink_for_all(blueprint, requests);
    let made = gathering.gather(member.rank, request, missing, finish, deadline, late)?;
    let made = made.ok_or_else(|| Error::internal("a shrink gave this rank no communicator"))?;
    Communicator::start(made.runner, made.blueprint)
}

/// Acts for all ranks that have come.
fn shrink_for_all(
    blueprint: &Blueprint,
    requests: BTreeMap<Rank, GatheringRequest>,
) -> BTreeMap<Rank, Result<Option<LocalRank>>> {
    let members: Vec<Rank> = requests.keys().copied().collect();
    let (first, usual) =
        requests.first_key_value().map_or((0, None), |(rank, request)| (*rank, Some(request)));
    let differing = requests.iter().find(|(_, request)| Some(*request) != usual);
    let made = match differing {
        Some((rank, request)) => Err(Error::disagreement(format!(
            "rank {rank} calls {request:?}, but rank {first} calls {usual:?}"
        ))),
        None => Communicator::local_ranks(&blueprint.for_members(&members), members.len()),
    };
    distribute(&members, made)
}

/// The result of each member of a new world, given in their new order.
pub(super) fn distribute(
    members: &[Rank],
    made: Result<Vec<LocalRank>>,
) -> BTreeMap<Rank, Result<Option<LocalRank>>> {
    match made {
        Ok(made) => members.iter().copied().zip(made.into_iter().map(|rank| Ok(Some(rank)))).collect(),
        Err(error) => members.iter().map(|rank| (*rank, Err(error.clone()))).collect(),
    }
}
