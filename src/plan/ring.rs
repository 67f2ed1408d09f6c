//! The ring: one level, a group per rank, the k-th of p equal spans chained around to its owner.

use super::Rank;
use super::fraction::Span;
use super::schedule::{Group, Level, Participants, Schedule};
use super::topology::Topology;
use std::sync::Arc;

/// Plans the ring of Patarasuk and Yuan (JPDC 2009), as `papers/003` draws it: every span travels once around
/// the ranks, gathering a contribution at each, and ends at its owner. The ring goes through the nodes one
/// after the other, so each span enters each node once.
#[must_use]
pub fn plan(topology: &Topology) -> Schedule {
    let world = topology.world();
    let order: Arc<[Rank]> = topology.ranks_by_place().into();
    let groups = (0..world)
        .filter(|_| world > 1)
        .map(|place| Group {
            span: Span::part(place, world),
            // Begins behind the owner, so that the owner adds last.
            participants: Participants::rotated(&order, place + 1),
            root: order[place],
        })
        .collect();
    Schedule { name: "ring", world, levels: vec![Level { groups }] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_span_ends_at_its_owner_after_all_others() {
        let schedule = plan(&Topology::from_names(&["a", "b", "a"]));
        let groups = &schedule.levels[0].groups;
        assert_eq!(groups.len(), 3);
        for group in groups {
            let ranks: Vec<Rank> = group.participants.iter().collect();
            assert_eq!(ranks.last(), Some(&group.root));
            let mut sorted = ranks.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2]);
        }
        assert_eq!(groups.iter().map(|group| group.root).collect::<Vec<_>>(), [0, 2, 1]);
    }

    #[test]
    fn digests_tell_schedules_apart() {
        let digest = |names: &[&str]| plan(&Topology::from_names(names)).digest();
        assert_eq!(digest(&["a", "a", "b"]), digest(&["x", "x", "y"]));
        assert_ne!(digest(&["a", "b", "a"]), digest(&["a", "a", "b"]));
        assert_ne!(digest(&["a", "a"]), digest(&["a", "a", "a"]));
    }
}
