//! Allocations on GPUs that the ranks of a node name to each other while their communicator works.
//!
//! Owns the page where a rank names its own, and says which of the others' it has open, and the socket for
//! descriptors. Must not know how
//! memory is exported and opened, nor who accesses it.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::memory_parts::{MOST_PARTS, PartsPacket, PartsSocket};
use super::neighbours::Neighbours;
use super::notice_page::{MEMORIES, NoticePage, READERS};
use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::rank::Rank;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// An allocation that a rank has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedMemory {
    /// Distinguishes it from the others of its owner, earlier ones among them. Not 0.
    pub count: u64,
    /// Its length.
    pub bytes: u64,
    /// The number of its parts, whose descriptors are sent; 0 if it has a handle.
    pub parts: u64,
    /// The driver's IPC handle.
    pub handle: [u64; 8],
}

/// The parts of an allocation whose descriptors a neighbour has sent.
#[derive(Debug)]
pub struct ReceivedParts {
    /// As the other functions count neighbours and their allocations.
    pub neighbour: usize,
    pub number: usize,
    pub count: u64,
    /// Length and descriptor of each.
    pub parts: Vec<(u64, OwnedFd)>,
}

/// The parts of an allocation, on their way to the neighbours.
#[derive(Debug)]
pub struct UnsentParts {
    packet: PartsPacket,
    /// The next neighbour that gets them.
    next: usize,
}

