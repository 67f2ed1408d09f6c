//! All-reduce and other collectives for clusters that are not symmetric: uneven nodes, slow links, GPUs.
//!
//! A [`Communicator`] joins the ranks of a job, which a launcher (torchrun, `mpirun`, `srun`) or the
//! environment describes. Its methods are calls that all ranks make in the same order:
//!
//! ```no_run
//! use flexring::{Communicator, ReduceOp};
//!
//! fn main() -> flexring::Result<()> {
//!     let comm = Communicator::from_env()?;
//!     let mut gradient = comm.alloc::<f32>(1 << 20)?;
//!     gradient.fill(comm.rank() as f32);
//!     comm.all_reduce(&mut gradient, ReduceOp::Avg)
//! }
//! ```
//!
//! | for | see |
//! |---|---|
//! | ranks that are threads of this process | [`Communicator::local`] |
//! | a world by a unique id, without a launcher | [`Communicator::from_unique_id`] |
//! | calls that overlap computation | [`Communicator::all_reduce_async`], example `overlapped` |
//! | sends and receives | [`Communicator::group`], example `halo_exchange` |
//! | vectors of different lengths | [`Communicator::all_to_all_v`], example `uneven_gather` |
//! | vectors in GPU memory | `gpu::GpuBuffer`, example `all_reduce_gpu`; which GPU: [`Communicator::local_rank`] |
//! | memory from elsewhere, without copies | [`Communicator::register`] |
//! | a communicator of some of the ranks | [`Communicator::split`] |
//! | going on without ranks that died | [`Communicator::shrink`] |
//! | settings in the program | [`config::Config`], example `own_topology` |
//! | what went wrong | [`Error`] and its [`ErrorKind`] |
//!
//! Settings are environment variables that begin with `FLEXRING_`; the command `flexring env` lists them.
//! Every wait for another rank has a deadline, and an error that another rank caused names it.

// The library logs through `log`. Tests print why they are skipped.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests make descriptors in processes of their own")
)]
#![cfg_attr(
    not(all(feature = "cuda", feature = "verbs")),
    allow(dead_code, unused_imports, reason = "some of what a feature uses is compiled without it")
)]

mod bootstrap;
mod communicator;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "declares functions of CUDA's driver")]
mod cuda_driver;
mod description;
#[allow(unsafe_code, reason = "owns raw memory")]
mod device;
mod executor;
#[doc(hidden)]
pub mod internal;
#[allow(unsafe_code, reason = "owns raw memory")]
mod memory;
mod tls;
#[allow(unsafe_code, reason = "owns raw memory")]
mod transport;

pub use bootstrap::{Identity, UniqueId, create_unique_id};
pub use communicator::{
    AdaptationStatistics, CallTimes, Communicator, NodeLinkStatistics, Operation, Owned, OwnedOperation,
    RailStatistics, Registered, Request,
};
pub use flexring_core::dtype::{Boolean, DType, Element, ReduceOp};
pub use flexring_core::error::{Error, ErrorKind, Result};
pub use flexring_core::float8::{F8E4M3, F8E5M2};
pub use flexring_core::rank::Rank;
pub use memory::Buffer;

pub(crate) use flexring_core::{
    call, descriptor, descriptor_limit, dtype, error, fault, fault_point, float8, interrupt, logging,
    named_file, peer_text, process, process_number, rank, secret, trace, wake,
};
pub(crate) use flexring_plan as plan;

/// The settings, and the types of their values.
///
/// ```
/// use flexring::Communicator;
/// use flexring::config::{Algorithm, Config};
///
/// # fn main() -> flexring::Result<()> {
/// // As FLEXRING_ALGO=ring and FLEXRING_TOPOLOGY.
/// let topology = Some("3@10G+1@1G".to_owned());
/// let config = Config { algo: Algorithm::Ring, topology, ..Config::from_env()? };
/// let ranks = Communicator::local_with(&config, 4)?;
/// # drop(ranks);
/// # Ok(())
/// # }
/// ```
pub mod config {
    pub use flexring_core::config::{
        AdaptiveRouting, Algorithm, Config, Dimensions, Family, GdrLevel, GpuDirect, ListeningPorts, LogArea,
        LogFilter, LogLevel, Lowering, Registration, SecretText, Servers, Simd, Size, Switch,
        TransportChoice,
    };
    pub(crate) use flexring_core::config::{LONGEST_TIME, environment};
}

/// Vectors in the memory of NVIDIA GPUs.
///
/// ```no_run
/// use flexring::gpu::{GpuBuffer, gpu_count};
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::from_env()?;
/// let mut vector = GpuBuffer::<f32>::new(comm.local_rank() % gpu_count()?, 1 << 20)?;
/// vector.write(&vec![1.0; 1 << 20])?;
/// // Is enqueued in the vector's stream and returns.
/// comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum)?;
/// vector.synchronize()?;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "cuda")]
pub mod gpu {
    pub use crate::communicator::RegisteredOnGpu;
    pub use crate::device::cuda::{
        GpuBuffer, GpuCapture, GpuGraph, GpuInfo, GpuSlice, GpuVector, gpu_count, gpu_info,
    };
}

/// The cluster as plans see it: a tree of switches, nodes and ranks.
///
/// ```no_run
/// # fn main() -> flexring::Result<()> {
/// let comm = flexring::Communicator::from_env()?;
/// let topology = comm.topology();
/// println!("{} ranks on {} nodes", topology.world(), topology.nodes());
/// # Ok(())
/// # }
/// ```
pub mod topology {
    pub use flexring_plan::topology::{Nics, Topology, Uplink, Vertex, VertexId, VertexKind};
}

/// Counts what fuzz targets and other tests allocate.
#[cfg(test)]
#[global_allocator]
static MEASURING: flexring_testkit::fuzzing::MeasuringAllocator =
    flexring_testkit::fuzzing::MeasuringAllocator;
