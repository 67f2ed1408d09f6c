//! Latency and bandwidth of links: within nodes, between nodes, and of each node's own link.
//!
//! Owns which ranks exchange messages when, and how long messages are. Must not know how results are used.

use super::session::{TuningSession, median};
use flexring::communicator::Operation;
use flexring::memory::Buffer;
use flexring::plan::topology::Topology;
use flexring::plan::tuning::{
    ClusterIdentity, LinkClass, MAX_LATENCY, MAX_RATE, MeasuredUplink, WITHIN_NODES, uplink_latencies,
};
use flexring::rank::Rank;
use flexring::{Communicator, ReduceOp, Result};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Elements of a rank's buffer: 16 MiB.
const ELEMENTS: usize = 4 << 20;
/// Elements of the shortest messages for bandwidth: 64 KiB.
const SHORTEST: usize = 16 << 10;
/// Round trips before those that are measured.
const WARM_UP: usize = 5;
/// Round trips that are measured.
const ROUND_TRIPS: usize = 31;
/// Most nodes of which each pair is measured alone. Pairs of more nodes are measured at the same time, each node in one.
const MOST_ALONE: usize = 12;
/// Most rounds of pairs.
const MOST_ROUNDS: usize = 128;

/// What was measured, equal on all ranks.
pub struct MeasuredLinks {
    /// By node; `None` with one node, or if there was no time to measure all.
    pub uplinks: Vec<Option<MeasuredUplink>>,
    pub classes: Vec<LinkClass>,
}

/// Two nodes, or a node twice for two of its ranks.
type NodePair = (usize, usize);

/// What was measured between two ranks: seconds in one direction, and bytes per second.
#[derive(Clone, Copy, Default)]
struct PairResult {
    latency: f64,
    rate: f64,
}

/// Steps of the progress.
pub fn steps(nodes: usize) -> usize {
    1 + rounds(nodes).len() + if nodes > 1 { 2 * nodes } else { 0 }
}

/// Measures all links.
///
/// # Errors
/// Any error of a call.
pub fn measure(session: &mut TuningSession) -> Result<MeasuredLinks> {
    let cluster = session.comm.cluster().clone();
    let mut buffer = session.comm.alloc::<f32>(ELEMENTS)?;
    let within: Vec<NodePair> = (0..cluster.nodes.len())
        .filter(|node| cluster.nodes[*node].ranks.len() > 1)
        .map(|node| (node, node))
        .collect();
    let all_rounds = std::iter::once(within).chain(rounds(cluster.nodes.len()));
    let (mut pairs, mut results) = (Vec::<NodePair>::new(), Vec::<f64>::new());
    for round in all_rounds {
        let message = || match round[..] {
            [(one, other)] if one != other => format!("link of nodes {one} and {other}"),
            [(one, other), ..] if one != other => format!("links of {} pairs of nodes", round.len()),
            _ => "links within nodes".to_owned(),
        };
        if !session.step(message)? {
            continue;
        }
        session.comm.barrier()?;
        for pair in round {
            let result = pair_result(session, &cluster, pair, &mut buffer)?;
            pairs.push(pair);
            results.extend([result.latency, result.rate]);
        }
    }
    // Only the first rank of a pair has a result; the others have zeros.
    session.comm.all_reduce(&mut results, ReduceOp::Sum)?;
    let results: Vec<PairResult> =
        results.chunks(2).map(|result| PairResult { latency: result[0], rate: result[1] }).collect();
    let classes = classes(session.comm.topology(), &cluster, &pairs, &results);
    let uplinks = uplinks(session, &cluster, &pairs, &results, &mut buffer)?;
    Ok(MeasuredLinks { uplinks, classes })
}

/// Rounds of pairs of nodes so that each node is in at most one pair of a round, and each pair in one round (the circle method).
/// With few nodes each pair is a round.
fn rounds(nodes: usize) -> Vec<Vec<NodePair>> {
    let seats = nodes.next_multiple_of(2);
    let round = |turn: usize| -> Vec<NodePair> {
        let seat = |place: usize| if place == 0 { 0 } else { 1 + (place - 1 + turn) % (seats - 1) };
        let pairs = (0..seats / 2).map(|place| (seat(place), seat(seats - 1 - place)));
        let pairs = pairs.map(|(one, other)| (one.min(other), one.max(other)));
        pairs.filter(|(_, other)| *other < nodes).collect()
    };
    let rounds: Vec<Vec<NodePair>> =
        (0..seats.saturating_sub(1)).map(round).filter(|round| !round.is_empty()).take(MOST_ROUNDS).collect();
    if nodes > MOST_ALONE {
        return rounds;
    }
    rounds.into_iter().flatten().map(|pair| vec![pair]).collect()
}

