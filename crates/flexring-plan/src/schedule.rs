//! The schedule, in which every all-reduce algorithm is a table: levels of groups, each of which says *this
//! span, held by these participants, is reduced onto this root*. Read from the first level to the last it is
//! a reduce-scatter; read backwards, with broadcast for reduce, it is the all-gather.
//!
//! Owns the table and what is derived from it once for all ranks.

use super::Rank;
use super::fraction::{Fraction, Span};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// The ranks that take part in a group. Many groups share one set, so the size of a schedule grows with the
/// number of groups and not with the number of their participants.
#[derive(Debug)]
pub struct ParticipantSet {
    members: Membership,
    /// Every member with its place, sorted by rank.
    places: Vec<(Rank, u32)>,
}

#[derive(Debug)]
enum Membership {
    /// All ranks take part in each group.
    All(Vec<Rank>),
    /// One rank of each list takes part in a group: the one that holds the group's span. Each list covers the
    /// vector in order.
    Holders(Vec<Vec<HeldSpan>>),
}

/// A span of the vector and the rank that holds a partial sum of it.
#[derive(Clone, Copy, Debug)]
pub struct HeldSpan {
    /// The part of the vector.
    pub span: Span,
    /// The holder.
    pub rank: Rank,
}

impl ParticipantSet {
    /// The set in which all of `ranks` take part in each group, in this order of addition.
    #[must_use]
    pub fn all(ranks: Vec<Rank>) -> Arc<Self> {
        let places = ranks.iter().copied().zip(0..).collect();
        Self::sorted(Membership::All(ranks), places)
    }

    /// The set in which one rank of each list takes part in a group: the one that holds the group's span.
    /// Each list must cover the vector in order.
    #[must_use]
    pub fn holders(lists: Vec<Vec<HeldSpan>>) -> Arc<Self> {
        let places =
            (0..).zip(&lists).flat_map(|(place, list)| list.iter().map(move |held| (held.rank, place)));
        let places = places.collect();
        Self::sorted(Membership::Holders(lists), places)
    }

    fn sorted(members: Membership, mut places: Vec<(Rank, u32)>) -> Arc<Self> {
        places.sort_unstable();
        Arc::new(Self { members, places })
    }

    /// Number of participants of each group.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.members {
            Membership::All(ranks) => ranks.len(),
            Membership::Holders(lists) => lists.len(),
        }
    }

    /// Whether groups have no participants.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the same ranks take part in each group.
    pub(super) fn is_fixed(&self) -> bool {
        match &self.members {
            Membership::All(_) => true,
            Membership::Holders(lists) => lists.iter().all(|list| list.len() == 1),
        }
    }

    /// All ranks that take part in some group, each with its place in the order of addition.
    pub fn members(&self) -> impl Iterator<Item = (Rank, usize)> + '_ {
        self.places.iter().map(|(rank, place)| (*rank, *place as usize))
    }

    /// The place of `rank` in the order of addition; `None` if it takes part in no group.
    pub(super) fn place_of(&self, rank: Rank) -> Option<usize> {
        // Sets of all ranks need no search.
        let found = match self.places.get(rank) {
            Some((at, _)) if *at == rank => rank,
            _ => self.places.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?,
        };
        Some(self.places[found].1 as usize)
    }

    fn at(&self, place: usize, point: Fraction) -> Rank {
        match &self.members {
            Membership::All(ranks) => ranks[place],
            Membership::Holders(lists) => {
                let list = &lists[place];
                list[list.partition_point(|held| held.span.start <= point).saturating_sub(1)].rank
            }
        }
    }
}

/// A span of the vector that is reduced from its participants onto the root. Contributions are added in the
/// order of the participants.
#[derive(Clone, Debug)]
pub struct Group {
    /// The part of the vector.
    pub span: Span,
    /// The ranks that hold a partial sum of it.
    pub set: Arc<ParticipantSet>,
    /// Place in the set of the first participant; the others follow cyclically.
    pub first: usize,
    /// The rank that holds the sum of all participants afterwards. It need not be a participant.
    pub root: Rank,
}

impl Group {
    /// A group with a set of its own.
    #[must_use]
    pub fn of(span: Span, participants: Vec<Rank>, root: Rank) -> Self {
        Self { span, set: ParticipantSet::all(participants), first: 0, root }
    }

