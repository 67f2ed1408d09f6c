//! The memory of one rank that the kernels of its node share.
//!
//! Owns how it is cleared, connected to that of the other ranks, and closed, and that it outlives the graphs
//! which have captured calls. Must not know how kernels are launched.

use super::layout::{
    CAPTURED, CLOSED_AT, CollectiveLayout, LinkKind, LinkWords, MOST_RANKS, OWNER, PEERS, StatusWords,
    memory_at,
};
use super::listed::{self, ListMemory, ListedProgram};
use super::status::{CollectiveFailure, CollectiveWait};
use super::transfers::{self, TransferMemory, TransferTable, VectorTransfer};
use crate::cuda_driver::{Address, DriverHandle};
use crate::device::cuda::naps::nap_until;
use crate::device::cuda::objects::{Gpu, GpuMemory, address};
use crate::device::cuda::pinned::{PinnedMemory, PinnedRange};
use crate::device::relay_link::{RelayLink, RelayMemory, RelaySlots, RelayedMessages, WORDS};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::{NeighbourSlots, Piece, Registrar, lend, lend_in_place};
use crate::plan::device_program::DeviceProgram;
use crate::rank::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes as _, IntoBytes as _};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`: nothing waits for the destructor.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes the reference over.
const MOVE: u32 = 1;
/// How long the end of a communicator waits for a replay that runs.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(1);

/// One rank's memory for collectives, in GPU memory that the other ranks have open, and the words that its
/// kernels report in.
pub(crate) struct CollectiveMemory {
    gpu: Arc<Gpu>,
    /// The allocation, which has it at the end, from this offset on.
    shared: Arc<GpuMemory>,
    offset: usize,
    status: PinnedMemory,
    /// As the memory was made; and as the kernels use it, once they are connected.
    layout: CollectiveLayout,
    connected: OnceLock<CollectiveLayout>,
    /// References of graphs that have captured calls.
    captures: Arc<AtomicUsize>,
    /// Launches and captures so far.
    launches: AtomicU64,
    /// Whether a replay after the end was logged.
    replay_logged: AtomicBool,
    /// By rank, the links to the others: those of lists, then those of transfers; once the memory of the
    /// ranks of this node is connected.
    links: OnceLock<GpuMemory>,
    /// Those to ranks whose memory this rank's kernels do not reach, as calls needed them.
    relays: Mutex<BTreeMap<Rank, Arc<RelayLink>>>,
    /// What of `neighbours` is page-locked for the GPU. Dropped before them.
    locked: Mutex<Vec<PinnedRange>>,
    /// Where messages to and from such ranks on the node are.
    neighbours: OnceLock<Vec<NeighbourSlots>>,
    /// Whether the devices between nodes could not register slots on the GPU.
    skips_gpu: AtomicBool,
    /// Lists of items that graphs have captured.
    captured_lists: Mutex<Vec<Arc<ListedProgram>>>,
    transfers: Mutex<TransferMemory>,
    /// Copies of inputs that are overwritten before they are sent. Each is as long as the longest call needed
    /// when it was allocated; the last one is used.
    copies: Mutex<Vec<GpuMemory>>,
}

/// The slots of both directions of a link to another node.
enum SlotMemory {
    OnGpu(GpuMemory),
    Pinned(PinnedMemory),
}

/// Memory whose communicators have ended, but not the graphs that have captured their calls: a replay finds
/// there that it must leave.
static ENDED: Mutex<Vec<Arc<CollectiveMemory>>> = Mutex::new(Vec::new());

impl CollectiveMemory {
    /// The memory at the end of `shared`, whose other users leave the last [`CollectiveLayout::bytes`] to it.
    /// Not open in another process yet.
    ///
    /// # Errors
    /// `System` if there is too little pinned memory.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        shared: &Arc<GpuMemory>,
        layout: CollectiveLayout,
    ) -> Result<Arc<Self>> {
        let mut captured = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        let (kept, unused) =
            std::mem::take(&mut *captured).into_iter().partition(|memory| memory.is_captured());
        *captured = kept;
        drop(captured);
        let unused: Vec<Arc<Self>> = unused;
        drop(unused);
        let status = PinnedMemory::new(gpu, size_of::<StatusWords>())?;
        let offset = offset_in(shared.piece(), layout)?;
        let zeros = vec![0u8; layout.zeroed_bytes()];
        lend(&zeros, &mut [], |zeros, _| {
            // SAFETY: both have this length, and are not used otherwise until the copy completes.
            unsafe { gpu.copy_now(shared.piece().narrow(offset, zeros.len()), zeros) }
        })?;
        Ok(Arc::new(Self {
            gpu: Arc::clone(gpu),
            shared: Arc::clone(shared),
            offset,
            status,
            layout,
            connected: OnceLock::new(),
            captures: Arc::default(),
            launches: AtomicU64::new(0),
            replay_logged: AtomicBool::new(false),
            links: OnceLock::new(),
            relays: Mutex::default(),
            locked: Mutex::default(),
            neighbours: OnceLock::new(),
            skips_gpu: AtomicBool::new(false),
            captured_lists: Mutex::default(),
            transfers: Mutex::default(),
            copies: Mutex::default(),
        }))
    }

    /// Connects it to that of the ranks whose kernels reach it: to `ranks`, this one at `own` among them.
    /// `peers`: by place, the allocation as this process has it open; `None` for this rank. Before the first
    /// launch. `world`: the number of all ranks; `neighbours`: where messages to and from those of them that
    /// are on this node and not among `ranks` are.
    ///
    /// # Errors
    /// `Internal` if an allocation is too short; `System` if the GPU fails.
    pub(crate) fn connect(
        &self,
        ranks: &[Rank],
        own: usize,
        world: usize,
        peers: &[Option<Piece>],
        neighbours: Vec<NeighbourSlots>,
    ) -> Result<()> {
        let layout = if ranks.len() == 1 { CollectiveLayout::ALONE } else { self.layout };
        let mut addresses = [0; MOST_RANKS];
        for (address_of, peer) in addresses.iter_mut().zip(peers) {
            let shared = peer.unwrap_or(self.shared.piece());
            *address_of = address(shared) + offset_in(shared, self.layout)? as Address;
        }
        let of = |of| listed::links(of, layout, ranks, own, &addresses, world);
        let links = [of(LinkKind::Lists), of(LinkKind::Transfers)].concat();
        let memory = GpuMemory::new(&self.gpu, size_of_val(&links[..]))?;
        listed::write(&self.gpu, &memory, 0, links.as_bytes())?;
        let _ = self.links.set(memory);
        let _ = self.neighbours.set(neighbours);
        let _ = self.connected.set(layout);
        self.write(PEERS, &addresses)
    }

    /// Copies a list to the GPU. `element`: bytes of an element; `memory`: that of the communicator. Its
    /// messages to and from ranks for which `is_elsewhere` are relayed, from memory that is registered with
    /// the devices of `registrar`.
    ///
    /// # Errors
    /// As for [`ListedProgram::new`]; `Internal` if the memory of the ranks is not connected.
    pub(crate) fn list(
        &self,
        list: &DeviceProgram,
        element: usize,
        memory: &mut ListMemory,
        is_elsewhere: impl Fn(Rank) -> bool,
        registrar: Option<&Arc<dyn Registrar>>,
    ) -> Result<ListedProgram> {
        let links = self.links.get().ok_or_else(|| Error::internal("kernels are not connected"))?;
        let elsewhere = list.links.iter().map(|link| link.peer).filter(|peer| is_elsewhere(*peer));
        let relays =
            elsewhere.map(|peer| self.relay_link(links, peer, registrar)).collect::<Result<Vec<_>>>()?;
        ListedProgram::new(&self.gpu, address(links.piece()), list, element, memory, relays)
    }

    /// Writes the transfers of the next launch, of a rank of `world`, where its kernel finds them. Returns
    /// also what is relayed: messages to and from ranks for which `is_elsewhere`. `wait` is called while
    /// too many launches have not ended.
    ///
    /// # Errors
    /// Those of `wait`; `System` if the GPU has too little memory; `Internal` if the memory of the ranks is
    /// not connected.
    pub(crate) fn transfers(
        &self,
        transfers: &[VectorTransfer],
        (world, is_elsewhere): (usize, impl Fn(Rank) -> bool),
        registrar: Option<&Arc<dyn Registrar>>,
        is_captured: bool,
        wait: impl FnMut() -> Result<()>,
    ) -> Result<(TransferTable, Arc<[RelayedMessages]>)> {
        let links = self.links.get().ok_or_else(|| Error::internal("kernels are not connected"))?;
        let link_of = |rank: Rank| if is_elsewhere(rank) { rank } else { world + rank };
        let words = transfers::words_of(transfers, |rank| link_of(rank) as u32);
        let elsewhere: BTreeSet<Rank> = transfers
            .iter()
            .filter_map(|transfer| transfer.peer())
            .filter(|peer| is_elsewhere(*peer))
            .collect();
        let relayed = elsewhere.into_iter().map(|peer| {
            let link = self.relay_link(links, peer, registrar)?;
            Ok(transfers::relayed_messages(&words, link_of(peer) as u32, link))
        });
        let relayed = relayed.collect::<Result<Vec<_>>>()?;
        let mut memory = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_captured() {
            memory.drop_captured();
        }
        let launch = self.following_launch() | if is_captured { CAPTURED } else { 0 };
        let placed = (address(links.piece()), &*words, world);
        let table = memory.table(&self.gpu, placed, launch, || self.completed(), wait)?;
        Ok((table, relayed.into()))
    }

    /// Memory for a copy of an input. Calls that are launched one behind the other use the same.
    ///
    /// # Errors
    /// `System` if the GPU has too little memory.
    pub(crate) fn copy_of_input(&self, bytes: usize) -> Result<Piece> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if copies.last().is_none_or(|last| last.piece().len() < bytes) {
            copies.push(GpuMemory::new(&self.gpu, bytes.next_power_of_two())?);
        }
        Ok(copies.last().map_or(Piece::EMPTY, |last| last.piece().narrow(0, bytes)))
    }

    /// The link to a rank whose memory kernels do not reach. The first call that needs it has it made.
    fn relay_link(
        &self,
        links: &GpuMemory,
        peer: Rank,
        registrar: Option<&Arc<dyn Registrar>>,
    ) -> Result<Arc<RelayLink>> {
        let mut relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = relays.get(&peer) {
            return Ok(Arc::clone(link));
        }
        let world = links.piece().len() / 2 / size_of::<LinkWords>();
        let slots = RelaySlots::of_world(world);
        let neighbour = self.neighbours.get().and_then(|all| all.iter().find(|slots| slots.peer == peer));
        let made = match neighbour {
            Some(neighbour) => self.link_within_node(neighbour, slots)?,
            None => self.link_between_nodes(peer, slots, registrar)?,
        };
        let (words, link) = made;
        listed::write(&self.gpu, links, peer * size_of_val(&words), words.as_bytes())?;
        let link = Arc::new(link);
        relays.insert(peer, Arc::clone(&link));
        Ok(link)
    }

    fn link_between_nodes(
        &self,
        peer: Rank,
        slots: RelaySlots,
        registrar: Option<&Arc<dyn Registrar>>,
    ) -> Result<(LinkWords, RelayLink)> {
        let words = PinnedMemory::new(&self.gpu, WORDS)?;
        let memory = self.relay_slots(slots, registrar)?;
        let (piece, start) = match &memory {
            SlotMemory::OnGpu(memory) => (memory.piece(), address(memory.piece())),
            SlotMemory::Pinned(memory) => (memory.piece(), memory.address()),
        };
        let starts = [start, start + slots.len() as Address];
        let link = listed::relayed_link(peer, words.address(), starts, slots);
        let pieces = [0, slots.len()].map(|offset| piece.narrow(offset, slots.len()));
        let used = RelayMemory { words: words.piece(), slots: pieces, reads_in_place: false };
        let (owner, registered) =
            (Box::new((words, memory)), registrar.map(|registrar| (piece, Arc::clone(registrar))));
        // SAFETY: the words are zero and aligned to a page; they and the slots live as long as their owner.
        Ok((link, unsafe { RelayLink::new(peer, used, slots, owner, registered) }))
    }

    /// A link through the memory that the ranks of a node share.
    fn link_within_node(
        &self,
        neighbour: &NeighbourSlots,
        slots: RelaySlots,
    ) -> Result<(LinkWords, RelayLink)> {
        let outgoing = neighbour.own;
        let out = self.lock(outgoing, false)?;
        let words = PinnedMemory::new(&self.gpu, WORDS)?;
        let theirs = neighbour.theirs.and_then(|incoming| {
            let locked = self.lock(incoming, neighbour.is_read_only).inspect_err(|error| {
                log::warn!(
                    "the CPU copies messages of the GPU of rank {}: {}",
                    neighbour.peer,
                    error.message()
                );
            });
            Some((locked.ok()?, incoming))
        });
        let mapped = Arc::clone(&neighbour.mapped);
        let (incoming, piece, copies) = match theirs {
            Some((address, piece)) => (address, piece, None),
            None => {
                let copies = PinnedMemory::new(&self.gpu, slots.len())?;
                (copies.address(), copies.piece(), Some(copies))
            }
        };
        let link = listed::relayed_link(neighbour.peer, words.address(), [out, incoming], slots);
        let used =
            RelayMemory { words: words.piece(), slots: [outgoing, piece], reads_in_place: copies.is_none() };
        let owner = Box::new((words, copies, mapped));
        // SAFETY: the words are zero and aligned to a page. They live as long as their owner, which keeps the
        // neighbours' memory mapped.
        Ok((link, unsafe { RelayLink::new(neighbour.peer, used, slots, owner, None) }))
    }

    /// The address on the GPU of host memory, which is page-locked until [`unlock`](Self::unlock).
    fn lock(&self, piece: Piece, read_only: bool) -> Result<Address> {
        // SAFETY: `neighbours` keeps the memory mapped, and outlives its registrations.
        let range = unsafe { PinnedRange::new(&self.gpu, piece, read_only)? };
        let address = range.address_of(piece);
        self.locked.lock().unwrap_or_else(PoisonError::into_inner).push(range);
        address.ok_or_else(|| Error::internal("page-locked memory has no address"))
    }

    /// Memory for the slots of a link, registered with the devices: of the GPU if they reach that, else of
    /// the host.
    fn relay_slots(&self, slots: RelaySlots, registrar: Option<&Arc<dyn Registrar>>) -> Result<SlotMemory> {
        if let Some(registrar) = registrar
            && registrar.reaches(self.shared.piece())
            && !self.skips_gpu.load(Ordering::Relaxed)
        {
            let memory = GpuMemory::new(&self.gpu, 2 * slots.len())?;
            let registered = registrar.register(memory.piece());
            if registered.is_ok() && registrar.reaches(memory.piece()) {
                return Ok(SlotMemory::OnGpu(memory));
            }
            // Not again for each link: it may have waited.
            self.skips_gpu.store(true, Ordering::Relaxed);
            let why = registered.err().map_or_else(String::new, |error| format!(": {}", error.message()));
            log::warn!("messages of {:?} to further ranks pass through host memory{why}", self.gpu);
        }
        let memory = PinnedMemory::new(&self.gpu, 2 * slots.len())?;
        registrar.inspect(|registrar| registrar.try_register(memory.piece()));
        Ok(SlotMemory::Pinned(memory))
    }

    /// The launch that has started and whose messages are to be relayed now.
    pub(crate) fn started(&self) -> Option<u64> {
        Some(self.status().started()).filter(|launch| *launch != 0)
    }

    /// Lets the next such launch start. To be called as the messages of the last one begin to be relayed.
    pub(crate) fn take_started(&self) {
        self.status().take_started();
    }

    /// Whether the ranks of the node have used all messages of transfers that this rank's kernels, which have
    /// ended, sent to them. As they use one they write to this memory.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn are_transfers_used(&self) -> Result<bool> {
        let Some(links) = self.links.get() else { return Ok(true) };
        let mut words = vec![0u64; links.piece().len() / size_of::<u64>()];
        lend_in_place(&mut words, |into| {
            // SAFETY: both have this length, and no kernel of this rank runs.
            unsafe { self.gpu.copy_now(into, links.piece()) }
        })?;
        let (_, transfers) = words.split_at(words.len() / 2);
        let state = address(self.shared.piece()) + self.offset as Address;
        let links = <[LinkWords]>::ref_from_bytes(transfers.as_bytes());
        let links = links.map_err(|_| Error::internal("links have another length"))?;
        for LinkWords { out_used, sent, slots, .. } in links.iter().filter(|link| link.sent > 0) {
            let slots = u64::from(*slots);
            let mut used = vec![0u64; slots as usize];
            self.read((out_used - state) as usize, &mut used)?;
            let mut last = sent.saturating_sub(slots) + 1..=*sent;
            if last.any(|number| used[(number % slots) as usize] < number) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Keeps a list that a graph is about to capture, for as long as graphs with calls exist.
    pub(crate) fn keep_list(&self, list: &Arc<ListedProgram>) {
        let mut lists = self.captured_lists.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_captured() {
            lists.clear();
        }
        if !lists.iter().any(|kept| Arc::ptr_eq(kept, list)) {
            lists.push(Arc::clone(list));
        }
    }

    /// Sets where this GPU maps an allocation that a rank has named; 0 if it is not to be used any more.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn set_memory(&self, rank: usize, number: usize, start: Address) -> Result<()> {
        self.write(memory_at(rank, number), &[start])
    }

    /// Whether a kernel runs now, launched or replayed. In a broken context none does.
    pub(crate) fn is_running(&self) -> bool {
        let mut owner = [0u64];
        self.read(OWNER, &mut owner).is_ok() && owner != [0]
    }

    /// The sizes that the kernels use.
    pub(crate) fn layout(&self) -> CollectiveLayout {
        self.connected.get().copied().unwrap_or(self.layout)
    }

    /// The addresses of state and status on the GPU.
    pub(in crate::device::cuda) fn addresses(&self) -> [Address; 2] {
        [address(self.shared.piece()) + self.offset as Address, self.status.address()]
    }

    /// Counts a launch, or a captured one. Returns its number.
    pub(in crate::device::cuda) fn next_launch(&self, is_captured: bool) -> u64 {
        (self.launches.fetch_add(1, Ordering::Relaxed) + 1) | if is_captured { CAPTURED } else { 0 }
    }

    /// The number of the next launch.
    pub(crate) fn following_launch(&self) -> u64 {
        self.launches.load(Ordering::Relaxed) + 1
    }

    /// The first failure of a kernel.
    pub(crate) fn failure(&self) -> Option<CollectiveFailure> {
        self.status().failure()
    }

    /// What a kernel waits for.
    pub(crate) fn waiting(&self) -> Option<CollectiveWait> {
        self.status().waiting()
    }

    /// The last launch that has reported its end.
    pub(crate) fn completed(&self) -> u64 {
        self.status().completed()
    }

    /// Whether there was a call in which ranks accessed each other's vectors.
    pub(crate) fn was_direct(&self) -> bool {
        self.status().direct() != 0
    }

    /// A rank whose vectors were not registered in a call in which those of this rank were.
    pub(crate) fn unplaced(&self) -> Option<usize> {
        self.status().unplaced()
    }

    /// Has all kernels leave, those that run and those that start later.
    pub(crate) fn abort(&self) {
        self.status().abort();
    }

    /// Has the graph that is being captured keep this memory. The context is current.
    ///
    /// # Errors
    /// `System` if the driver refuses; `Unsupported` if it is older than CUDA 11.3.
    ///
    /// # Safety
    /// The graph is live.
    pub(in crate::device::cuda) unsafe fn keep_for(&self, graph: DriverHandle) -> Result<()> {
        let (driver, mut object) = (self.gpu.driver(), std::ptr::null_mut());
        let captures = Arc::into_raw(Arc::clone(&self.captures)).cast_mut().cast::<c_void>();
        self.captures.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the out-parameter is writable; the destructor takes the reference that `captures` is.
        let created = unsafe {
            driver.user_object_create(&raw mut object, captures, release_capture, 1, NO_DESTRUCTOR_SYNC)
        };
        if let Err(failure) = created {
            // SAFETY: no object has taken the reference.
            unsafe { release_capture(captures) };
            return Err(failure.into());
        }
        // SAFETY: the caller guarantees the graph; the object has the one reference that the graph takes
        // over.
        let kept = unsafe { driver.graph_retain_user_object(graph, object, 1, MOVE) };
        kept.map_err(|failure| {
            // SAFETY: the graph has not taken the reference.
            let _ = unsafe { driver.user_object_release(object, 1) };
            failure.into()
        })
    }

    /// Whether a graph has captured calls.
    pub(crate) fn is_captured(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    /// Has all later replays leave, and keeps the memory for as long as a graph may be replayed. `false` if a
    /// replay still runs after a second: then the memory of all ranks must stay as it is.
    pub(crate) fn close(self: &Arc<Self>) -> bool {
        if !self.is_captured() {
            return true;
        }
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(self));
        let begun = Instant::now();
        let closed = self.write(CLOSED_AT, &[1u32]).and_then(|()| {
            let mut owner = [0u64];
            let mut read = Ok(());
            nap_until(|| {
                read = self.read(OWNER, &mut owner);
                read.is_err() || owner == [0] || begun.elapsed() > REPLAY_TIMEOUT
            });
            read.map(|()| owner == [0])
        });
        closed.unwrap_or_else(|error| {
            // In a broken context nothing runs any more.
            log::debug!("{error}");
            true
        })
    }

    /// Ends the page-locking of the memory of the node. No kernel runs any more, and later replays leave.
    pub(crate) fn unlock(&self) {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Logs, once for each communicator that has ended, that a graph with its calls was launched. No caller
    /// would get the error.
    pub(crate) fn log_late_replays() {
        for memory in ENDED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if memory.failure().is_some() && !memory.replay_logged.swap(true, Ordering::Relaxed) {
                log::error!(
                    "a graph on {:?} was launched whose calls were captured with a communicator that has ended or failed: they did \
                     nothing (fix: destroy graphs before their communicator, and capture them again with the new one)",
                    memory.gpu
                );
            }
        }
    }

    /// Whether graphs may be launched with calls of communicators that have ended.
    pub(crate) fn any_may_be_replayed() -> bool {
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|memory| memory.is_captured())
    }

    fn status(&self) -> &StatusWords {
        // SAFETY: the memory begins with the words, is aligned to a page and was zeroed; all of them are
        // atomics.
        unsafe { self.status.start().cast::<StatusWords>().as_ref() }
    }

    /// Writes to the state, after what was written before.
    fn write<T: Element>(&self, at: usize, values: &[T]) -> Result<()> {
        lend(values, &mut [], |values, _| {
            // SAFETY: both have this length. Kernels read these words by atomic accesses, or not yet at all.
            unsafe { self.gpu.copy_now(self.shared.piece().narrow(self.offset + at, values.len()), values) }
        })
    }

    fn read(&self, at: usize, values: &mut [u64]) -> Result<()> {
        lend_in_place(values, |into| {
            // SAFETY: both have this length; a kernel that writes the word does so at once.
            unsafe { self.gpu.copy_now(into, self.shared.piece().narrow(self.offset + at, into.len())) }
        })
    }
}

/// The destructor of a user object. Calls no function of the driver, which forbids that.
unsafe extern "C" fn release_capture(captures: *mut c_void) {
    // SAFETY: it was made of this type by `Arc::into_raw`, and the driver calls this once.
    let captures = unsafe { Arc::from_raw(captures.cast_const().cast::<AtomicUsize>()) };
    captures.fetch_sub(1, Ordering::Release);
}

/// Where the memory of collectives begins in an allocation: it is at the end.
fn offset_in(shared: Piece, layout: CollectiveLayout) -> Result<usize> {
    let offset = shared.len().checked_sub(layout.bytes());
    offset.ok_or_else(|| Error::internal("a rank shares too little memory for collectives"))
}
