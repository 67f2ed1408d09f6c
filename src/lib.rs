//! flexring: an all-reduce engine for clusters that are not symmetric.
//!
//! ARCHITECTURE.md explains how the modules fit together. Imports point one way: (1) `error`, `config`, `dtype`,
//! `float8`, `rank`, `call`, `fault`, `interrupt`, `wake`, `logging`, `secret`, `descriptor`, `named_file`, `trace`; (2) `plan`, `description`; (3) `process`, `cuda_driver`, `memory`, `device`, `transport`;
//! (4) `bootstrap`, `executor`; (5) `communicator`; (6) `c_api` and the `flexring` command.

// The library logs through `log`. Tests print why they are skipped.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests make descriptors in processes of their own")
)]

pub mod bootstrap;
#[allow(unsafe_code, reason = "C callers pass pointers")]
pub mod c_api;
pub mod call;
pub mod communicator;
pub mod config;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "declares functions of CUDA's driver")]
pub(crate) mod cuda_driver;
pub mod description;
mod descriptor;
pub mod descriptor_limit;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod device;
pub mod dtype;
pub mod error;
pub mod executor;
pub mod fault;
#[doc(hidden)]
pub mod fault_point;
pub mod float8;
#[cfg(test)]
#[allow(unsafe_code, reason = "counts allocations, and calls libFuzzer")]
mod fuzzing;
mod interrupt;
pub mod logging;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod memory;
mod named_file;
#[doc(hidden)]
pub mod peer_text;
pub mod plan;
#[allow(unsafe_code, reason = "calls the C library")]
mod process;
mod process_number;
pub mod rank;
pub mod secret;
#[cfg(test)]
mod test_effort;
#[cfg(test)]
mod test_port;
mod tls;
pub mod trace;
#[allow(unsafe_code, reason = "owns raw memory")]
pub mod transport;
pub mod wake;

pub use communicator::Communicator;
pub use dtype::{Boolean, DType, Element, ReduceOp};
pub use error::{Error, ErrorKind, Result};
