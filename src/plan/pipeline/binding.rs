//! The pipeline's input: the size of a call, and what each link can do in it.
//!
//! Owns plain descriptions that the executor fills in. Must not know programs or messages.

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

/// How one link delivers messages, and how many it carries at once. Constant for the life of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    /// Whether received messages are read in the sender's memory. Otherwise this rank posts receives.
    pub reads_in_place: bool,
    /// Most messages in flight in each direction.
    pub window: usize,
    /// Most slots that staged messages to the peer may hold.
    pub send_slots: usize,
    /// Most slots that messages from the peer may hold. Counted apart from `send_slots`: a receive is posted long
    /// before its message is due, and must not block an earlier message to the peer.
    pub recv_slots: usize,
}

/// Which accesses to the caller's memory a link cannot make directly in a call. Each such access goes through a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Staging {
    /// Sends from the input.
    pub input: bool,
    /// Sends from the output.
    pub output: bool,
    /// Receives into the output.
    pub recv: bool,
}
