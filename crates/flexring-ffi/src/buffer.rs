//! Memory that peers read directly, and registration of other memory.

use super::comm::{borrow, borrow_in_creator, flexring_comm};
use super::status::{check_pointer, flexring_result, guarded};
use flexring::Communicator;
use flexring::internal::memory::{MemorySpace, Piece};
use flexring_core::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Allocates `bytes` bytes, zeroed and aligned to a page, in memory that the other ranks of this node read
/// directly, so that calls on it copy nothing. Free it with flexring_free. Forked children do not have this
/// memory: access ends them by SIGSEGV.
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
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, "flexring_alloc")? };
        check_pointer(out, "flexring_alloc", "out")?;
        let start = comm.communicator.lease(bytes)?;
        // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
        unsafe { out.write(start.as_ptr().cast()) };
        Ok(())
    })
}

/// Frees memory that flexring_alloc returned. NULL is allowed. Has no effect in a forked child.
///
/// # Safety
/// `comm` is NULL or a live handle; no call uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_free(comm: *mut flexring_comm, memory: *mut c_void) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let Some(comm) = (unsafe { borrow_in_creator(comm, "flexring_free")? }) else {
            return Ok(());
        };
        if memory.is_null() || comm.communicator.end_lease(memory.cast()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "flexring_free: {memory:p} was not returned by flexring_alloc of this communicator, or was freed before"
        )))
    })
}

/// Registers `bytes` bytes of the program's own memory with the RDMA devices that the communicator uses, and
/// memory of a GPU with the kernels of the other ranks of its node. Calls on it,
/// or on parts of it, then copy and register nothing. The memory must stay allocated until
/// flexring_deregister was called with the same address and length as often as flexring_register, or until
/// the communicator is freed. Memory of flexring_alloc is registered already.
///
/// With FLEXRING_REGISTER_SHARED=1, the other ranks of this node read it directly, too: its whole pages, if
/// they are private memory without a file and 64 KiB or more, are replaced by others with the same contents,
/// which forked children do not have: access ends them by SIGSEGV. While this function, flexring_deregister
/// and the freeing of the communicator run, nothing may write the memory and no call may use it, except that
/// flexring_deregister allows calls of its communicator. Nothing else may rely on its pages while it is
/// registered, such as another library that registers them with a device.
///
/// # Safety
/// `comm` is NULL or a live handle; `memory` points to as many bytes, which may be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_register(
    comm: *mut flexring_comm,
    memory: *mut c_void,
    bytes: usize,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, "flexring_register")? };
        // SAFETY: the caller guarantees the memory.
        let piece = unsafe { memory_range(&comm.communicator, memory, bytes, "flexring_register")? };
        comm.communicator.register_piece(piece)
    })
}

/// Undoes one flexring_register of exactly this memory, whose contents stay. If it is shared
/// (FLEXRING_REGISTER_SHARED), waits for the running call of this communicator that uses it, for
/// FLEXRING_TIMEOUT_MS at most; if it returns FLEXRING_TIMEOUT, the memory is still registered. Calls that
/// are in the queue use it later as memory that is not registered. For memory of a GPU, waits for kernels
/// that may access it. Otherwise running calls are not affected.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_deregister(
    comm: *mut flexring_comm,
    memory: *mut c_void,
    bytes: usize,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, "flexring_deregister")? };
        // SAFETY: the memory is only compared with what is registered.
        let piece = unsafe { memory_range(&comm.communicator, memory, bytes, "flexring_deregister")? };
        comm.communicator.deregister_piece(piece)
    })
}

/// The `bytes` bytes at `memory`, on the host or on a GPU.
///
/// # Safety
/// The memory is valid for every use that is made of the piece.
unsafe fn memory_range(
    communicator: &Communicator,
    memory: *mut c_void,
    bytes: usize,
    function: &str,
) -> Result<Piece> {
    let start = NonNull::new(memory.cast())
        .ok_or_else(|| Error::invalid_argument(format!("{function}: memory is NULL")))?;
    if bytes == 0 || (memory as usize).checked_add(bytes).is_none() {
        return Err(Error::invalid_argument(format!(
            "{function}: {bytes} bytes at {memory:p} are not a memory range"
        )));
    }
    let located = communicator.memory_of(start.as_ptr(), bytes);
    let place = located.map_err(|error| error.context(format_args!("{function}")))?;
    // SAFETY: the caller guarantees the memory, and `memory_of` returned where it is.
    Ok(unsafe { piece_in(place, start, bytes) })
}

/// The `bytes` bytes at `start`, which are in `memory`.
///
/// # Safety
/// As for [`Piece::new`], and the bytes are in `memory`.
pub(super) unsafe fn piece_in(memory: MemorySpace, start: NonNull<u8>, bytes: usize) -> Piece {
    // SAFETY: the caller's contract is the one of both constructors.
    unsafe {
        match memory {
            MemorySpace::Host => Piece::new(start, bytes),
            MemorySpace::Gpu(gpu) => Piece::on_gpu(start, bytes, gpu),
        }
    }
}
