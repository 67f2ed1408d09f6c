//! The rendezvous of one world, as a state machine without I/O.
//!
//! Owns the decision whether the world comes about: who has joined, who must still join, and whether they
//! agree on release, world size and settings. Callers report the hellos of ranks that are authenticated,
//! disconnects and the time. Any failure becomes one root cause, the same for ranks that have joined and for
//! ranks that join later.

use super::heartbeat::seconds;
use super::process::Process;
use super::protocol::{Hello, HelloHeader, HelloParams, MAX_WORLD, VERSION};
use crate::error::{Error, ErrorKind};
use crate::peer_text::PeerText;
use crate::rank::{Rank, RankList};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How many refused callers the joined ranks and the error for missing ranks hear of.
const MAX_REFUSALS: usize = 3;
/// How long ranks wait before they say for which others. From then on they say it after twice the time each.
pub(super) const FIRST_REPORT: Duration = Duration::from_secs(5);

/// A rank that has joined.
#[derive(Debug)]
pub(super) struct JoinedPeer {
    pub(super) process: Process,
    pub(super) params: HelloParams,
}

/// The result of a hello.
#[derive(Debug, PartialEq)]
pub(super) enum JoinOutcome {
    /// The rank joined and waits for the others.
    Waiting,
    /// The rank joined, and it was the last one: the world is complete.
    Complete,
    /// The rendezvous has failed, for this rank as well. See [`Rendezvous::root_cause`].
    Failed,
    /// The hello is malformed.
    Malformed,
}

/// A world whose ranks are joining.
#[derive(Debug)]
pub(super) struct Rendezvous {
    location: String,
    /// The process that runs the coordinator.
    host_process: Process,
    world: Option<usize>,
    peers: BTreeMap<Rank, JoinedPeer>,
    /// The earliest join deadline of all ranks, and the timeout that led to it.
    deadline: Option<(Instant, Duration)>,
    /// Callers that were not admitted, each once.
    refusals: Vec<String>,
    /// Why the coordinator could not accept a connection.
    accept_failure: Option<String>,
    /// When the joined ranks say next for which others they wait, and the time since they have said it
    /// before.
    report: Option<(Instant, Duration)>,
    /// What ranks are to log, since the last call of [`notices`](Self::notices).
    notices: Vec<(Vec<Rank>, String)>,
    root_cause: Option<Error>,
}

impl Rendezvous {
    /// Waits at `location`, in `host_process`, for the ranks of a job. The first hello sets the world size.
    pub(super) fn new(location: String, host_process: Process) -> Self {
        Self {
            location,
            host_process,
            world: None,
            peers: BTreeMap::new(),
            deadline: None,
            refusals: Vec::new(),
            accept_failure: None,
            report: None,
            notices: Vec::new(),
            root_cause: None,
        }
    }

    /// Notes why a rank may be missing: a caller was refused. It changes nothing but what ranks log and the
    /// error for missing ranks.
    pub(super) fn note_refusal(&mut self, text: String) {
        if self.refusals.len() < MAX_REFUSALS && !self.refusals.contains(&text) {
            self.notices.push((self.peers.keys().copied().collect(), text.clone()));
            self.refusals.push(text);
        }
    }

    /// Notes why a rank may be missing: its connection could not be accepted, as when the process is out of
    /// descriptors.
    pub(super) fn note_accept_failure(&mut self, cause: &str) {
        if self.accept_failure.is_none() {
            self.accept_failure = Some(cause.to_owned());
            let text = format!("{} could not accept a connection ({cause})", self.host());
            self.notices.push((self.peers.keys().copied().collect(), text));
        }
    }

    /// What ranks are to log since the last call, and which ranks.
    pub(super) fn notices(&mut self) -> Vec<(Vec<Rank>, String)> {
        std::mem::take(&mut self.notices)
    }

    /// Why the rendezvous failed, if it did.
    pub(super) fn root_cause(&self) -> Option<&Error> {
        self.root_cause.as_ref()
    }

    /// The world size, once a rank has joined.
    pub(super) fn world(&self) -> Option<usize> {
        self.world
    }

