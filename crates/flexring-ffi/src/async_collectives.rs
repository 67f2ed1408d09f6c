//! The asynchronous forms of all-reduce, reduce-scatter, all-gather, broadcast and reduce.

use super::collectives::{RawCall, flexring_request};
use super::comm::flexring_comm;
use super::status::flexring_result;
use super::types::{flexring_dtype, flexring_op};
use std::ffi::{c_int, c_void};

/// Starts flexring_all_reduce and returns at once. The call runs after all earlier calls of this
/// communicator. The buffers must not be used until flexring_wait has returned for the request. On a GPU the
/// call takes effect in the default stream.
///
/// # Safety
/// As for flexring_all_reduce, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_reduce_async(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_reduce_async", comm, send, recv, dtype };
    // SAFETY: the caller guarantees handle and `out`, and the buffers until the request is over.
    unsafe { call.start(out, |buffers| buffers.all_reduce(count, op)) }
}

/// Starts flexring_reduce_scatter and returns at once, as flexring_all_reduce_async does for
/// flexring_all_reduce.
///
/// # Safety
/// As for flexring_reduce_scatter, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_reduce_scatter_async(
    send: *const c_void,
    recv: *mut c_void,
    recv_count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_reduce_scatter_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.reduce_scatter(recv_count, op)) }
}

/// Starts flexring_all_gather and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_all_gather, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_gather_async(
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_gather_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.all_gather(send_count)) }
}

/// Starts flexring_broadcast and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_broadcast, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
/// or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_broadcast_async(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_broadcast_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.broadcast(count, root)) }
}

/// Starts flexring_reduce and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_reduce, but the buffers must stay valid until flexring_wait has returned; `out` is NULL or
/// points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_reduce_async(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    root: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_reduce_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.reduce(count, op, root)) }
}
