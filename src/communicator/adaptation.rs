//! Measures the links of nodes during a job, so that plans can be made again when one of them changes
//! (`FLEXRING_ADAPT`).
//!
//! Owns the measurements, the small calls by which ranks agree on them, and the statistics. Must not know
//! when plans change ([`plan::adaptation`](crate::plan::adaptation)), nor how plans are made or calls run.
//!
//! How the data go: each rank times its calls ─> after four calls, an all-reduce of the minimum ─>
//! `Adaptation::end_window`, equal on all ranks ─> sometimes a probe: pairs of nodes exchange messages, and
//! an all-reduce of the maximum ─> `Adaptation::end_probe`, equal on all ranks ─> the runner plans for the
//! changed links. All of that comes before the next call that counts.

use super::checked_call::{CallValidator, CheckedCall};
use super::user_memory::UserMemory;
use crate::call::Collective;
use crate::config::Config;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::executor::PeerMessage;
use crate::memory::Buffer;
use crate::plan::adaptation::{
    Adaptation, EXCHANGES, FEWEST_NODES, LONGEST_MESSAGE, LinkChange, SHORTEST, WINDOW,
};
use crate::plan::node_pairs::NodePair;
use crate::plan::selection;
use crate::plan::topology::{Topology, bandwidth_label};
use crate::plan::traffic::Traffic;
use crate::plan::tuning::{ClusterIdentity, ClusterNode};
use crate::rank::{Rank, RankList};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that a pair exchanges before it is timed: the two ranks come at different times, and TCP begins
/// slowly.
const WARM_UP: usize = 256 << 10;

/// Runs a call of this module, whose memory is its own.
pub(super) type RunCall<'a> = &'a mut dyn FnMut(&CheckedCall) -> Result<()>;

/// What a communicator with `FLEXRING_ADAPT=1` has found out about its links and its calls.
///
/// ```no_run
/// # fn main() -> flexring::Result<()> {
/// let comm = flexring::Communicator::from_env()?;
/// if let Some(statistics) = comm.adaptation_statistics() {
///     println!("planned {} times again, now {}", statistics.replans, statistics.algorithm);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AdaptationStatistics {
    /// How often plans were made again.
    pub replans: u64,
    /// Sequence number of the first call with the current plans; 0 if these are the first ones.
    pub replanned_at: u64,
    /// The algorithm for long vectors.
    pub algorithm: String,
    /// The nodes, by number.
    pub nodes: Vec<NodeLinkStatistics>,
    /// All-reduces with the current plans, of vectors on the host from 1 MiB on, by length.
    pub calls: Vec<CallTimes>,
}

/// The link of a node, in [`AdaptationStatistics`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NodeLinkStatistics {
    /// Its number, host and ranks.
    pub name: String,
    /// Bits per second in the first plans, on the scale of the measured rates; `None` before the first
    /// measurement.
    pub first: Option<u64>,
    /// Bits per second in the current plans.
    pub current: Option<u64>,
}

/// The time of all-reduces whose lengths have the same power of two, in [`AdaptationStatistics`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CallTimes {
    /// Length in bytes of the last of them.
    pub bytes: u64,
    /// Their number, apart from the last few, on whose times the ranks have not agreed yet.
    pub calls: u64,
    /// The time of the last of them on the rank that entered it last. In microseconds where it is serialized.
    #[serde(rename = "measured_us", serialize_with = "microseconds")]
    pub measured: Duration,
    /// What the current plan takes by the measured bandwidths of links and the latency of its messages;
    /// `None` before the first measurement, and in worlds of more than 256 ranks. In microseconds where it is
    /// serialized.
    #[serde(rename = "predicted_us", serialize_with = "microseconds_if_known")]
    pub predicted: Option<Duration>,
}

fn microseconds<S: Serializer>(time: &Duration, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e6)
}

#[allow(clippy::ref_option, reason = "serde gives a reference to the field")]
fn microseconds_if_known<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64() * 1e6).serialize(serializer)
}

/// Statistics that the user's threads read.
pub(super) type SharedStatistics = Arc<Mutex<AdaptationStatistics>>;

