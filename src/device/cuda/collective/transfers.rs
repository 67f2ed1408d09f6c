//! What a rank sends, receives and copies in a call of messages between pairs of ranks, for a kernel that
//! moves it: `kernels/transfers.h`.
//!
//! Owns its form, and the pinned memory that it is in until the kernel has ended. Must not know which calls
//! run so.

use super::layout::{CAPTURED, HEADER, OWN_COPY, RECEIVE, SEND, SLOT, TransferWords, TransfersWords};
use super::listed;
use crate::cuda_driver::Address;
use crate::device::cuda::objects::{Gpu, GpuMemory, address};
use crate::device::cuda::pinned::PinnedMemory;
use crate::device::relay_link::{RelayLink, RelayedMessages};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Piece, write_bytes};
use crate::rank::Rank;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use zerocopy::IntoBytes as _;

/// Bytes of the data of a message.
const ROOM: usize = SLOT - HEADER;
/// Bytes of the ring in which the tables of calls are until their kernels have ended, at least; and how many
/// all-to-alls it has room for.
const LEAST_RING: usize = 64 << 10;
const RING_CALLS: usize = 4;
/// Transfers of a call that the first counters are enough for.
const LEAST_COUNTERS: usize = 256;
/// The counters of a call before those of its transfers.
const FIRST_COUNTER: usize = 2;

/// A vector that moves to or from another rank, or within this one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VectorTransfer {
    /// To this rank.
    Send(Rank, Piece, DType),
    /// From this rank.
    Receive(Rank, Piece, DType),
    /// From a vector of this rank to another one, as long.
    Copy(Piece, Piece),
}

impl VectorTransfer {
    /// The rank at the other end, if it is another one.
    pub(super) fn peer(&self) -> Option<Rank> {
        match *self {
            Self::Send(peer, ..) | Self::Receive(peer, ..) => Some(peer),
            Self::Copy(..) => None,
        }
    }
}

/// The transfers of a call where a kernel finds them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferTable {
    pub(super) address: Address,
    /// How many messages they have.
    pub(super) messages: u64,
}

/// Lays out the transfers of a call. `link_of`: by rank, the number of its link.
pub(super) fn words_of(transfers: &[VectorTransfer], link_of: impl Fn(Rank) -> u32) -> Vec<TransferWords> {
    // By direction and link, messages so far.
    let mut counts: HashMap<(u32, u32), u32> = HashMap::new();
    let words_of = |transfer: &VectorTransfer| {
        let (kind, from, into, dtype) = match *transfer {
            VectorTransfer::Send(_, piece, dtype) => (SEND, piece, Piece::EMPTY, dtype),
            VectorTransfer::Receive(_, piece, dtype) => (RECEIVE, Piece::EMPTY, piece, dtype),
            VectorTransfer::Copy(from, into) => (OWN_COPY, from, into, DType::U8),
        };
        let bytes = from.len().max(into.len());
        let link = transfer.peer().map_or(0, &link_of);
        let messages = bytes.div_ceil(ROOM).max(1) as u32;
        let count = counts.entry((kind, link)).or_default();
        let first = if kind == OWN_COPY { 0 } else { *count };
        *count += messages;
        let (from, into, tag) = (address(from), address(into), tag_of(bytes, dtype));
        TransferWords { from, into, bytes: bytes as u64, tag, first, messages, link, kind }
    };
    transfers.iter().map(words_of).collect()
}

/// The messages of transfers that take the link with this number.
pub(super) fn relayed_messages(
    words: &[TransferWords],
    number: u32,
    link: Arc<RelayLink>,
) -> RelayedMessages {
    let of = |kind: u32| {
        let words = words.iter().filter(move |words| (words.kind, words.link) == (kind, number));
        let lengths = |words: &TransferWords| {
            let bytes = words.bytes as usize;
            (0..words.messages as usize).map(move |nth| (HEADER + (bytes - nth * ROOM).min(ROOM)) as u32)
        };
        words.flat_map(lengths).collect()
    };
    RelayedMessages { sends: of(SEND), receives: of(RECEIVE), link }
}

/// What both ends of a transfer must have equal.
fn tag_of(bytes: usize, dtype: DType) -> u64 {
    (dtype.elements_in(bytes) as u64) | (dtype as u64) << 56
}

/// Type and number of elements of a transfer with this tag.
pub(crate) fn tagged(tag: u64) -> Option<(DType, u64)> {
    Some((DType::from_code((tag >> 56) as u8)?, tag & ((1 << 56) - 1)))
}

/// The memory of the transfers of a communicator's calls.
#[derive(Default)]
pub(super) struct TransferMemory {
    /// A ring, which has the tables of launches that have not ended.
    ring: Option<(PinnedMemory, RingAllocator)>,
    /// By launch, tables with memory of their own: those that graphs have captured, which have no end, and
    /// those that the ring is too short for.
    separate: Vec<(u64, PinnedMemory)>,
    /// Kernels use the newest, one after the other.
    counters: Vec<GpuMemory>,
}

/// Who uses a ring.
#[derive(Debug)]
struct RingAllocator {
    len: usize,
    /// By launch that may not have ended, in their order: the head after it.
    launches: VecDeque<(u64, usize)>,
    /// Where the next place and the oldest one in use begin. Both only grow, until nothing is in use.
    head: usize,
    tail: usize,
}

impl RingAllocator {
    fn new(len: usize) -> Self {
        Self { len, launches: VecDeque::new(), head: 0, tail: 0 }
    }

