//! The order in which the blocks of an all-to-all form one vector, if they travel by node.
//!
//! Owns the place of each block, and which rank of a node exchanges messages with another node.
//!
//! The blocks from one node to another lie together, so that they are one message: first by the node of their
//! source, then by that of their destination, by source and by destination.

use super::Rank;
use super::fraction::Span;
use super::topology::Topology;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// The blocks of an all-to-all, as a vector with one place for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockOrder {
    /// By node, its ranks in rising order.
    nodes: Vec<Vec<Rank>>,
    /// By node, the number of ranks on the nodes before it.
    before: Vec<usize>,
    /// By rank, its node and its index there.
    place: Vec<(usize, usize)>,
}

impl BlockOrder {
    /// The order for the nodes of a topology.
    #[must_use]
    pub fn by_node(topology: &Topology) -> Self {
        let nodes = topology.ranks_of_nodes();
        let mut place = vec![(0, 0); topology.world()];
        for (node, ranks) in nodes.iter().enumerate() {
            ranks.iter().enumerate().for_each(|(index, rank)| place[*rank] = (node, index));
        }
        let mut before = vec![0];
        for ranks in &nodes[..nodes.len() - 1] {
            before.push(before[before.len() - 1] + ranks.len());
        }
        Self { nodes, before, place }
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.place.len()
    }

    /// The nodes, each with its ranks in rising order.
    #[must_use]
    pub fn nodes(&self) -> &[Vec<Rank>] {
        &self.nodes
    }

    /// The node of a rank.
    #[must_use]
    pub fn node_of(&self, rank: Rank) -> usize {
        self.place[rank].0
    }

    /// The rank of a node that exchanges one message in each direction with the other node. The other nodes
    /// are divided equally among the ranks.
    #[must_use]
    pub fn leader(&self, node: usize, other: usize) -> Rank {
        let nodes = self.nodes.len();
        let distance = (other + nodes - node - 1) % nodes;
        self.nodes[node][distance % self.nodes[node].len()]
    }

    /// The part of the vector with the block from one rank to another.
    #[must_use]
    pub fn block(&self, from: Rank, to: Rank) -> Span {
        self.part(self.position(from, to), 1)
    }

    /// The part with the blocks from a rank to `count` ranks of one node, of which `first` is the first.
    #[must_use]
    pub fn row(&self, from: Rank, first: Rank, count: usize) -> Span {
        self.part(self.position(from, first), count)
    }

    /// The part with all blocks from one node to another.
    #[must_use]
    pub fn between(&self, from: usize, to: usize) -> Span {
        let first = self.position(self.nodes[from][0], self.nodes[to][0]);
        self.part(first, self.nodes[from].len() * self.nodes[to].len())
    }

    /// Source and destination of the block at a place.
    ///
    /// # Panics
    /// If there are fewer blocks.
    #[must_use]
    pub fn ranks_at(&self, position: usize) -> (Rank, Rank) {
        let world = self.world();
        let at_or_before = |ranks: usize| self.before.partition_point(|before| *before <= ranks) - 1;
        let from_node = at_or_before(position / world);
        let sources = &self.nodes[from_node];
        let rest = position - self.before[from_node] * world;
        let to_node = at_or_before(rest / sources.len());
        let destinations = &self.nodes[to_node];
        let rest = rest - self.before[to_node] * sources.len();
        (sources[rest / destinations.len()], destinations[rest % destinations.len()])
    }

    /// Whether the blocks of a span lie together, in this order, in the vector that their source provides, or
    /// if `received`, in the one that their destination gets.
    #[must_use]
    pub fn is_one_piece(&self, span: Span, received: bool) -> bool {
        let blocks = span.elements((self.world() * self.world()) as u64, 1);
        let pairs: Vec<(Rank, Rank)> = blocks.map(|position| self.ranks_at(position as usize)).collect();
        pairs.windows(2).all(|pair| {
            let ((from, to), (next_from, next_to)) = (pair[0], pair[1]);
            let (near, far) = ((from, to + 1), (from + 1, to));
            (next_from, next_to) == if received { far } else { near }
        })
    }

    /// The place of an element of the whole vector in the one that its source provides, or if `received`, in
    /// the one that its destination gets. Blocks have `length` elements, more than 0.
    #[must_use]
    pub fn place_of(&self, element: u64, length: u64, received: bool) -> u64 {
        let (from, to) = self.ranks_at((element / length) as usize);
        let block = if received { from } else { to };
        block as u64 * length + element % length
    }

    /// Equal for equal orders.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = XxHash3_64::new();
        self.place.iter().for_each(|(node, _)| hash.write(&(*node as u64).to_le_bytes()));
        hash.finish()
    }

    fn position(&self, from: Rank, to: Rank) -> usize {
        let ((from_node, source), (to_node, destination)) = (self.place[from], self.place[to]);
        let between =
            self.before[from_node] * self.world() + self.before[to_node] * self.nodes[from_node].len();
        between + source * self.nodes[to_node].len() + destination
    }

    fn part(&self, first: usize, count: usize) -> Span {
        let blocks = self.world() * self.world();
        Span { start: Span::part(first, blocks).start, end: Span::part(first + count - 1, blocks).end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_one_place_and_those_between_two_nodes_lie_together() {
        for names in [&["a"][..], &["a", "b", "a", "c", "b", "a"], &["a", "a", "a", "b", "b"], &["a"; 4]] {
            let order = BlockOrder::by_node(&Topology::from_names(names));
            let blocks = names.len() * names.len();
            let pairs: Vec<_> = (0..blocks).map(|position| order.ranks_at(position)).collect();
            for (position, (from, to)) in pairs.iter().enumerate() {
                assert_eq!(order.block(*from, *to), Span::part(position, blocks));
                let nodes = order.between(order.node_of(*from), order.node_of(*to));
                assert_eq!(nodes.intersection(order.block(*from, *to)), order.block(*from, *to));
            }
        }
    }

    #[test]
    fn the_ranks_of_a_node_share_the_other_nodes() {
        let names: Vec<String> = (0..14).map(|rank| (rank / 2).to_string()).collect();
        let order = BlockOrder::by_node(&Topology::from_names(&names));
        for node in 0..7 {
            let others = (0..7).filter(|other| *other != node);
            let leaders: Vec<Rank> = others.map(|other| order.leader(node, other)).collect();
            assert_eq!(leaders.iter().filter(|leader| **leader == 2 * node).count(), 3);
            assert!(leaders.iter().all(|leader| order.node_of(*leader) == node));
        }
    }
}
