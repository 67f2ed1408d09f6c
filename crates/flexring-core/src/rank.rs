//! Rank numbers and how messages name them.
//!
//! Owns the one way in which a list of ranks becomes text.

use std::fmt;

/// A rank's number, from 0.
///
/// ```
/// # use flexring_core::rank::Rank;
/// fn next(rank: Rank, ranks: usize) -> Rank {
///     (rank + 1) % ranks
/// }
/// ```
pub type Rank = usize;

/// A list of ranks, displayed as `rank 3`, `ranks 2 and 5` or `ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more`.
///
/// ```
/// use flexring_core::rank::RankList;
///
/// assert_eq!(RankList::new(&[2, 5, 7]).to_string(), "ranks 2, 5 and 7");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RankList<'a> {
    ranks: &'a [Rank],
    limit: usize,
}

impl<'a> RankList<'a> {
    /// Displays `ranks` in the given order and abbreviates the list after eight of them.
    #[must_use]
    pub fn new(ranks: &'a [Rank]) -> Self {
        Self { ranks, limit: 8 }
    }

    /// The form of "to have" that follows the list in a sentence.
    #[must_use]
    pub fn have(&self) -> &'static str {
        if self.ranks.len() == 1 { "has" } else { "have" }
    }

    /// Displays every rank, however many there are.
    #[must_use]
    pub fn unabridged(ranks: &'a [Rank]) -> Self {
        Self { ranks, limit: usize::MAX }
    }
}

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = |ranks: &[Rank]| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self.ranks {
            [] => f.write_str("no rank"),
            [one] => write!(f, "rank {one}"),
            [head @ .., last] if self.ranks.len() <= self.limit => {
                write!(f, "ranks {} and {last}", numbers(head))
            }
            ranks => {
                let (named, rest) = ranks.split_at(self.limit);
                write!(f, "ranks {} and {} more", numbers(named), rest.len())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_ranks_as_a_sentence_does() {
        let many: Vec<Rank> = (1..=100).collect();
        for (ranks, expected) in [
            (&[][..], "no rank"),
            (&[3], "rank 3"),
            (&[2, 5], "ranks 2 and 5"),
            (&[2, 5, 7], "ranks 2, 5 and 7"),
            (&many, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more"),
        ] {
            assert_eq!(RankList::new(ranks).to_string(), expected);
            assert_eq!(RankList::new(ranks).have() == "has", ranks.len() == 1, "{expected}");
        }
        assert!(RankList::unabridged(&many).to_string().ends_with("98, 99 and 100"));
    }
}
