//! Ranks that share a node's memory: messages are read where the sender has them.
//!
//! Owns the lanes between the ranks of one node, in their arenas, and the bells that wake them. A message is
//! an entry in a lane that says where in the sender's arena its bytes are; the receiver reads them there and
//! gives the entry back. What does not lie in the arena is staged in a slot of it beforehand. Must not know
//! what the bytes mean.
//!
//! A rank writes to its own arena only. Peers map it for reading, so no peer can harm another's memory.

mod gpu;
mod mailbox;
mod neighbours;
mod prefault;
mod spsc_queue;

pub use mailbox::Mailbox;
pub use neighbours::{DescriptorExchange, Neighbour, Neighbours};
pub use prefault::RemotePrefault;

use super::{Event, Events, InPlaceTransport, Rank, Transport};
use crate::call::{Call, CallWords};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Arena, PeerArena, Piece, Sharing};
use crate::wake::WakeFd;
use spsc_queue::{Duplex, ENTRIES, InvalidCounter, NeedWakeup, SpscQueue};
use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// Entries of a lane that messages may take; the others are for the calls that announce them. A rank is at
/// most one call ahead of a peer, so two are enough.
const WINDOW: usize = ENTRIES - 2;

/// How long a rank that gives up waits for peers that are reading its memory. They read one sub-chunk at a
/// time, so this only passes if one of them was stopped; its own check then tells it that it read too late.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// First words of an entry.
const CALL: u64 = 1;
const MESSAGE: u64 = 2;
/// A message in the memory of a GPU that its sender has given notice of.
const ON_GPU: u64 = 3;

/// The words that a rank shows its neighbours besides the lanes, each on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(4096))]
struct ControlPage {
    need_wakeup: crossbeam_utils::CachePadded<NeedWakeup>,
    /// 1 while the rank reads views of others.
    reading: crossbeam_utils::CachePadded<AtomicU32>,
    /// 1 once the rank has given up: what its messages point at may change at any time.
    aborted: crossbeam_utils::CachePadded<AtomicU32>,
    prefault: crossbeam_utils::CachePadded<prefault::Prefault>,
    gpu: crossbeam_utils::CachePadded<gpu::GpuNotice>,
}

/// Where everything is in an arena, given how many ranks share the node and how large a small message may be.
#[derive(Clone, Copy, Debug)]
pub struct ArenaLayout {
    neighbours: usize,
    small: usize,
    slots: usize,
    slot_bytes: usize,
    gpu_slot_bytes: usize,
}

/// Slots of one size, side by side in an arena.
#[derive(Clone, Copy, Debug)]
pub struct PoolLayout {
    at: usize,
    slots: usize,
    slot_bytes: usize,
}

impl PoolLayout {
    /// How many slots there are, and bytes of each.
    #[must_use]
    pub fn slots(self) -> (usize, usize) {
        (self.slots, self.slot_bytes)
    }

    fn bytes(self) -> usize {
        self.slots * self.slot_bytes
    }

    /// All of it.
    #[must_use]
    pub fn piece(self, arena: &Arena) -> Piece {
        arena.piece(self.at, self.bytes()).expect("pools lie within the arena")
    }

    /// The slots, cut out of a piece as long as the pool.
    #[must_use]
    pub fn cut(self, piece: Piece) -> Vec<Piece> {
        (0..self.slots).map(|number| piece.narrow(number * self.slot_bytes, self.slot_bytes)).collect()
    }
}

impl ArenaLayout {
    /// The layout for a node of `neighbours` ranks, whose small messages have up to `small` bytes, with `slots`
    /// slots of `slot_bytes` in the pool, and of `gpu_slot_bytes` in that for vectors on GPUs. Equal on all ranks of the
    /// node but for the pools, which come last.
    #[must_use]
    pub fn new(
        neighbours: usize,
        small: usize,
        slots: usize,
        slot_bytes: usize,
        gpu_slot_bytes: usize,
    ) -> Self {
        Self { neighbours, small, slots, slot_bytes, gpu_slot_bytes }
    }

