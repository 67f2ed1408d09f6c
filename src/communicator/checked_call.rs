//! The arguments of a call, checked.
//!
//! Owns the rules that arguments must satisfy.

use super::block_lists::BlockLists;
use crate::call::{BlockCounts, Collective};
use crate::device::Arithmetic;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::PeerMessage;
use crate::memory::Piece;
use crate::rank::Rank;
use std::sync::Arc;

/// A call whose arguments are valid. The caller guarantees that the pieces are valid until the call is over.
#[derive(Clone, Debug)]
pub struct CheckedCall {
    pub(super) collective: Collective,
    pub(super) root: Rank,
    /// What this rank contributes; empty if it contributes nothing.
    pub(super) input: Piece,
    /// Where this rank's result goes; empty if it gets none.
    pub(super) output: Piece,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// Number of elements in the whole vector; in an all-to-all those that this rank sends.
    pub(super) count: u64,
    /// The lengths of the blocks of an all-to-all.
    pub(super) blocks: Option<BlockCounts>,
    /// The sends and receives of a group; `None` for collectives.
    pub(super) messages: Option<Arc<[PeerMessage]>>,
    /// Whether input and output overlap. They then have the same elements at the same addresses.
    pub(super) in_place: bool,
    /// Whether the caller's vectors are memory of a GPU.
    pub(super) on_gpu: bool,
}

impl CheckedCall {
    /// Whether the caller's vectors are memory of the host.
    pub fn is_on_host(&self) -> bool {
        !self.on_gpu
    }

    /// How elements are combined.
    pub(super) fn arithmetic(&self) -> Arithmetic {
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::WrappingAvg | ReduceOp::PreMulSum(_) => Arithmetic::Sum,
            ReduceOp::Prod => Arithmetic::Prod,
            ReduceOp::Max => Arithmetic::Max,
            ReduceOp::Min => Arithmetic::Min,
            ReduceOp::BitAnd => Arithmetic::BitAnd,
            ReduceOp::BitOr => Arithmetic::BitOr,
            ReduceOp::BitXor => Arithmetic::BitXor,
        }
    }

    /// Whether the result is divided by the number of ranks.
    pub(super) fn averages(&self) -> bool {
        matches!(self.op, ReduceOp::Avg | ReduceOp::WrappingAvg)
    }

    /// Whether this rank's elements are multiplied by the factor of the operation.
    pub(super) fn prescales(&self) -> bool {
        matches!(self.op, ReduceOp::PreMulSum(_))
    }

    /// Bytes of the whole vector; in an all-to-all those that this rank sends.
    pub(super) fn whole_bytes(&self) -> usize {
        self.count as usize * self.dtype.size()
    }

    /// Whether this rank neither provides nor receives elements.
    pub fn is_empty(&self) -> bool {
        let mut messages = self.messages.iter().flat_map(|messages| messages.iter());
        self.input.is_empty() && self.output.is_empty() && messages.all(|message| message.piece.is_empty())
    }

    /// Whether all ranks make this call.
    pub(super) fn is_collective(&self) -> bool {
        self.messages.is_none()
    }

    /// Refuses an all-to-all in place, which the host does not run: a block would be overwritten before its
    /// receiver has read it.
    pub(super) fn check_apart(&self) -> Result<()> {
        if self.in_place && matches!(self.collective, Collective::AllToAll | Collective::AllToAllV) {
            return refuse(
                "an all-to-all cannot be in place here: give it a receive buffer of its own".to_owned(),
            );
        }
        Ok(())
    }

    /// The peers of a group, each as often as it has messages.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.messages.iter().flat_map(|messages| messages.iter()).map(|message| message.peer)
    }

    /// The caller's memory that the call uses.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let messages = self.messages.iter().flat_map(|messages| messages.iter());
        [self.input, self.output].into_iter().chain(messages.map(|message| message.piece))
    }
}

/// Checks the arguments of the calls of one rank. Every method fails with `InvalidArgument`, and says which
/// argument is wrong.
#[derive(Clone, Copy, Debug)]
pub struct CallValidator<'a> {
    /// The rank that makes the calls.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    pub(super) block_lists: &'a BlockLists,
}

