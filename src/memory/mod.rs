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
pub use piece::Piece;
pub(crate) use piece::{lend, lend_in_place};