    fn lane(self, neighbour: usize) -> usize {
        size_of::<ControlPage>() + neighbour * size_of::<SpscQueue>()
    }

    fn mailbox(self) -> usize {
        self.lane(self.neighbours).next_multiple_of(4096)
    }

    /// The pool.
    #[must_use]
    pub fn pool(self) -> PoolLayout {
        let at = (self.mailbox() + mailbox::bytes(self.small)).next_multiple_of(4096);
        PoolLayout { at, slots: self.slots, slot_bytes: self.slot_bytes }
    }

    /// The pool for vectors on GPUs, which takes no memory before there are any.
    #[must_use]
    pub fn gpu_pool(self) -> PoolLayout {
        let before = self.pool();
        PoolLayout { at: before.at + before.bytes(), slots: self.slots, slot_bytes: self.gpu_slot_bytes }
    }

    /// Bytes in front of an arena that this layout takes.
    #[must_use]
    pub fn bytes(self) -> usize {
        let last = self.gpu_pool();
        last.at + last.bytes()
    }
}

/// Something in an arena that lives as long as the arena is held.
#[derive(Debug)]
struct ArenaRef<T> {
    at: NonNull<T>,
    _held: Arc<dyn std::any::Any + Send + Sync>,
}

// SAFETY: what is placed in arenas consists of atomics, which any thread may use.
unsafe impl<T: Sync> Send for ArenaRef<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for ArenaRef<T> {}

impl<T> ArenaRef<T> {
    /// Something that consists of atomics, in the memory of `piece`, which lies in the arena behind `held`.
    fn new(piece: Option<Piece>, held: Arc<dyn std::any::Any + Send + Sync>) -> Result<Self> {
        let fits = |piece: &Piece| piece.len() >= size_of::<T>() && piece.as_ptr().cast::<T>().is_aligned();
        let at = piece
            .filter(fits)
            .and_then(|piece| NonNull::new(piece.as_ptr().cast::<T>()))
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the layout does not fit the arena"))?;
        Ok(Self { at, _held: held })
    }
}

impl<T> Deref for ArenaRef<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the memory holds a T for as long as `_held` does: zeros are a valid T, since it consists of
        // atomic integers, and arenas start as zeros; it is aligned and large enough, as was checked.
        unsafe { self.at.as_ref() }
    }
}

/// The link to one neighbour.
struct Link {
    rank: Rank,
    duplex: Duplex<ArenaRef<SpscQueue>>,
    control: ArenaRef<ControlPage>,
    wake: WakeFd,
    arena: Arc<PeerArena>,
    /// Its place on the node.
    place: usize,
    /// What it shares of its GPU, if this rank reaches it.
    on_gpu: gpu::PeerGpu,
    /// Of my entries that are not acknowledged yet, oldest first: whether it is a message.
    under_way: VecDeque<bool>,
    acknowledged: u64,
    /// Whether the peer's call of this sequence was peer_entered.
    peer_entered: bool,
    /// The call that this rank is in, and whether it goes over this link.
    sequence: u64,
    announced: bool,
}

/// The shared-memory transport of one rank.
pub struct Shm {
    name: &'static str,
    arena: Arc<Arena>,
    control: ArenaRef<ControlPage>,
    wake: WakeFd,
    links: Vec<Link>,
    /// By rank, the index of its link.
    of_rank: Vec<Option<usize>>,
    /// Where an arena has what GPUs read.
    gpu_pool: PoolLayout,
    /// This rank's place on the node.
    place: usize,
    /// What is shared of a GPU, if there is one, and whether all neighbours reach it.
    sharing: Option<Box<dyn Sharing>>,
    shared: bool,
}

