//! When plans are made again because the links of nodes have changed.
//!
//! Owns the decision: it is a pure function of measured times that all ranks have agreed on, so all ranks
//! decide alike. Must not know how times are measured, nor how ranks agree on them.
//!
//! # How it decides
//!
//! Calls are counted in windows of [`WINDOW`]. After each window the ranks agree on the time of each of its
//! calls. If the median of a window differs from what calls of these lengths took after the plan was made,
//! the links are probed: pairs of nodes exchange messages, each node with one other at a time. The rate of a
//! node is that of its fastest pair, because a pair is as slow as the slower of its two nodes. Rates are
//! compared with the bandwidths in the topology. Only ratios matter to planners, so the scale is that of the
//! median node, and a node's *factor* is its rate on that scale: 1 if it differs by little.
//!
//! Factors change only if two probes in a row, with a window of calls between them, agree. A factor other
//! than 1 returns to 1 only when the rate is well within what keeps a factor at 1. Probes that change nothing
//! become rarer. Now and then links are probed in any case, because a change may not show in the times of
//! calls.

use super::node_pairs::{self, NodePair};
use super::topology::Topology;

/// Calls of a window.
pub const WINDOW: usize = 4;

/// Length in bytes of the shortest vectors whose calls count: the time of shorter ones depends on more than
/// links.
pub const SHORTEST: usize = 1 << 20;

/// Longest message of a probe, in bytes.
pub const LONGEST_MESSAGE: usize = 4 << 20;

/// Messages that a pair exchanges in a probe, one after the other. The fastest counts, because other programs
/// may delay some.
pub const EXCHANGES: u32 = 3;

/// Fewest nodes for which probes can identify a slow link: two nodes have one pair.
pub const FEWEST_NODES: usize = 3;

/// Most rounds of a probe.
const MOST_ROUNDS: usize = 8;

/// Length of the first messages, and shortest later ones, in bytes.
const SHORTEST_MESSAGE: usize = 256 << 10;

/// Time of a message at the rate of the median node. With three messages of each pair a probe of four nodes
/// takes about 0.1 s.
const MESSAGE_SECONDS: f64 = 0.008;

/// Ratio of times from which on the links are probed.
const CHANGED_TIME: f64 = 1.2;

/// A rate that differs from the expected one by this ratio, in either direction, changes the factor.
const CHANGED_RATE: f64 = 1.25;

/// A changed factor returns to 1 when the ratio is below this.
const RESTORED_RATE: f64 = 1.1;

/// Shortest time of calls before the next probe, as a multiple of the last one's time. Doubled by each probe
/// that changes nothing.
const PATIENCE: u64 = 5;

/// Time of calls after which the links are probed in any case. So probes that change nothing take 0.5 % of
/// the time.
const MOST_PATIENCE: u64 = 200;

/// Classes of lengths: powers of two.
const CLASSES: usize = usize::BITS as usize;

/// By class of lengths, nanoseconds per byte.
type ClassTimes = [Option<f64>; CLASSES];

/// The state of the decision, equal on all ranks apart from this rank's own times of the current window.
#[derive(Clone, Debug)]
pub struct Adaptation {
    /// By node, its bandwidth in the topology in bits per second.
    nominal: Vec<f64>,
    /// By node, the factor in the current plans.
    factors: Vec<f64>,
    /// What the last probe found, if it is to be confirmed.
    suspected: Option<Vec<f64>>,
    /// Ratio of measured rates to nominal ones; `None` before the first probe.
    scale: Option<f64>,
    /// Lengths of the window's calls, and this rank's times in nanoseconds.
    window: Vec<(usize, u64)>,
    /// By class of lengths, nanoseconds per byte with the current plans.
    usual: ClassTimes,
    /// By class of lengths, nanoseconds per byte in the last window.
    latest: ClassTimes,
    /// Nanoseconds of calls since the last probe, and of that probe.
    since_probe: u64,
    probe_cost: u64,
    patience: u64,
    /// Ranks of each node that take part in a probe.
    lanes: usize,
    rounds: Vec<Vec<NodePair>>,
    message: usize,
}

