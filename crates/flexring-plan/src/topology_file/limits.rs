//! The largest descriptions that are accepted.
//!
//! Owns the limits that bound memory and recursion.

/// Most ranks of a description, and most names of all lists in a file. Far above any cluster, and small
/// enough to keep in memory.
pub(super) const MAX_RANKS: usize = 1_000_000;

/// Most NICs of a node: as many as the ranks of a node divide.
pub(super) const MAX_NICS: u32 = 64;

/// Most nested switches, the root not counted.
pub(super) const MAX_DEPTH: usize = 64;