impl CallValidator<'_> {
    /// Checks an all-reduce of `input` into `output`.
    pub fn all_reduce(self, input: Piece, output: Piece, dtype: DType, op: ReduceOp) -> Result<CheckedCall> {
        if input.len() != output.len() {
            return refuse(format!("{} bytes cannot be reduced into {} bytes", input.len(), output.len()));
        }
        self.check(Collective::AllReduce, 0, (input, 0), (output, 0), input.len(), dtype, op)
    }

    /// Checks a reduce-scatter of `input`, whose part for this rank goes to `output`.
    pub fn reduce_scatter(
        self,
        input: Piece,
        output: Piece,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<CheckedCall> {
        self.check_parts_of(input, output)?;
        let offset = self.rank * output.len();
        self.check(Collective::ReduceScatter, 0, (input, 0), (output, offset), input.len(), dtype, op)
    }

    /// Checks an all-gather of all ranks' `input` into `output`.
    pub fn all_gather(self, input: Piece, output: Piece, dtype: DType) -> Result<CheckedCall> {
        self.check_joined(input, output)?;
        let offset = self.rank * input.len();
        let op = ReduceOp::Sum;
        self.check(Collective::AllGather, 0, (input, offset), (output, 0), output.len(), dtype, op)
    }

    /// Checks a broadcast of the root's `input` into `output` of all ranks.
    pub fn broadcast(self, input: Piece, output: Piece, dtype: DType, root: Rank) -> Result<CheckedCall> {
        let input = if self.rank == root { input } else { Piece::EMPTY };
        if self.rank == root && input.len() != output.len() {
            return refuse(format!("{} bytes cannot be broadcast into {} bytes", input.len(), output.len()));
        }
        let op = ReduceOp::Sum;
        self.check(Collective::Broadcast, root, (input, 0), (output, 0), output.len(), dtype, op)
    }

    /// Checks a reduction of all ranks' `input` into the root's `output`.
    pub fn reduce(
        self,
        input: Piece,
        output: Piece,
        dtype: DType,
        op: ReduceOp,
        root: Rank,
    ) -> Result<CheckedCall> {
        let output = if self.rank == root { output } else { Piece::EMPTY };
        if self.rank == root && input.len() != output.len() {
            return refuse(format!("{} bytes cannot be reduced into {} bytes", input.len(), output.len()));
        }
        self.check(Collective::Reduce, root, (input, 0), (output, 0), input.len(), dtype, op)
    }

    /// Checks a gather of all ranks' `input` into the root's `output`.
    pub fn gather(self, input: Piece, output: Piece, dtype: DType, root: Rank) -> Result<CheckedCall> {
        let output = if self.rank == root { output } else { Piece::EMPTY };
        let whole = self.whole(input)?;
        if self.rank == root {
            self.check_joined(input, output)?;
        }
        let (offset, op) = (self.rank * input.len(), ReduceOp::Sum);
        self.check(Collective::Gather, root, (input, offset), (output, 0), whole, dtype, op)
    }

    /// Checks a scatter of the root's `input`, whose part for this rank goes to `output`.
    pub fn scatter(self, input: Piece, output: Piece, dtype: DType, root: Rank) -> Result<CheckedCall> {
        let input = if self.rank == root { input } else { Piece::EMPTY };
        let whole = self.whole(output)?;
        if self.rank == root {
            self.check_parts_of(input, output)?;
        }
        let (offset, op) = (self.rank * output.len(), ReduceOp::Sum);
        self.check(Collective::Scatter, root, (input, 0), (output, offset), whole, dtype, op)
    }

    /// Checks an all-to-all of equal blocks, one for each rank in both `input` and `output`.
    pub fn all_to_all(self, input: Piece, output: Piece, dtype: DType) -> Result<CheckedCall> {
        if input.len() != output.len() || !input.len().is_multiple_of(self.world * dtype.size()) {
            return refuse(format!(
                "{} bytes to send and {} bytes to receive are not {} equal blocks each, one for each rank",
                input.len(),
                output.len(),
                self.world
            ));
        }
        let block = input.len() / self.world / dtype.size();
        self.exchange(Collective::AllToAll, input, output, dtype, BlockCounts::Equal(block as u64))
    }

    /// Checks an all-to-all of blocks with these numbers of elements, by rank.
    pub fn all_to_all_v(
        self,
        (input, send_counts): (Piece, &[usize]),
        (output, receive_counts): (Piece, &[usize]),
        dtype: DType,
    ) -> Result<CheckedCall> {
        for (name, piece, counts) in [("send", input, send_counts), ("receive", output, receive_counts)] {
            if counts.len() != self.world {
                return refuse(format!("{} {name} counts for {} ranks", counts.len(), self.world));
            }
            let sum = counts.iter().fold(0u128, |sum, count| sum + *count as u128);
            if sum * dtype.size() as u128 != piece.len() as u128 {
                return refuse(format!(
                    "the {name} counts add up to {sum} x {}, but the {name} buffer has {} bytes",
                    dtype.name(),
                    piece.len()
                ));
            }
        }
        let (sends, receives) = (send_counts[self.rank], receive_counts[self.rank]);
        if sends != receives {
            return refuse(format!(
                "rank {} sends {sends} elements to itself and expects {receives}",
                self.rank
            ));
        }
        let counts = send_counts.iter().zip(receive_counts);
        let counts = counts.map(|(send, receive)| (*send as u64, *receive as u64));
        let counts = BlockCounts::Listed(self.block_lists.list(counts));
        self.exchange(Collective::AllToAllV, input, output, dtype, counts)
    }

    fn exchange(
        self,
        collective: Collective,
        input: Piece,
        output: Piece,
        dtype: DType,
        blocks: BlockCounts,
    ) -> Result<CheckedCall> {
        let whole = input.len();
        let checked = self.check(collective, 0, (input, 0), (output, 0), whole, dtype, ReduceOp::Sum)?;
        let checked = CheckedCall { blocks: Some(blocks), ..checked };
        if checked.is_on_host() {
            checked.check_apart()?;
        }
        Ok(checked)
    }

    /// A barrier.
    pub fn barrier(self) -> Result<CheckedCall> {
        let (collective, none) = (Collective::Barrier, (Piece::EMPTY, 0));
        self.check(collective, 0, none, none, 0, DType::U8, ReduceOp::Sum)
    }

    /// Checks that `output` is as long as a part like `input` of each rank.
    fn check_joined(self, input: Piece, output: Piece) -> Result<()> {
        if input.len().checked_mul(self.world) == Some(output.len()) {
            return Ok(());
        }
        refuse(format!("{} parts of {} bytes are not {} bytes", self.world, input.len(), output.len()))
    }

    /// Checks that `input` is as long as a part like `output` for each rank.
    fn check_parts_of(self, input: Piece, output: Piece) -> Result<()> {
        if output.len().checked_mul(self.world) == Some(input.len()) {
            return Ok(());
        }
        refuse(format!("{} bytes are not {} parts of {} bytes", input.len(), self.world, output.len()))
    }

    /// Bytes of a vector that has a part of this length for each rank.
    fn whole(self, part: Piece) -> Result<usize> {
        part.len().checked_mul(self.world).ok_or_else(|| {
            Error::invalid_argument(format!(
                "{} bytes for each rank are more than any memory holds",
                part.len()
            ))
        })
    }

    /// The checks that all collectives share. Each piece comes with its offset in the whole vector of `bytes`
    /// bytes.
    #[allow(clippy::too_many_arguments, reason = "they are the caller's arguments")]
    fn check(
        self,
        collective: Collective,
        root: Rank,
        (input, input_at): (Piece, usize),
        (output, output_at): (Piece, usize),
        bytes: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<CheckedCall> {
        if root >= self.world {
            return refuse(format!("root {root} is not a rank: there are {}, from 0", self.world));
        }
        for (name, piece) in [("send", input), ("receive", output)] {
            if !piece.is_empty() && !dtype.divides(address(piece)) {
                return refuse(format!(
                    "the {name} buffer at {:p} is not aligned to the {} bytes of a {}",
                    piece.as_ptr(),
                    dtype.size(),
                    dtype.name()
                ));
            }
        }
        let both = !input.is_empty() && !output.is_empty();
        if both && input.memory() != output.memory() {
            return refuse(format!(
                "the send buffer is memory of {} and the receive buffer of {}: both must be in the same place",
                input.memory(),
                output.memory()
            ));
        }
        // In place, the whole vector begins at the same address for both.
        let in_place =
            both && address(input).wrapping_sub(input_at) == address(output).wrapping_sub(output_at);
        let overlap = both
            && address(input) < address(output) + output.len()
            && address(output) < address(input) + input.len();
        if overlap && !in_place {
            return refuse(format!(
                "the send buffer at {:p} and the receive buffer at {:p} overlap: they must be the same or apart",
                input.as_ptr(),
                output.as_ptr()
            ));
        }
        if collective.reduces() {
            op.check(dtype)?;
        }
        let count = dtype.elements_in(bytes) as u64;
        Ok(CheckedCall {
            collective,
            root,
            input,
            output,
            dtype,
            op,
            count,
            in_place: in_place && overlap,
            on_gpu: !(input.is_host() && output.is_host()),
            blocks: None,
            messages: None,
        })
    }
}

fn address(piece: Piece) -> usize {
    piece.as_ptr() as usize
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::invalid_argument(message))
}
