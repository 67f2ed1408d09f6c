//! The pipeline's input: the size of a call, and what each link can do in it.
//!
//! Owns plain descriptions that the executor fills in.

use std::ops::Range;

/// Size and layout of one call, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Elements of the vector.
    pub count: u64,
    /// Elements of a sub-chunk, at least 1.
    pub subchunk: u64,
    /// Span boundaries are multiples of this many elements.
    pub align: u64,
    /// Whether input and output are the same memory.
    pub in_place: bool,
}

/// Where the blocks are that one rank sends and receives in an all-to-all, in elements that this rank numbers
/// for itself: both ends of a link agree on the length of a block only. The block that stays on the rank has
/// the same elements in both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockLayout {
    /// By rank, the block that goes to it.
    pub sends: Vec<Range<u64>>,
    /// By rank, the block that comes from it.
    pub receives: Vec<Range<u64>>,
}

/// How one link delivers messages, and how many it carries at once. Constant for the life of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    /// Whether received messages are read in the sender's memory. Otherwise this rank posts receives.
    pub reads_in_place: bool,
    /// Most messages in flight in each direction.
    pub window: usize,
    /// Most slots that staged messages to the peer may hold.
    pub send_slots: usize,
    /// Most slots that messages from the peer may hold. Counted apart from `send_slots`: a receive is posted
    /// long before its message is due, and must not block an earlier message to the peer.
    pub recv_slots: usize,
}

/// Which accesses to the caller's memory a link cannot make directly in a call. Each such access goes through
/// a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staging {
    /// Sends from the input.
    pub input: bool,
    /// Sends from the output and from scratch memory.
    pub output: bool,
    /// Receives into them.
    pub recv: bool,
}
