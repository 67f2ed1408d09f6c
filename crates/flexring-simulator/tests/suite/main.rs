//! The tests of this crate from outside, in one binary: a module per subject.

mod choices;
mod cost_model;
mod fabrics;
mod random_trees;
mod simulator;
