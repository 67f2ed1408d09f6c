//! All-reduce and other collectives for clusters that are not symmetric: uneven nodes, slow links, GPUs.
//!
//! A [`Communicator`] joins the ranks of a job, which a launcher (torchrun, `mpirun`, `srun`) or the environment describes.
//! Its methods are calls that all ranks make in the same order:
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
//! | vectors in GPU memory | `device::cuda::GpuBuffer`, example `all_reduce_gpu` |
//! | settings in the program | [`config::Config`], example `own_topology` |
//! | what went wrong | [`Error`] and its [`ErrorKind`] |
//!
//! Settings are environment variables that begin with `FLEXRING_`; the command `flexring env` lists them. Every wait for another
//! rank has a deadline, and every error names the rank that caused it.

// The library logs through `log`. Tests print why they are skipped.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests make descriptors in processes of their own")
)]

pub mod bootstrap;
pub mod communicator;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "declares functions of CUDA's driver")]
pub(crate) mod cuda_driver;
pub mod description;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod device;
pub mod executor;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod memory;
mod tls;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod transport;

pub use communicator::Communicator;
pub use flexring_core::dtype::{Boolean, DType, Element, ReduceOp};
pub use flexring_core::error::{Error, ErrorKind, Result};
pub use flexring_core::{
    call, config, descriptor_limit, dtype, error, fault, float8, logging, rank, secret, trace, wake,
};
pub(crate) use flexring_core::{descriptor, interrupt, named_file, process, process_number};
#[doc(hidden)]
pub use flexring_core::{fault_point, peer_text};
pub use flexring_plan as plan;

/// Counts what fuzz targets and other tests allocate.
#[cfg(test)]
#[global_allocator]
static MEASURING: flexring_testkit::fuzzing::MeasuringAllocator =
    flexring_testkit::fuzzing::MeasuringAllocator;
