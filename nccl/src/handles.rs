//! Handles of communicators.
//!
//! Owns that a communicator stays while a thread looks it up: programs abort communicators that other threads
//! use.

use crate::comm::Comm;
use crate::status::{Failure, Outcome};
use crate::types::ncclComm_t;
use flexring_ffi::handles::HandleTable;
use std::sync::{Arc, PoisonError, RwLock};

/// The live communicators of this process.
static COMMS: HandleTable<Arc<Comm>> = HandleTable::new("communicator", "destroyed or aborted");

/// Held while a communicator is looked up, and exclusively while its handle is taken out of use.
static LOOKUPS: RwLock<()> = RwLock::new(());

/// A new handle.
pub(crate) fn insert(comm: Arc<Comm>) -> Outcome<ncclComm_t> {
    let handle = COMMS.insert(comm).map_err(|(_, error)| Failure::system(error.message()))?;
    Ok(handle.cast())
}

/// The communicator with this handle.
pub(crate) fn find(handle: ncclComm_t) -> Outcome<Arc<Comm>> {
    let _lookup = LOOKUPS.read().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: no thread takes the communicator during the lookup.
    let found = unsafe { COMMS.get(handle.cast_const().cast()) };
    found.cloned().map_err(|error| Failure::argument(error.message()))
}

/// Takes a handle out of use.
pub(crate) fn remove(handle: ncclComm_t) -> Outcome<Arc<Comm>> {
    let _taking = LOOKUPS.write().unwrap_or_else(PoisonError::into_inner);
    let taken = COMMS.take(handle.cast_const().cast());
    taken.map(|comm| *comm).map_err(|error| Failure::argument(error.message()))
}
