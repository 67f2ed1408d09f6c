//! Planning: which part of the vector is sent to which rank, in which order, and which rank adds it.
//!
//! topology ──planner──> schedule ──lowering──> program ──> pipeline. Owns every decision about data
//! movement. Must not know I/O, clocks, pointers or threads: all of it is pure, so tests run the same
//! pipeline as the executor, with random orders of completion.
//!
//! | module | owns |
//! |---|---|
//! | `topology`, `fabric` | the cluster as a tree, or as a graph of links that form no tree |
//! | `topology_file` | parsers for descriptions of a cluster |
//! | `fraction` | exact points of the vector, and their rounding to elements |
//! | `schedule` | the table of levels and groups that is any algorithm |
//! | `planner` | one function from topology to schedule for each algorithm |
//! | `selection` | the algorithm for the shape of a topology; plans of short vectors |
//! | `candidates` | the plans among which times decide |
//! | `calculation` | the time of a plan by a formula |
//! | `choice` | which candidate a length uses, by calculated and simulated times |
//! | `sized_plans` | all plans of a communicator with the lengths that use them |
//! | `thresholds` | lengths and numbers of ranks at which a call takes another way |
//! | `tuning` | profiles of measured clusters |
//! | `adaptation`, `node_pairs` | when to plan again because links have changed; the order of measuring them |
//! | `physical_links`, `link_shares`, `traffic` | the model of links; how ranks share them; what a plan sends over them |
//! | `lowering` | a schedule as the program of each rank |
//! | `program`, `plan_file` | the form of a program; a schedule in a file |
//! | `device_program` | a program as a list for a kernel |
//! | `call_layout`, `scratch_layout`, `small_layout`, `block_order` | where the elements and blocks of one call are |
//! | `pipeline` | which sub-chunk moves next |
//! | `verifier` | proofs that programs are correct |
//! | `inline_list`, `span_map`, `step_lists`, `sized_plan`, `source_file` | small types of the above |

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
