//! Memory that peers on the node read directly.

use super::comm::{borrow, flexring_comm};
use super::status::{flexring_result, guarded, refused};
use std::ffi::c_void;

/// Takes `bytes` bytes, zeroed and aligned to a page, from memory that the other ranks of this node read
/// directly: reducing it copies nothing. Freed by flexring_free.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_alloc(
    comm: *mut flexring_comm,
    bytes: usize,
    out: *mut *mut c_void,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller vouches for the handle.
        let comm = unsafe { borrow(comm, "flexring_alloc")? };
        if out.is_null() {
            return Err(refused("flexring_alloc: out is NULL"));
        }
        let start = comm.communicator.lease(bytes)?;
        // SAFETY: `out` is not NULL, and the caller vouches that it may be written.
        unsafe { out.write(start.as_ptr().cast()) };
        Ok(())
    })
}

/// Gives memory back that flexring_alloc returned. NULL is allowed.
///
/// # Safety
/// `comm` is NULL or a live handle; nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_free(comm: *mut flexring_comm, memory: *mut c_void) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller vouches for the handle.
        let comm = unsafe { borrow(comm, "flexring_free")? };
        if memory.is_null() || comm.communicator.end_lease(memory.cast()) {
            return Ok(());
        }
        Err(refused(format!(
            "flexring_free: {memory:p} was not returned by flexring_alloc of this communicator, or was freed before"
        )))
    })
}
