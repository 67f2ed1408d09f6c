//! A call with its memory, as the communicator hands it to the executor.

use crate::call::{BlockCounts, Call, Collective};
use crate::device::Arithmetic;
use crate::dtype::DType;
use crate::memory::Piece;
use crate::plan::call_layout::CallFacts;
use crate::rank::Rank;
use std::sync::Arc;

/// A validated call with its memory.
#[derive(Clone, Debug)]
pub struct BoundCall {
    /// The call, as this rank announces it to its peers.
    pub call: Call,
    /// This rank's contribution: the input window of the program.
    pub input: Piece,
    /// The result's memory: the output window of the program.
    pub output: Piece,
    /// Memory for intermediate sums outside the output window, at least
    /// [`scratch_bytes`](crate::plan::scratch_layout::scratch_bytes); empty where the program makes none.
    pub scratch: Piece,
    /// Whether the elements that input and output have in common are the same memory; otherwise the two are
    /// disjoint.
    pub in_place: bool,
    /// How elements are combined.
    pub arithmetic: Arithmetic,
    /// Whether the sum is divided by the number of ranks.
    pub average: bool,
    /// Whether contributions are multiplied by the call's factor.
    pub prescale: bool,
    /// The lengths of the blocks of an all-to-all; `None` for other collectives.
    pub blocks: Option<BlockCounts>,
}

impl BoundCall {
    /// What ranks announce of it.
    pub(super) fn announced(&self) -> AnnouncedCall<'_> {
        AnnouncedCall { call: &self.call, blocks: self.blocks.as_ref() }
    }
}

/// What ranks announce of a call to each other.
#[derive(Clone, Copy, Debug)]
pub struct AnnouncedCall<'a> {
    /// The call.
    pub call: &'a Call,
    /// The lengths of the blocks of an all-to-all; `None` for other collectives.
    pub blocks: Option<&'a BlockCounts>,
}

impl AnnouncedCall<'_> {
    /// The call as it is announced to `peer`.
    pub(super) fn to(&self, peer: Rank) -> Call {
        let count = self.lists().map_or(self.call.count, |blocks| blocks.sent_to(peer));
        Call { count, ..*self.call }
    }

    /// The call that `peer` must announce to this rank.
    pub(super) fn expected(&self, peer: Rank) -> Call {
        let count = self.lists().map_or(self.call.count, |blocks| blocks.received_from(peer));
        Call { count, ..*self.call }
    }

    /// The blocks, if they differ in length, so that ranks announce the length of each.
    fn lists(&self) -> Option<&BlockCounts> {
        self.blocks.filter(|_| self.call.collective == Collective::AllToAllV)
    }

    /// Whether `theirs`, which `peer` has announced, is the call that it must be.
    pub(super) fn agrees_with(&self, theirs: &Call, peer: Rank) -> bool {
        let expected = self.expected(peer);
        // A rank that exchanges no elements has no memory, which could be on a GPU.
        let no_elements = self.blocks.is_some() && self.to(peer).count == 0 && expected.count == 0;
        let same_memory = no_elements || expected.on_gpu == theirs.on_gpu;
        same_memory && expected.count == theirs.count && expected.agrees_with(theirs)
    }
}

/// One send or receive of a group.
#[derive(Clone, Copy, Debug)]
pub struct PeerMessage {
    /// Whether this rank sends it.
    pub is_send: bool,
    /// The rank at the other end.
    pub peer: Rank,
    /// The element type.
    pub dtype: DType,
    /// The elements to send, or the memory to receive into.
    pub piece: Piece,
}

/// A validated group of sends and receives.
#[derive(Clone, Debug)]
pub struct BoundGroup {
    /// The group, as this rank reports it.
    pub call: Call,
    /// In the order in which messages with equal peers and directions match those of the peer.
    pub messages: Arc<[PeerMessage]>,
}

/// The number under which a program was installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramNumber(pub(super) usize);

/// How a call is executed.
#[derive(Clone, Copy, Debug)]
pub enum CallPath {
    /// Through the mailboxes: every rank reads every rank's vector, without a program.
    Small,
    /// By a program.
    Program {
        /// The number that [`Executor::install`](super::Executor::install) returned.
        number: ProgramNumber,
        /// What the layout of the call depends on.
        facts: CallFacts,
    },
}
