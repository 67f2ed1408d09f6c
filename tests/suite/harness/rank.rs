//! A rank as test bodies see it: a communicator, whose calls on vectors go by a GPU where the world is one of GPUs.

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
    /// The GPU that vectors are copied to for each call, and back.
    gpu: Option<usize>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for GPUs"))]
    kept: Kept,
}

/// Vectors on GPUs that were used before, by type and length. None is freed before all ranks are through: freeing waits for
/// all that this process does on the GPU, and so for calls of ranks that wait for the one that frees.
pub type Kept = Arc<Mutex<HashMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>>>;

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

    pub fn gpus() -> usize {
        flexring::device::cuda::gpus().expect("worlds of GPUs are tested where there is a driver")
    }

    impl Rank {
        /// Has a call reduce a copy on the GPU, and copies the result back.
        pub fn by_gpu<T: Element>(
            &self,
            gpu: usize,
            vector: &mut [T],
            call: impl FnOnce(&mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut on_gpu = self.vector(gpu, vector.len())?;
            on_gpu.write(vector)?;
            let called = call(&mut on_gpu);
            on_gpu.read(vector)?;
            // The stream goes on after a failure too; this tells.
            let outcome = called.and_then(|()| self.synchronize());
            // Not before the call is over: another rank may take it, and would wait in its stream for this one's call.
            self.keep(on_gpu);
            outcome
        }

        fn vector<T: Element>(&self, gpu: usize, len: usize) -> Result<GpuBuffer<T>> {
            let kind = (TypeId::of::<T>(), len);
            let used = self.kept.lock().expect("no panic").get_mut(&kind).and_then(Vec::pop);
            match used.and_then(|used| used.downcast().ok()) {
                Some(used) => Ok(*used),
                None => GpuBuffer::new(gpu, len),
            }
        }

        fn keep<T: Element>(&self, vector: GpuBuffer<T>) {
            let kind = (TypeId::of::<T>(), vector.len());
            self.kept.lock().expect("no panic").entry(kind).or_default().push(Box::new(vector));
        }

        /// The same with two vectors.
        pub fn by_gpu_between<T: Element>(
            &self,
            gpu: usize,
            send: &[T],
            receive: &mut [T],
            call: impl FnOnce(&GpuBuffer<T>, &mut GpuBuffer<T>) -> Result<()>,
        ) -> Result<()> {
            let mut input = self.vector(gpu, send.len())?;
            input.write(send)?;
            let outcome = self.by_gpu(gpu, receive, |output| call(&input, output));
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
                    Some(gpu) => self.by_gpu(gpu, vector, |vector| self.communicator.$in_place_on_gpu(vector, $($a),*)),
                    _ => self.communicator.$in_place(vector, $($a),*),
                }
            })*

            $(pub fn $into<T: Element>(&self, send: &[T], receive: &mut [T], $($b: $b_ty),*) -> Result<()> {
                match self.gpu {
                    #[cfg(feature = "cuda")]
                    Some(gpu) => self.by_gpu_between(gpu, send, receive, |send, receive| {
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
    /// A rank of such a world.
    pub fn new(communicator: Communicator, world: World, kept: &Kept) -> Self {
        #[cfg(feature = "cuda")]
        let gpu = world.is_gpu().then(|| communicator.rank() % on_gpu::gpus());
        #[cfg(not(feature = "cuda"))]
        let gpu = None;
        let _ = world;
        Self { communicator, gpu, kept: Arc::clone(kept) }
    }

    /// On the host's memory in every world.
    pub fn all_reduce_async<B: Owned>(&self, vector: B, op: ReduceOp) -> Result<Request<B>> {
        self.communicator.all_reduce_async(vector, op)
    }
}
