//! What the tests of flexring's crates share: how much they do, ports, forked children, and fuzzing.
//!
//! Depends on no crate of flexring, so that the unit tests of each of them can use it.

#![allow(clippy::print_stdout, reason = "tests say what they did")]
#![allow(clippy::disallowed_methods, reason = "tests make descriptors in processes of their own")]

pub mod effort;
#[allow(unsafe_code, reason = "calls the C library")]
mod forked_child;
#[allow(unsafe_code, reason = "counts allocations, and calls libFuzzer")]
pub mod fuzzing;
pub mod port;

pub use forked_child::in_forked_child;
