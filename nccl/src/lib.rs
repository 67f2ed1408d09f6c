//! NCCL's C ABI over flexring: the shared library `libflexring_nccl.so`.
//!
//! Owns what differs between NCCL's interface and flexring's: handles, groups, communicators that are made in
//! the background, error codes, and the current GPU of a thread. It calls the functions of flexring's C ABI,
//! which check buffers, counts and types. Must not know how data moves. docs/nccl.md lists what is supported.
//!
//! Every function is exported twice, as `ncclX` and `pncclX`, as NCCL does for profilers: they replace the
//! first name and call the second.

#![allow(unsafe_code, reason = "C callers pass pointers")]
#![allow(non_camel_case_types, non_snake_case, reason = "named as in nccl.h")]

mod calls;
mod collectives;
mod comm;
mod config;
mod cuda;
mod group;
mod group_calls;
mod handles;
mod init;
mod lifecycle;
mod memory;
mod red_op;
mod refused;
mod status;
mod threads;
mod types;

pub use refused::REFUSED;
