//! The shared-memory transport: ranks of one node read messages in place, in the sender's memory.
//!
//! Owns the links of a rank to the other ranks of its node. A message is a queue entry that says where in the
//! sender's arena its bytes are; the receiver reads them there and gives the entry back. Memory outside the
//! arena is staged in a slot of it beforehand.
//!
//! A rank writes to its own arena only. Neighbours map it for reading, so no peer can corrupt another's
//! memory.
//!
//! | file | owns |
//! |---|---|
//! | `exchange` | the exchange of descriptors between the ranks of a node, and who may take part |
//! | `node_memory`, `node_page` | the memory of the processes of a node, which all their communicators share |
//! | `neighbours` | what a rank of a communicator has of each other rank of its node |
//! | `wake_lanes` | the eventfds that a process sleeps on |
//! | `layout`, `arena_ref` | the offset of each part of a communicator's region, and typed references to them |
//! | `control_page` | what a rank publishes besides messages |
//! | `spsc_queue`, `need_wakeup` | the memory ordering of messages and of wake-ups, checked by loom (`tests/loom`) |
//! | `link` | one neighbour: the format of queue entries, and their events |
//! | `mailbox` | the path of small messages |
//! | `gpu` | GPU memory that neighbours access |
//! | `memory_notices`, `notice_page`, `memory_parts` | users' GPU memory that neighbours access |
//! | `prefault` | page tables made ready for neighbours' buffers |

mod arena_ref;
mod control_page;
mod exchange;
#[cfg(test)]
mod fuzz;
mod gpu;
mod layout;
mod link;
mod mailbox;
mod memory_notices;
mod memory_parts;
mod need_wakeup;
mod neighbours;
mod node_memory;
mod node_page;
mod notice_page;
mod prefault;
mod spsc_queue;
mod wake_lanes;

pub use exchange::{DescriptorExchange, ExchangeAddress};
pub use layout::ArenaLayout;
pub use mailbox::{Mailbox, Posted};
pub use memory_notices::{MemoryNotices, NamedMemory, ReceivedParts, UnsentParts};
pub use neighbours::Neighbours;
pub use node_memory::{NodeKey, NodeMemory, OwnMemory, PeerMemory, Region, RegionOfRank};
pub use wake_lanes::WakeLanes;

use super::{Events, InPlaceTransport, Rank, Transport};
use crate::call::Call;
use crate::error::{Error, Result};
use crate::memory::{Arena, NeighbourSlots, Piece, Sharing};
use crate::wake::WakeFd;
use arena_ref::{ArenaOwner, ArenaRef};
use control_page::ControlPage;
use gpu::GpuSharing;
use link::{Link, WINDOW};
use spsc_queue::{Duplex, SpscQueue};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use wake_lanes::WakeLane;

/// The shared-memory transport of one rank.
pub struct Shm {
    name: &'static str,
    arena: Arc<Arena>,
    layout: ArenaLayout,
    control: ArenaRef<ControlPage>,
    lanes: Arc<WakeLanes>,
    /// The eventfd that neighbours notify, while this rank sleeps or is about to.
    lane: Option<WakeLane>,
    links: Vec<Link>,
    /// By rank, the index of its link.
    link_of_rank: Vec<Option<usize>>,
    /// This rank's index on the node.
    local_rank: usize,
    gpu: GpuSharing,
}

impl Shm {
    /// Connects the queues in this rank's region of `arena` with those of the neighbours.
    ///
    /// # Errors
    /// `Internal` if the layout does not fit; `System` if a neighbour's arena cannot be mapped.
    pub fn new(
        name: &'static str,
        world: usize,
        arena: &Arc<Arena>,
        neighbours: &Neighbours,
    ) -> Result<Self> {
        let owner: ArenaOwner = Arc::clone(arena) as _;
        let layout = neighbours.layout;
        let control =
            ArenaRef::new(arena.piece(layout.start(), size_of::<ControlPage>()), Arc::clone(&owner))?;
        let mut links = Vec::new();
        let mut link_of_rank = vec![None; world];
        for neighbour in &neighbours.others {
            let peer_owner: ArenaOwner = Arc::clone(&neighbour.arena) as _;
            let queue_bytes = size_of::<SpscQueue>();
            let mine = arena.piece(layout.queue(neighbour.local_rank), queue_bytes);
            let theirs = neighbour.arena.piece(neighbour.layout.queue(neighbours.local_rank), queue_bytes)?;
            let duplex = Duplex::new(
                ArenaRef::new(mine, Arc::clone(&owner))?,
                ArenaRef::new(theirs, Arc::clone(&peer_owner))?,
            );
            let page = neighbour.arena.piece(neighbour.layout.start(), size_of::<ControlPage>())?;
            let control = ArenaRef::new(page, peer_owner)?;
            link_of_rank[neighbour.rank] = Some(links.len());
            links.push(Link::new(neighbour, duplex, control));
        }
        Ok(Self {
            name,
            arena: Arc::clone(arena),
            layout,
            control,
            lanes: Arc::clone(&neighbours.lanes),
            lane: None,
            links,
            link_of_rank,
            local_rank: neighbours.local_rank,
            gpu: GpuSharing::default(),
        })
    }

