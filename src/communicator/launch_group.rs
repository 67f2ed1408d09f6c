//! The ranks of a communicator that are threads of this process launch their kernels together.
//!
//! A CUDA call that blocks holds a lock of the driver. If one rank's kernel ran while another rank's kernel was not launched
//! yet, a blocking call by any thread would wait for the first kernel, the first kernel for the second, and the launch of the
//! second for the lock. So the last rank to make a call launches the kernels of all, and no rank returns earlier. A group of sends and
//! receives is launched together with those of its peers in this process, and with what their groups need in turn.
//!
//! Owns who launches and when. Must not know what a launch is.

use super::registration_gate::{GATE, LaunchPermit};
use crate::bootstrap::departed_before_call;
use crate::call::Collective;
use crate::error::{Error, Result};
use crate::fault::Fault;
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

struct MemberState {
    /// Calls that the member has made so far, on the host or on a GPU.
    calls: u64,
    waiting: Option<WaitingLaunch>,
    /// By other member, groups of this one without a kernel that no group of the other one corresponds to yet.
    groups: Vec<u64>,
    outcome: Option<Result<()>>,
    /// Whether the member makes no more calls.
    has_left: bool,
}

/// A launch that waits for other members.
struct WaitingLaunch {
    needs: Needs,
    /// The call, in errors.
    call: String,
    ready: ReadyLaunch,
}

/// What a launch waits for.
#[derive(Clone, Debug)]
enum Needs {
    /// All members have made this many calls.
    Calls(u64),
    /// Each of these members makes a group with messages for this one. It may need others in turn.
    Groups(Vec<usize>),
}

/// Groups by the random number of their communicator.
type KnownGroups = Vec<([u8; 16], Weak<LaunchGroup>)>;

/// Groups of communicators whose ranks joined separately.
static GROUPS: PerProcess<Mutex<KnownGroups>> = PerProcess::new();

impl LaunchGroup {
    /// A group of these ranks.
    pub(super) fn new(ranks: Vec<Rank>) -> Arc<Self> {
        let member = || MemberState {
            calls: 0,
            waiting: None,
            groups: vec![0; ranks.len()],
            outcome: None,
            has_left: false,
        };
        let members = ranks.iter().map(|_| member()).collect();
        let state = Mutex::new(GroupState { members, ended: None });
        Arc::new(Self { ranks, state, changed: Condvar::new() })
    }

    /// The group of a communicator, the same one for all ranks of this process that pass the same bytes, which belong to one communicator.
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

    /// The error of member `index`, which waits, if a member that it waits for has left.
    fn check_departures(&self, state: &GroupState, index: usize) -> Result<()> {
        let departed = state.missing(index).into_iter().filter(|member| state.members[*member].has_left);
        let Some(leaver) = departed.min_by_key(|member| state.members[*member].calls) else {
            return Ok(());
        };
        let (rank, calls) = (self.ranks[leaver], state.members[leaver].calls);
        let message =
            departed_before_call(&format!("rank {rank}"), calls, self.ranks[index], &state.call(index));
        Err(Error::peer_lost(message).with_suspect(rank))
    }

    /// The error of member `index`, which waits, if one of the members whose groups it waits for is in a collective, and waits for the
    /// same collective of this one.
    fn check_order(&self, state: &GroupState, index: usize) -> Result<()> {
        if !matches!(state.needs(index), Some(Needs::Groups(_))) {
            return Ok(());
        }
        let own_calls = state.members[index].calls;
        let waits =
            |member: &usize| matches!(state.needs(*member), Some(Needs::Calls(calls)) if own_calls < *calls);
        let Some(other) = state.missing(index).into_iter().find(waits) else { return Ok(()) };
        Err(Error::disagreement(format!(
            "rank {} is in {} that needs rank {}, which is in {}: all ranks must make the same calls in the same order",
            self.ranks[index],
            state.call(index),
            self.ranks[other],
            state.call(other)
        )))
    }

