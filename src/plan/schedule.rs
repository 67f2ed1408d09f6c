//! The one table that every algorithm is: levels of groups, each saying *this span, held by these
//! participants, is reduced onto this root*. Read downwards it is a reduce-scatter; read upwards, with
//! broadcast for reduce, it is the all-gather.

use super::Rank;
use super::fraction::Span;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Ranks in an order: a shared list, begun at some place and read around. All groups of a ring share one list.
#[derive(Clone, Debug)]
pub struct Participants {
    list: Arc<[Rank]>,
    first: usize,
}

impl Participants {
    /// `list`, read around from place `first`.
    #[must_use]
    pub fn rotated(list: &Arc<[Rank]>, first: usize) -> Self {
        Self { list: Arc::clone(list), first: first % list.len().max(1) }
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The ranks, in order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.list[self.first..].iter().chain(&self.list[..self.first]).copied()
    }
}

impl From<Vec<Rank>> for Participants {
    fn from(ranks: Vec<Rank>) -> Self {
        Self { list: ranks.into(), first: 0 }
    }
}

/// A span of the vector, held by the participants, that is reduced onto the root. The contributions are
/// added in the order of the participants.
#[derive(Clone, Debug)]
pub struct Group {
    /// Which part of the vector.
    pub span: Span,
    /// Who holds a part of its sum, in the order of addition.
    pub participants: Participants,
    /// Who holds all of its sum afterwards; need not be a participant.
    pub root: Rank,
}

/// Groups that do not depend on each other.
#[derive(Clone, Debug, Default)]
pub struct Level {
    /// The groups.
    pub groups: Vec<Group>,
}

/// What a planner makes.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The planner's name.
    pub name: &'static str,
    /// How many ranks take part.
    pub world: usize,
    /// From the first reduction to the last; the all-gather goes back through them.
    pub levels: Vec<Level>,
}

impl Schedule {
    /// A number that differs between schedules that differ.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut word = |value: u64| hash.update(&value.to_le_bytes());
        word(self.world as u64);
        // Groups of one ring share their list, so a list is hashed again only where it changes.
        let mut last: Option<&Arc<[Rank]>> = None;
        for (number, level) in self.levels.iter().enumerate() {
            for group in &level.groups {
                word(number as u64);
                for end in [group.span.start, group.span.end] {
                    let (numerator, denominator) = end.parts();
                    word(numerator);
                    word(denominator);
                }
                word(group.root as u64);
                word(group.participants.first as u64);
                let list = &group.participants.list;
                if !last.is_some_and(|last| Arc::ptr_eq(last, list)) {
                    word(list.len() as u64);
                    list.iter().for_each(|rank| word(*rank as u64));
                }
                last = Some(list);
            }
        }
        hash.digest()
    }
}
