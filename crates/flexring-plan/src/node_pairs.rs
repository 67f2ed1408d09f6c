//! Rounds of pairs of nodes, for measurements between nodes.
//!
//! Owns the order of pairs.

/// Two nodes by number, the lower one first.
pub type NodePair = (usize, usize);

/// At most `most` rounds of pairs so that each node is in at most one pair of a round, and each pair in one
/// of all rounds (the circle method).
#[must_use]
pub fn rounds(nodes: usize, most: usize) -> Vec<Vec<NodePair>> {
    let seats = nodes.next_multiple_of(2);
    let round = |turn: usize| -> Vec<NodePair> {
        let seat = |place: usize| if place == 0 { 0 } else { 1 + (place - 1 + turn) % (seats - 1) };
        let pairs = (0..seats / 2).map(|place| (seat(place), seat(seats - 1 - place)));
        let pairs = pairs.map(|(one, other)| (one.min(other), one.max(other)));
        pairs.filter(|(_, other)| *other < nodes).collect()
    };
    (0..seats.saturating_sub(1)).take(most).map(round).filter(|round| !round.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_pair_is_in_one_round_and_each_node_in_one_pair_of_a_round() {
        for nodes in 0..12 {
            let rounds = rounds(nodes, usize::MAX);
            for round in &rounds {
                let used: BTreeSet<usize> = round.iter().flat_map(|(one, other)| [*one, *other]).collect();
                assert_eq!(used.len(), 2 * round.len(), "{nodes}: {round:?}");
            }
            let pairs: BTreeSet<NodePair> = rounds.iter().flatten().copied().collect();
            let count = rounds.iter().map(Vec::len).sum::<usize>();
            assert_eq!((pairs.len(), count), (nodes * nodes.saturating_sub(1) / 2, pairs.len()), "{nodes}");
            assert!(pairs.iter().all(|(one, other)| one < other));
        }
    }
}
