//! The memory that hosts and kernels share for collectives.
//!
//! Owns its layout, which is that of `kernels/collective.h`; the comments there say who writes each word.
//! Must not know who allocates it.

use std::sync::atomic::AtomicU64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Ranks of a node that kernels can connect.
pub(super) const MOST_RANKS: usize = 16;
/// Slices of a call.
pub(super) const MOST_SLICES: usize = 64;
/// Bytes that a slice moves in one round, and stages that it uses in turn.
pub(super) const STAGE: usize = 64 << 10;
const STAGES: usize = 3;
/// Bytes of all stages.
const STAGE_BYTES: usize = 2 * MOST_SLICES * STAGES * STAGE;
/// Bits in which the rounds of a slice are counted.
pub(super) const ROUND_BITS: u32 = 20;
/// 64-bit words that describe a call to the other ranks.
pub(crate) const CALL_WORDS: usize = 4;
/// Allocations of a rank that the other ranks have open at a time.
pub(super) const MOST_MEMORIES: usize = 64;
/// The places that a call has in them: of its input and of its output.
pub(super) const PLACES: usize = 2;
/// The bits of a place below the number of the allocation: the offset there.
pub(super) const OFFSET_BITS: u32 = 48;
/// Flags of a place: the rank has it or needs none; it is in an allocation.
pub(super) const PLACED: u64 = 1 << 63;
pub(super) const IN_MEMORY: u64 = 1 << 62;

/// Set in the numbers of captured launches, which run any number of times.
pub(super) const CAPTURED: u64 = 1 << 63;

/// Values of [`CollectiveParameters::path`].
pub(super) const SHORT: u32 = 0;
pub(super) const STAGED: u32 = 1;
pub(super) const LISTED: u32 = 2;
pub(super) const TRANSFERS: u32 = 3;
pub(crate) use crate::device::relay_link::SLOT;
/// Slots of a direction of a link.
const MOST_SLOTS: usize = 64;
/// Places that an item reads or writes.
pub(crate) const MOST_PLACES: usize = 1024;
/// Values of [`ItemWords::flags`].
pub(super) const SCALES: u32 = 1;
pub(super) const LAST: u32 = 2;
/// Values of [`PlaceWords::kind`].
pub(super) const INPUT: u32 = 0;
pub(super) const OUTPUT: u32 = 1;
pub(super) const SCRATCH: u32 = 2;
pub(super) const MESSAGE: u32 = 3;
pub(super) const COPY: u32 = 4;
/// Bytes before the data of a message of a transfer.
pub(super) const HEADER: usize = 16;
/// Values of [`TransferWords::kind`].
pub(super) const SEND: u32 = 0;
pub(super) const RECEIVE: u32 = 1;
pub(super) const OWN_COPY: u32 = 2;

/// Values of [`StatusWords::failure`]. The others say that the kernel was to leave.
pub(super) const MISMATCH: u64 = 1;
pub(super) const OVERLAP: u64 = 2;
pub(super) const UNEXPECTED: u64 = 5;

/// What a kernel waits for, in [`StatusWords::waiting_for`]: the entry of a rank; this rank's host; a rank
/// that receives from this one, and one that sends to it.
pub(super) const WAIT_ENTRY: u64 = 1;
pub(super) const WAIT_HOST: u64 = 6;
pub(super) const WAIT_RECEIVER: u64 = 7;
pub(super) const WAIT_SENDER: u64 = 8;

/// Slots of transfers that a rank has for all ranks together, if they are enough for two each.
const TRANSFER_SLOTS: usize = 32;

/// Longest block, in bytes, that inboxes have room for on a node of up to 4 ranks, and of more. Above it two
/// exchanges of a part each are faster than one of the whole (bench/results, `shared_gpu_allreduce` on an
/// H100: 8 ranks, 128 KiB 20 us at once and 16 in parts; with 2 and 4 ranks the whole costs 7.6 and 9.9 us up
/// to 128 KiB, and parts 14 and 16).
const SHORT_BYTES: [usize; 2] = [256 << 10, 64 << 10];
const FEW_RANKS: usize = 4;
/// The alignment of the parts of a rank's memory.
const PART: usize = 256;

type Packet = [u64; 2];

/// `CollectiveState`, of which the host only needs the size and the places of some words.
#[repr(C, align(128))]
struct CollectiveState {
    owner: u64,
    epoch: u64,
    reporter: u64,
    stopped: u32,
    closed: u32,
    reported: u64,
    peers: [u64; MOST_RANKS],
    memories: [[u64; MOST_MEMORIES]; MOST_RANKS],
    received: ReceivedWords,
}

