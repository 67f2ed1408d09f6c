//! The C ABI. cbindgen generates `include/flexring.h` from these files.
//!
//! Owns the boundary to callers in C: every pointer, count and enum value is checked before it is used, no
//! panic crosses the boundary, and outputs are written last and only on success. Must not have any logic of
//! its own: each function checks its arguments, calls the Rust API, and turns the result into a code and a
//! message.

#![allow(unsafe_code, reason = "C callers pass pointers")]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod async_collectives;
pub mod buffer;
pub mod checks;
pub mod collectives;
pub mod comm;
pub mod exchanges;
#[cfg(test)]
mod fuzz;
pub mod groups;
pub mod handles;
pub mod interrupt;
pub mod statistics;
pub mod status;
pub mod types;
pub mod unique_id;

/// Counts what the fuzz target allocates.
#[cfg(test)]
#[global_allocator]
static MEASURING: flexring_testkit::fuzzing::MeasuringAllocator =
    flexring_testkit::fuzzing::MeasuringAllocator;
