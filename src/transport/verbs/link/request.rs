//! The RDMA writes of a link, before they become work requests.

use super::super::control_buffer::EntryRange;
use super::super::registry::RegisteredMemory;
use crate::memory::Piece;
use std::sync::Arc;

/// What a request is about. Enough to make it again over another queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum RequestKind {
    Call {
        epoch: u64,
    },
    EagerCall {
        epoch: u64,
        len: usize,
    },
    Eager {
        epoch: u64,
        message: u64,
        len: usize,
    },
    Cts {
        epoch: u64,
        from: u64,
        to: u64,
    },
    Data {
        epoch: u64,
        message: u64,
    },
    Recovery {
        qp: usize,
    },
    Hello,
    /// A write as long as two of the longest packets, after a hello: a switch may pass short ones only.
    Trial,
    Goodbye,
    Probe,
}

impl RequestKind {
    /// The epoch that it belongs to, if it belongs to one.
    pub(super) fn epoch(self) -> Option<u64> {
        match self {
            Self::Call { epoch }
            | Self::EagerCall { epoch, .. }
            | Self::Eager { epoch, .. }
            | Self::Cts { epoch, .. }
            | Self::Data { epoch, .. } => Some(epoch),
            Self::Recovery { .. } | Self::Hello | Self::Trial | Self::Goodbye | Self::Probe => None,
        }
    }

    /// Whether writing this again includes writing `part` again, which is a write as
    /// [`CarriedWrites`](super::carried::CarriedWrites) has it.
    pub(super) fn includes(self, part: Self) -> bool {
        match (self, part) {
            (
                Self::EagerCall { epoch, .. },
                Self::Call { epoch: of } | Self::Eager { epoch: of, message: 0, .. },
            ) => epoch == of,
            (Self::Cts { epoch, from, to }, Self::Cts { epoch: of, from: part, .. }) => {
                epoch == of && (from..to).contains(&part)
            }
            _ => self == part,
        }
    }

    /// Whether the link waits for its completion.
    pub(super) fn needs_completion(self) -> bool {
        !matches!(self, Self::Call { .. } | Self::EagerCall { .. } | Self::Eager { .. } | Self::Cts { .. })
    }

    /// Whether it must reach the peer, over any queue pair.
    pub(super) fn must_arrive(self) -> bool {
        !matches!(self, Self::Hello | Self::Trial | Self::Probe)
    }
}

/// The bytes that a request writes, and their destination.
#[derive(Clone, Debug)]
pub(in super::super) enum Payload {
    /// A write of no bytes, for its immediate data or its completion.
    Empty,
    /// This range of the local side of the control buffer, to the same range of the peer's remote side.
    Control(EntryRange),
    /// A message, to the address in its CTS entry.
    Message {
        piece: Piece,
        region: Arc<RegisteredMemory>,
        address: u64,
        /// Remote key at the peer's rail.
        key: u32,
    },
}

/// An RDMA write to be posted.
#[derive(Clone, Debug)]
pub(in super::super) struct LinkRequest {
    /// Index of the queue pair.
    pub qp: usize,
    /// Sequence number on the queue pair.
    pub serial: u32,
    /// Packed immediate data; `None` for a probe and a drain marker, which the peer does not notice.
    pub imm: Option<u32>,
    pub payload: Payload,
    /// Whether the link waits for its completion.
    pub needs_completion: bool,
}
