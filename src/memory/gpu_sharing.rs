//! Access to GPU memory across the processes of a node.
//!
//! Owns the interface between who shares such memory (a device) and who uses it (a transport).

use super::piece::Piece;
use crate::error::Result;
use crate::rank::Rank;
use std::any::Any;
use std::sync::Arc;

/// The name of a rank's GPU memory, by which other processes on the node open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// A random number of the owning process. Process ids do not work: containers on one node may have equal
    /// ones.
    pub process: u64,
    /// The GPU's number among those that the owning process sees.
    pub gpu: u32,
    /// The memory's address in the owning process.
    pub address: u64,
    /// The memory's length in bytes.
    pub len: u64,
    /// The driver's IPC handle.
    pub handle: [u64; 8],
    /// Random numbers that the owner has written to the start of the memory, by which others check that they
    /// reach it.
    pub pattern: [u64; 2],
}

/// GPU memory that peers on the node may read, and the peers' GPU memory that this rank may read.
pub trait Sharing: Send {
    /// This rank's memory. Peers may read it until this is dropped.
    fn own(&self) -> Piece;

    /// The name of this rank's memory.
    fn export(&self) -> Export;

    /// Opens a peer's memory, whose start its owner has not changed since it was exported, until this is
    /// dropped or [`close`](Self::close) is called.
    ///
    /// # Errors
    /// `Unsupported` if this process cannot reach it, or reads something else than its owner has written.
    fn open(&mut self, export: &Export) -> Result<Piece>;

    /// Closes all memory that was opened. No job may read it any more. `false` if some stays open until the
    /// process ends.
    fn close(&mut self) -> bool;

    /// Keeps this rank's memory allocated until the process ends, because peers may still have it open.
    fn abandon(&mut self);
}

/// Host memory for messages between the kernels of two ranks of a node that do not reach each other's GPU
/// memory. Each rank writes to its own.
pub struct NeighbourSlots {
    /// The rank at the other end.
    pub peer: Rank,
    /// This rank's slots for messages to the peer, which begin a page.
    pub own: Piece,
    /// The peer's slots for messages to this rank, likewise; `None` if they cannot be mapped.
    pub theirs: Option<Piece>,
    /// Whether the peer's are mapped for reading only. Not so in a process without shared memory.
    pub is_read_only: bool,
    /// What keeps all of them mapped.
    pub mapped: Arc<dyn Any + Send + Sync>,
}