/// What a rank and its neighbours have named.
#[derive(Debug)]
pub struct MemoryNotices {
    own: ArenaRef<NoticePage>,
    local_rank: usize,
    /// The neighbours: their ranks, indices on the node, and pages.
    others: Vec<(Rank, usize, ArenaRef<NoticePage>)>,
    socket: Option<PartsSocket>,
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
        Ok(Some(Self { own, local_rank: neighbours.local_rank, others, socket: None }))
    }

    /// Has neighbours send the descriptors of parts to this rank.
    ///
    /// # Errors
    /// `System` if no socket can be created.
    pub fn open_socket(&mut self) -> Result<()> {
        let socket = self.socket.insert(PartsSocket::new()?);
        for (word, value) in self.own.socket.iter().zip(socket.address()) {
            word.store(value, Ordering::Relaxed);
        }
        self.own.has_socket.store(1, Ordering::Release);
        Ok(())
    }

    /// The most parts of an allocation.
    #[must_use]
    pub fn most_parts(&self) -> usize {
        MOST_PARTS
    }

    /// Parts of the allocation with this number, as its owner counts them, which it has named.
    #[must_use]
    pub fn unsent(&self, number: usize, count: u64, parts: Vec<(u64, OwnedFd)>) -> UnsentParts {
        UnsentParts { packet: PartsPacket { owner: self.local_rank, number, count, parts }, next: 0 }
    }

    /// Sends parts to the neighbours that have not got them. `false` if the rest has to be sent later.
    ///
    /// # Errors
    /// `Unsupported` if a neighbour takes none.
    pub fn send_parts(&self, unsent: &mut UnsentParts) -> Result<bool> {
        let before = unsent.next;
        let mut outcome = Ok(true);
        while let Some((rank, _, page)) = self.others.get(unsent.next) {
            let has_socket = page.has_socket.load(Ordering::Acquire) != 0;
            let address = page.socket.each_ref().map(|word| word.load(Ordering::Relaxed));
            let sent = if has_socket { unsent.packet.send(address) } else { Err(Errno::CONNREFUSED) };
            outcome = sent.map_err(|cause| {
                Error::unsupported(format!("rank {rank} does not take descriptors of memory: {cause}"))
            });
            if !matches!(outcome, Ok(true)) {
                break;
            }
            unsent.next += 1;
        }
        if unsent.next > before {
            self.own.changes.fetch_add(1, Ordering::Release);
        }
        outcome
    }

    /// The parts that neighbours have sent since the last call.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn receive_parts(&self) -> Result<Vec<ReceivedParts>> {
        let Some(socket) = &self.socket else { return Ok(Vec::new()) };
        let of = |PartsPacket { owner, number, count, parts }| {
            let neighbour = self.others.iter().position(|(_, local_rank, _)| *local_rank == owner)?;
            (number < MEMORIES).then_some(ReceivedParts { neighbour, number, count, parts })
        };
        Ok(socket.receive()?.into_iter().filter_map(of).collect())
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
        notice.parts.store(memory.parts, Ordering::Relaxed);
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

    /// A number that is another one when a neighbour has named or withdrawn an allocation, or sent its parts.
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
        let parts = notice.parts.load(Ordering::Relaxed);
        let handle = notice.handle.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = count != 0 && notice.count.load(Ordering::Relaxed) == count;
        is_whole.then_some(NamedMemory { count, bytes, parts, handle })
    }

    /// Says which allocation of a neighbour this rank has open; 0 if none of this number.
    pub fn set_open(&self, neighbour: usize, number: usize, count: u64) {
        self.own.open[self.others[neighbour].1][number].store(count, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor;
    use crate::transport::local::share_memory;
    use crate::transport::shm::{ArenaLayout, RegionOfRank};
    use rustix::fs::MemfdFlags;

    /// Those of two ranks of a node.
    fn two_notices() -> [MemoryNotices; 2] {
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
        notices.try_into().expect("two ranks")
    }

    #[test]
    fn neighbours_see_what_a_rank_names_and_who_has_it_open() {
        let [one, other] = two_notices();
        let before = other.changes();
        assert_eq!((other.of_neighbour(0, 3), one.is_open(3, 0)), (None, true));
        let memory = NamedMemory { count: 7, bytes: 100, parts: 0, handle: [1, 2, 3, 4, 5, 6, 7, 8] };
        one.name(3, memory);
        assert_ne!(other.changes(), before);
        assert_eq!(other.of_neighbour(0, 3), Some(memory));
        assert!(!one.is_open(3, 7));
        other.set_open(0, 3, 7);
        assert!(one.is_open(3, 7) && !one.is_open(3, 0) && !one.is_open(2, 7));
        one.withdraw(3);
        assert_eq!(other.of_neighbour(0, 3), None);
    }

    #[test]
    fn parts_are_sent_when_the_neighbour_has_room() {
        let [one, mut other] = two_notices();
        let parts = || {
            let part = descriptor::memory("a part", MemfdFlags::empty()).expect("a file");
            vec![(4096, part)]
        };
        let mut unsent = one.unsent(5, 1, parts());
        assert!(one.send_parts(&mut unsent).is_err(), "it has no socket");
        other.open_socket().expect("a socket");
        let before = other.changes();
        other.socket.as_ref().expect("a socket").fill();
        assert_eq!(one.send_parts(&mut unsent).map_err(drop), Ok(false));
        assert_eq!(other.changes(), before);
        assert!(other.receive_parts().expect("no parts").is_empty());
        assert_eq!(one.send_parts(&mut unsent).map_err(drop), Ok(true));
        assert_ne!(other.changes(), before);
        // All have them.
        assert_eq!(one.send_parts(&mut unsent).map_err(drop), Ok(true));
        // Of a number that no rank has.
        assert_eq!(one.send_parts(&mut one.unsent(MEMORIES, 2, parts())).map_err(drop), Ok(true));
        let received = other.receive_parts().expect("parts");
        let [ReceivedParts { neighbour: 0, number: 5, count: 1, parts }] = &received[..] else {
            panic!("{received:?}")
        };
        assert_eq!(parts[0].0, 4096);
    }

    #[test]
    fn nodes_without_gpus_have_no_notices() {
        let without = ArenaLayout::new(2, 64, 2, 4096);
        assert_eq!(without.notices(), None);
    }
}