    fn link(&mut self, peer: Rank) -> &mut Link {
        let index = self.link_of_rank[peer].expect("the executor routes only neighbours here");
        &mut self.links[index]
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        self.name
    }

    fn can_send_from(&self, piece: Piece) -> bool {
        self.arena.offset_of(piece).is_some()
    }

    fn window(&self) -> usize {
        WINDOW
    }

    fn begin(&mut self, sequence: u64) {
        self.links.iter_mut().for_each(|link| link.begin(sequence));
    }

    fn begin_link(&mut self, peer: Rank, sequence: u64) -> Result<()> {
        self.link(peer).begin(sequence);
        Ok(())
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.link(peer).announce(call);
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let offset = self
            .arena
            .offset_of(piece)
            .ok_or_else(|| Error::internal("a message outside of shared memory was sent without staging"))?;
        self.link(peer).send(offset, piece.len());
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        let mut any = false;
        for link in &mut self.links {
            any |= link.poll(events)?;
        }
        Ok(any)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfd().map(|eventfd| eventfd.as_fd())
    }

    fn eventfd(&self) -> Option<&Arc<WakeFd>> {
        self.lane.as_ref().map(WakeLane::eventfd)
    }

    fn set_need_wakeup(&mut self) -> bool {
        if self.lane.is_none() {
            self.lane = self.lanes.take();
        }
        if let Some(lane) = &self.lane {
            self.control.need_wakeup.set(lane.index());
        }
        !self.links.iter().any(Link::has_news)
    }

    fn clear_need_wakeup(&mut self) {
        self.control.need_wakeup.clear();
        self.lane = None;
    }

    fn abort(&mut self) {
        self.control.aborted.store(1, Ordering::Relaxed);
        // Pairs with the fence in `check_reads`: a peer that reads what this rank writes from now on, by any
        // kind of store, also sees that it has aborted. A wait for peers that are reading would last as long
        // as one of them is stopped, or is not known to be dead.
        fence(Ordering::SeqCst);
    }
}

impl InPlaceTransport for Shm {
    fn release(&mut self, peer: Rank) {
        self.link(peer).release();
    }

    fn has_left(&self, peer: Rank) -> bool {
        let link = self.link_of_rank[peer].map(|index| &self.links[index]);
        link.is_some_and(|link| link.control.left.load(Ordering::Acquire) != 0)
    }

    fn check_reads(&self) -> Result<()> {
        // What was read before was read before the flags are.
        fence(Ordering::Acquire);
        match self.links.iter().find(|link| link.control.aborted.load(Ordering::Relaxed) != 0) {
            None => Ok(()),
            Some(Link { rank, .. }) => {
                Err(Error::peer_lost(format!("rank {rank} aborted this call")).with_suspect(*rank))
            }
        }
    }

    fn share_gpu(&mut self, sharing: Box<dyn Sharing>) {
        self.gpu.publish(&self.control, sharing);
    }

    fn open_neighbours(&mut self) {
        self.gpu.open_neighbours(&self.control, &mut self.links);
    }

    fn opened_gpus(&self) -> Vec<(Rank, Piece)> {
        self.links.iter().filter_map(|link| link.gpu.map(|piece| (link.rank, piece))).collect()
    }

    fn relay_slots(&self) -> Vec<NeighbourSlots> {
        let pool = self.layout.relay_pool().piece(&self.arena);
        let slots = |link: &Link| {
            let theirs = link.relay_slots_to(self.local_rank).unwrap_or_else(|error| {
                log::info!("messages of the GPU of rank {} are copied: {}", link.rank, error.message());
                None
            });
            NeighbourSlots {
                peer: link.rank,
                own: self.layout.relay_slots_to(link.local_rank, pool),
                theirs,
                is_read_only: !self.arena.is_private(),
                mapped: Arc::new((Arc::clone(&self.arena), Arc::clone(link.arena()))),
            }
        };
        self.links.iter().map(slots).collect()
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.control.left.store(1, Ordering::Release);
        self.links.iter().for_each(Link::wake);
        self.gpu.close(&self.control, self.local_rank, &self.links);
    }
}
