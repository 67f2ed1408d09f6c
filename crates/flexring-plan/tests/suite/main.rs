//! The tests of this crate from outside, in one binary: a module per subject.

mod device_program;
mod pipeline;
mod planners;