#[repr(C, align(128))]
struct ReceivedWords {
    entry: [[[[Packet; 1 + PLACES]; MOST_RANKS]; MOST_SLICES]; 2],
    words: [[[Packet; CALL_WORDS]; MOST_RANKS]; 2],
    ready: Counters,
    done: Counters,
    sent: LinkCounters,
    used: LinkCounters,
    transfers_sent: LinkCounters,
    transfers_used: LinkCounters,
}

#[repr(C, align(128))]
struct Counters([[u64; MOST_RANKS]; MOST_SLICES]);

#[repr(C, align(128))]
struct LinkCounters([[u64; MOST_SLOTS]; MOST_RANKS]);

/// Where the host writes and reads a rank's state.
pub(super) const OWNER: usize = std::mem::offset_of!(CollectiveState, owner);
pub(super) const CLOSED_AT: usize = std::mem::offset_of!(CollectiveState, closed);
pub(super) const PEERS: usize = std::mem::offset_of!(CollectiveState, peers);
/// Where the address of an allocation of a rank is.
pub(super) fn memory_at(rank: usize, number: usize) -> usize {
    std::mem::offset_of!(CollectiveState, memories) + (rank * MOST_MEMORIES + number) * size_of::<u64>()
}

/// What the messages of links within a node belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkKind {
    /// Lists of items.
    Lists,
    /// Transfers between two ranks, which may be in other calls than the other ranks.
    Transfers,
}

impl LinkKind {
    /// Where a rank's state has the words of the messages that it gets from a rank.
    pub(super) fn sent_at(self, from: usize) -> usize {
        let words = match self {
            Self::Lists => std::mem::offset_of!(ReceivedWords, sent),
            Self::Transfers => std::mem::offset_of!(ReceivedWords, transfers_sent),
        };
        counters_at(words, from)
    }

    /// Where it has the words of the messages that a rank has used.
    pub(super) fn used_at(self, by: usize) -> usize {
        let words = match self {
            Self::Lists => std::mem::offset_of!(ReceivedWords, used),
            Self::Transfers => std::mem::offset_of!(ReceivedWords, transfers_used),
        };
        counters_at(words, by)
    }
}

fn counters_at(counters: usize, rank: usize) -> usize {
    std::mem::offset_of!(CollectiveState, received) + counters + rank * size_of::<[u64; MOST_SLOTS]>()
}

/// The sizes of the memory that each rank of a node has on its GPU. Equal on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveLayout {
    ranks: usize,
}

impl CollectiveLayout {
    /// That of a rank whose kernels reach no other rank's memory.
    pub(crate) const ALONE: Self = Self { ranks: 1 };

    /// The layout for a node of this many ranks; `None` if kernels cannot connect as many.
    pub(crate) fn new(ranks: usize) -> Option<Self> {
        (1..=MOST_RANKS).contains(&ranks).then_some(Self { ranks })
    }

    /// Number of ranks.
    pub(super) fn ranks(self) -> usize {
        self.ranks
    }

    /// Bytes of the longest block that inboxes have room for. A rank alone has none.
    pub(super) fn short_bytes(self) -> usize {
        if self.is_alone() { 0 } else { SHORT_BYTES[usize::from(self.ranks > FEW_RANKS)] }
    }

    /// Whether there is one rank, which moves blocks of any length at once.
    pub(crate) fn is_alone(self) -> bool {
        self.ranks == 1
    }

    /// Bytes at the start that must be zero before a kernel of any rank uses them: the state and the inboxes.
    pub(super) fn zeroed_bytes(self) -> usize {
        let packets = 2 * self.ranks * self.short_bytes() / 8;
        (size_of::<CollectiveState>() + packets * size_of::<Packet>()).next_multiple_of(PART)
    }

    /// Where the slots of messages from a rank begin. Those of lists are where the stages are, because no
    /// call uses both.
    pub(super) fn slots_at(self, of: LinkKind, from: usize) -> usize {
        let first = match of {
            LinkKind::Lists => self.zeroed_bytes(),
            LinkKind::Transfers => self.zeroed_bytes() + STAGE_BYTES,
        };
        first + from * self.slots(of) * SLOT
    }

    /// Slots of each direction of a link: a power of two, because kernels find a message's slot by its low
    /// bits.
    pub(super) fn slots(self, of: LinkKind) -> usize {
        let room = match of {
            LinkKind::Lists => STAGE_BYTES / SLOT / self.ranks,
            LinkKind::Transfers => (TRANSFER_SLOTS / self.ranks).max(2),
        };
        1 << room.min(MOST_SLOTS).ilog2()
    }

    /// Bytes of all.
    pub(crate) fn bytes(self) -> usize {
        if self.is_alone() { self.zeroed_bytes() } else { self.slots_at(LinkKind::Transfers, self.ranks) }
    }
}

