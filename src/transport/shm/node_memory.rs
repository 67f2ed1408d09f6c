//! The shared memory of a process and of its neighbours, which all communicators of the process use.
//!
//! The first communicator that the processes of a node make exchanges descriptors; later ones among the same
//! processes need no descriptor, because each of them only takes a further region of every arena. Owns which
//! region is free. A process reads its neighbours' regions until its communicator is gone, so a region is
//! free when the communicators of all neighbours that know it are gone, which each process publishes on its
//! node page. The regions of a process that died stay until the arena is freed.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::layout::{ArenaLayout, PREFAULTED_RANKS};
use super::neighbours::{Neighbour, Neighbours};
use super::node_page::{NodePage, REGIONS};
use super::prefault::{Prefaulted, RemotePrefault};
use super::wake_lanes::WakeLanes;
use crate::error::{Error, Result};
use crate::memory::{Arena, PeerArena};
use crate::transport::Rank;
use crate::wake::WakeFd;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Identifies processes that have exchanged their memory: equal on all of them. Random.
pub type NodeKey = [u8; 16];

/// The memory of this process that neighbours read, and what they wake it by.
#[derive(Debug)]
pub struct OwnMemory {
    arena: Arc<Arena>,
    page: Arc<ArenaRef<NodePage>>,
    lanes: Arc<WakeLanes>,
    /// Wakes the thread that prefaults neighbours' buffers, if there is one.
    prefault: Option<Arc<WakeFd>>,
    regions: Mutex<RegionTable>,
}

/// Alignment of regions in their arenas, in bytes.
const REGION_ALIGNMENT: usize = 4096;

/// Where a region is, as its owner tells its neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RegionAddress {
    start: usize,
    slot: usize,
    number: u64,
}

/// The regions of an arena.
#[derive(Debug, Default)]
struct RegionTable {
    /// How many there have been.
    number: u64,
    /// Slots that no region has.
    free_slots: Vec<usize>,
    /// How many slots were ever used.
    slots: usize,
    /// Regions whose communicator is gone, and that neighbours may still read.
    retired: Vec<RetiredRegion>,
}

#[derive(Debug)]
struct RetiredRegion {
    address: RegionAddress,
    len: usize,
    readers: Vec<Reader>,
}

/// A neighbour that reads a region until its own region of the same communicator is closed.
#[derive(Debug)]
struct Reader {
    page: Arc<ArenaRef<NodePage>>,
    region: RegionAddress,
}

impl OwnMemory {
    /// The memory of one of `neighbours` processes on a node. That of a process alone is not shared.
    ///
    /// # Errors
    /// `System` if there is too little memory, or no descriptor is left.
    pub fn new(neighbours: usize) -> Result<Arc<Self>> {
        let is_prefaulted = neighbours <= PREFAULTED_RANKS;
        let new = if neighbours == 1 { Arena::private } else { Arena::new };
        let arena = Arc::new(new(size_of::<NodePage>())?);
        arena.populate(0, size_of::<NodePage>())?;
        let page = ArenaRef::new(arena.piece(0, size_of::<NodePage>()), Arc::clone(&arena) as _)?;
        Ok(Arc::new(Self {
            arena,
            page: Arc::new(page),
            lanes: Arc::new(WakeLanes::new(!is_prefaulted)?),
            prefault: is_prefaulted.then(WakeFd::new).transpose()?.map(Arc::new),
            regions: Mutex::default(),
        }))
    }

    /// Bytes that the memory of a process takes with one region that is laid out so.
    #[must_use]
    pub fn bytes_with(layout: ArenaLayout) -> u64 {
        (size_of::<NodePage>().next_multiple_of(REGION_ALIGNMENT) + layout.bytes()) as u64
    }

