//! Predictions about plans: for choosing between them, for the command and for tests.
//!
//! Owns virtual time, the closed forms of the papers, the order of all plans for one topology, and drawings.
//! Must not know I/O: all of it is a pure function of topologies, plans and profiles.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod comparison;
pub mod cost_model;
pub mod drawing;
#[cfg(test)]
mod fuzz;
pub mod level_descriptions;
pub mod simulator;
pub mod trials;

/// Counts what fuzz targets and other tests allocate.
#[cfg(test)]
#[global_allocator]
static MEASURING: flexring_testkit::fuzzing::MeasuringAllocator =
    flexring_testkit::fuzzing::MeasuringAllocator;
