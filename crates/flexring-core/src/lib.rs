//! The core types of flexring and the services that all of its other crates use.
//!
//! Owns errors, settings, element types, what a call is, failures and wake-ups, descriptors, timelines, and
//! what a library must respect in a process that is not its own. For flexring's own crates: programs use the
//! crate `flexring`.

// The library logs through `log`. Tests print why they are skipped.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests make descriptors in processes of their own")
)]

pub mod call;
pub mod config;
pub mod descriptor;
pub mod descriptor_limit;
pub mod dtype;
pub mod error;
pub mod fault;
#[doc(hidden)]
pub mod fault_point;
pub mod float8;
pub mod interrupt;
pub mod logging;
pub mod named_file;
pub mod peer_text;
#[allow(unsafe_code, reason = "calls the C library")]
pub mod process;
pub mod process_number;
pub mod rank;
pub mod secret;
pub mod trace;
pub mod wake;