    /// The memory itself.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn lanes(&self) -> &Arc<WakeLanes> {
        &self.lanes
    }

    pub(super) fn prefault(&self) -> Option<&Arc<WakeFd>> {
        self.prefault.as_ref()
    }

    /// A free region of zeros for a communicator, laid out by `layout`, from this NUMA node as far as it has
    /// free memory. The pages of the first one exist; of later ones only those that every communicator uses,
    /// so that many communicators that are seldom used take little memory.
    ///
    /// # Errors
    /// `System` if there is too little memory; `Unsupported` if the process has too many communicators at
    /// once.
    pub fn region(self: &Arc<Self>, layout: ArenaLayout, numa_node: Option<u32>) -> Result<Region> {
        let mut table = self.table();
        table.reclaim(&self.arena);
        let slot = table.free_slots.last().copied().unwrap_or(table.slots);
        if slot >= REGIONS {
            return Err(Error::unsupported(format!(
                "this process has {REGIONS} communicators that share memory: drop some of them before you make more"
            )));
        }
        let start = self.arena.reserve(layout.bytes())?;
        table.free_slots.pop();
        table.slots = table.slots.max(slot + 1);
        table.number += 1;
        let address = RegionAddress { start, slot, number: table.number };
        drop(table);
        self.page.open_region(slot, address.number);
        let layout = layout.at(start);
        let region = Region { memory: Arc::clone(self), address, layout, readers: Vec::new() };
        if let Some(node) = numa_node {
            self.arena.prefer(node, start, layout.bytes());
        }
        self.arena.provide(start, layout.on_host())?;
        self.arena.populate(start, region.ready_bytes())?;
        Ok(region)
    }

    fn table(&self) -> MutexGuard<'_, RegionTable> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RegionTable {
    /// Frees the regions that no neighbour reads any more.
    fn reclaim(&mut self, arena: &Arena) {
        let is_read = |reader: &Reader| {
            let RegionAddress { slot, number, .. } = reader.region;
            !reader.page.is_region_closed(slot, number)
        };
        let (read, unread) = std::mem::take(&mut self.retired)
            .into_iter()
            .partition(|retired| retired.readers.iter().any(is_read));
        self.retired = read;
        for RetiredRegion { address, len, .. } in unread {
            arena.end_reservation(address.start, len);
            self.free_slots.push(address.slot);
        }
    }
}

/// The part of an arena that one communicator uses. Dropped when the communicator does not read its
/// neighbours' regions any more.
#[derive(Debug)]
pub struct Region {
    memory: Arc<OwnMemory>,
    address: RegionAddress,
    layout: ArenaLayout,
    readers: Vec<Reader>,
}

impl Region {
    /// What the neighbours need to find it.
    #[must_use]
    pub fn address(&self) -> RegionAddress {
        self.address
    }

    /// Its layout, at its place in the arena.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        self.layout
    }

    /// The arena that it lies in.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.memory.arena
    }

    /// Bytes at the start whose pages exist before the first call.
    fn ready_bytes(&self) -> usize {
        if self.address.number == 1 { self.layout.populated() } else { self.layout.front() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let RegionAddress { slot, number, .. } = self.address;
        self.memory.page.close_region(slot, number);
        let mut table = self.memory.table();
        let readers = std::mem::take(&mut self.readers);
        table.retired.push(RetiredRegion { address: self.address, len: self.layout.bytes(), readers });
        table.reclaim(&self.memory.arena);
    }
}

/// The memory of a neighbour.
#[derive(Clone, Debug)]
pub struct PeerMemory {
    arena: Arc<PeerArena>,
    page: Arc<ArenaRef<NodePage>>,
    /// The eventfds on which its executors sleep.
    wakes: Arc<[WakeFd]>,
    /// Wakes the thread that prefaults neighbours' buffers for it, if there is one.
    prefault: Option<Arc<WakeFd>>,
}

impl PeerMemory {
    /// The memory of one of `neighbours` processes, by its descriptors.
    ///
    /// # Errors
    /// As for [`PeerArena::new`].
    pub(super) fn new(
        arena: OwnedFd,
        wakes: Vec<WakeFd>,
        prefault: Option<WakeFd>,
        neighbours: usize,
    ) -> Result<Self> {
        Self::of_arena(PeerArena::new(arena, neighbours, size_of::<NodePage>())?, wakes, prefault)
    }

    fn of_arena(arena: PeerArena, wakes: Vec<WakeFd>, prefault: Option<WakeFd>) -> Result<Self> {
        let arena = Arc::new(arena);
        let page = arena.piece(0, size_of::<NodePage>())?;
        let page = Arc::new(ArenaRef::new(page, Arc::clone(&arena) as ArenaOwner)?);
        Ok(Self { arena, page, wakes: wakes.into(), prefault: prefault.map(Arc::new) })
    }

    /// `own` as another rank of this process sees it.
    ///
    /// # Errors
    /// As for [`PeerArena::new`].
    pub fn of_this_process(own: &OwnMemory, neighbours: usize) -> Result<Self> {
        let eventfds = own.lanes.eventfds().iter();
        let wakes = eventfds.map(|eventfd| eventfd.try_clone()).collect::<Result<_>>()?;
        let prefault = own.prefault.as_ref().map(|eventfd| eventfd.try_clone()).transpose()?;
        let arena = PeerArena::of_this_process(&own.arena, neighbours, size_of::<NodePage>())?;
        Self::of_arena(arena, wakes, prefault)
    }

