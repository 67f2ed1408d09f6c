//! The page where a rank names allocations on its GPU to its neighbours.
//!
//! Owns its layout. Must not know when it is written and read.

use crossbeam_utils::CachePadded;
use std::sync::atomic::AtomicU64;

/// Allocations of a rank that the others know at a time.
pub(super) const MEMORIES: usize = 64;
/// Ranks of a node that have such allocations open.
pub(super) const READERS: usize = 16;

/// Written by the rank itself and read by its neighbours. All zeros at first.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct NoticePage {
    /// How often `named` has changed, or parts were sent.
    pub changes: CachePadded<AtomicU64>,
    /// Whether the rank has a socket for descriptors of parts; and its address, which is written before.
    pub has_socket: AtomicU64,
    pub socket: [AtomicU64; 4],
    pub named: [Notice; MEMORIES],
    /// By index on the node and number: which allocation of a neighbour this rank has open, as its owner
    /// counts them.
    pub open: [[AtomicU64; MEMORIES]; READERS],
}

/// An allocation of the page's owner.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Notice {
    /// Counts the allocations that the owner has named; 0 while there is none. Written first and last.
    pub count: AtomicU64,
    pub bytes: AtomicU64,
    /// How many parts it has, whose descriptors come by the socket; 0 if it has the driver's handle.
    pub parts: AtomicU64,
    pub handle: [AtomicU64; 8],
}
