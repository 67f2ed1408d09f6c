//! Latency and bandwidth of links: within nodes, between nodes, and of each node's and each switch's own
//! link.
//!
//! Owns which ranks exchange messages when.

use super::messages::{SHORTEST, best_rate, burst, latency, message_times, steady_rate};
use super::session::{TuningSession, median};
use flexring::{Buffer, Operation, ReduceOp, Result};
use flexring_core::rank::Rank;
use flexring_plan::node_pairs::{self, NodePair};
use flexring_plan::topology::{MAX_BURST, Topology, VertexId};
use flexring_plan::tuning::{
    ClusterIdentity, LinkClass, MAX_LATENCY, MAX_RATE, MeasuredUplink, WITHIN_NODES, link_latencies,
    switches_below_root,
};
use std::collections::BTreeMap;
use std::time::Instant;

/// Elements of a rank's buffer: 16 MiB.
const ELEMENTS: usize = 4 << 20;
/// Most nodes of which each pair is measured alone. Pairs of more nodes are measured at the same time, each
/// node in one.
const MOST_ALONE: usize = 12;
/// Most rounds of pairs.
const MOST_ROUNDS: usize = 128;

/// What was measured, equal on all ranks.
pub struct MeasuredLinks {
    /// By node; `None` with one node, or if there was no time to measure all.
    pub uplinks: Vec<Option<MeasuredUplink>>,
    /// Of the switches below the root, in tree order; empty if there was no time to measure all.
    pub switches: Vec<MeasuredUplink>,
    pub classes: Vec<LinkClass>,
}

/// What was measured between two ranks.
#[derive(Clone, Copy, Default)]
struct PairResult {
    /// Seconds in one direction.
    latency: f64,
    /// Bytes per second.
    rate: f64,
    /// Bytes that pass at once after a pause.
    burst: f64,
}

/// Steps of the progress.
pub fn steps(topology: &Topology) -> usize {
    let nodes = topology.nodes();
    let vertices = topology.node_vertices();
    // As in `peers_of`: nodes that share a switch with some of the others also have flows to these alone.
    let has_near_flow = |node: &VertexId| {
        let switch = topology.vertices()[*node].parent.unwrap_or(0);
        let near = vertices
            .iter()
            .filter(|other| topology.lowest_common_ancestor(**other, switch) == switch)
            .count()
            - 1;
        near > 0 && near < nodes - 1
    };
    let flows = nodes
        + vertices.iter().filter(|node| has_near_flow(node)).count()
        + switches_below_root(topology).len();
    1 + rounds(nodes).len() + if nodes > 1 { 2 * flows } else { 0 }
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
            results.extend([result.latency, result.rate, result.burst]);
        }
    }
    // Only the first rank of a pair has a result; the others have zeros.
    session.comm.all_reduce(&mut results, ReduceOp::Sum)?;
    let results: Vec<PairResult> = results
        .chunks(3)
        .map(|result| PairResult { latency: result[0], rate: result[1], burst: result[2] })
        .collect();
    let classes = classes(session.comm.topology(), &cluster, &pairs, &results);
    let (uplinks, switches) = uplinks(session, &cluster, &pairs, &results, &mut buffer)?;
    Ok(MeasuredLinks { uplinks, switches, classes })
}

/// The rounds of pairs that are measured. With few nodes each pair is a round.
fn rounds(nodes: usize) -> Vec<Vec<NodePair>> {
    let rounds = node_pairs::rounds(nodes, MOST_ROUNDS);
    if nodes > MOST_ALONE {
        return rounds;
    }
    rounds.into_iter().flatten().map(|pair| vec![pair]).collect()
}

/// The two ranks between which the link of a pair is measured: those of two nodes, or of one that is given
/// twice.
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
    let times = message_times(comm, peer, leads, latency, session.time, buffer)?;
    let is_node = pair.0 == pair.1;
    let rate = if is_node { best_rate(&times) } else { steady_rate(&times) };
    // Pairs that are measured at the same time pause at the same time, and would seem to have bursts where
    // they share a link.
    let has_burst = !is_node && cluster.nodes.len() <= MOST_ALONE;
    let burst = if has_burst { burst(comm, peer, leads, rate, buffer)? } else { 0.0 };
    Ok(if leads { PairResult { latency, rate, burst } } else { PairResult::default() })
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

/// Bytes per second that are sent and received.
type FlowRates = [f64; 2];

