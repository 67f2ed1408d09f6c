//! Collective calls, as ranks describe them to each other before they use each other's data.
//!
//! Owns [`Call`] and its packed form, the comparison of two ranks' calls, and the lengths of the blocks that
//! a rank exchanges.

use crate::dtype::{DType, ReduceOp};
use std::fmt;
use std::sync::Arc;

/// The collective operation of a call. The numbers are packed into [`CallWords`].
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
    strum::FromRepr,
    strum::IntoStaticStr,
)]
#[repr(u8)]
#[strum(serialize_all = "snake_case")]
pub enum Collective {
    /// Every rank ends with the reduction of all ranks' vectors.
    AllReduce = 1,
    /// The reduction is split into equal parts, and rank r ends with part r.
    ReduceScatter = 2,
    /// Every rank ends with the concatenation of all ranks' vectors, in rank order.
    AllGather = 3,
    /// Every rank ends with the root's vector.
    Broadcast = 4,
    /// The root ends with the reduction of all ranks' vectors.
    Reduce = 5,
    /// The root ends with the concatenation of all ranks' vectors, in rank order.
    Gather = 6,
    /// The root's vector is split into equal parts, and rank r ends with part r.
    Scatter = 7,
    /// Every rank ends with one block of every rank's vector, in rank order.
    AllToAll = 8,
    /// No data: every rank returns after all ranks have made the call.
    Barrier = 9,
    /// A group of sends and receives. It concerns its rank and that rank's peers only, and is no collective.
    SendRecv = 10,
    /// An all-to-all of blocks that differ in length. A block's length is known to the two ranks that
    /// exchange it.
    AllToAllV = 11,
}

impl Collective {
    /// All collectives, which all ranks make together, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
        Self::AllToAllV,
    ];

    /// The name as in MPI and NCCL, in snake case.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether elements are reduced, so that the reduction operation matters.
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether the whole vector consists of one equal part per rank.
    #[must_use]
    pub fn has_parts(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllGather | Self::Gather | Self::Scatter)
    }

    /// Whether data goes straight from each rank that has it to each rank that gets it, whatever the
    /// schedule.
    #[must_use]
    pub fn is_straight(self) -> bool {
        matches!(self, Self::Gather | Self::Scatter) || self.is_all_to_all()
    }

    /// Whether every rank has a block for every rank.
    #[must_use]
    pub fn is_all_to_all(self) -> bool {
        matches!(self, Self::AllToAll | Self::AllToAllV)
    }

    /// Whether one rank is the root.
    #[must_use]
    pub fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::from_repr(code)
    }
}

/// One rank's description of one collective call.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Call {
    /// Sequence number of the call, from 1. Groups of sends and receives are not counted, because not all
    /// ranks make them: such a group has the number of the next collective.
    pub sequence: u64,
    /// The collective operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DType,
    /// The reduction operation, numbered as by [`ReduceOp::code`].
    pub op: u8,
    /// The root of a broadcast, reduce, gather or scatter. The peer of a group of sends and receives that has
    /// only one, else [`Call::SEVERAL_PEERS`]. Otherwise 0.
    pub root: u32,
    /// Number of elements of the whole vector; in an all-to-all of equal blocks, those that a rank sends to
    /// all ranks. In one of blocks that differ: those that this rank sends to the rank that the call is
    /// announced to, or in reports, to all ranks. In a group of sends and receives the number of both.
    pub count: u64,
    /// Digest of the program that will run: schedule, lowering and sub-chunk size.
    pub program: u64,
    /// Whether the vectors are in GPU memory. It must be equal on all ranks, because ranks read each other's
    /// memory.
    pub on_gpu: bool,
    /// The factor that this rank's own elements are multiplied by. It may differ between ranks.
    pub factor: f64,
}

/// A [`Call`] packed into 64-bit words, for shared memory and frames.
pub type CallWords = [u64; 5];

impl Call {
    /// The root of a group of sends and receives with several peers.
    pub const SEVERAL_PEERS: u32 = u32::MAX;

    /// Whether all ranks make this call, so that its number means the same on all of them.
    #[must_use]
    pub fn is_collective(&self) -> bool {
        self.collective != Collective::SendRecv
    }

    /// Number of the last collective that a rank in this call has entered; 0 before the first.
    #[must_use]
    pub fn last_collective(&self) -> u64 {
        if self.is_collective() { self.sequence } else { self.sequence.saturating_sub(1) }
    }