/// In pinned host memory.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct StatusWords {
    pub waiting_for: AtomicU64,
    pub waiting_epoch: AtomicU64,
    pub failed_rank: AtomicU64,
    pub failed_epoch: AtomicU64,
    pub own_words: [AtomicU64; CALL_WORDS],
    pub their_words: [AtomicU64; CALL_WORDS],
    pub failure: AtomicU64,
    pub completed: AtomicU64,
    pub direct: AtomicU64,
    pub unplaced: AtomicU64,
    pub started: AtomicU64,
    pub host: HostWords,
}

/// Written by the host.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct HostWords {
    pub aborted: AtomicU64,
}

/// The parameter of every kernel that runs a collective. All addresses are the GPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct CollectiveParameters {
    pub state: u64,
    pub status: u64,
    /// 0 for the launch that only loads the kernel.
    pub launch: u64,
    pub hash: u64,
    pub words: [u64; CALL_WORDS],
    pub input: u64,
    pub output: u64,
    pub program: u64,
    pub transfers: u64,
    pub places: [u64; PLACES],
    pub factor: f64,
    pub count: u64,
    pub sends: u32,
    pub receives: u32,
    pub send_stride: u64,
    pub receive_stride: u64,
    pub reduces: u32,
    pub operation: u32,
    pub divide: u32,
    pub scales: u32,
    pub rank: u32,
    pub ranks: u32,
    pub path: u32,
    pub slices: u32,
    pub short_bytes: u32,
    pub reports: u32,
    pub relayed: u32,
}

const _: () = assert!(size_of::<CollectiveParameters>() == 200);
const _: () = assert!(size_of::<StatusWords>() == 384);
/// A link to another rank. All addresses are the GPU's.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LinkWords {
    pub out: u64,
    pub out_sent: u64,
    pub out_used: u64,
    pub incoming: u64,
    pub in_sent: u64,
    pub in_used: u64,
    pub sent: u64,
    pub received: u64,
    pub slots: u32,
    pub rank: u32,
}

#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ItemWords {
    pub elements: u32,
    pub flags: u32,
    pub first_place: u32,
    pub first_wait: u32,
    pub sources: u16,
    pub destinations: u16,
    pub waits: u32,
}

#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct PlaceWords {
    pub kind: u32,
    pub link: u32,
    pub at: u64,
}

#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct CountWords {
    pub link: u32,
    pub sends: u32,
    pub receives: u32,
}

/// The work of a rank in calls of one kind and length.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ProgramWords {
    pub items: u64,
    pub places: u64,
    pub waits: u64,
    pub links: u64,
    pub counts: u64,
    pub done: u64,
    pub scratch: u64,
    pub copy: u64,
    pub taken: u64,
    pub item_count: u32,
    pub link_count: u32,
}

/// What this rank sends to another one, receives from it, or copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TransferWords {
    pub from: u64,
    pub into: u64,
    pub bytes: u64,
    pub tag: u64,
    pub first: u32,
    pub messages: u32,
    pub link: u32,
    pub kind: u32,
}

/// What this rank moves in a call; its [`TransferWords`] are behind it.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TransfersWords {
    pub links: u64,
    pub taken: u64,
    pub messages: u64,
    pub count: u64,
}