/// Measures the links of nodes and of switches: all ranks below them send to other nodes at once, then
/// receive from them. Nodes below a switch also exchange messages with those at the same switch alone,
/// because the link of the switch may be the slower one; the faster rates count. The links of switches are in
/// tree order.
fn uplinks(
    session: &mut TuningSession,
    cluster: &ClusterIdentity,
    pairs: &[NodePair],
    results: &[PairResult],
    buffer: &mut Buffer<f32>,
) -> Result<(Vec<Option<MeasuredUplink>>, Vec<MeasuredUplink>)> {
    let nodes = cluster.nodes.len();
    if nodes == 1 {
        return Ok((vec![None], Vec::new()));
    }
    let topology = session.comm.topology().clone();
    let switches = switches_below_root(&topology);
    let between = || pairs.iter().zip(results).filter(|((one, other), _)| one != other);
    let paths: Vec<(Vec<usize>, f64)> = between()
        .map(|(pair, result)| (path(&topology, cluster, &switches, *pair), result.latency))
        .collect();
    let latencies = link_latencies(nodes + switches.len(), &paths);
    // A pair shows the smallest burst on its path, so the largest of all paths through a link is the best
    // estimate.
    let burst_of = |link: usize| {
        let of_link = between().zip(&paths).filter(|(_, (path, _))| path.contains(&link));
        of_link.map(|((_, result), _)| result.burst).fold(0.0, f64::max)
    };
    let bursts: Vec<f64> = (0..nodes + switches.len()).map(burst_of).collect();
    let fastest_of = |node: usize| {
        let of_node = between().filter(|((one, other), _)| *one == node || *other == node);
        of_node.map(|(_, result)| result.rate).fold(0.0, f64::max)
    };
    let fastest: Vec<f64> = (0..nodes).map(fastest_of).collect();
    let mut flows = Vec::new();
    for (node, of_pairs) in fastest.iter().enumerate() {
        let mut of_node: Option<FlowRates> = None;
        for others in peers_of(&topology, cluster, node) {
            let bytes = of_pairs * session.time.as_secs_f64();
            let pairs = pairs_of_node(cluster, node, &others);
            let both = [true, false].map(|sends| NodeFlow::new(&topology, &pairs, &fastest, sends, bytes));
            let rates = flow_rates(session, &both, &format!("link of node {node}"), buffer)?;
            of_node = match (of_node, rates) {
                (Some(before), Some(rates)) => Some([0, 1].map(|way| f64::max(before[way], rates[way]))),
                (before, rates) => before.or(rates),
            };
        }
        flows.push(of_node);
    }
    for (number, switch) in switches.iter().enumerate() {
        let below: Vec<usize> =
            (0..nodes).filter(|node| is_below(&topology, cluster, *node, *switch)).collect();
        let sum: f64 = below.iter().map(|node| fastest[*node]).sum();
        if below.len() == nodes {
            // Nothing is above it that any message of the job takes.
            flows.push(Some([sum; 2]));
            continue;
        }
        let (pairs, bytes) = (pairs_of_nodes(cluster, &below), sum * session.time.as_secs_f64());
        let both = [true, false].map(|sends| NodeFlow::new(&topology, &pairs, &fastest, sends, bytes));
        flows.push(flow_rates(session, &both, &format!("link of switch {number}"), buffer)?);
    }
    let uplink = |(([up, down], latency), burst): ((FlowRates, &f64), &f64)| MeasuredUplink {
        up: whole_rate(up),
        down: whole_rate(down),
        latency: nanoseconds(*latency),
        burst: (nodes <= MOST_ALONE).then_some((*burst as u64).min(MAX_BURST)),
    };
    let rates = comparable_rates(&fastest, flows);
    let mut measured = rates.into_iter().zip(&latencies).zip(&bursts).map(uplink);
    let of_nodes: Vec<Option<MeasuredUplink>> = (0..nodes).map(|_| measured.next()).collect();
    Ok((of_nodes, measured.collect()))
}

/// The rates of the links of nodes and after them of switches: planners compare links, so all of them are
/// those of flows, or all are those of the fastest pairs of nodes, of which switches have none. Empty if a
/// node has neither.
fn comparable_rates(fastest_pairs: &[f64], flows: Vec<Option<FlowRates>>) -> Vec<FlowRates> {
    // A node of which no pair was measured has no rate.
    if fastest_pairs.iter().any(|rate| *rate <= 0.0) {
        return Vec::new();
    }
    let flows: Option<Vec<FlowRates>> = flows.into_iter().collect();
    flows.unwrap_or_else(|| fastest_pairs.iter().map(|rate| [*rate; 2]).collect())
}

