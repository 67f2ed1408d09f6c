//! Handles of communicators.
//!
//! A handle is a number that is used once, not an address: a handle that was destroyed or never existed is recognised, and
//! nothing that a caller passes is dereferenced.

use crate::comm::Comm;
use crate::status::{Failure, Outcome};
use crate::types::{ncclComm, ncclComm_t};
use std::collections::BTreeMap;
use std::ptr::without_provenance_mut;
use std::sync::{Arc, PoisonError, RwLock};

/// The live communicators of this process, by handle, and how many handles there have been.
struct HandleTable {
    live: BTreeMap<usize, Arc<Comm>>,
    created: usize,
}

static HANDLES: RwLock<HandleTable> = RwLock::new(HandleTable { live: BTreeMap::new(), created: 0 });

/// Distance between handles. They look like addresses of an object, because programs test bits of pointers.
const STEP: usize = 64;

/// A new handle.
pub(crate) fn insert(comm: Arc<Comm>) -> ncclComm_t {
    let mut table = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    table.created += 1;
    let handle = table.created * STEP;
    table.live.insert(handle, comm);
    without_provenance_mut::<ncclComm>(handle)
}

/// The communicator with this handle.
pub(crate) fn find(handle: ncclComm_t) -> Outcome<Arc<Comm>> {
    let table = HANDLES.read().unwrap_or_else(PoisonError::into_inner);
    table.live.get(&handle.addr()).cloned().ok_or_else(|| unknown(handle))
}

/// Takes a handle out of use.
pub(crate) fn remove(handle: ncclComm_t) -> Outcome<Arc<Comm>> {
    let mut table = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    table.live.remove(&handle.addr()).ok_or_else(|| unknown(handle))
}

fn unknown(handle: ncclComm_t) -> Failure {
    if handle.is_null() {
        return Failure::argument("the communicator is NULL");
    }
    Failure::argument(format!("{handle:p} is no communicator: it was destroyed or aborted, or never made"))
}
