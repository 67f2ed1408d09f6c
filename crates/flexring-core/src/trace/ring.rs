//! A ring of bounded length, which keeps the newest entries.

/// The newest entries, up to a bound, and how many older ones were dropped.
#[derive(Debug)]
pub(super) struct NewestEntries<T> {
    entries: Vec<T>,
    /// The place of the oldest entry once the ring is full.
    oldest: usize,
    dropped: u64,
}

impl<T: Copy> NewestEntries<T> {
    /// A ring of at most `bound` entries, at least 1. Allocates the memory for all.
    pub(super) fn new(bound: usize) -> Self {
        Self { entries: Vec::with_capacity(bound.max(1)), oldest: 0, dropped: 0 }
    }

    /// Adds an entry, in place of the oldest one if the ring is full.
    pub(super) fn push(&mut self, entry: T) {
        if self.entries.len() < self.entries.capacity() {
            self.entries.push(entry);
            return;
        }
        self.entries[self.oldest] = entry;
        self.oldest = (self.oldest + 1) % self.entries.len();
        self.dropped += 1;
    }

    /// The number of entries that newer ones have replaced.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The entries, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        let (newer, older) = self.entries.split_at(self.oldest);
        older.iter().chain(newer)
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        (self.oldest, self.dropped) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::NewestEntries;

    #[test]
    fn a_full_ring_keeps_the_newest_entries_and_counts_the_others() {
        let mut ring = NewestEntries::new(4);
        let bound = ring.entries.capacity() as u32;
        let entries = |ring: &NewestEntries<u32>| ring.iter().copied().collect::<Vec<_>>();
        (0..3).for_each(|entry| ring.push(entry));
        assert_eq!((entries(&ring), ring.dropped()), (vec![0, 1, 2], 0));
        (3..2 * bound + 1).for_each(|entry| ring.push(entry));
        assert_eq!(entries(&ring), (bound + 1..2 * bound + 1).collect::<Vec<_>>());
        assert_eq!(ring.dropped(), u64::from(bound) + 1);
        ring.clear();
        assert_eq!((entries(&ring), ring.dropped()), (vec![], 0));
    }
}