/// Measures two flows of opposite direction; `None` if there is no time for both.
fn flow_rates(
    session: &mut TuningSession,
    flows: &[NodeFlow; 2],
    what: &str,
    buffer: &mut Buffer<f32>,
) -> Result<Option<FlowRates>> {
    let mut rates = Vec::new();
    for flow in flows {
        if session.step(|| what.to_owned())? {
            // Starts connections, and uses up what links that were idle let pass at once.
            flow.short().run(session, buffer)?;
            let times = [flow.run(session, buffer)?, flow.run(session, buffer)?];
            rates.push(flow.bytes() / times[0].min(times[1]).max(1e-9));
        }
    }
    Ok(<[f64; 2]>::try_from(rates).ok())
}

/// The nodes with which a node exchanges messages at once: all others, and those at its switch if these are
/// fewer.
fn peers_of(topology: &Topology, cluster: &ClusterIdentity, node: usize) -> Vec<Vec<usize>> {
    let switch = topology.vertices()[topology.node_vertices()[node]].parent.unwrap_or(0);
    let others: Vec<usize> = (0..cluster.nodes.len()).filter(|other| *other != node).collect();
    let near: Vec<usize> =
        others.iter().copied().filter(|other| is_below(topology, cluster, *other, switch)).collect();
    if near.is_empty() || near.len() == others.len() { vec![others] } else { vec![others, near] }
}

/// Whether a node is below a vertex.
fn is_below(topology: &Topology, cluster: &ClusterIdentity, node: usize, vertex: VertexId) -> bool {
    topology.lowest_common_ancestor(topology.leaf(cluster.nodes[node].ranks[0]), vertex) == vertex
}

/// The links between two nodes: those of both by their numbers, and those of switches, whose numbers follow.
fn path(
    topology: &Topology,
    cluster: &ClusterIdentity,
    switches: &[VertexId],
    (one, other): NodePair,
) -> Vec<usize> {
    let crossed = |switch: &VertexId| {
        is_below(topology, cluster, one, *switch) != is_below(topology, cluster, other, *switch)
    };
    let nodes = cluster.nodes.len();
    let crossed = (0..switches.len()).filter(|number| crossed(&switches[*number]));
    [one, other].into_iter().chain(crossed.map(|number| nodes + number)).collect()
}

/// The pairs of each rank of `node` with a rank of each of the `others`.
fn pairs_of_node(cluster: &ClusterIdentity, node: usize, others: &[usize]) -> Vec<(Rank, Rank)> {
    let ranks = cluster.nodes[node].ranks.iter().enumerate();
    let pairs = ranks.flat_map(|(place, rank)| {
        let others = others.iter().map(|other| &cluster.nodes[*other].ranks);
        others.map(move |ranks| (*rank, ranks[place % ranks.len()]))
    });
    pairs.collect()
}

/// The pairs of each rank of the nodes `below` a switch with a rank of one of the other nodes, of which there
/// are some.
fn pairs_of_nodes(cluster: &ClusterIdentity, below: &[usize]) -> Vec<(Rank, Rank)> {
    let others: Vec<usize> = (0..cluster.nodes.len()).filter(|node| !below.contains(node)).collect();
    let ranks = below.iter().flat_map(|node| &cluster.nodes[*node].ranks);
    let pair = |(number, rank): (usize, &Rank)| {
        let other = &cluster.nodes[others[number % others.len()]].ranks;
        (*rank, other[number / others.len() % other.len()])
    };
    ranks.enumerate().map(pair).collect()
}

/// Messages between the ranks of some nodes and those of other nodes.
struct NodeFlow {
    /// From, to, and elements.
    messages: Vec<(Rank, Rank, usize)>,
}

impl NodeFlow {
    /// Messages of about `bytes` in all from the first rank of each pair to the other if `sends`, and else
    /// back. Their lengths are as the `fastest` rates of the slower of the two nodes, so that all end
    /// together and slow nodes do not hide how fast the others are.
    fn new(topology: &Topology, pairs: &[(Rank, Rank)], fastest: &[f64], sends: bool, bytes: f64) -> Self {
        let of = |rank: &Rank| fastest[topology.node_of(*rank)];
        let rate = |(one, other): &(Rank, Rank)| f64::min(of(one), of(other));
        let rates: Vec<f64> = pairs.iter().map(rate).collect();
        let most = |end: fn(&(Rank, Rank)) -> Rank| {
            let mut counts = BTreeMap::<Rank, usize>::new();
            pairs.iter().for_each(|pair| *counts.entry(end(pair)).or_default() += 1);
            counts.into_values().max().unwrap_or(1)
        };
        // The messages of a rank share its buffer.
        let longest = ELEMENTS / most(|(one, _)| *one).max(most(|(_, other)| *other));
        let scale = bytes / (rates.iter().sum::<f64>().max(1.0) * size_of::<f32>() as f64);
        let message = |((one, other), rate): (&(Rank, Rank), &f64)| {
            let elements = ((rate * scale) as usize).clamp(SHORTEST.min(longest), longest).max(1);
            if sends { (*one, *other, elements) } else { (*other, *one, elements) }
        };
        Self { messages: pairs.iter().zip(&rates).map(message).collect() }
    }