/// The two ranks that stand for a pair.
fn ranks_of(cluster: &ClusterIdentity, (one, other): NodePair) -> (Rank, Rank) {
    let second = usize::from(one == other);
    (cluster.nodes[one].ranks[0], cluster.nodes[other].ranks[second])
}

/// Measures a pair, if this rank is one of the two.
fn pair_result(
    session: &TuningSession,
    cluster: &ClusterIdentity,
    pair: NodePair,
    buffer: &mut Buffer<f32>,
) -> Result<PairResult> {
    let (first, second) = ranks_of(cluster, pair);
    let comm = &session.comm;
    let (peer, leads) = match comm.rank() {
        me if me == first => (second, true),
        me if me == second => (first, false),
        _ => return Ok(PairResult::default()),
    };
    let latency = latency(comm, peer, leads)?;
    let rate = bandwidth(comm, peer, leads, latency, session.time, buffer)?;
    Ok(if leads { PairResult { latency, rate } } else { PairResult::default() })
}

/// Seconds of a short message in one direction: half the median of round trips.
fn latency(comm: &Communicator, peer: Rank, leads: bool) -> Result<f64> {
    let mut message = [0u8; 8];
    let mut times = Vec::new();
    for trip in 0..WARM_UP + ROUND_TRIPS {
        let begun = Instant::now();
        if leads {
            comm.send(&message, peer)?;
            comm.recv(&mut message, peer)?;
        } else {
            comm.recv(&mut message, peer)?;
            comm.send(&message, peer)?;
        }
        if trip >= WARM_UP {
            times.push(begun.elapsed().as_secs_f64() / 2.0);
        }
    }
    Ok(median(times))
}

/// Bytes per second of ever longer messages from the rank that leads to the other, the highest. The messages become longer until
/// one takes `time`.
fn bandwidth(
    comm: &Communicator,
    peer: Rank,
    leads: bool,
    latency: f64,
    time: Duration,
    buffer: &mut Buffer<f32>,
) -> Result<f64> {
    let (mut len, mut best) = ([SHORTEST as u64], 0f64);
    let mut reply = [0u8];
    loop {
        if !leads {
            comm.recv(&mut len, peer)?;
            if len[0] == 0 {
                return Ok(0.0);
            }
            comm.recv(&mut buffer[..len[0] as usize], peer)?;
            comm.send(&reply, peer)?;
            continue;
        }
        comm.send(&len, peer)?;
        let elements = len[0] as usize;
        let begun = Instant::now();
        comm.send(&buffer[..elements], peer)?;
        comm.recv(&mut reply, peer)?;
        let taken = begun.elapsed();
        let seconds = (taken.as_secs_f64() - latency).max(1e-9);
        best = best.max((elements * size_of::<f32>()) as f64 / seconds);
        if taken >= time || elements == ELEMENTS {
            comm.send(&[0u64], peer)?;
            return Ok(best);
        }
        len[0] = (4 * elements).min(ELEMENTS) as u64;
    }
}

/// Groups pairs by the switch at which their paths meet.
fn classes(
    topology: &Topology,
    cluster: &ClusterIdentity,
    pairs: &[NodePair],
    results: &[PairResult],
) -> Vec<LinkClass> {
    let mut classes: BTreeMap<Option<usize>, Vec<PairResult>> = BTreeMap::new();
    for (pair, result) in pairs.iter().zip(results) {
        let (first, second) = ranks_of(cluster, *pair);
        let meets = topology.lowest_common_ancestor(topology.leaf(first), topology.leaf(second));
        classes.entry((pair.0 != pair.1).then_some(meets)).or_default().push(*result);
    }
    let class = |(meets, results): (Option<usize>, Vec<PairResult>)| LinkClass {
        name: meets.map_or(WITHIN_NODES, |switch| &*topology.vertices()[switch].name).to_owned(),
        pairs: results.len(),
        latency: nanoseconds(median(results.iter().map(|result| result.latency).collect())),
        slowest: whole_rate(results.iter().map(|result| result.rate).fold(f64::INFINITY, f64::min)),
        fastest: whole_rate(results.iter().map(|result| result.rate).fold(0.0, f64::max)),
    };
    classes.into_iter().map(class).collect()
}

fn nanoseconds(seconds: f64) -> u64 {
    ((seconds * 1e9) as u64).min(MAX_LATENCY)
}

fn whole_rate(rate: f64) -> u64 {
    (rate as u64).clamp(1, MAX_RATE)
}

