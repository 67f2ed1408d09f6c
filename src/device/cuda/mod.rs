//! GPUs: what runs on them, and how it gets there.

pub mod batch;
pub mod image;
mod nvrtc;
