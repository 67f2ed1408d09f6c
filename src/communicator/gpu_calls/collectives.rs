//! The collectives on vectors in the memory of a GPU.
//!
//! Owns the public methods for them. Must not know how a call runs: each method has the arguments checked,
//! and submits the call to the stream of its vector.

use crate::communicator::{CheckedCall, Communicator};
use crate::device::CallerStream;
use crate::device::cuda::GpuVector;
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;
use crate::executor::PeerMessage;
use crate::memory::Piece;
use crate::rank::Rank;

/// Collectives on vectors in the memory of a GPU. Every call returns at once and takes effect in the stream
/// of the vector that it writes: after the work that is in that stream already, and before work that is added
/// later. If a call fails after it has returned, the next call returns the error. Calls on cust's
/// `DeviceBuffer` return when the result is complete.
impl Communicator {
    /// [`all_reduce`](Self::all_reduce) on a GPU.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory does not belong to the communicator's GPU, or the type does not
    /// support the operation; the failure of an earlier call.
    pub fn all_reduce_on_gpu<V: GpuVector>(&self, vector: &mut V, op: ReduceOp) -> Result<()> {
        vector.lend(|piece, stream| {
            self.run_in_place::<V>(self.validator().all_reduce(piece, piece, V::Item::DTYPE, op)?, stream)
        })
    }