    /// The error of member `index`, whose launch has waited for `timeout`.
    fn timed_out(&self, state: &GroupState, index: usize, timeout: Duration) -> Error {
        let missing: Vec<Rank> = state.missing(index).into_iter().map(|member| self.ranks[member]).collect();
        let call = match state.needs(index) {
            Some(Needs::Groups(_)) => "sends and receives for the ranks that wait for them",
            _ => "the same call",
        };
        let error = Error::timeout(format!(
            "{} did not make {call} within {timeout:?}: ranks of one process launch their kernels together, so each must call \
             from a thread of its own",
            RankList::new(&missing)
        ));
        missing.first().map_or(error.clone(), |rank| error.with_suspect(*rank))
    }
}

impl GroupState {
    fn needs(&self, member: usize) -> Option<&Needs> {
        self.members[member].waiting.as_ref().map(|waiting| &waiting.needs)
    }

    /// The call whose launch waits.
    fn call(&self, member: usize) -> &str {
        self.members[member].waiting.as_ref().map_or("a call", |waiting| &waiting.call)
    }

    /// The members whose calls the launch of `member` waits for; none if it can take place.
    fn missing(&self, member: usize) -> Vec<usize> {
        match self.needs(member) {
            None => Vec::new(),
            Some(Needs::Calls(calls)) => {
                (0..self.members.len()).filter(|other| self.members[*other].calls < *calls).collect()
            }
            Some(Needs::Groups(_)) => self.missing_groups(member),
        }
    }

