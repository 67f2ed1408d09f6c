//! The items of a rank's plan in the memory of its GPU, for kernels that run them.
//!
//! Owns their form there. `plan::device_program` explains items. Must not know which calls run so.

use super::layout::{
    COPY, CollectiveLayout, CountWords, INPUT, ItemWords, LAST, LinkKind, LinkWords, MESSAGE, MOST_PLACES,
    MOST_RANKS, OUTPUT, PlaceWords, ProgramWords, SCALES, SCRATCH, SLOT,
};
use crate::cuda_driver::Address;
use crate::device::cuda::objects::{Gpu, GpuMemory, address};
use crate::device::relay_link::{RelayLink, RelaySlots, RelayWords, RelayedMessages};
use crate::error::{Error, Result};
use crate::memory::lend;
use crate::plan::device_program::{DeviceProgram, ItemPlace, LinkCounts};
use crate::rank::Rank;
use std::sync::Arc;
use zerocopy::{Immutable, IntoBytes};

/// Bytes of scratch memory that are allocated at least.
const LEAST_SCRATCH: usize = 64 << 10;
/// The alignment of the parts of a list.
const PART: usize = 16;

/// A list of items on a GPU. It must stay until the kernels that run it have ended.
pub(crate) struct ListedProgram {
    memory: GpuMemory,
    /// The list has its address.
    _scratch: Arc<GpuMemory>,
    items: u32,
    relayed: Arc<[RelayedMessages]>,
}

/// What the lists of a communicator have on the GPU. Nothing is freed while it works, because that waits for
/// kernels.
#[derive(Default)]
pub(crate) struct ListMemory {
    /// Memory for the partial sums and copies of calls, which run one after the other. The last one is used;
    /// lists that were made before keep what they have.
    scratch: Vec<Arc<GpuMemory>>,
    /// Memory of lists that are not used any more.
    free: Vec<GpuMemory>,
    replaces: bool,
}

impl ListMemory {
    /// Memory of at least this many bytes for partial sums and copies.
    fn scratch(&mut self, gpu: &Arc<Gpu>, bytes: usize) -> Result<Arc<GpuMemory>> {
        if let Some(memory) = self.scratch.last().filter(|memory| memory.piece().len() >= bytes) {
            return Ok(Arc::clone(memory));
        }
        let memory = Arc::new(GpuMemory::new(gpu, bytes.max(LEAST_SCRATCH).next_power_of_two())?);
        self.scratch.push(Arc::clone(&memory));
        Ok(memory)
    }

    /// Memory for a list: the shortest that is free and long enough, or new.
    fn list(&mut self, gpu: &Arc<Gpu>, bytes: usize) -> Result<GpuMemory> {
        let len = |at: &usize| self.free[*at].piece().len();
        let fitting = (0..self.free.len()).filter(|at| len(at) >= bytes).min_by_key(len);
        if let Some(at) = fitting {
            return Ok(self.free.swap_remove(at));
        }
        // The lists that come and go may be of any length. Of each power of two there are as many as are kept
        // at most.
        GpuMemory::new(gpu, if self.replaces { bytes.next_power_of_two() } else { bytes })
    }

    /// Takes the memory of a list that no kernel runs any more.
    pub(crate) fn take_back(&mut self, list: ListedProgram) {
        self.replaces = true;
        self.free.push(list.memory);
    }
}

impl ListedProgram {
    /// Copies a list to the GPU, which has the links of the rank at `links`. `element`: bytes of an element;
    /// `memory`: that of the communicator; `relays`: the links of the list to ranks of other nodes.
    ///
    /// # Errors
    /// `System` if the GPU has too little memory; `Internal` if an item is larger than a kernel can run.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        links: Address,
        list: &DeviceProgram,
        element: usize,
        memory: &mut ListMemory,
        relays: Vec<Arc<RelayLink>>,
    ) -> Result<Self> {
        let (mut items, mut places, mut waits) = (Vec::new(), Vec::new(), Vec::new());
        for item in &list.items {
            let (sources, destinations) = (list.sources(item), list.destinations(item));
            let is_long = item.elements as usize * element > SLOT;
            if is_long || sources.len() + destinations.len() > MOST_PLACES {
                return Err(Error::internal("an item is too large for a kernel: please report this"));
            }
            items.push(ItemWords {
                elements: item.elements,
                flags: if item.scales { SCALES } else { 0 } | if item.last { LAST } else { 0 },
                first_place: places.len() as u32,
                first_wait: waits.len() as u32,
                sources: sources.len() as u16,
                destinations: destinations.len() as u16,
                waits: list.waits(item).len() as u32,
            });
            places.extend(sources.iter().chain(destinations).map(|place| place_of(list, *place)));
            waits.extend_from_slice(list.waits(item));
        }
        let counts: Vec<_> = list
            .links
            .iter()
            .map(|link| CountWords { link: link.peer as u32, sends: link.sends, receives: link.receives })
            .collect();
        let scratch_bytes = (list.scratch as usize * element).next_multiple_of(PART);
        let mut image = Image(vec![0; size_of::<ProgramWords>().next_multiple_of(PART)]);
        let starts = [image.add(&items), image.add(&places), image.add(&waits), image.add(&counts)];
        let done = image.add(&vec![0u64; items.len()]);
        let scratch = memory.scratch(gpu, scratch_bytes + list.copied as usize * element)?;
        let held = memory.list(gpu, image.0.len())?;
        let at = |offset: usize| address(held.piece()) + offset as Address;
        let [items_at, places_at, waits_at, counts_at] = starts.map(at);
        let program = ProgramWords {
            items: items_at,
            places: places_at,
            waits: waits_at,
            links,
            counts: counts_at,
            done: at(done),
            scratch: address(scratch.piece()),
            copy: address(scratch.piece()) + scratch_bytes as Address,
            taken: 0,
            item_count: items.len() as u32,
            link_count: counts.len() as u32,
        };
        image.0[..size_of::<ProgramWords>()].copy_from_slice(program.as_bytes());
        write(gpu, &held, 0, &image.0)?;
        let relayed = relayed_messages(list, relays, element);
        Ok(Self { memory: held, _scratch: scratch, items: items.len() as u32, relayed })
    }

    /// Where the GPU has it.
    pub(super) fn address(&self) -> Address {
        address(self.memory.piece())
    }

    /// How many items it has.
    pub(super) fn items(&self) -> u32 {
        self.items
    }

    /// What the host carries, by link.
    pub(crate) fn relayed(&self) -> &Arc<[RelayedMessages]> {
        &self.relayed
    }
}

