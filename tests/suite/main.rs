//! The integration tests, in one binary: a module per subject, linked once.
//!
//! `cargo nextest run --test suite` runs each test in a process of its own, so that a test that hangs or
//! breaks its process costs that test alone.

#![allow(clippy::print_stderr, reason = "a test reports what it skips")]
#![allow(clippy::disallowed_methods, reason = "Rust opens the standard descriptors of its programs")]

mod harness;
mod programs;
mod rank_processes;

mod adapters;
mod all_reduce;
mod allocations;
mod architecture;
mod benchmarks;
mod c_api;
mod collectives;
mod descriptions;
mod encryption;
mod exchanges;
mod failures;
mod fault_matrix;
mod float_environment;
mod groups;
mod header;
mod imports;
mod joining;
mod launchers;
mod namespaces;
mod planners;
mod python;
mod registered;
mod reproducible;
mod resource_leaks;
mod shrink;
mod split;
mod tracing;
mod waiting;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cudarc;
#[cfg(feature = "cuda")]
mod graphs;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod mapped_on_gpu;
#[cfg(feature = "cuda")]
mod registered_on_gpu;

mod command;
#[cfg(feature = "cuda")]
mod cuda_perf;
mod doctor;
mod first_command;
mod limits;
mod many_communicators;
mod many_ranks;
mod perf;
mod plan_command;
mod security;
mod settings_docs;
mod simulate_command;
mod tune_command;
mod wheel;
