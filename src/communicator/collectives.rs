//! The collectives on vectors in the memory of the host.
//!
//! Owns the public methods for them. Must not know how a call runs: each method lends its vectors, has the
//! arguments checked, and passes the call on.

use super::{CheckedCall, Communicator, Owned, Request};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::memory::{self, Piece};
use crate::rank::Rank;

impl Communicator {
    /// Reduces the vectors of all ranks, element by element; every rank ends with the same result in
    /// `vector`.
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
            let part = self.part_of::<T>(piece)?;
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
            let part = self.part_of::<T>(piece)?;
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

    /// Concatenates the vectors `send` of all ranks, in the order of ranks, in `receive` of the rank `root`,
    /// which is as long as all of them together. `receive` of other ranks is ignored and may be empty.
    ///
    /// # Errors
    /// As for [`broadcast`](Self::broadcast), and `InvalidArgument` if the lengths do not correspond.
    pub fn gather<T: Element>(&self, send: &[T], receive: &mut [T], root: Rank) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().gather(input, output, T::DTYPE, root)?)
        })
    }

    /// [`gather`](Self::gather) in place: rank r contributes the r-th part of its own `vector`, which
    /// consists of one part per rank. Only the root's vector changes.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather).
    pub fn gather_in_place<T: Element>(&self, vector: &mut [T], root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece)?;
            self.run(&self.validator().gather(part, piece, T::DTYPE, root)?)
        })
    }

    /// Splits `send` of the rank `root` into one equal part per rank; rank r gets the r-th part in `receive`.
    /// `send` of other ranks is ignored and may be empty.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather).
    pub fn scatter<T: Element>(&self, send: &[T], receive: &mut [T], root: Rank) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().scatter(input, output, T::DTYPE, root)?)
        })
    }

    /// [`scatter`](Self::scatter) in place: rank r gets the r-th part of the root's `vector` in the r-th part
    /// of its own, which is as long.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather).
    pub fn scatter_in_place<T: Element>(&self, vector: &mut [T], root: Rank) -> Result<()> {
        memory::lend_in_place(vector, |piece| {
            let part = self.part_of::<T>(piece)?;
            self.run(&self.validator().scatter(piece, part, T::DTYPE, root)?)
        })
    }

    /// Sends a block of `send` to each rank, and receives one from each in `receive`. Both vectors consist of
    /// one equal block per rank, in the order of ranks: the r-th block of `send` goes to rank r, and the r-th
    /// block of `receive` comes from it. There is no form in place. Blocks of up to 16 KiB between nodes are
    /// sent in one message for each pair of nodes, if their ranks share memory.
    ///
    /// # Errors
    /// `Disagreement` if a rank sends to another rank a block that is not as long as the one that the other
    /// expects, or makes another call; otherwise as for [`all_reduce_into`](Self::all_reduce_into).
    pub fn all_to_all<T: Element>(&self, send: &[T], receive: &mut [T]) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            self.run(&self.validator().all_to_all(input, output, T::DTYPE)?)
        })
    }

    /// [`all_to_all`](Self::all_to_all) of blocks that differ in length: `send_counts[r]` elements go to rank
    /// r, and `receive_counts[r]` elements come from it. The blocks follow each other without gaps, in the
    /// order of ranks. Each rank gives its own counts only. All ranks must call this one, or all of them
    /// [`all_to_all`](Self::all_to_all).
    ///
    /// # Errors
    /// As for [`all_to_all`](Self::all_to_all), and `InvalidArgument` if the counts do not add up to the
    /// lengths of the vectors.
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &[T],
        send_counts: &[usize],
        receive: &mut [T],
        receive_counts: &[usize],
    ) -> Result<()> {
        memory::lend(send, receive, |input, output| {
            let validator = self.validator();
            self.run(&validator.all_to_all_v((input, send_counts), (output, receive_counts), T::DTYPE)?)
        })
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.run(&self.validator().barrier()?)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) and returns at once. The request returns both
    /// vectors.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn reduce_scatter_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        receive: R,
        op: ReduceOp,
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().reduce_scatter(input, output, S::Item::DTYPE, op)
        })
    }

    /// Starts an [`all_gather`](Self::all_gather) and returns at once. The request returns both vectors.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn all_gather_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        receive: R,
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().all_gather(input, output, S::Item::DTYPE)
        })
    }

    /// Starts a [`broadcast`](Self::broadcast) and returns at once. The request returns the vector.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn broadcast_async<B: Owned>(&self, vector: B, root: Rank) -> Result<Request<B>> {
        self.start_in_place(vector, |piece| self.validator().broadcast(piece, piece, B::Item::DTYPE, root))
    }

    /// Starts a [`reduce`](Self::reduce) and returns at once. The request returns the vector.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn reduce_async<B: Owned>(&self, vector: B, op: ReduceOp, root: Rank) -> Result<Request<B>> {
        self.start_in_place(vector, |piece| self.validator().reduce(piece, piece, B::Item::DTYPE, op, root))
    }

    /// Starts a [`gather`](Self::gather) and returns at once. The request returns both vectors.
    ///
    /// # Errors
    /// `InvalidArgument` at once; all other errors when the request is waited for.
    pub fn gather_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        receive: R,
        root: Rank,
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().gather(input, output, S::Item::DTYPE, root)
        })
    }

    /// Starts a [`scatter`](Self::scatter) and returns at once. The request returns both vectors.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn scatter_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        receive: R,
        root: Rank,
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().scatter(input, output, S::Item::DTYPE, root)
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all) and returns at once. The request returns both vectors.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn all_to_all_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        receive: R,
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().all_to_all(input, output, S::Item::DTYPE)
        })
    }

    /// Starts an [`all_to_all_v`](Self::all_to_all_v) and returns at once. The request returns both vectors.
    ///
    /// # Errors
    /// As for [`gather_async`](Self::gather_async).
    pub fn all_to_all_v_async<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        send: S,
        send_counts: &[usize],
        receive: R,
        receive_counts: &[usize],
    ) -> Result<Request<(S, R)>> {
        self.start_owned(send, receive, |input, output| {
            self.validator().all_to_all_v((input, send_counts), (output, receive_counts), S::Item::DTYPE)
        })
    }

    /// Starts a [`barrier`](Self::barrier) and returns at once.
    ///
    /// # Errors
    /// `InvalidArgument` in a forked child; all other errors when the request is waited for.
    pub fn barrier_async(&self) -> Result<Request<()>> {
        Ok(Request { outcome: self.submit(self.validator().barrier()?)?, vector: Some(()) })
    }

    /// Starts a call that reads one vector and writes another, which the request owns until its end.
    fn start_owned<S: Owned, R: Owned<Item = S::Item>>(
        &self,
        mut send: S,
        mut receive: R,
        validate: impl FnOnce(Piece, Piece) -> Result<CheckedCall>,
    ) -> Result<Request<(S, R)>> {
        let outcome = memory::lend(send.elements(), receive.elements(), |input, output| {
            self.submit(validate(input, output)?)
        })?;
        Ok(Request { outcome, vector: Some((send, receive)) })
    }

    /// Starts an all-reduce in place and returns at once. Requests run in the order in which they were made.
    ///
    /// # Errors
    /// `InvalidArgument` at once; all other errors when the request is waited for.
    pub fn all_reduce_async<B: Owned>(&self, vector: B, op: ReduceOp) -> Result<Request<B>> {
        self.start_in_place(vector, |piece| self.validator().all_reduce(piece, piece, B::Item::DTYPE, op))
    }

    /// Starts a call that replaces a vector, which the request owns until its end.
    fn start_in_place<B: Owned>(
        &self,
        mut vector: B,
        validate: impl FnOnce(Piece) -> Result<CheckedCall>,
    ) -> Result<Request<B>> {
        let outcome = memory::lend_in_place(vector.elements(), |piece| self.submit(validate(piece)?))?;
        Ok(Request { outcome, vector: Some(vector) })
    }
}