    /// This flow with messages of a quarter of the length.
    fn short(&self) -> Self {
        let quarter = |(from, to, elements): &(Rank, Rank, usize)| (*from, *to, elements.div_ceil(4));
        Self { messages: self.messages.iter().map(quarter).collect() }
    }

    fn bytes(&self) -> f64 {
        self.messages.iter().map(|(.., elements)| (elements * size_of::<f32>()) as f64).sum()
    }

    /// Seconds until the last rank has all its messages.
    fn run(&self, session: &TuningSession, buffer: &mut Buffer<f32>) -> Result<f64> {
        let me = session.comm.rank();
        let mut operations = Vec::new();
        let mut rest = &mut buffer[..];
        for (from, to, elements) in self.messages.iter().filter(|(from, to, _)| *from == me || *to == me) {
            let (part, after) = rest.split_at_mut(*elements);
            rest = after;
            operations.push(if *from == me {
                Operation::send(part, *to)
            } else {
                Operation::recv(part, *from)
            });
        }
        // From before the barrier: a receiver that leaves it late would miss what was sent before.
        let begun = Instant::now();
        session.comm.barrier()?;
        if !operations.is_empty() {
            session.comm.group(operations)?;
        }
        session.largest(begun.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology_file::parse_short;

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

    #[test]
    fn rates_of_flows_are_not_mixed_with_those_of_pairs() {
        let (pairs, flows) = ([10.0, 20.0], [[11.0, 12.0], [21.0, 22.0], [31.0, 32.0]]);
        assert_eq!(comparable_rates(&pairs, flows.map(Some).to_vec()), flows);
        for missing in 0..flows.len() {
            let mut some = flows.map(Some);
            some[missing] = None;
            assert_eq!(comparable_rates(&pairs, some.to_vec()), [[10.0; 2], [20.0; 2]]);
        }
        assert!(comparable_rates(&[10.0, 0.0], flows.map(Some).to_vec()).is_empty());
    }

    #[test]
    fn switches_are_measured_by_all_ranks_below_them_and_are_on_the_paths_that_leave_them() {
        let topology = parse_short("(2+1)+1+1").expect("a short form").expect("valid");
        let cluster = ClusterIdentity::new(&topology, &["a", "a", "b", "c", "d"], "tcp");
        let switches = switches_below_root(&topology);
        let path = |pair| path(&topology, &cluster, &switches, pair);
        assert_eq!([path((0, 1)), path((0, 2)), path((2, 3))], [vec![0, 1], vec![0, 2, 4], vec![2, 3]]);
        let below: Vec<usize> =
            (0..4).filter(|node| is_below(&topology, &cluster, *node, switches[0])).collect();
        assert_eq!(below, [0, 1]);
        assert_eq!(pairs_of_nodes(&cluster, &below), [(0, 3), (1, 4), (2, 3)]);
        assert_eq!(peers_of(&topology, &cluster, 0), [vec![1, 2, 3], vec![1]]);
        assert_eq!(peers_of(&topology, &cluster, 2), [vec![0, 1, 3]]);
        assert_eq!(pairs_of_node(&cluster, 0, &[1]), [(0, 2), (1, 2)]);
        // The fourth node is slow, and gets less, so that it does not hide the rate of the first one.
        let pairs = pairs_of_node(&cluster, 0, &[1, 3]);
        let flow = |sends| NodeFlow::new(&topology, &pairs, &[8e6, 8e6, 8e6, 2e6], sends, 8e6);
        let expected = [(0, 2, 800_000), (0, 4, 200_000), (1, 2, 800_000), (1, 4, 200_000)];
        assert_eq!(flow(true).messages, expected);
        assert_eq!(flow(false).messages, expected.map(|(one, other, elements)| (other, one, elements)));
        assert_eq!((flow(true).bytes(), flow(true).short().messages[0]), (8e6, (0, 2, 200_000)));
        assert_eq!(steps(&topology), 1 + 6 + 2 * (4 + 2 + 1));
    }
}