    /// Number of participants.
    #[must_use]
    pub fn len(&self) -> usize {
        self.set.len()
    }

    /// Whether there are no participants.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// Participant number `index` in the order of addition, from 0.
    #[must_use]
    pub fn participant(&self, index: usize) -> Rank {
        self.set.at((index + self.first) % self.len(), self.span.start)
    }

    /// The participants, in the order of addition.
    pub fn participants(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.len()).map(|index| self.participant(index))
    }

    /// The index of `rank` in the order of addition; `None` if it is not a participant.
    #[must_use]
    pub fn place_of(&self, rank: Rank) -> Option<usize> {
        let place = self.set.place_of(rank)?;
        let index = (place + self.len() - self.first % self.len()) % self.len();
        (self.participant(index) == rank).then_some(index)
    }

    /// Whether data is sent: the root is not the only participant.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.len() > 1 || (self.len() == 1 && self.participant(0) != self.root)
    }
}

/// Groups that do not depend on each other.
#[derive(Clone, Debug, Default)]
pub struct Level {
    groups: Vec<Group>,
    /// Runs of consecutive groups that share a participant set.
    blocks: Vec<Range<u32>>,
    /// By rank, the blocks whose participant set contains it.
    member_of: RankLists,
    /// By rank, the groups whose root it is.
    root_of: RankLists,
}

/// A list of numbers for each rank, in compressed sparse row form.
#[derive(Clone, Debug, Default)]
struct RankLists {
    starts: Vec<u32>,
    entries: Vec<u32>,
}

impl RankLists {
    fn new(world: usize, pairs: impl Iterator<Item = (Rank, u32)> + Clone) -> Self {
        let mut starts = vec![0; world + 1];
        pairs.clone().for_each(|(rank, _)| starts[rank + 1] += 1);
        for rank in 0..world {
            starts[rank + 1] += starts[rank];
        }
        let mut next = starts.clone();
        let mut entries = vec![0; starts[world] as usize];
        for (rank, entry) in pairs {
            entries[next[rank] as usize] = entry;
            next[rank] += 1;
        }
        Self { starts, entries }
    }

    fn of(&self, rank: Rank) -> &[u32] {
        &self.entries[self.starts[rank] as usize..self.starts[rank + 1] as usize]
    }
}

impl Level {
    fn new(groups: Vec<Group>, world: usize) -> Self {
        let mut blocks: Vec<Range<u32>> = Vec::new();
        for (number, group) in (0..).zip(&groups) {
            match blocks.last_mut() {
                Some(block) if Arc::ptr_eq(&groups[block.start as usize].set, &group.set) => {
                    block.end = number + 1;
                }
                _ => blocks.push(number..number + 1),
            }
        }
        let member_of = (0..).zip(&blocks).flat_map(|(number, block)| {
            groups[block.start as usize].set.places.iter().map(move |(rank, _)| (*rank, number))
        });
        let member_of = RankLists::new(world, member_of);
        let root_of = RankLists::new(world, (0..).zip(&groups).map(|(number, group)| (group.root, number)));
        Self { groups, blocks, member_of, root_of }
    }

    /// The groups of the level.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Runs of consecutive groups that share a participant set: the set, and the groups by index.
    pub fn blocks(&self) -> impl Iterator<Item = (&Arc<ParticipantSet>, Range<usize>)> {
        let block = |block: &Range<u32>| {
            (&self.groups[block.start as usize].set, block.start as usize..block.end as usize)
        };
        self.blocks.iter().map(block)
    }