    /// Whether two ranks cannot be in these calls at the same time.
    #[must_use]
    pub fn contradicts(&self, other: &Self) -> bool {
        let both = self.is_collective() && other.is_collective();
        both && self.sequence == other.sequence && !self.agrees_with(other)
    }

    /// Whether no rank completes it before all ranks have begun it: each rank's result depends on data of
    /// every rank. Calls without elements move one dummy element, which only reaches all ranks if it is not
    /// cut into parts.
    #[must_use]
    pub fn awaits_all_ranks(&self) -> bool {
        match self.collective {
            Collective::AllReduce | Collective::Barrier => true,
            Collective::ReduceScatter | Collective::AllGather => self.count > 0,
            _ => false,
        }
    }

    /// Packs the call.
    #[must_use]
    pub fn to_words(self) -> CallWords {
        let kinds = u64::from(self.collective as u8)
            | u64::from(self.dtype as u8) << 8
            | u64::from(self.op) << 16
            | u64::from(self.on_gpu) << 24
            | u64::from(self.root) << 32;
        [self.sequence, kinds, self.count, self.program, self.factor.to_bits()]
    }

    /// Unpacks a call. `None` if a field is out of range.
    #[must_use]
    pub fn from_words(words: CallWords) -> Option<Self> {
        let [sequence, kinds, count, program, factor] = words;
        if kinds >> 25 & 0x7f != 0 {
            return None;
        }
        Some(Self {
            sequence,
            collective: Collective::from_code(kinds as u8)?,
            root: (kinds >> 32) as u32,
            dtype: DType::from_code((kinds >> 8) as u8)?,
            op: (kinds >> 16) as u8,
            on_gpu: kinds >> 24 & 1 == 1,
            count,
            program,
            factor: f64::from_bits(factor),
        })
    }

    /// Whether two ranks describe the same call. All fields but the factor must be equal, except that ranks
    /// with blocks of different lengths have counts of their own, and that those which send nothing in an
    /// all-to-all may have no memory on a GPU.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        let mut same = Self { factor: 0.0, ..*other };
        if self.collective.is_all_to_all() && (self.count == 0 || other.count == 0) {
            same.on_gpu = self.on_gpu;
        }
        if self.collective == Collective::AllToAllV {
            same.count = self.count;
        }
        (Self { factor: 0.0, ..*self }) == same
    }

    /// Describes how `theirs`, the call of rank `them`, differs from this call of rank `me`.
    #[must_use]
    pub fn difference(&self, me: usize, theirs: &Self, them: usize) -> String {
        // Only the counts of blocks that differ in length can differ in calls that agree otherwise.
        if self.count != theirs.count && self.agrees_with(theirs) {
            let Self { sequence, dtype, count, .. } = self;
            return format!(
                "all_to_all_v #{sequence}: rank {them} sends {} x {} to rank {me}, which expects {count}",
                theirs.count,
                dtype.name()
            );
        }
        if (Self { program: 0, factor: 0.0, ..*self }) == (Self { program: 0, factor: 0.0, ..*theirs }) {
            return format!(
                "ranks {me} and {them} run different programs for {self}: do they see the same topology, \
                 settings and version?"
            );
        }
        format!("rank {me} called {self} and rank {them} called {theirs}")
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, count, dtype) = (self.collective.name(), self.count, self.dtype.name());
        let place = if self.on_gpu { ", on a GPU)" } else { ")" };
        if !self.is_collective() {
            return match self.root {
                Self::SEVERAL_PEERS => write!(f, "{name} ({count} operations{place}"),
                peer if count == 1 => write!(f, "{name} (1 operation, with rank {peer}{place}"),
                peer => write!(f, "{name} ({count} operations, with rank {peer}{place}"),
            };
        }
        if self.collective == Collective::Barrier {
            return write!(f, "{name} #{}", self.sequence);
        }
        write!(f, "{name} #{} ({count} x {dtype}", self.sequence)?;
        if self.collective.reduces() {
            write!(f, ", {}", ReduceOp::name_of(self.op))?;
        }
        match self.collective {
            Collective::Broadcast | Collective::Scatter => write!(f, ", from rank {}", self.root)?,
            Collective::Reduce | Collective::Gather => write!(f, ", to rank {}", self.root)?,
            _ => {}
        }
        f.write_str(place)
    }
}

