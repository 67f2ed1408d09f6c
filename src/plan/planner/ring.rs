//! The ring: one level, a group per rank, the k-th of p equal spans chained around to its owner.

use crate::plan::fraction::Span;
use crate::plan::schedule::{Group, ParticipantSet, Schedule};
use crate::plan::topology::Topology;
use std::sync::Arc;

/// Plans the ring of Patarasuk and Yuan (JPDC 2009), as `papers/003` draws it: every span travels once around
/// the ranks, gathering a contribution at each, and ends at its owner. The ring goes through the nodes one
/// after the other, so each span enters each node once. Rank k owns the k-th span.
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
            // Begins behind the owner, so that the owner adds last.
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
    use crate::plan::Rank;

    #[test]
    fn every_span_ends_at_its_owner_after_all_others() {
        let schedule = plan(&Topology::from_names(&["a", "b", "a"]));
        let groups = schedule.levels()[0].groups();
        let order: Vec<Vec<Rank>> = groups.iter().map(|group| group.participants().collect()).collect();
        assert_eq!(order, [vec![2, 1, 0], vec![0, 2, 1], vec![1, 0, 2]]);
        assert_eq!(groups.iter().map(|group| group.root).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(groups[1].span, Span::part(1, 3));
    }

    #[test]
    fn digests_tell_schedules_apart() {
        let digest = |names: &[&str]| plan(&Topology::from_names(names)).digest();
        assert_eq!(digest(&["a", "a", "b"]), digest(&["x", "x", "y"]));
        assert_ne!(digest(&["a", "b", "a"]), digest(&["a", "a", "b"]));
        assert_ne!(digest(&["a", "a"]), digest(&["a", "a", "a"]));
    }
}
