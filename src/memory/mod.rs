//! Memory: who may touch which bytes, and from where.
//!
//! Owns the arena (a rank's memory that peers on the node can read), the buffers that users take from it, and
//! the [`Piece`] that everything below the communicator is handed instead of a raw pointer. Must not know
//! ranks' programs or what the bytes mean.

mod arena;
mod buffer;
mod piece;

pub use arena::{Arena, PeerArena};
pub use buffer::Buffer;
pub use piece::{Memory, Piece};
pub(crate) use piece::{lend, lend_in_place};

use crate::error::Result;

/// Whether there is memory at an address, for whatever use.
pub(crate) fn is_mapped(at: *const u8) -> bool {
    let page = rustix::param::page_size();
    let start = at.map_addr(|address| address / page * page);
    let mut resident = 0u8;
    // SAFETY: the address is only looked up, and the answer for one page is one byte.
    unsafe { libc::mincore(start.cast_mut().cast(), 1, &raw mut resident) == 0 }
}

/// What names a rank's memory on a GPU to its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The process that has it.
    pub process: u32,
    /// The number of the GPU among those that this process sees, and where it has the memory.
    pub gpu: u32,
    /// As above.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What other processes open it by.
    pub handle: [u64; 8],
}

/// Memory on a GPU that neighbours may read, and theirs, which this rank may read.
pub trait Sharing: Send {
    /// What is shared with the neighbours. They read it for as long as this lives.
    fn own(&self) -> Piece;

    /// How it is named to them.
    fn export(&self) -> Export;

    /// Opens a neighbour's, for as long as this lives.
    ///
    /// # Errors
    /// `Unsupported` if this process cannot reach it.
    fn open(&mut self, export: &Export) -> Result<Piece>;

    /// Closes all that was opened. No job reads it any more.
    fn close(&mut self);

    /// Leaves the memory to the end of the process, because there are neighbours that may still have it open.
    fn abandon(&mut self);
}

/// Something that devices must be told of memory that they shall reach.
pub trait Registrar: Send + Sync {
    /// Registers memory until it is deregistered as often. It must stay what it is until then.
    ///
    /// # Errors
    /// `System` if the system or a device refuses.
    fn register(&self, piece: Piece) -> Result<()>;

    /// Takes one registration of exactly this memory back. Operations under way keep it until they are over.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered.
    fn deregister(&self, piece: Piece) -> Result<()>;

    /// Registers memory that is usable without, only slower; a refusal is told in the log.
    fn tell(&self, piece: Piece) {
        if let Err(error) = self.register(piece) {
            log::warn!("{} bytes are not registered and move more slowly: {}", piece.len(), error.message());
        }
    }

    /// Takes back what [`tell`](Self::tell) did.
    fn forget(&self, piece: Piece) {
        if let Err(error) = self.deregister(piece) {
            log::debug!("{} bytes were not registered: {}", piece.len(), error.message());
        }
    }
}