    /// When the rendezvous fails if it is not complete by then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.map(|(at, _)| at)
    }

    /// The next time to call [`on_tick`](Self::on_tick).
    pub(super) fn next_tick(&self) -> Option<Instant> {
        self.deadline().into_iter().chain(self.report.map(|(at, _)| at)).min()
    }

    /// The rank and process of each joined peer, in rank order.
    pub(super) fn joined(&self) -> impl Iterator<Item = (Rank, &Process)> {
        self.peers.iter().map(|(rank, peer)| (*rank, &peer.process))
    }

    /// Where rank 0 runs a coordinator that can take the world over. `None` if it runs none, or if it is in
    /// this coordinator's process.
    pub(super) fn successor(&self) -> Option<Vec<SocketAddr>> {
        let first = self.peers.get(&0).filter(|first| first.process != self.host_process)?;
        Some(first.params.successor.clone()).filter(|addresses| !addresses.is_empty())
    }

    /// The joined peers, in rank order.
    pub(super) fn into_peers(self) -> Vec<JoinedPeer> {
        self.peers.into_values().collect()
    }

    /// Handles a hello.
    pub(super) fn join(&mut self, hello: Hello, now: Instant) -> JoinOutcome {
        let Hello { header, params } = hello;
        let is_late = self.root_cause.is_some();
        if !is_late {
            self.root_cause = self.validate(&header, params.as_ref());
        }
        // The rendezvous has failed if a caller claims a larger world, but its status must not have a row for
        // each of its ranks.
        self.world.get_or_insert(header.world.min(MAX_WORLD));
        // A rank that joins late, or tries again, does not shorten the time in which late ranks get the
        // error.
        if let Some(params) = &params
            && !is_late
        {
            let until = now + params.join_timeout;
            if self.deadline.is_none_or(|(at, _)| until < at) {
                self.deadline = Some((until, params.join_timeout));
            }
        }
        if self.root_cause.is_some() {
            return JoinOutcome::Failed;
        }
        // Parameters are missing only if the release differs, which `validate` rejects.
        let Some(params) = params else {
            return JoinOutcome::Malformed;
        };
        let process = header.process;
        self.peers.insert(header.rank, JoinedPeer { process, params });
        self.report.get_or_insert((now + FIRST_REPORT, FIRST_REPORT));
        self.notices.extend(self.refusals.iter().map(|refusal| (vec![header.rank], refusal.clone())));
        if self.peers.len() == header.world { JoinOutcome::Complete } else { JoinOutcome::Waiting }
    }

    /// Handles the end of a joined rank's connection. `cause` is a verb phrase such as `closed`.
    pub(super) fn on_disconnect(&mut self, rank: Rank, cause: &str) {
        let Some(peer) = self.peers.remove(&rank) else {
            return;
        };
        self.fail(
            ErrorKind::PeerLost,
            format!(
                "rank {rank} ({}) died or gave up before all ranks joined: its control connection {cause}",
                peer.process
            ),
        );
    }

    /// The rank has joined where the world moved to, so the end of its connection here is no failure.
    pub(super) fn on_moved(&mut self, rank: Rank) {
        self.peers.remove(&rank);
    }

    /// Ends the rendezvous for this reason, unless it has failed already.
    pub(super) fn fail_with(&mut self, error: &Error) {
        self.root_cause.get_or_insert_with(|| error.clone());
    }

    /// The longest time that a joined rank waits for an exchange.
    pub(super) fn longest_exchange(&self) -> Duration {
        self.peers.values().map(|peer| peer.params.exchange_timeout).max().unwrap_or_default()
    }

    /// Handles the passing of time.
    pub(super) fn on_tick(&mut self, now: Instant) {
        let (None, Some(world)) = (&self.root_cause, self.world) else {
            self.report = None;
            return;
        };
        let missing: Vec<Rank> = (0..world).filter(|rank| !self.peers.contains_key(rank)).collect();
        if let Some((_, since)) = self.report.filter(|(at, _)| now >= *at) {
            self.report = Some((now + 2 * since, 2 * since));
            let text =
                format!("waiting for {} ({} of {world} joined)", RankList::new(&missing), self.peers.len());
            // One rank of each node says it.
            let hosts: BTreeMap<&str, Rank> =
                self.peers.iter().rev().map(|(rank, peer)| (&*peer.process.host, *rank)).collect();
            self.notices.push((hosts.into_values().collect(), text));
        }
        let Some((_, timeout)) = self.deadline.filter(|(at, _)| now >= *at) else {
            return;
        };
        let accept_failure = self
            .accept_failure
            .as_ref()
            .map(|cause| format!("{} could not accept a connection ({cause})", self.host()));
        let obstacles: Vec<String> = self.refusals.iter().cloned().chain(accept_failure).collect();
        let obstacles = match obstacles.as_slice() {
            [] => String::new(),
            obstacles => format!("; meanwhile {}", obstacles.join(", and ")),
        };
        self.fail(
            ErrorKind::Rendezvous,
            format!(
                "{} of {world} did not join within {} (rendezvous at {}: check that they run and look for rank 0 there){obstacles}",
                RankList::new(&missing),
                seconds(timeout),
                self.location
            ),
        );
    }

    /// Description of the coordinator's process.
    fn host(&self) -> String {
        let host = &self.host_process;
        match self.peers.iter().find(|(_, peer)| peer.process == *host) {
            Some((rank, _)) => format!("the coordinator, in the process of rank {rank} ({host}),"),
            None => format!("the coordinator ({host})"),
        }
    }

    /// Cancels the rendezvous: the process that opened it gave it up.
    pub(super) fn cancel(&mut self) {
        self.fail(
            ErrorKind::Rendezvous,
            format!(
                "the rendezvous at {} was cancelled by its host process before all ranks joined",
                self.location
            ),
        );
    }

    fn fail(&mut self, kind: ErrorKind, message: String) {
        self.root_cause.get_or_insert_with(|| Error::new(kind, message));
    }

    /// What is wrong with a hello of this job, if anything.
    fn validate(&self, header: &HelloHeader, params: Option<&HelloParams>) -> Option<Error> {
        let HelloHeader { version, rank, world, process, .. } = header;
        let disagree = |message| Some(Error::disagreement(message));
        // The joined ranks agree, so the lowest one is representative.
        let first = self.peers.first_key_value();
        if **version != *VERSION {
            return disagree(format!(
                "rank {rank} ({process}) runs flexring {version}, and the rendezvous at {} runs {VERSION}: all ranks must \
                 run the same release",
                self.location
            ));
        }
        if rank >= world || *world > MAX_WORLD {
            return disagree(format!(
                "{process} claims rank {rank} of a world of {world}: ranks are numbered from 0, and a world has at \
                 most {MAX_WORLD}"
            ));
        }
        if let Some(failure) = params.and_then(|params| params.failure.clone()) {
            return Some(failure.context(format_args!("rank {rank} ({process})")));
        }
        let (first_rank, first) = first?;
        let expected = self.world.unwrap_or(*world);
        if *world != expected {
            return disagree(format!(
                "rank {rank} ({process}) expects a world of {world}, rank {first_rank} ({}) one of {expected}",
                first.process
            ));
        }
        if let Some(other) = self.peers.get(rank) {
            return Some(Error::rendezvous(format!(
                "two processes claim rank {rank}: {} and {process}; every process needs a rank of its own",
                other.process
            )));
        }
        difference(&first.params.settings, &params?.settings).map(|texts| {
            let [name, theirs, value] = texts.map(PeerText::from);
            Error::disagreement(format!(
                "rank {rank} ({process}) has {name}={value}, rank {first_rank} has {theirs}: set it to one value on all ranks"
            ))
        })
    }
}

