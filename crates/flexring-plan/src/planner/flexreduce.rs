//! FlexReduce: one level for each level of the tree, with spans as uneven as the tree.

use crate::Rank;
use crate::fraction::{Fraction, Span};
use crate::schedule::{Group, HeldSpan, ParticipantSet, Schedule};
use crate::topology::{Topology, VertexId, VertexKind};
use flexring_core::error::{Error, Result};
use std::sync::Arc;

/// The schedule of Lee et al. ("FlexReduce", Fig. 3). Every branch divides the portions of its leaves by its
/// degree. The leaves, sorted by the end of the range that they hold, then its start, then the rank, take consecutive
/// ranges of the length of their portions. Each range is reduced from the ranks that hold its parts.
///
/// The paper searches all leaves for each subrange. This implementation walks along the sorted ends once, and the groups
/// of a branch share one participant set, so n leaves take O(n log n).
///
/// # Errors
/// `InvalidSetting` if the tree is so irregular that its fractions outgrow 124 bits.
pub fn plan(topology: &Topology) -> Result<Schedule> {
    with_shares("flexreduce", topology, |vertex| even_share(topology, vertex))
}

/// A vertex's share of what its parent's ranks hold together, if all siblings have equal shares.
pub(super) fn even_share(topology: &Topology, vertex: VertexId) -> Fraction {
    let parent = topology.vertices()[vertex].parent;
    let degree = parent.map_or(1, |parent| topology.vertices()[parent].children.len());
    Fraction::new(1, degree as u64)
}

/// The range that a rank holds, and the length of the next one.
#[derive(Clone, Copy)]
struct Leaf {
    portion: Fraction,
    range: Span,
}

/// FlexReduce with custom shares: `share` returns a vertex's share of what its parent's ranks hold together. The shares of
/// siblings must add up to 1. Ranks below a vertex with share 0 contribute but own nothing.
pub(super) fn with_shares(
    name: &str,
    topology: &Topology,
    share: impl Fn(VertexId) -> Fraction,
) -> Result<Schedule> {
    let vertices = topology.vertices();
    let mut leaves = vec![Leaf { portion: Fraction::ONE, range: Span::WHOLE }; topology.world()];
    // By visited vertex, its ranks in the order of the ranges that they hold.
    let mut below: Vec<Vec<Rank>> = vertices
        .iter()
        .map(|vertex| match vertex.kind {
            VertexKind::Rank(rank) => vec![rank],
            _ => Vec::new(),
        })
        .collect();
    let mut levels = Vec::new();
    for level in topology.levels().into_iter().rev() {
        let mut groups = Vec::new();
        for branch in level {
            let children = &vertices[branch].children;
            let lists: Vec<Vec<Rank>> =
                children.iter().map(|child| std::mem::take(&mut below[*child])).collect();
            for (child, ranks) in children.iter().zip(&lists) {
                let share = share(*child);
                for rank in ranks {
                    let leaf = &mut leaves[*rank];
                    leaf.portion = leaf.portion.times(share).ok_or_else(|| too_irregular(topology))?;
                }
            }
            below[branch] = match <[Vec<Rank>; 1]>::try_from(lists) {
                Ok([only]) => only,
                Err(lists) => {
                    assign(&lists, &mut leaves, &mut groups).ok_or_else(|| too_irregular(topology))?
                }
            };
        }
        levels.push(groups);
    }
    levels.retain(|groups| !groups.is_empty());
    Ok(Schedule::new(name, topology.world(), levels))
}

/// Assigns the next ranges to the ranks below a branch, and adds the groups that reduce them. Returns the ranks in the order
/// of their new ranges; `None` if a fraction exceeds 124 bits.
fn assign(lists: &[Vec<Rank>], leaves: &mut [Leaf], groups: &mut Vec<Group>) -> Option<Vec<Rank>> {
    let held = |list: &Vec<Rank>| -> Vec<HeldSpan> {
        let holders = list.iter().map(|rank| HeldSpan { span: leaves[*rank].range, rank: *rank });
        holders.filter(|held| !held.span.is_empty()).collect()
    };
    let set = ParticipantSet::holders(lists.iter().map(held).collect());
    let mut sorted: Vec<Rank> = lists.iter().flatten().copied().collect();
    sorted.sort_by_key(|rank| (leaves[*rank].range.end, leaves[*rank].range.start, *rank));

    let mut progress = Fraction::ZERO;
    let mut next_ranges = Vec::with_capacity(sorted.len());
    // The participants change where a range ends.
    let mut ends = sorted.iter().map(|rank| leaves[*rank].range.end).peekable();
    for rank in &sorted {
        let next = Span { start: progress, end: progress.plus(leaves[*rank].portion)? };
        let mut begin = next.start;
        while begin < next.end {
            while ends.next_if(|end| *end <= begin).is_some() {}
            let end = ends.peek().copied().unwrap_or(Fraction::ONE).min(next.end);
            // Starts after the root's branch, so that the root adds last if it is a participant.
            let first = (set.place_of(*rank)? + 1) % lists.len();
            groups.push(Group {
                span: Span { start: begin, end },
                set: Arc::clone(&set),
                first,
                root: *rank,
            });
            begin = end;
        }
        progress = next.end;
        next_ranges.push(next);
    }
    for (rank, range) in sorted.iter().zip(next_ranges) {
        leaves[*rank].range = range;
    }
    (progress == Fraction::ONE).then_some(sorted)
}

