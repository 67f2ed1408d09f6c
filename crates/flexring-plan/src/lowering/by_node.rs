//! The all-to-all by node: one message in each direction for each pair of nodes.
//!
//! Owns the three hops of a block between nodes.
//!
//! For each other node, one rank of a node is the leader. It collects the blocks of its node for that node,
//! exchanges them with the other node's leader in one message, and distributes what it gets. Blocks within a
//! node go straight.

use super::segment::Segment;
use super::transfers::{RankLowering, Transfer, TransferOp};
use crate::Rank;
use crate::block_order::BlockOrder;
use crate::fraction::Span;

/// Blocks of a node for another one are collected at its leader, or go straight to their destination on the
/// node.
const COLLECT: u32 = 0;
/// The leaders exchange them.
const CARRY: u32 = 1;
/// Each of them goes from the leader to its destination.
const DISTRIBUTE: u32 = 2;

impl RankLowering<'_> {
    /// The transfers of an all-to-all by node.
    pub(super) fn exchange_by_node(&self, blocks: &BlockOrder, transfers: &mut Vec<Transfer>) {
        let rank = self.rank;
        let node = blocks.node_of(rank);
        let neighbours = &blocks.nodes()[node];
        let mut push = |depth, span, op| {
            let segment = Segment { span, ..self.segments[0] };
            transfers.push(Transfer { depth, group: 0, segment, completes: false, op });
        };
        for peer in neighbours.iter().copied().filter(|peer| *peer != rank) {
            push(COLLECT, blocks.block(rank, peer), TransferOp::Send([peer].into()));
            push(COLLECT, blocks.block(peer, rank), TransferOp::Copy(peer));
        }
        for (other, there) in blocks.nodes().iter().enumerate().filter(|(other, _)| *other != node) {
            let leader = blocks.leader(node, other);
            if leader != rank {
                for span in rows(blocks, rank, there) {
                    push(COLLECT, span, TransferOp::Send([leader].into()));
                }
                for from in there {
                    push(DISTRIBUTE, blocks.block(*from, rank), TransferOp::Copy(leader));
                }
                continue;
            }
            let peer = blocks.leader(other, node);
            for from in neighbours {
                for span in rows(blocks, *from, there) {
                    push(COLLECT, span, TransferOp::PassOn((*from != rank).then_some(*from)));
                }
            }
            push(CARRY, blocks.between(node, other), TransferOp::Forward(peer));
            push(CARRY, blocks.between(other, node), TransferOp::PassOn(Some(peer)));
            for (from, to) in there.iter().flat_map(|from| neighbours.iter().map(move |to| (*from, *to))) {
                let op = if to == rank { TransferOp::Deliver } else { TransferOp::Forward(to) };
                push(DISTRIBUTE, blocks.block(from, to), op);
            }
        }
    }
}

/// The blocks from a rank to the ranks of another node: one span for each run of ranks with consecutive
/// numbers, whose blocks lie together in the caller's vector, too.
fn rows<'a>(blocks: &'a BlockOrder, from: Rank, to: &'a [Rank]) -> impl Iterator<Item = Span> + 'a {
    to.chunk_by(|one, next| one + 1 == *next).map(move |run| blocks.row(from, run[0], run.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lowering::{Movement, Plan, ProgramSpec};
    use crate::planner::ring;
    use crate::program::Body;
    use crate::topology::Topology;
    use flexring_core::call::Collective;
    use flexring_core::config::Lowering;

    /// By rank, the messages to ranks of other nodes in an all-to-all of ranks on these nodes.
    fn messages(names: &[&str], movement: Movement) -> Vec<usize> {
        let topology = Topology::from_names(names);
        let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Auto);
        let spec = ProgramSpec { collective: Collective::AllToAll, movement, ..ProgramSpec::ALL_REDUCE };
        let sent = |rank: Rank| {
            let steps = plan.program(rank, spec).steps;
            let peers = steps.iter().flat_map(|step| match &*step.body {
                Body::Send { peers, .. } => &peers[..],
                Body::Combine { .. } => &[],
            });
            peers.filter(|peer| topology.node_of(**peer) != topology.node_of(rank)).count()
        };
        (0..names.len()).map(sent).collect()
    }

    #[test]
    fn two_nodes_exchange_one_message_in_each_direction() {
        assert_eq!(messages(&["a", "a", "a", "b", "b"], Movement::ByNode), [1, 0, 0, 1, 0]);
        assert_eq!(messages(&["a", "a", "a", "b", "b"], Movement::Spans), [2, 2, 2, 3, 3]);
    }

    #[test]
    fn the_ranks_of_a_node_divide_its_messages() {
        let names = ["a", "a", "a", "b", "b", "c", "d", "d", "d", "d"];
        assert_eq!(messages(&names, Movement::ByNode), [1, 1, 1, 2, 1, 3, 1, 1, 1, 0]);
        assert_eq!(messages(&names, Movement::Spans).iter().sum::<usize>(), 10 * 10 - 9 - 4 - 1 - 16);
    }
}