/// A rank's part in adapting the plans.
pub(super) struct LinkAdaptation {
    decision: Adaptation,
    config: Config,
    rank: Rank,
    /// With the bandwidths of the first plans.
    topology: Topology,
    /// By node.
    ranks: Vec<Vec<Rank>>,
    /// What ranks agree on.
    words: Buffer<u64>,
    sent: Buffer<u8>,
    received: Buffer<u8>,
    /// Of the current plans; `None` if there are too many ranks.
    traffic: Option<Traffic>,
    statistics: SharedStatistics,
    /// Replaces measured times, in tests.
    pub measured_instead: Option<MeasuredInstead>,
}

/// A time in place of a measured one, in nanoseconds.
pub(super) type MeasuredInstead = Box<dyn FnMut(MeasuredTime) -> u64 + Send>;

/// What a time belongs to.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests read it"))]
pub(super) enum MeasuredTime {
    /// A call with this many bytes.
    Call(usize),
    /// Messages of this many bytes between two nodes.
    Pair(NodePair, usize),
}

/// Why plans cannot be adapted, as a clause; `None` if they can.
fn obstacle(config: &Config, topology: &Topology) -> Option<String> {
    if !selection::is_automatic(config) {
        return Some("the settings name an algorithm, a lowering, dimensions or a plan file".to_owned());
    }
    let nodes = topology.nodes();
    (nodes < FEWEST_NODES).then(|| {
        format!("the slow link of {nodes} nodes cannot be distinguished from the other one: there must be {FEWEST_NODES} nodes")
    })
}

/// Whether the time of a call depends on links. Equal on all ranks, which compare their calls.
pub(super) fn counts(checked: &CheckedCall) -> bool {
    checked.collective == Collective::AllReduce && checked.is_on_host() && checked.whole_bytes() >= SHORTEST
}

impl LinkAdaptation {
    /// The state before the first call; `None` if the settings do not ask for it, or if plans cannot be
    /// adapted, which rank 0 logs. `topology` is what the first plans were made for.
    ///
    /// # Errors
    /// `System` if there is too little memory.
    pub(super) fn new(
        config: &Config,
        topology: &Topology,
        cluster: &ClusterIdentity,
        rank: Rank,
        memory: &UserMemory,
    ) -> Result<Option<Self>> {
        if !config.adapt.0 {
            return Ok(None);
        }
        if let Some(reason) = obstacle(config, topology) {
            if rank == 0 {
                log::warn!("FLEXRING_ADAPT=1 has no effect: {reason}");
            }
            return Ok(None);
        }
        let Some(decision) = Adaptation::new(topology) else { return Ok(None) };
        let pairs = decision.rounds().iter().flatten().count();
        let named = |(number, node): (usize, &ClusterNode)| NodeLinkStatistics {
            name: format!("node {number} ({}, {})", node.host, RankList::new(&node.ranks)),
            ..NodeLinkStatistics::default()
        };
        let nodes = cluster.nodes.iter().enumerate().map(named).collect();
        Ok(Some(Self {
            decision,
            config: config.clone(),
            rank,
            topology: topology.clone(),
            ranks: topology.ranks_of_nodes(),
            words: memory.alloc(pairs.max(WINDOW))?,
            sent: memory.alloc(LONGEST_MESSAGE)?,
            received: memory.alloc(LONGEST_MESSAGE)?,
            traffic: None,
            statistics: Arc::new(Mutex::new(AdaptationStatistics {
                nodes,
                ..AdaptationStatistics::default()
            })),
            measured_instead: None,
        }))
    }

    /// The statistics, which change from now on.
    pub(super) fn statistics(&self) -> SharedStatistics {
        Arc::clone(&self.statistics)
    }

    /// Counts a call that [`counts`].
    pub(super) fn record(&mut self, bytes: usize, time: Duration) {
        let time = self.measured(MeasuredTime::Call(bytes), time);
        self.decision.record(bytes, time);
    }

    /// Whether the ranks must agree before the next call that counts. Equal on all ranks.
    pub(super) fn is_due(&self) -> bool {
        self.decision.is_window_complete()
    }

