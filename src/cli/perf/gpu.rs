//! Vectors on GPUs.
//!
//! Owns which GPU a rank takes, its vectors there, and the calls on them. Must not know what is in them, nor what is timed.

#[cfg(not(feature = "cuda"))]
pub use absent::{Vectors, facts, gpus};
#[cfg(feature = "cuda")]
pub use present::{Vectors, facts, gpus};

use super::options::{PerfOptions, VectorDevice};
use super::report::RankInfo;
use flexring::bootstrap::local_rank;
use flexring::config::{Config, environment};
use flexring::{Error, Result};
use std::collections::BTreeSet;

/// The GPU that rank `rank` takes, if vectors are to be on one: the one of the settings, else that of its number among the
/// ranks of its node.
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

/// How many GPUs there are here, at least one.
///
/// # Errors
/// `Unsupported` if there is none, with what mends that.
pub fn check() -> Result<usize> {
    const MEND: &str = "vectors cannot be on GPUs (`nvidia-smi` says what NVIDIA's driver finds; leave --device cuda out to \
                        measure on the host)";
    match gpus() {
        Ok(0) => {
            Err(Error::new(flexring::ErrorKind::Unsupported, format!("this process sees no GPU: {MEND}")))
        }
        Ok(gpus) => Ok(gpus),
        Err(error) => Err(Error::new(error.kind(), format!("{}: {MEND}", error.message()))),
    }
}

/// `4 ranks share 1 GPU (NVIDIA H200)`, if ranks share any.
pub fn shared(ranks: &[RankInfo]) -> Option<String> {
    let ranks = ranks.iter().filter_map(|rank_info| Some((&rank_info.host, rank_info.gpu.as_ref()?)));
    let gpus: BTreeSet<_> = ranks.clone().map(|(host, gpu)| (host, &gpu.address)).collect();
    let names: BTreeSet<&str> = ranks.clone().map(|(_, gpu)| &*gpu.name).collect();
    let (ranks, many) = (ranks.count(), gpus.len());
    let names: Vec<&str> = names.into_iter().collect();
    (many < ranks).then(|| {
        format!("{ranks} ranks share {many} GPU{} ({})", if many == 1 { "" } else { "s" }, names.join(", "))
    })
}

#[cfg(feature = "cuda")]
mod present {
    use crate::perf::check::Placement;
    use crate::perf::collective::Extent;
    use crate::perf::report::RankGpu;
    use flexring::call::Collective;
    use flexring::device::cuda::{self, GpuBuffer};
    use flexring::{Communicator, Element, ReduceOp, Result};

    pub use cuda::gpus;

    /// What other ranks are told of a GPU.
    ///
    /// # Errors
    /// `System` if it cannot be asked.
    pub fn facts(gpu: usize) -> Result<RankGpu> {
        let facts = cuda::gpu_facts(gpu)?;
        Ok(RankGpu { number: gpu as u32, address: facts.address, name: facts.name })
    }

    /// Two vectors on a GPU.
    pub struct Vectors<T: Element> {
        send: GpuBuffer<T>,
        receive: GpuBuffer<T>,
    }

    impl<T: Element> Vectors<T> {
        /// Vectors for up to `count` elements.
        ///
        /// # Errors
        /// `System` if there is not enough memory.
        pub fn new(gpu: usize, count: usize) -> Result<Self> {
            Ok(Self { send: GpuBuffer::new(gpu, count)?, receive: GpuBuffer::new(gpu, count)? })
        }

        /// Copies the beginning of both to the GPU.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn write(&mut self, send: &[T], receive: &[T]) -> Result<()> {
            self.send.slice_mut(0..send.len()).write(send)?;
            self.receive.slice_mut(0..receive.len()).write(receive)
        }