    /// The groups with data movement in which `rank` is a participant or the root, by index. The cost depends
    /// on their number, not on the size of the level.
    #[must_use]
    pub fn groups_of(&self, rank: Rank) -> Vec<usize> {
        let mut found: Vec<usize> = self.root_of.of(rank).iter().map(|group| *group as usize).collect();
        for block in self.member_of.of(rank) {
            let Range { start, end } = self.blocks[*block as usize];
            let (start, end) = (start as usize, end as usize);
            let set = &self.groups[start].set;
            match (&set.members, set.place_of(rank)) {
                (Membership::Holders(lists), Some(place)) => {
                    for held in lists[place].iter().filter(|held| held.rank == rank) {
                        let groups = &self.groups[start..end];
                        let from = groups.partition_point(|group| group.span.start < held.span.start);
                        let to = groups.partition_point(|group| group.span.start < held.span.end);
                        found.extend(start + from..start + to);
                    }
                }
                _ => found.extend(start..end),
            }
        }
        found.retain(|group| self.groups[*group].moves());
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// A part of the vector whose complete sum is at one rank after the last level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The part of the vector.
    pub span: Span,
    /// The rank that has the sum.
    pub owner: Rank,
    /// The last level that moves it, by index; `None` if no level does.
    pub level: Option<usize>,
}

/// The result of a planner: the levels of an all-reduce, and the shards that they produce.
#[derive(Clone, Debug)]
pub struct Schedule {
    name: String,
    world: usize,
    levels: Vec<Level>,
    shards: Vec<Shard>,
    helpers: BTreeSet<Rank>,
}

impl Schedule {
    /// The schedule of the planner `name` for `world` ranks, with `levels` from the first reduction to the
    /// last. The all-gather uses them in reverse order. Groups that share a set of holders must be in the
    /// order of their spans.
    ///
    /// # Panics
    /// If a group contains a rank that is not in the world.
    #[must_use]
    pub fn new(name: &str, world: usize, levels: Vec<Vec<Group>>) -> Self {
        let levels: Vec<Level> = levels.into_iter().map(|groups| Level::new(groups, world)).collect();
        let shards = shards(&levels);
        Self { name: name.to_owned(), world, levels, shards, helpers: BTreeSet::new() }
    }

    /// The same schedule with these helpers: ranks without input and output, which only add what other ranks
    /// send. BytePS uses machines without accelerators so.
    #[must_use]
    pub fn with_helpers(self, helpers: BTreeSet<Rank>) -> Self {
        Self { helpers, ..self }
    }

    /// The ranks without input and output.
    #[must_use]
    pub fn helpers(&self) -> &BTreeSet<Rank> {
        &self.helpers
    }

    /// The planner's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// The levels, from the first reduction to the last.
    #[must_use]
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The shards, which cover the vector in order.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// A hash of world, levels and helpers (XXH3). The name does not count.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut text = Vec::new();
        add_number(&mut text, self.world);
        for (number, level) in self.levels.iter().enumerate() {
            for (set, block) in level.blocks() {
                add_number(&mut text, number);
                add_block(&mut text, set, &level.groups[block]);
            }
        }
        self.helpers.iter().for_each(|rank| add_number(&mut text, *rank));
        XxHash3_64::oneshot(&text)
    }

    /// A hash of the groups, equal for schedules with the same groups in other levels or in another order.
    #[must_use]
    pub(crate) fn digest_of_groups(&self) -> u64 {
        let mut text = Vec::new();
        let blocks = self.levels.iter().flat_map(|level| level.blocks().map(move |block| (level, block)));
        blocks.fold(self.world as u64, |digest, (level, (set, block))| {
            text.clear();
            add_block(&mut text, set, &level.groups[block]);
            digest.wrapping_add(XxHash3_64::oneshot(&text))
        })
    }
}

/// Adds groups that share a set to what is hashed.
fn add_block(text: &mut Vec<u8>, set: &ParticipantSet, groups: &[Group]) {
    text.push(matches!(set.members, Membership::Holders(_)).into());
    match &set.members {
        Membership::All(ranks) => ranks.iter().for_each(|rank| add_number(text, *rank)),
        Membership::Holders(lists) => {
            for (place, held) in
                lists.iter().enumerate().flat_map(|(place, list)| list.iter().map(move |held| (place, held)))
            {
                add_number(text, place);
                add_number(text, held.rank);
                add_span(text, held.span);
            }
        }
    }
    for group in groups {
        add_span(text, group.span);
        add_number(text, group.root);
        add_number(text, group.first);
    }
}

fn add_number(text: &mut Vec<u8>, number: usize) {
    text.extend_from_slice(&(number as u64).to_le_bytes());
}

fn add_span(text: &mut Vec<u8>, span: Span) {
    for end in [span.start, span.end] {
        let (numerator, denominator) = end.parts();
        text.extend_from_slice(&numerator.to_le_bytes());
        text.extend_from_slice(&denominator.to_le_bytes());
    }
}

