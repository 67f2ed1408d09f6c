//! A collective as blocks of equal length: which ranks get one from this rank, and whose blocks it gets.
//!
//! Owns that description, the choice between one exchange and rounds through stages, and the number of
//! slices. All of them follow from what all ranks of a call know, so that they agree. Must not know GPUs.

use super::layout::{
    CALL_WORDS, CollectiveLayout, CollectiveParameters, IN_MEMORY, LISTED, MOST_SLICES, OFFSET_BITS, PLACED,
    ROUND_BITS, SHORT, STAGE, STAGED, TRANSFERS,
};
use super::listed::ListedProgram;
use super::transfers::TransferTable;
use crate::call::Collective;
use crate::device::Arithmetic;
use crate::dtype::DType;
use twox_hash::XxHash3_64;

/// Bytes that a CTA receives at once: 16 for each thread. On an H100, a call of which each CTA received 8 KiB
/// took 7 us in a graph, and with 24 KiB 9 (bench/results).
const RECEIVED: usize = 8 << 10;
/// Bytes of a block that a slice of a longer call moves at least: 16 slices of 16 KiB take 0.7 us less than 4
/// of 64 KiB on an H100 (bench/results, the kernels in a graph).
const LONG_SLICE: usize = 16 << 10;
/// The alignment of vectors and blocks of direct calls, and the limit of the bytes of a slice, which kernels
/// count in 32 bits.
const ALIGNMENT: usize = 16;
const LONGEST_DIRECT: u64 = 1 << 31;
const UNALIGNED: &str = "a vector does not begin at a multiple of 16 bytes";
/// Threads of a CTA, at least and at most.
const THREADS: [usize; 2] = [64, 512];

/// A vector of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vector {
    Input,
    Output,
}

/// A collective of one rank, as its caller describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockCall {
    pub collective: Collective,
    pub root: usize,
    /// The place of this rank among those of its node.
    pub rank: usize,
    /// Number of ranks of all nodes.
    pub world: usize,
    pub dtype: DType,
    /// Elements of the whole vector; in an all-to-all, those that a rank sends.
    pub count: u64,
    pub arithmetic: Arithmetic,
    /// Whether the result is divided by the number of ranks.
    pub average: bool,
    /// Multiplies this rank's elements.
    pub factor: Option<f64>,
    /// What all ranks must have equal.
    pub words: [u64; CALL_WORDS],
}

/// Where a vector is in an allocation that all ranks have open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of the allocation among those of its rank.
    pub number: usize,
    /// Bytes before the vector.
    pub offset: usize,
}

/// The parameters of a kernel, but for addresses and the launch, and the size of the launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    pub(in crate::device::cuda) parameters: CollectiveParameters,
    /// The type whose kernel runs.
    pub(in crate::device::cuda) dtype: DType,
    /// CTAs, at most.
    pub(in crate::device::cuda) ctas: u32,
    /// Threads of a CTA.
    pub(in crate::device::cuda) threads: u32,
}