impl Shm {
    /// Joins the lanes of `arena`, laid out by `layout`, with those of the neighbours.
    ///
    /// # Errors
    /// `System` if a neighbour's arena cannot be mapped.
    pub fn new(
        name: &'static str,
        world: usize,
        arena: &Arc<Arena>,
        layout: ArenaLayout,
        neighbours: &Neighbours,
    ) -> Result<Self> {
        let held: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(arena) as _;
        let control = ArenaRef::new(arena.piece(0, size_of::<ControlPage>()), Arc::clone(&held))?;
        let mut links = Vec::new();
        let mut of_rank = vec![None; world];
        for neighbour in &neighbours.others {
            let theirs: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&neighbour.arena) as _;
            let queue_bytes = size_of::<SpscQueue>();
            let mine =
                ArenaRef::new(arena.piece(layout.lane(neighbour.place), queue_bytes), Arc::clone(&held))?;
            let lane = neighbour.arena.piece(layout.lane(neighbours.place), queue_bytes);
            of_rank[neighbour.rank] = Some(links.len());
            links.push(Link {
                rank: neighbour.rank,
                duplex: Duplex::new(mine, ArenaRef::new(lane, Arc::clone(&theirs))?),
                control: ArenaRef::new(neighbour.arena.piece(0, size_of::<ControlPage>()), theirs)?,
                wake: neighbour.wake.try_clone()?,
                arena: Arc::clone(&neighbour.arena),
                place: neighbour.place,
                on_gpu: gpu::PeerGpu::default(),
                under_way: VecDeque::with_capacity(ENTRIES),
                acknowledged: 0,
                sequence: 0,
                announced: false,
                peer_entered: true,
            });
        }
        Ok(Self {
            name,
            arena: Arc::clone(arena),
            control,
            wake: neighbours.wake.try_clone()?,
            links,
            of_rank,
            gpu_pool: layout.gpu_pool(),
            place: neighbours.place,
            sharing: None,
            shared: false,
        })
    }

    fn link(&mut self, peer: Rank) -> &mut Link {
        let index = self.of_rank[peer].expect("the executor routes only neighbours here");
        &mut self.links[index]
    }

    fn check_given_up(&self) -> Result<()> {
        for link in &self.links {
            if link.control.aborted.load(Ordering::Acquire) != 0 {
                let words = format!("rank {} gave up this call", link.rank);
                return Err(Error::new(ErrorKind::PeerLost, words).blaming(link.rank));
            }
        }
        Ok(())
    }
}

impl Link {
    fn write(&mut self, words: spsc_queue::Entry, is_message: bool) {
        self.duplex.write(words);
        self.under_way.push_back(is_message);
        self.wake();
    }

    fn wake(&self) {
        if self.control.need_wakeup.is_set() {
            self.wake.notify();
        }
    }

    /// Whether the peer's call is left for when this rank is there too. If the call that this rank is in goes
    /// over this link, and the peer makes a later one without it, that must be told instead.
    fn is_ahead(&self, call: &spsc_queue::Entry) -> bool {
        self.peer_entered || (!self.announced && call[1] > self.sequence)
    }

    fn has_news(&self) -> bool {
        let peer_entered = match self.duplex.peek() {
            // A call that is ahead of this rank's is no news.
            Ok(Some(words)) => words[0] != CALL || !self.is_ahead(&words),
            Ok(None) => false,
            Err(InvalidCounter) => true,
        };
        peer_entered || self.duplex.acknowledged() != Ok(self.acknowledged)
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let acknowledged = self.duplex.acknowledged().map_err(|InvalidCounter| self.invalid())?;
        while self.acknowledged < acknowledged {
            self.acknowledged += 1;
            if self.under_way.pop_front() == Some(true) {
                events.push_back(Event::SendComplete { peer: self.rank });
            }
        }
        while let Some(words) = self.duplex.peek().map_err(|InvalidCounter| self.invalid())? {
            match words[0] {
                CALL if self.is_ahead(&words) => break,
                CALL => {
                    let call: CallWords = std::array::from_fn(|word| words[word + 1]);
                    let call = Call::from_words(call).ok_or_else(|| self.invalid())?;
                    self.peer_entered = true;
                    self.duplex.advance();
                    // All messages before it were given back, or this rank would not be in a new call.
                    self.duplex.consume();
                    self.wake();
                    events.push_back(Event::PeerEntered { peer: self.rank, call });
                }
                MESSAGE => {
                    let view = self.arena.piece(words[1] as usize, words[2] as usize);
                    let view = view.ok_or_else(|| self.invalid())?;
                    self.duplex.advance();
                    events.push_back(Event::RecvReady { peer: self.rank, view });
                }
                ON_GPU => {
                    let view = self.on_gpu.piece(words[1], words[2]).ok_or_else(|| self.invalid())?;
                    self.duplex.advance();
                    events.push_back(Event::RecvReady { peer: self.rank, view });
                }
                _ => return Err(self.invalid()),
            }
        }
        Ok(events.len() > before)
    }