    /// [`all_reduce_into`](Self::all_reduce_into) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_on_gpu`](Self::all_reduce_on_gpu), and `InvalidArgument` if the lengths differ.
    pub fn all_reduce_into_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        op: ReduceOp,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().all_reduce(input, output, T::DTYPE, op)
        })
    }

    /// [`reduce_scatter`](Self::reduce_scatter) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_into_on_gpu`](Self::all_reduce_into_on_gpu).
    pub fn reduce_scatter_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        op: ReduceOp,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().reduce_scatter(input, output, T::DTYPE, op)
        })
    }

    /// [`all_gather`](Self::all_gather) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_into_on_gpu`](Self::all_reduce_into_on_gpu).
    pub fn all_gather_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().all_gather(input, output, T::DTYPE)
        })
    }

    /// [`reduce_scatter_in_place`](Self::reduce_scatter_in_place) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_on_gpu`](Self::all_reduce_on_gpu).
    pub fn reduce_scatter_in_place_on_gpu<V: GpuVector>(&self, vector: &mut V, op: ReduceOp) -> Result<()> {
        vector.lend(|piece, stream| {
            let part = self.part_of::<V::Item>(piece)?;
            self.run_in_place::<V>(self.validator().reduce_scatter(piece, part, V::Item::DTYPE, op)?, stream)
        })
    }

    /// [`all_gather_in_place`](Self::all_gather_in_place) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_on_gpu`](Self::all_reduce_on_gpu).
    pub fn all_gather_in_place_on_gpu<V: GpuVector>(&self, vector: &mut V) -> Result<()> {
        vector.lend(|piece, stream| {
            let part = self.part_of::<V::Item>(piece)?;
            self.run_in_place::<V>(self.validator().all_gather(part, piece, V::Item::DTYPE)?, stream)
        })
    }

    /// [`broadcast`](Self::broadcast) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_on_gpu`](Self::all_reduce_on_gpu), and `InvalidArgument` if there is no rank
    /// `root`.
    pub fn broadcast_on_gpu<V: GpuVector>(&self, vector: &mut V, root: Rank) -> Result<()> {
        vector.lend(|piece, stream| {
            self.run_in_place::<V>(self.validator().broadcast(piece, piece, V::Item::DTYPE, root)?, stream)
        })
    }

    /// [`broadcast_into`](Self::broadcast_into) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn broadcast_into_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        root: Rank,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().broadcast(input, output, T::DTYPE, root)
        })
    }

    /// [`reduce`](Self::reduce) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn reduce_on_gpu<V: GpuVector>(&self, vector: &mut V, op: ReduceOp, root: Rank) -> Result<()> {
        vector.lend(|piece, stream| {
            self.run_in_place::<V>(self.validator().reduce(piece, piece, V::Item::DTYPE, op, root)?, stream)
        })
    }

    /// [`reduce_into`](Self::reduce_into) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn reduce_into_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        op: ReduceOp,
        root: Rank,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().reduce(input, output, T::DTYPE, op, root)
        })
    }

    /// [`gather`](Self::gather) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn gather_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        root: Rank,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().gather(input, output, T::DTYPE, root)
        })
    }

    /// [`gather_in_place`](Self::gather_in_place) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn gather_in_place_on_gpu<V: GpuVector>(&self, vector: &mut V, root: Rank) -> Result<()> {
        vector.lend(|piece, stream| {
            let part = self.part_of::<V::Item>(piece)?;
            self.run_in_place::<V>(self.validator().gather(part, piece, V::Item::DTYPE, root)?, stream)
        })
    }

    /// [`scatter`](Self::scatter) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn scatter_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
        root: Rank,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().scatter(input, output, T::DTYPE, root)
        })
    }

    /// [`scatter_in_place`](Self::scatter_in_place) on a GPU.
    ///
    /// # Errors
    /// As for [`broadcast_on_gpu`](Self::broadcast_on_gpu).
    pub fn scatter_in_place_on_gpu<V: GpuVector>(&self, vector: &mut V, root: Rank) -> Result<()> {
        vector.lend(|piece, stream| {
            let part = self.part_of::<V::Item>(piece)?;
            self.run_in_place::<V>(self.validator().scatter(piece, part, V::Item::DTYPE, root)?, stream)
        })
    }

    /// [`all_to_all`](Self::all_to_all) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_into_on_gpu`](Self::all_reduce_into_on_gpu).
    pub fn all_to_all_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        receive: &mut W,
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().all_to_all(input, output, T::DTYPE)
        })
    }

    /// [`all_to_all_v`](Self::all_to_all_v) on a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_into_on_gpu`](Self::all_reduce_into_on_gpu).
    pub fn all_to_all_v_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        send_counts: &[usize],
        receive: &mut W,
        receive_counts: &[usize],
    ) -> Result<()> {
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().all_to_all_v((input, send_counts), (output, receive_counts), T::DTYPE)
        })
    }

    /// [`send`](Self::send) from a GPU.
    ///
    /// # Errors
    /// As for [`all_reduce_on_gpu`](Self::all_reduce_on_gpu), and `InvalidArgument` if there is no rank `to`.
    pub fn send_on_gpu<V: GpuVector>(&self, vector: &V, to: Rank) -> Result<()> {
        vector.lend_for_reading(|piece, stream| {
            let message = PeerMessage { is_send: true, peer: to, dtype: V::Item::DTYPE, piece };
            self.run_in_place::<V>(self.validator().group(vec![message])?, stream)
        })
    }

    /// [`recv`](Self::recv) on a GPU.
    ///
    /// # Errors
    /// As for [`send_on_gpu`](Self::send_on_gpu).
    pub fn recv_on_gpu<V: GpuVector>(&self, vector: &mut V, from: Rank) -> Result<()> {
        vector.lend(|piece, stream| {
            let message = PeerMessage { is_send: false, peer: from, dtype: V::Item::DTYPE, piece };
            self.run_in_place::<V>(self.validator().group(vec![message])?, stream)
        })
    }

    /// A [`group`](Self::group) of one send to the rank `to` and one receive from the rank `from`, on a GPU.
    ///
    /// # Errors
    /// As for [`send_on_gpu`](Self::send_on_gpu).
    pub fn send_recv_on_gpu<T: Element, V: GpuVector<Item = T>, W: GpuVector<Item = T>>(
        &self,
        send: &V,
        to: Rank,
        receive: &mut W,
        from: Rank,
    ) -> Result<()> {
        let message = |is_send, peer, piece| PeerMessage { is_send, peer, dtype: T::DTYPE, piece };
        self.run_out_of_place(send, receive, |input, output| {
            self.validator().group(vec![message(true, to, input), message(false, from, output)])
        })
    }

    /// Submits a call on one vector, and waits for it if vectors of this kind require that.
    fn run_in_place<V: GpuVector>(&self, checked: CheckedCall, stream: CallerStream) -> Result<()> {
        let outcome = self.submit_in_stream(checked, stream, None, V::WAITS)?;
        if V::WAITS { outcome.wait() } else { Ok(()) }
    }

    /// Submits a call that reads one vector and writes another. It takes effect in the stream of the vector
    /// that it writes, and is also ordered with the work in the other vector's stream.
    fn run_out_of_place<V: GpuVector, W: GpuVector>(
        &self,
        send: &V,
        receive: &mut W,
        validate: impl FnOnce(Piece, Piece) -> Result<CheckedCall>,
    ) -> Result<()> {
        send.lend_for_reading(|input, other| {
            receive.lend(|output, stream| {
                let waits = V::WAITS || W::WAITS;
                let outcome = self.submit_in_stream(validate(input, output)?, stream, Some(other), waits)?;
                if waits { outcome.wait() } else { Ok(()) }
            })
        })
    }
}