/// What a probe has changed.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkChange {
    /// The nodes whose factors have changed.
    pub nodes: Vec<ChangedNode>,
}

/// A node whose link has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChangedNode {
    /// Its number.
    pub node: usize,
    /// What the previous plans assumed, in bits per second.
    pub before: f64,
    /// What the next plans assume.
    pub after: f64,
}

impl Adaptation {
    /// The state before the first call. `None` if there are too few nodes.
    #[must_use]
    pub fn new(topology: &Topology) -> Option<Self> {
        let nodes = topology.nodes();
        if nodes < FEWEST_NODES {
            return None;
        }
        let bandwidth = |vertex: usize| topology.vertices()[vertex].uplink.bandwidth as f64;
        let rounds = node_pairs::rounds(nodes, MOST_ROUNDS);
        Some(Self {
            nominal: topology.node_vertices().into_iter().map(bandwidth).collect(),
            factors: vec![1.0; nodes],
            suspected: None,
            scale: None,
            window: Vec::with_capacity(WINDOW),
            usual: [None; CLASSES],
            latest: [None; CLASSES],
            since_probe: 0,
            probe_cost: 0,
            patience: PATIENCE,
            lanes: topology.ranks_of_nodes().iter().map(Vec::len).min().unwrap_or(1),
            rounds,
            message: SHORTEST_MESSAGE,
        })
    }

    /// Counts a call of `bytes` bytes that took this rank so many nanoseconds.
    pub fn record(&mut self, bytes: usize, nanoseconds: u64) {
        self.window.push((bytes, nanoseconds));
    }

    /// Whether a window is complete, so that the ranks must agree on its times.
    #[must_use]
    pub fn is_window_complete(&self) -> bool {
        self.window.len() >= WINDOW
    }

    /// Lengths of the window's calls, and this rank's times in nanoseconds.
    #[must_use]
    pub fn window(&self) -> &[(usize, u64)] {
        &self.window
    }

    /// Ends a window with the times that the ranks have agreed on: for each call the shortest of all ranks,
    /// because the others waited for ranks that came late. Whether the links must be probed now.
    pub fn end_window(&mut self, agreed: &[u64]) -> bool {
        let samples: Vec<(usize, f64)> = self.window.iter().zip(agreed).map(class_and_time).collect();
        self.window.clear();
        self.since_probe = agreed.iter().fold(self.since_probe, |sum, time| sum.saturating_add(*time));
        self.latest = [None; CLASSES];
        for (class, _) in &samples {
            let of_class = samples.iter().filter(|(other, _)| other == class).map(|(_, time)| *time);
            self.latest[*class] = median(of_class.collect());
        }
        let ratio = |(class, time): &(usize, f64)| self.usual[*class].map(|usual| time / usual);
        let changed = median(samples.iter().filter_map(ratio).collect())
            .is_some_and(|ratio| !within(ratio, CHANGED_TIME));
        for (usual, latest) in self.usual.iter_mut().zip(self.latest) {
            *usual = usual.or(latest);
        }
        let waited = |patience: u64| self.since_probe >= self.probe_cost.saturating_mul(patience);
        let wanted = changed || self.suspected.is_some() || self.scale.is_none() || waited(MOST_PATIENCE);
        // A suspicion is confirmed or dropped by the next probe.
        wanted && (self.suspected.is_some() || waited(self.patience))
    }

    /// The pairs of nodes that exchange messages in a probe, by round.
    #[must_use]
    pub fn rounds(&self) -> &[Vec<NodePair>] {
        &self.rounds
    }

    /// Ranks of each node that exchange messages at the same time: the first ones of each.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Length in bytes of the message that each of these ranks sends to its peer in a round.
    #[must_use]
    pub fn message(&self) -> usize {
        self.message
    }

