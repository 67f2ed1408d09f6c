//! How many bytes the links of a node's ranks have in flight, and with that how they share the node's network
//! interface.
//!
//! Owns the calculation.
//!
//! Links that share an interface get equal rates, but plans for uneven nodes send unequal numbers of bytes
//! over them: with nodes of 5, 2 and 1 ranks, FlexReduce sends half of the vector over each of the 2 links
//! between the last two nodes, and a fifth or a tenth over each of the 5 links between the first two. Links
//! with many bytes would fall behind, and the interface of the smallest node would idle.

use super::Rank;
use super::program::{Body, Program};
use super::topology::{Topology, Vertex};
use std::collections::BTreeMap;

/// The fewest bytes that a link has in flight: a few packets, so that the sender is not woken for each.
const LEAST_IN_FLIGHT: f64 = 16.0 * 1024.0;

/// From this rate on, in bytes per second, the mean holds; slower links have less in flight in proportion,
/// because what is in flight waits in queues, and sums are late by that time. On 1+1+2 with links of 100
/// Mbit/s and 16, 32, 64 and 128 KiB, 4 MiB take 1.01, 1.08, 1.17 and 1.2 times as long as the links need;
/// with one node of 500 Mbit/s less than 64 KiB gain nothing.
const FULL_RATE: f64 = 31.25e6;

/// What a rank sends to each of its peers.
#[derive(Clone, Debug, PartialEq)]
pub struct SentByRank {
    /// The sender.
    pub rank: Rank,
    /// Each peer, with what it is sent in parts of the vector; 0 if the plan sends it nothing.
    pub to: Vec<(Rank, f64)>,
}

/// Each peer that a program sends to, in rising order, with what it is sent in parts of the vector.
#[must_use]
pub fn sent_to_peers(program: &Program) -> BTreeMap<Rank, f64> {
    let mut sent = BTreeMap::new();
    for step in &program.steps {
        if let Body::Send { peers, .. } = &*step.body {
            peers.iter().for_each(|peer| *sent.entry(*peer).or_default() += step.span().extent());
        }
    }
    sent
}

/// By rank of a node and by its peer, the bytes that the link to it may have in flight: `mean` by the link's
/// share of the node's interface, which makes all links of the node's ranks end at the same time. At least
/// half of the mean, as a network may need that many, and less on links that the topology knows to be slow.
/// Where the interface is the bottleneck, the rates of links are in proportion to these bytes. `node` are all
/// ranks that share the interface; which links stay within a node is what the topology says.
#[must_use]
pub fn bytes_in_flight(mean: usize, topology: &Topology, node: &[SentByRank]) -> Vec<Vec<usize>> {
    let bytes = |(rate, share): (f64, f64)| {
        let slowness = (rate / FULL_RATE).min(1.0);
        let mean = mean as f64;
        (mean * share.max(0.5) * slowness).max(LEAST_IN_FLIGHT.min(mean)) as usize
    };
    let links = links_of(topology, node);
    let shares = link_shares(&links);
    let of_rank = |(links, shares): (&Vec<NodeLink>, Vec<f64>)| {
        links.iter().map(|link| link.rate).zip(shares).map(bytes).collect()
    };
    links.iter().zip(shares).map(of_rank).collect()
}

/// A link of a rank.
struct NodeLink {
    /// Bytes per second of the slowest link on its way; infinite to ranks of the same node.
    rate: f64,
    /// In parts of the vector.
    sent: f64,
}

/// By rank and peer.
fn links_of(topology: &Topology, node: &[SentByRank]) -> Vec<Vec<NodeLink>> {
    let link = |from: Rank, (to, sent): (Rank, f64)| match topology.node_of(from) == topology.node_of(to) {
        true => NodeLink { rate: f64::INFINITY, sent },
        false => NodeLink { rate: slowest_on_path(topology, from, to), sent },
    };
    node.iter().map(|sent| sent.to.iter().map(|peer| link(sent.rank, *peer)).collect()).collect()
}

/// By rank and peer, the share of the link that makes all links of the node's ranks end at the same time: the
/// time that the bytes which the plan of long vectors sends over it need on the slowest link of their path,
/// divided by the mean over the node's links to other nodes. 1 where the plan sends nothing, and for ranks of
/// this node. Shares by bytes alone made 1+1+1 with a node of half the rate 1 to 5 % slower, as links to that
/// node need as much time for half the bytes.
fn link_shares(links: &[Vec<NodeLink>]) -> Vec<Vec<f64>> {
    let time = |link: &NodeLink| link.sent / link.rate;
    let all: Vec<f64> = links.iter().flatten().map(time).filter(|time| *time > 0.0).collect();
    let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
    let share = |link: &NodeLink| if time(link) > 0.0 { time(link) / mean } else { 1.0 };
    links.iter().map(|links| links.iter().map(share).collect()).collect()
}

