//! Memory that peers on the node read directly.

use super::comm::{borrow, flexring_comm};
use super::status::{flexring_result, guarded, invalid_argument};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::memory::{Memory, Piece};
use std::ffi::c_void;
use std::ptr::NonNull;

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
            return Err(invalid_argument("flexring_alloc: out is NULL"));
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
        Err(invalid_argument(format!(
            "flexring_free: {memory:p} was not returned by flexring_alloc of this communicator, or was freed before"
        )))
    })
}

/// Registers `bytes` bytes of the program's own memory with the RDMA devices that the communicator uses: calls on
/// it, or on parts of it, then copy and register nothing. It must stay allocated until flexring_deregister with the
/// same address and length, as often as it was registered, or until the communicator is freed. Without RDMA devices
/// nothing is done. Memory of flexring_alloc is registered already.
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
        // SAFETY: the caller vouches for the handle.
        let comm = unsafe { borrow(comm, "flexring_register")? };
        // SAFETY: the caller vouches for the memory.
        let piece = unsafe { memory_range(&comm.communicator, memory, bytes, "flexring_register")? };
        comm.communicator.register_piece(piece)
    })
}

/// Takes one flexring_register of exactly this memory back. Calls that are under way end well.
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
        // SAFETY: the caller vouches for the handle.
        let comm = unsafe { borrow(comm, "flexring_deregister")? };
        // SAFETY: the memory is only compared with what is registered.
        let piece = unsafe { memory_range(&comm.communicator, memory, bytes, "flexring_deregister")? };
        comm.communicator.deregister_piece(piece)
    })
}

/// Memory that a program names, wherever it is.
///
/// # Safety
/// What is done with the piece must be allowed with the memory.
unsafe fn memory_range(
    communicator: &Communicator,
    memory: *mut c_void,
    bytes: usize,
    function: &str,
) -> Result<Piece> {
    let start =
        NonNull::new(memory.cast()).ok_or_else(|| invalid_argument(format!("{function}: memory is NULL")))?;
    if bytes == 0 || (memory as usize).checked_add(bytes).is_none() {
        return Err(invalid_argument(format!("{function}: {bytes} bytes at {memory:p} are no memory")));
    }
    let located = communicator.memory_of(start.as_ptr(), bytes);
    let place = located.map_err(|error| error.context(format_args!("{function}")))?;
    // SAFETY: the caller vouches for the memory, and the driver says where it is.
    Ok(unsafe { piece_in(place, start, bytes) })
}

/// The bytes at an address, whoever's they are.
///
/// # Safety
/// As for [`Piece::new`]; they are where is said.
pub(super) unsafe fn piece_in(memory: Memory, start: NonNull<u8>, bytes: usize) -> Piece {
    // SAFETY: as this function's.
    unsafe {
        match memory {
            Memory::Host => Piece::new(start, bytes),
            Memory::Gpu(gpu) => Piece::on_gpu(start, bytes, gpu),
        }
    }
}
