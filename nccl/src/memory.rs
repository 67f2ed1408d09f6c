//! Memory on the current GPU, and the registration of buffers.

use crate::comm::Comm;
use crate::cuda;
use crate::handles;
use crate::status::{Failure, check, check_out, nccl_functions};
use crate::types::{ncclComm_t, ncclResult_t};
use flexring_ffi::buffer::{flexring_deregister, flexring_register};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut, without_provenance_mut};
use std::sync::{MutexGuard, PoisonError};

nccl_functions! {
    /// Allocates memory on the current GPU, which neighbours can open.
    fn ncclMemAlloc / pncclMemAlloc(ptr: *mut *mut c_void, size: usize) {
        check_out(ptr, "ptr")?;
        let start = if size == 0 { null_mut() } else { cuda::allocate(size)? };
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { ptr.write(start) };
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Frees memory of `ncclMemAlloc`. NULL is allowed.
    fn ncclMemFree / pncclMemFree(ptr: *mut c_void) {
        if !ptr.is_null() {
            cuda::free(ptr)?;
        }
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Registers a buffer with the RDMA devices of a communicator, if it has any.
    fn ncclCommRegister / pncclCommRegister(comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void) {
        let comm = handles::find(comm)?;
        check_out(handle, "handle")?;
        let live = comm.ready()?;
        // SAFETY: the handle is live as long as its owner; the caller guarantees the buffer.
        check(unsafe { flexring_register(live.handle(), buff, size) })?;
        let number = lock(&comm).insert((buff.expose_provenance(), size));
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { handle.write(without_provenance_mut(number)) };
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Undoes one `ncclCommRegister`. NULL is allowed.
    fn ncclCommDeregister / pncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) {
        let comm = handles::find(comm)?;
        if handle.is_null() {
            return Ok(ncclResult_t::ncclSuccess);
        }
        let live = comm.made()?;
        let removed = lock(&comm).live.remove(&handle.addr());
        let (start, size) = removed.ok_or_else(|| {
            Failure::argument(format!("{handle:p} is no handle of ncclCommRegister of this communicator"))
        })?;
        // SAFETY: the handle is live as long as its owner; the memory is only compared.
        let outcome =
            check(unsafe { flexring_deregister(live.handle(), with_exposed_provenance_mut(start), size) });
        if outcome.as_ref().is_err_and(|failure| failure.code == ncclResult_t::ncclTimeout) {
            // A call uses the memory, which is still registered: the program may try again.
            lock(&comm).live.insert(handle.addr(), (start, size));
        }
        outcome?;
        Ok(ncclResult_t::ncclSuccess)
    }
}

/// The registered memory of a communicator, as address and length, by handle.
#[derive(Default)]
pub(crate) struct Registrations {
    live: BTreeMap<usize, (usize, usize)>,
    /// How many there have been: handles are not used again, so that one that was undone is recognised.
    created: usize,
}

impl Registrations {
    /// A new handle.
    fn insert(&mut self, memory: (usize, usize)) -> usize {
        self.created += 1;
        self.live.insert(self.created, memory);
        self.created
    }
}

fn lock(comm: &Comm) -> MutexGuard<'_, Registrations> {
    comm.registered.lock().unwrap_or_else(PoisonError::into_inner)
}