impl Blocks {
    /// The call as blocks; `None` for one that kernels do not run. `ctas`: the most that a kernel of any rank
    /// has, equal on all. A call has no more slices, because a CTA runs slices one after the other; but a
    /// grid has less CTAs if the process has several communicators.
    pub(crate) fn new(call: &BlockCall, layout: CollectiveLayout, ctas: u32) -> Option<Self> {
        use Collective as C;
        let BlockCall { collective, root, rank, .. } = *call;
        let ranks = layout.ranks();
        // The root of a group may be no rank.
        if root >= ranks {
            return None;
        }
        let (all, the_root) = ((1u32 << ranks) - 1, 1u32 << root);
        let at_root = |set: u32| if rank == root { set } else { 0 };
        let (sends, receives) = match collective {
            C::AllReduce | C::ReduceScatter | C::AllGather | C::AllToAll => (all, all),
            C::Broadcast | C::Scatter => (at_root(all), the_root),
            C::Reduce | C::Gather => (the_root, at_root(all)),
            C::Barrier | C::SendRecv | C::AllToAllV => return None,
        };
        // Blocks that are only moved are bytes.
        let reduces = collective.reduces();
        let (dtype, element) = if reduces { (call.dtype, 1) } else { (DType::U8, call.dtype.size() as u64) };
        let is_divided =
            matches!(collective, C::ReduceScatter | C::AllGather | C::Gather | C::Scatter | C::AllToAll);
        let blocks = if is_divided { ranks as u64 } else { 1 };
        let count = call.count / blocks * element;
        let bytes = count * dtype.size() as u64;
        let stride = |differ: bool| if differ { bytes } else { 0 };
        let length = usize::try_from(bytes).ok()?;
        let is_short = layout.is_alone() || length <= layout.short_bytes();
        let places =
            if matches!(collective, C::ReduceScatter | C::Scatter | C::AllToAll) { ranks } else { 1 };
        let most = MOST_SLICES.min(ctas.max(1) as usize);
        let slices = if is_short && !layout.is_alone() {
            (length * (ranks - 1)).div_ceil(RECEIVED).clamp(1, most)
        } else {
            let bytes = length.saturating_mul(places);
            let least = bytes.div_ceil(STAGE << (ROUND_BITS - 1)).clamp(1, MOST_SLICES);
            bytes.div_ceil(LONG_SLICE).clamp(1, most).max(least)
        };
        let packets = length.div_ceil(slices).div_ceil(8).saturating_mul(ranks);
        let threads =
            if is_short { packets.next_multiple_of(32).clamp(THREADS[0], THREADS[1]) } else { THREADS[1] };
        let mut parameters = CollectiveParameters {
            words: call.words,
            factor: call.factor.unwrap_or(1.0),
            count,
            sends,
            receives,
            send_stride: stride(places > 1),
            receive_stride: stride(matches!(collective, C::AllGather | C::Gather | C::AllToAll)),
            reduces: u32::from(reduces),
            operation: call.arithmetic as u32,
            divide: if call.average { ranks as u32 } else { 0 },
            scales: u32::from(call.factor.is_some()),
            rank: rank as u32,
            ranks: ranks as u32,
            path: if is_short { SHORT } else { STAGED },
            slices: slices as u32,
            short_bytes: layout.short_bytes() as u32,
            ..CollectiveParameters::default()
        };
        parameters.hash = hash(&parameters);
        Some(Self { parameters, dtype, ctas: slices as u32, threads: threads as u32 })
    }

    /// Has the host carry messages of the call.
    pub(crate) fn set_relayed(&mut self) {
        self.parameters.relayed = 1;
    }

    /// Makes it the captured call with this number, which a replay of no other one agrees with.
    pub(crate) fn set_capture(&mut self, number: u64) {
        self.parameters.words[CALL_WORDS - 1] = number;
        self.parameters.hash = hash(&self.parameters);
    }
}

impl Blocks {
    /// The call by the items of this rank's list.
    pub(crate) fn listed(
        call: &BlockCall,
        layout: CollectiveLayout,
        ctas: u32,
        program: &ListedProgram,
    ) -> Self {
        let mut parameters = CollectiveParameters {
            words: call.words,
            program: program.address(),
            factor: call.factor.unwrap_or(1.0),
            operation: call.arithmetic as u32,
            divide: if call.average { call.world as u32 } else { 0 },
            rank: call.rank as u32,
            ranks: layout.ranks() as u32,
            path: LISTED,
            slices: 1,
            short_bytes: layout.short_bytes() as u32,
            // The memory of the list is used again.
            reports: 1,
            ..CollectiveParameters::default()
        };
        parameters.hash = hash(&parameters);
        let ctas = program.items().clamp(1, ctas.max(1));
        Self { parameters, dtype: call.dtype, ctas, threads: THREADS[1] as u32 }
    }

    /// The call by messages between pairs of ranks. It is counted among the calls that kernels run if all
    /// ranks make it.
    pub(crate) fn transfers(
        call: &BlockCall,
        layout: CollectiveLayout,
        ctas: u32,
        table: TransferTable,
    ) -> Self {
        let mut parameters = CollectiveParameters {
            words: call.words,
            transfers: table.address,
            rank: call.rank as u32,
            ranks: layout.ranks() as u32,
            path: TRANSFERS,
            slices: u32::from(call.collective != Collective::SendRecv),
            short_bytes: layout.short_bytes() as u32,
            // The memory of the table is used again.
            reports: 1,
            ..CollectiveParameters::default()
        };
        parameters.hash = hash(&parameters);
        let ctas = u32::try_from(table.messages).unwrap_or(u32::MAX).clamp(1, ctas.max(1));
        Self { parameters, dtype: DType::U8, ctas, threads: THREADS[1] as u32 }
    }

    /// Whether the call is long, so that it takes stages or accesses vectors directly.
    pub(crate) fn is_long(&self) -> bool {
        self.parameters.path == STAGED
    }