fn too_irregular(topology: &Topology) -> Error {
    let message = format!(
        "the fan-outs of this topology of {} ranks have so few common factors that its exact fractions exceed 124 bits: \
         describe it with fewer levels",
        topology.world()
    );
    Error::invalid_setting(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes at one switch, with these numbers of ranks.
    fn nodes(ranks: &[usize]) -> Topology {
        let names = ranks.iter().enumerate().flat_map(|(node, ranks)| vec![format!("node {node}"); *ranks]);
        Topology::from_names(&names.collect::<Vec<_>>())
    }

    /// A group as a range of elements, its participants in rank order, and its root.
    type GroupRow = (std::ops::Range<u64>, Vec<Rank>, Rank);

    fn table(schedule: &Schedule, count: u64) -> Vec<Vec<GroupRow>> {
        let row = |group: &Group| {
            let mut participants: Vec<Rank> = group.participants().collect();
            participants.sort_unstable();
            (group.span.elements(count, 1), participants, group.root)
        };
        schedule.levels().iter().map(|level| level.groups().iter().map(row).collect()).collect()
    }

    #[test]
    fn figure_2_of_the_paper() {
        // D and E are ranks 0 and 1, F to H are ranks 2 to 4; the vector has 12 items.
        let schedule = plan(&nodes(&[2, 3])).expect("small");
        let [first, second] = &table(&schedule, 12)[..] else { panic!("two levels") };
        assert_eq!(
            first[..],
            [
                (0..6, vec![0, 1], 0),
                (6..12, vec![0, 1], 1),
                (0..4, vec![2, 3, 4], 2),
                (4..8, vec![2, 3, 4], 3),
                (8..12, vec![2, 3, 4], 4),
            ]
        );
        assert_eq!(
            second[..],
            [
                (0..2, vec![0, 2], 2),
                (2..4, vec![0, 2], 0),
                (4..5, vec![0, 3], 0),
                (5..6, vec![0, 3], 3),
                (6..7, vec![1, 3], 3),
                (7..8, vec![1, 3], 1),
                (8..10, vec![1, 4], 1),
                (10..12, vec![1, 4], 4),
            ]
        );
    }

    /// The algorithm of Fig. 3 (b) of the paper, with its loop over all leaves for each subrange, for nodes at one switch.
    fn reference(ranks: &[usize]) -> Vec<(Span, Vec<Rank>, Rank)> {
        let world: usize = ranks.iter().sum();
        let mut range = Vec::new();
        let mut portion = Vec::new();
        for degree in ranks {
            for place in 0..*degree {
                range.push(Span::part(place, *degree));
                portion.push(Fraction::new(1, (degree * ranks.len()) as u64));
            }
        }
        let mut order: Vec<Rank> = (0..world).collect();
        order.sort_by_key(|rank| (range[*rank].end, range[*rank].start, *rank));
        let mut progress = Fraction::ZERO;
        let mut groups = Vec::new();
        for leaf in order {
            let end = progress.plus(portion[leaf]).expect("short");
            let mut begin = progress;
            while begin < end {
                let participants: Vec<Rank> = (0..world)
                    .filter(|rank| range[*rank].start <= begin && begin < range[*rank].end)
                    .collect();
                let stop =
                    participants.iter().map(|rank| range[*rank].end).min().expect("a participant").min(end);
                groups.push((Span { start: begin, end: stop }, participants, leaf));
                begin = stop;
            }
            progress = end;
        }
        groups
    }

    #[test]
    fn the_nine_configurations_of_the_paper_match_the_reference() {
        let configurations: [&[usize]; 9] =
            [&[2, 2], &[2, 3], &[3, 3], &[3, 4], &[4, 4], &[3, 3, 3], &[3, 3, 4], &[3, 4, 4], &[4, 4, 4]];
        for ranks in configurations {
            let schedule = plan(&nodes(ranks)).expect("small");
            let world = schedule.world();
            assert_eq!(schedule.levels().len(), 2);
            let top = schedule.levels()[1].groups();
            let found: Vec<(Span, Vec<Rank>, Rank)> = top
                .iter()
                .map(|group| {
                    let mut participants: Vec<Rank> = group.participants().collect();
                    participants.sort_unstable();
                    (group.span, participants, group.root)
                })
                .collect();
            assert_eq!(found, reference(ranks), "{ranks:?}");
            // Fig. 4 (c): at most 1.5 calls per learner and level on average.
            let calls: usize = schedule.levels().iter().map(|level| level.groups().len()).sum();
            assert!(calls as f64 / (2 * world) as f64 <= 1.5, "{ranks:?}: {calls} calls of {world} learners");
        }
    }
}
