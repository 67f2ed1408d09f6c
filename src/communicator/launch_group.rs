//! The ranks of a communicator that are threads of this process launch their kernels together.
//!
//! A CUDA call that blocks holds a lock of the driver. If one rank's kernel ran while another rank's kernel
//! was not launched yet, a blocking call by any thread would wait for the first kernel, the first kernel for
//! the second, and the launch of the second for the lock. So the last rank to make a call launches the
//! kernels of all, and no rank returns earlier.
//!
//! Owns who launches and when.

use super::registration_gate::{GATE, LaunchPermit};
use crate::bootstrap::departed_before_call;
use crate::call::Collective;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::InterruptTimer;
use crate::process::PerProcess;
use crate::rank::{Rank, RankList};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often a rank that waits for the others checks whether the communicator has failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A kernel that can be launched by any thread.
pub(super) trait Launch: Send {
    /// Launches the kernel.
    fn launch(&mut self) -> Result<()>;

    /// Orders later work behind the kernel. Not before all kernels are launched that this one waits for.
    fn record(self: Box<Self>) -> Result<()>;
}

/// A kernel that is ready to be launched.
pub(super) struct ReadyLaunch {
    pub permit: LaunchPermit,
    pub launch: Box<dyn Launch>,
}

/// The ranks of one communicator in this process.
pub(super) struct LaunchGroup {
    ranks: Vec<Rank>,
    state: Mutex<GroupState>,
    changed: Condvar,
}

#[derive(Default)]
struct GroupState {
    members: Vec<MemberState>,
    /// Why a member stopped waiting. No launch takes place afterwards.
    ended: Option<Error>,
}

#[derive(Default)]
struct MemberState {
    /// Calls that the member has made so far, on the host or on a GPU.
    calls: u64,
    /// The launch that waits for other members, with the number of its call.
    waiting: Option<(u64, ReadyLaunch)>,
    outcome: Option<Result<()>>,
    /// Whether the member makes no more calls.
    has_left: bool,
}

/// Groups by the random number of their communicator.
type KnownGroups = Vec<([u8; 16], Weak<LaunchGroup>)>;

/// Groups of communicators whose ranks joined separately.
static GROUPS: PerProcess<Mutex<KnownGroups>> = PerProcess::new();

impl LaunchGroup {
    /// A group of these ranks.
    pub(super) fn new(ranks: Vec<Rank>) -> Arc<Self> {
        let members = ranks.iter().map(|_| MemberState::default()).collect();
        let state = Mutex::new(GroupState { members, ended: None });
        Arc::new(Self { ranks, state, changed: Condvar::new() })
    }

    /// The group of a communicator, the same one for all ranks of this process that pass the same bytes,
    /// which belong to one communicator.
    pub(super) fn shared(communicator: [u8; 16], ranks: Vec<Rank>) -> Arc<Self> {
        let mut groups = GROUPS.get().lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|(_, group)| group.strong_count() > 0);
        let known = groups.iter().find(|(number, _)| *number == communicator);
        if let Some(group) = known.and_then(|(_, group)| group.upgrade()) {
            return group;
        }
        let group = Self::new(ranks);
        groups.push((communicator, Arc::downgrade(&group)));
        group
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks that have made fewer than `calls` calls.
    fn missing(&self, state: &GroupState, calls: u64) -> Vec<Rank> {
        let members = self.ranks.iter().zip(&state.members);
        members.filter(|(_, member)| member.calls < calls).map(|(rank, _)| *rank).collect()
    }

    /// The error of `rank`, which waits in its call number `calls`, if another rank has left without that
    /// call.
    fn check_departures(
        &self,
        state: &GroupState,
        rank: Rank,
        calls: u64,
        collective: Collective,
    ) -> Result<()> {
        let members = self.ranks.iter().zip(&state.members);
        let departed = members.filter(|(_, member)| member.has_left && member.calls < calls);
        let Some((leaver, left)) = departed.min_by_key(|(_, member)| member.calls) else {
            return Ok(());
        };
        let call = format!("{} #{calls}", collective.name());
        let message = departed_before_call(&format!("rank {leaver}"), left.calls, rank, &call);
        Err(Error::peer_lost(message).with_suspect(*leaver))
    }
}

