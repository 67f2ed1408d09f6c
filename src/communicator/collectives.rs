//! The collectives on vectors in the memory of the host.
//!
//! Owns the public methods for them. Must not know how a call runs: each method lends its vectors, has the
//! arguments checked, and passes the call on.

use super::{Communicator, Owned, Request};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::memory;
use crate::rank::Rank;

impl Communicator {
    /// Reduces the vectors of all ranks, element by element; every rank ends with the same result in `vector`.
    ///
    /// # Errors
    /// `Disagreement` if ranks call with different counts, types or operations; `PeerLost`, `Timeout` or
    /// `Aborted` if a rank does not complete the call; `InvalidArgument` for an operation that the type does
    /// not support.
    pub fn all_reduce<T: Element>(&self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().all_reduce(piece, piece, T::DTYPE, op)?)
        })
    }

    /// [`all_reduce`](Self::all_reduce) out of place: reduces `send` of all ranks into `receive`, which is as
    /// long.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and `InvalidArgument` if the lengths differ.
    pub fn all_reduce_into<T: Element>(&self, send: &[T], receive: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().all_reduce(input, output, T::DTYPE, op)?)
        })
    }

    /// Reduces the vectors `send` of all ranks. The result consists of one equal part per rank; rank r gets
    /// the r-th part in `receive`. The length of `send` is that of `receive` times the number of ranks.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn reduce_scatter<T: Element>(&self, send: &[T], receive: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().reduce_scatter(input, output, T::DTYPE, op)?)
        })
    }

    /// [`reduce_scatter`](Self::reduce_scatter) in place: rank r's part of the result replaces the r-th part
    /// of `vector`.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn reduce_scatter_in_place<T: Element>(&self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece);
            self.run(&self.validator().reduce_scatter(piece, part, T::DTYPE, op)?)
        })
    }

    /// Concatenates the vectors `send` of all ranks, in the order of ranks, in `receive` on every rank. The
    /// length of `receive` is that of `send` times the number of ranks.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().all_gather(input, output, T::DTYPE)?)
        })
    }

    /// [`all_gather`](Self::all_gather) in place: rank r contributes the r-th part of its own `vector`.
    ///
    /// # Errors
    /// As for [`all_reduce_into`](Self::all_reduce_into).
    pub fn all_gather_in_place<T: Element>(&self, vector: &mut [T]) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece);
            self.run(&self.validator().all_gather(part, piece, T::DTYPE)?)
        })
    }

    /// Copies `vector` of the rank `root` to `vector` on every other rank.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and `InvalidArgument` if there is no rank `root`.
    pub fn broadcast<T: Element>(&self, vector: &mut [T], root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().broadcast(piece, piece, T::DTYPE, root)?)
        })
    }

    /// [`broadcast`](Self::broadcast) out of place: copies `send` of the root to `receive` on every rank.
    /// `send` of other ranks is ignored and may be empty.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn broadcast_into<T: Element>(&self, send: &[T], receive: &mut [T], root: Rank) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().broadcast(input, output, T::DTYPE, root)?)
        })
    }

    /// Reduces the vectors of all ranks into `vector` of the rank `root`. The vectors of other ranks do not
    /// change.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn reduce<T: Element>(&self, vector: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            self.run(&self.validator().reduce(piece, piece, T::DTYPE, op, root)?)
        })
    }

    /// [`reduce`](Self::reduce) out of place: the root gets the result in `receive`. `receive` of other ranks
    /// is ignored and may be empty.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast).
    pub fn reduce_into<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        op: ReduceOp,
        root: Rank,
    ) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().reduce(input, output, T::DTYPE, op, root)?)
        })
    }

    /// Starts an all-reduce in place and returns at once. Requests run in the order in which they were made.
    ///
    /// # Errors
    /// `InvalidArgument` at once; all other errors when the request is waited for.
    pub fn all_reduce_async<B: Owned>(&self, mut vector: B, op: ReduceOp) -> Result<Request<B>> {
        let outcome = memory::lend_in_place(vector.elements(), |piece| {
            self.submit(self.validator().all_reduce(piece, piece, B::Item::DTYPE, op)?)
        })?;
        Ok(Request { outcome, vector: Some(vector) })
    }
}