/// Bytes per second of the slowest link between two ranks.
fn slowest_on_path(topology: &Topology, from: Rank, to: Rank) -> f64 {
    if let Some(fabric) = topology.fabric() {
        let rate = |(link, forward): &(usize, bool)| fabric.links()[*link].bandwidths[usize::from(!forward)];
        return fabric
            .route(from, to)
            .iter()
            .map(|link| rate(link) as f64 / 8.0)
            .fold(f64::INFINITY, f64::min);
    }
    let ends = [topology.leaf(from), topology.leaf(to)];
    let top = topology.lowest_common_ancestor(ends[0], ends[1]);
    let mut slowest = f64::INFINITY;
    for mut vertex in ends {
        while vertex != top {
            let Vertex { uplink, parent, .. } = &topology.vertices()[vertex];
            slowest = slowest.min(uplink.bytes_per_second());
            vertex = parent.unwrap_or(top);
        }
    }
    slowest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lowering::{Plan, ProgramSpec};
    use crate::planner::weighted;
    use crate::topology_file::parse_short;
    use flexring_core::config::Lowering;

    fn topology(cluster: &str) -> Topology {
        parse_short(cluster).expect("short form").expect("valid")
    }

    /// What the ranks of the node of `rank` send to all ranks of the cluster, and the place of `rank` among
    /// them.
    fn sent_on_node(topology: &Topology, rank: Rank) -> (Vec<SentByRank>, usize) {
        let plan = Plan::on(weighted::plan(topology).expect("a plan"), topology, Lowering::Auto);
        let mine = &topology.ranks_of_nodes()[topology.node_of(rank)];
        let sent = |from: &Rank| {
            let sent = sent_to_peers(&plan.program(*from, ProgramSpec::ALL_REDUCE));
            let to = (0..topology.world()).map(|peer| (peer, sent.get(&peer).copied().unwrap_or(0.0)));
            SentByRank { rank: *from, to: to.collect() }
        };
        let place = mine.iter().position(|other| *other == rank).expect("a rank of its node");
        (mine.iter().map(sent).collect(), place)
    }

    /// The shares of a rank's links on a cluster.
    fn shares(cluster: &str, rank: Rank) -> Vec<f64> {
        let topology = topology(cluster);
        let (sent, place) = sent_on_node(&topology, rank);
        link_shares(&links_of(&topology, &sent)).swap_remove(place)
    }

    #[test]
    fn links_of_equal_nodes_have_equal_shares() {
        for rank in 0..8 {
            assert!(shares("4@1G+4@1G", rank).iter().all(|share| (share - 1.0).abs() < 1e-9));
        }
    }

    #[test]
    fn links_that_carry_more_have_greater_shares() {
        // The node of ranks 5 and 6 uses 7 links. Over 2 of them, to rank 7, it sends as much as over 5 to
        // the node of ranks 0 to 4.
        let to_single: f64 = [5, 6].iter().map(|rank| shares("5@1G+2@1G+1@1G", *rank)[7]).sum();
        assert!((to_single - 3.5).abs() < 1e-6, "{to_single}");
        // What a rank of another node does not get leaves no share.
        assert_eq!(shares("2@1G", 0), [1.0, 1.0]);
    }

    #[test]
    fn links_to_slow_nodes_have_the_shares_of_the_time_that_they_need() {
        // The slow node gets half of the bytes that the other one gets, over a link of half the rate.
        for share in shares("1@1G+1@1G+1@500M", 0) {
            assert!((share - 1.0).abs() < 1e-6, "{share}");
        }
    }

    #[test]
    fn slow_links_have_less_in_flight() {
        let in_flight = |cluster: &str, mean: usize| {
            let topology = topology(cluster);
            let (sent, place) = sent_on_node(&topology, 0);
            bytes_in_flight(mean, &topology, &sent).swap_remove(place)
        };
        assert_eq!(in_flight("1@1G+1@1G", 64 << 10)[1], 64 << 10);
        assert_eq!(in_flight("1@10G+1@10G", 64 << 10)[1], 64 << 10);
        assert_eq!(in_flight("1@1G+1@125M", 64 << 10)[1], 32 << 10);
        assert_eq!(in_flight("1@10M+1@10M", 64 << 10)[1], 16 << 10);
        // A setting below the least holds.
        assert_eq!(in_flight("1@10M+1@10M", 8 << 10)[1], 8 << 10);
        // Ranks of one node use no link of the topology.
        assert_eq!(in_flight("2@10M", 64 << 10), [64 << 10; 2]);
    }
}
