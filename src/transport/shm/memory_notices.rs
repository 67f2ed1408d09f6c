//! Allocations on GPUs that the ranks of a node name to each other while their communicator works.
//!
//! Owns the page where a rank names its own, and says which of the others' it has open. Must not know how
//! memory is exported and opened, nor who accesses it.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::neighbours::Neighbours;
use super::notice_page::{MEMORIES, NoticePage, READERS};
use crate::error::Result;
use crate::memory::Arena;
use crate::rank::Rank;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// An allocation that a rank has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedMemory {
    /// Distinguishes it from the others of its owner, earlier ones among them. Not 0.
    pub count: u64,
    /// Its length.
    pub bytes: u64,
    /// The driver's IPC handle.
    pub handle: [u64; 8],
}

/// What a rank and its neighbours have named.
#[derive(Debug)]
pub struct MemoryNotices {
    own: ArenaRef<NoticePage>,
    local_rank: usize,
    /// The neighbours: their ranks, indices on the node, and pages.
    others: Vec<(Rank, usize, ArenaRef<NoticePage>)>,
}

impl MemoryNotices {
    /// Those of the ranks of a node; `None` if they are too many, or none of them may have a GPU.
    ///
    /// # Errors
    /// `Internal` if the layout does not fit; `System` if a neighbour's arena cannot be mapped.
    pub fn new(arena: &Arc<Arena>, neighbours: &Neighbours) -> Result<Option<Self>> {
        let Some(offset) = neighbours.layout.notices() else { return Ok(None) };
        if neighbours.others.len() >= READERS {
            return Ok(None);
        }
        let bytes = size_of::<NoticePage>();
        let own = ArenaRef::new(arena.piece(offset, bytes), Arc::clone(arena) as ArenaOwner)?;
        let mut others = Vec::new();
        for neighbour in &neighbours.others {
            let Some(offset) = neighbour.layout.notices() else { return Ok(None) };
            let page = neighbour.arena.piece(offset, bytes)?;
            let page = ArenaRef::new(page, Arc::clone(&neighbour.arena) as ArenaOwner)?;
            others.push((neighbour.rank, neighbour.local_rank, page));
        }
        Ok(Some(Self { own, local_rank: neighbours.local_rank, others }))
    }

    /// How many allocations a rank can name at a time. Their numbers are below it.
    #[must_use]
    pub fn most(&self) -> usize {
        MEMORIES
    }

    /// Names an allocation, in place of what had this number, which no neighbour has open.
    pub fn name(&self, number: usize, memory: NamedMemory) {
        let notice = &self.own.named[number];
        notice.count.store(0, Ordering::Relaxed);
        // A neighbour that reads one of the next values sees this 0, too.
        fence(Ordering::Release);
        notice.bytes.store(memory.bytes, Ordering::Relaxed);
        for (word, value) in notice.handle.iter().zip(memory.handle) {
            word.store(value, Ordering::Relaxed);
        }
        notice.count.store(memory.count, Ordering::Release);
        self.own.changes.fetch_add(1, Ordering::Release);
    }

    /// Has the neighbours close an allocation.
    pub fn withdraw(&self, number: usize) {
        self.own.named[number].count.store(0, Ordering::Release);
        self.own.changes.fetch_add(1, Ordering::Release);
    }

    /// Whether all neighbours have this allocation open; with `count` 0, whether none has any of this number.
    #[must_use]
    pub fn is_open(&self, number: usize, count: u64) -> bool {
        let open = |page: &NoticePage| page.open[self.local_rank][number].load(Ordering::Acquire);
        self.others.iter().all(|(_, _, page)| open(page) == count)
    }

    /// A number that is another one when a neighbour has named or withdrawn an allocation.
    #[must_use]
    pub fn changes(&self) -> u64 {
        let of = |page: &NoticePage| page.changes.load(Ordering::Acquire);
        self.others.iter().fold(0, |sum, (_, _, page)| sum.wrapping_add(of(page)))
    }

    /// The ranks of the neighbours, in the order in which the other functions count them.
    pub fn neighbours(&self) -> impl Iterator<Item = Rank> + '_ {
        self.others.iter().map(|(rank, _, _)| *rank)
    }

    /// The allocation that a neighbour has named with this number. If it names another one just now, `None`:
    /// that is one more change.
    #[must_use]
    pub fn of_neighbour(&self, neighbour: usize, number: usize) -> Option<NamedMemory> {
        let notice = &self.others[neighbour].2.named[number];
        let count = notice.count.load(Ordering::Acquire);
        let bytes = notice.bytes.load(Ordering::Relaxed);
        let handle = notice.handle.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = count != 0 && notice.count.load(Ordering::Relaxed) == count;
        is_whole.then_some(NamedMemory { count, bytes, handle })
    }

    /// Says which allocation of a neighbour this rank has open; 0 if none of this number.
    pub fn set_open(&self, neighbour: usize, number: usize, count: u64) {
        self.own.open[self.others[neighbour].1][number].store(count, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::local::share_memory;
    use crate::transport::shm::{ArenaLayout, RegionOfRank};

    #[test]
    fn neighbours_see_what_a_rank_names_and_who_has_it_open() {
        let memories = share_memory(2, [1; 16]).expect("memory");
        let layout = ArenaLayout::new(2, 64, 2, 4096).with_relays(1, 4096);
        let mut regions: Vec<_> =
            memories.iter().map(|memory| memory.own().region(layout, None).expect("memory")).collect();
        let ranks: Vec<_> =
            (0..2).map(|rank| RegionOfRank { rank, place: rank, region: regions[rank].address() }).collect();
        let notices: Vec<MemoryNotices> = memories
            .iter()
            .zip(&mut regions)
            .map(|(memory, region)| {
                let neighbours = memory.neighbours(region, &ranks).expect("neighbours");
                MemoryNotices::new(region.arena(), &neighbours).expect("memory").expect("GPUs")
            })
            .collect();
        let [one, other] = &notices[..] else { panic!("two ranks") };
        let before = other.changes();
        assert_eq!((other.of_neighbour(0, 3), one.is_open(3, 0)), (None, true));
        let memory = NamedMemory { count: 7, bytes: 100, handle: [1, 2, 3, 4, 5, 6, 7, 8] };
        one.name(3, memory);
        assert_ne!(other.changes(), before);
        assert_eq!(other.of_neighbour(0, 3), Some(memory));
        assert!(!one.is_open(3, 7));
        other.set_open(0, 3, 7);
        assert!(one.is_open(3, 7) && !one.is_open(3, 0) && !one.is_open(2, 7));
        one.withdraw(3);
        assert_eq!(other.of_neighbour(0, 3), None);
        let without = ArenaLayout::new(2, 64, 2, 4096);
        assert_eq!(without.notices(), None);
    }
}
