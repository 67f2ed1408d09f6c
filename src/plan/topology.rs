//! The cluster as planners see it: which ranks share a node.

use super::Rank;

/// Which ranks share a node. Every rank is on exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The node of each rank, numbered in the order in which ranks first name them.
    node_of: Vec<usize>,
    nodes: usize,
}

impl Topology {
    /// The topology in which ranks with equal names share a node.
    #[must_use]
    pub fn from_names<S: PartialEq>(names: &[S]) -> Self {
        let mut first_of_node: Vec<&S> = Vec::new();
        let node_of = names
            .iter()
            .map(|name| {
                first_of_node.iter().position(|known| *known == name).unwrap_or_else(|| {
                    first_of_node.push(name);
                    first_of_node.len() - 1
                })
            })
            .collect();
        Self { node_of, nodes: first_of_node.len() }
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world(&self) -> usize {
        self.node_of.len()
    }

    /// How many nodes there are.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The node that `rank` is on.
    #[must_use]
    pub fn node_of(&self, rank: Rank) -> usize {
        self.node_of[rank]
    }

    /// The ranks node by node, so that a ring through them enters and leaves each node once.
    #[must_use]
    pub fn ranks_by_node(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = (0..self.world()).collect();
        ranks.sort_by_key(|rank| self.node_of[*rank]);
        ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_are_one_node() {
        let topology = Topology::from_names(&["b", "a", "b", "a", "c"]);
        assert_eq!((topology.world(), topology.nodes()), (5, 3));
        assert_eq!(topology.ranks_by_node(), [0, 2, 1, 3, 4]);
    }
}