        /// Copies the beginning of both from the GPU.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn read(&mut self, send: &mut [T], receive: &mut [T]) -> Result<()> {
            self.send.slice_mut(0..send.len()).read(send)?;
            self.receive.slice_mut(0..receive.len()).read(receive)
        }

        /// Waits until what is enqueued is over.
        ///
        /// # Errors
        /// `System` if the GPU fails.
        pub fn wait(&self) -> Result<()> {
            self.receive.synchronize()
        }

        /// Enqueues a call.
        ///
        /// # Errors
        /// What it, or one before it, fails with.
        pub fn call(
            &mut self,
            comm: &Communicator,
            collective: Collective,
            op: ReduceOp,
            root: usize,
            Extent { whole, part }: Extent,
            placement: Placement,
        ) -> Result<()> {
            let given = if collective == Collective::AllGather { part } else { whole };
            let result = match (collective, placement) {
                (Collective::ReduceScatter, Placement::Apart) => part,
                _ => whole,
            };
            let send = &self.send.slice_mut(0..given);
            let receive = &mut self.receive.slice_mut(0..result);
            match (collective, placement) {
                (Collective::AllReduce, Placement::Apart) => comm.all_reduce_into_on_gpu(send, receive, op),
                (Collective::AllReduce, Placement::InPlace) => comm.all_reduce_on_gpu(receive, op),
                (Collective::ReduceScatter, Placement::Apart) => {
                    comm.reduce_scatter_on_gpu(send, receive, op)
                }
                (Collective::ReduceScatter, Placement::InPlace) => {
                    comm.reduce_scatter_in_place_on_gpu(receive, op)
                }
                (Collective::AllGather, Placement::Apart) => comm.all_gather_on_gpu(send, receive),
                (Collective::AllGather, Placement::InPlace) => comm.all_gather_in_place_on_gpu(receive),
                (Collective::Broadcast, Placement::Apart) => comm.broadcast_into_on_gpu(send, receive, root),
                (Collective::Broadcast, Placement::InPlace) => comm.broadcast_on_gpu(receive, root),
                (Collective::Reduce, Placement::Apart) => comm.reduce_into_on_gpu(send, receive, op, root),
                (Collective::Reduce, Placement::InPlace) => comm.reduce_on_gpu(receive, op, root),
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use crate::perf::check::Placement;
    use crate::perf::collective::Extent;
    use crate::perf::report::RankGpu;
    use flexring::call::Collective;
    use flexring::{Communicator, Error, ErrorKind, ReduceOp, Result};
    use std::marker::PhantomData;

    fn none<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, "this build of flexring has no CUDA"))
    }

    pub fn gpus() -> Result<usize> {
        none()
    }

    pub fn facts(_gpu: usize) -> Result<RankGpu> {
        none()
    }

    /// No vectors.
    pub enum Vectors<T> {
        #[expect(dead_code, reason = "there are none")]
        None(std::convert::Infallible, PhantomData<T>),
    }

    impl<T> Vectors<T> {
        pub fn new(_gpu: usize, _count: usize) -> Result<Self> {
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

        pub fn call(
            &mut self,
            _comm: &Communicator,
            _collective: Collective,
            _op: ReduceOp,
            _root: usize,
            _extent: Extent,
            _placement: Placement,
        ) -> Result<()> {
            none()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::RankGpu;

    #[test]
    fn ranks_that_share_gpus_are_told() {
        let rank_info = |host: &str, address: &str| RankInfo {
            host: host.to_owned(),
            gpu: Some(RankGpu { number: 0, address: address.to_owned(), name: "H200".to_owned() }),
            ..RankInfo::default()
        };
        assert_eq!(shared(&[rank_info("a", "1"), rank_info("a", "2"), rank_info("b", "1")]), None);
        assert_eq!(shared(&[RankInfo::default(), RankInfo::default()]), None);
        let words = "3 ranks share 1 GPU (H200)";
        assert_eq!(
            shared(&[rank_info("a", "1"), rank_info("a", "1"), rank_info("a", "1")]),
            Some(words.to_owned())
        );
        let words = "4 ranks share 2 GPUs (H200)";
        let two = ["a", "b"].map(|host| rank_info(host, "1"));
        assert_eq!(shared(&[two.clone(), two].concat()), Some(words.to_owned()));
    }
}
