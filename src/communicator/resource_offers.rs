//! What the ranks of a new communicator have in common from earlier ones.
//!
//! Owns how they find it.

use crate::rank::Rank;
use std::collections::BTreeSet;

/// Identifies what several processes have together: equal on all of them. Random.
pub(super) type ResourceKey = [u8; 16];

/// What a rank offers to the other ranks: the keys of what its process has, newest first, each with the
/// number of the process there.
pub(super) type OfferedResources = Vec<(ResourceKey, usize)>;

/// What all `ranks` offer under numbers that differ: its key, and their numbers in the order of `ranks`.
/// `offers` lists the offers of all ranks of the world. All ranks find the same, in the same order.
pub(super) fn common<'a>(
    ranks: &'a [Rank],
    offers: &'a [&'a OfferedResources],
) -> impl Iterator<Item = (ResourceKey, Vec<usize>)> + 'a {
    let number = |rank: &Rank, key: &ResourceKey| {
        offers.get(*rank)?.iter().find(|(offered, _)| offered == key).map(|(_, number)| *number)
    };
    let first = ranks.first().and_then(|first| offers.get(*first));
    first.into_iter().flat_map(|offer| offer.iter()).filter_map(move |(key, _)| {
        let numbers: Vec<usize> = ranks.iter().map(|rank| number(rank, key)).collect::<Option<_>>()?;
        let are_different = numbers.iter().collect::<BTreeSet<_>>().len() == numbers.len();
        are_different.then_some((*key, numbers))
    })
}
