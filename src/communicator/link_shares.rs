//! How the links of a node's ranks share the node's network interface.
//!
//! Owns the calculation. Must not know how a transport gives a link its share.
//!
//! Links that share an interface get equal rates, but plans for uneven nodes send unequal numbers of bytes over them: with nodes of 5, 2 and 1
//! ranks, FlexReduce sends half of the vector over each of the 2 links between the last two nodes, and a fifth or a tenth over each of
//! the 6 links between the first two. Links with many bytes would fall behind, and the interface of the smallest node would idle.

use super::plans::Plans;
use crate::rank::Rank;

/// By rank, the share of the link to it that makes all links of this node's ranks end at the same time: the bytes that the plan of long vectors
/// sends over it, divided by the mean over the node's links to other nodes. 1 where the plan sends nothing, and for ranks of this node,
/// which `mine` lists; `rank` is one of them.
pub(super) fn link_shares(plans: &Plans, rank: Rank, mine: &[Rank], world: usize) -> Vec<f64> {
    let (mut total, mut links) = (0.0, 0);
    for other in mine {
        let sent = plans.sent_to_peers(*other, world);
        let leaving = (0..world).filter(|peer| !mine.contains(peer)).map(|peer| sent[peer]);
        let used = leaving.filter(|sent| *sent > 0.0);
        (total, links) = used.fold((total, links), |(total, links), sent| (total + sent, links + 1));
    }
    let mean = total / f64::from(links.max(1));
    let share =
        |(peer, sent): (Rank, f64)| if sent > 0.0 && !mine.contains(&peer) { sent / mean } else { 1.0 };
    plans.sent_to_peers(rank, world).into_iter().enumerate().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan::topology::Topology;

    /// The shares of a rank's links in a world of nodes with these numbers of ranks.
    fn shares(nodes: &[usize], rank: Rank) -> Vec<f64> {
        let node_of: Vec<usize> =
            nodes.iter().enumerate().flat_map(|(node, ranks)| std::iter::repeat_n(node, *ranks)).collect();
        let names: Vec<String> = node_of.iter().map(ToString::to_string).collect();
        let plans = Plans::new(&Config::default(), &Topology::from_names(&names), rank, None).expect("plans");
        let mine: Vec<Rank> = (0..node_of.len()).filter(|other| node_of[*other] == node_of[rank]).collect();
        link_shares(&plans, rank, &mine, node_of.len())
    }

    #[test]
    fn links_of_equal_nodes_have_equal_shares() {
        for rank in 0..8 {
            assert!(shares(&[4, 4], rank).iter().all(|share| (share - 1.0).abs() < 1e-9));
        }
    }

    #[test]
    fn links_that_carry_more_have_greater_shares() {
        // The node of ranks 5 and 6 uses 8 links, 2 of them to rank 7, which is as much as goes to the node of ranks 0 to 4.
        let to_single: f64 = [5, 6].iter().map(|rank| shares(&[5, 2, 1], *rank)[7]).sum();
        assert!((to_single - 4.0).abs() < 1e-6, "{to_single}");
        // What a rank of another node does not get leaves no share.
        assert_eq!(shares(&[2], 0), [1.0, 1.0]);
    }
}
