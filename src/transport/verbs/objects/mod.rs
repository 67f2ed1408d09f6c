//! RAII owners of libibverbs objects.
//!
//! Each owner holds an `Arc` of its parents, so the types enforce the order of destruction: a queue pair is
//! destroyed before its protection domain and its completion queue, whichever owner is dropped first.
//!
//! | file | owns |
//! |---|---|
//! | `verb` | the names of verbs, and the error of a verb that failed |
//! | `bindings` | types and numbers of libibverbs |
//! | `library` | opening libibverbs, and its functions |
//! | `mlx5` | libmlx5: Data Direct |
//! | `fork_protection` | protection of registered memory when this process forks |
//! | `shim` | fault injection for tests |
//! | `handle` | the pointer to an object |
//! | `context` | an open device and its asynchronous events |
//! | `protection_domain` | a protection domain: allocating it, registering memory in it |
//! | `memory_region` | registered memory and its access flags |
//! | `completion` | a completion queue and its completion channel |
//! | `queue_pair` | a reliable connection, its states as types |
//! | `destruction` | destroying queue pairs in a thread |
//! | `work_request` | RDMA writes and reads, and their libibverbs form |

mod bindings;
mod completion;
mod context;
mod destruction;
mod fork_protection;
mod handle;
mod library;
mod memory_region;
mod mlx5;
mod protection_domain;
mod queue_pair;
mod shim;
mod verb;
mod work_request;

#[cfg(test)]
pub(super) use completion::WcStatus;
pub(super) use completion::{Completion, CompletionQueue};
pub(super) use context::{AsyncEvent, Context, PortAttributes};
pub(super) use destruction::Destruction;
pub(super) use library::Library;
pub(super) use memory_region::{AccessFlags, MemoryRegion};
pub(super) use protection_domain::ProtectionDomain;
#[cfg(test)]
pub(super) use queue_pair::RecordedCalls;
pub(super) use queue_pair::{Connected, Depth, Endpoint, Fresh, PathAttributes, QueuePair, QueuePairSpec};
#[cfg(test)]
pub(super) use shim::ModifiedQp;
pub(super) use shim::Shim;
#[cfg(test)]
pub(super) use verb::Verb;
pub(super) use work_request::{ReadRequest, WriteRequest};
