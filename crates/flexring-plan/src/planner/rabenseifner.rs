//! Rabenseifner: recursive halving and doubling between pairs of ranks.

use crate::Rank;
use crate::fraction::Span;
use crate::schedule::{Group, ParticipantSet, Schedule};
use crate::topology::Topology;
use std::sync::Arc;

/// Recursive halving and doubling (Rabenseifner, ICCS 2004): log2 p levels of pairs. Ranks beyond a power of
/// two first add their vectors to those of a neighbour. Ranks that are close in the tree are paired first, so
/// that the longest spans stay within nodes.
#[must_use]
pub fn plan(topology: &Topology) -> Schedule {
    let world = topology.world();
    let order = topology.ranks_in_tree_order();
    let power = if world == 0 { 0 } else { 1 << world.ilog2() };
    let beyond = world - power;
    let mut levels = Vec::new();
    // The first ranks fold in pairs; the second of each pair takes part in the halving.
    let folded = order[..2 * beyond].chunks(2);
    levels
        .push(folded.clone().map(|pair| Group::of(Span::WHOLE, pair.to_vec(), pair[1])).collect::<Vec<_>>());
    let active: Vec<Rank> = folded.map(|pair| pair[1]).chain(order[2 * beyond..].iter().copied()).collect();
    // By active rank, the index of the part that it holds, of `parts` equal parts.
    let (mut held, mut parts) = (vec![0; active.len()], 1);
    let mut distance = 1;
    while distance < active.len() {
        let mut groups = Vec::new();
        for first in (0..active.len()).filter(|player| player & distance == 0) {
            let second = first + distance;
            let set = ParticipantSet::all(vec![active[first], active[second]]);
            for (player, half) in [(first, 0), (second, 1)] {
                held[player] = 2 * held[player] + half;
                let span = Span::part(held[player], 2 * parts);
                // The root adds last.
                groups.push(Group { span, set: Arc::clone(&set), first: 1 - half, root: active[player] });
            }
        }
        levels.push(groups);
        distance *= 2;
        parts *= 2;
    }
    levels.retain(|groups| !groups.is_empty());
    Schedule::new("rabenseifner", world, levels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_ranks_fold_to_four_and_halve_twice() {
        let schedule = plan(&Topology::from_names(&["a", "a", "b", "b", "c", "c"]));
        let row = |group: &Group| {
            format!("{} {:?} {}", group.span, group.participants().collect::<Vec<_>>(), group.root)
        };
        let rows: Vec<Vec<String>> =
            schedule.levels().iter().map(|level| level.groups().iter().map(row).collect()).collect();
        assert_eq!(rows[0], ["[0, 1) [0, 1] 1", "[0, 1) [2, 3] 3"]);
        assert_eq!(
            rows[1],
            ["[0, 1/2) [3, 1] 1", "[1/2, 1) [1, 3] 3", "[0, 1/2) [5, 4] 4", "[1/2, 1) [4, 5] 5"]
        );
        assert_eq!(
            rows[2],
            ["[0, 1/4) [4, 1] 1", "[1/4, 1/2) [1, 4] 4", "[1/2, 3/4) [5, 3] 3", "[3/4, 1) [3, 5] 5"]
        );
    }
}
