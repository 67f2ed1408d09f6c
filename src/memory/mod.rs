//! Memory: who may access which bytes, and from where.
//!
//! Owns the arena (a rank's memory that peers on the node can read), the buffers that users allocate from it,
//! and the [`Piece`], which everything below the communicator gets instead of a raw pointer.
//!
//! | file | owns |
//! |---|---|
//! | `piece` | pointers with a checked length |
//! | `arena` | a rank's shared memory |
//! | `arena_file` | the files of arenas |
//! | `reservation` | addresses of which only the front is accessible |
//! | `peer_arena` | the shared memory of a neighbour |
//! | `free_list` | which ranges of an arena are free |
//! | `buffer` | vectors that users allocate |
//! | `shared_range` | memory of users whose pages lie in an arena |
//! | `machine` | how much memory this process may have |
//! | `mappings` | the kernel's list of mappings |
//! | `registrar` | registering memory with devices |
//! | `gpu_sharing` | access to the GPU memory of other ranks on the node, and memory for messages without it |
//! | `unforked_map` | memory for devices that forked children do not have |
//! | `probe` | whether memory can be read |

mod arena;
mod arena_file;
mod buffer;
mod free_list;
mod gpu_sharing;
mod machine;
mod mappings;
mod peer_arena;
mod piece;
mod probe;
mod registrar;
mod reservation;
mod shared_range;
#[cfg(any(feature = "cuda", feature = "verbs"))]
mod unforked_map;

pub use arena::Arena;
pub use arena_file::{memfd_failure, shared_memory_room};
pub use buffer::Buffer;
pub use gpu_sharing::{Export, NeighbourSlots, Sharing};
pub use peer_arena::PeerArena;
pub(crate) use piece::{LONG_COPY, Loan, copy_short, lend, lend_in_place, populate, read_bytes, write_bytes};
pub use piece::{MemorySpace, Piece};
pub(crate) use probe::ReadablePages;
pub use registrar::Registrar;
pub use shared_range::SharedRange;
#[cfg(all(test, feature = "verbs"))]
pub(crate) use unforked_map::is_unforked;
#[cfg(any(feature = "cuda", feature = "verbs"))]
pub(crate) use unforked_map::map_unforked;
#[cfg(all(test, any(feature = "cuda", feature = "verbs")))]
pub(crate) use unforked_map::mapping_flags;