    /// A place of `len` bytes, not more than the ring has, for the table of `launch`, if there is one now:
    /// launches up to `completed` have ended.
    fn place(&mut self, launch: u64, completed: u64, len: usize) -> Option<usize> {
        while let Some((_, end)) = self.launches.front().filter(|(launch, _)| *launch <= completed) {
            self.tail = *end;
            self.launches.pop_front();
        }
        if self.launches.is_empty() {
            (self.head, self.tail) = (0, 0);
        }
        // A table is not cut in two.
        let is_cut = self.head % self.len + len > self.len;
        let start = if is_cut { self.head.next_multiple_of(self.len) } else { self.head };
        if start + len - self.tail > self.len {
            return None;
        }
        self.head = start + len;
        self.launches.push_back((launch, self.head));
        Some(start % self.len)
    }
}

impl TransferMemory {
    /// Writes the table of `launch`, which is the next one. `links`: where the GPU has them; `world`: the
    /// number of ranks; `completed`: the last launch that has ended. A launch that is captured has no end.
    ///
    /// # Errors
    /// Those of `wait`, which is called as long as too many launches have not ended; `System` if the GPU has
    /// too little memory.
    pub(super) fn table(
        &mut self,
        gpu: &Arc<Gpu>,
        (links, words, world): (Address, &[TransferWords], usize),
        launch: u64,
        completed: impl Fn() -> u64,
        mut wait: impl FnMut() -> Result<()>,
    ) -> Result<TransferTable> {
        let bytes_of =
            |transfers: usize| size_of::<TransfersWords>() + transfers * size_of::<TransferWords>();
        let bytes = bytes_of(words.len());
        let ring_bytes = (RING_CALLS * bytes_of(2 * world)).max(LEAST_RING);
        let (memory, start) = if launch & CAPTURED != 0 || bytes > ring_bytes {
            let ended = completed();
            self.separate.retain(|(launch, _)| *launch > ended);
            self.separate.push((launch, PinnedMemory::new(gpu, bytes)?));
            (&self.separate.last().expect("it was added").1, 0)
        } else {
            if self.ring.is_none() {
                self.ring = Some((PinnedMemory::new(gpu, ring_bytes)?, RingAllocator::new(ring_bytes)));
            }
            let (memory, places) = self.ring.as_mut().expect("it was set");
            let start = loop {
                match places.place(launch, completed(), bytes) {
                    Some(start) => break start,
                    None => wait()?,
                }
            };
            (&*memory, start)
        };
        let messages = words.iter().map(|words| u64::from(words.messages)).sum();
        let taken = counters(gpu, &mut self.counters, words.len())?;
        let head = TransfersWords { links, taken, messages, count: words.len() as u64 };
        let piece = memory.piece().narrow(start, bytes);
        let (first, rest) = (size_of::<TransfersWords>(), size_of::<TransferWords>());
        let mut fits = write_bytes::<32>(piece, zerocopy::transmute!(head));
        for (nth, words) in words.iter().enumerate() {
            fits &= write_bytes::<48>(piece.narrow(first + nth * rest, rest), zerocopy::transmute!(*words));
        }
        if !fits {
            return Err(Error::internal("pinned memory is no host memory"));
        }
        Ok(TransferTable { address: memory.address() + start as Address, messages })
    }

    /// Frees the tables of graphs that are gone.
    pub(super) fn drop_captured(&mut self) {
        self.separate.retain(|(launch, _)| launch & CAPTURED == 0);
    }
}

/// Counters for this many transfers, which are 0 between calls.
fn counters(gpu: &Arc<Gpu>, all: &mut Vec<GpuMemory>, transfers: usize) -> Result<Address> {
    let count = FIRST_COUNTER + transfers.max(LEAST_COUNTERS);
    let needed = count.next_power_of_two() * size_of::<u64>();
    if all.last().is_none_or(|last| last.piece().len() < needed) {
        let zeros = vec![0u64; needed / size_of::<u64>()];
        let memory = GpuMemory::new(gpu, needed)?;
        listed::write(gpu, &memory, 0, zeros.as_bytes())?;
        all.push(memory);
    }
    Ok(address(all.last().expect("it was added").piece()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    #[test]
    fn transfers_of_a_direction_follow_one_another() {
        // SAFETY: nothing is read or written there.
        let piece = |len| unsafe { Piece::on_gpu(NonNull::dangling(), len, 0) };
        let transfers = [
            VectorTransfer::Send(1, piece(ROOM + 1), DType::U8),
            VectorTransfer::Receive(1, piece(0), DType::F32),
            VectorTransfer::Send(2, piece(4), DType::F32),
            VectorTransfer::Send(1, piece(8), DType::F64),
            VectorTransfer::Copy(piece(7), piece(7)),
            VectorTransfer::Receive(1, piece(4), DType::I32),
        ];
        let words = words_of(&transfers, |rank| rank as u32 + 10);
        let placed: Vec<_> = words.iter().map(|words| (words.link, words.first, words.messages)).collect();
        assert_eq!(placed, [(11, 0, 2), (11, 0, 1), (12, 0, 1), (11, 2, 1), (0, 0, 1), (11, 1, 1)]);
        assert_eq!(tagged(words[3].tag), Some((DType::F64, 1)));
    }

    #[test]
    fn a_place_in_the_ring_is_used_again_once_its_launch_has_ended() {
        let (mut ring, len) = (RingAllocator::new(64), 20);
        assert_eq!([1, 2, 3].map(|launch| ring.place(launch, 0, len)), [Some(0), Some(20), Some(40)]);
        // The rest is too short for a whole one.
        assert_eq!(ring.place(4, 0, len), None);
        assert_eq!(ring.place(4, 1, len), Some(0));
        assert_eq!(ring.place(5, 1, len), None);
        assert_eq!(ring.place(5, 3, 64), None);
        assert_eq!(ring.place(5, 3, 40), Some(20));
        // Nothing is in use.
        assert_eq!(ring.place(6, 5, 64), Some(0));
    }
}