const _: () = assert!(size_of::<TransferWords>() == 48 && size_of::<TransfersWords>() == 32);
const _: () = assert!(size_of::<LinkWords>() == 72 && size_of::<ItemWords>() == 24);
const _: () = assert!(size_of::<PlaceWords>() == 16 && size_of::<CountWords>() == 12);
const _: () = assert!(size_of::<ProgramWords>() == 80);
const _: () = assert!(CLOSED_AT == 28 && PEERS == 40);

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../../../../kernels/collective.h");

    #[test]
    fn constants_match_the_header() {
        for (name, number) in [
            ("kMostRanks", MOST_RANKS),
            ("kMostSlices", MOST_SLICES),
            ("kStageBytes", STAGE),
            ("kStages", STAGES),
            ("kRoundBits", ROUND_BITS as usize),
            ("kCallWords", CALL_WORDS),
            ("kSlotBytes", SLOT),
            ("kMostSlots", MOST_SLOTS),
            ("kMostPlaces", MOST_PLACES),
            ("kMostMemories", MOST_MEMORIES),
            ("kHeaderBytes", super::HEADER),
            ("kPlaces", PLACES),
            ("kOffsetBits", OFFSET_BITS as usize),
        ] {
            assert!(HEADER.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
        for (name, bit) in [("kPlaced", PLACED), ("kInMemory", IN_MEMORY)] {
            let bit = bit.trailing_zeros();
            assert!(
                HEADER.contains(&format!("constexpr unsigned long long {name} = 1ull << {bit};")),
                "{name}"
            );
        }
        for (name, number) in [
            ("kShort", u64::from(SHORT)),
            ("kStaged", u64::from(STAGED)),
            ("kListed", u64::from(LISTED)),
            ("kTransfers", u64::from(TRANSFERS)),
            ("kSend", u64::from(SEND)),
            ("kReceive", u64::from(RECEIVE)),
            ("kOwnCopy", u64::from(OWN_COPY)),
            ("kUnexpected", UNEXPECTED),
            ("kWaitReceiver", WAIT_RECEIVER),
            ("kWaitSender", WAIT_SENDER),
            ("kScales", u64::from(SCALES)),
            ("kLast", u64::from(LAST)),
            ("kInputPlace", u64::from(INPUT)),
            ("kOutputPlace", u64::from(OUTPUT)),
            ("kScratchPlace", u64::from(SCRATCH)),
            ("kMessagePlace", u64::from(MESSAGE)),
            ("kCopyPlace", u64::from(COPY)),
            ("kMismatch", MISMATCH),
            ("kOverlap", OVERLAP),
            ("kWaitEntry", WAIT_ENTRY),
            ("kWaitHost", WAIT_HOST),
        ] {
            assert!(HEADER.contains(&format!("constexpr unsigned int {name} = {number};")), "{name}");
        }
    }

    /// The names of the fields of a struct of the header, in order.
    fn fields(name: &str) -> Vec<&'static str> {
        let body = HEADER.split_once(&format!("struct {name} {{\n")).expect(name).1;
        let body = body.split_once("\n};").expect(name).0;
        let lines = body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        lines
            .map(|line| {
                let declared = line.strip_suffix(';').expect(line).split('[').next().expect(line);
                declared.rsplit([' ', '*']).next().expect(line)
            })
            .collect()
    }

    #[test]
    fn fields_have_the_order_of_the_header() {
        assert_eq!(
            fields("CollectiveState"),
            [
                "owner",
                "epoch",
                "reporter",
                "stopped",
                "closed",
                "reported",
                "peers",
                "memories",
                "entry",
                "words",
                "ready",
                "done",
                "sent",
                "used",
                "transfers_sent",
                "transfers_used"
            ]
        );
        assert_eq!(
            fields("CollectiveStatus"),
            [
                "waiting_for",
                "waiting_epoch",
                "failed_rank",
                "failed_epoch",
                "own_words",
                "their_words",
                "failure",
                "completed",
                "direct",
                "unplaced",
                "started",
                "aborted"
            ]
        );
        assert_eq!(
            fields("ProgramLink"),
            ["out", "out_sent", "out_used", "in", "in_sent", "in_used", "sent", "received", "slots", "rank"]
        );
        assert_eq!(
            fields("ProgramItem"),
            ["elements", "flags", "first_place", "first_wait", "sources", "destinations", "waits"]
        );
        assert_eq!(fields("ProgramPlace"), ["kind", "link", "at"]);
        assert_eq!(fields("Transfers"), ["links", "taken", "messages", "count"]);
        assert_eq!(fields("Transfer"), ["from", "into", "bytes", "tag", "first", "messages", "link", "kind"]);
        assert_eq!(fields("LinkCount"), ["link", "sends", "receives"]);
        assert_eq!(
            fields("Program"),
            [
                "items",
                "places",
                "waits",
                "links",
                "counts",
                "done",
                "scratch",
                "copy",
                "taken",
                "item_count",
                "link_count"
            ]
        );
        assert_eq!(
            fields("CollectiveParameters"),
            [
                "state",
                "status",
                "launch",
                "hash",
                "words",
                "input",
                "output",
                "program",
                "transfers",
                "places",
                "factor",
                "count",
                "sends",
                "receives",
                "send_stride",
                "receive_stride",
                "reduces",
                "operation",
                "divide",
                "scales",
                "rank",
                "ranks",
                "path",
                "slices",
                "short_bytes",
                "reports",
                "relayed"
            ]
        );
    }

    #[test]
    fn a_rank_takes_at_most_33_mib_of_its_gpu() {
        for ranks in 1..=MOST_RANKS {
            let layout = CollectiveLayout::new(ranks).expect("it exists");
            assert!(layout.bytes() <= 33 << 20, "{ranks} ranks: {} bytes", layout.bytes());
        }
        assert_eq!(CollectiveLayout::new(0), None);
        assert_eq!(CollectiveLayout::new(MOST_RANKS + 1), None);
    }
}
