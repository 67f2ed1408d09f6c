//! FlexReduce: one level for each level of the tree, with spans as uneven as the tree, which nest.
//!
//! At each branch, the ranks below each of its children hold the whole vector together, and the ranks below
//! the branch divide it among them. Data that a rank holds already and keeps moves nowhere, so the spans that
//! a rank gets lie within those that it holds: then the ranks below any vertex also get parts of what they
//! hold together, and the link of this vertex carries no more than its share of the links above it (Eq. 6 of
//! the paper, for trees of any depth).

use crate::Rank;
use crate::fraction::{Fraction, Span};
use crate::schedule::{Group, HeldSpan, ParticipantSet, Schedule};
use crate::topology::{Topology, VertexId, VertexKind};
use flexring_core::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// The schedule of Lee et al. ("FlexReduce", Fig. 3), in which every branch divides the vector evenly among
/// its children.
///
/// The paper sorts the ranks of a branch by the end of the range that they hold, then its start, then the
/// rank, and lets them take consecutive ranges. These lie within the ranges that ranks hold on many trees,
/// but not on all: not where one node has many ranks and another one, nor on most trees of three levels of
/// branches. Here a rank also takes no range before the start of the one that it holds, but gives way to it.
/// Where the paper's ranges nest, these are the same. n leaves take O(n log n).
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

/// FlexReduce with custom shares: `share` returns a vertex's share of what its parent's ranks hold together.
/// The shares of siblings must add up to 1. Ranks below a vertex with share 0 contribute but own nothing.
pub(super) fn with_shares(
    name: &str,
    topology: &Topology,
    share: impl Fn(VertexId) -> Fraction,
) -> Result<Schedule> {
    let vertices = topology.vertices();
    // By visited vertex, what its ranks hold: together the whole vector, in order.
    let mut below: Vec<Vec<HeldSpan>> = vertices
        .iter()
        .map(|vertex| match vertex.kind {
            VertexKind::Rank(rank) => vec![HeldSpan { span: Span::WHOLE, rank }],
            _ => Vec::new(),
        })
        .collect();
    let mut levels = Vec::new();
    for level in topology.levels().into_iter().rev() {
        let mut groups = Vec::new();
        for branch in level {
            let children = &vertices[branch].children;
            let lists: Vec<Vec<HeldSpan>> =
                children.iter().map(|child| std::mem::take(&mut below[*child])).collect();
            below[branch] = match <[Vec<HeldSpan>; 1]>::try_from(lists) {
                Ok([only]) => only,
                Err(lists) => {
                    let shares: Vec<Fraction> = children.iter().map(|child| share(*child)).collect();
                    let next = divided(&lists, &shares).ok_or_else(|| too_irregular(topology))?;
                    add_groups(lists, &next, &mut groups);
                    next
                }
            };
        }
        levels.push(groups);
    }
    levels.retain(|groups| !groups.is_empty());
    Ok(Schedule::new(name, topology.world(), levels))
}

/// What a rank holds, and how much of it the rank has to get.
struct Claim {
    held: HeldSpan,
    length: Fraction,
}

/// Divides the vector among the ranks of `lists`, each of which covers it in order: each list gets its share
/// of each span that it lists, at a place within this span. `None` if a fraction exceeds 124 bits.
///
/// This is scheduling on one machine with release times and deadlines: a span is a job that may run from its
/// start to its end. To divide each point of the vector by the shares is a schedule with fractions of the
/// machine, so the earliest deadline first is one that ends all jobs in time without a pause, with at most
/// one interruption for each job (Horn 1974).
fn divided(lists: &[Vec<HeldSpan>], shares: &[Fraction]) -> Option<Vec<HeldSpan>> {
    let mut claims = Vec::with_capacity(lists.iter().map(Vec::len).sum());
    for (list, share) in lists.iter().zip(shares).filter(|(_, share)| **share > Fraction::ZERO) {
        for held in list {
            claims.push(Claim { held: *held, length: held.span.length()?.times(*share)? });
        }
    }
    claims.sort_by_key(|claim| (claim.held.span.start, claim.held.span.end, claim.held.rank));
    let mut coming = claims.into_iter().peekable();
    // Those that may run, the one with the earliest deadline first.
    let mut ready: BinaryHeap<Reverse<(Fraction, Fraction, Rank, Fraction)>> = BinaryHeap::new();
    let mut next: Vec<HeldSpan> = Vec::new();
    let mut progress = Fraction::ZERO;
    loop {
        while let Some(Claim { held, length }) = coming.next_if(|claim| claim.held.span.start <= progress) {
            ready.push(Reverse((held.span.end, held.span.start, held.rank, length)));
        }
        let Some(Reverse((deadline, start, rank, length))) = ready.pop() else { break };
        let end = progress.plus(length)?;
        // It gives way to one that starts meanwhile and ends earlier.
        let sooner = |claim: &Claim| claim.held.span.start < end && claim.held.span.end < deadline;
        let mut pause = None;
        while let Some(claim) = coming.peek().filter(|claim| claim.held.span.start < end) {
            if sooner(claim) {
                pause = Some(claim.held.span.start);
                break;
            }
            let Claim { held, length } = coming.next()?;
            ready.push(Reverse((held.span.end, held.span.start, held.rank, length)));
        }
        let until = pause.unwrap_or(end);
        match next.last_mut().filter(|last| last.rank == rank) {
            Some(last) => last.span.end = until,
            None => next.push(HeldSpan { span: Span { start: progress, end: until }, rank }),
        }
        if until < end {
            ready.push(Reverse((deadline, start, rank, Span { start: until, end }.length()?)));
        }
        progress = until;
    }
    (progress == Fraction::ONE).then_some(next)
}

/// Adds the groups that reduce the spans of `next` from the ranks that hold them: one for each stretch with
/// the same holders.
fn add_groups(lists: Vec<Vec<HeldSpan>>, next: &[HeldSpan], groups: &mut Vec<Group>) {
    let degree = lists.len();
    let mut ends: Vec<Fraction> = lists.iter().flatten().map(|held| held.span.end).collect();
    ends.sort_unstable();
    let mut ends = ends.into_iter().peekable();
    let set = ParticipantSet::holders(lists);
    for HeldSpan { span, rank } in next {
        // Starts after the root's branch, so that the root adds last.
        let first = set.place_of(*rank).map_or(0, |place| (place + 1) % degree);
        let mut start = span.start;
        while start < span.end {
            while ends.next_if(|end| *end <= start).is_some() {}
            let end = ends.peek().copied().unwrap_or(Fraction::ONE).min(span.end);
            groups.push(Group { span: Span { start, end }, set: Arc::clone(&set), first, root: *rank });
            start = end;
        }
    }
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

    /// The algorithm of Fig. 3 (b) of the paper, with its loop over all leaves for each subrange, for nodes
    /// at one switch.
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
