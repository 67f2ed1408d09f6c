//! What a caller asks for, checked.

use crate::call::Collective;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Memory, Piece};
use crate::rank::Rank;

/// A checked call. The pieces are what the caller vouches for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedCall {
    pub(super) collective: Collective,
    pub(super) root: Rank,
    /// What this rank gives; empty where it gives nothing.
    pub(super) input: Piece,
    /// What this rank gets; empty where it gets nothing.
    pub(super) output: Piece,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// Elements of the whole vector.
    pub(super) count: u64,
    /// Whether what input and output have in common is the same memory.
    pub(super) in_place: bool,
}

impl CheckedCall {
    /// Whether all memory of the call is the host's.
    pub(crate) fn is_on_host(&self) -> bool {
        self.input.is_host() && self.output.is_host()
    }

    /// Whose memory the call is about.
    pub(super) fn memory(&self) -> Memory {
        if self.input.is_empty() { self.output.memory() } else { self.input.memory() }
    }

    /// Bytes that are needed for what is made on the way: as many as the whole vector has, if the caller's has fewer.
    pub(super) fn scratch(&self) -> usize {
        let whole = self.count as usize * self.dtype.size();
        if self.output.len() == whole || !self.collective.reduces() { 0 } else { whole }
    }

    /// Whether there is nothing to reduce or to move.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Who asks: the rank, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallValidator {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
}

impl CallValidator {
    /// Checks an all-reduce of the elements of `input` into `output`.
    pub(crate) fn all_reduce(
        self,
        input: Piece,
        output: Piece,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<CheckedCall> {
        if input.len() != output.len() {
            return refuse(format!("{} bytes cannot be reduced into {} bytes", input.len(), output.len()));
        }
        self.check(Collective::AllReduce, 0, (input, 0), (output, 0), input.len(), dtype, op)
    }

    /// Checks a reduction of `input`, of which this rank gets its part.
    pub(crate) fn reduce_scatter(
        self,
        input: Piece,
        output: Piece,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<CheckedCall> {
        if output.len().checked_mul(self.world) != Some(input.len()) {
            return refuse(format!(
                "{} bytes are not {} parts of {} bytes",
                input.len(),
                self.world,
                output.len()
            ));
        }
        let offset = self.rank * output.len();
        self.check(Collective::ReduceScatter, 0, (input, 0), (output, offset), input.len(), dtype, op)
    }

    /// Checks a gathering of all `input`s into every `output`.
    pub(crate) fn all_gather(self, input: Piece, output: Piece, dtype: DType) -> Result<CheckedCall> {
        if input.len().checked_mul(self.world) != Some(output.len()) {
            return refuse(format!(
                "{} parts of {} bytes are not {} bytes",
                self.world,
                input.len(),
                output.len()
            ));
        }
        let offset = self.rank * input.len();
        let op = ReduceOp::Sum;
        self.check(Collective::AllGather, 0, (input, offset), (output, 0), output.len(), dtype, op)
    }

    /// Checks a broadcast of the root's `input` into every `output`.
    pub(crate) fn broadcast(
        self,
        input: Piece,
        output: Piece,
        dtype: DType,
        root: Rank,
    ) -> Result<CheckedCall> {
        let input = if self.rank == root { input } else { Piece::EMPTY };
        if self.rank == root && input.len() != output.len() {
            return refuse(format!("{} bytes cannot be broadcast into {} bytes", input.len(), output.len()));
        }
        let op = ReduceOp::Sum;
        self.check(Collective::Broadcast, root, (input, 0), (output, 0), output.len(), dtype, op)
    }

    /// Checks a reduction of all `input`s into the root's `output`.
    pub(crate) fn reduce(
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

    /// What all have in common. Pieces come with where they begin in the whole vector of `bytes` bytes.
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
            if !piece.is_empty() && !address(piece).is_multiple_of(dtype.size()) {
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
        // In place, both begin at the same place of the same vector.
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
        let count = (bytes / dtype.size()) as u64;
        Ok(CheckedCall { collective, root, input, output, dtype, op, count, in_place: in_place && overlap })
    }
}

fn address(piece: Piece) -> usize {
    piece.as_ptr() as usize
}

fn refuse<T>(words: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidArgument, words))
}