    fn prefaulted(&self) -> Prefaulted {
        let (page, arena) = (Arc::clone(&self.page), Arc::clone(&self.arena));
        Prefaulted { page, arena, wake: self.prefault.clone() }
    }
}

/// The memory of the processes of a node, as one of them sees it.
pub struct NodeMemory {
    key: NodeKey,
    place: usize,
    own: Arc<OwnMemory>,
    /// By place; `None` for this process.
    peers: Vec<Option<PeerMemory>>,
    prefault: Option<RemotePrefault>,
    /// Whether no further communicator may use it.
    retired: AtomicBool,
}

/// A rank of a communicator on this node.
#[derive(Clone, Copy, Debug)]
pub struct RegionOfRank {
    /// Its rank in the world.
    pub rank: Rank,
    /// Its place in the [`NodeMemory`].
    pub place: usize,
    /// Its region.
    pub region: RegionAddress,
}

impl NodeMemory {
    /// The memory `own` of the process at `place`, and that of the others by place.
    ///
    /// # Errors
    /// `System` if no thread can be started.
    pub fn new(
        key: NodeKey,
        place: usize,
        own: Arc<OwnMemory>,
        peers: Vec<Option<PeerMemory>>,
    ) -> Result<Self> {
        let prefaulted: Vec<Prefaulted> = peers.iter().flatten().map(PeerMemory::prefaulted).collect();
        let prefault = match &own.prefault {
            Some(wake) if !prefaulted.is_empty() => {
                Some(RemotePrefault::new(Arc::clone(&own.page), Arc::clone(wake), prefaulted)?)
            }
            _ => None,
        };
        Ok(Self { key, place, own, peers, prefault, retired: AtomicBool::new(false) })
    }

    /// What identifies the processes.
    #[must_use]
    pub fn key(&self) -> NodeKey {
        self.key
    }

    /// The place of this process among them.
    #[must_use]
    pub fn place(&self) -> usize {
        self.place
    }

