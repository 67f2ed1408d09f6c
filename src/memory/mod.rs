//! Memory: who may touch which bytes, and from where.
//!
//! Owns the arena (a rank's memory that peers on the node can read), the pool of slots in it, and the
//! [`Piece`] that everything below the communicator is handed instead of a raw pointer. Must not know ranks'
//! programs or what the bytes mean.

mod piece;

pub use piece::Piece;
