//! The ring: one level with a group for each rank, which chains one of p equal spans to its owner.

use crate::fraction::Span;
use crate::schedule::{Group, ParticipantSet, Schedule};
use crate::topology::Topology;
use std::sync::Arc;

/// The ring of Patarasuk and Yuan (JPDC 2009). Every span goes once around all ranks, which add their
/// contributions, and ends at its owner. Ranks of a node are consecutive in the ring, so each span enters
/// each node once. Rank k owns span k.
#[must_use]
pub fn plan(topology: &Topology) -> Schedule {
    let world = topology.world();
    let order = topology.ranks_in_tree_order();
    let set = ParticipantSet::all(order.clone());
    let mut groups: Vec<Group> = (0..world)
        .filter(|_| world > 1)
        .map(|place| Group {
            span: Span::part(order[place], world),
            set: Arc::clone(&set),
            // Starts after the owner, so that the owner adds last.
            first: (place + 1) % world,
            root: order[place],
        })
        .collect();
    groups.sort_by_key(|group| group.root);
    Schedule::new("ring", world, vec![groups])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    #[test]
    fn the_owner_of_a_span_adds_last() {
        let schedule = plan(&Topology::from_names(&["a", "b", "a"]));
        let groups = schedule.levels()[0].groups();
        let order: Vec<Vec<Rank>> = groups.iter().map(|group| group.participants().collect()).collect();
        assert_eq!(order, [vec![2, 1, 0], vec![0, 2, 1], vec![1, 0, 2]]);
        assert_eq!(groups.iter().map(|group| group.root).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(groups[1].span, Span::part(1, 3));
    }

    #[test]
    fn digests_differ_between_schedules() {
        let digest = |names: &[&str]| plan(&Topology::from_names(names)).digest();
        assert_eq!(digest(&["a", "a", "b"]), digest(&["x", "x", "y"]));
        assert_ne!(digest(&["a", "b", "a"]), digest(&["a", "a", "b"]));
        assert_ne!(digest(&["a", "a"]), digest(&["a", "a", "a"]));
    }
}
