//! Vectors on GPUs.
//!
//! Owns the assignment of GPUs to ranks, the vectors on a GPU and the calls on them.

#[cfg(not(feature = "cuda"))]
pub use absent::{Vectors, facts, gpu_count};
#[cfg(feature = "cuda")]
pub use present::{Vectors, facts, gpu_count};

use super::check::Placement;
use super::collective::Extent;
use super::options::{PerfOptions, VectorDevice};
use super::report::RankInfo;
use flexring::internal::bootstrap::local_rank;
use flexring::{Communicator, Error, ReduceOp, Result};
use flexring_core::call::Collective;
use flexring_core::config::{Config, environment};
use std::collections::BTreeSet;

/// A call on the beginning of a rank's vectors.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "it is read on GPUs only"))]
pub struct GpuCall<'a> {
    pub comm: &'a Communicator,
    pub collective: Collective,
    pub op: ReduceOp,
    pub root: usize,
    pub extent: Extent,
    pub placement: Placement,
}

impl<'a> GpuCall<'a> {
    /// Adds the receive vectors of all ranks, of this many elements, in place.
    pub fn sum_in_place(comm: &'a Communicator, count: usize) -> Self {
        let extent = Extent { whole: count, part: count };
        let (collective, placement) = (Collective::AllReduce, Placement::InPlace);
        Self { comm, collective, op: ReduceOp::Sum, root: 0, extent, placement }
    }
}

/// Launches a graph.
pub type LaunchGraph = Box<dyn Fn() -> Result<()>>;

/// The index of the GPU that holds the vectors of rank `rank`: FLEXRING_GPU if set, else the local rank
/// modulo the number of GPUs. `None` for vectors on the host.
///
/// # Errors
/// `Unsupported` if there is no GPU.
pub fn of_rank(options: &PerfOptions, config: &Config, rank: usize) -> Result<Option<usize>> {
    if options.device == VectorDevice::Host {
        return Ok(None);
    }
    let gpus = check()?;
    if let Some(gpu) = config.gpu {
        return Ok(Some(gpu));
    }
    Ok(Some(local_rank(environment)?.unwrap_or(rank) % gpus))
}

/// The number of GPUs that this process can use, at least 1.
///
/// # Errors
/// `Unsupported` if there is none, with the next step.
pub fn check() -> Result<usize> {
    const FIX: &str = "check with `nvidia-smi` that NVIDIA's driver finds one, or leave out --device cuda to measure on the \
                       host";
    match gpu_count() {
        Ok(0) => Err(Error::unsupported(format!("this process finds no GPU: {FIX}"))),
        Ok(gpus) => Ok(gpus),
        Err(error) => Err(Error::new(error.kind(), format!("{}: {FIX}", error.message()))),
    }
}

/// A line such as `4 ranks share 1 GPU (NVIDIA H200)`; `None` if each rank has a GPU of its own.
pub fn shared(ranks: &[RankInfo]) -> Option<String> {
    let ranks = ranks.iter().filter_map(|rank_info| Some((&rank_info.host, rank_info.gpu.as_ref()?)));
    let gpus: BTreeSet<_> = ranks.clone().map(|(host, gpu)| (host, &gpu.address)).collect();
    let names: BTreeSet<&str> = ranks.clone().map(|(_, gpu)| &*gpu.name).collect();
    let (ranks, gpus) = (ranks.count(), gpus.len());
    let names: Vec<&str> = names.into_iter().collect();
    (gpus < ranks).then(|| {
        format!("{ranks} ranks share {gpus} GPU{} ({})", if gpus == 1 { "" } else { "s" }, names.join(", "))
    })
}

#[cfg(feature = "cuda")]
mod present {
    use super::{GpuCall, LaunchGraph};
    use crate::perf::check::Placement;
    use crate::perf::collective::Extent;
    use crate::perf::report::RankGpu;
    use flexring::internal::device::cuda::{self, GpuBuffer};
    use flexring::{Communicator, Element, Result};
    use flexring_core::call::Collective;
    use std::ops::DerefMut;

