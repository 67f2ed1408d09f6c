//! Collectives that kernels run themselves, from the first exchange to the last byte, without the host.
//!
//! Owns the memory that the kernels of a node's ranks share, how a collective is described to a kernel, and
//! what kernels report. docs/gpu.md explains the protocol. Must not know links, plans, nor who waits for a
//! call.
//!
//! | file | owns |
//! |---|---|
//! | `layout` | the memory that host and kernels share |
//! | `listed` | the items of a plan, and the links that their messages take |
//! | `memory` | who allocates and clears it, and how long it lives |
//! | `shape` | a collective as blocks that ranks send and receive |
//! | `transfers` | messages between pairs of ranks |
//! | `status` | what kernels report, and how the host ends them |

mod layout;
mod listed;
mod memory;
mod shape;
mod status;
mod transfers;

pub(super) use layout::CollectiveParameters;
pub(crate) use layout::{CALL_WORDS, CollectiveLayout, MOST_PLACES, SLOT};
pub(crate) use listed::{ListMemory, ListedProgram};
pub(crate) use memory::CollectiveMemory;
pub(crate) use shape::{BlockCall, Blocks, Place, Vector};
pub(crate) use status::{CollectiveFailure, CollectiveWait, Waited};
pub(crate) use transfers::{TransferTable, VectorTransfer, tagged};