    /// Agrees with the other ranks on what was measured, and measures the links if that is needed. Returns
    /// the changed links, equal on all ranks, if there are any.
    ///
    /// # Errors
    /// Those of `run`.
    pub(super) fn adapt(
        &mut self,
        validator: CallValidator<'_>,
        run: RunCall<'_>,
    ) -> Result<Option<LinkChange>> {
        let window = self.decision.window().to_vec();
        let own: Vec<u64> = window.iter().map(|(_, time)| *time).collect();
        let agreed = self.agree(&own, ReduceOp::Min, validator, run)?;
        let must_probe = self.decision.end_window(&agreed);
        let change = if must_probe {
            let own = self.probe(validator, run)?;
            let agreed = self.agree(&own, ReduceOp::Max, validator, run)?;
            self.decision.end_probe(&agreed)
        } else {
            None
        };
        self.note(&window, &agreed);
        Ok(change)
    }

    /// The settings that plans are made with.
    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// The topology with the links as they are now; `None` if they are as in the first plans.
    pub(super) fn changed_topology(&self) -> Option<Topology> {
        let factors = self.decision.factors();
        let is_changed = factors.iter().any(|factor| (factor - 1.0).abs() > f64::EPSILON);
        is_changed.then(|| self.topology.with_scaled_nodes(factors))
    }

    /// Notes the algorithm and the traffic of the plan of long vectors. `call` is the first one that uses it.
    pub(super) fn note_plan(
        &mut self,
        algorithm: &str,
        traffic: impl FnOnce(&Topology) -> Option<Traffic>,
        call: Option<u64>,
    ) {
        self.traffic = traffic(&self.topology);
        let mut statistics = lock(&self.statistics);
        algorithm.clone_into(&mut statistics.algorithm);
        if let Some(call) = call {
            statistics.replans += 1;
            statistics.replanned_at = call;
            statistics.calls.clear();
        }
        drop(statistics);
        self.note_links();
    }

    /// The changed nodes with their old and new rates, as a clause.
    pub(super) fn describe(&self, change: &LinkChange) -> String {
        let statistics = lock(&self.statistics);
        let label = |rate: f64| {
            // Three digits are as many as a measurement has.
            let unit = 10f64.powf((rate.max(1.0).log10().floor() - 2.0).max(0.0));
            bandwidth_label(((rate / unit).round() * unit) as u64)
        };
        let nodes = change.nodes.iter().map(|changed| {
            let name = statistics.nodes.get(changed.node).map_or("a node", |node| &node.name);
            format!(
                "the link of {name} carries {}bit/s instead of {}bit/s",
                label(changed.after),
                label(changed.before)
            )
        });
        nodes.collect::<Vec<_>>().join(", ")
    }

    /// The reduction of all ranks' `own`, which have equal lengths.
    fn agree(
        &mut self,
        own: &[u64],
        op: ReduceOp,
        validator: CallValidator<'_>,
        run: RunCall<'_>,
    ) -> Result<Vec<u64>> {
        self.words[..own.len()].copy_from_slice(own);
        let piece = self.words.piece().narrow(0, size_of_val(own));
        run(&validator.all_reduce(piece, piece, DType::U64, op)?)?;
        Ok(self.words[..own.len()].to_vec())
    }

    /// Exchanges messages with ranks of other nodes. Returns this rank's nanoseconds for each pair of nodes,
    /// 0 for those that it is not in.
    fn probe(&mut self, validator: CallValidator<'_>, run: RunCall<'_>) -> Result<Vec<u64>> {
        let (bytes, rounds) = (self.decision.message(), self.decision.rounds().to_vec());
        let mut times = Vec::new();
        for pair in rounds.into_iter().flatten() {
            let Some(peer) = self.peer_in(pair) else {
                times.push(0);
                continue;
            };
            self.exchange(peer, WARM_UP, validator, run)?;
            let mut shortest = u64::MAX;
            for _ in 0..EXCHANGES {
                let begun = Instant::now();
                self.exchange(peer, bytes, validator, run)?;
                shortest = shortest.min(self.measured(MeasuredTime::Pair(pair, bytes), begun.elapsed()));
            }
            times.push(shortest);
        }
        Ok(times)
    }

    /// The rank that this one exchanges messages with when the links of a pair are measured.
    fn peer_in(&self, (one, other): NodePair) -> Option<Rank> {
        let place = |node: usize| {
            let place = self.ranks[node].iter().position(|rank| *rank == self.rank);
            place.filter(|place| *place < self.decision.lanes())
        };
        place(one)
            .map(|place| self.ranks[other][place])
            .or_else(|| place(other).map(|place| self.ranks[one][place]))
    }

