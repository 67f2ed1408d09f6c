//! Shrink: the ranks that are left after a failure make a new communicator.
//!
//! Owns its order of steps on this rank, and the whole of it for ranks that are threads. Must not know how
//! processes find out who is left (`bootstrap`).

use super::Communicator;
use super::control_plane::{ControlPlane, LocalMember};
use super::local_gathering::{GatheringRequest, LocalGathering};
use super::world_template::{LocalRank, WorldTemplate};
use crate::bootstrap::{AgreedWorld, CallsMade, Identity, ShrinkService, excluded_by};
use crate::error::{Error, Result};
use crate::interrupt::InterruptWatch;
use crate::process::DefaultFloatEnvironment;
use crate::rank::{Rank, RankList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// Makes a communicator of the ranks that are left, in their order, with the settings of this one. Every
    /// rank that is alive and not in `exclude` must call it, with the same list, except ranks that have
    /// dropped this communicator. Ranks that died, were stopped or cannot be reached are left out; a schedule
    /// is planned for the others. A rank that others exclude may take part in a later shrink of this
    /// communicator only if all have made another call, such as a barrier, meanwhile.
    ///
    /// This communicator may have failed or not, and must still be dropped. Its calls end first. After a
    /// failure the vectors of the failed calls have undefined contents.
    ///
    /// # Errors
    /// `InvalidArgument` if `exclude` contains this rank or one that does not exist; `Disagreement` if ranks
    /// exclude different ranks; `Rendezvous` if the others went on without this rank, exclude it, or may have
    /// gone on without it; `Timeout`, naming the ranks, if ranks that are alive do not call it within
    /// FLEXRING_CONNECT_TIMEOUT_MS; `Aborted` if the program interrupts it; the errors of
    /// [`from_env`](Self::from_env).
    pub fn shrink(&self, exclude: &[Rank]) -> Result<Self> {
        let _default = DefaultFloatEnvironment::enter();
        self.check_process()?;
        let exclude = self.excluded(exclude)?;
        self.check_not_nested()?;
        // Calls that are running or queued end first. Whether they failed does not matter, unless the program
        // interrupted the wait.
        let watch = InterruptWatch::start();
        let _ = self.synchronize();
        watch.check()?;
        if self.runner.fault.get().is_some() || !exclude.is_empty() {
            self.runner.user_memory.retire();
        }
        let deadline = Instant::now() + self.template.config.connect_timeout;
        match (&self.runner.control, &self.template.gathering, &self.template.service) {
            (ControlPlane::Threads(member), Some(gathering), _) => {
                shrink_threads(&self.template, member, gathering, exclude, deadline)
            }
            (ControlPlane::Processes(connection), _, Some(service)) => {
                self.shrink_processes(service, connection.calls_made(), exclude, deadline)
            }
            _ => Self::alone(&self.template),
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
        calls: CallsMade,
        exclude: Vec<Rank>,
        deadline: Instant,
    ) -> Result<Self> {
        service.shrink(exclude, calls, deadline, |world: &AgreedWorld| {
            let position = world.members.iter().position(|member| *member == self.rank());
            let rank = position.ok_or_else(|| Error::internal("this rank is no member of its new world"))?;
            let identity = Identity::from_unique_id(world.members.len(), &world.id, rank)?;
            let spec = self.template.for_members(&world.members);
            Self::join(spec, &identity, Arc::clone(&world.fault))
        })
    }

    /// A communicator of one rank.
    pub(super) fn alone(template: &WorldTemplate) -> Result<Self> {
        let spec = template.for_members(&[0]);
        Self::join(spec, &Identity::alone(), Arc::new(crate::fault::Fault::new()))
    }
}

/// Shrinks a communicator whose ranks are threads of this process.
fn shrink_threads(
    template: &WorldTemplate,
    member: &LocalMember,
    gathering: &LocalGathering<LocalRank>,
    exclude: Vec<Rank>,
    deadline: Instant,
) -> Result<Communicator> {
    let calls = member.calls_made();
    member.check_excluded(calls)?;
    let missing = |requests: &BTreeMap<Rank, GatheringRequest>| {
        // A rank that others exclude does not decide who must come.
        let (deciding, _) = by_exclusion(requests);
        let is_missing = |rank: &Rank| {
            !requests.contains_key(rank) && deciding.iter().any(|one| !excludes(&requests[one], *rank))
        };
        Ok(member.group.present().into_iter().filter(is_missing).collect())
    };
    let late = |missing: &[Rank]| {
        let missing = RankList::new(missing);
        let have = missing.have();
        Error::timeout(format!(
            "{missing} {have} not called shrink: all ranks must call it, or be named in the list of ranks to leave out"
        ))
    };
    let request = GatheringRequest::Shrink { exclude };
    let finish = |requests| shrink_for_all(template, member, calls, &requests);
    let made = gathering.gather(member.rank, request, missing, finish, deadline, late)?;
    let made = made.ok_or_else(|| Error::internal("a shrink gave this rank no communicator"))?;
    Ok(Communicator::new(made.runner, made.template))
}

/// Whether this request leaves `rank` out.
fn excludes(request: &GatheringRequest, rank: Rank) -> bool {
    matches!(request, GatheringRequest::Shrink { exclude } if exclude.contains(&rank))
}

/// The ranks that have come: those that no request excludes, and the others.
fn by_exclusion(requests: &BTreeMap<Rank, GatheringRequest>) -> (Vec<Rank>, Vec<Rank>) {
    requests.keys().partition(|rank| !requests.values().any(|request| excludes(request, **rank)))
}

/// Acts for all ranks that have come, after these calls.
fn shrink_for_all(
    template: &WorldTemplate,
    member: &LocalMember,
    calls: CallsMade,
    requests: &BTreeMap<Rank, GatheringRequest>,
) -> BTreeMap<Rank, Result<Option<LocalRank>>> {
    let (members, excluded) = by_exclusion(requests);
    let first = members.first().map(|first| (*first, &requests[first]));
    let differs = |(rank, request): &(&Rank, &GatheringRequest)| match first {
        Some((_, usual)) if excluded.contains(rank) => !excludes(usual, **rank),
        Some((_, usual)) => *request != usual,
        None => true,
    };
    if let Some((rank, request)) = requests.iter().find(differs) {
        let usual = first.map_or_else(
            || "every rank is excluded by another one".to_owned(),
            |(first, usual)| format!("rank {first} calls {usual:?}"),
        );
        let error = Error::disagreement(format!("rank {rank} calls {request:?}, but {usual}"));
        return requests.keys().map(|rank| (*rank, Err(error.clone()))).collect();
    }
    let left_out: Vec<Rank> = match first {
        Some((_, GatheringRequest::Shrink { exclude })) => exclude.clone(),
        _ => Vec::new(),
    };
    member.group.record_shrink(&members, &left_out, calls);
    let made = Communicator::local_ranks(template.for_members(&members), members.len());
    let mut results = distribute(&members, made);
    results.extend(excluded.iter().map(|rank| (*rank, Err(excluded_by(&members, *rank)))));
    results
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