    /// Has the kernel of a long call access vectors directly if all ranks have places for those that peers
    /// access. `output`: this rank's. `is_exchanged_in_place`: an all-to-all whose input is its output.
    ///
    /// # Errors
    /// Why this call goes through stages on all ranks.
    pub(crate) fn set_places(
        &mut self,
        output: *const u8,
        is_exchanged_in_place: bool,
        place_of: impl Fn(Vector) -> Option<Place>,
    ) -> Result<(), &'static str> {
        let CollectiveParameters { sends, receives, send_stride, reduces, ranks, count, .. } =
            self.parameters;
        let block = count * self.dtype.size() as u64;
        if is_exchanged_in_place {
            return Err("an all-to-all is in place, so ranks would read what others write");
        }
        if self.parameters.scales != 0 {
            return Err("the operation has a factor");
        }
        if !block.is_multiple_of(ALIGNMENT as u64) {
            return Err("the length of a block is not a multiple of 16 bytes");
        }
        if block / u64::from(self.parameters.slices) >= LONGEST_DIRECT {
            return Err("a slice is longer than 2 GiB");
        }
        let writes_granules = reduces != 0 && receives != 0;
        if writes_granules && !(output as usize).is_multiple_of(ALIGNMENT) {
            return Err(UNALIGNED);
        }
        let all = (1u32 << ranks) - 1;
        // An all-reduce: the owner of a part of it writes all outputs.
        let is_owned = reduces != 0 && send_stride == 0 && sends == all && receives == all;
        let word = |vector: Vector, is_needed: bool| {
            if !is_needed {
                return Ok(PLACED);
            }
            let Place { number, offset } = place_of(vector)
                .ok_or("a vector is not in registered memory, or not open on all ranks yet")?;
            let fits = offset.is_multiple_of(ALIGNMENT) && (offset as u64) >> OFFSET_BITS == 0;
            let place = PLACED | IN_MEMORY | (number as u64) << OFFSET_BITS | offset as u64;
            fits.then_some(place).ok_or(UNALIGNED)
        };
        self.parameters.places = [word(Vector::Input, sends != 0)?, word(Vector::Output, is_owned)?];
        Ok(())
    }
}