    /// Ends a probe with the nanoseconds of a message of each pair, in the order of [`rounds`](Self::rounds),
    /// that the ranks have agreed on: the longest of the ranks of the pair. Returns the changed nodes if
    /// [`factors`](Self::factors) have changed.
    pub fn end_probe(&mut self, agreed: &[u64]) -> Option<LinkChange> {
        let mut rates = vec![0f64; self.nominal.len()];
        let bits = 8.0 * (self.lanes * self.message) as f64;
        for ((one, other), time) in self.rounds.iter().flatten().zip(agreed).filter(|(_, time)| **time > 0) {
            let rate = bits * 1e9 / *time as f64;
            rates[*one] = rates[*one].max(rate);
            rates[*other] = rates[*other].max(rate);
        }
        let longest = |round: &[u64]| round.iter().max().copied().unwrap_or(0);
        let mut rest = agreed;
        self.probe_cost = 0;
        for round in &self.rounds {
            let (times, later) = rest.split_at(round.len().min(rest.len()));
            let cost = longest(times).saturating_mul(EXCHANGES.into());
            (self.probe_cost, rest) = (self.probe_cost.saturating_add(cost), later);
        }
        self.since_probe = 0;
        let ratios = rates.iter().zip(&self.nominal).map(|(rate, nominal)| rate / nominal);
        let scale = median(ratios.clone().filter(|ratio| *ratio > 0.0).collect())?;
        let typical = median(rates.iter().copied().filter(|rate| *rate > 0.0).collect()).unwrap_or(0.0);
        let per_lane = typical / 8.0 / self.lanes as f64;
        self.message =
            ((per_lane * MESSAGE_SECONDS) as usize).clamp(SHORTEST_MESSAGE, LONGEST_MESSAGE) / 4096 * 4096;
        let is_first = self.scale.is_none();
        let previous_scale = self.scale.replace(scale).unwrap_or(scale);
        let factor = |(ratio, current): (f64, &f64)| {
            let (factor, keeps_one) = (ratio / scale, (*current - 1.0).abs() < f64::EPSILON);
            let bound = if keeps_one { CHANGED_RATE } else { RESTORED_RATE };
            match factor {
                // A node of which no pair was measured.
                0.0 => *current,
                _ if within(factor, bound) => 1.0,
                _ => factor,
            }
        };
        let found: Vec<f64> = ratios.zip(&self.factors).map(factor).collect();
        if alike(&found, &self.factors) {
            self.suspected = None;
            self.patience = if is_first { PATIENCE } else { (self.patience * 2).min(MOST_PATIENCE) };
            // What calls take now is usual, whatever the cause.
            for (usual, latest) in self.usual.iter_mut().zip(self.latest) {
                *usual = latest.or(*usual);
            }
            return None;
        }
        self.patience = PATIENCE;
        if !self.suspected.take().is_some_and(|suspected| alike(&suspected, &found)) {
            self.suspected = Some(found);
            return None;
        }
        let nodes = self.factors.iter().zip(&found).zip(&self.nominal).enumerate();
        let nodes = nodes.filter(|(_, ((before, after), _))| !within(*after / *before, CHANGED_RATE)).map(
            |(node, ((before, after), nominal))| ChangedNode {
                node,
                before: before * nominal * previous_scale,
                after: after * nominal * scale,
            },
        );
        let change = LinkChange { nodes: nodes.collect() };
        self.factors = found;
        self.usual = [None; CLASSES];
        Some(change)
    }

    /// By node, the factor in the current plans.
    #[must_use]
    pub fn factors(&self) -> &[f64] {
        &self.factors
    }

    /// The ratio of the measured rates to the bandwidths in the topology; `None` before the first probe.
    #[must_use]
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }
}

/// The class of a call's length, and its nanoseconds per byte, which are more than 0.
fn class_and_time(((bytes, _), time): (&(usize, u64), &u64)) -> (usize, f64) {
    let bytes = (*bytes).max(1);
    (bytes.ilog2() as usize, (*time).max(1) as f64 / bytes as f64)
}

/// Whether two lists of factors are close to each other.
fn alike(one: &[f64], other: &[f64]) -> bool {
    one.iter().zip(other).all(|(one, other)| within(one / other, CHANGED_RATE))
}

/// Whether a ratio is closer to 1 than `bound`, in either direction.
fn within(ratio: f64, bound: f64) -> bool {
    ratio < bound && ratio * bound > 1.0
}

/// The median; of an even number of values the higher of the two in the middle. `None` without values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests;
