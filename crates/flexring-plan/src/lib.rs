//! Planning: which part of the vector is sent to which rank, in which order, and which rank adds it.
//!
//! topology ──planner──> schedule ──lowering──> program ──> pipeline. Owns every decision about data
//! movement. Must not know I/O, clocks, pointers or threads: all of it is pure, so tests run the same
//! pipeline as the executor, with random orders of completion.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod adaptation;
pub mod block_order;
pub mod calculation;
pub mod call_layout;
pub mod candidates;
pub mod choice;
pub mod device_program;
pub mod fabric;
pub mod fraction;
#[cfg(test)]
mod fuzz;
pub mod inline_list;
pub mod link_shares;
pub mod lowering;
pub mod node_pairs;
pub mod physical_links;
pub mod pipeline;
pub mod plan_file;
pub mod planner;
pub mod program;
pub mod schedule;
pub mod scratch_layout;
pub mod selection;
mod sized_plan;
pub mod sized_plans;
pub mod small_layout;
mod source_file;
pub mod span_map;
mod step_lists;
#[cfg(feature = "test-util")]
pub mod test_fabrics;
#[cfg(feature = "test-util")]
pub mod test_util;
pub mod thresholds;
pub mod topology;
pub mod topology_file;
pub mod traffic;
pub mod tuning;
pub mod verifier;

pub use flexring_core::rank::Rank;

/// Counts what fuzz targets and other tests allocate.
#[cfg(test)]
#[global_allocator]
static MEASURING: flexring_testkit::fuzzing::MeasuringAllocator =
    flexring_testkit::fuzzing::MeasuringAllocator;