    /// The members that did not make the groups that correspond to the group of `member`, or to one that it needs.
    fn missing_groups(&self, member: usize) -> Vec<usize> {
        let peers = |member: usize| match self.needs(member) {
            Some(Needs::Groups(peers)) => &peers[..],
            _ => &[],
        };
        let (mut found, mut missing, mut next) = (vec![member], Vec::new(), 0);
        while let Some(one) = found.get(next).copied() {
            next += 1;
            for peer in peers(one).iter().copied().filter(|peer| self.members[*peer].groups[one] == 0) {
                if self.members[one].groups[peer] > 0 || !peers(peer).contains(&one) {
                    missing.push(peer);
                } else if !found.contains(&peer) {
                    found.push(peer);
                }
            }
        }
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Counts a call of a member in which all take part.
    fn count(&mut self, member: usize) -> u64 {
        self.members[member].calls += 1;
        self.members[member].calls
    }

    /// Notes a group without a kernel, which has messages for these members.
    fn note_group(&mut self, member: usize, peers: Vec<usize>) {
        for peer in peers {
            match self.members[peer].groups[member].checked_sub(1) {
                Some(left) => self.members[peer].groups[member] = left,
                None => self.members[member].groups[peer] += 1,
            }
        }
    }

    /// Launches all kernels that wait for nobody.
    fn launch_ready(&mut self) {
        let is_ready = |member: &usize| self.needs(*member).is_some() && self.missing(*member).is_empty();
        let members: Vec<usize> = (0..self.members.len()).filter(is_ready).collect();
        if members.is_empty() {
            return;
        }
        let mut ready = Vec::with_capacity(members.len());
        for member in members {
            let Some(launch) = self.members[member].waiting.take() else { continue };
            if let Needs::Groups(peers) = launch.needs {
                for peer in peers {
                    let without_kernel = &mut self.members[peer].groups[member];
                    *without_kernel = without_kernel.saturating_sub(1);
                }
            }
            ready.push((member, launch.ready));
        }
        // All at once: a registration that came between two of them would wait for the first, and the first for the second.
        GATE.begin(ready.iter().map(|(_, ready)| &ready.permit));
        let outcomes: Vec<Result<()>> = ready.iter_mut().map(|(_, ready)| ready.launch.launch()).collect();
        for ((member, ready), outcome) in ready.into_iter().zip(outcomes) {
            self.members[member].outcome = Some(outcome.and_then(|()| ready.launch.record()));
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

    /// Counts a call without a kernel.
    pub(super) fn pass(&self) {
        let mut state = self.group.lock();
        state.count(self.index);
        // By another thread of this rank, it leaves the launch that waits.
        state.launch_ready();
        self.group.changed.notify_all();
    }

    /// Notes a group of sends and receives with these peers that has no kernel.
    pub(super) fn pass_group(&self, peers: impl Iterator<Item = Rank>) {
        let peers = self.members_of(peers);
        if !peers.is_empty() {
            let mut state = self.group.lock();
            state.note_group(self.index, peers);
            state.launch_ready();
            self.group.changed.notify_all();
        }
    }

    /// The other members among these ranks, each once.
    fn members_of(&self, ranks: impl Iterator<Item = Rank>) -> Vec<usize> {
        let member = |rank: Rank| self.group.ranks.iter().position(|member| *member == rank);
        let mut members: Vec<usize> =
            ranks.filter_map(member).filter(|member| *member != self.index).collect();
        members.sort_unstable();
        members.dedup();
        members
    }

    /// Waits until all other members have made as many calls, and returns when this member's kernel is in its stream.
    ///
    /// # Errors
    /// That of the launch; the fault, if it is raised meanwhile; `PeerLost` if a member has left without the call, of this
    /// collective; `Timeout`, naming the ranks that did not make the call.
    pub(super) fn launch(
        &self,
        ready: ReadyLaunch,
        collective: Collective,
        fault: &Fault,
        timeout: Duration,
    ) -> Result<()> {
        let mut state = self.group.lock();
        let calls = state.count(self.index);
        let call = format!("{} #{calls}", collective.name());
        self.wait(state, WaitingLaunch { needs: Needs::Calls(calls), call, ready }, fault, timeout)
    }

    /// Launches the kernel of a group of sends and receives with these peers, together with those of the corresponding groups of the
    /// peers in this process. A group of this rank corresponds to one group of the peer, in order.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch); `Disagreement` if a peer is in a collective that waits for this rank.
    pub(super) fn launch_group(
        &self,
        ready: ReadyLaunch,
        peers: impl Iterator<Item = Rank>,
        fault: &Fault,
        timeout: Duration,
    ) -> Result<()> {
        let (needs, call) =
            (Needs::Groups(self.members_of(peers)), "a group of sends and receives".to_owned());
        self.wait(self.group.lock(), WaitingLaunch { needs, call, ready }, fault, timeout)
    }

    /// Waits until this launch takes place.
    fn wait(
        &self,
        mut state: MutexGuard<'_, GroupState>,
        launch: WaitingLaunch,
        fault: &Fault,
        timeout: Duration,
    ) -> Result<()> {
        let Self { group, index } = self;
        let deadline = Instant::now() + timeout;
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        state.members[*index].waiting = Some(launch);
        state.launch_ready();
        group.changed.notify_all();
        loop {
            if let Some(outcome) = state.members[*index].outcome.take() {
                return outcome;
            }
            let blocked = || {
                group.check_departures(&state, *index).and_then(|()| group.check_order(&state, *index)).err()
            };
            let late = || (Instant::now() >= deadline).then(|| group.timed_out(&state, *index, timeout));
            let ended = fault.get().or(state.ended.as_ref()).cloned();
            if let Some(error) = ended.or_else(blocked).or_else(late) {
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

    /// The launches of a group of `count` members that begin to wait one after the other, each with the members for which it has
    /// messages: those that have taken place after each.
    fn launched(count: usize, groups: &[(usize, &[usize])]) -> Vec<Vec<usize>> {
        let group = LaunchGroup::new((0..count).collect());
        let mut state = group.lock();
        let mut begin = |(member, peers): &(usize, &[usize])| {
            let needs = Needs::Groups(peers.to_vec());
            state.members[*member].waiting =
                Some(WaitingLaunch { needs, call: String::new(), ready: ready(|_| Ok(())) });
            state.launch_ready();
            (0..count).filter(|member| state.members[*member].outcome.take().is_some()).collect()
        };
        groups.iter().map(&mut begin).collect()
    }

    #[test]
    fn groups_of_messages_are_launched_with_those_that_they_need() {
        assert_eq!(launched(3, &[(0, &[]), (1, &[])]), [vec![0], vec![1]], "messages to itself");
        assert_eq!(launched(3, &[(0, &[2]), (2, &[0])]), [vec![], vec![0, 2]], "a pair");
        let line: [(usize, &[usize]); 3] = [(0, &[1]), (1, &[0, 2]), (2, &[1])];
        assert_eq!(launched(3, &line), [vec![], vec![], vec![0, 1, 2]], "a line");
        let pairs: [(usize, &[usize]); 4] = [(0, &[1]), (2, &[3]), (1, &[0]), (3, &[2])];
        assert_eq!(launched(4, &pairs), [vec![], vec![], vec![0, 1], vec![2, 3]], "two pairs");
        let later: [(usize, &[usize]); 4] = [(0, &[1]), (1, &[2]), (2, &[1]), (1, &[0])];
        assert_eq!(
            launched(3, &later),
            [vec![], vec![], vec![1, 2], vec![0, 1]],
            "another group of the peer first"
        );
    }

    #[test]
    fn a_group_without_a_kernel_lets_one_group_of_the_peer_be_launched() {
        let members = members(2);
        let group = &members[0].group;
        let begin = |member: usize| {
            let mut state = group.lock();
            let needs = Needs::Groups(vec![1 - member]);
            state.members[member].waiting =
                Some(WaitingLaunch { needs, call: String::new(), ready: ready(|_| Ok(())) });
            state.launch_ready();
            let launched = (0..2).filter(|member| state.members[*member].outcome.take().is_some());
            launched.collect::<Vec<usize>>()
        };
        members[0].pass_group([0, 1].into_iter());
        assert_eq!(begin(1), [1], "it was made before");
        assert!(begin(1).is_empty());
        members[0].pass_group([1].into_iter());
        assert!(group.lock().members[1].outcome.take().is_some(), "it was made afterwards");
        // Groups without kernels at both ends correspond to each other.
        members[0].pass_group([1].into_iter());
        members[1].pass_group([0].into_iter());
        assert!(begin(1).is_empty());
        assert_eq!(begin(0), [0, 1]);
        // The group of the host corresponds to the first one, whatever its peer does next.
        members[0].pass_group([1].into_iter());
        assert!(begin(0).is_empty(), "its second group");
        assert_eq!(begin(1), [1], "the peer's first one");
        assert_eq!(begin(1), [0, 1]);
    }

    #[test]
    fn a_group_and_a_collective_that_wait_for_each_other_are_an_error() {
        let fault = Fault::new();
        let members = members(2);
        let limit = Duration::from_secs(20);
        std::thread::scope(|scope| {
            let collective =
                scope.spawn(|| members[1].launch(ready(|_| Ok(())), Collective::AllReduce, &fault, limit));
            wait_for_calls(&members, 1);
            let group = members[0].launch_group(ready(|_| Ok(())), [1].into_iter(), &fault, limit);
            for outcome in [group, collective.join().expect("no panic")] {
                let error = outcome.expect_err("they wait for each other");
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
                let expected =
                    "rank 0 is in a group of sends and receives that needs rank 1, which is in all_reduce #1";
                assert!(error.message().starts_with(expected), "{error}");
            }
        });
    }

    #[test]
    fn a_group_without_its_counterpart_names_the_rank() {
        let fault = Fault::new();
        let mut members = members(3);
        let launch = |member: &LaunchMember, peers: &[Rank], limit| {
            let peers = peers.iter().copied();
            member.launch_group(ready(|_| Ok(())), peers, &fault, limit).expect_err("rank 2 has no group")
        };
        let error = launch(&members[0], &[2], Duration::from_millis(10));
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(
            error.message().starts_with("rank 2 did not make sends and receives for the ranks"),
            "{error}"
        );
        let left = members.remove(2).group.clone();
        left.lock().ended = None;
        let error = launch(&members[1], &[2], Duration::from_secs(20));
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        let expected = "rank 2 left before its first call, and rank 1 is in a group of sends and receives";
        assert!(error.message().starts_with(expected), "{error}");
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
