//! The thinking wing: which part of the vector goes where, in which order, added by whom.
//!
//! topology ──planner──> schedule ──lowering──> program ──> pipeline. Everything here is pure: no I/O, no
//! clock, no pointer, no thread. What the executor runs, the tests run with a random order of completions.

#![forbid(unsafe_code)]

pub mod captions;
pub mod drawing;
pub mod fraction;
pub mod lowering;
pub mod pipeline;
pub mod plan_file;
pub mod planner;
pub mod program;
pub mod schedule;
pub mod selection;
mod span_map;
pub mod topology;
pub mod topology_file;
pub mod traffic;
pub mod verifier;

pub use crate::rank::Rank;