/// Assigns every point of the vector to the root of the last group that moves it. Goes through the levels
/// from the last to the first; `open` is what no later level has moved.
fn shards(levels: &[Level]) -> Vec<Shard> {
    let mut shards: Vec<Shard> = Vec::new();
    let mut open = vec![Span::WHOLE];
    for (number, level) in levels.iter().enumerate().rev() {
        if open.is_empty() {
            break;
        }
        let mut groups: Vec<&Group> = level.groups.iter().filter(|group| group.moves()).collect();
        groups.sort_by_key(|group| group.span.start);
        let mut left = Vec::new();
        let mut next = groups.into_iter().peekable();
        for gap in open {
            // The gap is assigned up to `at`. Groups that end before it do not overlap later gaps.
            let mut at = gap.start;
            while let Some(group) = next.peek().filter(|group| group.span.start < gap.end) {
                let part = group.span.intersection(Span { start: at, end: gap.end });
                if !part.is_empty() {
                    left.extend((at < part.start).then_some(Span { start: at, end: part.start }));
                    shards.push(Shard { span: part, owner: group.root, level: Some(number) });
                    at = part.end;
                }
                if group.span.end > gap.end {
                    break;
                }
                next.next();
            }
            left.extend((at < gap.end).then_some(Span { start: at, end: gap.end }));
        }
        open = left;
    }
    shards.extend(open.into_iter().map(|span| Shard { span, owner: 0, level: None }));
    shards.sort_by_key(|shard| shard.span.start);
    shards.dedup_by(|next, shard| {
        let same = (shard.owner, shard.level) == (next.owner, next.level);
        if same {
            shard.span.end = next.span.end;
        }
        same
    });
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(index: usize, parts: usize) -> Span {
        Span::part(index, parts)
    }

    #[test]
    fn shards_end_at_the_root_of_the_last_level_that_moves_them() {
        let schedule = Schedule::new(
            "test",
            3,
            vec![
                vec![Group::of(Span::WHOLE, vec![0, 1], 1)],
                vec![Group::of(part(1, 4), vec![1, 2], 2), Group::of(part(0, 4), vec![1, 2], 2)],
                vec![Group::of(part(3, 4), vec![1], 1), Group::of(part(2, 4), vec![1], 0)],
            ],
        );
        let shards: Vec<_> = schedule
            .shards()
            .iter()
            .map(|shard| (shard.span.to_string(), shard.owner, shard.level))
            .collect();
        let expected = [("[0, 1/2)", 2, Some(1)), ("[1/2, 3/4)", 0, Some(2)), ("[3/4, 1)", 1, Some(0))];
        assert_eq!(shards, expected.map(|(span, owner, level)| (span.to_owned(), owner, level)));
    }

    #[test]
    fn groups_of_a_rank_are_those_where_it_holds_the_span_or_is_root() {
        let held = |index, parts, rank| HeldSpan { span: part(index, parts), rank };
        let set = ParticipantSet::holders(vec![
            vec![held(0, 2, 5), held(1, 2, 6)],
            vec![held(0, 3, 7), held(1, 3, 8), held(2, 3, 9)],
        ]);
        let group = |start: (u64, u64), end: (u64, u64), root| Group {
            span: Span { start: Fraction::new(start.0, start.1), end: Fraction::new(end.0, end.1) },
            set: Arc::clone(&set),
            first: 0,
            root,
        };
        let groups = vec![
            group((0, 1), (1, 3), 7),
            group((1, 3), (1, 2), 5),
            group((1, 2), (2, 3), 4),
            group((2, 3), (1, 1), 9),
        ];
        let level = Level::new(groups, 10);
        assert_eq!(level.groups_of(5), [0, 1]);
        assert_eq!(level.groups_of(8), [1, 2]);
        assert_eq!(level.groups_of(4), [2]);
        assert_eq!(level.groups_of(3), [] as [usize; 0]);
        let group = &level.groups()[2];
        assert_eq!(group.participants().collect::<Vec<_>>(), [6, 8]);
        assert_eq!((group.place_of(8), group.place_of(7), group.place_of(4)), (Some(1), None, None));
    }

    #[test]
    fn participants_follow_the_first_one_cyclically() {
        let set = ParticipantSet::all(vec![4, 2, 9]);
        let group = Group { span: Span::WHOLE, set, first: 2, root: 4 };
        assert_eq!(group.participants().collect::<Vec<_>>(), [9, 4, 2]);
        assert_eq!([9, 4, 2, 1].map(|rank| group.place_of(rank)), [Some(0), Some(1), Some(2), None]);
    }
}
