//! The lists of calls that a communicator keeps on its GPU, which are at most so many.
//!
//! Owns which of them is dropped for another one. Must not know what a list is.

use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) struct RecentLists<K, L> {
    most: usize,
    by_key: BTreeMap<K, KeptList<L>>,
}

struct KeptList<L> {
    list: Arc<L>,
    /// The last launch for which it was taken; and the last one but for those that graphs have captured.
    used: u64,
    launched: u64,
}

impl<K: Ord + Copy, L> RecentLists<K, L> {
    pub(super) fn new(most: usize) -> Self {
        Self { most, by_key: BTreeMap::new() }
    }

    /// The list with this key, if it is kept. `launch` runs it next; launches are counted.
    pub(super) fn take(&mut self, key: &K, launch: u64, is_captured: bool) -> Option<Arc<L>> {
        let kept = self.by_key.get_mut(key)?;
        kept.used = launch;
        if !is_captured {
            kept.launched = launch;
        }
        Some(Arc::clone(&kept.list))
    }

    pub(super) fn is_full(&self) -> bool {
        self.by_key.len() >= self.most
    }

    /// Drops the list that was used least recently, among those that no kernel runs: launches up to
    /// `completed` have ended, and graphs have references of their own. `false` if there is none. Passes it
    /// to `reuse` if no graph has it.
    pub(super) fn drop_one(&mut self, completed: u64, reuse: impl FnOnce(L)) -> bool {
        let unused = self.by_key.iter().filter(|(_, kept)| kept.launched <= completed);
        let Some(key) = unused.min_by_key(|(_, kept)| kept.used).map(|(key, _)| *key) else { return false };
        self.by_key.remove(&key).and_then(|kept| Arc::into_inner(kept.list)).map(reuse);
        true
    }

    /// Keeps a list, which no launch runs yet.
    pub(super) fn insert(&mut self, key: K, list: L) {
        self.by_key.insert(key, KeptList { list: Arc::new(list), used: 0, launched: 0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three lists, of which the launches 1, 2 and 3 run the first, the second and again the first one; the
    /// third one is captured in place of launch 4.
    fn three() -> (RecentLists<u32, String>, Arc<String>) {
        let mut lists = RecentLists::new(3);
        for (key, list) in [(7, "first"), (5, "second"), (6, "third")] {
            assert!(!lists.is_full());
            lists.insert(key, list.to_owned());
        }
        assert!(lists.is_full() && lists.take(&8, 1, false).is_none());
        for (launch, key) in [(1, 7), (2, 5), (3, 7)] {
            assert!(lists.take(&key, launch, false).is_some());
        }
        let captured = lists.take(&6, 4, true).expect("it is kept");
        (lists, captured)
    }

    #[test]
    fn the_list_that_was_used_least_recently_is_dropped() {
        let (mut lists, captured) = three();
        drop(captured);
        let mut dropped = Vec::new();
        while lists.drop_one(4, |list| dropped.push(list)) {}
        assert_eq!(dropped, ["second", "first", "third"]);
        assert!(!lists.is_full());
    }

    #[test]
    fn lists_that_kernels_run_are_kept() {
        let (mut lists, captured) = three();
        // The graph keeps its list, so no kernel is waited for.
        assert!(lists.drop_one(0, |list| panic!("a graph has {list}")));
        assert!(!lists.drop_one(1, |list| panic!("a kernel runs {list}")));
        let mut dropped = None;
        assert!(lists.drop_one(2, |list| dropped = Some(list)));
        assert_eq!((dropped.as_deref(), captured.as_str()), (Some("second"), "third"));
        assert!(!lists.drop_one(2, |list| panic!("a kernel runs {list}")));
    }
}