    fn exchange(
        &self,
        peer: Rank,
        bytes: usize,
        validator: CallValidator<'_>,
        run: RunCall<'_>,
    ) -> Result<()> {
        let message = |is_send, buffer: &Buffer<u8>| PeerMessage {
            is_send,
            peer,
            dtype: DType::U8,
            piece: buffer.piece().narrow(0, bytes),
        };
        run(&validator.group(vec![message(true, &self.sent), message(false, &self.received)])?)
    }

    /// Notes a window with its agreed times, and the links.
    fn note(&mut self, window: &[(usize, u64)], agreed: &[u64]) {
        let mut statistics = lock(&self.statistics);
        let mut by_class: BTreeMap<u32, CallTimes> =
            statistics.calls.drain(..).map(|times| (times.bytes.ilog2(), times)).collect();
        for ((bytes, _), time) in window.iter().zip(agreed) {
            let times = by_class.entry(bytes.ilog2()).or_default();
            times.bytes = *bytes as u64;
            times.calls += 1;
            times.measured = Duration::from_nanos(*time);
        }
        statistics.calls = by_class.into_values().collect();
        drop(statistics);
        self.note_links();
    }

    /// Notes the rates of the links, and what they predict.
    fn note_links(&mut self) {
        let Some(scale) = self.decision.scale() else { return };
        let mut statistics = lock(&self.statistics);
        let vertices = self.topology.node_vertices();
        for ((node, vertex), factor) in
            statistics.nodes.iter_mut().zip(&vertices).zip(self.decision.factors())
        {
            let first = self.topology.vertices()[*vertex].uplink.bandwidth as f64 * scale;
            (node.first, node.current) = (Some(first as u64), Some((first * factor) as u64));
        }
        let real = self.topology.with_scaled_nodes(self.decision.factors());
        let latency = |vertex: &usize| self.topology.vertices()[*vertex].uplink.latency;
        let hop = 2e-9 * vertices.iter().map(latency).max().unwrap_or(0) as f64;
        let traffic = self.traffic.as_ref();
        let model = traffic.and_then(|traffic| traffic.busiest(&real).map(|link| (traffic.hops(), link)));
        for times in &mut statistics.calls {
            times.predicted = model.map(|(hops, link)| {
                let bytes = times.bytes as f64 * link.seconds_per_byte / scale;
                Duration::from_secs_f64(bytes + f64::from(hops) * hop)
            });
        }
    }

    /// A measured time in nanoseconds, unless something else replaces it.
    fn measured(&mut self, what: MeasuredTime, time: Duration) -> u64 {
        let measured = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.measured_instead.as_mut().map_or(measured, |instead| instead(what))
    }
}

/// A copy of the statistics.
pub(super) fn read(statistics: &SharedStatistics) -> AdaptationStatistics {
    lock(statistics).clone()
}