/// A number that ranks with different calls, or with programs that would run a call differently, have equal
/// once in 2^64 cases.
fn hash(parameters: &CollectiveParameters) -> u64 {
    let CollectiveParameters { words, path, slices, short_bytes, .. } = parameters;
    let sizes = u64::from(*path) << 62 | u64::from(*slices) << 32 | u64::from(*short_bytes);
    let mut bytes = [0; 8 * (CALL_WORDS + 1)];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words.iter().chain([&sizes])) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    XxHash3_64::oneshot(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce() -> BlockCall {
        BlockCall {
            collective: Collective::AllReduce,
            root: 1,
            rank: 0,
            world: 4,
            dtype: DType::F32,
            count: 1,
            arithmetic: Arithmetic::Sum,
            average: false,
            factor: None,
            words: [0; CALL_WORDS],
        }
    }

    fn blocks(collective: Collective, rank: usize, count: u64) -> Blocks {
        let call = BlockCall { collective, rank, count, ..all_reduce() };
        Blocks::new(&call, CollectiveLayout::new(4).expect("four ranks"), 48).expect("it is run by kernels")
    }

    /// What each rank sends to `to` and receives from `from` must be the same block for both.
    #[test]
    fn every_block_that_is_sent_is_received() {
        for collective in Collective::ALL
            .into_iter()
            .filter(|one| !matches!(one, Collective::Barrier | Collective::AllToAllV))
        {
            for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
                let (sender, receiver) =
                    (blocks(collective, from, 400).parameters, blocks(collective, to, 400).parameters);
                assert_eq!(
                    sender.sends >> to & 1,
                    receiver.receives >> from & 1,
                    "{collective:?} {from} {to}"
                );
                assert_eq!(
                    (sender.count, sender.path, sender.slices),
                    (receiver.count, receiver.path, receiver.slices)
                );
                assert_eq!(sender.hash, receiver.hash);
            }
        }
    }

    #[test]
    fn a_group_with_several_peers_is_not_run_by_kernels() {
        let call = BlockCall {
            collective: Collective::SendRecv,
            root: u32::MAX as usize,
            dtype: DType::U8,
            count: 2,
            ..all_reduce()
        };
        assert!(Blocks::new(&call, CollectiveLayout::new(4).expect("four ranks"), 48).is_none());
    }

    #[test]
    fn blocks_are_parts_or_whole_vectors() {
        let strides = |collective| {
            let parameters = blocks(collective, 1, 400).parameters;
            (parameters.count, parameters.send_stride, parameters.receive_stride)
        };
        assert_eq!(strides(Collective::AllReduce), (400, 0, 0));
        assert_eq!(strides(Collective::ReduceScatter), (100, 400, 0));
        assert_eq!(strides(Collective::AllGather), (400, 0, 400));
        assert_eq!(strides(Collective::Broadcast), (1600, 0, 0));
        assert_eq!(strides(Collective::Gather), (400, 0, 400));
        assert_eq!(strides(Collective::Scatter), (400, 400, 0));
        assert_eq!(strides(Collective::AllToAll), (400, 400, 400));
    }

    #[test]
    fn long_blocks_take_rounds_and_all_slices() {
        let short = blocks(Collective::AllReduce, 0, 2);
        assert_eq!((short.parameters.path, short.ctas, short.threads), (SHORT, 1, 64));
        let longest = blocks(Collective::AllReduce, 0, 64 << 10);
        assert_eq!((longest.parameters.path, longest.ctas, longest.threads), (SHORT, 48, 512));
        let long = blocks(Collective::AllReduce, 0, (64 << 10) + 1);
        assert_eq!((long.parameters.path, long.ctas), (STAGED, 17));
        assert_eq!(blocks(Collective::AllReduce, 0, 64 << 20).ctas, 48);
    }

    /// Kernels count the rounds of a slice in few bits.
    #[test]
    fn slices_of_the_longest_calls_have_rounds_that_can_be_counted() {
        let layout = CollectiveLayout::new(4).expect("four ranks");
        let call = BlockCall { count: 1 << 36, ..all_reduce() };
        let blocks = Blocks::new(&call, layout, 1).expect("it is run by kernels");
        let bytes = (1u64 << 36) * 4 / u64::from(blocks.parameters.slices);
        assert!(bytes / (STAGE as u64) < 1 << ROUND_BITS, "{} slices", blocks.parameters.slices);
        assert_eq!(
            Blocks::new(&BlockCall { count: 1 << 30, ..call }, layout, 1).map(|blocks| blocks.ctas),
            Some(1)
        );
    }

    #[test]
    fn a_call_has_places_where_peers_access_its_vectors() {
        let places = |collective, rank, has_output: bool| {
            let mut blocks = blocks(collective, rank, 4 << 20);
            let place_of = |vector| {
                let place = Place { number: 5, offset: 32 };
                (vector == Vector::Input || has_output).then_some(place)
            };
            let placed = blocks.set_places(std::ptr::null(), false, place_of);
            assert!(blocks.is_long());
            placed.map_or([0, 0], |()| blocks.parameters.places)
        };
        let place = PLACED | IN_MEMORY | 5 << 48 | 32;
        use Collective as C;
        assert_eq!(places(C::AllReduce, 0, true), [place, place]);
        assert_eq!(places(C::AllReduce, 0, false), [0, 0]);
        for collective in [C::ReduceScatter, C::AllGather, C::AllToAll, C::Reduce, C::Gather] {
            assert_eq!(places(collective, 0, false), [place, PLACED], "{collective:?}");
        }
        // Only the root sends.
        assert_eq!(places(C::Broadcast, 1, false), [place, PLACED]);
        assert_eq!(places(C::Broadcast, 0, false), [PLACED, PLACED]);
    }

    #[test]
    fn calls_that_cannot_be_direct_say_why() {
        let why = |mut blocks: Blocks, output: usize, in_place, offset| {
            let place = Place { number: 0, offset };
            let why = blocks.set_places(output as *const u8, in_place, |_| Some(place)).expect_err("stages");
            assert_eq!(blocks.parameters.places, [0, 0]);
            why
        };
        use Collective as C;
        assert!(!blocks(C::AllReduce, 0, 2).is_long());
        let uneven = blocks(C::ReduceScatter, 0, 4 * 100_001);
        assert!(why(uneven, 0, false, 0).contains("length of a block"));
        let mut scaled = blocks(C::AllReduce, 0, 4 << 20);
        assert_eq!(why(scaled, 0, false, 8), UNALIGNED);
        assert_eq!(why(scaled, 8, false, 0), UNALIGNED);
        scaled.parameters.scales = 1;
        assert!(why(scaled, 0, false, 0).contains("factor"));
        assert!(why(blocks(C::AllToAll, 0, 4 << 20), 0, true, 0).contains("in place"));
    }

    #[test]
    fn other_words_have_another_hash() {
        let mut parameters = blocks(Collective::AllReduce, 0, 4).parameters;
        let before = hash(&parameters);
        parameters.words[2] = 1;
        assert_ne!(hash(&parameters), before);
    }
}
