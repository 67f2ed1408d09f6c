//! Where the ranks' vectors are in a small call, which goes through mailboxes.
//!
//! Owns these places.

use super::Rank;
use super::lowering::HeldPart;
use flexring_core::call::Collective;
use std::ops::Range;

/// Where the ranks' contributions and results lie in the whole vector of a small call, which runs no program.
/// In an all-to-all no mailbox holds the vector of all ranks: each holds the blocks of its rank.
#[derive(Clone, Copy, Debug)]
pub struct SmallLayout {
    collective: Collective,
    root: Rank,
    world: usize,
    bytes: usize,
}

impl SmallLayout {
    /// The layout of a call whose whole vector has `bytes` bytes; in an all-to-all the blocks of one rank.
    #[must_use]
    pub fn new(collective: Collective, root: Rank, world: usize, bytes: usize) -> Self {
        Self { collective, root, world, bytes }
    }

    /// Whether a call can be small: all ranks can decide it alike, and find the vectors of all others, from
    /// their own arguments. Blocks that differ in length are known to two ranks each.
    #[must_use]
    pub fn exists_for(collective: Collective) -> bool {
        !matches!(collective, Collective::AllToAllV | Collective::SendRecv)
    }

    /// Whether the contributions are reduced, each as long as the whole vector. Otherwise they do not
    /// overlap.
    #[must_use]
    pub fn reduces(&self) -> bool {
        self.collective.reduces()
    }

    /// Whether each rank gets a block of each contribution, all as long as the whole vector.
    #[must_use]
    pub fn exchanges_blocks(&self) -> bool {
        self.collective == Collective::AllToAll
    }

    /// The bytes of the block that goes to `rank`, or comes from it, in an all-to-all.
    #[must_use]
    pub fn block(&self, rank: Rank) -> Range<usize> {
        self.bytes_of(HeldPart::Own, rank)
    }

    /// All bytes of the whole vector.
    #[must_use]
    pub fn whole(&self) -> Range<usize> {
        0..self.bytes
    }

    /// The bytes that `rank` contributes.
    #[must_use]
    pub fn contributed(&self, rank: Rank) -> Range<usize> {
        if self.exchanges_blocks() {
            return self.whole();
        }
        self.bytes_of(HeldPart::of(self.collective).0, rank)
    }

    /// The bytes that `rank` receives.
    #[must_use]
    pub fn received(&self, rank: Rank) -> Range<usize> {
        self.bytes_of(HeldPart::of(self.collective).1, rank)
    }

    fn bytes_of(&self, part: HeldPart, rank: Rank) -> Range<usize> {
        match part {
            HeldPart::Whole => self.whole(),
            HeldPart::AtRoot if rank == self.root => self.whole(),
            HeldPart::AtRoot | HeldPart::Nothing => 0..0,
            HeldPart::Own => {
                let part = self.bytes / self.world;
                rank * part..(rank + 1) * part
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contributions_and_results_of_small_calls_lie_in_one_vector() {
        use Collective as C;
        let shares = |collective| {
            let layout = SmallLayout::new(collective, 2, 3, 24);
            let by_rank = |held: fn(&SmallLayout, Rank) -> Range<usize>| {
                (0..3)
                    .map(|rank| held(&layout, rank))
                    .map(|held| (held.start, held.len()))
                    .collect::<Vec<_>>()
            };
            (by_rank(SmallLayout::contributed), by_rank(SmallLayout::received))
        };
        let lengths = |shares: &[(usize, usize)]| shares.iter().map(|share| share.1).collect::<Vec<_>>();
        let (all, parts) = (vec![(0, 24); 3], vec![(0, 8), (8, 8), (16, 8)]);
        for collective in [C::AllReduce, C::Barrier] {
            assert_eq!(shares(collective), (all.clone(), all.clone()));
        }
        assert_eq!(shares(C::ReduceScatter), (all.clone(), parts.clone()));
        assert_eq!(shares(C::AllGather), (parts.clone(), all.clone()));
        for (collective, rooted) in [(C::Broadcast, 0), (C::Scatter, 0), (C::Reduce, 1), (C::Gather, 1)] {
            let (contributed, received) = shares(collective);
            let (rooted, other) = if rooted == 0 { (contributed, received) } else { (received, contributed) };
            assert_eq!((lengths(&rooted), rooted[2]), (vec![0, 0, 24], (0, 24)));
            let others = if matches!(collective, C::Broadcast | C::Reduce) { &all } else { &parts };
            assert_eq!(&other, others, "{collective:?}");
        }
        assert_eq!(shares(C::AllToAll), (all.clone(), all));
        assert_eq!(SmallLayout::new(C::AllToAll, 0, 3, 24).block(2), 16..24);
        assert!(!SmallLayout::exists_for(C::AllToAllV) && SmallLayout::exists_for(C::AllToAll));
    }
}
