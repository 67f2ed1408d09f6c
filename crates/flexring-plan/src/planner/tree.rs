//! Algorithms that reduce whole vectors onto one root: the binary tree and the star.

use crate::Rank;
use crate::fraction::Span;
use crate::schedule::{Group, Schedule};
use crate::topology::Topology;

/// A binary tree (Kun Yuan, "On the Time Complexity of Common All-Reduce Methods", 2019). The ranks in tree
/// order form a heap, and every rank adds the sums of its two children. 2 log2 p hops, pipelined by
/// sub-chunks.
#[must_use]
pub fn binary(topology: &Topology) -> Schedule {
    let order = topology.ranks_in_tree_order();
    let world = order.len();
    let mut levels = Vec::new();
    let mut first = 0;
    // Parents of equal depth are one level; the deepest parents come first.
    while 2 * first + 1 < world {
        let parents = first..(2 * first + 1).min(world);
        let with_children = parents.filter(|parent| 2 * parent + 1 < world);
        let group = |parent: usize| {
            let children = (2 * parent + 1..2 * parent + 3).filter(|child| *child < world);
            let mut ranks: Vec<Rank> = children.map(|child| order[child]).collect();
            ranks.push(order[parent]);
            Group::of(Span::WHOLE, ranks, order[parent])
        };
        levels.push(with_children.map(group).collect());
        first = 2 * first + 1;
    }
    levels.reverse();
    Schedule::new("tree", world, levels)
}

/// A star (Kun Yuan, "On the Time Complexity of Common All-Reduce Methods", 2019): all ranks reduce onto the
/// first rank in tree order.
#[must_use]
pub fn star(topology: &Topology) -> Schedule {
    let order = topology.ranks_in_tree_order();
    let center = order[0];
    let mut ranks: Vec<Rank> = order[1..].to_vec();
    ranks.push(center);
    Schedule::new("star", order.len(), vec![vec![Group::of(Span::WHOLE, ranks, center)]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_go_from_the_leaves_of_the_heap_to_its_root() {
        let schedule = binary(&Topology::from_names(&["a"; 6]));
        let row = |group: &Group| (group.participants().collect::<Vec<_>>(), group.root);
        let rows: Vec<Vec<_>> =
            schedule.levels().iter().map(|level| level.groups().iter().map(row).collect()).collect();
        assert_eq!(rows, [vec![(vec![3, 4, 1], 1), (vec![5, 2], 2)], vec![(vec![1, 2, 0], 0)]]);
    }
}