/// The lengths of the blocks of an all-to-all, as one rank knows them, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockCounts {
    /// All blocks of all ranks have this length.
    Equal(u64),
    /// By rank: the length of the block that goes to it, and of the block that comes from it.
    Listed(Arc<[(u64, u64)]>),
}

impl BlockCounts {
    /// The length of the block that goes to `rank`.
    #[must_use]
    pub fn sent_to(&self, rank: usize) -> u64 {
        match self {
            Self::Equal(count) => *count,
            Self::Listed(counts) => counts[rank].0,
        }
    }

    /// The length of the block that comes from `rank`.
    #[must_use]
    pub fn received_from(&self, rank: usize) -> u64 {
        match self {
            Self::Equal(count) => *count,
            Self::Listed(counts) => counts[rank].1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Call {
        Call {
            sequence: 7,
            collective: Collective::AllReduce,
            dtype: DType::BF16,
            op: ReduceOp::Avg.code(),
            root: 0,
            count: 1 << 40,
            program: 99,
            on_gpu: false,
            factor: 1.5,
        }
    }

    #[test]
    fn round_trips_through_words() {
        for collective in Collective::ALL {
            let call = Call { collective, root: u32::MAX, on_gpu: collective.reduces(), ..call() };
            assert_eq!(Call::from_words(call.to_words()), Some(call));
        }
        assert_eq!(Call::from_words([0; 5]), None);
        assert_eq!(Call::from_words([1, u64::MAX, 0, 0, 0]), None);
    }

    #[test]
    fn only_factors_may_differ() {
        assert!(call().agrees_with(&Call { factor: -2.0, ..call() }));
        assert!(!call().agrees_with(&Call { count: 3, ..call() }));
        assert!(!call().agrees_with(&Call { on_gpu: true, ..call() }));
        let message = call().difference(0, &Call { count: 3, ..call() }, 2);
        assert_eq!(
            message,
            "rank 0 called all_reduce #7 (1099511627776 x bfloat16, avg) and rank 2 called all_reduce #7 (3 x bfloat16, avg)"
        );
        assert!(call().difference(0, &Call { program: 1, ..call() }, 2).contains("different programs"));
        let exchange = Call { collective: Collective::AllToAllV, count: 5, ..call() };
        assert_eq!(
            exchange.difference(0, &Call { count: 7, ..exchange }, 2),
            "all_to_all_v #7: rank 2 sends 7 x bfloat16 to rank 0, which expects 5"
        );
        let equal = Call { collective: Collective::AllToAll, ..exchange };
        assert!(!equal.agrees_with(&Call { count: 7, ..equal }) && !equal.agrees_with(&exchange));
        assert!(exchange.agrees_with(&Call { count: 7, ..exchange }));
    }

    #[test]
    fn a_rank_may_complete_calls_early_that_do_not_give_it_elements_of_all_ranks() {
        use Collective::{AllGather, AllReduce, Barrier, ReduceScatter};
        let waits = |collective, count| Call { collective, count, ..call() }.awaits_all_ranks();
        for collective in Collective::ALL {
            let needs_all = matches!(collective, AllReduce | Barrier | ReduceScatter | AllGather);
            assert_eq!(waits(collective, 8), needs_all, "{collective:?}");
            assert_eq!(waits(collective, 0), matches!(collective, AllReduce | Barrier), "{collective:?}");
        }
    }

    #[test]
    fn a_barrier_is_described_without_a_vector() {
        assert_eq!(Call { collective: Collective::Barrier, ..call() }.to_string(), "barrier #7");
    }

    #[test]
    fn groups_of_sends_and_receives_stand_between_two_collectives() {
        let group = Call { collective: Collective::SendRecv, count: 3, root: 2, ..call() };
        assert_eq!((group.last_collective(), call().last_collective()), (6, 7));
        assert_eq!(group.to_string(), "send_recv (3 operations, with rank 2)");
        assert_eq!(
            Call { root: Call::SEVERAL_PEERS, on_gpu: true, ..group }.to_string(),
            "send_recv (3 operations, on a GPU)"
        );
        assert_eq!(Call::from_words(group.to_words()), Some(group));
        assert!(!group.contradicts(&call()) && !call().contradicts(&group));
        assert!(call().contradicts(&Call { count: 3, ..call() }) && !call().contradicts(&call()));
        assert!(!call().contradicts(&Call { count: 3, sequence: 8, ..call() }));
    }
}
