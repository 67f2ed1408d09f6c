//! How long an all-reduce takes according to the papers: one function for each of their equations.
//!
//! Owns closed forms only. Must not know schedules, programs or sub-chunks: the simulator runs those. Times
//! are seconds, lengths bytes, bandwidths bytes per second, inverse bandwidths seconds per byte. Arguments
//! are finite and positive, or 0 where a term is left out; nothing is checked.
//!
//! | module | paper |
//! |---|---|
//! | `tree` | Lee, Hwang, Shah and Cho, "FlexReduce", with the model of BlueConnect |
//! | `hierarchy` | Ueno and Yokota, "Exhaustive Study of Hierarchical AllReduce Patterns", CCGrid 2019, with Rabenseifner |
//! | `uniform` | Yuan, "On the Time Complexity of Common All-Reduce Methods", 2019 |
//! | `lower_bound` | the least that any schedule takes on a tree |

pub mod hierarchy;
pub mod lower_bound;
pub mod tree;
pub mod uniform;
