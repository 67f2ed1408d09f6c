//! In which proportion the messages between ranks share links.
//!
//! Owns the weights. Must not know rates.

use super::channels::RankPeers;
use flexring_plan::link_shares::{SentByRank, bytes_in_flight};
use flexring_plan::topology::Topology;

/// Weights are bytes in flight in these units: other differences have no effect that can be measured.
const UNIT: usize = 1 << 10;

/// By rank and peer, in the order of [`Channels`](super::channels::Channels), the weight of what the rank
/// sends to the peer: in proportion to the bytes that the link has in flight, with this `mean` over the links
/// of a node. All are 1 if they are equal.
pub fn flow_weights(mean: usize, peers: &[RankPeers], topology: &Topology) -> Vec<u32> {
    let mut weights = vec![Vec::new(); peers.len()];
    for node in topology.ranks_of_nodes() {
        let sent = |rank: &usize| {
            let RankPeers { ranks, sent, .. } = &peers[*rank];
            SentByRank { rank: *rank, to: ranks.iter().copied().zip(sent.iter().copied()).collect() }
        };
        let sent: Vec<SentByRank> = node.iter().map(sent).collect();
        for (rank, bytes) in node.iter().zip(bytes_in_flight(mean, topology, &sent)) {
            weights[*rank] = bytes.into_iter().map(|bytes| bytes.div_ceil(UNIT) as u32).collect();
        }
    }
    let weights = weights.concat();
    let divisor = weights.iter().copied().fold(0, greatest_common_divisor).max(1);
    weights.into_iter().map(|weight| weight / divisor).collect()
}

fn greatest_common_divisor(one: u32, other: u32) -> u32 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology_file::parse_short;
    use std::sync::Arc;

    /// The weights of links over which these ranks send these parts of a vector to all others.
    fn weights(cluster: &str, sent: &[[f64; 2]]) -> Vec<u32> {
        let topology = parse_short(cluster).expect("short form").expect("valid");
        let peers = sent.iter().enumerate().map(|(rank, sent)| {
            let ranks: Vec<usize> = (0..topology.world()).filter(|peer| *peer != rank).collect();
            RankPeers { names: ranks.clone().into(), ranks, sent: Arc::from(sent.as_slice()) }
        });
        flow_weights(64 << 10, &peers.collect::<Vec<_>>(), &topology)
    }

    #[test]
    fn links_with_equal_shares_have_weight_one() {
        assert_eq!(weights("1@1G+1@1G+1@1G", &[[0.5, 0.5]; 3]), [1; 6]);
    }

    #[test]
    fn weights_are_in_proportion_to_what_is_sent_over_links() {
        // The first rank sends twice as much to the second one as to the third one: 4/3 and 2/3 of 64 KiB, in
        // units of 1 KiB.
        assert_eq!(weights("1@1G+1@1G+1@1G", &[[1.0, 0.5], [1.0, 1.0], [1.0, 1.0]])[..2], [86, 43]);
    }
}
