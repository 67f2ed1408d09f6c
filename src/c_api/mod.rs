//! The C ABI: `include/flexring.h`, made from these files by cbindgen.
//!
//! Owns the boundary where nothing is trusted: every pointer, count and number is checked before it is used,
//! no panic gets out, and outputs are written last and only on success. Must not hold any logic of its own:
//! each function checks, calls the Rust API, and turns its result into a code and a sentence.

pub mod buffer;
pub mod collectives;
pub mod comm;
pub mod status;
pub mod types;
pub mod unique_id;
