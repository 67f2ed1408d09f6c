//! The lists of block lengths of uneven all-to-alls, which later calls use again.
//!
//! Owns their memory.

use std::sync::{Arc, Mutex, PoisonError};

/// Lists that are kept: more are in use only if as many all-to-alls wait for the worker.
const KEPT: usize = 4;

/// By rank, the length of the block that goes to it, and of the block that comes from it.
type BlockList = Arc<[(u64, u64)]>;

/// The lists of one communicator.
#[derive(Debug, Default)]
pub(crate) struct BlockLists(Mutex<Vec<BlockList>>);

impl BlockLists {
    /// A list of these lengths. Allocates only if calls that are not over use all lists. All lists of a
    /// communicator have the same length.
    pub(super) fn list(&self, lengths: impl Iterator<Item = (u64, u64)>) -> BlockList {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for list in kept.iter_mut() {
            // None if a call has it.
            if let Some(places) = Arc::get_mut(list) {
                places.iter_mut().zip(lengths).for_each(|(place, lengths)| *place = lengths);
                return Arc::clone(list);
            }
        }
        let list: BlockList = lengths.collect();
        if kept.len() < KEPT {
            kept.push(Arc::clone(&list));
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(first: u64) -> impl Iterator<Item = (u64, u64)> {
        (first..first + 3).map(|length| (length, 2 * length))
    }

    #[test]
    fn a_list_is_used_again_when_its_call_is_over() {
        let lists = BlockLists::default();
        let first = lists.list(lengths(0));
        let second = lists.list(lengths(5));
        assert_eq!(
            (&first[..], &second[..]),
            (&[(0, 0), (1, 2), (2, 4)][..], &[(5, 10), (6, 12), (7, 14)][..])
        );
        let place = first.as_ptr();
        drop(first);
        let third = lists.list(lengths(9));
        assert_eq!((third.as_ptr(), third[2]), (place, (11, 22)));
        assert_eq!(second[0], (5, 10));
    }
}
