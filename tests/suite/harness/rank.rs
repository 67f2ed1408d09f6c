//! A rank in a test body: a communicator that runs calls on GPU copies of the vectors in worlds with GPUs.
//!
//! Owns the GPU copies. Must not know what is tested.

use super::World;
use flexring::communicator::{Owned, Request};
use flexring::{Communicator, Element, ReduceOp, Result};
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

/// A communicator of a test world.
pub struct Rank {
    communicator: Communicator,
    /// Index of the GPU that vectors are copied to before each call and from after it; `None` in worlds without GPUs.
    gpu: Option<usize>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs"))]
    cache: GpuVectorCache,
}

/// GPU vectors for reuse, by type and length. None is freed before all ranks have ended: freeing waits for all work of this
/// process on the GPU, which includes calls that wait for the rank that frees.
pub type GpuVectorCache = Arc<Mutex<HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>>>;

impl Deref for Rank {
    type Target = Communicator;
    fn deref(&self) -> &Communicator {
        &self.communicator
    }
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::{Element, Rank, Result};
    pub use flexring::device::cuda::GpuBuffer;
    use std::any::TypeId;

    pub fn gpu_count() -> usize {
        flexring::device::cuda::gpu_count().expect("worlds of GPUs are tested where there is a driver")
    }

    impl Rank {
        /// Runs a call on a GPU copy of `vector`, and copies the result back.
        pub fn call_on_gpu<T: Element>(
            &self,
            gpu: usize,
            vector: &mut [T],
            call: impl FnOnce(&mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut on_gpu = self.vector(gpu, vector.len())?;
            on_gpu.write(vector)?;
            let called = call(&mut on_gpu);
            on_gpu.read(vector)?;
            // The stream continues after a failed call; `synchronize` returns its error.
            let outcome = called.and_then(|()| self.synchronize());
            // Only after the call: another rank may reuse the vector, and its stream would wait for this call.
            self.keep(on_gpu);
            outcome
        }

        fn vector<T: Element>(&self, gpu: usize, len: usize) -> Result<GpuBuffer<T>> {
            let kind = (TypeId::of::<T>(), len);
            let used = self.cache.lock().expect("no panic").get_mut(&kind).and_then(Vec::pop);
            match used.and_then(|used| used.downcast().ok()) {
                Some(used) => Ok(*used),
                None => GpuBuffer::new(gpu, len),
            }
        }

        fn keep<T: Element>(&self, vector: GpuBuffer<T>) {
            let kind = (TypeId::of::<T>(), vector.len());
            self.cache.lock().expect("no panic").entry(kind).or_default().push(Box::new(vector));
        }

        /// Runs a call on GPU copies of `send` and `receive`, and copies the result back to `receive`.
        pub fn call_on_gpu_into<T: Element>(
            &self,
            gpu: usize,
            send: &[T],
            receive: &mut [T],
            call: impl FnOnce(&GpuBuffer<T>, &mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut input = self.vector(gpu, send.len())?;
            input.write(send)?;
            let outcome = self.call_on_gpu(gpu, receive, |output| call(&input, output));
            self.keep(input);
            outcome
        }
    }
}

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
    reduce, reduce_on_gpu (op: ReduceOp, root: usize);
    --
    all_reduce_into, all_reduce_into_on_gpu (op: ReduceOp);
    reduce_scatter, reduce_scatter_on_gpu (op: ReduceOp);
    all_gather, all_gather_on_gpu ();
    broadcast_into, broadcast_into_on_gpu (root: usize);
    reduce_into, reduce_into_on_gpu (op: ReduceOp, root: usize);
}

impl Rank {
    /// A rank of a world of this kind.
    pub fn new(communicator: Communicator, world: World, cache: &GpuVectorCache) -> Self {
        #[cfg(feature = "cuda")]
        let gpu = world.is_gpu().then(|| communicator.rank() % on_gpu::gpu_count());
        #[cfg(not(feature = "cuda"))]
        let gpu = None;
        let _ = world;
        Self { communicator, gpu, cache: Arc::clone(cache) }
    }

    /// An asynchronous call, on host memory in every world.
    pub fn all_reduce_async<B: Owned>(&self, vector: B, op: ReduceOp) -> Result<Request<B>> {
        self.communicator.all_reduce_async(vector, op)
    }
}