/// The first setting in which two ranks differ: its name, the first rank's value and the other's.
fn difference<'a>(first: &'a [(String, String)], other: &'a [(String, String)]) -> Option<[&'a str; 3]> {
    fn value<'a>(settings: &'a [(String, String)], name: &str) -> &'a str {
        settings.iter().find(|(known, _)| known == name).map_or("no value", |(_, value)| value)
    }
    first
        .iter()
        .chain(other)
        .map(|(name, _)| [name.as_str(), value(first, name), value(other, name)])
        .find(|[_, ours, theirs]| ours != theirs)
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Purpose;
    use super::*;

    fn hello(rank: Rank, world: usize) -> Hello {
        Hello {
            header: HelloHeader {
                version: VERSION.into(),
                rank,
                world,
                process: Process::example(rank),
                purpose: Purpose::Join,
            },
            params: Some(HelloParams {
                settings: vec![("FLEXRING_SUBCHUNK".to_owned(), "512K".to_owned())],
                join_timeout: Duration::from_secs(60),
                exchange_timeout: Duration::from_secs(60),
                heartbeat: Duration::from_millis(500),
                successor: Vec::new(),
                failure: None,
            }),
        }
    }

    fn rendezvous() -> Rendezvous {
        Rendezvous::new("here:1".to_owned(), Process::example(0))
    }

    /// Lets ranks 2 and 0 of four join, then rank 3 with a changed hello, and returns the root cause.
    fn root_cause_with_third(change: impl FnOnce(&mut Hello)) -> Error {
        let mut rendezvous = rendezvous();
        let now = Instant::now();
        assert_eq!(rendezvous.join(hello(2, 4), now), JoinOutcome::Waiting);
        assert_eq!(rendezvous.join(hello(0, 4), now), JoinOutcome::Waiting);
        let mut third = hello(3, 4);
        change(&mut third);
        assert_eq!(rendezvous.join(third, now), JoinOutcome::Failed);
        // Ranks that join later get the same root cause.
        assert_eq!(rendezvous.join(hello(1, 4), now), JoinOutcome::Failed);
        rendezvous.root_cause().expect("a root cause").clone()
    }

    /// Counter-example: the size that the first caller claimed was kept, and a status then had a row for each
    /// of its ranks.
    #[test]
    fn a_world_that_is_too_large_fails_and_is_not_kept() {
        let mut rendezvous = rendezvous();
        assert_eq!(rendezvous.join(hello(0, 1 << 40), Instant::now()), JoinOutcome::Failed);
        assert!(rendezvous.world().is_some_and(|world| world <= MAX_WORLD));
    }

    #[test]
    fn ranks_join_in_any_order() {
        let mut rendezvous = rendezvous();
        let now = Instant::now();
        for rank in [3, 0, 2] {
            assert_eq!(rendezvous.join(hello(rank, 4), now), JoinOutcome::Waiting);
        }
        assert_eq!(rendezvous.join(hello(1, 4), now), JoinOutcome::Complete);
        let pids: Vec<u32> = rendezvous.into_peers().iter().map(|peer| peer.process.pid).collect();
        assert_eq!(pids, [100, 101, 102, 103]);
    }

    #[test]
    fn names_the_rank_whose_process_could_not_accept_connections() {
        for (joined, host) in [
            (2, "the coordinator (pid 100 on host h)"),
            (0, "the coordinator, in the process of rank 0 (pid 100 on host h),"),
        ] {
            let mut rendezvous = rendezvous();
            let now = Instant::now();
            rendezvous.note_accept_failure("too many open files");
            assert_eq!(rendezvous.join(hello(joined, 4), now), JoinOutcome::Waiting);
            rendezvous.on_tick(now + Duration::from_secs(60));
            let error = rendezvous.root_cause().expect("ranks are missing").message();
            let expected = format!("; meanwhile {host} could not accept a connection (too many open files)");
            assert!(error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn names_the_rank_that_differs_and_the_difference() {
        let root_cause = root_cause_with_third(|hello| {
            hello.params.as_mut().expect("params").settings[0].1 = "1M".to_owned();
        });
        assert_eq!(
            root_cause.message(),
            "rank 3 (pid 103 on host h) has FLEXRING_SUBCHUNK=1M, rank 0 has 512K: set it to one value on all ranks"
        );
        let root_cause = root_cause_with_third(|hello| hello.header.world = 5);
        assert_eq!(
            root_cause.message(),
            "rank 3 (pid 103 on host h) expects a world of 5, rank 0 (pid 100 on host h) one of 4"
        );
        let root_cause = root_cause_with_third(|hello| {
            hello.header.version = "0.0.9".into();
            hello.params = None;
        });
        assert!(root_cause.message().contains("runs flexring 0.0.9"), "{root_cause}");
        let root_cause = root_cause_with_third(|hello| hello.header.rank = 4);
        assert!(root_cause.message().contains("rank 4 of a world of 4"), "{root_cause}");
    }

    #[test]
    fn names_both_processes_with_the_same_rank() {
        let root_cause = root_cause_with_third(|hello| hello.header.rank = 2);
        assert_eq!(
            root_cause.message(),
            "two processes claim rank 2: pid 102 on host h and pid 103 on host h; every process needs a rank \
             of its own"
        );
    }

    #[test]
    fn earliest_deadline_counts_and_missing_ranks_are_named() {
        let mut rendezvous = rendezvous();
        let start = Instant::now();
        for rank in [0, 1, 3, 4, 6, 7] {
            rendezvous.join(hello(rank, 8), start);
        }
        let deadline = rendezvous.deadline().expect("a deadline");
        assert_eq!(deadline, start + Duration::from_secs(60));
        rendezvous.on_tick(deadline - Duration::from_millis(1));
        assert_eq!(rendezvous.root_cause(), None);
        rendezvous.on_tick(deadline);
        let root_cause = rendezvous.root_cause().expect("a root cause");
        assert_eq!(root_cause.kind(), ErrorKind::Rendezvous);
        assert!(
            root_cause
                .message()
                .starts_with("ranks 2 and 5 of 8 did not join within 60 s (rendezvous at here:1"),
            "{root_cause}"
        );
    }

    #[test]
    fn one_rank_of_each_node_says_for_which_ranks_it_waits() {
        let mut rendezvous = rendezvous();
        let start = Instant::now();
        for (rank, host) in [(3, "a"), (1, "a"), (4, "b")] {
            let mut hello = hello(rank, 6);
            hello.header.process.host = host.into();
            assert_eq!(rendezvous.join(hello, start), JoinOutcome::Waiting);
        }
        let first = rendezvous.next_tick().expect("a time");
        assert_eq!(first, start + FIRST_REPORT);
        rendezvous.on_tick(first - Duration::from_millis(1));
        assert_eq!(rendezvous.notices(), []);
        rendezvous.on_tick(first);
        let text = "waiting for ranks 0, 2 and 5 (3 of 6 joined)".to_owned();
        assert_eq!(rendezvous.notices(), [(vec![1, 4], text)]);
        assert_eq!(rendezvous.next_tick(), Some(first + 2 * FIRST_REPORT));
    }

    #[test]
    fn ranks_that_wait_and_that_join_later_hear_who_was_refused() {
        let mut rendezvous = rendezvous();
        let now = Instant::now();
        rendezvous.join(hello(2, 4), now);
        for number in [1, 1, 2, 3, 4] {
            rendezvous.note_refusal(format!("caller {number} was refused"));
        }
        let refused =
            |rank: Rank| [1, 2, 3].map(|number| (vec![rank], format!("caller {number} was refused")));
        assert_eq!(rendezvous.notices(), refused(2));
        rendezvous.join(hello(0, 4), now);
        assert_eq!(rendezvous.notices(), refused(0));
    }

    #[test]
    fn a_rank_that_cannot_take_part_fails_all_with_its_reason() {
        let root_cause = root_cause_with_third(|hello| {
            let params = hello.params.as_mut().expect("params");
            params.settings.clear();
            params.failure = Some(Error::invalid_setting("FLEXRING_SLOTS=\"x\" cannot be used"));
        });
        assert_eq!(root_cause.kind(), ErrorKind::InvalidSetting);
        assert_eq!(root_cause.message(), "rank 3 (pid 103 on host h): FLEXRING_SLOTS=\"x\" cannot be used");
    }

    #[test]
    fn refused_callers_change_only_the_error_for_missing_ranks() {
        let mut rendezvous = rendezvous();
        let now = Instant::now();
        for number in [1, 1, 2, 3, 4, 5] {
            rendezvous.note_refusal(format!("caller {number} was refused"));
        }
        assert_eq!((rendezvous.world(), rendezvous.deadline(), rendezvous.root_cause()), (None, None, None));
        assert_eq!(rendezvous.join(hello(0, 2), now), JoinOutcome::Waiting);
        rendezvous.on_tick(now + Duration::from_secs(60));
        let message = rendezvous.root_cause().expect("a root cause").message().to_owned();
        let expected = "meanwhile caller 1 was refused, and caller 2 was refused, and caller 3 was refused";
        assert!(message.starts_with("rank 1 of 2 did not join") && message.ends_with(expected), "{message}");
    }

    #[test]
    fn a_rank_that_disconnects_early_fails_the_rendezvous() {
        let mut rendezvous = rendezvous();
        let now = Instant::now();
        rendezvous.join(hello(1, 3), now);
        rendezvous.on_disconnect(0, "closed");
        assert_eq!(rendezvous.root_cause(), None);
        rendezvous.on_disconnect(1, "closed");
        assert!(
            rendezvous
                .root_cause()
                .is_some_and(|root_cause| root_cause.message().contains("rank 1 (pid 101 on host h) died"))
        );
    }
}
