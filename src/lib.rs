//! flexring: an all-reduce engine for clusters that are not symmetric.
//!
//! ARCHITECTURE.md explains how the modules fit together. Imports point one way: (1) `error`, `config`, `dtype`,
//! `float8`, `rank`, `call`, `fault`, `interrupt`, `wake`, `logging`, `secret`, `descriptor`, `named_file`, `trace`; (2) `plan`, `description`; (3) `process`, `cuda_driver`, `memory`, `device`, `transport`;
//! (4) `bootstrap`, `executor`; (5) `communicator`.

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
