//! Communicators as handles.

use super::status::{flexring_result, guarded, invalid_argument};
use super::unique_id::flexring_unique_id;
use crate::bootstrap::UniqueId;
use crate::communicator::Communicator;
use crate::error::Result;
use std::ffi::c_int;

/// A group of ranks that reduce together. Made by flexring_comm_init_*, ended by flexring_comm_free.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub struct flexring_comm {
    pub(super) communicator: Communicator,
}

/// The communicator behind a handle.
///
/// # Safety
/// `comm` is NULL or was returned by a `flexring_comm_init_*` function and not freed yet.
pub(super) unsafe fn borrow<'a>(comm: *const flexring_comm, function: &str) -> Result<&'a flexring_comm> {
    // SAFETY: the caller vouches that a pointer that is not NULL is a live handle, and handles are only shared.
    unsafe { comm.as_ref() }.ok_or_else(|| invalid_argument(format!("{function}: the communicator is NULL")))
}

/// Hands a new communicator out through `out`.
///
/// # Safety
/// `out` is NULL or may be written.
unsafe fn return_handle(
    out: *mut *mut flexring_comm,
    function: &str,
    make: impl FnOnce() -> Result<Communicator>,
) -> Result<()> {
    if out.is_null() {
        return Err(invalid_argument(format!("{function}: out is NULL")));
    }
    let handle = Box::new(flexring_comm { communicator: make()? });
    // SAFETY: `out` is not NULL, and the caller vouches that it may be written.
    unsafe { out.write(Box::into_raw(handle)) };
    Ok(())
}

/// Joins the world that the environment describes: FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR
/// and FLEXRING_MASTER_PORT, or the variables of torchrun, Open MPI, MPICH or Slurm. Returns when all ranks
/// are there and all links are ready.
///
/// A communicator works with one GPU: the one that FLEXRING_GPU names, or whose context is current on this thread, which
/// is made ready here; else the one of the first vector on a GPU, whose call is then slower than the others.
///
/// # Safety
/// `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_init_from_env(out: *mut *mut flexring_comm) -> flexring_result {
    // SAFETY: what the caller vouches for is what `return_handle` asks for.
    guarded(|| unsafe { return_handle(out, "flexring_comm_init_from_env", Communicator::from_env) })
}

/// Joins the world of `world` ranks that share `id`, as `rank`.
///
/// # Safety
/// `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_init_rank(
    out: *mut *mut flexring_comm,
    world: c_int,
    id: flexring_unique_id,
    rank: c_int,
) -> flexring_result {
    let make = || {
        let number = |value: c_int, name: &str| {
            usize::try_from(value)
                .map_err(|_| invalid_argument(format!("flexring_comm_init_rank: {name} is {value}")))
        };
        let (world, rank) = (number(world, "world")?, number(rank, "rank")?);
        Communicator::from_unique_id(world, &UniqueId::from_bytes(&id.internal)?, rank)
    };
    // SAFETY: what the caller vouches for is what `return_handle` asks for.
    guarded(|| unsafe { return_handle(out, "flexring_comm_init_rank", make) })
}

/// Writes this rank's number to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_rank(comm: *const flexring_comm, out: *mut c_int) -> flexring_result {
    // SAFETY: what the caller vouches for is what `tell` asks for.
    guarded(|| unsafe { write_number(comm, out, "flexring_comm_rank", Communicator::rank) })
}

/// Writes the number of ranks to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_size(comm: *const flexring_comm, out: *mut c_int) -> flexring_result {
    // SAFETY: what the caller vouches for is what `tell` asks for.
    guarded(|| unsafe { write_number(comm, out, "flexring_comm_size", Communicator::world_size) })
}

/// Writes a number that the communicator knows to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or may be written.
unsafe fn write_number(
    comm: *const flexring_comm,
    out: *mut c_int,
    function: &str,
    what: impl FnOnce(&Communicator) -> usize,
) -> Result<()> {
    // SAFETY: the caller vouches for the handle.
    let comm = unsafe { borrow(comm, function)? };
    if out.is_null() {
        return Err(invalid_argument(format!("{function}: out is NULL")));
    }
    let number = c_int::try_from(what(&comm.communicator))
        .map_err(|_| invalid_argument("the world is too large for an int"))?;
    // SAFETY: `out` is not NULL, and the caller vouches that it may be written.
    unsafe { out.write(number) };
    Ok(())
}

/// Waits until all calls that were made so far on this rank are over, also those that take effect in streams; returns what
/// ended the communicator, if anything has.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_synchronize(comm: *const flexring_comm) -> flexring_result {
    // SAFETY: the caller vouches for the handle.
    guarded(|| unsafe { borrow(comm, "flexring_comm_synchronize")? }.communicator.synchronize())
}

/// Returns what ended the communicator, if anything has, without waiting. Calls that take effect in streams return before
/// they are over, so this is how to hear that one has failed.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_status(comm: *const flexring_comm) -> flexring_result {
    // SAFETY: the caller vouches for the handle.
    guarded(|| unsafe { borrow(comm, "flexring_comm_status")? }.communicator.status())
}

/// Ends what all ranks do with this communicator, from any thread, at once: calls under way return
/// FLEXRING_ABORTED on every rank. The communicator must still be freed.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_abort(comm: *mut flexring_comm) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller vouches for the handle.
        unsafe { borrow(comm, "flexring_comm_abort")? }.communicator.abort();
        Ok(())
    })
}

/// Ends a communicator. Always works, after errors too; NULL is allowed. Waits for asynchronous calls that
/// are under way. Memory of flexring_alloc is freed by flexring_free before.
///
/// # Safety
/// `comm` is NULL or a live handle that no other thread uses; it is dead afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_free(comm: *mut flexring_comm) -> flexring_result {
    guarded(|| {
        if !comm.is_null() {
            // SAFETY: the caller vouches that the handle is live and used by nobody else, so it is owned here.
            drop(unsafe { Box::from_raw(comm) });
        }
        Ok(())
    })
}