    pub use cuda::gpu_count;

    /// Alignment of the vectors, in elements.
    const ALIGNMENT: usize = 256;

    /// Index, address and name of a GPU, for the list of ranks.
    ///
    /// # Errors
    /// `System` if the driver cannot be queried.
    pub fn facts(gpu: usize) -> Result<RankGpu> {
        let facts = cuda::gpu_info(gpu)?;
        Ok(RankGpu { number: gpu as u32, address: facts.address, name: facts.name })
    }

    /// A send and a receive vector on a GPU, in one stream.
    pub struct Vectors<'a, T: Element> {
        send: Vector<'a, T>,
        receive: Vector<'a, T>,
    }

    /// A vector, registered or not.
    type Vector<'a, T> = Box<dyn DerefMut<Target = GpuBuffer<T>> + 'a>;

    impl<'a, T: Element> Vectors<'a, T> {
        /// Allocates vectors for up to `count` elements. They are registered with the communicator, if there
        /// is one.
        ///
        /// # Errors
        /// `System` if there is not enough memory.
        pub fn new(gpu: usize, count: usize, registrar: Option<&'a Communicator>) -> Result<Self> {
            // Both are aligned as allocations are.
            let count = count.next_multiple_of(ALIGNMENT);
            let mut send = GpuBuffer::new(gpu, 2 * count)?;
            let receive = send.split_off(count);
            let vector = |buffer| -> Result<Vector<'a, T>> {
                Ok(match registrar {
                    Some(comm) => Box::new(comm.register_on_gpu(buffer)?),
                    None => Box::new(Box::new(buffer)),
                })
            };
            Ok(Self { send: vector(send)?, receive: vector(receive)? })
        }

        /// Copies to the beginning of both vectors.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn write(&mut self, send: &[T], receive: &[T]) -> Result<()> {
            self.send.slice_mut(0..send.len()).write(send)?;
            self.receive.slice_mut(0..receive.len()).write(receive)
        }

        /// Copies from the beginning of both vectors.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn read(&mut self, send: &mut [T], receive: &mut [T]) -> Result<()> {
            self.send.slice_mut(0..send.len()).read(send)?;
            self.receive.slice_mut(0..receive.len()).read(receive)
        }

        /// Waits until all enqueued calls are complete.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn wait(&self) -> Result<()> {
            self.receive.synchronize()
        }

        /// Captures a call, `calls` times in a row. All ranks do so.
        ///
        /// # Errors
        /// `Unsupported` if the host runs the call; any error of a call.
        pub fn capture(&mut self, calls: usize, call: GpuCall<'_>) -> Result<LaunchGraph> {
            let capture = self.receive.begin_capture()?;
            (0..calls).try_for_each(|_| self.call(call))?;
            let graph = capture.end()?;
            Ok(Box::new(move || graph.launch()))
        }

        /// Enqueues a collective call.
        ///
        /// # Errors
        /// Any error of this call or of an earlier enqueued one.
        pub fn call(&mut self, call: GpuCall<'_>) -> Result<()> {
            let GpuCall { comm, collective, op, root, extent: Extent { whole, part }, placement } = call;
            let given =
                if matches!(collective, Collective::AllGather | Collective::Gather) { part } else { whole };
            let result = match (collective, placement) {
                (Collective::ReduceScatter | Collective::Scatter, Placement::OutOfPlace) => part,
                _ => whole,
            };
            let send = &self.send.slice_mut(0..given);
            let receive = &mut self.receive.slice_mut(0..result);
            match (collective, placement) {
                (Collective::AllReduce, Placement::OutOfPlace) => {
                    comm.all_reduce_into_on_gpu(send, receive, op)
                }
                (Collective::AllReduce, Placement::InPlace) => comm.all_reduce_on_gpu(receive, op),
                (Collective::ReduceScatter, Placement::OutOfPlace) => {
                    comm.reduce_scatter_on_gpu(send, receive, op)
                }
                (Collective::ReduceScatter, Placement::InPlace) => {
                    comm.reduce_scatter_in_place_on_gpu(receive, op)
                }
                (Collective::AllGather, Placement::OutOfPlace) => comm.all_gather_on_gpu(send, receive),
                (Collective::AllGather, Placement::InPlace) => comm.all_gather_in_place_on_gpu(receive),
                (Collective::Broadcast, Placement::OutOfPlace) => {
                    comm.broadcast_into_on_gpu(send, receive, root)
                }
                (Collective::Broadcast, Placement::InPlace) => comm.broadcast_on_gpu(receive, root),
                (Collective::Reduce, Placement::OutOfPlace) => {
                    comm.reduce_into_on_gpu(send, receive, op, root)
                }
                (Collective::Reduce, Placement::InPlace) => comm.reduce_on_gpu(receive, op, root),
                (Collective::Gather, Placement::OutOfPlace) => comm.gather_on_gpu(send, receive, root),
                (Collective::Gather, Placement::InPlace) => comm.gather_in_place_on_gpu(receive, root),
                (Collective::Scatter, Placement::OutOfPlace) => comm.scatter_on_gpu(send, receive, root),
                (Collective::Scatter, Placement::InPlace) => comm.scatter_in_place_on_gpu(receive, root),
                (Collective::AllToAll | Collective::AllToAllV, _) => comm.all_to_all_on_gpu(send, receive),
                (Collective::SendRecv, _) => {
                    let (rank, world) = (comm.rank(), comm.world_size());
                    comm.send_recv_on_gpu(send, (rank + 1) % world, receive, (rank + world - 1) % world)
                }
                (Collective::Barrier, _) => comm.barrier(),
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use super::{GpuCall, LaunchGraph};
    use crate::perf::report::RankGpu;
    use flexring::{Communicator, Error, Result};
    use std::marker::PhantomData;

    fn none<T>() -> Result<T> {
        Err(Error::unsupported("this build of flexring has no CUDA"))
    }

    pub fn gpu_count() -> Result<usize> {
        none()
    }

    pub fn facts(_gpu: usize) -> Result<RankGpu> {
        none()
    }

    /// Uninhabited, because this build has no CUDA.
    pub enum Vectors<'a, T> {
        #[expect(dead_code, reason = "never constructed")]
        None(std::convert::Infallible, PhantomData<&'a T>),
    }

    impl<'a, T> Vectors<'a, T> {
        pub fn new(_gpu: usize, _count: usize, _registrar: Option<&'a Communicator>) -> Result<Self> {
            none()
        }

        pub fn write(&mut self, _send: &[T], _receive: &[T]) -> Result<()> {
            none()
        }

        pub fn read(&mut self, _send: &mut [T], _receive: &mut [T]) -> Result<()> {
            none()
        }

        pub fn wait(&self) -> Result<()> {
            none()
        }

        pub fn capture(&mut self, _calls: usize, _call: GpuCall<'_>) -> Result<LaunchGraph> {
            none()
        }

        pub fn call(&mut self, _call: GpuCall<'_>) -> Result<()> {
            none()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::RankGpu;

    #[test]
    fn ranks_that_share_gpus_are_counted() {
        let rank_info = |host: &str, address: &str| RankInfo {
            host: host.to_owned(),
            gpu: Some(RankGpu { number: 0, address: address.to_owned(), name: "H200".to_owned() }),
            ..RankInfo::default()
        };
        assert_eq!(shared(&[rank_info("a", "1"), rank_info("a", "2"), rank_info("b", "1")]), None);
        assert_eq!(shared(&[RankInfo::default(), RankInfo::default()]), None);
        let line = "3 ranks share 1 GPU (H200)";
        assert_eq!(
            shared(&[rank_info("a", "1"), rank_info("a", "1"), rank_info("a", "1")]),
            Some(line.to_owned())
        );
        let line = "4 ranks share 2 GPUs (H200)";
        let two = ["a", "b"].map(|host| rank_info(host, "1"));
        assert_eq!(shared(&[two.clone(), two].concat()), Some(line.to_owned()));
    }
}