/// Measures each node's link: all its ranks send to all other nodes at once, then receive from all of them.
fn uplinks(
    session: &mut TuningSession,
    cluster: &ClusterIdentity,
    pairs: &[NodePair],
    results: &[PairResult],
    buffer: &mut Buffer<f32>,
) -> Result<Vec<Option<MeasuredUplink>>> {
    let nodes = cluster.nodes.len();
    if nodes == 1 {
        return Ok(vec![None]);
    }
    let between = || pairs.iter().zip(results).filter(|((one, other), _)| one != other);
    let latencies: Vec<(usize, usize, f64)> =
        between().map(|((one, other), result)| (*one, *other, result.latency)).collect();
    let latencies = uplink_latencies(nodes, &latencies);
    let mut uplinks = Vec::new();
    for (node, latency) in latencies.into_iter().enumerate() {
        let of_node = between().filter(|((one, other), _)| *one == node || *other == node);
        let fastest = of_node.map(|(_, result)| result.rate).fold(0.0, f64::max);
        let mut rates = [fastest; 2];
        for (rate, sends) in rates.iter_mut().zip([true, false]) {
            if !session.step(|| format!("link of node {node}"))? {
                continue;
            }
            let flow = NodeFlow::new(cluster, node, sends, fastest * session.time.as_secs_f64());
            // The faster of two: the first one may include the start of connections.
            let times = [flow.run(session, buffer)?, flow.run(session, buffer)?];
            *rate = flow.bytes() / times[0].min(times[1]).max(1e-9);
        }
        let [up, down] = rates.map(whole_rate);
        // No pair of the node was measured if there was no time.
        let is_measured = fastest > 0.0;
        uplinks.push(is_measured.then(|| MeasuredUplink { up, down, latency: nanoseconds(latency) }));
    }
    // Planners compare links, so there are measurements of all of them or of none.
    let is_complete = uplinks.iter().all(Option::is_some);
    Ok(if is_complete { uplinks } else { vec![None; nodes] })
}

/// Messages between the ranks of one node and those of all others.
struct NodeFlow {
    /// From, to.
    messages: Vec<(Rank, Rank)>,
    /// Elements of each message.
    elements: usize,
}

impl NodeFlow {
    /// The messages that `node` sends or receives, of about `bytes` in all.
    fn new(cluster: &ClusterIdentity, node: usize, sends: bool, bytes: f64) -> Self {
        let mut messages = Vec::new();
        for (place, rank) in cluster.nodes[node].ranks.iter().enumerate() {
            for (_, other) in cluster.nodes.iter().enumerate().filter(|(other, _)| *other != node) {
                let peer = other.ranks[place % other.ranks.len()];
                messages.push(if sends { (*rank, peer) } else { (peer, *rank) });
            }
        }
        let most = |end: fn(&(Rank, Rank)) -> Rank| {
            let mut counts = BTreeMap::<Rank, usize>::new();
            messages.iter().for_each(|message| *counts.entry(end(message)).or_default() += 1);
            counts.into_values().max().unwrap_or(1)
        };
        // The messages of a rank share its buffer.
        let longest = ELEMENTS / most(|(from, _)| *from).max(most(|(_, to)| *to));
        let elements = (bytes / (messages.len() * size_of::<f32>()) as f64) as usize;
        Self { elements: elements.clamp(SHORTEST.min(longest), longest).max(1), messages }
    }

    fn bytes(&self) -> f64 {
        (self.messages.len() * self.elements * size_of::<f32>()) as f64
    }

    /// Seconds until the last rank has all its messages.
    fn run(&self, session: &TuningSession, buffer: &mut Buffer<f32>) -> Result<f64> {
        let me = session.comm.rank();
        let mine = self.messages.iter().filter(|(from, to)| *from == me || *to == me);
        let operations: Vec<Operation> = mine
            .zip(buffer.chunks_mut(self.elements))
            .map(
                |((from, to), part)| {
                    if *from == me { Operation::send(part, *to) } else { Operation::recv(part, *from) }
                },
            )
            .collect();
        session.comm.barrier()?;
        let begun = Instant::now();
        if !operations.is_empty() {
            session.comm.group(operations)?;
        }
        session.largest(begun.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_nodes_is_in_one_round_and_each_node_once_in_a_round() {
        for nodes in [1, 2, 3, 4, 7, 13, 14, 32] {
            let rounds = rounds(nodes);
            let mut pairs: Vec<NodePair> = rounds.iter().flatten().copied().collect();
            for round in &rounds {
                let mut seen: Vec<usize> = round.iter().flat_map(|(one, other)| [*one, *other]).collect();
                seen.sort_unstable();
                assert!(seen.is_sorted_by(|one, other| one < other), "{nodes} nodes: {round:?}");
            }
            pairs.sort_unstable();
            pairs.dedup();
            assert_eq!(pairs.len(), nodes * (nodes - 1) / 2, "{nodes} nodes");
            assert!(pairs.iter().all(|(one, other)| one < other && *other < nodes));
        }
        assert!(rounds(1000).len() <= MOST_ROUNDS);
    }
}