    /// The number of processes.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.peers.len()
    }

    /// Lets no further communicator use it. Those that do go on.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Whether no further communicator may use it.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// This process's memory.
    #[must_use]
    pub fn own(&self) -> &Arc<OwnMemory> {
        &self.own
    }

    /// Announces an allocation in this process's arena to the neighbours: `len` bytes at `offset`.
    pub fn announce(&self, offset: usize, len: usize) {
        if let Some(prefault) = &self.prefault {
            prefault.announce(offset, len);
        }
    }

    /// The neighbours of this rank in a communicator. `ranks` lists its ranks on this node, this one
    /// included, in the same order on all of them. From now on the others may read `region`, this rank's.
    ///
    /// # Errors
    /// `Disagreement` if a rank's place is not that of a neighbour, or its region not in the memory of that
    /// neighbour; `Internal` if this process is not among them.
    pub fn neighbours(&self, region: &mut Region, ranks: &[RegionOfRank]) -> Result<Neighbours> {
        let local_rank = ranks.iter().position(|one| one.place == self.place);
        let local_rank = local_rank.ok_or_else(|| Error::internal("this rank is not on its node"))?;
        let mut others = Vec::new();
        for (index, one) in ranks.iter().enumerate().filter(|(index, _)| *index != local_rank) {
            let peer = self.peers.get(one.place).and_then(Option::as_ref).ok_or_else(|| {
                Error::disagreement(format!(
                    "rank {} has no place among the processes of this node",
                    one.rank
                ))
            })?;
            let front = peer.arena.piece(one.region.start, region.layout.front())?;
            if front.is_none() || !one.region.start.is_multiple_of(REGION_ALIGNMENT) {
                return Err(Error::disagreement(format!(
                    "rank {} names a place for its messages that is not in the memory that it shares: do all ranks run the same build \
                     of flexring?",
                    one.rank
                )));
            }
            region.readers.push(Reader { page: Arc::clone(&peer.page), region: one.region });
            let layout = region.layout.at(one.region.start);
            if layout.is_prefaulted() {
                peer.arena.prefault(one.region.start, region.ready_bytes());
            }
            let (arena, wakes) = (Arc::clone(&peer.arena), Arc::clone(&peer.wakes));
            others.push(Neighbour { rank: one.rank, local_rank: index, arena, layout, wakes });
        }
        let lanes = Arc::clone(&self.own.lanes);
        Ok(Neighbours { local_rank, layout: region.layout, lanes, others })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Piece;
    use crate::transport::local::share_memory;

    const BYTES: usize = 4096;

    fn layout() -> ArenaLayout {
        ArenaLayout::new(2, 64, 2, BYTES)
    }

    /// Two processes that have exchanged their memory.
    fn pair() -> [NodeMemory; 2] {
        share_memory(2, [7; 16]).expect("memory").try_into().ok().expect("two")
    }

    #[test]
    fn a_region_outside_of_a_neighbours_memory_is_refused_by_name() {
        let pair = pair();
        let mut region = pair[0].own.region(layout(), None).expect("memory");
        let theirs = pair[1].own.region(layout(), None).expect("memory").address();
        for start in [usize::MAX, usize::MAX / 2 + 1, theirs.start + 1] {
            let regions = [region.address(), RegionAddress { start, ..theirs }];
            let ranks = [0, 1].map(|rank| RegionOfRank { rank, place: rank, region: regions[rank] });
            let error = pair[0].neighbours(&mut region, &ranks).map(drop).expect_err("a wrong place");
            assert!(error.message().starts_with("rank 1 names a place for its messages"), "{error}");
        }
    }

    /// A region of each process for one communicator.
    fn communicator(pair: &[NodeMemory; 2]) -> [(Region, Neighbours); 2] {
        let mut regions = [0, 1].map(|place: usize| pair[place].own.region(layout(), None).expect("memory"));
        let ranks = [0, 1].map(|rank| RegionOfRank { rank, place: rank, region: regions[rank].address() });
        let neighbours = [0, 1]
            .map(|place: usize| pair[place].neighbours(&mut regions[place], &ranks).expect("neighbours"));
        let mut neighbours = neighbours.into_iter();
        regions.map(|region| (region, neighbours.next().expect("two")))
    }

    fn byte(piece: Option<Piece>) -> *mut u8 {
        piece.expect("within").as_ptr()
    }

    #[test]
    fn regions_of_communicators_are_apart_and_found_by_neighbours() {
        let pair = pair();
        // The offsets differ between the processes.
        let _earlier = pair[1].own.region(layout(), None).expect("memory");
        let (first, second) = (communicator(&pair), communicator(&pair));
        for (value, [mine, theirs]) in [(1, &first), (2, &second)] {
            let (region, neighbours) = (&mine.0, &theirs.1);
            // SAFETY: only this test accesses the arenas.
            unsafe { byte(region.arena().piece(region.layout().start(), 1)).write(value) };
            let seen = &neighbours.others[0];
            assert_eq!((seen.rank, seen.layout.start()), (0, region.layout().start()));
        }
        for (value, [_, theirs]) in [(1, &first), (2, &second)] {
            let seen = &theirs.1.others[0];
            let first = byte(seen.arena.piece(seen.layout.start(), 1).expect("mapped"));
            // SAFETY: as above.
            assert_eq!(unsafe { first.read() }, value);
        }
    }

    #[test]
    fn a_region_is_not_used_again_while_a_neighbour_may_read_it() {
        let pair = pair();
        let [(mine, _), (theirs, _)] = communicator(&pair);
        let start = mine.layout().start();
        // SAFETY: only this test accesses the arena.
        unsafe { byte(mine.arena().piece(start, 1)).write(9) };
        drop(mine);
        let next = pair[0].own.region(layout(), None).expect("memory");
        assert_ne!(next.layout().start(), start);
        // The neighbour's communicator is gone, too.
        drop(theirs);
        drop(next);
        let next = pair[0].own.region(layout(), None).expect("memory");
        assert_eq!(next.layout().start(), start);
        // SAFETY: as above.
        assert_eq!(unsafe { byte(next.arena().piece(start, 1)).read() }, 0);
    }

    #[test]
    fn a_thousand_communicators_in_a_row_take_the_memory_of_one() {
        let pair = pair();
        let first = communicator(&pair)[0].0.layout().start();
        for _ in 0..1000 {
            let starts = communicator(&pair).map(|(region, _)| region.layout().start());
            assert!(starts[0] <= first + 2 * layout().bytes(), "{starts:?}");
        }
        let all: Vec<_> = (0..REGIONS).map(|_| pair[0].own.region(layout(), None).expect("a slot")).collect();
        assert!(pair[0].own.region(layout(), None).is_err(), "beyond {}", all.len());
    }

    #[test]
    fn descriptors_are_those_of_the_process_and_not_of_a_communicator() {
        let pair = pair();
        let [(_, first), _] = communicator(&pair);
        let [(_, second), _] = communicator(&pair);
        assert!(Arc::ptr_eq(&first.lanes, &second.lanes));
        assert!(Arc::ptr_eq(&first.others[0].wakes, &second.others[0].wakes));
    }
}