impl GroupState {
    /// Counts a call of a member, and launches what waited for it alone.
    fn arrive(&mut self, member: usize, launch: Option<ReadyLaunch>) {
        let arrived = &mut self.members[member];
        arrived.calls += 1;
        // A call without a kernel, by another thread of the rank, leaves the launch that waits.
        if let Some(launch) = launch {
            arrived.waiting = Some((arrived.calls, launch));
        }
        let common = self.members.iter().map(|member| member.calls).min().unwrap_or(0);
        let ready =
            |member: &MemberState| member.waiting.as_ref().is_some_and(|(number, _)| *number <= common);
        let permits =
            self.members.iter().filter(|member| ready(member)).filter_map(|member| member.waiting.as_ref());
        let mut permits = permits.map(|(_, launch)| &launch.permit).peekable();
        if permits.peek().is_none() {
            return;
        }
        // All at once: a registration that came between two of them would wait for the first, and the first
        // for the second.
        GATE.begin(permits);
        let mut launched = Vec::with_capacity(self.members.len());
        for (index, member) in self.members.iter_mut().enumerate().filter(|(_, member)| ready(member)) {
            if let Some((_, mut ready)) = member.waiting.take() {
                let outcome = ready.launch.launch();
                launched.push((index, ready.launch, outcome));
            }
        }
        for (index, launch, outcome) in launched {
            self.members[index].outcome = Some(outcome.and_then(|()| launch.record()));
        }
    }
}

/// One rank of a [`LaunchGroup`].
pub(super) struct LaunchMember {
    group: Arc<LaunchGroup>,
    index: usize,
}

impl LaunchMember {
    /// The member `rank` of a group; `None` if the group has no other ranks.
    pub(super) fn new(group: &Arc<LaunchGroup>, rank: Rank) -> Option<Self> {
        let index = group.ranks.iter().position(|member| *member == rank)?;
        (group.ranks.len() > 1).then(|| Self { group: Arc::clone(group), index })
    }

    /// Whether this rank is a member of the group.
    pub(super) fn has_rank(&self, rank: Rank) -> bool {
        self.group.ranks.contains(&rank)
    }

    /// Counts a call without a kernel.
    pub(super) fn pass(&self) {
        self.group.lock().arrive(self.index, None);
        self.group.changed.notify_all();
    }

