//! Owners of verbs objects: what must be freed, in an order that the types enforce.
//!
//! Each owner holds its parents, so a queue pair outlives neither its domain nor its completion queue, whatever is
//! dropped first. Nothing here knows links, messages or ranks beyond naming them in errors.
//!
//! | file | owns |
//! |---|---|
//! | `verb` | the names of verbs, and what a failing one says |
//! | `shim` | where tests make verbs fail |
//! | `context` | an open device |
//! | `domain` | a protection domain and the memory registered in it |
//! | `completion` | a completion queue with the channel to sleep on |
//! | `queue_pair` | a reliable connection, its states as types |

mod completion;
mod context;
mod protection_domain;
mod queue_pair;
mod shim;
mod verb;

pub(super) use completion::{Completion, CompletionQueue, WcStatus};
pub(super) use context::{AsyncEvent, Context, PortAttributes};
pub(super) use protection_domain::{AccessFlags, MemoryRegion, ProtectionDomain};
#[cfg(test)]
pub(super) use queue_pair::RecordedCalls;
pub(super) use queue_pair::{
    Connected, Depth, Endpoint, Fresh, PathAttributes, QueuePair, ReadRequest, WriteRequest,
};
pub(super) use shim::Shim;
#[cfg(test)]
pub(super) use verb::Verb;

use std::ptr::NonNull;

/// A verbs object by its address; in tests it may be inert, an object of no device, on which every verb succeeds
/// and does nothing.
struct Handle<T>(Option<NonNull<T>>);

impl<T> Handle<T> {
    /// What a verb returned, if it returned anything.
    fn returned(raw: *mut T) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self(Some(raw)))
    }

    #[cfg(test)]
    fn inert() -> Self {
        Self(None)
    }

    /// The address, unless this is inert.
    fn raw(&self) -> Option<*mut T> {
        self.0.map(NonNull::as_ptr)
    }
}

// SAFETY: a handle is an address; libibverbs' objects may be used from any thread, one at a time for each object,
// which the exclusive borrows of the owners' methods and the locks within libibverbs see to.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above. Shared owners (contexts, domains, regions) are only read, or used through verbs that lock.
unsafe impl<T> Sync for Handle<T> {}
