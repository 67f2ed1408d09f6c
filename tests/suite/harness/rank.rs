//! A rank in a test body: a communicator that runs calls on GPU copies of the vectors in worlds with GPUs.
//!
//! Owns the GPU copies.

use super::World;
use flexring::{Communicator, Element, Owned, ReduceOp, Request, Result};
use std::ops::Deref;

/// A communicator of a test world.
pub struct Rank {
    communicator: Communicator,
    /// Index of the GPU that vectors are copied to before each call and from after it; `None` in worlds
    /// without GPUs.
    gpu: Option<usize>,
}

impl Deref for Rank {
    type Target = Communicator;
    fn deref(&self) -> &Communicator {
        &self.communicator
    }
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::{Element, Rank, Result};
    pub use flexring::gpu::GpuBuffer;

    /// The GPU of a rank.
    pub fn gpu_of(rank: usize) -> usize {
        rank % flexring::gpu::gpu_count().expect("worlds of GPUs are tested where there is a driver")
    }

    impl Rank {
        /// Runs a call on a GPU copy of `vector`, and copies the result back.
        pub fn call_on_gpu<T: Element>(
            &self,
            gpu: usize,
            vector: &mut [T],
            call: impl FnOnce(&mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut on_gpu = GpuBuffer::new(gpu, vector.len())?;
            on_gpu.write(vector)?;
            let called = call(&mut on_gpu);
            on_gpu.read(vector)?;
            // The stream continues after a failed call; `synchronize` returns its error.
            called.and_then(|()| self.synchronize())
        }

        /// Runs a call on GPU copies of `send` and `receive`, and copies the result back to `receive`.
        pub fn call_on_gpu_into<T: Element>(
            &self,
            gpu: usize,
            send: &[T],
            receive: &mut [T],
            call: impl FnOnce(&GpuBuffer<T>, &mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut input = GpuBuffer::new(gpu, send.len())?;
            input.write(send)?;
            self.call_on_gpu(gpu, receive, |output| call(&input, output))
        }
    }
}

#[cfg(feature = "cuda")]
pub use on_gpu::gpu_of;

macro_rules! calls {
    ($($in_place:ident, $in_place_on_gpu:ident ($($a:ident: $a_ty:ty),*);)* -- $($into:ident, $into_on_gpu:ident ($($b:ident: $b_ty:ty),*);)*) => {
        impl Rank {
            $(pub fn $in_place<T: Element>(&self, vector: &mut [T], $($a: $a_ty),*) -> Result<()> {
                match self.gpu {
                    #[cfg(feature = "cuda")]
                    Some(gpu) => self.call_on_gpu(gpu, vector, |vector| self.communicator.$in_place_on_gpu(vector, $($a),*)),
                    _ => self.communicator.$in_place(vector, $($a),*),
                }
            })*

            $(pub fn $into<T: Element>(&self, send: &[T], receive: &mut [T], $($b: $b_ty),*) -> Result<()> {
                match self.gpu {
                    #[cfg(feature = "cuda")]
                    Some(gpu) => self.call_on_gpu_into(gpu, send, receive, |send, receive| {
                        self.communicator.$into_on_gpu(send, receive, $($b),*)
                    }),
                    _ => self.communicator.$into(send, receive, $($b),*),
                }
            })*
        }
    };
}

calls! {
    all_reduce, all_reduce_on_gpu (op: ReduceOp);
    reduce_scatter_in_place, reduce_scatter_in_place_on_gpu (op: ReduceOp);
    all_gather_in_place, all_gather_in_place_on_gpu ();
    broadcast, broadcast_on_gpu (root: usize);
    gather_in_place, gather_in_place_on_gpu (root: usize);
    scatter_in_place, scatter_in_place_on_gpu (root: usize);
    reduce, reduce_on_gpu (op: ReduceOp, root: usize);
    --
    all_reduce_into, all_reduce_into_on_gpu (op: ReduceOp);
    reduce_scatter, reduce_scatter_on_gpu (op: ReduceOp);
    all_gather, all_gather_on_gpu ();
    broadcast_into, broadcast_into_on_gpu (root: usize);
    gather, gather_on_gpu (root: usize);
    scatter, scatter_on_gpu (root: usize);
    all_to_all, all_to_all_on_gpu ();
    reduce_into, reduce_into_on_gpu (op: ReduceOp, root: usize);
}

impl Rank {
    /// `all_to_all_v`, on copies of the vectors on the GPU in worlds with GPUs.
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &[T],
        send_counts: &[usize],
        receive: &mut [T],
        receive_counts: &[usize],
    ) -> Result<()> {
        match self.gpu {
            #[cfg(feature = "cuda")]
            Some(gpu) => self.call_on_gpu_into(gpu, send, receive, |send, receive| {
                self.communicator.all_to_all_v_on_gpu(send, send_counts, receive, receive_counts)
            }),
            _ => self.communicator.all_to_all_v(send, send_counts, receive, receive_counts),
        }
    }

    /// A rank of a world of this kind.
    pub fn new(communicator: Communicator, world: World) -> Self {
        #[cfg(feature = "cuda")]
        let gpu = world.is_gpu().then(|| gpu_of(communicator.rank()));
        #[cfg(not(feature = "cuda"))]
        let gpu = None;
        let _ = world;
        Self { communicator, gpu }
    }

    /// An asynchronous call, on host memory in every world.
    pub fn all_reduce_async<B: Owned>(&self, vector: B, op: ReduceOp) -> Result<Request<B>> {
        self.communicator.all_reduce_async(vector, op)
    }
}
