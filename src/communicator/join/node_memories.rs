//! The memory that communicators of this process share.
//!
//! Owns the list of what this process has exchanged with processes of its node, and which of it a new
//! communicator uses.

use crate::communicator::resource_offers::{OfferedResources, common};
use crate::process::PerProcess;
use crate::rank::Rank;
use crate::transport::shm::NodeMemory;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many memories a rank offers: the newest ones.
const MOST: usize = 32;

/// What this process has exchanged, oldest first.
static MEMORIES: PerProcess<Mutex<Vec<Weak<NodeMemory>>>> = PerProcess::new();

/// Lets later communicators of this process use `memory`, as long as one uses it.
pub(super) fn keep(memory: &Arc<NodeMemory>) {
    let mut memories = MEMORIES.get().lock().unwrap_or_else(PoisonError::into_inner);
    memories.retain(|known| known.strong_count() > 0);
    memories.push(Arc::downgrade(memory));
}

/// The memories that this process offers. They live until the offer is dropped.
pub(super) struct MemoryOffer(Vec<Arc<NodeMemory>>);

impl MemoryOffer {
    /// All memories of this process, but for those in which it has several places, because it has several
    /// ranks: a new rank could not tell which is its own.
    pub(super) fn of_this_process() -> Self {
        let memories = MEMORIES.get().lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |memory: &Weak<NodeMemory>| memory.upgrade().filter(|memory| !memory.is_retired());
        let all: Vec<Arc<NodeMemory>> = memories.iter().rev().filter_map(alive).collect();
        drop(memories);
        let is_single =
            |memory: &&Arc<NodeMemory>| all.iter().filter(|other| other.key() == memory.key()).count() == 1;
        Self(all.iter().filter(is_single).take(MOST).map(Arc::clone).collect())
    }

    /// What the other ranks need to know of it: the place of this process in each memory.
    pub(super) fn places(&self) -> OfferedResources {
        self.0.iter().map(|memory| (memory.key(), memory.place())).collect()
    }

    /// The memory that `ranks`, of which this process is one, all have, and the place of each; `None` if they
    /// have to exchange theirs. `offers` lists the offers of all ranks of the world. All `ranks` find the
    /// same.
    pub(super) fn common(
        &self,
        ranks: &[Rank],
        offers: &[&OfferedResources],
    ) -> Option<(Arc<NodeMemory>, Vec<usize>)> {
        let (key, places) = common(ranks, offers).next()?;
        let memory = self.0.iter().find(|memory| memory.key() == key)?;
        Some((Arc::clone(memory), places))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::local::share_memory;

    fn offer(memories: &[&Arc<NodeMemory>]) -> MemoryOffer {
        MemoryOffer(memories.iter().map(|memory| Arc::clone(memory)).collect())
    }

    #[test]
    fn ranks_use_what_all_of_them_have() {
        let shared = |world, key| share_memory(world, [key; 16]).expect("memory").into_iter().map(Arc::new);
        let all: Vec<_> = shared(3, 1).collect();
        let pair: Vec<_> = shared(2, 2).collect();
        let ranks = [offer(&[&pair[0], &all[2]]), offer(&[&all[0]]), offer(&[&all[1], &pair[1]])];
        let places: Vec<OfferedResources> = ranks.iter().map(MemoryOffer::places).collect();
        let places: Vec<&OfferedResources> = places.iter().collect();
        let common = |me: usize, of: &[Rank]| {
            ranks[me].common(of, &places).map(|(memory, places)| (memory.key()[0], places))
        };
        for me in 0..3 {
            assert_eq!(common(me, &[0, 1, 2]), Some((1, vec![2, 0, 1])));
        }
        assert_eq!(common(2, &[0, 2]), Some((2, vec![0, 1])));
        assert_eq!(common(1, &[1]), Some((1, vec![0])));
        let none = OfferedResources::new();
        assert!(ranks[0].common(&[0, 1], &[places[0], &none]).is_none());
        let same = vec![([1; 16], 2)];
        assert!(ranks[0].common(&[0, 1], &[places[0], &same]).is_none(), "one place for two ranks");
    }
}