fn lock(statistics: &SharedStatistics) -> MutexGuard<'_, AdaptationStatistics> {
    statistics.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Communicator;
    use crate::bootstrap::{Identity, create_unique_id};
    use crate::config::Switch;

    const RANKS: usize = 4;
    /// Calls before the link of node 2 slows down, and before it recovers.
    const SLOW: usize = 6;
    const RECOVERED: usize = 30;
    const CALLS: usize = 60;

    fn config() -> Config {
        Config { adapt: Switch(true), timeout: Duration::from_secs(60), ..Config::default() }
    }

    /// Times over links of which that of node 2 is slow during some of the calls. Those of ranks differ a
    /// little.
    fn times(rank: Rank) -> MeasuredInstead {
        let mut calls = 0;
        Box::new(move |measured| {
            let is_slow = (SLOW..RECOVERED).contains(&calls);
            let own = 1.0 + rank as f64 / 100.0;
            let nanoseconds = match measured {
                MeasuredTime::Call(bytes) => {
                    calls += 1;
                    // As long as 64 MiB take.
                    64.0 * bytes as f64 * if is_slow { 20.0 } else { 10.0 }
                }
                MeasuredTime::Pair((one, other), bytes) => {
                    bytes as f64 * if is_slow && (one == 2 || other == 2) { 20.0 } else { 8.0 }
                }
            };
            (nanoseconds * own) as u64
        })
    }

    /// Calls and checks sums. Returns the statistics after the link became slow, and after it recovered.
    fn reduce(comm: &Communicator) -> [AdaptationStatistics; 2] {
        let rank = comm.rank();
        if let Some(adaptation) = &mut comm.runner.lock_state().adaptation {
            adaptation.measured_instead = Some(times(rank));
        }
        let mut slow = None;
        for call in 0..CALLS {
            let mut vector: Vec<u32> = (0..SHORTEST as u32 / 4).map(|at| at + rank as u32).collect();
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            assert!(vector.iter().zip(0u32..).all(|(sum, at)| *sum == 4 * at + 6), "call {call}");
            // Short calls, and those of other kinds, come between them.
            let mut short = [rank as u32; 10];
            comm.all_reduce(&mut short, ReduceOp::Max).expect("a maximum");
            assert_eq!(short, [3; 10]);
            if call + 1 == RECOVERED {
                slow = comm.adaptation_statistics();
            }
        }
        [slow.expect("statistics"), comm.adaptation_statistics().expect("statistics")]
    }

    fn check(statistics: &[[AdaptationStatistics; 2]]) {
        assert!(statistics.iter().all(|of_rank| *of_rank == statistics[0]), "{statistics:?}");
        let [slow, recovered] = &statistics[0];
        assert_eq!((slow.replans, &slow.algorithm[..]), (1, "weighted"));
        // Two calls and a few of the adaptation for each of the first 26.
        assert!(slow.replanned_at < 70, "{}", slow.replanned_at);
        let share = |node: &NodeLinkStatistics| {
            let rates = node.current.zip(node.first);
            rates.map(|(current, first)| (current as f64 / first as f64 * 10.0).round())
        };
        assert_eq!(
            slow.nodes.iter().map(share).collect::<Vec<_>>(),
            [Some(10.0), Some(10.0), Some(4.0), Some(10.0)]
        );
        assert_eq!((recovered.replans, &recovered.algorithm[..]), (2, "ring"));
        assert_eq!(recovered.nodes.iter().map(share).collect::<Vec<_>>(), [Some(10.0); 4]);
        let [times] = &recovered.calls[..] else { panic!("{:?}", recovered.calls) };
        assert_eq!((times.bytes, times.calls % WINDOW as u64), (SHORTEST as u64, 0));
        assert!((1..=(CALLS - RECOVERED) as u64).contains(&times.calls), "{times:?}");
        assert!(times.predicted.is_some_and(|predicted| predicted > Duration::from_millis(10)), "{times:?}");
    }

    #[test]
    fn ranks_that_share_memory_change_their_plans_at_the_same_call() {
        let config = Config { topology: Some("1+1+1+1".to_owned()), ..config() };
        let comms = Communicator::local_with(&config, RANKS).expect("four ranks");
        let statistics: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = comms.iter().map(|comm| scope.spawn(move || reduce(comm))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        check(&statistics);
    }

    #[test]
    fn ranks_of_several_nodes_change_their_plans_at_the_same_call() {
        let id = create_unique_id(&config()).expect("an id");
        let statistics: Vec<_> = std::thread::scope(|scope| {
            let run = |rank: Rank| {
                let identity = Identity::from_unique_id(RANKS, &id, rank).expect("an identity");
                let config = Config { node: Some(format!("n{rank}")), ..config() };
                reduce(&Communicator::with_config(&config, &identity).expect("a communicator"))
            };
            let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        check(&statistics);
    }

    #[test]
    fn settings_that_name_a_plan_and_too_few_nodes_are_obstacles() {
        let (three, two) = (Topology::from_names(&["a", "b", "c"]), Topology::from_names(&["a", "b", "b"]));
        assert_eq!(obstacle(&config(), &three), None);
        assert!(obstacle(&config(), &two).is_some_and(|reason| reason.contains("3 nodes")));
        let ring = Config { algo: crate::config::Algorithm::Ring, ..config() };
        assert!(obstacle(&ring, &three).is_some_and(|reason| reason.contains("name an algorithm")));
    }
}