/// What is copied to the GPU.
struct Image(Vec<u8>);

impl Image {
    /// Adds a part. Returns where it begins.
    fn add<T: IntoBytes + Immutable>(&mut self, values: &[T]) -> usize {
        let start = self.0.len();
        self.0.extend_from_slice(values.as_bytes());
        self.0.resize(self.0.len().next_multiple_of(PART), 0);
        start
    }
}

fn place_of(list: &DeviceProgram, place: ItemPlace) -> PlaceWords {
    let (kind, link, at) = match place {
        ItemPlace::Input(at) => (INPUT, 0, at),
        ItemPlace::InputCopy(at) => (COPY, 0, at),
        ItemPlace::Output(at) => (OUTPUT, 0, at),
        ItemPlace::Scratch(at) => (SCRATCH, 0, at),
        ItemPlace::Message { link, number } => {
            (MESSAGE, list.links[link as usize].peer as u32, u64::from(number))
        }
    };
    PlaceWords { kind, link, at }
}

/// The messages of a list that take these links.
fn relayed_messages(
    list: &DeviceProgram,
    relays: Vec<Arc<RelayLink>>,
    element: usize,
) -> Arc<[RelayedMessages]> {
    // By link of the list, bytes of the messages to the peer and from it.
    let none = |link: &LinkCounts| [link.sends, link.receives].map(|count| vec![0; count as usize]);
    let mut lengths: Vec<[Vec<u32>; 2]> = list.links.iter().map(none).collect();
    for item in &list.items {
        let bytes = item.elements * element as u32;
        for (way, places) in [list.destinations(item), list.sources(item)].into_iter().enumerate() {
            for place in places {
                if let ItemPlace::Message { link, number } = place {
                    lengths[*link as usize][way][*number as usize] = bytes;
                }
            }
        }
    }
    let of_peer = |link: Arc<RelayLink>| {
        let nth = list.links.iter().position(|counts| counts.peer == link.peer);
        let [sends, receives] = nth.map(|nth| std::mem::take(&mut lengths[nth])).unwrap_or_default();
        RelayedMessages { link, sends, receives }
    };
    relays.into_iter().map(of_peer).collect()
}

/// By rank of the world, the links of the rank with this place among `ranks`, which are those of its node.
/// This GPU maps their memory at `memories`, by their places. Links to other nodes are made later.
pub(super) fn links(
    of: LinkKind,
    layout: CollectiveLayout,
    ranks: &[Rank],
    own: usize,
    memories: &[Address; MOST_RANKS],
    world: usize,
) -> Vec<LinkWords> {
    let mut links = vec![LinkWords::default(); world];
    for (place, rank) in ranks.iter().enumerate() {
        let at = |owner: usize, offset: usize| memories[owner] + offset as Address;
        links[*rank] = LinkWords {
            out: at(place, layout.slots_at(of, own)),
            out_sent: at(place, of.sent_at(own)),
            out_used: at(own, of.used_at(place)),
            incoming: at(own, layout.slots_at(of, place)),
            in_sent: at(own, of.sent_at(place)),
            in_used: at(place, of.used_at(own)),
            sent: 0,
            received: 0,
            slots: layout.slots(of) as u32,
            rank: *rank as u32,
        };
    }
    links
}

/// A link to a rank whose GPU memory this rank's kernels do not reach. The GPU maps its words and slots
/// there.
pub(super) fn relayed_link(
    peer: Rank,
    words: Address,
    [out, incoming]: [Address; 2],
    slots: RelaySlots,
) -> LinkWords {
    let words = |of: RelayWords| words + of.offset() as Address;
    LinkWords {
        out,
        out_sent: words(RelayWords::Sent),
        out_used: words(RelayWords::Carried),
        incoming,
        in_sent: words(RelayWords::Received),
        in_used: words(RelayWords::Used),
        sent: 0,
        received: 0,
        slots: slots.count as u32,
        rank: peer as u32,
    }
}

/// Copies `bytes` to a part of an allocation that no kernel uses yet.
pub(super) fn write(gpu: &Arc<Gpu>, memory: &GpuMemory, at: usize, bytes: &[u8]) -> Result<()> {
    lend(bytes, &mut [], |bytes, _| {
        // SAFETY: `narrow` checks the length, and no kernel uses this part.
        unsafe { gpu.copy_now(memory.piece().narrow(at, bytes.len()), bytes) }
    })
}