    fn invalid(&self) -> Error {
        Error::new(
            ErrorKind::Disagreement,
            format!(
                "what rank {} wrote to shared memory makes no sense: is it the same build of flexring?",
                self.rank
            ),
        )
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        self.name
    }

    fn can_send_from(&self, piece: Piece) -> bool {
        if piece.is_host() {
            return self.arena.offset_of(piece).is_some();
        }
        self.shared && self.offset_on_gpu(piece).is_some()
    }

    fn window(&self) -> usize {
        WINDOW
    }

    fn begin(&mut self, sequence: u64) {
        for link in &mut self.links {
            (link.sequence, link.announced, link.peer_entered) = (sequence, false, false);
        }
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        if call.on_gpu && !self.shared {
            self.open_peer_gpus();
        }
        let call = call.to_words();
        let mut words = [0; 8];
        words[0] = CALL;
        words[1..=call.len()].copy_from_slice(&call);
        let link = self.link(peer);
        link.announced = true;
        link.write(words, false);
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let (kind, offset) = match piece.is_host() {
            true => (MESSAGE, self.arena.offset_of(piece)),
            false => (ON_GPU, self.offset_on_gpu(piece)),
        };
        let offset = offset.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a message that peers do not reach was not staged")
        })?;
        self.link(peer).write([kind, offset as u64, piece.len() as u64, 0, 0, 0, 0, 0], true);
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let mut any = false;
        for link in &mut self.links {
            any |= link.poll(events)?;
        }
        Ok(any)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn set_need_wakeup(&mut self) -> bool {
        self.control.need_wakeup.set();
        !self.links.iter().any(Link::has_news)
    }

    fn clear_need_wakeup(&mut self) {
        self.control.need_wakeup.clear();
        self.wake.drain();
    }

    fn abort(&mut self) {
        self.control.reading.store(0, Ordering::Relaxed);
        self.control.aborted.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let patience = Instant::now() + ABORT_TIMEOUT;
        while self.links.iter().any(|link| link.control.reading.load(Ordering::Acquire) != 0) {
            if Instant::now() > patience {
                log::debug!("a neighbour still reads this rank's memory after {ABORT_TIMEOUT:?}");
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl InPlaceTransport for Shm {
    fn release(&mut self, peer: Rank) {
        let link = self.link(peer);
        link.duplex.consume();
        link.wake();
    }

    fn begin_reads(&mut self) -> Result<()> {
        self.control.reading.store(1, Ordering::Relaxed);
        // Pairs with the fence in `abort`: either this rank sees that a peer gave up, or the peer sees that
        // this rank reads and waits for it.
        fence(Ordering::SeqCst);
        self.check_given_up().inspect_err(|_| self.control.reading.store(0, Ordering::Release))
    }

    fn end_reads(&mut self) -> Result<()> {
        self.control.reading.store(0, Ordering::Release);
        self.check_given_up()
    }

    fn check_reads(&mut self) -> Result<()> {
        self.check_given_up()
    }

    fn share_gpu(&mut self, sharing: Box<dyn Sharing>) {
        self.control.gpu.give(&sharing.export());
        self.sharing = Some(sharing);
        self.open_peer_gpus();
    }

    fn view_pools(&self) -> Vec<Piece> {
        let pool = self.gpu_pool;
        self.links.iter().filter_map(|link| link.arena.piece(pool.at, pool.bytes())).collect()
    }
}