    /// Waits until all other members have made as many calls, and returns when this member's kernel is in its
    /// stream.
    ///
    /// # Errors
    /// That of the launch; the fault, if it is raised meanwhile; `PeerLost` if a member has left without the
    /// call, of this collective; `Timeout`, naming the ranks that did not make the call.
    pub(super) fn launch(
        &self,
        ready: ReadyLaunch,
        collective: Collective,
        fault: &Fault,
        timeout: Duration,
    ) -> Result<()> {
        let Self { group, index } = self;
        let deadline = Instant::now() + timeout;
        let mut state = group.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        state.arrive(*index, Some(ready));
        // Another thread may count calls of this member while this one waits.
        let calls = state.members[*index].calls;
        group.changed.notify_all();
        let mut interrupt = InterruptTimer::default();
        loop {
            if let Some(outcome) = state.members[*index].outcome.take() {
                return outcome;
            }
            // The program's handler may make calls of its own, so the group is not locked meanwhile.
            drop(state);
            let interrupted = interrupt.check_at(Instant::now()).err();
            state = group.lock();
            if let Some(outcome) = state.members[*index].outcome.take() {
                return outcome;
            }
            let late = || {
                let missing = group.missing(&state, calls);
                let message = format!(
                    "{} did not make the same call within {timeout:?}: ranks of one process launch their kernels \
                     together, so each must call from a thread of its own",
                    RankList::new(&missing)
                );
                let error = Error::timeout(message);
                missing.first().map_or(error.clone(), |rank| error.with_suspect(*rank))
            };
            let departed = || group.check_departures(&state, group.ranks[*index], calls, collective).err();
            let ended = fault.get().or(state.ended.as_ref()).cloned().or_else(departed);
            let ended = ended.or(interrupted);
            if let Some(error) = ended.or_else(|| (Instant::now() >= deadline).then(late)) {
                state.members[*index].waiting = None;
                state.ended.get_or_insert_with(|| error.clone());
                group.changed.notify_all();
                return Err(error);
            }
            let waited = group.changed.wait_timeout(state, CHECK_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for LaunchMember {
    fn drop(&mut self) {
        self.group.lock().members[self.index].has_left = true;
        self.group.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::registration_gate::permit;
    use super::*;
    use crate::error::ErrorKind;

    struct FakeLaunch<F>(F);

    impl<F: FnMut(&str) -> Result<()> + Send> Launch for FakeLaunch<F> {
        fn launch(&mut self) -> Result<()> {
            (self.0)("launch")
        }

        fn record(mut self: Box<Self>) -> Result<()> {
            (self.0)("record")
        }
    }

    fn ready(launch: impl FnMut(&str) -> Result<()> + Send + 'static) -> ReadyLaunch {
        ReadyLaunch { permit: permit().0, launch: Box::new(FakeLaunch(launch)) }
    }

    fn members(count: usize) -> Vec<LaunchMember> {
        let group = LaunchGroup::new((0..count).collect());
        (0..count).filter_map(|rank| LaunchMember::new(&group, rank)).collect()
    }

    #[test]
    fn kernels_are_launched_together_when_all_ranks_have_called() {
        let steps = Arc::new(Mutex::new(Vec::new()));
        let fault = Fault::new();
        let members = members(3);
        std::thread::scope(|scope| {
            let mut callers = Vec::new();
            for member in &members[..2] {
                let (steps, fault) = (Arc::clone(&steps), &fault);
                let note = move |step: &str| {
                    steps.lock().expect("no panic").push(step.to_owned());
                    Ok(())
                };
                callers.push(scope.spawn(move || {
                    member.launch(ready(note), Collective::AllReduce, fault, Duration::from_secs(20))
                }));
            }
            wait_for_calls(&members, 2);
            assert!(steps.lock().expect("no panic").is_empty());
            // A call on the host takes part, but has no kernel.
            members[2].pass();
            callers.into_iter().for_each(|caller| caller.join().expect("no panic").expect("launched"));
        });
        assert_eq!(*steps.lock().expect("no panic"), ["launch", "launch", "record", "record"]);
    }

    /// Waits until this many calls have been made.
    fn wait_for_calls(members: &[LaunchMember], calls: u64) {
        let made = || members[0].group.lock().members.iter().map(|member| member.calls).sum::<u64>();
        while made() < calls {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_missing_rank_is_named_and_the_others_stop_waiting() {
        let fault = Fault::new();
        let members = members(3);
        let launch = |member: &LaunchMember, limit| {
            member.launch(ready(|_| Ok(())), Collective::AllReduce, &fault, limit)
        };
        std::thread::scope(|scope| {
            let patient = scope.spawn(|| launch(&members[0], Duration::from_secs(20)));
            wait_for_calls(&members, 1);
            let late = launch(&members[1], Duration::from_millis(10));
            for error in [late, patient.join().expect("no panic")] {
                let error = error.expect_err("rank 2 does not call");
                assert!(error.message().starts_with("rank 2 did not make the same call"), "{error}");
            }
        });
        assert!(launch(&members[2], Duration::ZERO).is_err(), "the group has ended");
    }

    #[test]
    fn a_rank_that_leaves_without_a_call_fails_those_that_wait_in_it() {
        let fault = Fault::new();
        let mut members = members(3);
        members.iter().for_each(LaunchMember::pass);
        let leaver = members.remove(1);
        let launch = |member: &LaunchMember| {
            member.launch(ready(|_| Ok(())), Collective::AllReduce, &fault, Duration::from_secs(20))
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| launch(&members[0]));
            wait_for_calls(&members, 4);
            drop(leaver);
            // The other one waits already, or calls later.
            for error in [first.join().expect("no panic"), launch(&members[1])] {
                let error = error.expect_err("rank 1 has left");
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
                let expected = "rank 1 left after call #1, and rank 0 is in all_reduce #2";
                assert!(error.message().starts_with(expected), "{error}");
            }
        });
    }

    #[test]
    fn a_rank_gets_the_error_of_its_own_launch() {
        let fault = Fault::new();
        let members = members(2);
        members[1].pass();
        let failed = members[0].launch(
            ready(|_| Err(Error::system("no room"))),
            Collective::AllReduce,
            &fault,
            Duration::ZERO,
        );
        assert_eq!(failed.expect_err("it failed").message(), "no room");
        members[1].pass();
        members[0]
            .launch(ready(|_| Ok(())), Collective::AllReduce, &fault, Duration::ZERO)
            .expect("the next one is launched");
    }
}
