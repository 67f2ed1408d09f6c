//! How many bytes the links of a node's ranks have in flight, and with that how they share the node's network interface.
//!
//! Owns the calculation. Must not know how a transport limits what is in flight.
//!
//! Links that share an interface get equal rates, but plans for uneven nodes send unequal numbers of bytes over them: with nodes of 5, 2 and 1
//! ranks, FlexReduce sends half of the vector over each of the 2 links between the last two nodes, and a fifth or a tenth over each of
//! the 6 links between the first two. Links with many bytes would fall behind, and the interface of the smallest node would idle.

use super::plans::Plans;
use crate::plan::topology::Topology;
use crate::rank::Rank;

/// The fewest bytes that a link has in flight: a few packets, so that the sender is not woken for each.
const LEAST_IN_FLIGHT: f64 = 16.0 * 1024.0;

/// From this rate on, in bytes per second, the mean holds; slower links have less in flight in proportion, because what is in flight waits in
/// queues, and sums are late by that time. On 1+1+2 with links of 100 Mbit/s and 16, 32, 64 and 128 KiB, 4 MiB take 1.01, 1.08, 1.17 and 1.2 times as
/// long as the links need; with one node of 500 Mbit/s less than 64 KiB gain nothing.
const FULL_RATE: f64 = 31.25e6;

/// By rank, the bytes that the link to it may have in flight: `mean` by the link's share of this node's interface, which makes all links of
/// the node's ranks end at the same time. At least half of the mean, as a network may need that many, and less on links that the topology knows to be slow.
/// Where the interface is the bottleneck, the rates of links are in proportion to these bytes. `mine` are the ranks of this node; `rank` is one of them.
pub(super) fn bytes_in_flight(
    mean: usize,
    plans: &Plans,
    topology: &Topology,
    rank: Rank,
    mine: &[Rank],
) -> Vec<usize> {
    let bytes = |(peer, share): (Rank, f64)| {
        let slowness = if mine.contains(&peer) {
            1.0
        } else {
            (slowest_on_path(topology, rank, peer) / FULL_RATE).min(1.0)
        };
        let mean = mean as f64;
        (mean * share.max(0.5) * slowness).max(LEAST_IN_FLIGHT.min(mean)) as usize
    };
    link_shares(plans, topology, rank, mine).into_iter().enumerate().map(bytes).collect()
}

/// By rank, the share of the link to it that makes all links of this node's ranks end at the same time: the time that the bytes which the plan of
/// long vectors sends over it need on the slowest link of their path, divided by the mean over the node's links to other nodes. 1 where the
/// plan sends nothing, and for ranks of this node. Shares by bytes alone made 1+1+1 with a node of half the rate 1 to 5 % slower, as
/// links to that node need as much time for half the bytes.
fn link_shares(plans: &Plans, topology: &Topology, rank: Rank, mine: &[Rank]) -> Vec<f64> {
    let times = |from: Rank| -> Vec<f64> {
        let sent = plans.sent_to_peers(from, topology.world());
        let time = |(to, sent): (Rank, f64)| match sent > 0.0 && !mine.contains(&to) {
            true => sent / slowest_on_path(topology, from, to),
            false => 0.0,
        };
        sent.into_iter().enumerate().map(time).collect()
    };
    let all: Vec<f64> = mine.iter().flat_map(|from| times(*from)).filter(|time| *time > 0.0).collect();
    let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
    times(rank).into_iter().map(|time| if time > 0.0 { time / mean } else { 1.0 }).collect()
}

/// Bytes per second of the slowest link between two ranks.
fn slowest_on_path(topology: &Topology, from: Rank, to: Rank) -> f64 {
    let path = topology.uplinks_between(topology.leaf(from), topology.leaf(to)).concat();
    let rates = path.into_iter().map(|vertex| topology.vertices()[vertex].uplink.bytes_per_second());
    rates.fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan::topology_file::parse_short;

    /// The shares of a rank's links on a cluster.
    fn shares(cluster: &str, rank: Rank) -> Vec<f64> {
        let topology = parse_short(cluster).expect("short form").expect("valid");
        let plans = Plans::new(&Config::default(), &topology, rank, None).expect("plans");
        let mine = topology.ranks_of_nodes()[topology.node_of(rank)].clone();
        link_shares(&plans, &topology, rank, &mine)
    }

    #[test]
    fn links_of_equal_nodes_have_equal_shares() {
        for rank in 0..8 {
            assert!(shares("4@1G+4@1G", rank).iter().all(|share| (share - 1.0).abs() < 1e-9));
        }
    }

    #[test]
    fn links_that_carry_more_have_greater_shares() {
        // The node of ranks 5 and 6 uses 8 links, 2 of them to rank 7, which is as much as goes to the node of ranks 0 to 4.
        let to_single: f64 = [5, 6].iter().map(|rank| shares("5@1G+2@1G+1@1G", *rank)[7]).sum();
        assert!((to_single - 4.0).abs() < 1e-6, "{to_single}");
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
            let topology = parse_short(cluster).expect("short form").expect("valid");
            let plans = Plans::new(&Config::default(), &topology, 0, None).expect("plans");
            let mine = topology.ranks_of_nodes()[0].clone();
            bytes_in_flight(mean, &plans, &topology, 0, &mine)
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
